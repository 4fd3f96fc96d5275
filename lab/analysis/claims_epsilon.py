"""Claims on Adam's epsilon: what it does where gradients have become as small."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.claims import ON, QK, Effects, claim, parts
from lab.analysis.claims_gradients import EPS, MLP, late_log
from lab.analysis.evidence import LackingError, Setting

epsilon = partial(claim, frees=[EPS], holds={QK: ON}, sweep="epsilon")


def _at_top(some: Setting, *values: float) -> list[pd.Series]:
    """Final loss at the top learning rate and the largest size with each epsilon."""
    return [arm.loss(arm.top).iloc[:, -1] for arm in some.arms(*({EPS: value} for value in values))]


@epsilon("12", "at the top LR epsilon 1e-15 ends lower than 1e-8")
def smaller_epsilon_lowers_the_loss(some: Setting) -> Effects:
    """Loss at 1e-8 minus that at 1e-15, largest size."""
    usual, small = _at_top(some, 1e-8, 1e-15)
    return usual - small


@epsilon("12", "at the top LR epsilon 1e-15 keeps gradients larger than 1e-8", unit="decades")
def smaller_epsilon_keeps_gradients(some: Setting) -> Effects:
    """Log10 of the late gradient RMS of the first MLP layer at 1e-15 over that at 1e-8, largest size."""
    arms = some.arms({EPS: 1e-15}, {EPS: 1e-8})
    small, usual = (late_log(arm, "grad_rms", MLP)[arm.top].iloc[:, -1] for arm in arms)
    return small - usual


@epsilon("12", "at the top LR epsilon 1e-6 ends higher than 1e-8")
def larger_epsilon_raises_the_loss(some: Setting) -> Effects:
    """Loss at 1e-6 minus that at 1e-8, largest size."""
    large, usual = _at_top(some, 1e-6, 1e-8)
    return large - usual


@epsilon("E.15", "at the top LR training is lost with epsilon 1e-6 and not with 1e-8")
def larger_epsilon_loses_training(some: Setting) -> Effects:
    """Loss minus that of the bigram model at 1e-6, the reverse at 1e-8, largest size."""
    large, usual = (arm.above_bigram(arm.top).iloc[:, -1] for arm in some.arms({EPS: 1e-6}, {EPS: 1e-8}))
    return parts(large=large, usual=-usual)


@epsilon(
    "13",
    "wherever gradients are below epsilon the update is less than half of that with the smallest epsilon",
    side=(-math.inf, 0.5),
    unit="ratio",
)
def updates_shrink_below_epsilon(some: Setting) -> Effects:
    """Largest ratio of late update RMS (unscaled) of the first MLP layer, over all such epsilons, LRs and sizes."""
    values = some.values(EPS)
    if len(values) < 2:
        raise LackingError("one epsilon", near=False)
    smallest, *others = some.arms(*({EPS: value} for value in values))
    base, worst = late_log(smallest, "update_rms", MLP), []
    for eps, arm in zip(values[1:], others, strict=True):
        gradients, updates = (late_log(arm, probe, MLP) for probe in ("grad_rms", "update_rms"))
        worst += [(updates[lr] - base[lr]).where(~(gradients[lr] >= math.log10(eps)), -math.inf) for lr in arm.lrs]
    most = pd.concat(worst, axis=1).max(axis=1, skipna=False)
    if (most == -math.inf).all():
        raise LackingError("no gradient RMS below an epsilon")
    return 10 ** most.replace(-math.inf, math.nan)


@epsilon(
    "13",
    "with epsilon 1e-15 the update stays the same over learning rates, within a factor of two",
    side=(-math.inf, math.log10(2)),
    unit="decades",
)
def updates_are_level_without_epsilon(some: Setting) -> Effects:
    """Log10 of the largest over the smallest late update RMS (unscaled) of the first MLP layer, at each size."""
    (arm,) = some.arms({EPS: 1e-15})
    updates = [*late_log(arm, "update_rms", MLP).values()]
    span = np.ptp(np.stack([table.to_numpy() for table in updates]), axis=0)
    return pd.DataFrame(span, updates[0].index, updates[0].columns)
