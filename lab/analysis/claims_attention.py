"""Claims on attention: qk-layernorm, what it prevents, its axis, and what softmax has to do with it."""

from __future__ import annotations

import math
from functools import partial, reduce
from operator import mul

import pandas as pd

from lab.analysis.claims import ON, QK, Effects, border_over_top, claim, coincide, log10, parts, size_trend, slope
from lab.analysis.evidence import Arm, Config, LackingError, Setting
from lab.analysis.probe_values import late, near, peak

WITHOUT, WITH = {QK: None}, {QK: ON}
MODEL_WIDE, POINTWISE = "intervention.qk_layernorm_model", "intervention.pointwise_attention"
LOGIT, FIRST = "attention_logit_max", "block0"
TENFOLD = (1.0, math.inf)

contrast = partial(claim, frees=[QK], sweep="qk_layernorm")
without = partial(claim, holds=WITHOUT, sweep="qk_layernorm")
pointwise = partial(claim, holds={POINTWISE: ON, QK: None}, sweep="pointwise_attention")


@contrast("1", "LR sensitivity is lower with qk-layernorm, at every size")
def qk_layernorm_lowers_sensitivity(some: Setting) -> Effects:
    """S without minus S with it, at each size."""
    off, on = some.arms(WITHOUT, WITH)
    return off.table("total") - on.table("total")


@without("1", "without qk-layernorm the first learning rate to be lost falls with size", unit="decades per decade")
def eta_div_falls_with_size(some: Setting) -> Effects:
    """Minus the slope of log10 eta_div over log10 size; one grid step above the grid where nothing is lost."""
    (off,) = some.arms(WITHOUT)
    return -slope(off.table("log_lost"))


@claim("1", "with qk-layernorm no learning rate is lost, at any size", holds=WITH, unit="decades", sweep="qk_layernorm")
def qk_layernorm_keeps_every_learning_rate(some: Setting) -> Effects:
    """Where the border of stability lies above the top of the window, at each size."""
    (on,) = some.arms(WITH)
    return border_over_top(on)


def _rising(name: str, subject: str, part: str, word: str, holds: Config) -> None:
    """S, or its instability part, of one arm rises with size."""

    def rises(some: Setting) -> Effects:
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
def qk_layernorm_curves_coincide(some: Setting) -> Effects:
    """Difference of losses, mean over those learning rates, at each size; eta_div of the arm without."""
    return coincide(*some.arms(WITHOUT, WITH))


@contrast("2", "at the top LR the smallest and the largest model are lost without qk-layernorm and kept with it")
def qk_layernorm_saves_both_scales(some: Setting) -> Effects:
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
def qk_layernorm_bounds_the_logits(some: Setting) -> Effects:
    """Log10 of the run's peak without it over the peak with it, at each size."""
    off, on = some.arms(WITHOUT, WITH)
    return log10(off.heard(off.top, LOGIT, FIRST, peak)) - log10(on.heard(on.top, LOGIT, FIRST, peak))


@without("2", "without qk-layernorm, at the top LR, the first block has the largest attention logits", unit="decades")
def first_block_has_the_largest_logits(some: Setting) -> Effects:
    """Log10 of its peak over the largest peak of the other blocks, at each size."""
    (off,) = some.arms(WITHOUT)
    others = off.places(LOGIT)[1:]
    if not others:
        raise LackingError("logits of one block only")
    peaks = pd.concat([off.heard(off.top, LOGIT, place, peak) for place in others]).groupby(level=0).max()
    return log10(off.heard(off.top, LOGIT, FIRST, peak)) - log10(peaks)


def _growth(arm: Arm, *probes: str) -> pd.DataFrame:
    """Log10 of how much the product of what was heard in the first block grew by the end of the run, at the top LR."""
    ends = [
        arm.heard(arm.top, probe, FIRST, late) / arm.heard(arm.top, probe, FIRST, near, part=0.0) for probe in probes
    ]
    return log10(reduce(mul, ends))


@without("E.1", "at the top LR the product of query and key norms grows over tenfold", side=TENFOLD, unit="decades")
def norms_grow(some: Setting) -> Effects:
    """First block, end over start, at each size."""
    (off,) = some.arms(WITHOUT)
    return _growth(off, "query_norm", "key_norm")


@without(
    "E.1",
    "at the top LR the mean |cosine| of query and key changes less than twofold",
    side=(-0.3, 0.3),
    unit="decades",
)
def alignment_stays(some: Setting) -> Effects:
    """First block, end over start, at each size."""
    (off,) = some.arms(WITHOUT)
    return _growth(off, "query_key_cosine")


@claim(
    "E.8",
    "qk-layernorm per head reaches a lower loss than over the model's width",
    frees=[QK, MODEL_WIDE],
    sweep="qk_norm_axis",
)
def per_head_is_better(some: Setting) -> Effects:
    """Best loss over the learning rates: over the width minus per head, at each size."""
    whole, head = some.arms({QK: None, MODEL_WIDE: ON}, {QK: ON, MODEL_WIDE: None})
    return whole.table("best") - head.table("best")


@pointwise(
    "E.11", "without softmax, at the top LR, attention logits still grow over tenfold", side=TENFOLD, unit="decades"
)
def logits_grow_without_softmax(some: Setting) -> Effects:
    """Log10 of the first block's peak over its start, at each size."""
    (arm,) = some.arms({})
    start = arm.heard(arm.top, LOGIT, FIRST, near, part=0.0)
    return log10(arm.heard(arm.top, LOGIT, FIRST, peak)) - log10(start)


@pointwise("E.11", "without softmax the top LR is lost too, at every size")
def top_is_lost_without_softmax(some: Setting) -> Effects:
    """Loss minus that of the bigram model."""
    (arm,) = some.arms({})
    return arm.above_bigram(arm.top)
