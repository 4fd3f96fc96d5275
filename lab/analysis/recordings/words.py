"""What is said of a recording: lines for people, and the same as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.analysis.events.detectors import Event
from lab.analysis.events.levels import Level
from lab.analysis.recordings.origins import Reach, Rise, quantities, reaches, rises_before
from lab.analysis.recordings.recording import read_recording
from lab.analysis.statistics import Interval
from lab.analysis.text import listed, number
from lab.core.errors import RequestError

MOST = 4  # rises that a line names


class Report(NamedTuple):
    """What a recording says.

    Attributes:
        found: a line, and values for JSON, for where each spike began.
        lines: for these and for all else.
        plain: all of it as values for JSON.
        last: the last step at which the model was measured; -1 for none.
    """

    found: list[tuple[str, dict[str, Any]]]
    lines: list[str]
    plain: dict[str, Any]
    last: int


def report(path: Path, events: Sequence[Event], levels: Mapping[str, Level]) -> Report:
    """What a recording says of the loss spikes among these events, and of what comes.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        recording = read_recording(path)
    except (OSError, EOFError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as a recording: {error}") from None
    name, every = path.name, recording.header.get("every", 1)
    begun = rises_before(recording, [event for event in events if event.kind == "spike"])
    coming = reaches(recording, levels)
    unknown = [of for of in quantities() if of not in levels and recording.places(of)]
    begins = [
        {"step": spike.step, "rises": [_plain(rise) | {"lead": spike.step - rise.step} for rise in of_spike]}
        for spike, of_spike in begun.items()
    ]
    told = [f"{name} step {spike.step}: {_origin(spike, of_spike, every)}" for spike, of_spike in begun.items()]
    lines = [f"{name}: not found in the model: {what}" for what in recording.header.get("not_found", [])]
    lines += [*told, *(f"{name}: {_reach(reach)}" for reach in coming)]
    lines += [
        f"{name}: {of} was not recorded, so its level is not watched" for of in levels if not recording.places(of)
    ]
    if unknown:
        lines.append(f"{name}: no level known of {listed(unknown)}; --thresholds FILE gives levels")
    plain = {
        "every": every,
        "not_found": recording.header.get("not_found", []),
        "origins": begins,
        "reaches": [_plain(reach) for reach in coming],
        "no_level": unknown,
    }
    found = list(zip(told, begins, strict=True))
    return Report(found, lines, plain, int(recording.step_m[-1]) if len(recording.step_m) else -1)


def _origin(spike: Event, rises: Sequence[Rise], every: int) -> str:
    if not rises:
        return f"nothing that was recorded every {_steps(every)} rose before or with the loss"
    first, *others = rises
    lead = spike.step - first.step
    when = f"{_steps(lead)} before the loss" if lead > 0 else "at the first measurement after the loss rose"
    shown = [f"{_where(rise)} at step {rise.step}" for rise in others[: MOST - 1]]
    more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
    then = f"; then {', '.join(shown)}{more}" if shown else ""
    return f"first {_rise(first)} at step {first.step}, {when}{then}. Look next at {_next(first)}."


def _short(value: float) -> str:
    return number(float(f"{value:.3g}"))


def _steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _where(rise: Rise | Reach) -> str:
    return f"{rise.quantity} of {rise.place}" if rise.place else rise.quantity


def _rise(rise: Rise) -> str:
    way = "fell" if quantities()[rise.quantity].get("falls") else "rose"
    return f"{_where(rise)} {way} from {_short(rise.usual)} to {_short(rise.value)}"


def _next(rise: Rise) -> str:
    return str(quantities()[rise.quantity]["next"])


def _reach(reach: Reach) -> str:
    now = f"{_where(reach)} is {_short(reach.value)}"
    level = _short(reach.level)
    if math.isinf(reach.step):
        return f"{now}, and has no trend towards the level {level}"
    if reach.step == reach.low == reach.high:
        return f"{now}, beyond the level {level}"
    ends = Interval(reach.step, reach.low, reach.high)
    when = ends.spelled(lambda step: "never" if math.isinf(step) else f"{step:,.0f}")
    return f"{now}; at its present trend it reaches the level {level} at step {when}"


def _plain(entry: Rise | Reach) -> dict[str, Any]:
    """An entry as values for JSON."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry._asdict().items()
    }
