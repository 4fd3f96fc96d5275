"""Alarms of a log in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lab.analysis.rendering import html
from lab.analysis.text import listed
from lab.core.errors import RequestError
from lab.report.pictures import Shown, shown

if TYPE_CHECKING:
    from lab.analysis.rendering.layout import Drawing


@dataclass(frozen=True)
class Watched:
    """The alarms of a log or a folder; in a notebook it displays what was read, and the alarms.

    Attributes:
        read: lines that say what was read, and how.
        alarms: a row for each alarm: ``run``, ``step``, ``kind``, ``ending``, what it is, and what to look at next.
        drawings: by step a function that draws the measurements around an alarm.
    """

    read: list[str]
    alarms: pd.DataFrame
    drawings: Mapping[int, Callable[[], Drawing]]

    def _repr_html_(self) -> str:
        return "".join([*map(html.paragraph, self.read), html.table(self.alarms)])

    def show(self, step: int) -> Shown:
        """Draw the run, and a closer view of the alarm at this step.

        Raises:
            RequestError: no alarm begins there.
        """
        if step not in self.drawings:
            raise RequestError(f"no alarm at step {step}; there are some at {listed(map(str, self.drawings))}")
        return shown(self.drawings[step]())


def watch(path: str | Path, columns: Mapping[str, str] | None = None) -> Watched:
    """Find the alarms of a log of any program, a folder of logs, records or a recording, as `lab watch` does.

    Args:
        path: the log or the folder.
        columns: names of columns that have no usual one, such as ``{"loss": "ce"}``.

    Raises:
        RequestError: the path cannot be read, or no loss recurs in it.
    """
    from labwatch.recordings.recording import is_recording
    from labwatch.recordings.words import next_look as next_in_recording
    from labwatch.recordings.words import report
    from labwatch.watch.pages import event_figure
    from labwatch.watch.watching import find_alarms
    from labwatch.watch.words import next_look, what_happened

    logs, notes, events = find_alarms(Path(path), columns=columns)
    recorded = report(Path(path), {}) if is_recording(Path(path)) else None
    findings = recorded.findings if recorded else []
    rows: list[dict[str, object]] = []
    drawings: dict[int, Callable[[], Drawing]] = {}
    for log in logs:
        for event in events[log.name]:
            row = {name: getattr(event, name) for name in ("run", "step", "kind", "ending")}
            known = next((finding for finding in findings if finding.explains(event)), None)
            advice = next_in_recording(known) if known else next_look(log, event, events)
            rows.append(row | {"what": what_happened(log, event), "look next at": advice})
            drawings[event.step] = partial(event_figure, log, event)
    notes += recorded.lines if recorded else []
    return Watched(notes, pd.DataFrame(rows), drawings)
