"""At which learning rates runs fail, and at which logits, residual stream or gradients run away, for each curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.crossings import Crossing, crossing, failing, over_seeds
from lab.analysis.probe_values import log_largest, log_last
from lab.analysis.sensitivity import LOST, capped
from lab.analysis.statistics import Interval, student_t
from lab.core import shipped
from lab.core.schema import build
from lab.records.store import Records

FAILS_AT = 0.5  # of the way from the best loss to that of a unigram model, from which a learning rate fails
HALF, COSTLY = "half of the way", f"{LOST:g} nats up"
TAKES: Mapping[str, Callable[[Records, str], pd.Series]] = {"largest": log_largest, "last": log_last}


@dataclass(frozen=True)
class Runaway:
    """A quantity that runs away, as a row of ``runaway.yaml`` describes it.

    Attributes:
        title: its name for readers.
        probe: what measures it.
        takes: which of the values of a run counts, ``largest`` or ``last``.
        level: above which it has run away.
        means: what the level costs.
        measured: the claim, or the file, that says so.
        power: to which the values of the probe are taken.
    """

    title: str
    probe: str
    takes: str
    level: float
    means: str
    measured: str
    power: float = 1.0

    def of_runs(self, records: Records) -> pd.Series:
        """The quantity by run id; without runs that did not record it."""
        return 10 ** (self.power * TAKES[self.takes](records, self.probe))


@cache
def read_runaways() -> Mapping[str, Runaway]:
    """The quantities by name, in the order of reports."""
    rows = shipped.load(Path(__file__).with_suffix(".yaml"))
    return {name: build(Runaway, row, f"runaway.{name}") for name, row in rows.items()}


def crossings(records: Records, points: pd.DataFrame, names: Iterable[str] | None = None) -> pd.DataFrame:
    """A row for each quantity that the runs of a curve and seed have: where it crosses its level.

    Quantities are ``HALF`` and ``COSTLY``, which are sought above the best learning rate, and the keys of
    ``read_runaways`` that were recorded, from the lowest learning rate on. A run whose loss is not finite lies beyond
    every level. Curves of one learning rate have no row.

    Args:
        records: of the runs.
        points: ``curves.points(records.runs)``.
        names: of the keys of ``read_runaways``; all unless given.

    Returns:
        Columns ``arm``, ``size``, ``parameters``, ``curve``, ``seed``, ``quantity`` and ``crossing``.
    """
    asked = [*(read_runaways() if names is None else names)]
    values = {name: points["id"].map(read_runaways()[name].of_runs(records)) for name in asked}
    table = points.assign(**values, capped=capped(points))
    rows = []
    for _, curve in table[table["lr"] > 0].groupby(["curve", "seed"], sort=False):
        if curve["lr"].nunique() > 1:
            row = {name: curve[name].iloc[0] for name in ("arm", "size", "parameters", "curve", "seed")}
            rows += [{**row, "quantity": quantity, "crossing": found} for quantity, found in of_curve(curve, asked)]
    return pd.DataFrame(rows, columns=["arm", "size", "parameters", "curve", "seed", "quantity", "crossing"])


def of_curve(curve: pd.DataFrame, names: Iterable[str]) -> Iterator[tuple[str, Crossing]]:
    """Yield each quantity of ``crossings`` with its crossing, of the runs of one curve and seed.

    Columns: ``lr``, ``loss``, ``capped`` (see ``sensitivity.capped``), ``loss_unigram``, and one for each of ``names``.
    """
    lr, loss = curve["lr"].to_numpy(float), curve["capped"].to_numpy(float)
    way = curve["loss_unigram"].iloc[0] - np.nanmin(loss, initial=math.inf)
    if way > 0:
        yield HALF, failing(lr, loss, FAILS_AT * way)
    yield COSTLY, failing(lr, loss, LOST)
    ended = np.isfinite(curve["loss"].to_numpy(float))
    for name in names:
        value = curve[name].to_numpy(float)
        known = np.isfinite(value) | ~ended  # a run may be older than its probe
        if (np.isfinite(value) & ended).any():
            yield (
                name,
                crossing(lr[known], np.where(ended, value, math.nan)[known], read_runaways()[name].level, log=True),
            )


class Rate(NamedTuple):
    """The learning rate at which a quantity of a curve crosses its level.

    Attributes:
        quantity: as in ``crossings``.
        rate: over seeds, see ``over_seeds``.
        slope: what the quantity rises by per decade of learning rate there, over seeds: decades, but nats of a loss.
        seeds: the crossing of each seed.
    """

    arm: str
    size: int
    parameters: int
    curve: int
    quantity: str
    rate: Interval
    slope: Interval
    seeds: Sequence[Crossing]

    @property
    def level(self) -> str:
        """What is crossed, in words."""
        runaway = read_runaways().get(self.quantity)
        return f"{runaway.title} {runaway.level:,g}" if runaway else f"loss {self.quantity}"


def rates(records: Records, points: pd.DataFrame, names: Iterable[str] | None = None) -> list[Rate]:
    """The rates of every curve, over its seeds; where none crosses, a bound. Arguments are those of ``crossings``."""
    found = []
    for _, seeds in crossings(records, points, names).groupby(["curve", "quantity"], sort=False):
        passed = list(seeds["crossing"])
        slope = student_t(each.slope for each in passed if math.isfinite(each.slope))
        first = seeds.iloc[0]
        numbers = int(first["size"]), int(first["parameters"]), int(first["curve"])
        found.append(Rate(str(first["arm"]), *numbers, str(first["quantity"]), over_seeds(passed), slope, passed))
    return found
