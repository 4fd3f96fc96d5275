"""Claims on width, depth and muParam."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from lab.analysis.judging.effects import (
    Effects,
    Qualified,
    drift,
    drifts,
    extrapolated,
    log10,
    slope,
    slope_over_size,
)
from lab.analysis.judging.evidence import ArmTables, Choice, ComparisonGroup, MissingRunsError
from lab.analysis.judging.verdicts import DEPTH, HALF_DECADE, ON, QK, TO_SPARE, WIDTH, ChooseArms, claim

NAME, BASE = "parametrization.name", "parametrization.base_width"
STANDARD, SIMPLE, FULL, INVERSE = (
    {NAME: name} for name in ("standard", "mup_simple", "mup_full", "inverse_head_width")
)
NO_BETTER = (-0.01, math.inf)

mup = partial(claim, frees=[NAME, BASE], holds={QK: ON}, sweep="mup")
mup_transfer = partial(mup, shown_in="best_loss_with_size")


@mup_transfer(
    "8",
    "with muP (simple) the best learning rate stays within half a decade over sizes",
    arms=[SIMPLE, STANDARD],
    side=HALF_DECADE,
    unit="decades",
)
def mup_holds_the_optimum(simple: ArmTables, standard: ArmTables) -> Effects:
    """Log10 of eta* (vertex of a parabola) minus that of the smallest size, at each larger one.

    The control: of the standard parametrization it moves by more than half a decade.
    """
    return drift(simple)._replace(control=drifts(standard))


@mup_transfer(
    "8",
    "with the standard parametrization the best learning rate falls with size",
    arms=[STANDARD],
    cause=[WIDTH],
    unit="decades per decade",
)
def standard_optimum_falls(standard: ArmTables) -> Effects:
    """Minus the slope of log10 eta* (vertex of a parabola) over log10 size."""
    return -slope_over_size(standard, "log_best")


def _moves_the_optimum(simple: ArmTables, standard: ArmTables) -> Qualified:
    """Decades by which muP has the higher eta* at the largest size: where it has not, muP did nothing."""
    table = simple.table("log_best") - standard.table("log_best")
    grain = (simple.grain("log_best") ** 2 + standard.grain("log_best") ** 2) ** 0.5
    return Qualified(table.iloc[:, -1], grain.iloc[:, -1])


@mup_transfer(
    "8",
    "muP (simple) does not lower the best loss by 0.01 or more, at any size",
    arms=[SIMPLE, STANDARD],
    side=NO_BETTER,
)
def mup_does_not_lower_the_loss(simple: ArmTables, standard: ArmTables) -> Effects:
    """Best loss over the learning rates, muP minus standard, at each size; the control: muP has the higher eta*."""
    return Qualified(simple.table("best") - standard.table("best"), control=_moves_the_optimum(simple, standard))


@mup_transfer(
    "8",
    "muP (simple) does not lower LR sensitivity by a tenth or more, at any size",
    arms=[SIMPLE, STANDARD],
    side=(0.9, math.inf),
    unit="ratio",
)
def mup_does_not_lower_sensitivity(simple: ArmTables, standard: ArmTables) -> Effects:
    """S with muP over S with the standard parametrization, at each size; the control: muP has the higher eta*."""
    return Qualified(simple.table("total") / standard.table("total"), control=_moves_the_optimum(simple, standard))


@claim(
    "E.4",
    "without qk-layernorm muP (simple) still keeps the best learning rate within half a decade",
    arms=[SIMPLE, STANDARD],
    frees=[NAME, BASE],
    holds={QK: None},
    side=HALF_DECADE,
    unit="decades",
    sweep="mup",
)
def mup_holds_the_optimum_without_qk_layernorm(simple: ArmTables, standard: ArmTables) -> Effects:
    """As with qk-layernorm."""
    return drift(simple)._replace(control=drifts(standard))


@claim(
    "E.4",
    "without qk-layernorm muP (simple) still loses the top LR, at every size",
    arms=[{QK: None}, {QK: ON}],
    frees=[QK],
    holds=SIMPLE,
    sweep="mup",
    unit=TO_SPARE,
)
def mup_needs_qk_layernorm(without: ArmTables, with_it: ArmTables) -> Effects:
    """Loss at the top learning rate minus the best one + 0.3, at each size; the control: with it, it is below."""
    return Qualified(without.lost_by(without.top), control=-Qualified(with_it.lost_by(with_it.top)))


@mup("E.5", "with full muP and qk-layernorm LR 1 trains, at every size", arms=[FULL, STANDARD], unit=TO_SPARE)
def full_mup_trains_at_one(full: ArmTables, standard: ArmTables) -> Effects:
    """The best loss + 0.3 minus the loss at learning rate 1, at each size.

    The control: with the standard parametrization LR 1 is lost, at every size.
    """
    if 1.0 not in full.lrs:
        raise MissingRunsError("no runs at learning rate 1")
    return Qualified(-full.lost_by(1.0), control=Qualified(standard.lost_by(1.0)))


@mup(
    "E.5",
    "at the largest size the best losses of full and simple muP are within 0.01",
    arms=[FULL, SIMPLE, STANDARD],
    side=(-0.01, 0.01),
)
def full_mup_is_no_better(full: ArmTables, simple: ArmTables, standard: ArmTables) -> Effects:
    """Best loss over the learning rates, full minus simple, at the largest size.

    The control: simple muP has a higher eta* than the standard parametrization.
    """
    difference = (full.table("best") - simple.table("best")).iloc[:, -1]
    return Qualified(difference, control=_moves_the_optimum(simple, standard))


scale = partial(claim, arms=[STANDARD, INVERSE], frees=[NAME], sweep="attention_scale")


def _gain(root: ArmTables, inverse: ArmTables) -> pd.DataFrame:
    """Best loss with 1/sqrt(head width) minus that with 1/head width, at each of several sizes."""
    if len(root.sizes) < 2:
        raise MissingRunsError("models of one size only")
    return root.table("best") - inverse.table("best")


@scale("E.6", "attention scaled by 1/head width is better at the smallest size", holds={QK: ON})
def inverse_scale_helps_the_smallest(root: ArmTables, inverse: ArmTables) -> Effects:
    """Best loss with 1/sqrt(head width) minus that with 1/head width."""
    return _gain(root, inverse).iloc[:, 0]


@scale("E.6", "attention scaled by 1/head width is worse at the largest size", holds={QK: ON})
def inverse_scale_hurts_the_largest(root: ArmTables, inverse: ArmTables) -> Effects:
    """Best loss with 1/head width minus that with 1/sqrt(head width)."""
    return -_gain(root, inverse).iloc[:, -1]


@scale(
    "E.6",
    "attention scaled by 1/head width still loses the top LR without qk-layernorm",
    arms=[{QK: None}, {QK: ON}],
    frees=[QK],
    holds=INVERSE,
    unit=TO_SPARE,
)
def inverse_scale_needs_qk_layernorm(without: ArmTables, with_it: ArmTables) -> Effects:
    """Loss at the top learning rate minus the best one + 0.3, largest size; the control: with it, it is below."""
    lost, kept = (arm.lost_by(arm.top).iloc[:, -1] for arm in (without, with_it))
    return Qualified(lost, control=-Qualified(kept))


COMPARABLE_SIZES = 1.3  # largest ratio between models that grew in different ways

shape = partial(claim, frees=[DEPTH], holds={QK: ON}, sweep="depth_width")
shape_without = partial(claim, frees=[DEPTH], holds={QK: None}, sweep="depth_width")


def _grown(*ways: str) -> ChooseArms:
    """Arms that grow in ``depth``, in ``width`` or in ``both``, from the shape that all of them start with."""

    def choose(group: ComparisonGroup) -> list[ArmTables]:
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

    return choose


DEPTH_AND_WIDTH, ALL_WAYS = _grown("depth", "width"), _grown("depth", "width", "both")


@shape(
    "7", "LR sensitivity rises faster with depth than with width", arms=DEPTH_AND_WIDTH, unit="nats/token per decade"
)
def depth_raises_sensitivity_faster(deep: ArmTables, wide: ArmTables) -> Effects:
    """Slope of S over log10 size, depth minus width."""
    return slope(deep.table("total")) - slope(wide.table("total"))


@shape(
    "7",
    "the instability part rises faster with depth than with width",
    arms=DEPTH_AND_WIDTH,
    unit="nats/token per decade",
)
def depth_raises_instability_faster(deep: ArmTables, wide: ArmTables) -> Effects:
    """Slope of S's part above the best learning rate over log10 size, depth minus width."""
    return slope(deep.table("above")) - slope(wide.table("above"))


