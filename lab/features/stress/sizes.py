"""Headroom with size: how the tolerance of a recipe and its smallest failing learning rate change with its size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import lab.analysis.laws.fits as fits
from lab.analysis.laws.fits import Crossing, Line, crossing_text
from lab.analysis.stress.measures import Outcomes, curve, failing_lrs, tolerances
from lab.analysis.text import count, finite, format_value
from lab.core import files
from lab.records.plans import Setting

TOLERANCE, FAILING = "tolerance", "smallest failing learning rate"
FEWEST_SIZES = 3
# Written by ``make results-readme``: how well lines through the smaller sizes of committed sweeps foretell the largest.
SCORES = Path(__file__).with_name("size_scores.csv")


class SizeTrend(NamedTuple):
    """What three sizes or more say of a recipe.

    Attributes:
        sizes: of the models that ran (parameters), rising.
        tolerance: decades of tolerance over log10 of size; None with values at fewer than three sizes.
        failing: log10 of the smallest failing learning rate over log10 of size; None likewise.
        lr: the user's learning rate; NaN if none was given.
        fails_from: the size from which that learning rate fails, with the ends of its 95 % interval.
    """

    sizes: Sequence[int]
    tolerance: Line | None
    failing: Line | None
    lr: float
    fails_from: Crossing

    def sentences(self) -> Iterator[str]:
        """Yield the trends, the size from which the user's learning rate fails, and how well such lines foretell."""
        ends = f"{count(self.sizes[0])} to {count(self.sizes[-1])} parameters"
        trends = {TOLERANCE: self.tolerance, FAILING: self.failing}
        known = [f"the {name} changes by {line.slope_interval:±+.2f} decades" for name, line in trends.items() if line]
        unknown = [name for name, line in trends.items() if not line]
        if known:
            yield f"Headroom with size, {ends}: per decade of size, {' and '.join(known)}."
        for name in unknown:
            yield f"No trend of the {name}: it has a value at fewer than {FEWEST_SIZES} sizes."
        if self.failing and math.isnan(self.lr):
            yield "With optimizer.lr=LR, the card says at which size that learning rate would fail."
        elif self.failing:
            size = crossing_text(self.fails_from, count, self.sizes[0], fits.FARTHEST)
            between = math.log10(self.fails_from.middle / self.sizes[-1])
            far = f", an extrapolation over {between:.1f} decades" if 0 < between < math.inf else ""
            yield f"A learning rate of {format_value(self.lr)} would fail from {size} parameters{far}."
        if known:
            yield score_sentence()

    def plain(self) -> dict[str, Any]:
        """The trends in plain values, and in sentences; None where a number is unknown or out of reach."""
        unknown = {"slope": None, "n": 0}
        return {
            "parameters": list(self.sizes),
            "unit": "decades per decade of parameters",
            "tolerance": self.tolerance.plain if self.tolerance else unknown,
            "smallest_failing_lr": self.failing.plain if self.failing else unknown,
            "lr": finite(self.lr),
            "fails_from_size": self.fails_from.plain,
            "is_extrapolated": bool(self.fails_from.middle > self.sizes[-1]),
            "sentences": list(self.sentences()),
        }


def size_trend(done: Outcomes, sizes: Mapping[tuple[str, ...], int], lr: float) -> SizeTrend | None:
    """The trends over the sizes of a card; None if fewer than three sizes ran.

    Args:
        done: the runs of the card.
        sizes: the parameters without embeddings by the overrides of each size that ran, none for the recipe's own.
        lr: the user's learning rate, NaN without one.
    """
    if len({*sizes.values()}) < FEWEST_SIZES:
        return None
    losses = {size: curve(done, words) for words, size in sorted(sizes.items(), key=lambda item: item[1])}
    table = values_by_size(losses)
    tolerance, failing = (_line(table, quantity) for quantity in (TOLERANCE, FAILING))
    fails_from = Crossing(math.nan, math.nan, math.nan)
    if failing and not math.isnan(lr):
        searched = np.geomspace(min(losses), fits.FARTHEST, fits.SEARCHED_SIZES)
        fails_from = fits.beyond(searched, failing.predict(searched), lr, -1)
    return SizeTrend(list(losses), tolerance, failing, lr, fails_from)


def values_by_size(losses: Mapping[int, pd.DataFrame]) -> pd.DataFrame:
    """A row per size and seed with both quantities, whose log10 has a trend; NaN where the loss has not risen."""
    rows = []
    for size, table in losses.items():
        failing = failing_lrs(table)
        for seed, (decades, is_closed_below, is_closed_above) in tolerances(table).items():
            is_known = is_closed_below and is_closed_above
            values = {TOLERANCE: 10**decades if is_known else math.nan, FAILING: failing[seed]}
            rows.append({"size": size, "seed": seed, **values})
    return pd.DataFrame(rows)


def _line(table: pd.DataFrame, quantity: str) -> Line | None:
    usable = table.dropna(subset=quantity)
    return fits.fit(usable["size"], usable[quantity]) if usable["size"].nunique() >= FEWEST_SIZES else None


def settings_of_sizes(done: Outcomes, words: Sequence[tuple[str, ...]]) -> list[Setting]:
    """The settings of other sizes, at the learning rates of the recipe's own curve."""
    lrs = sorted(setting.lr for setting in done if not setting.words)
    return [Setting(of_size, lr) for of_size in words if of_size for lr in lrs]


@cache
def score_sentence() -> str:
    """How well such lines foretell the largest size of committed sweeps."""
    scores = files.read_csv(SCORES)
    parts = []
    for quantity, of_quantity in scores.groupby("quantity", sort=False):
        median, unchanged = of_quantity["error"].abs().median(), of_quantity["unchanged"].abs().median()
        inside, seeds = of_quantity["inside"].sum(), of_quantity["seeds"].sum()
        parts.append(
            f"of the {quantity} by {median:.2f} decades in the median of {len(of_quantity)} arms ({unchanged:.2f} "
            f"without a trend), with {inside} of {seeds} seeds in the 95 % interval"
        )
    return f"On committed sweeps, lines through the smaller sizes miss the largest one {'; '.join(parts)}."
