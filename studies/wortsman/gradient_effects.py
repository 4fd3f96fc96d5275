"""Effects of claims on gradients, sizes, and settings of the recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from studies.claims.effects import (
    Effects,
    Qualified,
    at_each_size,
    difference,
    exceeds,
    extrapolated,
    late_log,
    mean,
    over_rate,
    over_size,
    parts,
    slope,
    slope_resolution,
)
from studies.claims.evidence import COUPLED, ArmTables, Choice, ComparisonGroup, MissingRunsError, each_value_of
from studies.claims.quantities import log10, loss_at_top
from studies.claims.verdicts import BATCH, DECAY, DEPTH, OPTIMIZER, STEPS, WIDTH, Presumption

EPS = "optimizer.eps"
MLP = "block0.mlp_up"


def smallest_at_the_corner(arm: ArmTables, *, probe: str, where: str) -> pd.Series:
    """Decades by which a probe late in training is lower at the largest size and learning rate than anywhere else."""
    cells = pd.concat(late_log(arm, probe, where), axis=1)
    return cells.iloc[:, :-1].min(axis=1, skipna=False) - cells.iloc[:, -1]


def _log_epsilon(arm: ArmTables) -> float:
    eps = float(arm.setting(EPS))
    if eps <= 0:
        raise MissingRunsError("epsilon is zero", arms_exist=False)
    return math.log10(eps)


def log_gradient_over_epsilon(arm: ArmTables) -> Effects:
    """Log10 of the late gradient RMS of the first MLP layer over epsilon, at the largest size and LR.

    The control: at the smallest size and LR it is over tenfold.
    """
    over_eps = {lr: table - _log_epsilon(arm) for lr, table in late_log(arm, "grad_rms", MLP).items()}
    return Qualified(over_eps[arm.top].iloc[:, -1], control=exceeds(over_eps[arm.lrs[0]].iloc[:, 0], 1))


def _blocks(arm: ArmTables) -> list[str]:
    blocks = arm.locations("block_rms")
    if len(blocks) < 2:
        raise MissingRunsError("outputs of fewer than two blocks")
    return blocks


def slope_of_block_output_over_rate(arm: ArmTables) -> Effects:
    """Slope of the late log10 RMS over log10 LR, at each size."""
    return over_rate(late_log(arm, "block_rms", _blocks(arm)[-1]))


def slope_of_block_output_over_size(arm: ArmTables) -> Effects:
    """Slope of the late log10 RMS over log10 size, a mean over learning rates; control: over LR it is above 0.1."""
    heights = late_log(arm, "block_rms", _blocks(arm)[-1])
    return Qualified(over_size(heights), control=exceeds(over_rate(heights), 0.1))


def log_growth_of_output_per_block(arm: ArmTables) -> Effects:
    """Log10 of the late RMS over the RMS of the block before, a mean over learning rates, at each size."""
    heights = [mean([*late_log(arm, "block_rms", block).values()]) for block in _blocks(arm)]
    return pd.concat([after - before for before, after in pairwise(heights)], axis=1)


def update_ratio_at_the_corner(arm: ArmTables) -> Effects:
    """Late update RMS of the first MLP layer at the largest size and LR over that at the smallest size and LR."""
    cells = pd.concat(late_log(arm, "update_rms", MLP), axis=1)
    return 10 ** (cells.iloc[:, -1] - cells.iloc[:, 0])


def _epsilon_over_gradient(large: ArmTables, usual: ArmTables) -> Effects:
    """Log10 of the large epsilon over the late gradient RMS of the first MLP layer at 1e-8, top LR and largest size."""
    return math.log10(large.setting(EPS)) - late_log(usual, "grad_rms", MLP)[usual.top].iloc[:, -1]


REACHED = Presumption(
    _epsilon_over_gradient, "gradients stay above the large epsilon: the log10 of epsilon over their RMS is {}"
)


def tiny_and_largest(group: ComparisonGroup) -> list[ArmTables]:
    return group.arms({EPS: 1e-15}, {EPS: max(group.values(EPS))})


def log_span_of_updates(tiny: ArmTables, largest: ArmTables) -> Effects:
    """Log10 of the largest over the smallest late update RMS (unscaled) of the first MLP layer, at each size.

    The control: with the largest epsilon it is more than a factor of two.
    """
    return Qualified(_span_over_lr(tiny), control=exceeds(_span_over_lr(largest), math.log10(2)))


def _span_over_lr(arm: ArmTables) -> pd.DataFrame:
    updates = [*late_log(arm, "update_rms", MLP).values()]
    span = np.ptp(np.stack([table.to_numpy() for table in updates]), axis=0)
    return pd.DataFrame(span, updates[0].index, updates[0].columns)


def _updates(arms: Sequence[ArmTables], *, own_gradient: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The update, and log10 of epsilon over the gradient RMS, for each epsilon above the smallest, LR and size.

    The update is the late update RMS (unscaled) of the first MLP layer over that with the smallest epsilon. The
    gradient is the one that the smallest epsilon leaves, or the arm's own.
    """
    smallest, *others = arms
    base, updates, ratios = late_log(smallest, "update_rms", MLP), [], []
    for arm in others:
        gradients = late_log(arm if own_gradient else smallest, "grad_rms", MLP)
        update = late_log(arm, "update_rms", MLP)
        updates += [10 ** (update[lr] - base[lr]) for lr in arm.lrs]
        ratios += [math.log10(arm.setting(EPS)) - gradients[lr] for lr in arm.lrs]
    return pd.concat(updates, axis=1), pd.concat(ratios, axis=1)


