"""How many seeds a claim takes: from the spread of pilot seeds, before others are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from scipy.special import nctdtr, stdtrit

from lab.analysis.judging.decision import READINGS, alpha_of
from lab.analysis.judging.evidence import MissingRunsError
from lab.analysis.judging.verdicts import effects_of
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import plain_text
from lab.core.errors import RequestError, nearest
from lab.report.scoreboard import read
from lab.studies.claims import CLAIMS

POWER = 0.8
MOST_SEEDS = 10_000


def seeds_for(distance: float, spread: float, *, reading: int = 1, power: float = POWER) -> float:
    """The fewest seeds of which the interval excludes a bound that lies so far from the mean, with this probability.

    Args:
        distance: from the mean to the bound, in any unit.
        spread: standard deviation over seeds, in the same unit.
        reading: at whose alpha the interval is taken, two-sided.

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
        critical = stdtrit(count - 1, 1 - alpha_of(reading) / 2)
        if 1 - nctdtr(count - 1, distance / spread * math.sqrt(count), critical) >= power:
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
    spreads = [one.error * math.sqrt(one.n) for one in intervals]
    distances = [min(mean - low, high - mean) for mean in means]
    seeds = [seeds_for(*each, reading=number) for each in zip(distances, spreads, strict=True)]
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
