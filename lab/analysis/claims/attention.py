"""Claims on attention: qk-layernorm, its axis, softmax, the growth of logits and kappa."""

from __future__ import annotations

import math
from functools import partial, reduce
from operator import mul

import numpy as np
import pandas as pd

from lab.analysis.claims.effects import (
    Effects,
    Qualified,
    coincide,
    extrapolated,
    log10,
    parts,
    slope,
    slope_over_size,
    worst,
)
from lab.analysis.claims.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from lab.analysis.claims.judging import DEPTH, ON, QK, TENFOLD, claim
from lab.analysis.probe_values import late, near, peak

WITHOUT, WITH = {QK: None}, {QK: ON}
MODEL_WIDE, POINTWISE = "intervention.qk_layernorm_model", "intervention.pointwise_attention"
LOGIT, FIRST = "attention_logit_max", "block0"

contrast = partial(claim, arms=[WITHOUT, WITH], frees=[QK], sweep="qk_layernorm")
without = partial(claim, holds=WITHOUT, sweep="qk_layernorm")
pointwise = partial(claim, holds={POINTWISE: ON, QK: None}, sweep="pointwise_attention", shown_in="max_attention_logit")


@contrast("1", "LR sensitivity is lower with qk-layernorm, at every size")
def qk_layernorm_lowers_sensitivity(off: ArmTables, on: ArmTables) -> Effects:
    """S without minus S with it, at each size."""
    return off.table("total") - on.table("total")


@without("1", "without qk-layernorm the first learning rate to be lost falls with size", unit="decades per decade")
def eta_div_falls_with_size(off: ArmTables) -> Effects:
    """Minus the slope over log10 size of log10 eta_div, where the loss crosses the best one + 0.3."""
    return -slope_over_size(off, "log_lost")


@claim("1", "with qk-layernorm no learning rate is lost, at any size", holds=WITH, sweep="qk_layernorm")
def qk_layernorm_keeps_every_learning_rate(on: ArmTables) -> Effects:
    """The best loss + 0.3 minus the loss at each learning rate above the best one, the smallest, at each size."""
    return -worst(on)


def _rising(name: str, subject: str, part: str, word: str, holds: Config) -> None:
    """File that S, or its instability part, of one arm rises with size."""

    def rises(arm: ArmTables) -> Effects:
        """Slope over log10 size, nats/token per decade."""
        return slope(arm.table(part))

    rises.__name__ = name
    sentence = f"{subject} rises with size {word} qk-layernorm"
    claim("1", sentence, holds=holds, unit="nats/token per decade", sweep="qk_layernorm")(rises)


_rising("sensitivity_rises_without", "LR sensitivity", "total", "without", WITHOUT)
_rising("instability_rises_without", "the instability part of LR sensitivity", "above", "without", WITHOUT)
_rising("sensitivity_rises_with", "LR sensitivity", "total", "with", WITH)
_rising("instability_rises_with", "the instability part of LR sensitivity", "above", "with", WITH)


@contrast("1", "losses with and without qk-layernorm are within 0.02 up to eta_div / 10", side=(-0.02, 0.02))
def qk_layernorm_curves_coincide(off: ArmTables, on: ArmTables) -> Effects:
    """Difference of losses, mean over those learning rates, at each size; eta_div of the arm without."""
    return coincide(off, on)


@contrast(
    "2",
    "at the top LR the smallest and the largest model are lost without qk-layernorm and kept with it",
    shown_in="loss_over_steps",
)
def qk_layernorm_saves_both_scales(off: ArmTables, on: ArmTables) -> Effects:
    """Loss minus the best one + 0.3 without it, the reverse with it."""
    ends = [off.sizes[0], off.sizes[-1]]
    return parts(off=off.lost_by(off.top)[ends], on=-on.lost_by(on.top).reindex(columns=ends))


