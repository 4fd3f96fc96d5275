"""Effects of claims on attention logits and output logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import mul

import numpy as np
import pandas as pd

from lab.analysis.crossings import crossing
from lab.analysis.probe_values import late, near, peak
from lab.analysis.sensitivity import LOST
from studies.claims.effects import (
    Effects,
    Qualified,
    exceeds,
    extrapolated,
    parts,
)
from studies.claims.evidence import ArmTables, Choice, ComparisonGroup, Config, MissingRunsError
from studies.claims.quantities import log10
from studies.claims.verdicts import (
    DECAY,
    DEPTH,
    FIXED_GAINS,
    STEPS,
    WIDTH,
    Z_LOSS,
    Presumption,
)
from studies.wortsman.rounding import rounded_runs

LOGIT, FIRST = "attention_logit_max", "block0"


def margins_over_costly_loss_off_and_on(off: ArmTables, on: ArmTables) -> Effects:
    """Loss at the top LR minus the best one + 0.3, without qk-layernorm; and the negative of that with it."""
    ends = [off.sizes[0], off.sizes[-1]]
    return parts(
        off=off.margin_over_costly_loss(off.top)[ends], on=-on.margin_over_costly_loss(on.top).reindex(columns=ends)
    )


def at_least_four_blocks(group: ComparisonGroup) -> list[ArmTables]:
    depths = [depth for depth in group.values(DEPTH) if depth >= 4]
    if not depths:
        raise MissingRunsError("models of fewer than four blocks", arms_exist=False)
    return group.arms(*({DEPTH: depth} for depth in depths))


def share_of_runs_with_largest_first_block(*depths: ArmTables) -> Effects:
    """Share of runs in which the first block's peak is the largest, minus the mean of 1/depth; four blocks or more."""
    shown = [(_first_is_largest(arm, lr), arm.setting(DEPTH)) for arm in depths for lr in arm.lrs if lr >= 0.1]
    if not shown:
        raise MissingRunsError("no learning rate from 0.1 on")
    first = pd.concat([table for table, _ in shown], axis=1)
    chance = sum(table.shape[1] / depth for table, depth in shown) / first.shape[1]
    return exceeds(first.mean(axis=1, skipna=False), chance, first.shape[1])


def _first_is_largest(arm: ArmTables, lr: float) -> pd.DataFrame:
    """1 if the largest logit of all blocks and steps is in the first block, else 0."""
    first, *others = [arm.probe(lr, LOGIT, f"block{block}", peak) for block in range(int(arm.setting(DEPTH)))]
    largest = pd.concat(others).groupby(level=0).max()
    return (first > largest).astype(float).where(first.notna() & largest.notna())


def _growth(arm: ArmTables, *probes: str) -> pd.DataFrame:
    """Log10 of the product of these probes at the end of the run over that at its start; first block, top LR."""
    ratios = [
        arm.probe(arm.top, probe, FIRST, late) / arm.probe(arm.top, probe, FIRST, near, part=0.0) for probe in probes
    ]
    return log10(reduce(mul, ratios))


def log_growth_of_norms(off: ArmTables) -> Effects:
    """Log10 of the growth of query norm times key norm in the first block, end over start, at each size."""
    return _growth(off, "query_norm", "key_norm")


def fifth_of_norm_growth_minus_alignment(off: ArmTables) -> Effects:
    """A fifth of the log growth of both norms times the mean |cosine|, minus the absolute log growth of that cosine.

    In the first block, end over start, at each size.
    """
    alignment = _growth(off, "query_key_cosine")
    return (_growth(off, "query_norm", "key_norm") + alignment) / 5 - alignment.abs()


FIVEFOLD = 5


def _early(arm: ArmTables, lr: float) -> pd.DataFrame:
    """Log10 of the first block's largest logit a tenth into the run (in the paper at step 2e3 of 1e5)."""
    return log10(arm.probe(lr, LOGIT, FIRST, near, part=0.1))


