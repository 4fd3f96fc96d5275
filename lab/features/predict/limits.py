"""Limits: the numbers from which public runs fail, as powers of size and tokens, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lab.analysis.laws.brackets import PowerLaw
from lab.analysis.laws.fits import Crossing
from lab.core import shipped
from lab.core.schema import build

FILE = Path(__file__).with_suffix(".yaml")  # written by ``make results-readme``
TOKENS_PER_PARAMETER = 20  # of a run whose tokens are not given


@dataclass(frozen=True)
class Limit:
    """The number from which public runs fail.

    Attributes:
        runs: whose they are, with which optimizer and schedule.
        sizes: the smallest and the largest model (parameters without embeddings).
        steps: the fewest and the most steps.
        tried: the lowest and the highest value of the number that ran.
        law: the limit as a power of ``params`` and perhaps ``tokens``, or a level.
        ranges: the least and the most of other numbers that it depends on.
        offsets: decades by which the limit of an optimizer lies above that law, and the standard error.
    """

    runs: str
    sizes: tuple[float, float]
    steps: tuple[int, int]
    tried: tuple[float, float]
    law: PowerLaw
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    offsets: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def at(self, numbers: Mapping[str, Any]) -> Crossing:
        """The limit for a run of these numbers, with the ends of its 95 % interval.

        It takes the tokens that are given, or else ``TOKENS_PER_PARAMETER`` to each parameter. Of a model with experts
        it takes both sizes: the interval reaches from all parameters to those that act on a token.
        """
        offset, error = self._offset(str(numbers.get("optimizer", "adamw")))
        sizes = [numbers["params"], numbers.get("active", numbers["params"])]
        values = [{"params": size, "tokens": numbers.get("tokens", TOKENS_PER_PARAMETER * size)} for size in sizes]
        first, last = (self.law.predict(each, offset, error) for each in values)
        return Crossing(
            math.sqrt(first.middle * last.middle),
            min(first.earliest, last.earliest),
            max(first.latest, last.latest),
        )

    def _offset(self, optimizer: str) -> tuple[float, float]:
        """Of an optimizer that did not run, the mean over those that did and their spread."""
        if optimizer in self.offsets or not self.offsets:
            return self.offsets.get(optimizer, (0.0, 0.0))
        known = [offset for offset, _ in self.offsets.values()]
        return statistics.mean(known), statistics.stdev(known) * math.sqrt(1 + 1 / len(known))


@cache
def read_limits() -> dict[str, Limit]:
    """The limits that come with the lab, by name."""
    return {name: build(Limit, entry, f"limits.{name}") for name, entry in shipped.load(FILE).items()}
