"""When a measurement reaches a level at its present trend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lab.core.windows import FEWEST, Numbers
from labwatch.events.levels import Level
from labwatch.recordings.recording import Recording

# A trend is the line through this share of the measurements, the last ones, and through so many at most.
RECENT, MOST_RECENT = 0.3, 300
Z_95 = 1.96


class Reach(NamedTuple):
    """When a measurement reaches a level at its present trend.

    Attributes:
        quantity, place: which measurement, that of the part nearest to the level.
        value: its last value.
        level: the level.
        step: at which it is reached, with the ends of the 95 % interval of the trend; infinite if never.
    """

    quantity: str
    place: str
    value: float
    level: float
    step: float
    low: float
    high: float


def reaches(recording: Recording, levels: Mapping[str, Level]) -> list[Reach]:
    """When each level is reached, by the part of the model that is nearest to it in steps."""
    found = list[Reach]()
    for name, level in levels.items():
        of_places = [_reach(recording, name, place, level) for place in recording.places(name)]
        known = [reach for reach in of_places if reach]
        if known:
            found.append(min(known, key=lambda reach: (reach.step, abs(reach.level - reach.value))))
    return found


def _reach(recording: Recording, name: str, place: str, level: Level) -> Reach | None:
    value_m = recording.columns[name, place]
    known_m = np.flatnonzero(np.isfinite(value_m))
    if not len(known_m):
        return None
    last, step = float(value_m[known_m[-1]]), float(recording.step_m[known_m[-1]])
    if level.passed(np.array([last]))[0]:
        return Reach(name, place, last, level.value, step, step, step)
    recent_m = known_m[-min(MOST_RECENT, max(FEWEST, round(RECENT * len(known_m)))) :]
    if len(recent_m) < FEWEST:
        return Reach(name, place, last, level.value, math.inf, math.inf, math.inf)
    slope, low, high = _slope(recording.step_m[recent_m].astype(float), value_m[recent_m])
    gap, ends = level.value - last, (low, high) if level.is_above else (high, low)
    slow, usual, fast = (gap / each if gap * each > 0 else math.inf for each in (ends[0], slope, ends[1]))
    if math.isinf(slow) and math.isinf(usual):
        fast = math.inf
    return Reach(name, place, last, level.value, step + usual, step + fast, step + slow)


def _slope(step_m: Numbers, value_m: Numbers) -> tuple[float, float, float]:
    """The median slope of all pairs (Theil, Sen) and its 95 % interval, by Kendall's variance without ties."""
    first, second = np.triu_indices(len(step_m), 1)
    slopes = np.sort((value_m[second] - value_m[first]) / (step_m[second] - step_m[first]))
    n, pairs = len(step_m), len(slopes)
    reach = Z_95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = (max(0, min(pairs - 1, round(pairs / 2 + sign * reach))) for sign in (-1, 1))
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])