def error_of_extrapolated_logit(off: ArmTables) -> Effects:
    """Predicted minus observed log10 logit, by a straight line in log-log, at the LR nearest 1e-2.

    The paper's line is quadratic. The control: the value of the largest of the smaller sizes predicts worse.
    """
    logits, largest = _early(off, off.nearest(1e-2)), off.sizes[-1]
    smaller = logits[[size for size in off.sizes if FIVEFOLD * size < largest]]
    if smaller.shape[1] < 3:
        raise MissingRunsError("an extrapolation of logits takes three sizes over fivefold smaller than the largest")
    error = extrapolated(smaller, largest) - logits[largest]
    unchanged = smaller.iloc[:, -1] - logits[largest]
    return Qualified(error, control=Qualified(unchanged.abs() - error.abs()))


def auc_beyond_learning_rate(off: ArmTables) -> Effects:
    """AUC of the logit a tenth into the run minus the AUC of the learning rate alone.

    A run is lost if its learning rate lies above eta_div, at which the loss crosses the best one + 0.3.
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
    return Qualified(pd.Series(gains, dtype=float).where(known), resolution=math.sqrt(2) / pairs)


def _auc(values: np.ndarray, lost: pd.Series) -> float:
    """Share of pairs of a lost run and another in which the lost one has the larger value; ties count half.

    NaN if all runs are lost, or none is.
    """
    ranks, hits = pd.Series(values, lost.index).rank()[lost], int(lost.sum())
    pairs = hits * (len(lost) - hits)
    return float(ranks.sum() - hits * (hits + 1) / 2) / pairs if pairs else math.nan


KAPPA = "intervention.kappa_transplant"
VALUE = f"{KAPPA}.kappa"


def up_to_a_hundred_and_a_thousand(group: ComparisonGroup) -> list[ArmTables]:
    between = {value for value in group.values(VALUE) if 1 < value < 100}
    return group.arms(*({VALUE: value} for value in (1.0, *sorted(between), 100.0, 1000.0)))


def loss_added_by_kappa(smallest: ArmTables, *larger: ArmTables) -> Effects:
    """Best loss at every kappa above 1 and up to 100 minus that at 1; the control: at 1000 it is above 0.05."""
    *costs, harm = [arm.table("best") - smallest.table("best") for arm in larger]
    return Qualified(pd.concat(costs, axis=1), control=exceeds(harm, 0.05))


def no_blocks(group: ComparisonGroup, steps: float) -> Callable[[Config], bool]:
    """A predicate that chooses one zero-block model per width; kappa has no effect on it, so any curve will do."""
    curves = [curve for curve in group.curves.values() if curve[DEPTH] == 0 and curve[STEPS] == steps]
    first = {curve[WIDTH]: id(curve) for curve in reversed(curves)}
    return lambda curve: id(curve) in first.values()


def loss_above_no_blocks(blocks: ArmTables, zero_block: ArmTables) -> pd.DataFrame:
    """Best loss of a model above the zero-block model of its width, at each size."""
    if len(blocks.sizes) != len(zero_block.sizes):
        raise MissingRunsError("not every width has a model without blocks")
    return blocks.table("best") - zero_block.table("best").set_axis(blocks.sizes, axis=1)


def largest_kappa_and_no_blocks(group: ComparisonGroup) -> list[ArmTables]:
    return group.arms({VALUE: 1e4, DEPTH: 2}, no_blocks(group, group.values(STEPS)[0]))


def _crossing(zero_block: ArmTables, *kappas: ArmTables) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Log10 of the smallest kappa with which blocks are worse than none, at each size, and the step of the grid there.

    Between two kappas the loss is interpolated straight over log10 kappa. If blocks are never worse, it is a step above
    the largest kappa.
    """
    values = [arm.setting(VALUE) for arm in kappas]
    last_step = float(np.diff(np.log10(values))[-1])
    tables = [loss_above_no_blocks(arm, zero_block) for arm in kappas]
    gaps_ksn = np.stack([table.to_numpy(dtype=float) for table in tables])
    crossings, steps = np.full((2, *gaps_ksn.shape[1:]), math.nan)
    for cell in np.ndindex(*crossings.shape):
        gaps = gaps_ksn[(slice(None), *cell)]
        if not np.isnan(gaps).any():
            found = crossing(values, gaps, 0.0)
            crossings[cell] = found.log_or_beyond(last_step)
            steps[cell] = last_step if found.is_censored else found.width
    index, columns = tables[0].index, tables[0].columns
    return pd.DataFrame(crossings, index, columns), pd.DataFrame(steps, index, columns)


