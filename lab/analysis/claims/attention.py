"""Claims on attention: qk-layernorm, its axis, softmax, the growth of logits and kappa."""

from __future__ import annotations

import math
from functools import partial, reduce
from operator import mul

import numpy as np
import pandas as pd

from lab.analysis.claims.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from lab.analysis.claims.judging import (
    DEPTH,
    ON,
    QK,
    Effects,
    border_over_top,
    claim,
    coincide,
    extrapolated,
    log10,
    parts,
    size_trend,
    slope,
)
from lab.analysis.probe_values import late, near, peak

WITHOUT, WITH = {QK: None}, {QK: ON}
MODEL_WIDE, POINTWISE = "intervention.qk_layernorm_model", "intervention.pointwise_attention"
LOGIT, FIRST = "attention_logit_max", "block0"
TENFOLD = (1.0, math.inf)

contrast = partial(claim, frees=[QK], sweep="qk_layernorm")
without = partial(claim, holds=WITHOUT, sweep="qk_layernorm")
pointwise = partial(claim, holds={POINTWISE: ON, QK: None}, sweep="pointwise_attention")


@contrast("1", "LR sensitivity is lower with qk-layernorm, at every size")
def qk_layernorm_lowers_sensitivity(some: ComparisonGroup) -> Effects:
    """S without minus S with it, at each size."""
    off, on = some.arms(WITHOUT, WITH)
    return off.table("total") - on.table("total")


@without("1", "without qk-layernorm the first learning rate to be lost falls with size", unit="decades per decade")
def eta_div_falls_with_size(some: ComparisonGroup) -> Effects:
    """Minus the slope of log10 eta_div over log10 size; one grid step above the grid where nothing is lost."""
    (off,) = some.arms(WITHOUT)
    return -slope(off.table("log_lost"))


@claim("1", "with qk-layernorm no learning rate is lost, at any size", holds=WITH, unit="decades", sweep="qk_layernorm")
def qk_layernorm_keeps_every_learning_rate(some: ComparisonGroup) -> Effects:
    """Where the border of stability lies above the top of the window, at each size."""
    (on,) = some.arms(WITH)
    return border_over_top(on)


def _rising(name: str, subject: str, part: str, word: str, holds: Config) -> None:
    """S, or its instability part, of one arm rises with size."""

    def rises(some: ComparisonGroup) -> Effects:
        """Slope over log10 size; no verdict on S of an undertrained arm."""
        (arm,) = some.arms(holds)
        return size_trend(some, arm, part)

    rises.__name__ = name
    sentence = f"{subject} rises with size {word} qk-layernorm"
    claim("1", sentence, holds=holds, unit="nats/token per decade", sweep="qk_layernorm")(rises)


_rising("sensitivity_rises_without", "LR sensitivity", "total", "without", WITHOUT)
_rising("instability_rises_without", "the instability part of LR sensitivity", "above", "without", WITHOUT)
_rising("sensitivity_rises_with", "LR sensitivity", "total", "with", WITH)
_rising("instability_rises_with", "the instability part of LR sensitivity", "above", "with", WITH)


@contrast("1", "losses with and without qk-layernorm are within 0.02 up to eta_div / 10", side=(-0.02, 0.02))
def qk_layernorm_curves_coincide(some: ComparisonGroup) -> Effects:
    """Difference of losses, mean over those learning rates, at each size; eta_div of the arm without."""
    return coincide(*some.arms(WITHOUT, WITH))


@contrast("2", "at the top LR the smallest and the largest model are lost without qk-layernorm and kept with it")
def qk_layernorm_saves_both_scales(some: ComparisonGroup) -> Effects:
    """Loss minus that of the bigram model without it, the reverse with it."""
    off, on = some.arms(WITHOUT, WITH)
    ends = [off.sizes[0], off.sizes[-1]]
    return parts(off=off.above_bigram(off.top)[ends], on=-on.above_bigram(on.top).reindex(columns=ends))