def _largest(updates: pd.DataFrame, chosen: pd.DataFrame, missing: str) -> pd.Series:
    """The largest of the chosen updates of each seed."""
    largest = updates.where(chosen, -math.inf).max(axis=1, skipna=False)
    if (largest == -math.inf).all():
        raise MissingRunsError(missing)
    return largest


def update_ratio_below_epsilon(*arms: ArmTables) -> pd.Series:
    """Largest late update RMS (unscaled) of the first MLP layer over that with the smallest epsilon.

    Over all epsilons, LRs and sizes at which the gradient RMS is below epsilon.
    """
    updates, ratios = _updates(arms, own_gradient=True)
    return _largest(updates, ~(ratios <= 0), "no gradient RMS below an epsilon")


def update_ratio_past_the_gradient(*arms: ArmTables) -> pd.Series:
    """Largest late update RMS (unscaled) of the first MLP layer over that with the smallest epsilon.

    Over all epsilons, LRs and sizes at which epsilon is at least the gradient RMS that the smallest epsilon leaves.
    """
    updates, ratios = _updates(arms)
    return _largest(updates, ~(ratios < 0), "no epsilon as large as a gradient RMS")


def margins_of_updates_by_epsilon_ratio(*arms: ArmTables) -> Effects:
    """A half minus the largest update at ratios from 1 on, and the smallest update at ratios up to 0.01 minus a half.

    The ratio is epsilon over the gradient RMS.
    """
    updates, ratios = _updates(arms)
    smallest = updates.where(~(ratios > -2), math.inf).min(axis=1, skipna=False)
    return parts(halved=0.5 - update_ratio_past_the_gradient(*arms), whole=smallest - 0.5)


TOTAL_DECAY = 10


def past_the_gradient(group: ComparisonGroup) -> list[ArmTables]:
    """The smallest epsilon, and all that are at least the gradient RMS with it, at the top LR and largest size."""
    smallest, *others = each_value_of(group, EPS)
    total = smallest.setting(DECAY) * smallest.setting(STEPS)
    if total < TOTAL_DECAY * (1 - 1e-6):
        raise MissingRunsError(f"decay times steps is {total:.3g} and must be {TOTAL_DECAY}, as with scale=day")
    gradient = 10 ** late_log(smallest, "grad_rms", MLP)[smallest.top].iloc[:, -1].mean()
    larger = [arm for arm in others if not arm.setting(EPS) < gradient]
    if not larger:
        raise MissingRunsError("no epsilon as large as the gradient RMS")
    return [smallest, *larger]


def loss_added_by_larger_epsilons(smallest: ArmTables, *larger: ArmTables) -> Effects:
    """Loss at the top LR and largest size minus that at the smallest epsilon, for each larger epsilon."""
    return pd.concat([loss_at_top(arm) - loss_at_top(smallest) for arm in larger], axis=1)


def margin_over_costly_loss_by_epsilon(smallest: ArmTables, *larger: ArmTables) -> Effects:
    """Loss minus the best one + 0.3 at each larger epsilon, and the negative at the smallest; top LR, largest size."""
    lost = {f"epsilon {arm.setting(EPS):g}": arm.margin_over_costly_loss(arm.top).iloc[:, -1] for arm in larger}
    return parts(**lost, the_smallest=-smallest.margin_over_costly_loss(smallest.top).iloc[:, -1])


# A learning rate above the paper's, at which an epsilon stops a block (found on seeds 3 to 5 of the sweep `epsilon`).
ABOVE = 1.0


def _fall(usual: ArmTables, large: ArmTables, probe: str, block: int) -> pd.Series:
    """Decades by which a probe of a block's first MLP layer falls below that at epsilon 1e-8, at the largest size."""
    layer = usual.locations(probe, ".mlp_up")[block]
    logs = [late_log(arm, probe, layer)[arm.nearest(ABOVE)].iloc[:, -1] for arm in (usual, large)]
    return logs[0] - logs[1]


