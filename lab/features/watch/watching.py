"""`lab watch`: a line for each alarm of a folder or a log, and a page for each run that has some."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.events.detectors import LABELS, Event, Log, column_of, detect
from lab.analysis.events.held_out_losses import turn
from lab.analysis.events.levels import Level
from lab.analysis.events.logs import STANDARD_INPUT, read_logs
from lab.analysis.events.reinforcement import DEPARTURES, departures
from lab.analysis.events.trend import FEWEST_ROWS, spikes_of_runs
from lab.analysis.recordings.recording import is_recording
from lab.core import files
from lab.features.watch.replays import CAUSES, Cause, departure, find_twins, same_batches, spike_cause, twin_cause


class Found(NamedTuple):
    """What is known of watched runs: their logs, remarks on how these were read, and the alarms of each run."""

    logs: list[Log]
    notes: list[str]
    events: dict[str, list[Event]]


def find_alarms(
    path: Path,
    mantissa_bits: int | None = None,
    columns: Mapping[str, str] | None = None,
    levels: Mapping[str, Level] = MappingProxyType({}),
) -> Found:
    """Find the alarms of a results folder or of logs; for the arguments see ``watch``.

    Raises:
        RequestError: the path cannot be read.
    """
    logs, notes = read_logs(path, mantissa_bits, columns)
    short = [log for log in logs if len(log.step_n) < FEWEST_ROWS]
    notes += [f"{log.name}: {len(log.step_n)} rows show a large rise only; {FEWEST_ROWS} make a trend" for log in short]
    notes += [
        f"{log.name}: no column {column}, so its level is not watched"
        for log in logs
        for column in levels
        if column not in log.columns and not is_recording(path)  # of which the report says it
    ]
    notes += [remark for log in logs for remark in remarks(log)]
    spikes = spikes_of_runs([(log.step_n, log.columns["loss"]) for log in logs])
    events = {log.name: detect(log, spans, levels) for log, spans in zip(logs, spikes, strict=True)}
    return Found(logs, notes, events)


def remarks(log: Log) -> Iterator[str]:
    """What is no alarm but worth knowing: a held-out loss that has turned, and what moves while the policy learns."""
    held_out = log.held_out.get("val_loss", pd.Series(dtype=float))
    if found := turn(held_out, pd.Series(log.columns["loss"], log.step_n)):
        rises = f"is lowest at step {found.step}, {found.lowest:.3g}, and has risen to {found.last:.3g} since"
        yield f"{log.name}: the evaluation loss {rises}, while the training loss falls: the run overfits from there on"
    for kind, _, learned in departures(log.step_n, log.columns) if log.is_of_rewards else ():
        verb, farthest = ("falls", np.nanmin) if DEPARTURES[kind].falls else ("rises", np.nanmax)
        for span in learned:
            end = float(farthest(log.columns[column_of(kind)][span.first : span.last + 1]))
            move = f"{LABELS[kind]['moves']} {verb} from {span.usual:.3g} to {end:.3g} while the reward rises"
            yield f"{log.name}: from step {log.step_n[span.first]} on the {move}, so the policy has learned"


def watch(
    path: Path,
    *,
    replays: Sequence[Path] = (),
    mantissa_bits: int | None = None,
    columns: Mapping[str, str] | None = None,
    levels: Mapping[str, Level] = MappingProxyType({}),
    as_json: bool = False,
) -> tuple[list[str], bool]:
    """Find the alarms of a results folder or of logs, and write a page for each run that has some, unless ``as_json``.

    Pages go into ``alarms/`` in the folder, or into ``NAME.alarms/`` beside the log; of standard input there is none.
    With replays, each page has another beside it, which compares the two.

    Args:
        path: the folder or the log.
        replays: folders or logs of the same steps, trained again, or of other runs on the same batches. From these
            follow the likely cause of a loss spike, and the step at which a run without one departs from its replay.
        mantissa_bits: stored mantissa bits of the format that rounds output logits; None takes those of the records, or
            of bf16 for other logs.
        columns: names of unusual columns; see ``read_logs``.
        levels: of columns, beyond which an alarm is raised as well; see ``read_levels``.
        as_json: whether to return the alarms as JSON and draw nothing.

    Returns:
        The lines to print, and whether there was any alarm.

    Raises:
        RequestError: the path cannot be read.
    """
    logs, notes, events = find_alarms(path, mantissa_bits, columns, levels)
    sources = [read_logs(replay) for replay in replays]
    notes = [*notes, *(note for source in sources for note in source.notes)]
    alarms = [(log, event) for log in logs for event in events[log.name]]
    twins = [source.runs for source in sources]
    causes, departed = _causes(logs, events, twins)
    recorded = None
    if is_recording(path):
        from lab.analysis.recordings.words import report

        recorded = report(path, [event for _, event in alarms], levels)
    if alarms:  # what words and pages need takes long to load
        from lab.features.watch.words import next_look, plain_event, sentence

    if as_json:
        plain = [
            plain_event(log, event)
            | {"text": sentence(log, event), "next": next_look(log, event, events, causes.get(event, ""))}
            | ({"cause": causes.get(event)} if replays else {})
            for log, event in alarms
        ]
        output: dict[str, Any] = {"events": plain}
        output |= {"departures": [cause._asdict() for cause in departed]} if replays else {}
        output |= {"recording": recorded.plain} if recorded else {}
        output |= {"notes": notes} if notes else {}
        return [json.dumps(output, indent=1, allow_nan=False)], bool(alarms)
    if alarms:
        from lab.features.watch import pages, two_logs
        from lab.features.watch.answer import answer_of
    lines = notes
    folder = path / "alarms" if path.is_dir() else path.with_name(f"{path.name}.alarms")
    for log in logs:
        if events[log.name]:
            page = folder / f"{pages.file_name(log.name)}.html"
            beside = page.with_suffix(".compared.html") if find_twins(log, logs, twins) else None
            if str(path) != STANDARD_INPUT:
                link = beside.name if beside else None
                files.write_text(page, pages.page(log, events, causes, link), within=folder.parent)
            if beside and str(path) != STANDARD_INPUT:
                text = answer_of(two_logs.compared([log, *find_twins(log, logs, twins)])).html()
                files.write_text(beside, text, within=folder.parent)
            for event in events[log.name]:
                cause = _because(causes[event]) if event in causes else ""
                advice = next_look(log, event, events, causes.get(event, ""))
                lines.append(f"{sentence(log, event)}{cause}. Look next at {advice}.")
            lines += [f"  {page}"] if str(path) != STANDARD_INPUT else []
    for run, step, cause in departed:
        lines.append(f"{run} step {step}: departs from its replay{_because(cause)}")
    lines += recorded.lines if recorded else []
    runs = f"{len(logs)} run{'s' * (len(logs) != 1)}"
    return [*lines, f"{len(alarms)} alarm{'s' * (len(alarms) != 1)} in {runs}"], bool(alarms)


def _causes(
    logs: Sequence[Log], events: Mapping[str, list[Event]], replays: Sequence[Sequence[Log]]
) -> tuple[dict[Event, str], list[Cause]]:
    """The likely cause of each loss spike, and the steps at which runs without one depart from their only replay.

    And those from which on a replay has other batches: what follows is judged without it.
    """
    causes, departed = dict[Event, str](), list[Cause]()
    events_of = {id(twin): detect(twin) for source in replays for twin in source}
    for log in logs if replays else ():
        found = find_twins(log, logs, replays)
        twins = [same_batches(log, twin, events[log.name], events_of[id(twin)]) for twin in found]
        spikes = [event for event in events[log.name] if event.kind == "spike"]
        if len(twins) > 1:
            causes |= {spike: twin_cause(spike, log, twins) for spike in spikes}
        else:
            twin = twins[0] if twins else None
            causes |= {spike: spike_cause(log, twin, spike) for spike in spikes}
            if cause := departure(log, twin, events[log.name]):
                departed.append(cause)
        departed += [Cause(log.name, twin.parting, "other_batches") for twin in twins if twin.parting is not None]
    return causes, departed


def _because(cause: str) -> str:
    return f", likely cause: {cause} ({CAUSES[cause]})"
