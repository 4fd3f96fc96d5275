"""The page of a watched run: its alarms, what to look at next, and figures of the measurements around them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab.analysis.rendering import html, layout, scales, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import capitalized
from lab.core import files
from labwatch.events.detectors import KINDS, LABELS, WATCHED, Event, Log, column_of
from labwatch.events.reinforcement import DEPARTURES
from labwatch.recordings.diagnosis import Finding
from labwatch.recordings.readings import quantities
from labwatch.recordings.recording import Recording
from labwatch.recordings.words import Report, checked, next_look, what_moved
from labwatch.watch.words import what_happened

OTHERS = "#9a9a9a"  # the colour of parts that no finding names
# Rows shown on both sides of an event.
MARGIN = 40
# Nobody looks at more figures than this; every event has its line.
MOST_FIGURES = 50
HELD_OUT_LABELS = {"val_loss": "held-out loss,\nnats/token", "clean_val_loss": "on clean text,\nnats/token"}
LINK = '<p class="facts"><a href="{}">The curves of this run and of its replay, and the gap between them</a></p>'
LONGEST_NAME = 100  # letters of a run's name that become part of a file name


def page(
    log: Log,
    events: Sequence[Event],
    advice: Mapping[Event, str],
    compared: str | None = None,
    recorded: Report | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page of a run: the alarms of each step, what to look at next, and the measurements of the run.

    Args:
        log: the run.
        events: its alarms.
        advice: what to look at next after each.
        compared: the address of the page that compares it with its replay.
        recorded: what it says if it is a recording; the page leads with its first finding.
        notes: on how the log was read.
    """
    findings = recorded.findings if recorded else []
    by_step: dict[int, list[Event]] = {}
    for event in events:
        by_step.setdefault(event.step, []).append(event)
    sections = [Markup(LINK).format(compared)] if compared else []
    if recorded:
        for number, finding in enumerate(findings[:MOST_FIGURES]):
            panel = finding_figure(recorded.recording, finding)
            sections += [
                html.paragraph(f"Step {finding.step}: {what_moved(finding)}.", "plain" if number else "lead"),
                html.paragraph(f"Look next at {next_look(finding)}."),
                html.figure(layout.svg(panel, f"finding{number}"), panel.caption),
            ]
        sections.append(html.paragraph(f"{checked(recorded.plain['checks'])}.", "facts"))
    for number, (step, together) in enumerate(by_step.items()):
        text = html.bullets(
            [f"{capitalized(what_happened(log, event))}. Look next at {advice[event]}." for event in together]
        )
        drawing = event_figure(log, together[-1]) if number < MOST_FIGURES else None
        figures = [html.figure(layout.svg(drawing, f"event{number}"), drawing.caption)] if drawing else []
        sections.append(html.section(f"Step {step}", text, *figures))
    if notes:
        sections.append(html.section("How the log was read", html.bullets(notes)))
    alarms = len(findings) + sum(not any(found.explains(event) for found in findings) for event in events)
    return html.document(f"{log.name}: {alarms} alarm{'s' * (alarms != 1)}", sections)


def file_name(name: str) -> str:
    """The name of a run as part of a file name; a digest of the original is added if it had to be changed."""
    plain = re.sub(r"[^\w.-]+", "_", name)[:LONGEST_NAME]
    return name if plain == name else f"{plain}_{files.text_digest(name)[:6]}"


@layout.styled
def event_figure(log: Log, event: Event) -> Sheet:
    """The measurements of the run, and a closer view of the alarm, which is shaded from its beginning to its end."""
    columns = {column: LABELS[kind]["axis"] for kind, (column, _) in KINDS.items() if column in log.columns}
    for kind in (*DEPARTURES, event.kind) if log.is_of_rewards else (event.kind,):
        if kind in WATCHED and column_of(kind) in log.columns:
            columns.setdefault(column_of(kind), LABELS[kind]["axis"])
    if log.is_of_rewards:
        columns["loss"] = "loss"
    if not log.has_loss:
        columns.pop("loss", None)
    if event.kind == "parting":
        columns = {"loss": columns["loss"], **HELD_OUT_LABELS}
    row = int(np.flatnonzero(log.step_n == event.step)[0])
    end = row if event.end is None else int(np.flatnonzero(log.step_n == event.end)[-1])
    views = {"the run": slice(None)}
    if row > MARGIN or end + MARGIN < len(log.step_n) - 1:  # of a short run, a closer view would show the same
        views[f"around step {event.step}"] = slice(max(0, row - MARGIN), end + MARGIN + 1)
    sheet, facets = layout.facets(list(views), list(columns.values()), 8.0, share_y=False)
    for panels, shown in zip(facets, views.values(), strict=True):
        for axes, column in zip(panels, columns, strict=True):
            is_linear = column in ("loss", "reward", "entropy", *HELD_OUT_LABELS)
            _panel(axes, log.step_n[shown], log.columns[column][shown], event, logarithmic=not is_linear)
        panels[-1].set_xlabel("step")
        panels[-1].locator_params(axis="x", nbins=3)
    return sheet