@contrast(
    "2",
    "at the top LR qk-layernorm keeps the first block's largest attention logit over tenfold lower",
    side=TENFOLD,
    unit="decades",
    shown_in="loss_over_steps",
)
def qk_layernorm_bounds_the_logits(off: ArmTables, on: ArmTables) -> Effects:
    """Log10 of the run's peak without it over the peak with it, at each size."""
    return log10(off.probe(off.top, LOGIT, FIRST, peak)) - log10(on.probe(on.top, LOGIT, FIRST, peak))


@without(
    "2",
    "without qk-layernorm, at the top LR, the first block has the largest attention logits",
    unit="decades",
    shown_in="loss_over_steps",
)
def first_block_has_the_largest_logits(off: ArmTables) -> Effects:
    """Log10 of its peak over the largest peak of the other blocks, at each size."""
    others = off.locations(LOGIT)[1:]
    if not others:
        raise MissingRunsError("logits of one block only")
    peaks = pd.concat([off.probe(off.top, LOGIT, block, peak) for block in others]).groupby(level=0).max()
    return log10(off.probe(off.top, LOGIT, FIRST, peak)) - log10(peaks)


def _growth(arm: ArmTables, *probes: str) -> pd.DataFrame:
    """Log10 of the product of these probes in the first block at the end of the run over that at its start, top LR."""
    ratios = [
        arm.probe(arm.top, probe, FIRST, late) / arm.probe(arm.top, probe, FIRST, near, part=0.0) for probe in probes
    ]
    return log10(reduce(mul, ratios))


over_steps = partial(without, unit="decades", shown_in="queries_and_keys_over_steps")


@over_steps("E.1", "at the top LR the product of query and key norms grows over tenfold", side=TENFOLD)
def norms_grow(off: ArmTables) -> Effects:
    """First block, end over start, at each size."""
    return _growth(off, "query_norm", "key_norm")


@over_steps("E.1", "at the top LR the mean |cosine| of query and key changes less than twofold", side=(-0.3, 0.3))
def alignment_stays(off: ArmTables) -> Effects:
    """First block, end over start, at each size."""
    return _growth(off, "query_key_cosine")


@claim(
    "E.8",
    "qk-layernorm per head reaches a lower loss than over the model's width",
    arms=[{QK: None, MODEL_WIDE: ON}, {QK: ON, MODEL_WIDE: None}],
    frees=[QK, MODEL_WIDE],
    sweep="qk_norm_axis",
)
def per_head_is_better(whole_width: ArmTables, per_head: ArmTables) -> Effects:
    """Best loss over the learning rates: over the width minus per head, at each size."""
    return whole_width.table("best") - per_head.table("best")


@pointwise(
    "E.11", "without softmax, at the top LR, attention logits still grow over tenfold", side=TENFOLD, unit="decades"
)
def logits_grow_without_softmax(arm: ArmTables) -> Effects:
    """Log10 of the first block's peak over its start, at each size."""
    start = arm.probe(arm.top, LOGIT, FIRST, near, part=0.0)
    return log10(arm.probe(arm.top, LOGIT, FIRST, peak)) - log10(start)


growth = partial(claim, holds={QK: None}, sweep="logit_growth", shown_in="attention_logit_with_size")


def _early(arm: ArmTables, lr: float) -> pd.DataFrame:
    """Log10 of the first block's largest logit a tenth into the run (the paper: at step 2e3 of 1e5)."""
    return log10(arm.probe(lr, LOGIT, FIRST, near, part=0.1))


@growth("9", "at LR 0.01 early attention logits grow with size", unit="decades per decade")
def early_logits_grow_with_size(off: ArmTables) -> Effects:
    """Slope of log10 of the logit a tenth into the run over log10 size, at the learning rate nearest 1e-2."""
    return slope(_early(off, off.nearest(1e-2)))


@growth(
    "9",
    "a line through the smaller sizes tells the largest one's early logit at LR 0.01 within 0.3 decades",
    side=(-0.3, 0.3),
    unit="decades",
)
def early_logits_can_be_extrapolated(off: ArmTables) -> Effects:
    """Predicted minus observed, straight in log-log (the paper's line is quadratic), at the LR nearest 1e-2."""
    logits = _early(off, off.nearest(1e-2))
    if len(off.sizes) < 4:
        raise MissingRunsError("an extrapolation of logits takes four sizes")
    return extrapolated(logits.iloc[:, :-1], off.sizes[-1]) - logits.iloc[:, -1]


