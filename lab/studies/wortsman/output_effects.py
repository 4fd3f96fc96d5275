"""Effects of claims on output logits: their drift, their rounding, z-loss and weight decay."""

from __future__ import annotations

import pandas as pd

from lab.analysis.judging.effects import Effects
from lab.analysis.judging.evidence import LOST, ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.judging.quantities import Quantity, log10, quantity
from lab.analysis.judging.verdicts import (
    DECAY,
    FIXED_GAINS,
    WIDTH,
    Z_LOSS,
    Presumption,
)
from lab.analysis.logit_rounding import rounded_runs


def _lost_at_the_top(neither: ArmTables, *_: ArmTables) -> pd.DataFrame:
    """Loss at the top learning rate minus the best one + 0.3, at each size; the first arm has no remedy."""
    return neither.lost_by(neither.top)


# Where logits that drift harm no run, z-loss and decay have nothing to cure.
UNSTABLE_WITH_NEITHER = Presumption(
    _lost_at_the_top,
    "with neither z-loss nor decay the top learning rate is not surely unstable: at some size its loss is {} "
    "nats/token above the best one + 0.3, which must lie above 0; the learned gain of the last norm can keep logits "
    "small",
)


def neither_alone_and_both(group: ComparisonGroup) -> list[ArmTables]:
    """Neither decay nor z-loss, decay alone, and both."""
    return group.arms(
        {Z_LOSS: None, DECAY: 0.0},
        lambda curve: Z_LOSS not in curve and curve[DECAY] > 0,
        lambda curve: Z_LOSS in curve and curve[DECAY] > 0,
    )


def fixed_and_learned(group: ComparisonGroup) -> list[ArmTables]:
    """Gains fixed at one, and learned gains at the widths at which there are fixed ones."""
    widths = {curve[WIDTH] for curve in group.curves.values() if FIXED_GAINS in curve}
    return group.arms(
        lambda curve: FIXED_GAINS in curve, lambda curve: FIXED_GAINS not in curve and curve[WIDTH] in widths
    )


BITS = "mantissa_bits"
# Learning rates and mantissa bits at which pilot seeds lost 0.03 nats and more by the law.
CELLS = [(0.3, bits) for bits in (2, 3, 4, 5)] + [(1.0, bits) for bits in (2, 3, 4, 5, 6, 7)]
SMALLEST = 1e-3  # ratio that a loss below that of 23 bits counts as


def above_threshold(*arms: ArmTables, arm: int = 0, sign: int = 1) -> pd.DataFrame:
    """Loss at the largest learning rate minus the best one + 0.3; a model without blocks cannot beat the bigram one."""
    one = arms[arm]
    return sign * (one.loss(max(one.lrs)) - one.table("best") - LOST)


def difference_of_differences(*arms: ArmTables, of: Quantity) -> pd.DataFrame | pd.Series:
    """What bf16 adds to a quantity over fp32 without z-loss, minus what it adds with it."""
    bf16_off, bf16_on, fp32_off, fp32_on = (quantity(arm, of) for arm in arms)
    return (bf16_off - fp32_off) - (bf16_on - fp32_on)


def harm_follows_the_law(*arms: ArmTables) -> Effects:
    """Log10 of the loss above that of 23 bits over the law's, where pilot seeds lost 0.03 nats and more by the law.

    The law is taken at the final mean and spread over tokens of log Z.  A loss counts in full, also above that at
    initialization.
    """
    by_bits = {int(arm.setting(BITS)): arm for arm in arms}
    ratios = {f"{lr:g} {bits}": _harm_over_law(by_bits[bits], lr) for lr, bits in CELLS}
    return log10(pd.DataFrame(ratios).clip(lower=SMALLEST))


def _harm_over_law(arm: ArmTables, lr: float) -> pd.Series:
    if lr not in arm.lrs:
        raise MissingRunsError(f"no runs at learning rate {lr:g}")
    harm, law = (arm.column(lr, rounded_runs, column).iloc[:, 0] for column in ("harm", "law"))
    return harm / law
