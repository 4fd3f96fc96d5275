"""Claims on attention: qk-layernorm, its axis, softmax, the growth of logits and kappa."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from operator import mul

import numpy as np
import pandas as pd

from lab.analysis.judging.effects import (
    Effects,
    Qualified,
    coincide,
    exceeds,
    extrapolated,
    log10,
    parts,
    slope,
    slope_over_size,
    worst,
)
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from lab.analysis.judging.verdicts import DEPTH, ON, QK, STEPS, TENFOLD, TO_SPARE, WIDTH, claim
from lab.analysis.probe_values import late, near, peak

WITHOUT, WITH = {QK: None}, {QK: ON}
MODEL_WIDE, POINTWISE = "intervention.qk_layernorm_model", "intervention.pointwise_attention"
LOGIT, FIRST = "attention_logit_max", "block0"

contrast = partial(claim, arms=[WITHOUT, WITH], frees=[QK], sweep="qk_layernorm")
without = partial(claim, holds=WITHOUT, sweep="qk_layernorm")


@contrast("1", "LR sensitivity is lower with qk-layernorm, at every size")
def qk_layernorm_lowers_sensitivity(off: ArmTables, on: ArmTables) -> Effects:
    """S without minus S with it, at each size."""
    return off.table("total") - on.table("total")


@without("1", "without qk-layernorm the first learning rate to be lost falls with size", unit="decades per decade")
def eta_div_falls_with_size(off: ArmTables) -> Effects:
    """Minus the slope over log10 size of log10 eta_div, where the loss crosses the best one + 0.3."""
    return -slope_over_size(off, "log_lost")


@contrast("1", "with qk-layernorm no learning rate up to 0.3 is lost, at any size", unit=TO_SPARE)
def qk_layernorm_keeps_every_learning_rate(off: ArmTables, on: ArmTables) -> Effects:
    """The best loss + 0.3 minus the loss at each learning rate above the best one, the smallest, at each size.

    Of learning rates in the window of the paper.  The control: without it a learning rate is lost, at every size.
    """
    return Qualified(-worst(on), control=Qualified(worst(off)))


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
    """Difference of losses, mean over those learning rates, at each size; control as in ``coincide``."""
    return coincide(off, on)


@contrast(
    "2",
    "at the top LR the smallest and the largest model are lost without qk-layernorm and kept with it",
    shown_in="loss_over_steps",
    unit=TO_SPARE,
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


def _at_least_four_blocks(group: ComparisonGroup) -> list[ArmTables]:
    depths = [depth for depth in group.values(DEPTH) if depth >= 4]
    if not depths:
        raise MissingRunsError("models of fewer than four blocks", arms_exist=False)
    return group.arms(*({DEPTH: depth} for depth in depths))


@claim(
    "2",
    "without qk-layernorm, from LR 0.1 on, the first block has the largest attention logits more often than by chance",
    arms=_at_least_four_blocks,
    frees=[DEPTH],
    cause=["where"],
    holds=WITHOUT,
    unit="share of runs",
    sweep="depth_width",
    shown_in="max_attention_logit",
)
def first_block_has_the_largest_logits(*depths: ArmTables) -> Effects:
    """Share of runs in which its peak is the largest minus the mean of 1/depth, models of at least four blocks."""
    shares = [_first_is_largest(arm, lr) - 1 / arm.setting(DEPTH) for arm in depths for lr in arm.lrs if lr >= 0.1]
    if not shares:
        raise MissingRunsError("no learning rate from 0.1 on")
    table = pd.concat(shares, axis=1)
    return Qualified(table.mean(axis=1, skipna=False), grain=1 / table.shape[1])


def _first_is_largest(arm: ArmTables, lr: float) -> pd.DataFrame:
    """1 where the largest logit of all blocks and steps is in the first block, else 0."""
    first, *others = [arm.probe(lr, LOGIT, f"block{block}", peak) for block in range(int(arm.setting(DEPTH)))]
    largest = pd.concat(others).groupby(level=0).max()
    return (first > largest).astype(float).where(first.notna() & largest.notna())


def _growth(arm: ArmTables, *probes: str) -> pd.DataFrame:
    """Log10 of the product of these probes in the first block at the end of the run over that at its start, top LR."""
    ratios = [
        arm.probe(arm.top, probe, FIRST, late) / arm.probe(arm.top, probe, FIRST, near, part=0.0) for probe in probes
    ]
    return log10(reduce(mul, ratios))


over_steps = partial(without, cause=["step"], unit="decades", shown_in="queries_and_keys_over_steps")


@over_steps("E.1", "at the top LR the product of query and key norms grows over tenfold", side=TENFOLD)
def norms_grow(off: ArmTables) -> Effects:
    """First block, end over start, at each size."""
    return _growth(off, "query_norm", "key_norm")


@over_steps("E.1", "at the top LR alignment gives less than a fifth of the log growth of queries times keys")
def alignment_gives_little(off: ArmTables) -> Effects:
    """A fifth of the growth of both norms and the mean |cosine|, minus the change of the cosine, either way.

    First block, end over start, at each size.
    """
    alignment = _growth(off, "query_key_cosine")
    return (_growth(off, "query_norm", "key_norm") + alignment) / 5 - alignment.abs()


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


@claim(
    "E.11",
    "without softmax, at the top LR, attention logits still grow over tenfold",
    cause=["step"],
    holds={POINTWISE: ON, QK: None},
    side=TENFOLD,
    unit="decades",
    sweep="pointwise_attention",
    shown_in="max_attention_logit",
)
def logits_grow_without_softmax(arm: ArmTables) -> Effects:
    """Log10 of the first block's peak over its start, at each size."""
    start = arm.probe(arm.top, LOGIT, FIRST, near, part=0.0)
    return log10(arm.probe(arm.top, LOGIT, FIRST, peak)) - log10(start)


