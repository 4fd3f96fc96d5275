"""Claims on output logits: their drift, z-loss and weight decay."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, coincide, exceeds, log10
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, Config
from lab.analysis.judging.verdicts import (
    DECAY,
    DEPTH,
    FIXED_GAINS,
    ON,
    QK,
    TENFOLD,
    TO_SPARE,
    WIDTH,
    Z_LOSS,
    Presumption,
    claim,
)
from lab.analysis.probe_values import late, near

LOG_Z, PRECISION = "log_z_square", "precision"
PLAIN_LOSS, WITH_Z = {Z_LOSS: None, DECAY: 0.0}, {Z_LOSS: ON, DECAY: 0.0}

# Gradients of a whole text, which have no noise.
EXACT: Config = {"data.name": "synthetic_sample", "model.depth": 0, PRECISION: "fp32"}


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

output = partial(claim, frees=[Z_LOSS, DECAY], holds={QK: ON}, sweep="output_logits", presumes=UNSTABLE_WITH_NEITHER)
exact = partial(claim, frees=[Z_LOSS], holds=EXACT, sweep="output_logit_drift", shown_in="output_logit_drift")
log_z = partial(output, unit="decades", shown_in="output_logits_over_steps")


@output("3", "without weight decay LR sensitivity is lower with z-loss, at every size", arms=[PLAIN_LOSS, WITH_Z])
def z_loss_lowers_sensitivity(off: ArmTables, on: ArmTables) -> Effects:
    """S without minus S with it, both without decay, at each size."""
    return off.table("total") - on.table("total")


@output(
    "3",
    "with neither weight decay nor z-loss the top LR is lost, at every size",
    arms=[PLAIN_LOSS, WITH_Z],
    unit=TO_SPARE,
)
def top_is_lost_with_neither(off: ArmTables, on: ArmTables) -> Effects:
    """Loss at the top learning rate minus the best one + 0.3, at each size; the control: with z-loss it is below."""
    return Qualified(_lost_at_the_top(off), control=-Qualified(on.lost_by(on.top)))


def _decays(curve: Config) -> bool:
    return bool(curve[DECAY] > 0)


@output(
    "3",
    "at the largest size decay alone does what decay and z-loss do: S within 30 %",
    arms=[
        PLAIN_LOSS,
        lambda curve: Z_LOSS not in curve and _decays(curve),
        lambda curve: Z_LOSS in curve and _decays(curve),
    ],
    side=(0.7, 1.3),
    unit="ratio",
)
def decay_alone_suffices(neither: ArmTables, alone: ArmTables, both: ArmTables) -> Effects:
    """S with decay alone over S with both, at the largest size; the control: with neither it is above 1.3."""
    ratio, control = (arm.table("total", largest=1) / both.table("total", largest=1) for arm in (alone, neither))
    return Qualified(ratio, control=exceeds(control, 1.3))


@output(
    "3",
    "without decay, losses with and without z-loss are within 0.02 up to eta_div / 10",
    arms=[PLAIN_LOSS, WITH_Z],
    side=(-0.02, 0.02),
)
def z_loss_curves_coincide(off: ArmTables, on: ArmTables) -> Effects:
    """Difference of losses, mean over those learning rates, at each size; control as in ``coincide``."""
    return coincide(off, on)


def _log_z(arm: ArmTables) -> tuple[pd.Series, pd.Series]:
    """Log10 of the mean of log^2 Z half-way and at the end: smallest size, learning rate nearest 0.1."""
    lr = arm.nearest(0.1)
    half, end = arm.probe(lr, LOG_Z, "", near, part=0.5), arm.probe(lr, LOG_Z, "", late)
    return log10(half).iloc[:, 0], log10(end).iloc[:, 0]


@log_z(
    "4",
    "at LR 0.1, without z-loss and decay, log^2 Z grows over tenfold in the second half of the run",
    arms=[PLAIN_LOSS],
    cause=["step"],
    side=TENFOLD,
)
def output_logits_drift_late(off: ArmTables) -> Effects:
    """End over half-way, smallest size (the paper's run is 250 times as long; its drift is about a hundredfold)."""
    half, end = _log_z(off)
    return end - half


@log_z(
    "4",
    "at LR 0.1, without decay, z-loss keeps the final log^2 Z over tenfold lower",
    arms=[PLAIN_LOSS, WITH_Z],
    side=TENFOLD,
)
def z_loss_stops_the_drift(off: ArmTables, on: ArmTables) -> Effects:
    """End without over end with it, smallest size."""
    return _log_z(off)[1] - _log_z(on)[1]


@log_z(
    "4",
    "at LR 0.1, without decay, the final log^2 Z stays below 100 with z-loss",
    arms=[PLAIN_LOSS, WITH_Z],
    side=(-math.inf, 2),
)
def z_loss_keeps_log_z_small(off: ArmTables, on: ArmTables) -> Effects:
    """Log10 of it, smallest size; the control: without z-loss it is above 100."""
    return Qualified(_log_z(on)[1], control=exceeds(_log_z(off)[1], 2))


def _exact_log_z(arm: ArmTables, part: float | None = None) -> pd.DataFrame:
    """Log10 of the mean of log^2 Z at a part of the run, or else late; smallest size, a column per learning rate."""
    reduce = {"reduce": late} if part is None else {"reduce": near, "part": part}
    return pd.DataFrame({lr: log10(arm.probe(lr, LOG_Z, "", **reduce)).iloc[:, 0] for lr in arm.lrs})


@exact(
    "4",
    "with exact gradients and no decay, z-loss keeps the final log^2 Z over tenfold lower, at every learning rate",
    arms=[PLAIN_LOSS, WITH_Z],
    side=TENFOLD,
    unit="decades",
    restates="z_loss_stops_the_drift",
)
def z_loss_stops_the_exact_drift(off: ArmTables, on: ArmTables) -> Effects:
    """End without over end with it."""
    return _exact_log_z(off) - _exact_log_z(on)


@exact(
    "4",
    "with exact gradients and neither z-loss nor decay, log^2 Z still grows in the second half, at every learning rate",
    arms=[PLAIN_LOSS],
    cause=["step"],
    unit="decades",
    restates="output_logits_drift_late",
)
def the_exact_drift_goes_on(off: ArmTables) -> Effects:
    """End over half-way."""
    return _exact_log_z(off) - _exact_log_z(off, part=0.5)


@exact(
    "4",
    "with exact gradients and no decay, losses with and without z-loss are within 0.01 though log^2 Z is tenfold apart",
    arms=[PLAIN_LOSS, WITH_Z],
    side=(-0.01, 0.01),
    restates="z_loss_stops_the_drift",
)
def the_exact_drift_does_no_harm(off: ArmTables, on: ArmTables) -> Effects:
    """Loss on the whole text without minus with it, at each learning rate; the control: log^2 Z is tenfold higher."""
    losses = pd.DataFrame({lr: (off.loss(lr) - on.loss(lr)).iloc[:, 0] for lr in off.lrs})
    return Qualified(losses, control=exceeds(_exact_log_z(off) - _exact_log_z(on), 1))


@exact(
    "4",
    "with exact gradients and no decay, bf16 costs more without z-loss than with it, at the top learning rate",
    frees=[Z_LOSS, PRECISION],
    holds={key: value for key, value in EXACT.items() if key != PRECISION},
    arms=[{**arm, PRECISION: precision} for precision in ("bf16", "fp32") for arm in (PLAIN_LOSS, WITH_Z)],
    restates="z_loss_keeps_log_z_small",
)
def rounding_makes_the_drift_costly(*arms: ArmTables) -> Effects:
    """Loss in bf16 minus loss in fp32, without z-loss minus with it."""
    bf16_off, bf16_on, fp32_off, fp32_on = (arm.loss(max(arm.lrs)).iloc[:, 0] for arm in arms)
    return (bf16_off - fp32_off) - (bf16_on - fp32_on)


def _fixed_and_learned(group: ComparisonGroup) -> list[ArmTables]:
    """Gains fixed at one, and learned gains at the widths at which there are fixed ones."""
    widths = {curve[WIDTH] for curve in group.curves.values() if FIXED_GAINS in curve}
    return group.arms(
        lambda curve: FIXED_GAINS in curve, lambda curve: FIXED_GAINS not in curve and curve[WIDTH] in widths
    )


@claim(
    "4",
    "with neither z-loss nor decay, learned gains keep the final log^2 Z over tenfold lower than gains of one, at the "
    "top LR",
    arms=_fixed_and_learned,
    frees=[FIXED_GAINS],
    holds={DEPTH: 0, DECAY: 0.0, Z_LOSS: None, PRECISION: "fp32", "data.name": "synthetic"},
    side=TENFOLD,
    unit="decades",
    sweep="final_gain",
    shown_in="output_logits_over_steps",
    restates="output_logits_drift_late",
)
def learned_gains_keep_log_z_small(fixed: ArmTables, learned: ArmTables) -> Effects:
    """End with gains of one over end with learned ones, at each size."""
    lr = max(fixed.lrs)
    return log10(fixed.probe(lr, LOG_Z, "", late)) - log10(learned.probe(lr, LOG_Z, "", late))
