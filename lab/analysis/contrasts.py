"""Contrasts: a quantity of every arm, its difference from a reference arm by seed, and how many seeds tell it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.sensitivity import WINDOW, Study, Window, compares_sensitivity, per_seed
from lab.analysis.statistics import CHANGE_LEVEL, FEWEST_SEEDS, Interval, holm, power_of, student_t, unpaired
from lab.analysis.text import count, first_to_last, format_value
from lab.records.imported import UNKNOWN_SIZE

ANY_SWEEP = "*"
BASELINES = ("baseline", "base", "control", "default", "reference", "vanilla", "none", "off")
NO_REFERENCE = "-"
TIMES = "\N{MULTIPLICATION SIGN}"

Cells = Mapping[str, Mapping[str, Interval]]
Points = Callable[[Study], pd.DataFrame]
Reduce = Callable[[pd.DataFrame, Window], pd.DataFrame]


class Measure(NamedTuple):
    """A quantity in which arms are compared.

    Attributes:
        name: the name of the quantity, which can begin a sentence; ``{axis}`` stands for the ``Axis`` of the curves.
        unit: its unit; empty for a pure number.
        points: makes the points of a study, under the names of the arms to be compared; no rows if nothing can be.
        reduce: makes a table of numbers from these points, and from the window of learning rates for a sensitivity. It
            has a row per arm and seed, and a column per place of measurement, named after it. NaN is no number.
        better: ``lower`` or ``higher``, whichever is better; empty if neither is.
        is_log: whether numbers are log10 of those shown, so that means are geometric and differences are factors.
        reference: the arm with which the others are compared, or ``NO_REFERENCE``; empty for the default recipe's.
        asked_by: sweeps whose question is about this quantity; ``ANY_SWEEP`` for all that ask about no other.
        affirmed_by: ``lower`` or ``different``, if the question is whether some arm is so compared with the reference.
        pairs: the columns in which runs of two arms must agree to be compared.
    """

    name: str
    unit: str
    points: Points
    reduce: Reduce
    better: str = ""
    is_log: bool = False
    reference: str = ""
    asked_by: tuple[str, ...] = ()
    affirmed_by: str = ""
    pairs: tuple[str, ...] = ("size", "seed", "lr", "column")

    def level(self, interval: Interval) -> str:
        """A value with its interval, ``0.148 [0.120, 0.176]``."""
        return interval.spelled(lambda value: _digits(10**value, 3)) if self.is_log else f"{interval:[]}"

    def with_unit(self, interval: Interval) -> str:
        """``level``, and the unit."""
        return f"{self.level(interval)} {self.unit}".rstrip()

    def change(self, interval: Interval) -> str:
        """A difference with its interval, ``+0.148 [+0.120, +0.176]``; of logs a factor, ``x2.1 [x1.7, x2.6]``."""
        if self.is_log:
            return interval.spelled(lambda value: f"{TIMES}{_digits(10**value, 2)}")
        return f"{interval:[]+}"


def _digits(value: float, digits: int) -> str:
    """A positive number to so many significant digits; with a power of ten only below 0.001 and from a million on."""
    rounded = float(f"{value:.{digits}g}")
    if 1e-3 <= rounded < 10 ** (digits - 1):
        return f"{rounded:#.{digits}g}"  # with the zeros at its end
    return f"{rounded:,.0f}" if 10 ** (digits - 1) <= rounded < 1e6 else format_value(rounded)


class Contrast(NamedTuple):
    """A measure of every arm.

    Attributes:
        reference: the arm with which the others are compared; empty if there is none.
        levels: the interval of the quantity, by arm and column.
        differences: the interval of each other arm's difference from the reference, over the seeds and learning rates
            that both ran; by arm and column. Of arms that share no seed, that of their means.
    """

    measure: Measure
    reference: str
    levels: Cells
    differences: Cells

    @property
    def columns(self) -> list[str]:
        """Places where the quantity was measured; the last is the largest model or the latest step."""
        return list(next(iter(self.levels.values())))

    def title(self, column: str = "") -> str:
        """The quantity, where it was measured, and its unit."""
        unit = f" ({self.measure.unit})" if self.measure.unit else ""
        return f"{self.measure.name} {column}".rstrip() + unit

    @property
    def arms(self) -> list[str]:
        """Every arm, the reference first."""
        return sorted(self.levels, key=lambda arm: arm != self.reference)


def contrast(
    measure: Measure, points: pd.DataFrame, reference: str, window: Window = WINDOW, level: float = 0.95
) -> Contrast:
    """Measure every arm of these points and compare it with the reference.

    Args:
        points: made by the ``points`` of the measure. With several arms, columns that only one arm has are left out.
        level: the confidence level of the intervals of differences; intervals of values are at 95 %.
    """
    table = measure.reduce(points, window)
    measured = (table.groupby(level="arm").count() > 0).sum()
    columns = [str(column) for column in table if measured[str(column)] > 1 or measured.max() == 1]
    own = _by_arm(table)
    levels = {
        arm: {column: student_t(_seeds(own, arm, column)) for column in columns}
        for arm in dict.fromkeys(map(str, points["arm"]))
    }
    differences = {
        arm: {
            column: _difference(_seeds(both, arm, column), _seeds(both, reference, column), level) for column in columns
        }
        for arm, both in _with_reference(measure, points, reference, window, own)
    }
    return Contrast(measure, reference, levels, differences)


def _with_reference(
    measure: Measure, points: pd.DataFrame, reference: str, window: Window, own: Mapping[str, pd.DataFrame]
) -> Iterator[tuple[str, Mapping[str, pd.DataFrame]]]:
    """Each arm with its values and those of the reference, over the runs that both have; none without a reference.

    Arms that share no seed are compared over the runs that agree in all else. ``own`` are the values of each arm over
    all of its runs.
    """
    arms = list(dict.fromkeys(map(str, points["arm"])))
    keys = [name for name in measure.pairs if name in points]
    columns, by_arm = [name for name in {*measure.pairs, "size"} if name in points], points.groupby("arm")
    runs_of = {arm: set(runs.itertuples(index=False, name=None)) for arm, runs in by_arm[columns]}
    seeds_of = {arm: set(seeds) for arm, seeds in by_arm["seed"]}
    alike = [arm for arm in arms if runs_of[arm] == runs_of.get(reference)]  # these are measured at once
    some_alike = 1 < len(alike) < len(arms)
    together = _by_arm(measure.reduce(points[points["arm"].isin(alike)], window)) if some_alike else own
    for arm in arms if reference else ():
        if arm == reference:
            continue
        if arm in alike:
            yield arm, together
            continue
        seeds = seeds_of[arm], seeds_of[reference]
        apart = not set.intersection(*seeds) and min(map(len, seeds)) >= FEWEST_SEEDS
        both = points[points["arm"].isin([arm, reference])]
        agreeing = both.groupby([name for name in keys if name != "seed" or not apart])["arm"].transform("nunique") == 2
        yield arm, _by_arm(measure.reduce(both[agreeing], window)) if agreeing.any() else {}


def _by_arm(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each arm, by seed."""
    return {str(arm): rows.droplevel("arm") for arm, rows in table.groupby(level="arm")}


