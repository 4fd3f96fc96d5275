"""Claims on the recipe: warm-up, weight decay, steps, batch size, and learning rates that scale with weights."""

from __future__ import annotations

from functools import partial

import pandas as pd

from lab.analysis.claims.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.claims.judging import ON, QK, Effects, claim, drift, slope, watch_training

WARMUP, STEPS, BATCH = "schedule.warmup", "steps", "batch_size"
OPTIMIZER, CHAIN, DECAY = "optimizer.name", "optimizer.chain", "optimizer.weight_decay"
HALF_DECADE = (-0.5, 0.5)

warmth = partial(claim, frees=[WARMUP], holds={QK: ON}, sweep="warm_up")
coupling = partial(claim, frees=[OPTIMIZER, CHAIN, DECAY], holds={QK: ON}, sweep="weight_decay")


def _ends(some: ComparisonGroup, key: str) -> list[ArmTables]:
    """The arms with the smallest and with the largest value of a key."""
    values = some.values(key)
    if len(values) < 2:
        raise MissingRunsError(f"one {key}", near=False)
    return some.arms({key: values[0]}, {key: values[-1]})


@warmth("5", "a longer warm-up lowers LR sensitivity at the two largest sizes")
def warm_up_lowers_sensitivity(some: ComparisonGroup) -> Effects:
    """S of the shortest warm-up minus S of the longest."""
    short, long = _ends(some, WARMUP)
    return (short.table("total") - long.table("total")).iloc[:, -2:]


@warmth("5", "a longer warm-up lowers the loss at the top LR at the largest size")
def warm_up_helps_at_the_top(some: ComparisonGroup) -> Effects:
    """Loss with the shortest warm-up minus that with the longest."""
    short, long = _ends(some, WARMUP)
    return (short.loss(short.top) - long.loss(long.top)).iloc[:, -1]


def _coupled_and_not(some: ComparisonGroup) -> list[ArmTables]:
    """The two kinds of decay, of the strengths that agree most nearly at learning rate 1e-2, within a decade of it."""
    strengths = {
        name: {c[DECAY] for c in some.curves.values() if c[OPTIMIZER] == name and c[DECAY] > 0} for name in KINDS
    }
    pairs = [(max(a * 1e-2 / b, b / (a * 1e-2)), a, b) for a in strengths[KINDS[0]] for b in strengths[KINDS[1]]]
    if not pairs:
        raise MissingRunsError("only one kind of decay", near=False)
    apart, coupled, independent = min(pairs)
    if apart > 10.1:
        raise MissingRunsError("the two kinds of decay agree in strength at no learning rate near 0.01")
    return some.arms({OPTIMIZER: KINDS[0], DECAY: coupled}, {OPTIMIZER: KINDS[1], DECAY: independent})


KINDS = ("adamw_coupled", "adamw")


@coupling("6", "independent weight decay has the lower LR sensitivity, at every size")
def independent_decay_lowers_sensitivity(some: ComparisonGroup) -> Effects:
    """S of coupled decay, the smaller over the windows from 1e-4 to 0.1 and 3e-4 to 0.3, minus S of independent."""
    coupled, independent = _coupled_and_not(some)
    return coupled.table("coupled") - independent.table("total")


@coupling("6", "the gain of independent decay in LR sensitivity grows with size", unit="nats/token per decade")
def gain_of_independent_decay_grows(some: ComparisonGroup) -> Effects:
    """Slope of that difference over log10 size."""
    coupled, independent = _coupled_and_not(some)
    for arm in (coupled, independent):
        watch_training(some, arm)
    return slope(coupled.table("coupled") - independent.table("total"))


@coupling("6", "the gain of independent decay in the instability part grows with size", unit="nats/token per decade")
def stability_of_independent_decay_grows(some: ComparisonGroup) -> Effects:
    """Slope over log10 size of the difference of instability parts, both from 3e-4 to 0.3."""
    coupled, independent = _coupled_and_not(some)
    return slope(coupled.table("above") - independent.table("above"))


def _ratios(some: ComparisonGroup, key: str, base: float) -> pd.DataFrame:
    """S at every other value of a key over S at ``base``."""
    first, *others = some.arms({key: base}, *({key: value} for value in some.values(key) if value != base))
    return pd.concat([arm.table("total") / first.table("total") for arm in others], axis=1)


@claim(
    "E.7",
    "half and twice the steps change LR sensitivity by less than 30 %",
    frees=[STEPS],
    holds={QK: ON},
    side=(0.7, 1.3),
    unit="ratio",
    sweep="steps",
)
def steps_change_little(some: ComparisonGroup) -> Effects:
    """S over S at the middle number of steps, at each size."""
    values = some.values(STEPS)
    if len(values) < 3:
        raise MissingRunsError("fewer than three numbers of steps", near=len(values) > 1)
    return _ratios(some, STEPS, values[len(values) // 2])


@claim(
    "E.9",
    "batches of twice and four times the size, at as many tokens, change LR sensitivity by less than 30 %",
    frees=[BATCH, STEPS],
    holds={QK: ON},
    side=(0.7, 1.3),
    unit="ratio",
    sweep="batch_size",
)
def batch_size_changes_little(some: ComparisonGroup) -> Effects:
    """S over S at the smallest batch, at each size."""
    values = some.values(BATCH)
    if len(values) < 2:
        raise MissingRunsError("one batch size", near=False)
    if len({float(str(c[BATCH])) * float(str(c[STEPS])) for c in some.curves.values()}) > 1:
        raise MissingRunsError("batch sizes at unlike numbers of tokens")
    return _ratios(some, BATCH, values[0])


@claim(
    "E.10",
    "more weight decay moves the best learning rate up",
    frees=[DECAY],
    holds={QK: ON},
    unit="decades per decade",
    sweep="decay_strength",
)
def decay_moves_the_optimum(some: ComparisonGroup) -> Effects:
    """Slope of log10 eta* (vertex of a parabola) over log10 of the decay, where there is any, at each size."""
    values = [value for value in some.values(DECAY) if value > 0]
    if len(values) < 2:
        raise MissingRunsError("one strength of decay", near=False)
    tables = dict(zip(values, [arm.table("log_best") for arm in some.arms(*({DECAY: v} for v in values))], strict=True))
    sizes = next(iter(tables.values())).columns
    return pd.DataFrame({size: slope(pd.DataFrame({v: t.get(size) for v, t in tables.items()})) for size in sizes})


@claim(
    "E.14",
    "with the learning rate scaled by the weights' RMS the best one stays within half a decade over sizes",
    holds={QK: ON, OPTIMIZER: "adamw_rms_scaled"},
    side=HALF_DECADE,
    unit="decades",
    sweep="rms_scaled_lr",
)
def rms_scaling_holds_the_optimum(some: ComparisonGroup) -> Effects:
    """Log10 of eta* (vertex of a parabola) minus that of the smallest size, at each larger one."""
    (arm,) = some.arms({})
    return drift(arm)
