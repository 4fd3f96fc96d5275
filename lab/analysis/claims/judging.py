"""Claims: sentences of the paper that can be false, the rule of each, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd

from lab.analysis.claims.evidence import ArmTables, ComparisonGroup, Config, Evidence, MissingRunsError, extent
from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t
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
    effects: Callable[[ComparisonGroup], Effects]
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
) -> Callable[[Callable[[ComparisonGroup], Effects]], Callable[[ComparisonGroup], Effects]]:
    """Function decorator: file a claim under the function's name; width is always free."""

    def file(effects: Callable[[ComparisonGroup], Effects]) -> Callable[[ComparisonGroup], Effects]:
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
        raise MissingRunsError(f"{table.shape[1]} of {fewest} points that a trend takes")
    x = np.log10(np.array(table.columns, dtype=float))
    x -= x.mean()
    return pd.Series(table.to_numpy(dtype=float) @ (x / (x @ x)), table.index)


def extrapolated(table: pd.DataFrame, size: float) -> pd.Series:
    """Each row's straight line over log10 of the columns, told at another size."""
    middle = float(np.log10(np.array(table.columns, dtype=float)).mean())
    return slope(table, fewest=2) * (math.log10(size) - middle) + table.mean(axis=1, skipna=False)


def size_trend(some: ComparisonGroup, arm: ArmTables, part: str) -> pd.Series:
    """Slope of a sensitivity over size, nats/token per decade; that of S says nothing of an undertrained arm."""
    if part == "total":
        watch_training(some, arm)
    return slope(arm.table(part))


def watch_training(some: ComparisonGroup, arm: ArmTables) -> None:
    """Note where more than a third of S is under-training: its trend over size is one of training, not stability."""
    share = (arm.table("below").mean() / arm.table("total").mean()).dropna()
    if len(share) and share.max() > UNDERTRAINED:
        some.caution = (
            f"undertrained: at {share.idxmax():,} parameters {share.max():.0%} of S comes from learning rates "
            "below the best one"
        )


def drift(arm: ArmTables) -> pd.DataFrame:
    """Decades by which eta* (vertex of a parabola over log LR) lies above that of the smallest size, per larger one."""
    if len(arm.sizes) < 2:
        raise MissingRunsError("models of one size only")
    best = arm.table("log_best")
    return best.iloc[:, 1:].sub(best.iloc[:, 0], axis=0)


def border_over_top(arm: ArmTables) -> pd.DataFrame:
    """Decades by which the border of stability lies above the window's top: below zero, the top is lost."""
    return arm.table("border") - math.log10(arm.top)


def coincide(first: ArmTables, second: ArmTables) -> pd.DataFrame:
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
            raise MissingRunsError("no learning rate as low as eta_div / 10")
        means[size] = mean([second.loss(lr) - first.loss(lr) for lr in calm])[size]
    return pd.DataFrame(means)


def mean(tables: Sequence[Table]) -> Table:
    """Cell by cell; NaN where any is."""
    return reduce(add, tables) / len(tables)


def parts(**tables: Effects) -> pd.DataFrame:
    """Effects of several parts of a claim side by side; each must lie on its side."""
    return pd.concat(tables, axis=1)


class Verdict(NamedTuple):
    """How a claim came out; ``effect``, ``low`` and ``high`` are of its weakest part, NaN where there is none."""

    verdict: str
    effect: float
    low: float
    high: float
    seeds: int
    reason: str
    folder: str


def judge_claim(claim: Claim, folders: Sequence[Evidence]) -> Verdict:
    """Judge a claim on the setting, of all folders, that lends it most runs; the earlier folder among equals."""
    found: list[tuple[int, ComparisonGroup, Effects]] = []
    lacking: list[MissingRunsError] = []
    for some in (setting for folder in folders for setting in folder.settings(claim.frees)):
        if not some.holds(claim.holds):
            continue
        try:
            effects = claim.effects(some)
            found.append((len(set().union(*(arm.ids for arm in some.used))), some, effects))
        except MissingRunsError as gap:
            lacking.append(gap)
    if found:
        _, some, effects = max(found, key=lambda one: one[0])
        return _on(claim, some, effects)
    near = [str(reason) for reason in lacking if reason.near]
    needed = f"lab sweep {claim.sweep} trains what it takes"
    reason = f"{near[0]}; {needed}" if near else f"no folder has its arms; {needed}"
    return Verdict("not run", math.nan, math.nan, math.nan, 0, reason, "")


def _on(claim: Claim, some: ComparisonGroup, effects: Effects) -> Verdict:
    table = effects.to_frame() if isinstance(effects, pd.Series) else effects
    table = table.set_axis(range(table.shape[1]), axis=1)
    # rounded, since what is equal but for the arithmetic must not count as a difference
    whole = table.replace([np.inf, -np.inf], math.nan).dropna().round(9)
    came, interval = decide([student_t(whole[part]) for part in whole], claim.side)
    few = interval.n < FEWEST_SEEDS
    if some.caution and not few:
        came = "inconclusive"
    reason = "" if came == "reproduced" else _why(came, claim, some, interval)
    return Verdict(came, *interval[:4], reason, some.evidence.name)


def _why(came: str, claim: Claim, some: ComparisonGroup, interval: Interval) -> str:
    tried = f"tried: {extent(some.used)}"
    if interval.n < FEWEST_SEEDS:
        return "; ".join([f"{interval.n} whole seeds, an interval takes {FEWEST_SEEDS}", *_gaps(some.used)])
    if some.caution:
        return some.caution
    if came == "contradicted":
        return f"the interval lies wholly on the other side of what is claimed, {_spell(claim)}; {tried}"
    return f"the interval reaches beyond what is claimed, {_spell(claim)}; {tried}"


def _spell(claim: Claim) -> str:
    low, high = claim.side
    if math.isinf(high):
        return f"above {low:g} {claim.unit}".rstrip()
    return f"below {high:g} {claim.unit}" if math.isinf(low) else f"from {low:g} to {high:g} {claim.unit}"


def _gaps(arms: list[ArmTables]) -> list[str]:
    """What keeps seeds from counting."""
    known = {(outline.curve, outline.seed): outline for arm in arms for outline in arm.known}
    curves, seeds = ({key[part] for key in known} for part in (0, 1))
    sizes = {size for arm in arms for size in arm.sizes}
    wanted = len(curves) * len(seeds) * len(arms[0].lrs)
    missing = wanted - sum(len(outline.runs) for outline in known.values())
    said = [f"partial: {missing} of {wanted} runs missing"] if missing else []
    if any(set(arm.sizes) != sizes for arm in arms):
        said.append("not every arm has every size")
    if not all(outline.alive for outline in known.values()):
        said.append("an arm is nothing but NaN")
    elif not all(outline.learned for outline in known.values()):
        said.append("a curve never fell below the bigram model's loss")
    return said