def _panel(axes: Axes, step_n: Any, value_n: Any, event: Event, *, logarithmic: bool) -> None:
    known_n = ~np.isnan(value_n)
    is_sparse = 2 * np.count_nonzero(known_n) < len(value_n)  # measured every so many rows, not lost in some
    if is_sparse:
        step_n, value_n = step_n[known_n], value_n[known_n]
    marker = "." if is_sparse else None
    axes.plot(step_n, value_n, color=style.ARM_COLOURS[0], linewidth=1, marker=marker, markersize=3)
    if logarithmic and (value_n[np.isfinite(value_n)] > 0).all():
        scales.probe_axis(axes)
    axes.axvspan(event.step, event.step if event.end is None else event.end, color=style.ARM_COLOURS[1], alpha=0.15)
    axes.axvline(event.step, color=style.ARM_COLOURS[1], linewidth=1)


@layout.styled
def finding_figure(recording: Recording, finding: Finding) -> Sheet:
    """The loss at each step, and by part of the model the measurement that moved first; the steps between which it
    began are shaded.
    """
    quantity = shown_quantity(recording, finding)
    step_m = recording.step_m
    margin = MARGIN * max(1, int(np.median(np.diff(step_m))) if len(step_m) > 1 else 1)
    since = finding.step if finding.since is None else finding.since
    low, high = max(int(step_m[0]), since - margin), min(int(step_m[-1]), finding.step + margin)
    sheet = Sheet(1, [8.0, 10.0])
    losses = sheet.panel(0, 0)
    moved = sheet.panel(1, 0, sharex=losses)
    shown_n = (recording.loss_step_n >= low) & (recording.loss_step_n <= high) & np.isfinite(recording.loss_n)
    losses.plot(recording.loss_step_n[shown_n], recording.loss_n[shown_n], color=style.INK, linewidth=1)
    losses.set_ylabel("loss" if recording.places("reward") else LABELS["spike"]["axis"])
    keys, colours = list[Line2D](), iter(style.ARM_COLOURS[1:])
    is_signed = any((recording.columns[quantity, place] < 0).any() for place in recording.places(quantity))
    for place in sorted(recording.places(quantity), key=finding.parts.__contains__):
        value_m = recording.columns[quantity, place]
        shown_m = (step_m >= low) & (step_m <= high) & np.isfinite(value_m) & (is_signed | (value_m > 0))
        is_named = place in finding.parts
        look: dict[str, Any] = {"color": next(colours, style.INK) if is_named else OTHERS, "linewidth": 1 + is_named}
        moved.plot(step_m[shown_m], value_m[shown_m], marker=".", markersize=4, **look)
        if is_named:
            keys.append(Line2D([], [], label=place, **look))
    moved.set_ylabel(str(quantities().get(quantity, {"name": "learning rate"})["name"]))
    if not is_signed:
        scales.probe_axis(moved)
    losses.tick_params(labelbottom=False)
    for axes in (losses, moved):
        axes.axvspan(since, finding.step, color=style.ARM_COLOURS[1], alpha=0.15)
        axes.axvline(finding.step, color=style.ARM_COLOURS[1], linewidth=1)
    moved.set_xlabel("step")
    if any(recording.places(quantity)):
        sheet.keys(("", [*keys, Line2D([], [], color=OTHERS, label="other parts" if keys else "each part")]))
    return sheet


def shown_quantity(recording: Recording, finding: Finding) -> str:
    """What the panel of a finding shows: what moved first, or what its kind is about."""
    of_kind = {"not_finite": "grad_rms", "dead": "grad_rms", "frozen": "update_ratio", "data": "grad_rms"}
    first = [move.quantity for move in finding.moves[:1]] if finding.kind not in of_kind else []
    names = [*first, of_kind.get(finding.kind, "update_ratio"), "grad_norm", "loss"]
    return next(name for name in names if recording.places(name))
