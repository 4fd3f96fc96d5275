"""The answer to a run by its numbers: each risk beside the limit of public runs, and the run that contradicts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lab.analysis.laws.fits import Crossing
from lab.analysis.rendering import html
from lab.analysis.statistics import Interval
from lab.analysis.text import capitalized, count, first_to_last, listed
from lab.features.predict import numbers
from lab.features.predict.numbers import BEYOND, NOT_JUDGED, OPEN, UNSTABLE, Numbers, Published, Row, short, text_of
from lab.report.answer import Answer, Section

OF_RISK = ("name", "title", "number", "trouble", "fails", "published", "log", "columns", "test")  # in JSON as they are
SHOWN = ("params", "lr", "tokens", "optimizer", "qk_norm")  # of a published run


def answer_of(given: Numbers, command: str, known: Sequence[Published] | None = None) -> Answer:
    """The risks of a run by its numbers, as ``read_numbers`` makes them, with ``params``.

    Args:
        given: the numbers.
        command: the command line that asks.
        known: the published runs among which one is looked for that contradicts the answer; all unless given.
    """
    rows, about = numbers.rows(given), numbers.table()
    known = numbers.published_runs() if known is None else known
    against = [numbers.contradicting(row, given, known) for row in rows]
    texts = {key: text_of(value) for key, value in given.items()}
    size, others = texts.pop("params"), " ".join(f"{key}={text}" for key, text in texts.items())
    columns = dict.fromkeys(column for row in rows for column in row.risk.columns)
    left_out = [f"{title} ({word})" for word, titles in numbers.left_out(given).items() for title in titles]
    headline = headline_of(rows, against, given, known)
    data = {
        "command": command,
        "numbers": dict(given),
        "headline": headline,
        "judged": sum(row.verdict != NOT_JUDGED for row in rows),
        "is_beyond": is_beyond(rows),
        "risks": [_plain(row, run) for row, run in zip(rows, against, strict=True)],
        "thresholds": {row.threshold.column: {"above": row.threshold.above} for row in rows if row.threshold},
        "changes": numbers.changes_of(given.get("optimizer")),
        "far_away": numbers.far_away(given),
        "left_out": left_out,
        "not_covered": numbers.not_covered(given),
        "not_tested": about["untold"],
    }
    return Answer(
        headline,
        [
            about["not_measured"],
            base_rate(known),
            *remarks(given),
            pd.DataFrame([_cells(row, run) for row, run in zip(rows, against, strict=True)]),
            about["about"],
            *(Section(row.risk.title, _about(row, run)) for row, run in zip(rows, against, strict=True)),
            Section("Names to log", [f"As lab watch reads them: {', '.join(columns)}."] if columns else []),
            Section("What no small model can tell", [about["untold"]]),
        ],
        title=f"A run of {size} parameters: {others or 'no number given'}",
        command=command,
        data=data,
    )


def is_beyond(rows: Sequence[Row]) -> bool:
    """Whether a number lies beyond its limit."""
    return any(row.verdict == BEYOND for row in rows)


def headline_of(
    rows: Sequence[Row], against: Sequence[Published | None], given: Numbers, known: Sequence[Published]
) -> str:
    """How many risks could be judged, what was found of the first, and the run that contradicts it, each a sentence."""
    if not rows:
        unstable = [run for run in known if run.outcome == UNSTABLE]
        nearest = min(unstable, key=lambda run: numbers.distance(run.numbers, given), default=None)
        return f"No risk could be judged, since no public run has such numbers. {_contradiction(nearest)}"
    judged = sum(row.verdict != NOT_JUDGED for row in rows)
    lead = f"Of {len(rows)} risk{'s' * (len(rows) > 1)} {judged or 'none'} could be judged."
    return f"{lead} {capitalized(rows[0].risk.title)}: {finding(rows[0])}. {_contradiction(against[0])}"


def finding(row: Row) -> str:
    """What was found of a risk, half a sentence."""
    if row.verdict == NOT_JUDGED:
        return f"not judged, since {row.reason}"
    away = f", {factors_text(row.factors_of_two)} factors of two to it" if row.value else ""
    word = "open, since it may lie on either side of" if row.verdict == OPEN else row.verdict
    return f"{word} the limit of public runs ({yours(row)}{away})"


def _contradiction(run: Published | None) -> str:
    if run is None:
        return "No published run here contradicts that."
    how = "with no number beyond a limit" if run.outcome == UNSTABLE else "beyond this limit"
    return (
        f"Nearest of the published runs that were {run.outcome} {how}: {run.name} ({described(run)}), {run.published}."
    )


def described(run: Published) -> str:
    """The size, learning rate and so on of a published run, as words of the command line."""
    return " ".join(f"{key}={text_of(run.numbers[key])}" for key in SHOWN if key in run.numbers)


def remarks(given: Numbers) -> list[str]:
    """How far the numbers lie from all that ran, what is not covered, and what was not asked, a sentence each."""
    not_covered = [f"Not covered: {reason}." for reason in numbers.not_covered(given)]
    left_out = [f"Not asked ({word}): {listed(titles)}." for word, titles in numbers.left_out(given).items()]
    return [*numbers.far_away(given), *not_covered, *numbers.changes_of(given.get("optimizer")), *left_out]


def base_rate(known: Sequence[Published]) -> str:
    """How many of the published runs that no limit warned of were unstable, a sentence."""
    unwarned = [run for run in known if BEYOND not in run.verdicts.values()]
    unstable = sum(run.outcome == UNSTABLE for run in unwarned)
    return f"Of the {len(unwarned)} published runs here with no number beyond a limit, {unstable} were unstable."


def _cells(row: Row, run: Published | None) -> dict[str, str]:
    return {
        "risk": row.risk.title,
        "finding": row.verdict,
        "yours": yours(row),
        "limit here": limit_text(row),
        "factors of two to it": factors_text(row.factors_of_two),
        "your size": f"{count(10**row.beyond)} times larger" if row.beyond > 0 else "",
        "against it": f"{run.name}, {run.outcome}" if run else "",
    }


def _about(row: Row, run: Published | None) -> list[list[str]]:
    """Sentences on the limit of a row, its evidence and what contradicts it, what to log, when to act, and the test."""
    sizes, steps = first_to_last(map(count, row.source.sizes)), first_to_last(map(short, row.source.steps))
    text = html.render("risk.txt", row=row, run=run, sizes=sizes, steps=steps, contradiction=_contradiction(run))
    return [text.splitlines()]


def yours(row: Row) -> str:
    """The user's number with its name, as it was given."""
    if row.missing:
        return f"{listed(f'{key}=' for key in row.missing)} not given"
    assert row.given is not None
    return f"{row.risk.needs[0]}={row.given.text}"


