"""Claims on gradients and updates late in training, and on the size of what blocks put out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pandas as pd

from lab.analysis.claims import ON, QK, Effects, claim, log10, mean, slope
from lab.analysis.evidence import Arm, LackingError, Setting
from lab.analysis.probe_values import late, places

EPS = "optimizer.eps"
MLP, KEY = "block0.mlp_up", "block0.attention.key"

trend = partial(claim, holds={QK: ON}, sweep="qk_layernorm")


def late_log(arm: Arm, probe: str, where: str) -> dict[float, pd.DataFrame]:
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

    def heard(some: Setting) -> dict[float, pd.DataFrame]:
        (arm,) = some.arms({})
        return late_log(arm, "grad_rms", tensor)

    rules: dict[str, tuple[str, Callable[[Setting], Effects]]] = {
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
def gradients_reach_epsilon(some: Setting) -> Effects:
    """Log10 of the late gradient RMS of the first MLP layer over epsilon, at the largest size and LR."""
    (arm,) = some.arms({})
    (eps,) = {float(str(curve[EPS])) for curve in some.curves.values()}
    if eps <= 0:
        raise LackingError("epsilon is zero", near=False)
    return late_log(arm, "grad_rms", MLP)[arm.top].iloc[:, -1] - math.log10(eps)


_shrinking("E.12", "key", "the first key projection", KEY)


def _blocks(arm: Arm) -> list[str]:
    found = places(arm.evidence.records, "block_rms")
    if len(found) < 2:
        raise LackingError("outputs of fewer than two blocks")
    return found


@trend(
    "C.1",
    "the RMS of the last block's output rises with LR, by more than its power 0.3",
    side=(0.3, math.inf),
    unit="decades per decade",
)
def block_output_rises_with_lr(some: Setting) -> Effects:
    """Slope of the late log10 RMS over log10 LR, at each size."""
    (arm,) = some.arms({})
    return _over_lr(late_log(arm, "block_rms", _blocks(arm)[-1]))


@trend(
    "C.1",
    "the RMS of the last block's output is flat over size, by less than its power 0.1",
    side=(-0.1, 0.1),
    unit="decades per decade",
)
def block_output_is_flat_over_size(some: Setting) -> Effects:
    """Slope of the late log10 RMS over log10 size, mean over learning rates."""
    (arm,) = some.arms({})
    return _over_size(late_log(arm, "block_rms", _blocks(arm)[-1]))


@trend("C.1", "the RMS of a block's output grows from block to block", unit="decades")
def block_output_grows_with_depth(some: Setting) -> Effects:
    """Log10 of the late RMS over that of the block before, mean over learning rates, at each size."""
    (arm,) = some.arms({})
    heights = [mean([*late_log(arm, "block_rms", place).values()]) for place in _blocks(arm)]
    return pd.concat([after - before for before, after in pairwise(heights)], axis=1)


@trend("E.13", "the unscaled update of the first MLP layer is smallest at the largest size and LR", unit="decades")
def updates_are_smallest_at_the_corner(some: Setting) -> Effects:
    """Log10 of the next smallest late update RMS over the one there."""
    (arm,) = some.arms({})
    return _corner(late_log(arm, "update_rms", MLP))


@trend(
    "E.13",
    "at the largest size and LR the unscaled update is less than half of that at the smallest",
    side=(-math.inf, 0.5),
    unit="ratio",
)
def updates_halve_at_the_corner(some: Setting) -> Effects:
    """Late update RMS of the first MLP layer at the largest size and LR over that at the smallest of both."""
    (arm,) = some.arms({})
    cells = pd.concat(late_log(arm, "update_rms", MLP), axis=1)
    return 10 ** (cells.iloc[:, -1] - cells.iloc[:, 0])
