"""The answer to a run by its numbers: each risk beside the limit of the records, and what it means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lab.analysis.laws.fits import Crossing
from lab.analysis.rendering import html
from lab.analysis.statistics import Interval
from lab.analysis.text import count, first_to_last, listed
from lab.features.numbers import numbers
from lab.features.numbers.limits import PUBLIC_RUNS
from lab.features.numbers.numbers import BEYOND, VERDICTS, Number, Row, short
from lab.report.answer import Answer, Section

SAME_SIZE = 0.2  # decades beyond the largest size that ran, up to which a table is silent
# What JSON holds of a risk as it is.
OF_RISK = ("name", "title", "number", "trouble", "fails", "published", "log", "columns", "test")


def answer_of(given: Mapping[str, Number | str], command: str) -> Answer:
    """The risks of a run by its numbers, as ``read_numbers`` makes them, with ``params``."""
    rows, about = numbers.rows(given), numbers.table()
    decision = numbers.decide(rows, given)
    texts = {key: getattr(value, "text", value) for key, value in given.items()}
    size, others = texts.pop("params"), " ".join(f"{key}={text}" for key, text in texts.items())
    columns = dict.fromkeys(column for row in rows for column in row.risk.columns)
    left_out = [f"{title} ({word})" for word, titles in numbers.left_out(given).items() for title in titles]
    data = {
        "command": command,
        "numbers": dict(given),
        "decision": decision,
        "headline": verdicts_text(rows),
        "risks": list(map(_plain, rows)),
        "thresholds": {row.threshold.column: {"above": row.threshold.above} for row in rows if row.threshold},
        "changes": numbers.changes_of(given.get("optimizer")),
        "far_away": numbers.far_away(given),
        "left_out": left_out,
        "not_covered": numbers.not_covered(given),
        "not_tested": about["untold"],
    }
    return Answer(
        f"{decision.word.capitalize()}: {decision.why}. {numbers.cliff(rows, given)}".strip(),
        [
            verdicts_text(rows),
            *remarks(given),
            pd.DataFrame(map(_cells, rows)),
            about["about"],
            *(Section(row.risk.title, [_about(row)]) for row in rows),
            Section("Names to log", [f"As lab watch reads them: {', '.join(columns)}."]),
            Section("What no small model can tell", [about["untold"]]),
        ],
        title=f"A run of {size} parameters: {others or 'no number given'}",
        command=command,
        data=data,
    )


def verdicts_text(rows: Sequence[Row]) -> str:
    """Which risks lie beyond their limits, and which are open, clear or unknown."""
    titles = {word: [row.risk.title for row in rows if row.verdict == word] for word in VERDICTS}
    heads = numbers.table()["heads"]
    return " ".join(
        f"{heads[word]}: {listed(found or ['none'])}." for word, found in titles.items() if found or word == BEYOND
    )


def remarks(given: Mapping[str, Number | str]) -> list[str]:
    """How far the numbers lie from all that ran, what is not covered, and what was not asked, a sentence each."""
    not_covered = [f"Not covered: {reason}." for reason in numbers.not_covered(given)]
    left_out = [f"Not asked ({word}): {listed(titles)}." for word, titles in numbers.left_out(given).items()]
    return [*numbers.far_away(given), *not_covered, *numbers.changes_of(given.get("optimizer")), *left_out]


def _cells(row: Row) -> dict[str, str]:
    return {
        "risk": row.risk.title,
        "verdict": row.verdict,
        "yours": yours(row),
        "limit here": limit_text(row),
        "factors of two to it": factors_text(row.factors_of_two),
        "stands on": row.source.place,
        "your size": f"{count(10**row.beyond)} times larger" if row.beyond > SAME_SIZE else "",
    }


def _about(row: Row) -> list[str]:
    """Sentences on the limit of a row, the evidence at size, what to log and when to act, and the test."""
    sizes, steps = first_to_last(map(count, row.source.sizes)), first_to_last(map(short, row.source.steps))
    is_public = row.source.sweep == PUBLIC_RUNS
    text = html.render("risk.txt", row=row, missing=_missing(row), is_public=is_public, sizes=sizes, steps=steps)
    return text.splitlines()


def _missing(row: Row) -> str:
    return listed(f"{key}=" for key in row.missing) if row.missing else ""


def yours(row: Row) -> str:
    """The user's number with its name, as it was given."""
    if math.isnan(row.value):
        return f"{_missing(row)} not given" if len(row.missing) == 1 else "some not given"
    assert row.given is not None
    return f"{row.risk.needs[0]}={row.given.text}"


def limit_text(row: Row) -> str:
    """The limit with its interval; an end beyond all that ran is written as the value next to it.

    The limit of a number that follows from others is that of the first of them, with the others as they were given.
    """
    low, high = row.source.tried

    def spelled(end: float) -> str:
        value = short(row.unit * (high if math.isinf(end) else end or low))
        return f"> {value}" if math.isinf(end) else f"≤ {value}" if end == 0 else value

    first, last = sorted(row.limit[1:])
    return Interval(row.limit.middle, first, last).spelled(spelled)


def factors_text(factors: Crossing) -> str:
    """Factors of two to a limit with their interval; empty without a number."""
    if math.isnan(factors.middle):
        return ""
    low, high = sorted(factors[1:])
    return Interval(factors.middle, low, high).spelled(
        lambda value: "unknown" if math.isinf(value) else f"{value:+z.1f}"
    )


def _plain(row: Row) -> dict[str, Any]:
    risk, source = row.risk, row.source
    return {name: getattr(risk, name) for name in OF_RISK} | {
        "verdict": row.verdict,
        "value": row.value,
        "limit": Crossing(*(end or -math.inf for end in row.limit)).plain,  # 0 stands for an end below all that ran
        "decades_to_limit": row.decades.plain,
        "factors_of_two_to_limit": row.factors_of_two.plain,
        "decades_of_size_between": row.beyond,
        "is_extrapolated": row.beyond > 0,
        "n": source.seeds,
        "interval_level": 0.95,
        "records": {
            "sweep": source.sweep,
            "runs": source.runs,
            "parameters": source.sizes,
            "steps": source.steps,
            "values": source.tried,
            "has_trend_over_size": source.has_trend,
        },
        "remarks": row.remarks,
        "does_not_carry": row.does_not_carry or None,
        "act": risk.act or None,
        "threshold": row.threshold,
    }
