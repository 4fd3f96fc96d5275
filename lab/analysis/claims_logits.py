"""Claims on attention logits: how their growth foretells what is lost, and what transplanted ones do."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.claims import DEPTH, ON, QK, Effects, claim, extrapolated, log10, slope
from lab.analysis.evidence import Arm, LackingError, Setting
from lab.analysis.probe_values import near

KAPPA = "intervention.kappa_transplant"
VALUE = f"{KAPPA}.kappa"

growth = partial(claim, holds={QK: None}, sweep="logit_growth")
transplant = partial(claim, frees=[VALUE], holds={KAPPA: ON, QK: None, DEPTH: 2.0}, sweep="kappa")


def _early(arm: Arm, lr: float) -> pd.DataFrame:
    """Log10 of the first block's largest logit a tenth into the run (the paper: at step 2e3 of 1e5)."""
    return log10(arm.heard(lr, "attention_logit_max", "block0", near, part=0.1))


@growth("9", "at LR 0.01 early attention logits grow with size", unit="decades per decade")
def early_logits_grow_with_size(some: Setting) -> Effects:
    """Slope of log10 of the logit a tenth into the run over log10 size, at the learning rate nearest 1e-2."""
    (off,) = some.arms({})
    return slope(_early(off, off.nearest(1e-2)))


@growth(
    "9",
    "a line through the smaller sizes tells the largest one's early logit at LR 0.01 within 0.3 decades",
    side=(-0.3, 0.3),
    unit="decades",
)
def early_logits_can_be_extrapolated(some: Setting) -> Effects:
    """Told minus seen, straight in log-log (the paper's line is quadratic), at the learning rate nearest 1e-2."""
    (off,) = some.arms({})
    seen = _early(off, off.nearest(1e-2))
    if len(off.sizes) < 4:
        raise LackingError("an extrapolation of logits takes four sizes")
    return extrapolated(seen.iloc[:, :-1], off.sizes[-1]) - seen.iloc[:, -1]


@growth("9", "early attention logits tell the runs that will be lost from others", side=(0.9, math.inf), unit="AUC")
def early_logits_separate_lost_runs(some: Setting) -> Effects:
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


def _best(some: Setting, *values: float) -> list[pd.DataFrame]:
    """Best loss over the learning rates with each transplanted kappa."""
    return [arm.table("best") for arm in some.arms(*({VALUE: float(value)} for value in values))]


@transplant("10", "attention logits of kappa 1000 cost more than 0.05", side=(0.05, math.inf))
def large_kappa_costs(some: Setting) -> Effects:
    """Best loss at kappa 1e3 minus that at 1."""
    large, one = _best(some, 1e3, 1)
    return large - one


@transplant("10", "up to kappa 100 the loss stays within 0.05 of that at kappa 1", side=(-0.05, 0.05))
def kappa_up_to_a_hundred_is_harmless(some: Setting) -> Effects:
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
def largest_kappa_is_worse_than_no_blocks(some: Setting) -> Effects:
    """Best loss at kappa 1e4 minus that of the zero-block model, to which kappa means nothing, at one width."""
    idle = next((curve for curve in some.curves.values() if curve.get(DEPTH) == 0), None)
    blocks, none = some.arms(lambda c: c.get(VALUE) == 1e4 and c.get(DEPTH) == 2, lambda c: c is idle)
    if len(blocks.sizes) > 1:
        raise LackingError("models of several widths to hold against the zero-block one")
    return blocks.table("best").iloc[:, 0] - none.table("best").iloc[:, 0]
