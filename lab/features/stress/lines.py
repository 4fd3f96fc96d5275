"""The lines of a card: what it says of each test, by its number, its interval, its verdict and a strip of its zones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from lab.analysis.statistics import Interval
from lab.analysis.stress.battery import FAILS, NOT_JUDGED, OPEN, PASSES, WEAK, Battery, StressTest
from lab.analysis.stress.measures import Outcomes, beats_bigram, curve, measure, pooled_interval

VERDICTS = (FAILS, WEAK, OPEN, PASSES)
STRIP = 32  # characters
BETWEEN = (0.375, 0.625)  # the part of a strip between the zones
SEED = "o"
UNTRAINED = "the recipe ends no better than a bigram model at any learning rate"
ZONE_MARKS = {PASSES: ".", WEAK: ":", FAILS: "#"}


def verdict_of(test: StressTest, interval: Interval, *, is_bound: bool = False, stuck: int = 0) -> str:
    """The verdict of a test.

    A recipe passes if its mean lies in the zone that passes and its interval excludes the zone that fails, and fails
    likewise. Between the zones it is weak if its interval is no wider than the gap between them. Anything else is open.

    Args:
        test: the test.
        interval: of its measure.
        is_bound: whether the measure is a lower bound, which cannot fail or be weak.
        stuck: how many seeds are stuck.
    """
    if test.counts_stuck and stuck:
        return FAILS
    if not math.isfinite(interval.high - interval.low):
        return OPEN
    at = test.share(interval.mean)
    first, last = sorted((test.share(interval.low), test.share(interval.high)))
    if at <= 0 and last < 1:
        return PASSES
    if is_bound:
        return OPEN
    if at >= 1 and first > 0:
        return FAILS
    return WEAK if 0 < at < 1 and last - first <= 1 else OPEN


class Line(NamedTuple):
    """What a card says of a test.

    Attributes:
        test: the test.
        verdict: one of ``VERDICTS``, or ``NOT_JUDGED``.
        interval: 95 % interval of the measure, over seeds.
        is_bound: whether the measure is a lower bound.
        stuck: of how many seeds training was stuck, or diverged.
        seeds: the seeds of the values of the interval, in their order.
        capped: of how many seeds the loss of a run counts as that at initialization.
        caveat: why a small number says nothing of what the recipe stands; empty where nothing speaks against it.
    """

    test: StressTest
    verdict: str
    interval: Interval
    is_bound: bool
    stuck: int
    seeds: tuple[int, ...] = ()
    capped: int = 0
    caveat: str = ""

    @property
    def by_seed(self) -> pd.Series[float]:
        """Its measure by seed."""
        return pd.Series(self.interval.values, index=list(self.seeds), dtype=float)

    @property
    def number(self) -> str:
        """The number with its interval and its unit, ``0.83 ± 0.20 decades``; empty where the test is not judged."""
        if self.verdict == NOT_JUDGED:
            return ""
        if math.isnan(self.interval.mean):
            return "no value"
        bound = "at least " if self.is_bound else ""
        stuck = f", {self.stuck} of {self.interval.n} seeds stuck" if self.stuck and self.test.counts_stuck else ""
        capped = f", {self.capped} of {self.interval.n} seeds capped" if self.capped else ""
        return f"{bound}{self.interval:±.2f} {self.test.unit}{stuck}{capped}"

    @property
    def outcome(self) -> str:
        """The number and the verdict: ``0.83 ± 0.20 decades, fails``; the verdict alone where it is not judged."""
        return ", ".join(filter(None, [self.number, self.verdict]))

    @property
    def shown_values(self) -> tuple[float, ...]:
        """A value per seed for readers; none where the test is not judged."""
        return () if self.verdict == NOT_JUDGED else self.interval.values

    @property
    def zones(self) -> tuple[str, str]:
        """Where it passes, and where it fails: ``over 1.4`` and ``under 1``."""
        above, below = ("over", "under") if self.test.passes > self.test.fails else ("under", "over")
        return f"{above} {self.test.passes:g}", f"{below} {self.test.fails:g}"

    def strip(self) -> str:
        """The zones as plain characters, with a mark for each seed, or with the number of seeds in one place.

        A test that is not judged has no marks.
        """
        marks = [ZONE_MARKS[zone_at((place + 0.5) / STRIP)] for place in range(STRIP)]
        places = [min(int(along(self.test, value) * STRIP), STRIP - 1) for value in self.shown_values]
        for place in places:
            seeds = places.count(place)
            marks[place] = SEED if seeds == 1 else str(seeds) if seeds < 10 else "*"
        return "".join(marks)


def along(test: StressTest, value: float) -> float:
    """Where a value lies along a strip, from 0, which passes, to 1, which fails; values beyond lie at the ends."""
    low, high = BETWEEN
    return min(max(low + test.share(value) * (high - low), 0.0), 1.0)


def zone_at(share: float) -> str:
    """The zone at a place along a strip."""
    return PASSES if share < BETWEEN[0] else WEAK if share < BETWEEN[1] else FAILS


def strips(lines: Sequence[Line], names: Sequence[str] = ()) -> Iterator[str]:
    """Yield a line of text for each of these lines of a card: its name or title, strip, verdict and number."""
    names = names or [line.test.title for line in lines]
    width = max(map(len, names), default=0)
    for name, line in zip(names, lines, strict=True):
        yield f"{name:{width}}  [{line.strip()}]  {line.verdict:10}  {line.number}".rstrip()


def lines_of(tests: Iterable[StressTest], done: Outcomes, battery: Battery) -> list[Line]:
    """What the runs so far say of each test; tests some of whose runs are missing are left out.

    No test is judged of a recipe that ends no better than a bigram model at any learning rate of its curve.
    """
    lines = [line for test in tests if (line := _line_of(test, done, battery))]
    if is_judged(done):
        return lines
    return [line._replace(verdict=NOT_JUDGED, caveat=UNTRAINED) for line in lines]


def is_judged(done: Outcomes) -> bool:
    """Whether a recipe ends better than a bigram model at any learning rate of its curve, if it has one."""
    return not len(curve(done)) or beats_bigram(done)


def _line_of(test: StressTest, done: Outcomes, battery: Battery) -> Line | None:
    """What the runs so far say of a test; None as long as some of its runs are missing."""
    measured = measure(test, done, battery)
    if measured is None:
        return None
    interval = pooled_interval(list(measured.seeds), test.spread)
    verdict = verdict_of(test, interval, is_bound=measured.is_bound, stuck=measured.stuck)
    if verdict == PASSES and measured.caveat:
        verdict = NOT_JUDGED
    seeds = tuple(int(str(seed)) for seed in measured.seeds.index)
    return Line(test, verdict, interval, measured.is_bound, measured.stuck, seeds, measured.capped, measured.caveat)
