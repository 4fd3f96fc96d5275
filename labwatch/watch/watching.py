"""`lab watch`: a line for each alarm of a folder or a log, and a page for each run that has some."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.spikes.trend import FEWEST_ROWS, spikes_of_runs
from lab.core import files
from lab.core.errors import RequestError
from labwatch.events.detectors import LABELS, Event, Log, column_of, detect
from labwatch.events.held_out_losses import turn
from labwatch.events.levels import Level
from labwatch.events.log_names import OR, Given
from labwatch.events.logs import STANDARD_INPUT, read_logs
from labwatch.events.reinforcement import DEPARTURES, LAST_ROWS, USUAL_ROWS, departures
from labwatch.recordings.recording import is_recording
from labwatch.watch.replays import CAUSES, Cause, departure, find_twins, same_batches, spike_cause, twin_cause

# Kinds of alarms that are judged in recordings by part of the model and against the other parts.
JUDGED = (
    *("gradient_spike", "norm_not_finite", "norm_drift", "logit_growth", "update_rms", "epsilon_ratio", "loss_scale"),
    *("router_collapse", "router_balance", "router_logits", "nothing_learned"),
    *("reward_fall", "kl_growth", "zero_variance_growth"),
)
# A measurement that is known in this share of the rows is logged in all.
MOST_KNOWN = 0.95


class Found(NamedTuple):
    """What is known of watched runs: their logs, remarks on how these were read, and the alarms of each run."""

    logs: list[Log]
    notes: list[str]
    events: dict[str, list[Event]]


def find_alarms(
    path: Path,
    mantissa_bits: int | None = None,
    columns: Given | None = None,
    levels: Mapping[str, Level] = MappingProxyType({}),
) -> Found:
    """Find the alarms of a results folder or of logs; for the arguments see ``watch``.

    Raises:
        RequestError: the path cannot be read.
    """
    is_recorded = is_recording(path)
    logs, notes = read_logs(path, mantissa_bits, columns, with_parts=not is_recorded)
    short = [log for log in logs if len(log.step_n) < FEWEST_ROWS]
    notes += [f"{log.name}: {len(log.step_n)} rows show a large rise only; {FEWEST_ROWS} make a trend" for log in short]
    notes += [
        f"{log.name}: no column {column}, so its level is not watched"
        for log in logs
        for column in levels
        if column not in log.columns and not is_recorded  # of which the report says it
    ]
    notes += [remark for log in logs for remark in remarks(log)]
    spikes = spikes_of_runs([(log.step_n, log.columns["loss"]) for log in logs])
    events = {log.name: detect(log, spans, levels) for log, spans in zip(logs, spikes, strict=True)}
    if is_recorded:
        events = {log.name: list(unjudged(log, events[log.name])) for log in logs}
    else:
        for log in logs:
            _ask(log, events[log.name])
    return Found(logs, notes, events)


def unjudged(log: Log, events: Iterable[Event]) -> Iterator[Event]:
    """The alarms of a recording as a log, without those that its own checks raise, which know what is harmless.

    And of spikes those alone that are rises there.
    """
    from labwatch.recordings.readings import rises_of_loss

    rises = {rise.first for rise in rises_of_loss(log.step_n, log.columns["loss"])}
    for event in events:
        if event.kind not in JUDGED and (event.kind != "spike" or event.step in rises):
            yield event._replace(lead=None)


def _ask(log: Log, events: list[Event]) -> None:
    """Ask which of two names is meant, if they would give another verdict.

    Raises:
        RequestError: a loss or a reward that may be meant as well raises alarms where the other does not, or none.
    """
    for choice, value_n in log.columns.items():
        if OR not in choice:
            continue
        column = choice.partition("=")[0]
        known = np.flatnonzero(~np.isnan(value_n))
        last = int(known[-1]) + 1 if len(known) else 0
        is_whole = len(known) >= MOST_KNOWN * last  # what is missing after its last row was logged, then, and is NaN
        kept_n = ~np.isnan(value_n) | (is_whole & (np.arange(len(value_n)) >= last))
        columns = {name: each_n[kept_n] for name, each_n in {**log.columns, column: value_n}.items()}
        others = detect(log._replace(step_n=log.step_n[kept_n], columns=columns))
        if bool(others) != bool(events):
            taken, _, meant = choice.partition(OR)
            found, lost = (taken, meant) if events else (meant, taken)
            raise RequestError(
                f"{log.name}: alarms if {found} is meant, none if {lost} is; "
                f"--columns {shlex.quote(found)} or --columns {shlex.quote(lost)} decides"
            )


def remarks(log: Log) -> Iterator[str]:
    """What is no alarm but worth knowing: a held-out loss that has turned, and what moves while the policy learns."""
    held_out = log.held_out.get("val_loss")
    if held_out is not None and (found := turn(held_out, pd.Series(log.columns["loss"], log.step_n))):
        rises = f"is lowest at step {found.step}, {found.lowest:.3g}, and has risen to {found.last:.3g} since"
        yield f"{log.name}: the evaluation loss {rises}, while the training loss falls: the run overfits from there on"
    for kind, _, learned in departures(log.step_n, log.columns) if log.is_of_rewards else ():
        verb, farthest = ("falls", np.nanmin) if DEPARTURES[kind].falls else ("rises", np.nanmax)
        for span in learned:
            end = float(farthest(log.columns[column_of(kind)][span.first : span.last + 1]))
            move = f"{LABELS[kind]['moves']} {verb} from {span.usual:.3g} to {end:.3g} while the reward rises"
            yield f"{log.name}: from step {log.step_n[span.first]} on the {move}, so the policy has learned"
    reward_n = log.columns.get("reward", np.empty(0))
    if LAST_ROWS < len(reward_n) < 2 * USUAL_ROWS and (np.diff(reward_n[-LAST_ROWS:]) < 0).all():
        row = int(reward_n.argmax())
        if reward_n[-1] < reward_n[row] / 2:
            before = f"from {reward_n[row]:.3g} at step {log.step_n[row]}; so few rows do not tell a fall from noise"
            yield f"{log.name}: the reward falls to {reward_n[-1]:.3g} in the last rows, {before}"


def watch(
    path: Path,
    *,
    replays: Sequence[Path] = (),
    mantissa_bits: int | None = None,
    columns: Given | None = None,
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
        from labwatch.recordings.words import next_look as next_in_recording
        from labwatch.recordings.words import report

        recorded = report(path, levels)
    findings = recorded.findings if recorded else []
    explained = {event: finding for _, event in alarms for finding in findings if finding.explains(event)}
    number = len(findings) + sum(event not in explained for _, event in alarms)
    if alarms or findings:  # what words and pages need takes long to load
        from labwatch.watch.words import next_look, plain_event, sentence

    advice = {event: next_look(log, event, events, causes.get(event, "")) for log, event in alarms}
    advice |= {event: next_in_recording(finding) for event, finding in explained.items()}
    if as_json:
        plain = [
            plain_event(log, event)
            | {"text": sentence(log, event), "next": advice[event]}
            | ({"cause": causes.get(event)} if replays else {})
            for log, event in alarms
        ]
        output: dict[str, Any] = {"events": plain}
        output |= {"departures": [cause._asdict() for cause in departed]} if replays else {}
        output |= {"recording": recorded.plain} if recorded else {}
        output |= {"notes": notes} if notes else {}
        return [json.dumps(output, indent=1, allow_nan=False)], bool(number)
    if number:
        from labwatch.compare.answer import answer_of
        from labwatch.compare.two_logs import compared
        from labwatch.watch import pages
    lines = [*notes, *(recorded.lines if recorded else [])]
    folder = path / "alarms" if path.is_dir() else path.with_name(f"{path.name}.alarms")
    for log in logs:
        if not events[log.name] and not findings:
            continue
        for event in events[log.name]:
            cause = _because(causes[event]) if event in causes else ""
            lines.append(f"{sentence(log, event)}{cause}. Look next at {advice[event]}.")
        if str(path) == STANDARD_INPUT:
            continue
        page = folder / f"{pages.file_name(log.name)}.html"
        beside = page.with_suffix(".compared.html")
        replayed = find_twins(log, logs, twins)
        of_log = [note for note in notes if not path.is_dir() or note.startswith(log.name)]
        text = pages.page(log, events[log.name], advice, beside.name if replayed else None, recorded, of_log)
        files.write_text(page, text, within=folder.parent)
        if replayed:
            files.write_text(beside, answer_of(compared([log, *replayed])).html(), within=folder.parent)
        lines.append(f"  {page}")
    for run, step, cause in departed:
        lines.append(f"{run} step {step}: departs from its replay{_because(cause)}")
    runs = f"{len(logs)} run{'s' * (len(logs) != 1)}"
    return [*lines, f"{number} alarm{'s' * (number != 1)} in {runs}"], bool(number)


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