def _seeds(tables: Mapping[str, pd.DataFrame], arm: str, column: str) -> pd.Series:
    """The finite values of an arm, by seed."""
    if arm not in tables or column not in tables[arm]:
        return pd.Series(dtype=float)
    values: pd.Series = tables[arm][column].astype(float)
    return values.where(np.isfinite(values))


def _difference(of_arm: pd.Series, of_reference: pd.Series, level: float) -> Interval:
    """The difference of two arms, paired by seed where they share seeds."""
    if set(of_arm.index) & set(of_reference.index) or of_arm.empty or of_reference.empty:
        return student_t(of_arm - of_reference, level)
    return unpaired(of_arm, of_reference, level)


def table(contrasts: Sequence[Contrast]) -> pd.DataFrame:
    """A table with a row for each arm: its differences from the reference by column, and the reference's own values.

    If there is one column only, the table shows both values and differences.
    """
    first = contrasts[0]
    cells = {"arm": [f"{arm} (reference)" if arm == first.reference else arm for arm in first.arms]}
    if len(contrasts) == len(first.columns) == 1:
        (column,) = first.columns
        cells[column or "value"] = [first.measure.level(first.levels[arm][column]) for arm in first.arms]
        if first.reference:
            cells["difference"] = [_cell(first, arm, column) if arm != first.reference else "" for arm in first.arms]
    else:
        for contrast in contrasts:
            for column in contrast.columns:
                name = contrast.title(column) if len(contrasts) > 1 else column
                cells[name] = [_cell(contrast, arm, column) for arm in first.arms]
    return pd.DataFrame(cells | {"n": [_seed_counts(first, arm) for arm in first.arms]})


def _cell(contrast: Contrast, arm: str, column: str) -> str:
    if arm not in contrast.levels:
        return ""
    if arm in contrast.differences and contrast.reference:
        return contrast.measure.change(contrast.differences[arm][column])
    return contrast.measure.level(contrast.levels[arm][column])


def _seed_counts(contrast: Contrast, arm: str) -> str:
    counts = sorted({cell.n for cell in (contrast.differences.get(arm) or contrast.levels[arm]).values() if cell.n})
    return first_to_last(map(str, counts)) or "0"


def baseline_of(arms: Sequence[str]) -> str:
    """The arm of an imported table with which the others are compared: one that is called a baseline, or the first."""
    words = [re.split(r"\W+", arm.lower()) for arm in arms]
    return next((arm for name in BASELINES for arm, of_arm in zip(arms, words, strict=True) if name in of_arm), arms[0])


def by_size(points: pd.DataFrame, window: Window = WINDOW) -> pd.DataFrame:
    """Means of ``value`` at each size."""
    return spread(points, "size", lambda size: f"at {count(size)} parameters" if size != UNKNOWN_SIZE else "")


def by_column(points: pd.DataFrame, window: Window = WINDOW) -> pd.DataFrame:
    """Means of ``value`` in each ``column``."""
    return spread(points, "column", str)


