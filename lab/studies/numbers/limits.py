"""Limits: where the committed records begin to fail, in the unit of a number of the user's, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lab.analysis.forecast.fits as fits
from lab.analysis.forecast.fits import Crossing, Line
from lab.core import shipped

# Written by ``make results-readme``.
FILE = Path(__file__).with_name("limits.yaml")


@dataclass(frozen=True)
class Limit:
    """Where the records begin to fail.

    Attributes:
        sweep: the folder of the records.
        seeds: how many seeds each number has.
        sizes: the smallest and the largest model (parameters without embeddings).
        steps: the fewest and the most steps.
        tried: the lowest and the highest value of the user's number that ran; NaN where the number itself is measured.
        level: the limit with its 95 % interval, if it has no trend over size.
        line: log10 of the limit over log10 of size, if it has one.
        lines: log10 of a measurement over log10 of size, by learning rate.
        beyond: the value of that measurement beyond which runs fail; NaN if the measurement is itself the limit.
    """

    sweep: str
    seeds: int
    sizes: tuple[float, float]
    steps: tuple[int, int]
    tried: tuple[float, float] = (math.nan, math.nan)
    level: Crossing | None = None
    line: Line | None = None
    lines: Mapping[float, Line] = field(default_factory=dict)
    beyond: float = math.nan

    @property
    def has_trend(self) -> bool:
        """Whether its trend over size is known."""
        return self.level is None

    def at(self, size: float, lr: float | None) -> Crossing:
        """The limit for a model of this size (parameters), with the ends of its 95 % interval.

        An end is infinite above all values that ran, and 0 at the lowest of them or below, where nothing ran. Of a
        measurement by learning rate the nearest learning rate that ran counts, or the highest without one.
        """
        if self.line:
            return Crossing(*(10 ** float(end) for end in self.line.predict(size)))
        if self.level or not math.isnan(self.beyond):
            found = self.level or fits.lr_beyond(self.lines, self.beyond, 1, size)
            return Crossing(*(0.0 if end <= self.tried[0] * (1 + 1e-9) else end for end in found))
        return Crossing(*(10 ** float(end) for end in self.lines[self.nearest(lr)].predict(size)))

    def nearest(self, lr: float | None) -> float:
        """The learning rate that ran which is nearest to this one; the highest without one."""
        return min(self.lines, key=lambda known: abs(math.log(known / lr))) if lr else max(self.lines)


@cache
def read_limits() -> dict[str, Limit]:
    """The limits that come with the lab, by name."""
    return {name: _read(entry) for name, entry in shipped.load(FILE).items()}


def _read(entry: Mapping[str, Any]) -> Limit:
    lines = {float(lr): Line(**line) for lr, line in entry.get("lines", {}).items()}
    line = Line(**entry["line"]) if "line" in entry else None
    level = Crossing(*map(float, entry["level"])) if "level" in entry else None
    pairs = {key: tuple(map(float, entry[key])) for key in ("sizes", "tried") if key in entry}
    return Limit(**{**entry, **pairs, "steps": tuple(entry["steps"]), "level": level, "line": line, "lines": lines})
