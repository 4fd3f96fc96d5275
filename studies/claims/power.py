"""How many seeds decide a claim, by the spread of pilot seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from lab.analysis.contrasts import POWER, count_text, seeds_for
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import plain_text
from lab.core.errors import RequestError, nearest
from studies.claims.decision import alpha_of, next_reading
from studies.claims.evidence import MissingRunsError
from studies.claims.registry import CLAIMS
from studies.claims.scoreboard import read
from studies.claims.verdicts import effects_of


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
    spreads = [interval.sd for interval in intervals]
    distances = [min(mean - low, high - mean) for mean in means]
    seeds = [seeds_for(distance, spread, alpha) for distance, spread in zip(distances, spreads, strict=True)]
    yield f"{claim.sentence} ({claim.source}, {claim.figure}), in {claim.unit}"
    table = {
        "part": effects.parts,
        "pilot mean": [interval.mean for interval in intervals],
        "spread over seeds": spreads,
        "distance to the bound": distances,
        f"seeds for {POWER:.0%}": [count_text(seeds_of) for seeds_of in seeds],
    }
    yield from plain_text(pd.DataFrame(table).map(lambda cell: f"{cell:.3g}" if isinstance(cell, float) else cell))
    yield f"pilot of {intervals[0].n} seeds; an interval of reading {reading} has a level of {1 - alpha:.1%}"
    most = count_text(max(seeds))
    yield f"seeds for every part to lie where it is claimed, with {POWER:.0%} probability each: {most}"


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"--effect must be a number, not {text}")
    return number