@growth("9", "early attention logits tell the runs that will be lost better than the learning rate does", unit="AUC")
def early_logits_separate_lost_runs(off: ArmTables) -> Effects:
    """AUC of the logit a tenth into the run minus that of the learning rate alone.

    A run is lost where its learning rate lies above eta_div, at which the loss crosses the best one + 0.3.
    """
    logits = pd.concat({lr: _early(off, lr) for lr in off.lrs}, axis=1)
    lost = pd.concat({lr: off.lost(lr) for lr in off.lrs}, axis=1)
    known = (logits.notna() & lost.notna()).all(axis=1)
    lrs = logits.columns.get_level_values(0).to_numpy()
    gains = {
        seed: _auc(logits.loc[seed].to_numpy(), lost.loc[seed] > 0) - _auc(lrs, lost.loc[seed] > 0)
        for seed in logits.index
    }
    pairs = (lost > 0).sum(axis=1) * (lost == 0).sum(axis=1)
    return Qualified(pd.Series(gains, dtype=float).where(known), grain=math.sqrt(2) / pairs)


def _auc(values: np.ndarray, lost: pd.Series) -> float:
    """Share of pairs of a lost and a kept run in which the lost one has the larger value; equal ones count half.

    NaN where all runs are lost, or none is.
    """
    high, low = values[lost.to_numpy()], values[~lost.to_numpy()]
    wins = [float(one > other) + 0.5 * float(one == other) for one in high for other in low]
    return float(np.mean(wins)) if wins else math.nan


KAPPA = "intervention.kappa_transplant"
VALUE = f"{KAPPA}.kappa"

setting = partial(claim, sweep="kappa", shown_in="loss_against_setting")
transplant = partial(setting, frees=[VALUE], holds={KAPPA: ON, QK: None, DEPTH: 2.0})


@transplant(
    "10", "attention logits of kappa 1000 cost more than 0.05", arms=[{VALUE: 1e3}, {VALUE: 1.0}], side=(0.05, math.inf)
)
def large_kappa_costs(large: ArmTables, one: ArmTables) -> Effects:
    """Best loss at kappa 1e3 minus that at 1."""
    return large.table("best") - one.table("best")


def _up_to_a_hundred(group: ComparisonGroup) -> list[ArmTables]:
    between = {value for value in group.values(VALUE) if 1 < value < 100}
    return group.arms(*({VALUE: value} for value in (1.0, *sorted(between), 100.0)))


@transplant(
    "10", "up to kappa 100 the loss stays within 0.05 of that at kappa 1", arms=_up_to_a_hundred, side=(-0.05, 0.05)
)
def kappa_up_to_a_hundred_is_harmless(one: ArmTables, *larger: ArmTables) -> Effects:
    """Best loss at every kappa above 1 and up to 100 minus that at 1."""
    return pd.concat([arm.table("best") - one.table("best") for arm in larger], axis=1)


def _largest_kappa_and_no_blocks(group: ComparisonGroup) -> list[ArmTables]:
    """To the zero-block model kappa means nothing: any of its curves will do."""
    zero_block = next((curve for curve in group.curves.values() if curve.get(DEPTH) == 0), None)
    return group.arms({VALUE: 1e4, DEPTH: 2}, lambda curve: curve is zero_block)


@setting(
    "10",
    "at kappa 10,000 the model is worse than one without blocks",
    arms=_largest_kappa_and_no_blocks,
    frees=[KAPPA, DEPTH],
    holds={QK: None},
)
def largest_kappa_is_worse_than_no_blocks(blocks: ArmTables, no_blocks: ArmTables) -> Effects:
    """Best loss at kappa 1e4 minus that of the zero-block model, at one width."""
    if len(blocks.sizes) > 1:
        raise MissingRunsError("models of several widths to hold against the zero-block one")
    return blocks.table("best").iloc[:, 0] - no_blocks.table("best").iloc[:, 0]