@contrast(
    "2",
    "at the top LR qk-layernorm keeps the first block's largest attention logit over tenfold lower",
    side=TENFOLD,
    unit="decades",
)
def qk_layernorm_bounds_the_logits(some: ComparisonGroup) -> Effects:
    """Log10 of the run's peak without it over the peak with it, at each size."""
    off, on = some.arms(WITHOUT, WITH)
    return log10(off.heard(off.top, LOGIT, FIRST, peak)) - log10(on.heard(on.top, LOGIT, FIRST, peak))


@without("2", "without qk-layernorm, at the top LR, the first block has the largest attention logits", unit="decades")
def first_block_has_the_largest_logits(some: ComparisonGroup) -> Effects:
    """Log10 of its peak over the largest peak of the other blocks, at each size."""
    (off,) = some.arms(WITHOUT)
    others = off.places(LOGIT)[1:]
    if not others:
        raise MissingRunsError("logits of one block only")
    peaks = pd.concat([off.heard(off.top, LOGIT, place, peak) for place in others]).groupby(level=0).max()
    return log10(off.heard(off.top, LOGIT, FIRST, peak)) - log10(peaks)


def _growth(arm: ArmTables, *probes: str) -> pd.DataFrame:
    """Log10 of how much the product of what was heard in the first block grew by the end of the run, at the top LR."""
    ends = [
        arm.heard(arm.top, probe, FIRST, late) / arm.heard(arm.top, probe, FIRST, near, part=0.0) for probe in probes
    ]
    return log10(reduce(mul, ends))


@without("E.1", "at the top LR the product of query and key norms grows over tenfold", side=TENFOLD, unit="decades")
def norms_grow(some: ComparisonGroup) -> Effects:
    """First block, end over start, at each size."""
    (off,) = some.arms(WITHOUT)
    return _growth(off, "query_norm", "key_norm")


@without(
    "E.1",
    "at the top LR the mean |cosine| of query and key changes less than twofold",
    side=(-0.3, 0.3),
    unit="decades",
)
def alignment_stays(some: ComparisonGroup) -> Effects:
    """First block, end over start, at each size."""
    (off,) = some.arms(WITHOUT)
    return _growth(off, "query_key_cosine")


@claim(
    "E.8",
    "qk-layernorm per head reaches a lower loss than over the model's width",
    frees=[QK, MODEL_WIDE],
    sweep="qk_norm_axis",
)
def per_head_is_better(some: ComparisonGroup) -> Effects:
    """Best loss over the learning rates: over the width minus per head, at each size."""
    whole, head = some.arms({QK: None, MODEL_WIDE: ON}, {QK: ON, MODEL_WIDE: None})
    return whole.table("best") - head.table("best")


@pointwise(
    "E.11", "without softmax, at the top LR, attention logits still grow over tenfold", side=TENFOLD, unit="decades"
)
def logits_grow_without_softmax(some: ComparisonGroup) -> Effects:
    """Log10 of the first block's peak over its start, at each size."""
    (arm,) = some.arms({})
    start = arm.heard(arm.top, LOGIT, FIRST, near, part=0.0)
    return log10(arm.heard(arm.top, LOGIT, FIRST, peak)) - log10(start)


@pointwise("E.11", "without softmax the top LR is lost too, at every size")
def top_is_lost_without_softmax(some: ComparisonGroup) -> Effects:
    """Loss minus that of the bigram model."""
    (arm,) = some.arms({})
    return arm.above_bigram(arm.top)


KAPPA = "intervention.kappa_transplant"
VALUE = f"{KAPPA}.kappa"

growth = partial(claim, holds={QK: None}, sweep="logit_growth")
transplant = partial(claim, frees=[VALUE], holds={KAPPA: ON, QK: None, DEPTH: 2.0}, sweep="kappa")


def _early(arm: ArmTables, lr: float) -> pd.DataFrame:
    """Log10 of the first block's largest logit a tenth into the run (the paper: at step 2e3 of 1e5)."""
    return log10(arm.heard(lr, "attention_logit_max", "block0", near, part=0.1))


