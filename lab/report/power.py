"""How many seeds a claim takes: from the spread of pilot seeds, or of those that left it open."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.judging.decision import ABOVE_ZERO, ALPHA, DECIDED, INCONCLUSIVE, READINGS, alpha_of
from lab.analysis.judging.effects import Qualified
from lab.analysis.judging.evidence import Evidence, MissingRunsError
from lab.analysis.judging.verdicts import CONTROLLED, MARGINS, UNDERTRAINED, effects_of
from lab.analysis.statistics import FEWEST_SEEDS, Interval
from lab.analysis.text import plain_text
from lab.core.errors import RequestError, nearest
from lab.report.scoreboard import ScoreboardRow, read
from lab.studies.claims import CLAIMS

POWER = 0.8
MOST_SEEDS = 10_000


def seeds_for(distance: float, spread: float, alpha: float, power: float = POWER) -> float:
    """The fewest seeds of which the interval excludes a bound that lies so far from the mean, with this probability.

    Args:
        distance: from the mean to the bound, in any unit.
        spread: standard deviation over seeds, in the same unit.
        alpha: one minus the level of the interval, two-sided.

    Returns:
        Infinite where the mean lies beyond the bound, or ``MOST_SEEDS`` are too few.

    References:
        Cohen 1988, Statistical power analysis for the behavioral sciences, section 2; by the noncentral t.
    """
    if not distance > 0:
        return math.inf
    if not spread:
        return FEWEST_SEEDS
    for count in range(FEWEST_SEEDS, MOST_SEEDS + 1):
        critical = scipy.special.stdtrit(count - 1, 1 - alpha / 2)
        if 1 - scipy.special.nctdtr(count - 1, distance / spread * math.sqrt(count), critical) >= power:
            return count
    return math.inf


def power_lines(folder: Path, name: str, effect: str | None = None, reading: str = "1") -> Iterator[str]:
    """Of each part of a claim the mean and spread of pilot seeds and the seeds that it takes, then those of the claim.

    Args:
        name: of the claim, as ``lab claims --json`` has it.
        effect: the smallest one to be found, a number in the unit of the claim; the mean of the pilot seeds unless
            given.
        reading: its number, at whose alpha the interval will be taken.

    Raises:
        RequestError: no such claim, no such folder, no such numbers, or fewer than three whole pilot seeds.
    """
    if reading not in map(str, range(1, READINGS + 1)):
        raise RequestError(f"--reading must be a number from 1 to {READINGS}, not {reading}")
    number, wanted = int(reading), _finite(effect) if effect is not None else None
    if name not in set(CLAIMS):
        raise RequestError(f"no claim {name!r}; {nearest(name, CLAIMS)}")
    claim = CLAIMS[name]
    try:
        _, effects = effects_of(claim, read([folder]))
    except MissingRunsError as error:
        raise RequestError(f"{folder}: {error}; lab sweep {claim.sweep} seed=100,101,102,103 trains a pilot") from None
    intervals = effects.intervals()
    if intervals[0].n < FEWEST_SEEDS:
        raise RequestError(f"{folder} has {intervals[0].n} whole seeds of {name}; a spread takes {FEWEST_SEEDS}")
    low, high = claim.side
    means = [one.mean if wanted is None else wanted for one in intervals]
    spreads = [_spread(one) for one in intervals]
    distances = [min(mean - low, high - mean) for mean in means]
    seeds = [seeds_for(*each, alpha_of(number)) for each in zip(distances, spreads, strict=True)]
    yield f"{claim.sentence} ({claim.source}, {claim.figure}), in {claim.unit}"
    table = {"part": effects.parts, "pilot mean": [one.mean for one in intervals], "spread over seeds": spreads}
    table |= {"distance to the bound": distances}
    rounded = pd.DataFrame(table).map(lambda value: f"{value:.3g}" if isinstance(value, float) else value)
    yield from plain_text(rounded.assign(**{f"seeds for {POWER:.0%}": [_count(each) for each in seeds]}))
    yield f"pilot of {intervals[0].n} seeds; the interval is that of reading {number}, {1 - alpha_of(number):.1%}"
    yield f"seeds for every part to lie where it is claimed, with {POWER:.0%} probability each: {_count(max(seeds))}"


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"--effect must be a number, not {text}")
    return number


def _count(seeds: float) -> str:
    return f"{seeds:.0f}" if math.isfinite(seeds) else "none"


def _spread(interval: Interval) -> float:
    return interval.error * math.sqrt(interval.n)


class OpenClaim(NamedTuple):
    """An inconclusive claim and what would decide it with a probability of ``POWER``, if its means stay what they are.

    Attributes:
        seeds: that count so far: fresh ones, on which its rule was not made.
        more: seeds that it takes besides; infinite where ``MOST_SEEDS`` are too few, NaN where seeds do not decide it.
        hours: core-hours of so many seeds of its whole sweep.
        longer: the number of steps at which these are to be trained, where those of today are too few; 0 otherwise.
    """

    row: ScoreboardRow
    seeds: int
    more: float
    hours: float
    longer: int

    def __str__(self) -> str:
        if math.isnan(self.more):
            return f"seeds do not decide: {self.obstacle}"
        if math.isinf(self.more):
            return f"more than {MOST_SEEDS:,} seeds"
        seeds = f"{self.more:.0f} {'more' if self.seeds else 'fresh'} seed{'s' * (self.more > 1)}"
        steps = f" of {self.longer:,} steps" if self.longer else ""
        return f"{seeds}{steps}, {self.hours_spelled} core-hours"

    @property
    def obstacle(self) -> str:
        """Why no number of seeds decides it."""
        if self.row.verdict.reason.startswith(UNDERTRAINED):
            return "S and its instability part disagree, which takes longer runs"
        return "the control lies on the other side of zero"

    @property
    def hours_spelled(self) -> str:
        """Core-hours to two digits."""
        return f"{self.hours:.0f}" if self.hours >= 10 else f"{self.hours:.2g}"


# Sweeps whose runs have few steps, and the factor and the number of those that they should have.
LONGER = {"mup": (20, 4000), "learning_rate_and_batch": (20, 4000)}


def open_claims(rows: Iterable[ScoreboardRow], folders: Sequence[Evidence]) -> Iterator[OpenClaim]:
    """What would decide each claim that is inconclusive, of these rows of the scoreboard on these folders."""
    for row in rows:
        if row.verdict.verdict == INCONCLUSIVE and row.verdict.seeds >= FEWEST_SEEDS:
            arms, effects = effects_of(row.claim, folders)
            fresh = row.verdict.seeds if row.readings else 0
            more = math.nan if row.verdict.reason.startswith(UNDERTRAINED) else _seeds_to_decide(row, effects) - fresh
            runs, (factor, steps) = arms[0].evidence.records.runs, LONGER.get(row.claim.sweep, (1, 0))
            hours = factor * float(runs["wall_seconds"].sum()) / runs["seed"].nunique() / 3600
            yield OpenClaim(row, fresh, more, more * hours, steps)


def _seeds_to_decide(row: ScoreboardRow, effects: Qualified) -> float:
    """As ``decide`` does: each part as claimed, each without an effect that counts, or one surely not as claimed.

    Of a control that is too weak, the seeds that would show it; NaN where its mean lies below zero.
    """
    claim, alpha = row.claim, alpha_of(1 + sum(reading.verdict not in DECIDED for reading in row.readings))
    if row.verdict.reason.startswith(CONTROLLED):
        weak = [one for one in effects.control_intervals() if not one.low > 0]
        return max(seeds_for(one.mean, _spread(one), ALPHA) if one.mean > 0 else math.nan for one in weak)
    (low, high), intervals = claim.side, effects.intervals()
    margin = MARGINS.get(claim.unit, 0.0) if claim.side == ABOVE_ZERO else 0.0
    inside = [seeds_for(min(one.mean - low, high - one.mean), _spread(one), alpha) for one in intervals]
    none = [seeds_for(margin - abs(one.mean), _spread(one), alpha) for one in intervals]
    against = [
        seeds_for(max(low - one.mean, one.mean - high, margin - abs(one.mean)), _spread(one), alpha / len(intervals))
        for one in intervals
    ]
    return min(max(inside), max(none), min(against))
