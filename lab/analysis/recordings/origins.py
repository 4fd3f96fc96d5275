"""Where a loss spike began: which measurements rose before it, in which parts of the model, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.analysis.events.detectors import LEAD, Event
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


def find_rises(recording: Recording) -> list[Rise]:
    """All rises in parts of the model, in the order of their steps; of equal ones the farthest first."""
    found = [
        rise
        for name, known in quantities().items()
        if known["tells"]
        for place in recording.places(name)
        for rise in _rises(recording, name, place)
    ]
    return sorted(found, key=lambda rise: (rise.step, -abs(math.log(rise.value / rise.usual))))


def find_alarms(recording: Recording) -> list[Rise]:
    """Rises, in the whole model, of the quantities that have earned an alarm, with the part that rose the farthest."""
    found = list[Rise]()
    for name, known in quantities().items():
        if known["alarm"] and (name, "") in recording.columns:
            of_parts = [rise for place in recording.places(name) for rise in _rises(recording, name, place)]
            for rise in _rises(recording, name, ""):
                with_it = [part for part in of_parts if abs(part.step - rise.step) <= recording.header.get("every", 1)]
                place = max(with_it, key=lambda part: part.value / part.usual).place if with_it else ""
                found.append(rise._replace(place=place))
    return sorted(found, key=lambda rise: rise.step)


def _rises(recording: Recording, name: str, place: str) -> Iterator[Rise]:
    falls = bool(quantities()[name].get("falls"))
    value_m = recording.columns[name, place]
    usual_m, _ = before(value_m)
    for first, last in _stretches(np.flatnonzero(risen(value_m, falls=falls))):
        values = value_m[first : last + 1]
        value = float(np.nanmin(values) if falls else np.nanmax(values))
        yield Rise(name, place, int(recording.step_m[first]), value, float(usual_m[first]))


def first_rows(risen_m: NDArray[np.bool_]) -> list[int]:
    """The rows at which rises begin; rows closer than ``MERGE`` belong to one."""
    return [first for first, _ in _stretches(np.flatnonzero(risen_m))]


def _stretches(rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """First and last of rows that are closer than ``MERGE`` together."""
    ends = np.flatnonzero(np.diff(rows) >= MERGE)
    firsts, lasts = np.concatenate([[0], ends + 1]), np.concatenate([ends, [len(rows) - 1]])
    return [(int(rows[a]), int(rows[b])) for a, b in zip(firsts, lasts, strict=True)] if len(rows) else []


def rises_before(recording: Recording, rises: Sequence[Rise], spikes: Iterable[Event]) -> dict[Event, list[Rise]]:
    """Of each loss spike the rises that may tell where it began: those since the last spike, and not too long ago.

    The model is measured now and then, so a rise that is seen at the first measurement of a spike counts, too.
    """
    found, end = dict[Event, list[Rise]](), -1
    for spike in sorted(spikes, key=lambda event: event.step):
        row = int(np.searchsorted(recording.step_m, spike.step))
        earliest = int(recording.step_m[max(0, row - LEAD)]) if len(recording.step_m) else 0
        latest = int(recording.step_m[row]) if row < len(recording.step_m) else spike.step
        found[spike] = [
            rise for rise in rises if max(earliest, end) <= rise.step <= latest and quantities()[rise.quantity]["tells"]
        ]
        end = spike.end or spike.step
    return found


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