def limit_text(row: Row) -> str:
    """The limit with its interval; of a number that follows from others in the first of them, with the others given."""
    first, last = sorted(row.limit[1:])
    return Interval(row.limit.middle, first, last).spelled(lambda end: short(row.unit * end))


def factors_text(factors: Crossing) -> str:
    """Factors of two to a limit with their interval; empty without a number."""
    if math.isnan(factors.middle) or math.isinf(factors.middle):
        return ""
    low, high = sorted(factors[1:])
    return Interval(factors.middle, low, high).spelled(lambda value: f"{value:+z.1f}")


def _plain(row: Row, run: Published | None) -> dict[str, Any]:
    risk, source = row.risk, row.source
    contradicts = run and {"name": run.name, "outcome": run.outcome, "published": run.published, "source": run.source}
    return {name: getattr(risk, name) for name in OF_RISK} | {
        "verdict": row.verdict,
        "value": row.value,
        "limit": row.limit.plain,
        "decades_to_limit": row.decades.plain,
        "factors_of_two_to_limit": row.factors_of_two.plain,
        "decades_of_size_between": row.beyond,
        "is_extrapolated": row.beyond > 0,
        "n": 1,
        "interval_level": 0.95,
        "records": {
            "runs": source.runs,
            "parameters": source.sizes,
            "steps": source.steps,
            "values": source.tried,
            "has_trend_over_size": bool(source.law.exponents),
        },
        "contradicted_by": contradicts,
        "remarks": row.remarks,
        "reason": row.reason or None,
        "act": risk.act or None,
        "threshold": row.threshold,
    }
