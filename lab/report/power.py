"""How many seeds tell arms apart, by the spread of those that there are."""

from __future__ import annotations

import math

from lab.analysis.contrasts import Contrast
from lab.analysis.statistics import CHANGE_LEVEL, FEWEST_SEEDS, Interval, holm, power_of

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
    found = next(step for step in steps if not spread or power_of(seeds, step, spread, CHANGE_LEVEL) >= POWER)
    smaller = found / 2 if wanted is None else wanted
    need = count_text(seeds_for(smaller, spread, CHANGE_LEVEL))
    return (
        f"Differences of the same seed spread by {spread:.2g} {unit}, so {seeds} seeds find one of {found:.2g} with "
        f"probability {POWER:.0%}; one of {smaller:.2g} takes {need} seeds."
    )


def count_text(seeds: float) -> str:
    return f"{seeds:.0f}" if math.isfinite(seeds) else "none"


def spread_of(interval: Interval) -> float:
    """The standard deviation over seeds."""
    return interval.error * math.sqrt(interval.n)
