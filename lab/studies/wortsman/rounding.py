"""Claims on the rounding of output logits, restated for small models whose gains stay at one."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, log10
from lab.analysis.judging.evidence import LOST, ArmTables, Config
from lab.analysis.judging.verdicts import DECAY, FIXED_GAINS, ON, TO_SPARE, Z_LOSS, claim
from lab.analysis.logit_rounding import MANTISSA_BITS, rounded_runs

PRECISION, BITS, CENTRED = "precision", "mantissa_bits", "intervention.mu_centering"
DRIFTING: Config = {FIXED_GAINS: ON, "model.depth": 0, "data.name": "synthetic"}
NEITHER, WITH_Z = ({Z_LOSS: value, CENTRED: None, DECAY: 0.0} for value in (None, ON))
# Learning rates and mantissa bits at which pilot seeds lost 0.03 nats and more by the law.
CELLS = [(0.3, bits) for bits in (2, 3, 4, 5)] + [(1.0, bits) for bits in (2, 3, 4, 5, 6, 7)]
SMALLEST = 1e-3  # ratio that a loss below that of 23 bits counts as
THREEFOLD = (-math.log10(3), math.log10(3))

rounded = partial(
    claim, frees=[Z_LOSS, DECAY, CENTRED], holds=DRIFTING, sweep="rounded_logits", shown_in="learning_rate_sensitivity"
)
in_bf16 = partial(rounded, holds={**DRIFTING, PRECISION: "bf16"}, arms=[NEITHER, WITH_Z])


def _above_threshold(arm: ArmTables) -> pd.DataFrame:
    """Loss at the largest learning rate minus the best one + 0.3; a model without blocks cannot beat the bigram one."""
    return arm.loss(max(arm.lrs)) - arm.table("best") - LOST


@in_bf16(
    "3",
    "in bf16, with gains of one and neither weight decay nor z-loss, the top LR is unstable, and with z-loss it is not",
    unit=TO_SPARE,
    restates="top_is_lost_with_neither",
)
def drifting_logits_lose_the_top_in_bf16(neither: ArmTables, with_z: ArmTables) -> Effects:
    """Loss at the top learning rate minus the best one + 0.3; the control: with z-loss it is below."""
    return Qualified(_above_threshold(neither), control=Qualified(-_above_threshold(with_z)))


@in_bf16(
    "3",
    "in bf16, with gains of one and no weight decay, z-loss lowers the loss at the top LR",
    restates="z_loss_lowers_sensitivity",
)
def z_loss_lowers_the_top_loss_in_bf16(neither: ArmTables, with_z: ArmTables) -> Effects:
    """Loss at the top learning rate without z-loss minus with it."""
    return neither.loss(max(neither.lrs)) - with_z.loss(max(with_z.lrs))


@rounded(
    "4",
    "with gains of one and no weight decay, bf16 costs more than fp32 at the top LR, and less so with z-loss",
    frees=[Z_LOSS, DECAY, CENTRED, PRECISION],
    arms=[{**arm, PRECISION: precision} for precision in ("bf16", "fp32") for arm in (NEITHER, WITH_Z)],
    restates="z_loss_keeps_log_z_small",
)
def z_loss_saves_what_rounding_costs(*arms: ArmTables) -> Effects:
    """Loss in bf16 minus loss in fp32, without z-loss minus with it; the control: without z-loss it is above zero."""
    bf16_off, bf16_on, fp32_off, fp32_on = (arm.loss(max(arm.lrs)) for arm in arms)
    cost = bf16_off - fp32_off
    return Qualified(cost - (bf16_on - fp32_on), control=Qualified(cost))


@claim(
    "4",
    "with gains of one, and 2 to 7 mantissa bits, a model loses within threefold of what rounding its logits costs",
    frees=[BITS],
    holds={**DRIFTING, PRECISION: "mantissa"},
    arms=[{BITS: float(bits)} for bits in (2, 3, 4, 5, 6, 7, MANTISSA_BITS["fp32"])],
    side=THREEFOLD,
    unit="decades",
    sweep="mantissa_bits",
    shown_in="logit_rounding",
    restates="output_logits_drift_late",
)
def harm_follows_the_law(*arms: ArmTables) -> Effects:
    """Log10 of the loss above that of 23 bits over the law's, where pilot seeds lost 0.03 nats and more by the law.

    The law is taken at the final mean and spread over tokens of log Z.  A loss counts in full, also above that at
    initialization.
    """
    by_bits = {int(arm.setting(BITS)): arm for arm in arms}
    ratios = {f"{lr:g} {bits}": _harm_over_law(by_bits[bits], lr) for lr, bits in CELLS}
    return log10(pd.DataFrame(ratios).clip(lower=SMALLEST))


def _harm_over_law(arm: ArmTables, lr: float) -> pd.Series:
    harm, law = (arm.column(lr, rounded_runs, column).iloc[:, 0] for column in ("harm", "law"))
    return harm / law
