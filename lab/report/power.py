"""How many seeds decide a claim or tell arms apart, by the spread of pilot seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from lab.analysis.contrasts import Contrast
from lab.analysis.judging.decision import ALPHA, alpha_of, next_reading
from lab.analysis.judging.evidence import MissingRunsError
from lab.analysis.judging.verdicts import effects_of
from lab.analysis.statistics import FEWEST_SEEDS, Interval, holm, power_of
from lab.analysis.text import plain_text
from lab.core.errors import RequestError, nearest
from lab.report.scoreboard import read
from lab.studies.claims import CLAIMS

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
    for count in range(FEWEST_SEEDS, MOST_SEEDS + 1):
        if power_of(count, distance, spread, alpha) >= power:
            return count
    return math.inf


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
    seeds, spread, unit = min(interval.n for interval in known), max(map(spread_of, known)), contrast.measure.unit
    steps = (spread * 1.02**power for power in range(1000))
    found = next(step for step in steps if not spread or power_of(seeds, step, spread, ALPHA) >= POWER)
    smaller = found / 2 if wanted is None else wanted
    need = _count(seeds_for(smaller, spread, ALPHA))
    return (
        f"Differences of the same seed spread by {spread:.2g} {unit}, so {seeds} seeds find one of {found:.2g} with "
        f"probability {POWER:.0%}; one of {smaller:.2g} takes {need} seeds."
    )


def power_lines(folder: Path, name: str, effect: str | None = None) -> Iterator[str]:
    """Yield a table with mean and spread of the pilot seeds, and the seeds needed, for each part of a claim.

    Args:
        name: the name of the claim, as in ``lab claims --json``.
        effect: the smallest effect to detect, in the unit of the claim; by default the mean of the pilot seeds.

    Raises:
        RequestError: the claim or the folder does not exist, the effect is no number, or there are fewer than three
            complete pilot seeds.
    """
    wanted = _finite(effect) if effect is not None else None
    if name not in CLAIMS:
        raise RequestError(f"no claim {name!r}; {nearest(name, CLAIMS)}")
    claim = CLAIMS[name]
    try:
        arms, effects = effects_of(claim, read([folder]))
    except MissingRunsError as error:
        raise RequestError(f"{folder}: {error}; lab sweep {claim.sweep} seed=100,101,102,103 trains a pilot") from None
    intervals = effects.intervals()
    if intervals[0].n < FEWEST_SEEDS:
        raise RequestError(f"{folder} has {intervals[0].n} whole seeds of {name}; a spread takes {FEWEST_SEEDS}")
    low, high = claim.side
    reading = next_reading(arms[0].evidence.readings.get(name, ()))
    alpha = alpha_of(reading)
    means = [interval.mean if wanted is None else wanted for interval in intervals]
    spreads = [spread_of(interval) for interval in intervals]
    distances = [min(mean - low, high - mean) for mean in means]
    seeds = [seeds_for(distance, spread, alpha) for distance, spread in zip(distances, spreads, strict=True)]
    yield f"{claim.sentence} ({claim.source}, {claim.figure}), in {claim.unit}"
    table = {
        "part": effects.parts,
        "pilot mean": [interval.mean for interval in intervals],
        "spread over seeds": spreads,
    }
    table |= {"distance to the bound": distances}
    rounded = pd.DataFrame(table).map(lambda value: f"{value:.3g}" if isinstance(value, float) else value)
    yield from plain_text(rounded.assign(**{f"seeds for {POWER:.0%}": [_count(seeds_of) for seeds_of in seeds]}))
    yield f"pilot of {intervals[0].n} seeds; an interval of reading {reading} has a level of {1 - alpha:.1%}"
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


def spread_of(interval: Interval) -> float:
    """The standard deviation over seeds."""
    return interval.error * math.sqrt(interval.n)