def spread(points: pd.DataFrame, by: str, name: Callable[[float], str]) -> pd.DataFrame:
    """Means of ``value`` at each value of the column ``by``, under these names."""
    means = points.groupby(["arm", "seed", by])["value"].mean().unstack(by)
    columns: list[Any] = list(means)
    return means.set_axis([name(column) for column in columns], axis=1)


def best_losses(points: pd.DataFrame, window: Window = WINDOW) -> pd.DataFrame:
    """The lowest loss of each curve, at each size; NaN where none is finite."""
    curves = [points["curve"], points["seed"]]
    alive = pd.Series(np.isfinite(points["loss"])).groupby(curves).transform("any")
    return by_size(points.assign(value=points["capped"].groupby(curves).transform("min").where(alive)))


def sensitivities(points: pd.DataFrame, window: Window, part: str = "total") -> pd.DataFrame:
    """Sensitivity or one of its ``PARTS``, at each size; NaN where no learning rate beat the bigram model."""
    inside = per_seed(points, *window).set_index(["curve", "seed"])[part]
    worse = (points["capped"] > points["loss_bigram"]).groupby([points["curve"], points["seed"]]).all()
    values = inside.mask(worse).to_dict()  # if nothing was learned, no learning rate made it worse
    return by_size(points.assign(value=[values[key] for key in zip(points["curve"], points["seed"], strict=True)]))


def own_points(study: Study) -> pd.DataFrame:
    """The points of a study under the names of its own arms."""
    return study.points


def final_losses(study: Study) -> pd.DataFrame:
    """The points of a study, with the final loss, at most that at initialization, as ``value`` (nats/token)."""
    return study.points.assign(value=study.points["capped"])


def comparable_by_sensitivity(study: Study) -> pd.DataFrame:
    """All points, if arms can be compared by sensitivity; else none."""
    return study.points if compares_sensitivity(study) else study.points.head(0)


# In these answers compare the arms of any sweep.
GENERAL = (
    Measure(
        "{axis.sensitivity}", "nats/token", comparable_by_sensitivity, sensitivities, "lower", asked_by=(ANY_SWEEP,)
    ),
    Measure("Best loss{axis.over}", "nats/token", own_points, best_losses, "lower", asked_by=(ANY_SWEEP,)),
)


POWER = 0.8
MOST_SEEDS = 10_000


def seeds_for(distance: float, spread: float, alpha: float, power: float = POWER) -> float:
    """The fewest seeds whose interval excludes, with probability ``power``, a bound at this distance from the mean.

    Args:
        distance: distance from the mean to the bound, in any unit.
        spread: standard deviation over seeds, in the same unit.
        alpha: one minus the level of the two-sided interval.

    Returns:
        The number of seeds; infinite if the mean lies beyond the bound, or if ``MOST_SEEDS`` are too few.
    """
    if not distance > 0:
        return math.inf
    if not spread:
        return FEWEST_SEEDS
    enough = (n for n in range(FEWEST_SEEDS, MOST_SEEDS + 1) if power_of(n, distance, spread, alpha) >= power)
    return next(enough, math.inf)


def tested(contrast: Contrast) -> dict[str, list[str]]:
    """A column for the table of a contrast: the p that its last difference is zero, adjusted for all arms (Holm)."""
    last = [contrast.differences[arm][contrast.columns[-1]] for arm in contrast.arms if arm in contrast.differences]
    ps = iter(holm([interval.p_inside(0, 0) if interval.n >= FEWEST_SEEDS else math.nan for interval in last]))
    known = [next(ps) if arm in contrast.differences else math.nan for arm in contrast.arms]
    return {"p": ["" if math.isnan(p) else f"{p:.2g}" for p in known]}


def power_of_difference(contrast: Contrast, wanted: float | None = None) -> str:
    """Which difference in the last column these seeds find, and how many seeds find the difference wanted.

    Args:
        contrast: arms and their differences from a reference.
        wanted: a difference in the unit of the measure; by default half of that which these seeds find.
    """
    differences = [cells[contrast.columns[-1]] for cells in contrast.differences.values()]
    known = [interval for interval in differences if interval.n >= FEWEST_SEEDS]
    if not known:
        return f"Fewer than {FEWEST_SEEDS} seeds that two arms share, so their differences have no interval."
    seeds, spread = min(interval.n for interval in known), max(interval.sd for interval in known)
    unit = contrast.measure.unit
    steps = (spread * 1.02**power for power in range(1000))
    found = next(step for step in steps if not spread or power_of(seeds, step, spread, CHANGE_LEVEL) >= POWER)
    smaller = found / 2 if wanted is None else wanted
    need = count_text(seeds_for(smaller, spread, CHANGE_LEVEL))
    return (
        f"Differences of the same seed spread by {spread:.2g} {unit}, so {seeds} seeds find one of {found:.2g} with "
        f"probability {POWER:.0%}; one of {smaller:.2g} takes {need} seeds."
    )


def count_text(seeds: float) -> str:
    return f"{seeds:.0f}" if math.isfinite(seeds) else "none"
