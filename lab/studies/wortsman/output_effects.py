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


# If drifting logits harm no run, z-loss and decay have nothing to cure.
UNSTABLE_WITH_NEITHER = Presumption(
    _lost_at_the_top,
    "with neither z-loss nor decay the top learning rate is not certainly unstable: at some size its loss minus the "
    "best one + 0.3 is {} nats/token, which must lie above 0; the learned gain of the last norm can keep logits small",
)


def neither_alone_and_both(group: ComparisonGroup) -> list[ArmTables]:
    """Three arms: neither decay nor z-loss, decay alone, and both."""
    return group.arms(
        {Z_LOSS: None, DECAY: 0.0},
        lambda curve: Z_LOSS not in curve and curve[DECAY] > 0,
        lambda curve: Z_LOSS in curve and curve[DECAY] > 0,
    )


def fixed_and_learned(group: ComparisonGroup) -> list[ArmTables]:
    """Two arms: gains fixed at one, and learned gains, both at the widths that have fixed ones."""
    widths = {curve[WIDTH] for curve in group.curves.values() if FIXED_GAINS in curve}
    return group.arms(
        lambda curve: FIXED_GAINS in curve, lambda curve: FIXED_GAINS not in curve and curve[WIDTH] in widths
    )


BITS = "mantissa_bits"
# Learning rates and mantissa bits at which the law predicts a loss of 0.03 nats or more, by pilot seeds.
CELLS = [(0.3, bits) for bits in (2, 3, 4, 5)] + [(1.0, bits) for bits in (2, 3, 4, 5, 6, 7)]
SMALLEST = 1e-3  # the ratio that counts if the loss is below that of 23 bits


def above_threshold(*arms: ArmTables, arm: int = 0, sign: int = 1) -> pd.DataFrame:
    """Loss at the largest learning rate minus the best one + 0.3; a model without blocks cannot beat the bigram one."""
    one = arms[arm]
    return sign * (one.loss(max(one.lrs)) - one.table("best") - LOST)


def difference_of_differences(*arms: ArmTables, of: Quantity) -> pd.DataFrame | pd.Series:
    """Increase of a quantity from fp32 to bf16 without z-loss, minus the same increase with z-loss."""
    bf16_off, bf16_on, fp32_off, fp32_on = (quantity(arm, of) for arm in arms)
    return (bf16_off - fp32_off) - (bf16_on - fp32_on)


def harm_follows_the_law(*arms: ArmTables) -> Effects:
    """Log10 of the ratio of the loss above that of 23 bits to the prediction of the law, in each of ``CELLS``.

    The law takes the final mean and spread over tokens of log Z. Losses are not capped at initialization.
    """
    by_bits = {int(arm.setting(BITS)): arm for arm in arms}
    ratios = {f"{lr:g} {bits}": _harm_over_law(by_bits[bits], lr) for lr, bits in CELLS}
    return log10(pd.DataFrame(ratios).clip(lower=SMALLEST))


def _harm_over_law(arm: ArmTables, lr: float) -> pd.Series:
    if lr not in arm.lrs:
        raise MissingRunsError(f"no runs at learning rate {lr:g}")
    harm, law = (arm.column(lr, rounded_runs, column).iloc[:, 0] for column in ("harm", "law"))
    return harm / law
