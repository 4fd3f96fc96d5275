"""The answers of `lab compare LOG LOG`: what lies between logs, and whether a run keeps to its siblings' curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lab.analysis.rendering import html
from lab.report.answer import Answer, Figure, Section
from labwatch.compare.two_logs import (
    METHOD,
    ComparedLogs,
    Pair,
    Siblings,
    described,
    event_sentence,
    lost_phrase,
    pair_sentences,
    rewards_phrase,
    verdict_phrase,
    vocabularies_phrase,
)
from labwatch.events.detectors import LABELS
from labwatch.events.twins import Gap
from labwatch.watch.words import plain_event

if TYPE_CHECKING:
    from lab.analysis.rendering.layout import Drawing

MOST_EVENTS = 100  # that are shown


def answer_of(compared: ComparedLogs) -> Answer:
    """The verdicts, a section for each log beside the first, and the events."""
    letters, shown = compared.letters, compared.events[:MOST_EVENTS]
    alone = sum(bool(shared.not_in_twins) and not shared.in_twins for shared in compared.events)
    count = f"{len(compared.events)}, of which {alone} are in none of the log's twins" if compared.events else "None"
    rows = [
        {
            "log": letters[shared.log.name],
            "step": shared.event.step,
            "event": LABELS[shared.event.kind]["name"],
            "what happened": event_sentence(shared, letters),
        }
        for shared in shown
    ]
    more = len(compared.events) - len(shown)
    events = [
        {**plain_event(log, event), "in_twins": in_twins, "not_in_twins": not_in_twins}
        for log, event, in_twins, not_in_twins in compared.events
    ]
    first = compared.pairs[0].first
    return Answer(
        " ".join(
            f"{letters[pair.second.name]} against A: {_verdicts(letters[pair.second.name], pair)}."
            for pair in compared.pairs
        ),
        [
            f"A: {described(first)}",
            *(_section(pair, compared) for pair in compared.pairs),
            Section("Events", [f"{count}.", pd.DataFrame(rows), f"... and {more} more." if more else ""]),
            Section("How to read this", [[METHOD, *compared.notes]]),
        ],
        title="Are these logs the same?",
        data={
            "first": first.name,
            "pairs": list(map(_plain, compared.pairs)),
            "events": events,
            "method": METHOD,
            "notes": compared.notes,
        },
    )


def _verdicts(letter: str, pair: Pair) -> str:
    """The verdict of each part."""
    parts = [
        f"{verdict_phrase(letter, gap)} at steps {gap.first} to {gap.last}, {'paired' if gap.is_paired else 'unpaired'}"
        for gap in pair.gaps
    ]
    lost = lost_phrase(letter, pair)
    parts = parts or [rewards_phrase(letter, pair) or vocabularies_phrase(letter, pair) or "no step in common"]
    return "; ".join([*([lost] if lost else []), *parts])


def _section(pair: Pair, compared: ComparedLogs) -> Section:
    def draw() -> Drawing:
        from labwatch.compare.figures import pair_figure  # matplotlib is slow to import

        return pair_figure(pair, compared.events, compared.letters)

    letter = compared.letters[pair.second.name]
    figure = Figure(f"gap-{html.anchor(letter)}", draw)
    sentences = list(pair_sentences(letter, pair))
    return Section(f"{letter} against A", [f"{letter}: {described(pair.second)}", figure, sentences])


def siblings_answer(compared: Siblings) -> Answer:
    """Whether the run keeps to the curve of its siblings."""

    def draw() -> Drawing:
        from labwatch.compare.figures import siblings_figure  # matplotlib is slow to import

        return siblings_figure(compared)

    run, (step_n, excess_n, tolerance, step, *_) = compared.run.name, compared.found
    if not len(excess_n):
        verdict = f"{run} has too few rows so far."
    elif step is None:
        most = int(np.argmax(excess_n))
        excess = f"its loss is at most {excess_n[most]:+.3f} nats above it, at step {step_n[most]}"
        verdict = f"{run} keeps to the curve of its siblings: {excess} (an alarm is above {tolerance:.3f})."
    else:
        excess = f"{excess_n[step_n == step][0]:+.3f} nats (an alarm is above {tolerance:.3f})"
        verdict = f"{run} leaves the curve of its siblings at step {step}: its loss is above it by {excess}."
    names = [f"the run: {described(compared.run)}", *(f"sibling: {described(log)}" for log in compared.siblings)]
    return Answer(
        verdict,
        [Figure("siblings", draw), Section("The logs", [names])],
        title="Does this run keep to the curve of its siblings?",
        data={
            "run": run,
            "siblings": [sibling.name for sibling in compared.siblings],
            "alarm": step,
            "tolerance": tolerance,
            "steps": step_n.tolist(),
            "excess": excess_n.tolist(),
        },
    )


def _plain(pair: Pair) -> dict[str, Any]:
    return {
        "second": pair.second.name,
        "batches": pair.sharing,
        "gaps": list(map(_plain_gap, pair.gaps)),
        "bumps": pair.bumps,
        "lost": pair.lost,
    }


def _plain_gap(gap: Gap) -> dict[str, Any]:
    half, change_half = gap.half_width(), gap.change_half_width()
    return {
        **gap._asdict(),
        "low": gap.mean - half,
        "high": gap.mean + half,
        "change_low": gap.change - change_half,
        "change_high": gap.change + change_half,
        "slope_per_1000_steps": gap.change * gap.per_thousand,
        "verdict": gap.verdict,
        "equal_within": gap.equal_within,
        "smallest_gap_seen": gap.smallest_gap,
        "smallest_change_seen": gap.smallest_change,
    }
