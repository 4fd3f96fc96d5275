"""Limits: where the committed records begin to fail, in the unit of a number of the user's, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lab.analysis.laws.fits as fits
from lab.analysis.laws.brackets import PowerLaw
from lab.analysis.laws.fits import Crossing, Line
from lab.core import shipped

# Written by ``make results-readme``.
FILE, PUBLIC = (Path(__file__).with_name(f"{name}.yaml") for name in ("limits", "public"))
PUBLIC_RUNS = "public runs"  # the source of a limit that is not measured in a sweep of the lab alone
TOKENS_PER_PARAMETER = 20  # of a run whose tokens are not given


@dataclass(frozen=True)
class Limit:
    """Where the records begin to fail.

    Attributes:
        sweep: the folder of the records, or ``PUBLIC_RUNS``.
        runs: whose they are, with which optimizer and schedule.
        seeds: how many seeds each number has.
        sizes: the smallest and the largest model (parameters without embeddings).
        steps: the fewest and the most steps.
        tried: the lowest and the highest value of the user's number that ran; NaN where the number itself is measured.
        level: the limit with its 95 % interval, if it has no trend over size.
        law: the limit as a power of ``params`` and perhaps ``tokens``, if it is known so.
        offsets: decades by which the limit of an optimizer lies above that law, and the standard error.
        lines: log10 of a measurement over log10 of size, by learning rate.
        beyond: the value of that measurement beyond which runs fail; NaN if the measurement is itself the limit.
    """

    sweep: str
    runs: str
    seeds: int
    sizes: tuple[float, float]
    steps: tuple[int, int]
    tried: tuple[float, float] = (math.nan, math.nan)
    level: Crossing | None = None
    law: PowerLaw | None = None
    offsets: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    lines: Mapping[float, Line] = field(default_factory=dict)
    beyond: float = math.nan

    @property
    def place(self) -> str:
        """Where its numbers are."""
        return self.sweep if self.sweep == PUBLIC_RUNS else f"results/{self.sweep}"

    @property
    def has_trend(self) -> bool:
        """Whether its trend over size is known."""
        return bool(self.law.exponents) if self.law else self.level is None

    def at(self, numbers: Mapping[str, Any]) -> Crossing:
        """The limit for a run of these numbers, with the ends of its 95 % interval.

        A law takes the tokens that are given, or else ``TOKENS_PER_PARAMETER`` to each parameter. Of a model with
        experts it takes both sizes: the interval reaches from all parameters to those that act on a token.

        An end is infinite above all values that ran, and 0 at the lowest of them or below, where nothing ran. Of a
        measurement by learning rate the nearest learning rate that ran counts, or the highest without one.
        """
        size, lr = numbers["params"], numbers.get("lr")
        if self.law:
            offset, error = self._offset(str(numbers.get("optimizer", "adamw")))
            sizes = [size, numbers.get("active", size)]
            values = [{"params": each, "tokens": numbers.get("tokens", TOKENS_PER_PARAMETER * each)} for each in sizes]
            first, last = (self.law.predict(each, offset, error) for each in values)
            return Crossing(
                math.sqrt(first.middle * last.middle),
                min(first.earliest, last.earliest),
                max(first.latest, last.latest),
            )
        if self.level or not math.isnan(self.beyond):
            found = self.level or fits.lr_beyond(self.lines, self.beyond, 1, size)
            return Crossing(*(0.0 if end <= self.tried[0] * (1 + 1e-9) else end for end in found))
        return Crossing(*(10 ** float(end) for end in self.lines[self.nearest(lr)].predict(size)))

    def _offset(self, optimizer: str) -> tuple[float, float]:
        """Of an optimizer that did not run, the mean over those that did and their spread."""
        if optimizer in self.offsets or not self.offsets:
            return self.offsets.get(optimizer, (0.0, 0.0))
        known = [offset for offset, _ in self.offsets.values()]
        return statistics.mean(known), statistics.stdev(known) * math.sqrt(1 + 1 / len(known))

    def nearest(self, lr: float | None) -> float:
        """The learning rate that ran which is nearest to this one; the highest without one."""
        return min(self.lines, key=lambda known: abs(math.log(known / lr))) if lr else max(self.lines)


@cache
def read_limits() -> dict[str, Limit]:
    """The limits that come with the lab, by name."""
    return {name: _read(entry) for name, entry in shipped.load(FILE).items()}


def _read(entry: Mapping[str, Any]) -> Limit:
    lines = {float(lr): Line(**line) for lr, line in entry.get("lines", {}).items()}
    law = PowerLaw(**entry["law"]) if "law" in entry else None
    level = Crossing(*map(float, entry["level"])) if "level" in entry else None
    pairs = {key: tuple(map(float, entry[key])) for key in ("sizes", "tried") if key in entry}
    offsets = {name: tuple(pair) for name, pair in entry.get("offsets", {}).items()}
    found = {"level": level, "law": law, "lines": lines, "offsets": offsets, "steps": tuple(map(int, entry["steps"]))}
    return Limit(**{**entry, **pairs, **found})


@cache
def public() -> Mapping[str, Any]:
    """What public runs had, by number, as ``ranges``; and the ``changes`` of a tuned recipe that broke them."""
    content: Mapping[str, Any] = shipped.load(PUBLIC)
    return content