def kappas(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(VALUE)
    if len(values) < 3 or values[0] > 1:
        raise MissingRunsError("fewer than three kappas from 1 on", arms_exist=len(values) > 1)
    return group.arms(no_blocks(group, group.values(STEPS)[0]), *({VALUE: value, DEPTH: 2.0} for value in values))


def log_kappa_at_no_blocks(zero_block: ArmTables, *kappas: ArmTables) -> Effects:
    """Log10 of the smallest kappa with which the model is worse than the zero-block model, at each width.

    The control: at kappa 1 the model is better than one without blocks by more than 0.05 nats/token.
    """
    return Qualified(
        *_crossing(zero_block, *kappas), control=exceeds(-loss_above_no_blocks(kappas[0], zero_block), 0.05)
    )


def change_of_log_kappa_over_width(zero_block: ArmTables, *kappas: ArmTables) -> Effects:
    """Log10 of that kappa at the largest width minus that at the smallest, read off the same grid of kappas."""
    crossings, _ = _crossing(zero_block, *kappas)
    if crossings.shape[1] < 2:
        raise MissingRunsError("models of one width only; model=d32,d64 adds another")
    return crossings.iloc[:, -1] - crossings.iloc[:, 0]


def kappas_after_fewest_and_most_steps(group: ComparisonGroup) -> list[ArmTables]:
    counts = group.values(STEPS)
    if len(counts) < 2:
        raise MissingRunsError("one number of steps; steps=2000 adds another")
    ends = counts[0], counts[-1]
    curves = [curve for curve in group.curves.values() if curve[DEPTH] > 0 and curve.get(VALUE) is not None]
    both = sorted(set.intersection(*({curve[VALUE] for curve in curves if curve[STEPS] == end} for end in ends)))
    if len(both) < 3:
        raise MissingRunsError("fewer than three kappas after both numbers of steps")
    choices: list[Choice] = []
    for end in ends:
        choices += [no_blocks(group, end), *({VALUE: value, DEPTH: 2.0, STEPS: end} for value in both)]
    return group.arms(*choices)


def change_of_log_kappa_over_steps(*arms: ArmTables) -> Effects:
    """Log10 of that kappa after the most steps minus that after the fewest, at each width; on one grid of kappas."""
    half = len(arms) // 2
    few, many = (_crossing(*ends)[0] for ends in (arms[:half], arms[half:]))
    return many - few


# If drifting logits harm no run, z-loss and decay have nothing to cure; the first arm has no remedy.
UNSTABLE_WITH_NEITHER = Presumption(
    lambda neither, *_: neither.margin_over_costly_loss(neither.top),
    "with neither z-loss nor decay the top learning rate is not certainly costly: at some size its loss minus the "
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
SMALLEST = 1e-3  # the ratio that counts if the loss is below the loss at 23 bits


def above_threshold(*arms: ArmTables, arm: int = 0, sign: int = 1) -> pd.DataFrame:
    """Loss at the largest learning rate minus the best one + 0.3; a model without blocks cannot beat the bigram one."""
    chosen = arms[arm]
    return sign * (chosen.loss(max(chosen.lrs)) - chosen.table("best") - LOST)


def log_harm_over_law(*arms: ArmTables) -> Effects:
    """Log10 of the ratio of the loss above 23 bits to the prediction of the law, in each of ``CELLS``.

    The law takes the final mean and spread over tokens of log Z. Losses are not capped at initialization.
    """
    by_bits = {int(arm.setting(BITS)): arm for arm in arms}
    ratios = {}
    for lr, bits in CELLS:
        if lr not in by_bits[bits].lrs:
            raise MissingRunsError(f"no runs at learning rate {lr:g}")
        harm, law = (by_bits[bits].column(lr, rounded_runs, column).iloc[:, 0] for column in ("harm", "law"))
        ratios[f"{lr:g} {bits}"] = harm / law
    return log10(pd.DataFrame(ratios).clip(lower=SMALLEST))
