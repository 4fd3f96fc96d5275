"""Effects of claims on width, depth and muParam."""

from __future__ import annotations

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, extrapolated, parts
from lab.analysis.judging.evidence import ArmTables, Choice, ComparisonGroup, MissingRunsError
from lab.analysis.judging.quantities import best_of_largest, log10
from lab.analysis.judging.verdicts import DEPTH, WIDTH


def full_mup_trains_at_one(full: ArmTables, standard: ArmTables) -> Effects:
    """The best loss + 0.3 minus the loss at learning rate 1, at each size.

    The control: with the standard parametrization LR 1 is unstable, at every size.
    """
    if 1.0 not in full.lrs:
        raise MissingRunsError("no runs at learning rate 1")
    return Qualified(-full.lost_by(1.0), control=Qualified(standard.lost_by(1.0)))


def _gain(root: ArmTables, inverse: ArmTables) -> pd.DataFrame:
    """Best loss with 1/sqrt(head width) minus that with 1/head width, at each of several sizes."""
    if len(root.sizes) < 2:
        raise MissingRunsError("models of one size only")
    return root.table("best") - inverse.table("best")


def inverse_scale_helps_the_smallest(root: ArmTables, inverse: ArmTables) -> Effects:
    """Best loss with 1/sqrt(head width) minus that with 1/head width."""
    return _gain(root, inverse).iloc[:, 0]


def inverse_scale_hurts_the_largest(root: ArmTables, inverse: ArmTables) -> Effects:
    """Best loss with 1/head width minus that with 1/sqrt(head width)."""
    return -_gain(root, inverse).iloc[:, -1]


COMPARABLE_SIZES = 1.3  # largest ratio between models that grew in different ways


def grown(group: ComparisonGroup, *ways: str) -> list[ArmTables]:
    """Arms that grow in ``depth``, in ``width`` or in ``both``, from the smallest shape, which they have in common."""
    shapes = {(curve[DEPTH], curve[WIDTH]) for curve in group.curves.values()}
    depth, width = min(shapes)
    choices: dict[str, Choice] = {
        "depth": lambda curve: curve[WIDTH] == width,
        "width": lambda curve: curve[DEPTH] == depth,
        "both": lambda curve: (curve[WIDTH] == width) == (curve[DEPTH] == depth),
    }
    arms = group.arms(*(choices[way] for way in ways))
    if min(len(arm.sizes) for arm in arms) < 2:
        raise MissingRunsError("no models that grow in depth and others that grow in width", arms_exist=False)
    largest = [arm.sizes[-1] for arm in arms]
    if max(largest) > COMPARABLE_SIZES * min(largest):
        raise MissingRunsError("models that grow in depth and in width end at unlike sizes")
    return arms


def both_is_best(deep: ArmTables, wide: ArmTables, both: ArmTables) -> Effects:
    """Best loss of depth, and of width, minus that of both."""
    best = best_of_largest(both)
    return parts(depth_alone=best_of_largest(deep) - best, width_alone=best_of_largest(wide) - best)


def both_extrapolates_best(deep: ArmTables, wide: ArmTables, both: ArmTables) -> Effects:
    """Error of the largest size's best loss for growth in depth, and in width, minus that for growth in both.

    It is the absolute error of log10 of the loss, extrapolated by a straight line in log-log.
    """
    error = _error(both)
    return parts(depth_alone=_error(deep) - error, width_alone=_error(wide) - error)


def _error(arm: ArmTables) -> pd.Series:
    best = log10(arm.table("best"))
    if len(arm.sizes) < 3:
        raise MissingRunsError("an extrapolation takes three sizes")
    smaller = best.iloc[:, :-1]
    return (extrapolated(smaller, arm.sizes[-1]) - best.iloc[:, -1]).abs()
