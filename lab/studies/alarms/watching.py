"""`lab watch`: a line and a figure for each alarm of a folder or a log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from lab.analysis.events.detectors import KINDS, Event, Log, detect
from lab.analysis.events.held_out_losses import WINDOW
from lab.analysis.events.logs import read_logs
from lab.analysis.events.trend import FEWEST_ROWS, trend_spikes
from lab.analysis.logit_rounding import format_name
from lab.analysis.rendering import layout, style
from lab.analysis.rendering.layout import Sheet
from lab.core import files
from lab.core.detectors import LABELS
from lab.core.errors import RequestError
from lab.studies.alarms.replays import CAUSES, Cause, departure, find_twins, same_batches, spike_cause, twin_cause

# Rows shown on both sides of an event.
MARGIN = 100
# Nobody opens more figures than this; every event has its line.
MOST_FIGURES = 50
HELD_OUT_LABELS = {"val_loss": "held-out loss,\nnats/token", "clean_val_loss": "on clean text,\nnats/token"}
LONGEST_NAME = 100  # letters of a run's name that become part of a file name


def watch(
    path: Path,
    *,
    replays: Sequence[Path] = (),
    mantissa_bits: int | None = None,
    columns: Mapping[str, str] | None = None,
    as_json: bool = False,
) -> tuple[list[str], bool]:
    """Find the alarms of a results folder or of logs; draw a figure of each unless ``as_json``.

    Figures go into ``alarms/`` in the folder, or into ``NAME.alarms/`` beside the log.

    Args:
        path: the folder or the log.
        replays: folders or logs of the same steps, trained again, or of other runs on the same batches. From these
            follow the likely cause of a loss spike, and the step at which a run without one departs from its replay.
        mantissa_bits: stored mantissa bits of the format that rounds output logits; None takes those of the records, or
            of bf16 for other logs.
        columns: names of unusual columns; see ``read_logs``.
        as_json: whether to return the alarms as JSON and draw nothing.

    Returns:
        The lines to print, and whether there was any alarm.

    Raises:
        RequestError: the path cannot be read, or every run has too few rows to judge.
    """
    (logs, notes), sources = read_logs(path, mantissa_bits, columns), [read_logs(each) for each in replays]
    notes = [*notes, *(note for source in sources for note in source.notes)]
    events = {log.name: detect(log, trend_spikes) for log in logs}
    alarms = [(log, event) for log in logs for event in events[log.name]]
    notes += _too_short(path, logs, events)
    causes, departed = _causes(logs, events, [source.runs for source in sources])
    if as_json:
        plain = [plain_event(log, event) | ({"cause": causes.get(event)} if replays else {}) for log, event in alarms]
        output: dict[str, Any] = {"events": plain}
        output |= {"departures": [each._asdict() for each in departed]} if replays else {}
        output |= {"notes": notes} if notes else {}
        return [json.dumps(output, indent=1, allow_nan=False)], bool(alarms)
    folder = path / "alarms" if path.is_dir() else path.with_name(f"{path.name}.alarms")
    lines = notes
    for number, (log, event) in enumerate(alarms):
        drawn = folder / f"{file_name(log.name)}_{event.step}_{event.kind}.svg"
        if number < MOST_FIGURES:
            files.write_text(drawn, layout.svg(event_figure(log, event), f"event{number}"), within=folder.parent)
        cause = _because(causes[event]) if event in causes else ""
        lines.append(f"{sentence(log, event)}{cause}{f'  {drawn}' if number < MOST_FIGURES else ''}")
    lines += [f"{each.run} step {each.step}: departs from its replay{_because(each.cause)}" for each in departed]
    runs = f"{len(logs)} run{'s' * (len(logs) != 1)}"
    return [*lines, f"{len(alarms)} alarm{'s' * (len(alarms) != 1)} in {runs}"], bool(alarms)


def _too_short(path: Path, logs: Sequence[Log], events: Mapping[str, Sequence[Event]]) -> list[str]:
    """Remarks on runs that are too short to be judged.

    Raises:
        RequestError: all runs are too short.
    """
    short = [log for log in logs if len(log.step_n) < FEWEST_ROWS and not events[log.name]]
    if logs and len(short) == len(logs):
        raise RequestError(f"{path} has too few rows to judge: {max(len(log.step_n) for log in logs)} of {FEWEST_ROWS}")
    return [f"{log.name}: too few rows to judge, {len(log.step_n)} of {FEWEST_ROWS}" for log in short]


def _causes(
    logs: Sequence[Log], events: Mapping[str, list[Event]], replays: Sequence[Sequence[Log]]
) -> tuple[dict[Event, str], list[Cause]]:
    """The likely cause of each loss spike, and the steps at which runs without one depart from their only replay.

    And those from which on a replay has other batches: what follows is judged without it.
    """
    causes, departed = dict[Event, str](), list[Cause]()
    events_of = {id(twin): detect(twin, trend_spikes) for source in replays for twin in source}
    for log in logs if replays else ():
        found = find_twins(log, logs, replays)
        twins = [same_batches(log, twin, events[log.name], events_of[id(twin)]) for twin in found]
        spikes = [event for event in events[log.name] if event.kind == "spike"]
        if len(twins) > 1:
            causes |= {spike: twin_cause(spike, log, twins) for spike in spikes}
        else:
            replay = twins[0].log if twins else None
            causes |= {spike: spike_cause(log, replay, spike) for spike in spikes}
            if each := departure(log, twins[0] if twins else None, events[log.name]):
                departed.append(each)
        departed += [Cause(log.name, twin.parting, "other_batches") for twin in twins if twin.parting is not None]
    return causes, departed


def file_name(name: str) -> str:
    """The name of a run as part of a file name; a digest of the original is added if it had to be changed."""
    plain = re.sub(r"[^\w.-]+", "_", name)[:LONGEST_NAME]
    return name if plain == name else f"{plain}_{files.text_digest(name)[:6]}"


def _because(cause: str) -> str:
    return f", likely cause: {cause} ({CAUSES[cause]})"


def sentence(log: Log, event: Event) -> str:
    """``a1b2 step 350: loss spike, 2.01 to 4.5, recovered at step 410, 12 steps after the first warning``."""
    name, _ = LABELS[event.kind]
    if event.kind == "logit_rounding":
        cost = f"{event.value:.3g} nats per token in {format_name(log.mantissa_bits)}"
        return f"{event.run} step {event.step}: {name}, a level of {_level(log, event):.3g} costs {cost}"
    if event.kind == "parting":
        further = f"{event.value:.3g} nats per token further apart than {WINDOW} evaluations before"
        return f"{event.run} step {event.step}: {name}, up to {further}"
    words = [f"{event.run} step {event.step}: {name}, {event.usual:.3g} to {event.value:.3g}"]
    if event.ending != "none":
        words.append(f"{event.ending} at step {event.end}")
    elif event.kind == "spike":
        words.append("not yet ended")
    if event.lead is not None:
        words.append(f"{event.lead} steps after the first warning")
    return ", ".join(words)


def _level(log: Log, event: Event) -> float:
    """Level of the output logits at the step of an alarm where rounding costs most."""
    during_n = (log.step_n >= event.step) & (log.columns["logit_rounding"] == event.value)
    return float(log.columns["output_logit"][during_n].max())


def plain_event(log: Log, event: Event) -> dict[str, Any]:
    """An alarm as values for JSON."""
    facts = event._asdict()
    if event.kind == "logit_rounding":
        facts |= {"level": _level(log, event), "mantissa_bits": log.mantissa_bits}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in facts.items()
    }


@layout.styled
def event_figure(log: Log, event: Event) -> Sheet:
    """The loss around an alarm, and other measurements at the same steps, on one axis of steps."""
    columns = {column: LABELS[kind][1] for kind, (column, _) in KINDS.items() if column in log.columns}
    if event.kind == "parting":
        columns = {"loss": columns["loss"], **HELD_OUT_LABELS}
    row = int(np.flatnonzero(log.step_n == event.step)[0])
    end = row if event.end is None else int(np.flatnonzero(log.step_n == event.end)[-1])
    shown = slice(max(0, row - MARGIN), end + MARGIN + 1)
    sheet, [panels] = layout.facets([sentence(log, event)], list(columns.values()), 8.0)
    for axes, column in zip(panels, columns, strict=True):
        _panel(
            axes,
            log.step_n[shown],
            log.columns[column][shown],
            event,
            logarithmic=column != "loss" and column not in HELD_OUT_LABELS,
        )
    panels[-1].set_xlabel("step")
    return sheet


def _panel(axes: Axes, step_n: Any, value_n: Any, event: Event, *, logarithmic: bool) -> None:
    axes.plot(step_n, value_n, color=style.ARM_COLOURS[0], linewidth=1)
    if logarithmic and (value_n[np.isfinite(value_n)] > 0).all():
        axes.set_yscale("log")
    axes.axvspan(event.step, event.step if event.end is None else event.end, color=style.ARM_COLOURS[1], alpha=0.15)
    axes.axvline(event.step, color=style.ARM_COLOURS[1], linewidth=1)
