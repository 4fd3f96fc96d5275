"""The lines of a card: what it says of each test, by its number, its interval, its verdict and a strip of its zones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from lab.analysis.statistics import Interval, zones
from lab.analysis.stress.battery import FAILS, NOT_JUDGED, OPEN, PASSES, WEAK, Battery, StressTest
from lab.analysis.stress.measures import Outcomes, beats_bigram, curve, measure, pooled_interval
from lab.analysis.text import listed

VERDICTS = (FAILS, WEAK, OPEN, PASSES)
STRIP = 32  # characters
BETWEEN = (0.375, 0.625)  # the part of a strip between the zones
SEED = "o"
UNTRAINED = "the recipe ends no better than a bigram model at any learning rate"
ZONES = (PASSES, WEAK, FAILS)
ZONE_MARKS = {PASSES: ".", WEAK: ":", FAILS: "#"}


def possible_zones(test: StressTest, interval: Interval) -> tuple[str, ...]:
    """The zones of a test in which the mean of its measure may lie, from that in which recipes pass."""
    low, high = sorted((test.share(interval.low), test.share(interval.high)))
    first, last = zones(Interval(test.share(interval.mean), low, high, interval.n), (0.0, 1.0))
    return ZONES[first : last + 1]


def verdict_of(test: StressTest, interval: Interval, *, is_bound: bool = False, stuck: int = 0) -> str:
    """The verdict of a test: the zone in which the whole interval of its measure lies; open where it lies in several.

    Args:
        test: the test.
        interval: of its measure.
        is_bound: whether the measure is a lower bound, which cannot fail or be weak.
        stuck: how many seeds are stuck.
    """
    if test.counts_stuck and stuck:
        return FAILS
    possible = possible_zones(test, interval)
    return OPEN if len(possible) > 1 or (is_bound and possible != (PASSES,)) else possible[0]


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
        between = f", {listed(self.between, 'or')}" if self.between else ""
        return f"{bound}{self.interval:±.2f} {self.test.unit}{stuck}{capped}{between}"

    @property
    def between(self) -> tuple[str, ...]:
        """The verdicts between which an open one lies; empty for others, and where too few seeds tell nothing."""
        is_open = self.verdict == OPEN and math.isfinite(self.interval.high - self.interval.low)
        return possible_zones(self.test, self.interval) if is_open and not self.is_bound else ()

    @property
    def may_fail(self) -> bool:
        """Whether the recipe certainly does not pass, and may fail."""
        return self.verdict == FAILS or (FAILS in self.between and PASSES not in self.between)

    @property
    def outcome(self) -> str:
        """The number and the verdict: ``0.83 ± 0.20 decades, fails``; the verdict alone where it is not judged."""
        return ", ".join(filter(None, [self.number, self.verdict]))

    @property
    def shown_values(self) -> tuple[float, ...]:
        """A value per seed for readers; none where the test is not judged."""
        return () if self.verdict == NOT_JUDGED else self.interval.values

    @property
    def edges(self) -> tuple[str, str]:
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
    if measured.caveat and verdict != FAILS and PASSES in possible_zones(test, interval):
        verdict = NOT_JUDGED
    seeds = tuple(int(str(seed)) for seed in measured.seeds.index)
    return Line(test, verdict, interval, measured.is_bound, measured.stuck, seeds, measured.capped, measured.caveat)
