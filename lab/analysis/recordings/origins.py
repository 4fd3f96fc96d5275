"""Where a loss spike began: which measurements rose before it, in which parts of the model, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.analysis.events.detectors import Event
from lab.analysis.events.levels import Level
from lab.analysis.recordings.recording import Recording
from lab.core import shipped
from lab.core.windows import FEWEST, MERGE, Numbers, before

# A measurement has risen if its logarithm lies above the median of the 100 before it by this many scaled median
# absolute deviations of these, and by this factor at least.
DEVIATIONS, LEAST_RISE = 8.0, 1.25
# A trend is the line through this share of the measurements, the last ones, and through so many at most.
RECENT, MOST_RECENT = 0.3, 300
Z_95 = 1.96


@cache
def quantities() -> Mapping[str, Mapping[str, Any]]:
    """What is known of each quantity, by its name; see the file."""
    table: Mapping[str, Mapping[str, Any]] = shipped.load(Path(__file__).with_name("quantities.yaml"))
    return table


class Rise(NamedTuple):
    """A measurement that left its usual values.

    Attributes:
        quantity: its name in the recording.
        place: the part of the model; empty for the whole.
        step: at which it was first seen to have risen, or fallen.
        value: the farthest one during the rise.
        usual: the median before it.
    """

    quantity: str
    place: str
    step: int
    value: float
    usual: float


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


def risen(value_m: Numbers, *, falls: bool = False) -> NDArray[np.bool_]:
    """Where measurements have risen, or fallen; NaN and what is not positive has not."""
    with np.errstate(invalid="ignore", divide="ignore"):
        log_m = np.where(value_m > 0, np.log(value_m), math.nan) * (-1 if falls else 1)
        median_m, deviation_m = before(log_m)
        found: NDArray[np.bool_] = log_m > median_m + np.maximum(DEVIATIONS * deviation_m, math.log(LEAST_RISE))
    return found


def first_rows(risen_m: NDArray[np.bool_]) -> list[int]:
    """The rows at which rises begin; rows closer than ``MERGE`` belong to one."""
    rows = np.flatnonzero(risen_m)
    return [int(row) for row in rows[np.diff(rows, prepend=-MERGE) >= MERGE]]


def rises_before(recording: Recording, spikes: Iterable[Event]) -> dict[Event, list[Rise]]:
    """Of each loss spike what had risen when it began, and since when, the earliest first, of equal ones the farthest.

    The model is measured now and then, so what has risen at the first measurement of a spike counts, too. What had
    risen for a while and was usual again before the spike does not count: there are many quantities in many parts, and
    some of them rise by chance.
    """
    found, end = dict[Event, list[Rise]](), -1
    series = [(name, place) for name in quantities() for place in recording.places(name)]
    risen_of = {key: risen(recording.columns[key], falls=_falls(key[0])) for key in series}
    for spike in sorted(spikes, key=lambda event: event.step):
        after = int(np.searchsorted(recording.step_m, spike.step))
        earliest = int(np.searchsorted(recording.step_m, end, side="right"))
        of_spike = [
            _rise(recording, key, rows)
            for key, risen_m in risen_of.items()
            if (rows := _lasting(risen_m, earliest, after))
        ]
        found[spike] = sorted(of_spike, key=lambda rise: (rise.step, -abs(math.log(rise.value / rise.usual))))
        end = spike.end or spike.step
    return found


def _lasting(risen_m: NDArray[np.bool_], earliest: int, after: int) -> range:
    """The rows of a rise that lasts up to the measurement after a spike began, or the one before; empty without one.

    A row that is not risen may lie between two that are.
    """
    last = next((row for row in (after, after - 1) if earliest <= row < len(risen_m) and risen_m[row]), None)
    if last is None:
        return range(0)
    first = last
    while first > earliest and risen_m[max(earliest, first - 2) : first].any():
        first -= 1 if risen_m[first - 1] else 2
    return range(first, last + 1)


def _rise(recording: Recording, key: tuple[str, str], rows: range) -> Rise:
    value_m = recording.columns[key]
    values = value_m[rows.start : rows.stop]
    farthest = float(np.nanmin(values) if _falls(key[0]) else np.nanmax(values))
    return Rise(*key, int(recording.step_m[rows.start]), farthest, float(before(value_m)[0][rows.start]))


def _falls(name: str) -> bool:
    return bool(quantities()[name].get("falls"))


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
