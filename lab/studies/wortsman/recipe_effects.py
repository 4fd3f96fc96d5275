"""Effects of claims on the recipe: weight decay, steps and batch size."""

from __future__ import annotations

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, at_each_size, exceeds, slope, slope_resolution
from lab.analysis.judging.evidence import COUPLED, ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.judging.verdicts import BATCH, DECAY, OPTIMIZER, STEPS

INDEPENDENT = "adamw"


def coupled_and_independent(group: ComparisonGroup) -> list[ArmTables]:
    """The two kinds of decay, with the strengths that differ least at learning rate 1e-2, by a decade at most."""
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


def middle_and_others(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(STEPS)
    if len(values) < 3:
        raise MissingRunsError("fewer than three numbers of steps", arms_exist=len(values) > 1)
    middle = values.pop(len(values) // 2)
    return group.arms(*({STEPS: value} for value in (middle, *values)))


def sensitivity_ratios(base: ArmTables, *others: ArmTables) -> Qualified:
    """S of every other arm over S of the first; the control: best losses of the last two differ by more than 0.01.

    A setting without any effect would not show that S is independent of it.
    """
    ratios = pd.concat([arm.table("total") / base.table("total") for arm in others], axis=1)
    best, last = (arm.table("best") for arm in others[-2:])
    return Qualified(ratios, control=exceeds((best - last).abs(), 0.01))


def batch_sizes(group: ComparisonGroup) -> list[ArmTables]:
    values = group.values(BATCH)
    if len(values) < 2:
        raise MissingRunsError("one batch size", arms_exist=False)
    if len({float(curve[BATCH]) * float(curve[STEPS]) for curve in group.curves.values()}) > 1:
        raise MissingRunsError("batch sizes at unlike numbers of tokens")
    return group.arms(*({BATCH: value} for value in values))


def decay_moves_the_optimum(*strengths: ArmTables) -> Effects:
    """Slope of log10 eta* (vertex of a parabola) over log10 of the decay, without zero decay, at each size."""
    optima = at_each_size({arm.setting(DECAY): arm.table("log_best") for arm in strengths})
    resolutions = at_each_size({arm.setting(DECAY): arm.resolution("log_best") for arm in strengths})
    return Qualified(
        pd.DataFrame({size: slope(table) for size, table in optima.items()}),
        pd.DataFrame({size: slope_resolution(table) for size, table in resolutions.items()}),
    )