def log_fall_of_last_gradient(usual: ArmTables, large: ArmTables) -> Effects:
    """Log10 of the late gradient RMS of the last block's first MLP layer at 1e-8 over that at 1e-5, largest size."""
    return _fall(usual, large, "grad_rms", -1)


def falls_of_last_and_first_update(usual: ArmTables, large: ArmTables) -> Effects:
    """Decades by which the last block's update falls, minus 1; and 1 minus those by which the first block's falls."""
    return parts(last=_fall(usual, large, "update_rms", -1) - 1, first=1 - _fall(usual, large, "update_rms", 0))


# Log10 parameters of a size that stands for any larger one, and for none at all.
NEVER = 20.0


def log_size_at_epsilon(arm: ArmTables) -> Effects:
    """Log10 of the size at which a straight line in log-log reaches ten epsilons; at most 20, which stands for never.

    The control: the gradient RMS falls with size.
    """
    decades = late_log(arm, "grad_rms", MLP)[arm.top] - _log_epsilon(arm) - 1
    fall = -slope(decades)
    middle = float(np.log10(decades.columns.to_numpy(dtype=float)).mean())
    size = middle + decades.mean(axis=1, skipna=False) / fall
    return Qualified(size.mask(fall <= 0, NEVER).clip(0, NEVER), control=Qualified(fall))


def best_loss_of_root_minus_inverse_scale(root: ArmTables, inverse: ArmTables, *, size: str, sign: int = 1) -> Effects:
    """Best loss with 1/sqrt(head width) minus that with 1/head width, at the smallest or the largest size."""
    if len(root.sizes) < 2:
        raise MissingRunsError("models of one size only")
    return difference(root, inverse, of={"curve": "best", "size": size}).table * sign


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


def error_of_single_minus_both(deep: ArmTables, wide: ArmTables, both: ArmTables) -> Effects:
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


INDEPENDENT = "adamw"


def coupled_and_independent(group: ComparisonGroup) -> list[ArmTables]:
    """The two kinds of decay, with the strengths that differ least at learning rate 1e-2, by a decade at most."""
    coupled, independent = (
        {curve[DECAY] for curve in group.curves.values() if curve[OPTIMIZER] == name and curve[DECAY] > 0}
        for name in (COUPLED, INDEPENDENT)
    )
    pairs = [(max(a * 1e-2 / b, b / (a * 1e-2)), a, b) for a in coupled for b in independent]
    if not pairs:
        raise MissingRunsError("only one kind of decay", arms_exist=False)
    ratio, a, b = min(pairs)
    if ratio > 10.1:
        raise MissingRunsError("the two kinds of decay agree in strength at no learning rate near 0.01")
    return group.arms({OPTIMIZER: COUPLED, DECAY: a}, {OPTIMIZER: INDEPENDENT, DECAY: b})


def middle_and_others(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(STEPS)
    if len(values) < 3:
        raise MissingRunsError("fewer than three numbers of steps", arms_exist=len(values) > 1)
    middle = values.pop(len(values) // 2)
    return group.arms(*({STEPS: value} for value in (middle, *values)))


def sensitivity_ratios(base: ArmTables, *others: ArmTables) -> Qualified:
    """S of every other arm over S of the first; the control: best losses of the last two differ by more than 0.01.

    A setting without any effect would not show that S is independent of it.
    """
    ratios = pd.concat([arm.table("total") / base.table("total") for arm in others], axis=1)
    best, last = (arm.table("best") for arm in others[-2:])
    return Qualified(ratios, control=exceeds((best - last).abs(), 0.01))


def batch_sizes(group: ComparisonGroup) -> list[ArmTables]:
    arms = each_value_of(group, BATCH)
    if len({float(curve[BATCH]) * float(curve[STEPS]) for curve in group.curves.values()}) > 1:
        raise MissingRunsError("batch sizes at unlike numbers of tokens")
    return arms


def slope_of_best_rate_over_decay(*strengths: ArmTables) -> Effects:
    """Slope of log10 eta* (vertex of a parabola) over log10 of the decay, without zero decay, at each size."""
    optima = at_each_size({arm.setting(DECAY): arm.table("log_best") for arm in strengths})
    resolutions = at_each_size({arm.setting(DECAY): arm.resolution("log_best") for arm in strengths})
    return Qualified(
        pd.DataFrame({size: slope(table) for size, table in optima.items()}),
        pd.DataFrame({size: slope_resolution(table) for size, table in resolutions.items()}),
    )