@growth("9", "at LR 0.01 early attention logits grow with size", unit="decades per decade")
def early_logits_grow_with_size(some: ComparisonGroup) -> Effects:
    """Slope of log10 of the logit a tenth into the run over log10 size, at the learning rate nearest 1e-2."""
    (off,) = some.arms({})
    return slope(_early(off, off.nearest(1e-2)))


@growth(
    "9",
    "a line through the smaller sizes tells the largest one's early logit at LR 0.01 within 0.3 decades",
    side=(-0.3, 0.3),
    unit="decades",
)
def early_logits_can_be_extrapolated(some: ComparisonGroup) -> Effects:
    """Told minus seen, straight in log-log (the paper's line is quadratic), at the learning rate nearest 1e-2."""
    (off,) = some.arms({})
    seen = _early(off, off.nearest(1e-2))
    if len(off.sizes) < 4:
        raise MissingRunsError("an extrapolation of logits takes four sizes")
    return extrapolated(seen.iloc[:, :-1], off.sizes[-1]) - seen.iloc[:, -1]


@growth("9", "early attention logits tell the runs that will be lost from others", side=(0.9, math.inf), unit="AUC")
def early_logits_separate_lost_runs(some: ComparisonGroup) -> Effects:
    """Share of pairs of a lost and a kept run in which the lost one has the larger logit a tenth into the run."""
    (off,) = some.arms({})
    logits = pd.concat([_early(off, lr) for lr in off.lrs], axis=1)
    lost = pd.concat([off.lost(lr) for lr in off.lrs], axis=1) > 0
    return pd.Series({seed: _auc(logits.loc[seed], lost.loc[seed]) for seed in logits.index}, dtype=float)


def _auc(values: pd.Series, lost: pd.Series) -> float:
    """NaN where a value is not known, or all runs ended alike."""
    high, low = values[lost.to_numpy()], values[~lost.to_numpy()]
    wins = [float(one > other) + 0.5 * float(one == other) for one in high for other in low]
    return float(np.mean(wins)) if wins and values.notna().all() else math.nan


def _best(some: ComparisonGroup, *values: float) -> list[pd.DataFrame]:
    """Best loss over the learning rates with each transplanted kappa."""
    return [arm.table("best") for arm in some.arms(*({VALUE: float(value)} for value in values))]


@transplant("10", "attention logits of kappa 1000 cost more than 0.05", side=(0.05, math.inf))
def large_kappa_costs(some: ComparisonGroup) -> Effects:
    """Best loss at kappa 1e3 minus that at 1."""
    large, one = _best(some, 1e3, 1)
    return large - one


@transplant("10", "up to kappa 100 the loss stays within 0.05 of that at kappa 1", side=(-0.05, 0.05))
def kappa_up_to_a_hundred_is_harmless(some: ComparisonGroup) -> Effects:
    """Best loss at every kappa above 1 and up to 100 minus that at 1."""
    one, *more = _best(some, 1, *{*[value for value in some.values(VALUE) if 1 < value < 100], 100.0})
    return pd.concat([table - one for table in more], axis=1)


@claim(
    "10",
    "at kappa 10,000 the model is worse than one without blocks",
    frees=[KAPPA, DEPTH],
    holds={QK: None},
    sweep="kappa",
)
def largest_kappa_is_worse_than_no_blocks(some: ComparisonGroup) -> Effects:
    """Best loss at kappa 1e4 minus that of the zero-block model, to which kappa means nothing, at one width."""
    idle = next((curve for curve in some.curves.values() if curve.get(DEPTH) == 0), None)
    blocks, none = some.arms(lambda c: c.get(VALUE) == 1e4 and c.get(DEPTH) == 2, lambda c: c is idle)
    if len(blocks.sizes) > 1:
        raise MissingRunsError("models of several widths to hold against the zero-block one")
    return blocks.table("best").iloc[:, 0] - none.table("best").iloc[:, 0]
