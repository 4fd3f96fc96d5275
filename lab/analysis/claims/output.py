"""Claims on output logits: their drift, z-loss and weight decay."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from lab.analysis.claims.evidence import ArmTables, ComparisonGroup, Config
from lab.analysis.claims.judging import ON, QK, Z_LOSS, Effects, border_over_top, claim, coincide, log10
from lab.analysis.probe_values import late, near

DECAY, LOG_Z = "optimizer.weight_decay", "log_z_square"
PLAIN_LOSS, WITH_Z = {Z_LOSS: None, DECAY: 0.0}, {Z_LOSS: ON, DECAY: 0.0}

output = partial(claim, frees=[Z_LOSS, DECAY], holds={QK: ON}, sweep="output_logits")


@output("3", "without weight decay LR sensitivity is lower with z-loss, at every size")
def z_loss_lowers_sensitivity(some: ComparisonGroup) -> Effects:
    """S without minus S with it, both without decay, at each size."""
    off, on = some.arms(PLAIN_LOSS, WITH_Z)
    return off.table("total") - on.table("total")


@output("3", "with neither weight decay nor z-loss the top LR is lost, at every size", unit="decades")
def top_is_lost_with_neither(some: ComparisonGroup) -> Effects:
    """Where the border of stability lies below the top of the window, at each size."""
    (off,) = some.arms(PLAIN_LOSS)
    return -border_over_top(off)


@output(
    "3", "at the largest size decay alone does what decay and z-loss do: S within 30 %", side=(0.7, 1.3), unit="ratio"
)
def decay_alone_suffices(some: ComparisonGroup) -> Effects:
    """S with decay alone over S with both, at the largest size."""
    alone, both = some.arms(lambda c: Z_LOSS not in c and _decays(c), lambda c: Z_LOSS in c and _decays(c))
    return (alone.table("total") / both.table("total")).iloc[:, -1]


def _decays(curve: Config) -> bool:
    return bool(curve[DECAY] > 0)


@output("3", "without decay, losses with and without z-loss are within 0.02 up to eta_div / 10", side=(-0.02, 0.02))
def z_loss_curves_coincide(some: ComparisonGroup) -> Effects:
    """Difference of losses, mean over those learning rates, at each size; eta_div of the arm without."""
    return coincide(*some.arms(PLAIN_LOSS, WITH_Z))


def _log_z(arm: ArmTables) -> tuple[pd.Series, pd.Series]:
    """Log10 of the mean of log^2 Z half-way and at the end: smallest size, learning rate nearest 0.1."""
    lr = arm.nearest(0.1)
    half, end = arm.heard(lr, LOG_Z, "", near, part=0.5), arm.heard(lr, LOG_Z, "", late)
    return log10(half).iloc[:, 0], log10(end).iloc[:, 0]


@output(
    "4",
    "at LR 0.1, without z-loss and decay, log^2 Z grows over tenfold in the second half of the run",
    side=(1, math.inf),
    unit="decades",
)
def output_logits_drift_late(some: ComparisonGroup) -> Effects:
    """End over half-way, smallest size (the paper's run is 250 times as long; its drift is about a hundredfold)."""
    (off,) = some.arms(PLAIN_LOSS)
    half, end = _log_z(off)
    return end - half


@output(
    "4",
    "at LR 0.1, without decay, z-loss keeps the final log^2 Z over tenfold lower",
    side=(1, math.inf),
    unit="decades",
)
def z_loss_stops_the_drift(some: ComparisonGroup) -> Effects:
    """End without over end with it, smallest size."""
    off, on = some.arms(PLAIN_LOSS, WITH_Z)
    return _log_z(off)[1] - _log_z(on)[1]


@output(
    "4", "at LR 0.1, without decay, the final log^2 Z stays below 100 with z-loss", side=(-math.inf, 2), unit="decades"
)
def z_loss_keeps_log_z_small(some: ComparisonGroup) -> Effects:
    """Log10 of it, smallest size."""
    (on,) = some.arms(WITH_Z)
    return _log_z(on)[1]