FIVEFOLD = 5

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
    "a line through sizes over fivefold smaller tells the largest one's early logit at LR 0.01 within 0.3 decades",
    side=(-0.3, 0.3),
    unit="decades",
)
def early_logits_can_be_extrapolated(off: ArmTables) -> Effects:
    """Predicted minus observed, straight in log-log (the paper's line is quadratic), at the LR nearest 1e-2.

    The control: the last of the smaller sizes, carried on unchanged, errs more.
    """
    logits, largest = _early(off, off.nearest(1e-2)), off.sizes[-1]
    smaller = logits[[size for size in off.sizes if FIVEFOLD * size < largest]]
    if smaller.shape[1] < 3:
        raise MissingRunsError("an extrapolation of logits takes three sizes over fivefold smaller than the largest")
    error = extrapolated(smaller, largest) - logits[largest]
    unchanged = smaller.iloc[:, -1] - logits[largest]
    return Qualified(error, control=Qualified(unchanged.abs() - error.abs()))


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


def _up_to_a_hundred_and_a_thousand(group: ComparisonGroup) -> list[ArmTables]:
    between = {value for value in group.values(VALUE) if 1 < value < 100}
    return group.arms(*({VALUE: value} for value in (1.0, *sorted(between), 100.0, 1000.0)))


@transplant(
    "10",
    "up to kappa 100 the loss stays within 0.05 of that at kappa 1",
    arms=_up_to_a_hundred_and_a_thousand,
    side=(-0.05, 0.05),
)
def kappa_up_to_a_hundred_is_harmless(one: ArmTables, *larger: ArmTables) -> Effects:
    """Best loss at every kappa above 1 and up to 100 minus that at 1; the control: at 1000 it is above 0.05."""
    *costs, harm = [arm.table("best") - one.table("best") for arm in larger]
    return Qualified(pd.concat(costs, axis=1), control=exceeds(harm, 0.05))


def no_blocks(group: ComparisonGroup, steps: float) -> Callable[[Config], bool]:
    """The choice of one zero-block model per width; to it kappa means nothing, so any of its curves will do."""
    curves = [curve for curve in group.curves.values() if curve[DEPTH] == 0 and curve[STEPS] == steps]
    first = {curve[WIDTH]: id(curve) for curve in reversed(curves)}
    return lambda curve: id(curve) in first.values()


def above_no_blocks(blocks: ArmTables, zero_block: ArmTables) -> pd.DataFrame:
    """Best loss of a model minus that of the zero-block model of its width, at each size."""
    if len(blocks.sizes) != len(zero_block.sizes):
        raise MissingRunsError("not every width has a model without blocks")
    return blocks.table("best") - zero_block.table("best").set_axis(blocks.sizes, axis=1)


def _largest_kappa_and_no_blocks(group: ComparisonGroup) -> list[ArmTables]:
    return group.arms({VALUE: 1e4, DEPTH: 2}, no_blocks(group, group.values(STEPS)[0]))


@setting(
    "10",
    "at kappa 10,000 the model is worse than one without blocks",
    arms=_largest_kappa_and_no_blocks,
    frees=[KAPPA, DEPTH],
    holds={QK: None},
)
def largest_kappa_is_worse_than_no_blocks(blocks: ArmTables, zero_block: ArmTables) -> Effects:
    """Best loss at kappa 1e4 minus that of the zero-block model, at each width."""
    return above_no_blocks(blocks, zero_block)