@shape("7", "at the largest size depth reaches a lower loss than width", arms=DEPTH_AND_WIDTH)
def depth_is_better_at_the_largest_size(deep: ArmTables, wide: ArmTables) -> Effects:
    """Best loss over the learning rates, width minus depth."""
    return _best_of_largest(wide) - _best_of_largest(deep)


def _best_of_largest(arm: ArmTables) -> pd.Series:
    return arm.table("best").iloc[:, -1]


@shape_without(
    "E.2",
    "without qk-layernorm the first learning rate to be lost falls with width",
    arms=_grown("width"),
    unit="decades per decade",
)
def eta_div_falls_with_width(wide: ArmTables) -> Effects:
    """Minus the slope over log10 size of log10 eta_div, where the loss crosses the best one + 0.3."""
    return -slope_over_size(wide, "log_lost")


@shape_without(
    "E.2",
    "without qk-layernorm the first learning rate to be lost falls with depth",
    arms=_grown("depth"),
    unit="decades per decade",
)
def eta_div_falls_with_depth(deep: ArmTables) -> Effects:
    """As with width."""
    return -slope_over_size(deep, "log_lost")


all_ways = partial(shape, arms=ALL_WAYS, shown_in="best_loss_with_size")


@all_ways("E.3", "at the largest size growing in both reaches a lower loss than in depth or in width alone")
def both_is_best(deep: ArmTables, wide: ArmTables, both: ArmTables) -> Effects:
    """Best loss of depth, and of width, minus that of both."""
    best = _best_of_largest(both)
    return pd.concat([_best_of_largest(deep) - best, _best_of_largest(wide) - best], axis=1)


@all_ways(
    "E.3",
    "the best loss of growing in both extrapolates with a smaller error than that of either alone",
    unit="decades",
)
def both_extrapolates_best(deep: ArmTables, wide: ArmTables, both: ArmTables) -> Effects:
    """Absolute error for log10 of the largest size's best loss, straight in log-log; depth's, width's minus both's."""
    error = _error(both)
    return pd.concat([_error(deep) - error, _error(wide) - error], axis=1)


def _error(arm: ArmTables) -> pd.Series:
    best = log10(arm.table("best"))
    if len(arm.sizes) < 3:
        raise MissingRunsError("an extrapolation takes three sizes")
    smaller = best.iloc[:, :-1]
    return (extrapolated(smaller, arm.sizes[-1]) - best.iloc[:, -1]).abs()
