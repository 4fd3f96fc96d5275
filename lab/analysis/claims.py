"""Claims of the paper: sentences that can be false, each with the rule it is judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd

from lab.analysis.evidence import Arm, Config, LackingError, Setting
from lab.analysis.statistics import FEWEST_SEEDS, Interval
from lab.core.registry import Registry

FIGURES_OF_THE_PAPER = (*map(str, range(1, 14)), "C.1", *(f"E.{n}" for n in range(1, 16)))
VERDICTS = ("reproduced", "contradicted", "inconclusive", "not run")
UNDERTRAINED = 1 / 3
FEWEST_SIZES = 3
ON = "on"
QK, Z_LOSS = "intervention.qk_layernorm", "intervention.z_loss"
WIDTH, DEPTH = "model.width", "model.depth"
# What a claim's runs are unless it says otherwise.
PLAIN: Config = {
    "intervention.kappa_transplant": None,
    "intervention.pointwise_attention": None,
    "intervention.qk_layernorm_model": None,
    "parametrization.name": "standard",
    "optimizer.name": "adamw",
}
ABOVE_ZERO = (0.0, math.inf)

Effects = pd.DataFrame | pd.Series
Table = TypeVar("Table", pd.DataFrame, pd.Series)


class Claim(NamedTuple):
    """A sentence of the paper, and how it is judged.

    Attributes:
        effects: from runs alike in all but ``frees``, one effect per seed (row) for each part (column) of the claim.
        side: the open range in which the sentence claims each effect to lie; ends are in ``unit``.
        holds: config that its runs must have.
        sweep: the sweep that trains them.
    """

    figure: str
    sentence: str
    effects: Callable[[Setting], Effects]
    frees: tuple[str, ...]
    holds: Config
    side: tuple[float, float]
    unit: str
    sweep: str
    place: int


CLAIMS: Registry[Claim] = Registry("claim", "claims")
_places = count()


def claim(
    figure: str,
    sentence: str,
    *,
    frees: Sequence[str] = (),
    holds: Config | None = None,
    side: tuple[float, float] = ABOVE_ZERO,
    unit: str = "nats/token",
    sweep: str,
) -> Callable[[Callable[[Setting], Effects]], Callable[[Setting], Effects]]:
    """Function decorator: file a claim under the function's name; width is always free."""

    def file(effects: Callable[[Setting], Effects]) -> Callable[[Setting], Effects]:
        free = (WIDTH, *frees)
        kept = {key: value for key, value in PLAIN.items() if key not in free} | dict(holds or {})
        entry = Claim(figure, sentence, effects, free, kept, side, unit, sweep, next(_places))
        CLAIMS.register(effects.__name__)(entry)
        return effects

    return file


def decide(intervals: Sequence[Interval], side: tuple[float, float]) -> tuple[str, Interval]:
    """The one rule: a claim is reproduced where every interval lies wholly inside ``side``, contradicted where one
    lies wholly outside, else inconclusive; and so it is below three seeds.

    Returns:
        The verdict, and the interval that speaks loudest against the claim.
    """
    low, high = side
    few = [interval for interval in intervals if interval.n < FEWEST_SEEDS]
    if few:
        return "inconclusive", min(few, key=lambda interval: interval.n)
    outside = max(intervals, key=lambda one: max(low - one.high, one.low - high))
    if outside.high < low or outside.low > high:
        return "contradicted", outside
    weakest = max(intervals, key=lambda one: max(low - one.low, one.high - high))
    return ("reproduced" if low < weakest.low and weakest.high < high else "inconclusive"), weakest


def log10(table: pd.DataFrame) -> pd.DataFrame:
    """Log10, NaN where there is none."""
    values = table.to_numpy(dtype=float)
    return pd.DataFrame(np.log10(np.where(values > 0, values, np.nan)), table.index, table.columns)


def slope(table: pd.DataFrame, fewest: int = FEWEST_SIZES) -> pd.Series:
    """Of each row, the slope of a straight line over log10 of the columns."""
    if table.shape[1] < fewest:
        raise LackingError(f"{table.shape[1]} of {fewest} points that a trend takes")
    x = np.log10(np.array(table.columns, dtype=float))
    x -= x.mean()
    return pd.Series(table.to_numpy(dtype=float) @ (x / (x @ x)), table.index)


def extrapolated(table: pd.DataFrame, size: float) -> pd.Series:
    """Each row's straight line over log10 of the columns, told at another size."""
    middle = float(np.log10(np.array(table.columns, dtype=float)).mean())
    return slope(table, fewest=2) * (math.log10(size) - middle) + table.mean(axis=1, skipna=False)


def size_trend(some: Setting, arm: Arm, part: str) -> pd.Series:
    """Slope of a sensitivity over size, nats/token per decade; that of S says nothing of an undertrained arm."""
    if part == "total":
        watch_training(some, arm)
    return slope(arm.table(part))


def watch_training(some: Setting, arm: Arm) -> None:
    """Note where more than a third of S is under-training: its trend over size is one of training, not stability."""
    share = (arm.table("below").mean() / arm.table("total").mean()).dropna()
    if len(share) and share.max() > UNDERTRAINED:
        some.caution = (
            f"undertrained: at {share.idxmax():,} parameters {share.max():.0%} of S comes from learning rates "
            "below the best one"
        )


def drift(arm: Arm) -> pd.DataFrame:
    """Decades by which eta* (vertex of a parabola over log LR) lies above that of the smallest size, per larger one."""
    if len(arm.sizes) < 2:
        raise LackingError("models of one size only")
    best = arm.table("log_best")
    return best.iloc[:, 1:].sub(best.iloc[:, 0], axis=0)


def border_over_top(arm: Arm) -> pd.DataFrame:
    """Decades by which the border of stability lies above the window's top: below zero, the top is lost."""
    return arm.table("border") - math.log10(arm.top)


def coincide(first: Arm, second: Arm) -> pd.DataFrame:
    """Loss of the second arm minus that of the first, mean over learning rates up to a tenth of the first's eta_div.

    Per size; eta_div is the smallest over seeds, one grid step above the grid where nothing is lost.
    """
    means = {}
    for size, lost in first.table("log_lost").min().items():
        if math.isnan(lost):
            means[size] = first.table("log_lost")[size]
            continue
        calm = [lr for lr in first.lrs if math.log10(lr) <= lost - 1 + 1e-6]
        if not calm:
            raise LackingError("no learning rate as low as eta_div / 10")
        means[size] = mean([second.loss(lr) - first.loss(lr) for lr in calm])[size]
    return pd.DataFrame(means)


def mean(tables: Sequence[Table]) -> Table:
    """Cell by cell; NaN where any is."""
    return reduce(add, tables) / len(tables)


def parts(**tables: Effects) -> pd.DataFrame:
    """Effects of several parts of a claim side by side; each must lie on its side."""
    return pd.concat(tables, axis=1)
