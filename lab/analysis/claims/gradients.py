"""Claims on gradients, updates and Adam's epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from lab.analysis.claims.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.claims.judging import ON, QK, Effects, claim, log10, mean, parts, slope
from lab.analysis.probe_values import late, places

EPS = "optimizer.eps"
MLP, KEY = "block0.mlp_up", "block0.attention.key"

trend = partial(claim, holds={QK: ON}, sweep="qk_layernorm")


def late_log(arm: ArmTables, probe: str, where: str) -> dict[float, pd.DataFrame]:
    """Log10 of what was heard at the end of training, by learning rate."""
    return {lr: log10(arm.heard(lr, probe, where, late)) for lr in arm.lrs}


def _over_lr(by_lr: dict[float, pd.DataFrame]) -> pd.DataFrame:
    """Slope over log10 of the learning rate, at each size."""
    sizes = next(iter(by_lr.values())).columns
    return pd.DataFrame({size: slope(pd.DataFrame({lr: t[size] for lr, t in by_lr.items()})) for size in sizes})


def _over_size(by_lr: dict[float, pd.DataFrame]) -> pd.Series:
    """Slope over log10 size, mean over the learning rates."""
    return mean([slope(table) for table in by_lr.values()])


def _corner(by_lr: dict[float, pd.DataFrame]) -> pd.Series:
    """Decades by which the largest size and learning rate lies below the smallest of all others."""
    cells = pd.concat(by_lr, axis=1)
    return cells.iloc[:, :-1].min(axis=1, skipna=False) - cells.iloc[:, -1]


def _shrinking(figure: str, name: str, what: str, tensor: str) -> None:
    """Gradients of a tensor fall with learning rate and size."""

    def heard(some: ComparisonGroup) -> dict[float, pd.DataFrame]:
        (arm,) = some.arms({})
        return late_log(arm, "grad_rms", tensor)

    rules: dict[str, tuple[str, Callable[[ComparisonGroup], Effects]]] = {
        "fall_with_lr": ("falls with the learning rate, at every size", lambda some: -_over_lr(heard(some))),
        "fall_with_size": ("falls with size, mean over learning rates", lambda some: -_over_size(heard(some))),
        "are_smallest_at_the_corner": ("is smallest at the largest size and LR", lambda some: _corner(heard(some))),
    }
    for rule, (says, effects) in rules.items():
        effects.__name__ = f"gradients_of_{name}_{rule}"
        unit = "decades" if "corner" in rule else "decades per decade"
        trend(figure, f"late in training the gradient RMS of {what} {says}", unit=unit)(effects)


_shrinking("11", "mlp", "the first MLP layer", MLP)


@trend(
    "11",
    "late in training the gradient RMS of the first MLP layer comes within tenfold of Adam's epsilon",
    side=(-math.inf, 1),
    unit="decades",
)
def gradients_reach_epsilon(some: ComparisonGroup) -> Effects:
    """Log10 of the late gradient RMS of the first MLP layer over epsilon, at the largest size and LR."""
    (arm,) = some.arms({})
    (eps,) = {float(str(curve[EPS])) for curve in some.curves.values()}
    if eps <= 0:
        raise MissingRunsError("epsilon is zero", near=False)
    return late_log(arm, "grad_rms", MLP)[arm.top].iloc[:, -1] - math.log10(eps)


_shrinking("E.12", "key", "the first key projection", KEY)


def _blocks(arm: ArmTables) -> list[str]:
    found = places(arm.evidence.records, "block_rms")
    if len(found) < 2:
        raise MissingRunsError("outputs of fewer than two blocks")
    return found


@trend(
    "C.1",
    "the RMS of the last block's output rises with LR, by more than its power 0.3",
    side=(0.3, math.inf),
    unit="decades per decade",
)
def block_output_rises_with_lr(some: ComparisonGroup) -> Effects:
    """Slope of the late log10 RMS over log10 LR, at each size."""
    (arm,) = some.arms({})
    return _over_lr(late_log(arm, "block_rms", _blocks(arm)[-1]))


@trend(
    "C.1",
    "the RMS of the last block's output is flat over size, by less than its power 0.1",
    side=(-0.1, 0.1),
    unit="decades per decade",
)
def block_output_is_flat_over_size(some: ComparisonGroup) -> Effects:
    """Slope of the late log10 RMS over log10 size, mean over learning rates."""
    (arm,) = some.arms({})
    return _over_size(late_log(arm, "block_rms", _blocks(arm)[-1]))


@trend("C.1", "the RMS of a block's output grows from block to block", unit="decades")
def block_output_grows_with_depth(some: ComparisonGroup) -> Effects:
    """Log10 of the late RMS over that of the block before, mean over learning rates, at each size."""
    (arm,) = some.arms({})
    heights = [mean([*late_log(arm, "block_rms", place).values()]) for place in _blocks(arm)]
    return pd.concat([after - before for before, after in pairwise(heights)], axis=1)


@trend("E.13", "the unscaled update of the first MLP layer is smallest at the largest size and LR", unit="decades")
def updates_are_smallest_at_the_corner(some: ComparisonGroup) -> Effects:
    """Log10 of the next smallest late update RMS over the one there."""
    (arm,) = some.arms({})
    return _corner(late_log(arm, "update_rms", MLP))


@trend(
    "E.13",
    "at the largest size and LR the unscaled update is less than half of that at the smallest",
    side=(-math.inf, 0.5),
    unit="ratio",
)
def updates_halve_at_the_corner(some: ComparisonGroup) -> Effects:
    """Late update RMS of the first MLP layer at the largest size and LR over that at the smallest of both."""
    (arm,) = some.arms({})
    cells = pd.concat(late_log(arm, "update_rms", MLP), axis=1)
    return 10 ** (cells.iloc[:, -1] - cells.iloc[:, 0])


epsilon = partial(claim, frees=[EPS], holds={QK: ON}, sweep="epsilon")


def _at_top(some: ComparisonGroup, *values: float) -> list[pd.Series]:
    """Final loss at the top learning rate and the largest size with each epsilon."""
    return [arm.loss(arm.top).iloc[:, -1] for arm in some.arms(*({EPS: value} for value in values))]


@epsilon("12", "at the top LR epsilon 1e-15 ends lower than 1e-8")
def smaller_epsilon_lowers_the_loss(some: ComparisonGroup) -> Effects:
    """Loss at 1e-8 minus that at 1e-15, largest size."""
    usual, small = _at_top(some, 1e-8, 1e-15)
    return usual - small


@epsilon("12", "at the top LR epsilon 1e-15 keeps gradients larger than 1e-8", unit="decades")
def smaller_epsilon_keeps_gradients(some: ComparisonGroup) -> Effects:
    """Log10 of the late gradient RMS of the first MLP layer at 1e-15 over that at 1e-8, largest size."""
    arms = some.arms({EPS: 1e-15}, {EPS: 1e-8})
    small, usual = (late_log(arm, "grad_rms", MLP)[arm.top].iloc[:, -1] for arm in arms)
    return small - usual


@epsilon("12", "at the top LR epsilon 1e-6 ends higher than 1e-8")
def larger_epsilon_raises_the_loss(some: ComparisonGroup) -> Effects:
    """Loss at 1e-6 minus that at 1e-8, largest size."""
    large, usual = _at_top(some, 1e-6, 1e-8)
    return large - usual


@epsilon("E.15", "at the top LR training is lost with epsilon 1e-6 and not with 1e-8")
def larger_epsilon_loses_training(some: ComparisonGroup) -> Effects:
    """Loss minus that of the bigram model at 1e-6, the reverse at 1e-8, largest size."""
    large, usual = (arm.above_bigram(arm.top).iloc[:, -1] for arm in some.arms({EPS: 1e-6}, {EPS: 1e-8}))
    return parts(large=large, usual=-usual)


@epsilon(
    "13",
    "wherever gradients are below epsilon the update is less than half of that with the smallest epsilon",
    side=(-math.inf, 0.5),
    unit="ratio",
)
def updates_shrink_below_epsilon(some: ComparisonGroup) -> Effects:
    """Largest ratio of late update RMS (unscaled) of the first MLP layer, over all such epsilons, LRs and sizes."""
    values = some.values(EPS)
    if len(values) < 2:
        raise MissingRunsError("one epsilon", near=False)
    smallest, *others = some.arms(*({EPS: value} for value in values))
    base, worst = late_log(smallest, "update_rms", MLP), []
    for eps, arm in zip(values[1:], others, strict=True):
        gradients, updates = (late_log(arm, probe, MLP) for probe in ("grad_rms", "update_rms"))
        worst += [(updates[lr] - base[lr]).where(~(gradients[lr] >= math.log10(eps)), -math.inf) for lr in arm.lrs]
    most = pd.concat(worst, axis=1).max(axis=1, skipna=False)
    if (most == -math.inf).all():
        raise MissingRunsError("no gradient RMS below an epsilon")
    return 10 ** most.replace(-math.inf, math.nan)


@epsilon(
    "13",
    "with epsilon 1e-15 the update stays the same over learning rates, within a factor of two",
    side=(-math.inf, math.log10(2)),
    unit="decades",
)
def updates_are_level_without_epsilon(some: ComparisonGroup) -> Effects:
    """Log10 of the largest over the smallest late update RMS (unscaled) of the first MLP layer, at each size."""
    (arm,) = some.arms({EPS: 1e-15})
    updates = [*late_log(arm, "update_rms", MLP).values()]
    span = np.ptp(np.stack([table.to_numpy() for table in updates]), axis=0)
    return pd.DataFrame(span, updates[0].index, updates[0].columns)
