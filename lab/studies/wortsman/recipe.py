"""Claims on the recipe: warm-up, weight decay, steps, batch size, and learning rates that scale with weights."""

from __future__ import annotations

from functools import partial

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, at_each_size, drift, drifts, exceeds, slope, slope_grain
from lab.analysis.judging.evidence import COUPLED, ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.judging.verdicts import DECAY, HALF_DECADE, ON, QK, STEPS, claim

WARMUP, BATCH = "schedule.warmup", "batch_size"
OPTIMIZER, CHAIN = "optimizer.name", "optimizer.chain"
INDEPENDENT = "adamw"


def _shortest_and_longest(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(WARMUP)
    if len(values) < 2:
        raise MissingRunsError(f"one {WARMUP}", arms_exist=False)
    return group.arms({WARMUP: values[0]}, {WARMUP: values[-1]})


warm_up = partial(claim, arms=_shortest_and_longest, frees=[WARMUP], holds={QK: ON}, sweep="warm_up")


@warm_up("5", "a longer warm-up lowers LR sensitivity at the two largest sizes")
def warm_up_lowers_sensitivity(short: ArmTables, long: ArmTables) -> Effects:
    """S of the shortest warm-up minus S of the longest."""
    return short.table("total", largest=2) - long.table("total", largest=2)


@warm_up("5", "a longer warm-up lowers the loss at the top LR at the largest size")
def warm_up_helps_at_the_top(short: ArmTables, long: ArmTables) -> Effects:
    """Loss with the shortest warm-up minus that with the longest."""
    return (short.loss(short.top) - long.loss(long.top)).iloc[:, -1]


def _coupled_and_independent(group: ComparisonGroup) -> list[ArmTables]:
    """The two kinds of decay, of the strengths that agree most nearly at learning rate 1e-2, within a decade of it."""
    coupled, independent = (
        {curve[DECAY] for curve in group.curves.values() if curve[OPTIMIZER] == name and curve[DECAY] > 0}
        for name in (COUPLED, INDEPENDENT)
    )
    pairs = [(max(a * 1e-2 / b, b / (a * 1e-2)), a, b) for a in coupled for b in independent]
    if not pairs:
        raise MissingRunsError("only one kind of decay", arms_exist=False)
    ratio, a, b = min(pairs)
    if ratio > 10.1:
        raise MissingRunsError("the two kinds of decay agree in strength at no learning rate near 0.01")
    return group.arms({OPTIMIZER: COUPLED, DECAY: a}, {OPTIMIZER: INDEPENDENT, DECAY: b})


coupling = partial(
    claim, arms=_coupled_and_independent, frees=[OPTIMIZER, CHAIN, DECAY], holds={QK: ON}, sweep="weight_decay"
)


@coupling("6", "independent weight decay has the lower LR sensitivity, at every size")
def independent_decay_lowers_sensitivity(coupled: ArmTables, independent: ArmTables) -> Effects:
    """S of coupled decay, the smaller over the windows from 1e-4 to 0.1 and 3e-4 to 0.3, minus S of independent."""
    return coupled.table("coupled") - independent.table("total")


@coupling("6", "the gain of independent decay in LR sensitivity grows with size", unit="nats/token per decade")
def gain_of_independent_decay_grows(coupled: ArmTables, independent: ArmTables) -> Effects:
    """Slope of that difference over log10 size."""
    return slope(coupled.table("coupled") - independent.table("total"))


@coupling("6", "the gain of independent decay in the instability part grows with size", unit="nats/token per decade")
def stability_of_independent_decay_grows(coupled: ArmTables, independent: ArmTables) -> Effects:
    """Slope over log10 size of the difference of instability parts, both from 3e-4 to 0.3."""
    return slope(coupled.table("above") - independent.table("above"))


def _middle_and_others(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(STEPS)
    if len(values) < 3:
        raise MissingRunsError("fewer than three numbers of steps", arms_exist=len(values) > 1)
    middle = values.pop(len(values) // 2)
    return group.arms(*({STEPS: value} for value in (middle, *values)))


def _ratios(base: ArmTables, *others: ArmTables) -> Qualified:
    """S of every other arm over S of the first; the control: best losses of the last two differ by more than 0.01.

    What changes nothing at all does not show that S is steady.
    """
    ratios = pd.concat([arm.table("total") / base.table("total") for arm in others], axis=1)
    best, last = (arm.table("best") for arm in others[-2:])
    return Qualified(ratios, control=exceeds((best - last).abs(), 0.01))


unchanged = partial(claim, holds={QK: ON}, side=(0.7, 1.3), unit="ratio")


@unchanged(
    "E.7",
    "half and twice the steps change LR sensitivity by less than 30 %",
    arms=_middle_and_others,
    frees=[STEPS],
    sweep="steps",
)
def steps_change_little(middle: ArmTables, *others: ArmTables) -> Effects:
    """S over S at the middle number of steps, at each size."""
    return _ratios(middle, *others)


def _batch_sizes(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(BATCH)
    if len(values) < 2:
        raise MissingRunsError("one batch size", arms_exist=False)
    if len({float(curve[BATCH]) * float(curve[STEPS]) for curve in group.curves.values()}) > 1:
        raise MissingRunsError("batch sizes at unlike numbers of tokens")
    return group.arms(*({BATCH: value} for value in values))


@unchanged(
    "E.9",
    "batches of twice and four times the size, at as many tokens, change LR sensitivity by less than 30 %",
    arms=_batch_sizes,
    frees=[BATCH, STEPS],
    sweep="batch_size",
)
def batch_size_changes_little(smallest: ArmTables, *others: ArmTables) -> Effects:
    """S over S at the smallest batch, at each size."""
    return _ratios(smallest, *others)


def _strengths(group: ComparisonGroup) -> list[ArmTables]:
    values = [value for value in group.values(DECAY) if value > 0]
    if len(values) < 2:
        raise MissingRunsError("one strength of decay", arms_exist=False)
    return group.arms(*({DECAY: value} for value in values))


@claim(
    "E.10",
    "more weight decay moves the best learning rate up",
    arms=_strengths,
    frees=[DECAY],
    holds={QK: ON},
    unit="decades per decade",
    sweep="decay_strength",
    shown_in="loss_against_setting",
)
def decay_moves_the_optimum(*strengths: ArmTables) -> Effects:
    """Slope of log10 eta* (vertex of a parabola) over log10 of the decay, where there is any, at each size."""
    optima = at_each_size({arm.setting(DECAY): arm.table("log_best") for arm in strengths})
    grains = at_each_size({arm.setting(DECAY): arm.grain("log_best") for arm in strengths})
    return Qualified(
        pd.DataFrame({size: slope(table) for size, table in optima.items()}),
        pd.DataFrame({size: slope_grain(table) for size, table in grains.items()}),
    )


@claim(
    "E.14",
    "with the learning rate scaled by the weights' RMS the best one stays within half a decade over sizes",
    arms=[{OPTIMIZER: "adamw_rms_scaled"}, {OPTIMIZER: INDEPENDENT}],
    frees=[OPTIMIZER, CHAIN],
    holds={QK: ON},
    side=HALF_DECADE,
    unit="decades",
    sweep="rms_scaled_lr",
    shown_in="best_loss_with_size",
)
def rms_scaling_holds_the_optimum(scaled: ArmTables, plain: ArmTables) -> Effects:
    """Log10 of eta* (vertex of a parabola) minus that of the smallest size, at each larger one.

    The control: of plain AdamW it moves by more than half a decade.
    """
    return drift(scaled)._replace(control=drifts(plain))
