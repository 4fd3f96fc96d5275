"""The numbers of a run beside the limits of the records, as text, as a page of HTML and as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from lab.analysis.laws.fits import Crossing
from lab.analysis.rendering import html
from lab.analysis.statistics import Interval
from lab.analysis.text import count, first_to_last, listed, plain_text, to_json
from lab.features.numbers import numbers
from lab.features.numbers.limits import PUBLIC_RUNS
from lab.features.numbers.numbers import BEYOND, VERDICTS, Decision, Number, Row, short

LINE_LENGTH = 120
SAME_SIZE = 0.2  # decades beyond the largest size that ran, up to which a table is silent


@dataclass(frozen=True)
class NumbersPage:
    """The risks of a run by its numbers; in a notebook it displays itself.

    Attributes:
        given: the numbers, with ``params``.
        command: the command line that makes it.
    """

    given: Mapping[str, Number | str]
    command: str

    @property
    def rows(self) -> list[Row]:
        """A row for each risk that applies."""
        return numbers.rows(self.given)

    @property
    def title(self) -> str:
        """The size and the numbers, as they were given."""
        texts = {key: value if isinstance(value, str) else value.text for key, value in self.given.items()}
        others = [f"{key}={text}" for key, text in texts.items() if key != "params"]
        return f"A run of {texts['params']} parameters: {' '.join(others) or 'no number given'}"

    @property
    def table(self) -> pd.DataFrame:
        """A row for each risk."""
        return pd.DataFrame(
            [
                {
                    "risk": row.risk.title,
                    "verdict": row.verdict,
                    "yours": yours(row),
                    "limit here": limit_text(row),
                    "factors of two to it": factors_text(row.factors_of_two),
                    "stands on": row.source.place,
                    "your size": f"{count(10**row.beyond)} times larger" if row.beyond > SAME_SIZE else "",
                }
                for row in self.rows
            ]
        )

    @property
    def thresholds(self) -> dict[str, dict[str, float]]:
        """The levels at which to act, by column of a log."""
        found = [row.threshold for row in self.rows if row.threshold]
        return {threshold.column: {"above": threshold.above} for threshold in found}

    @property
    def decision(self) -> Decision:
        """Whether to go, to look or to stop, and why."""
        return numbers.decide(self.rows, self.given)

    def lead(self) -> str:
        """The decision, and how far the learning rate lies from the cliff."""
        word, why = self.decision
        return f"{word.capitalize()}: {why}. {numbers.cliff(self.rows, self.given)}".strip()

    def headline(self) -> str:
        """Which risks lie beyond their limits, and which are open, clear or unknown."""
        titles = {word: [row.risk.title for row in self.rows if row.verdict == word] for word in VERDICTS}
        heads = numbers.table()["heads"]
        return " ".join(
            f"{heads[word]}: {listed(found or ['none'])}." for word, found in titles.items() if found or word == BEYOND
        )

    def remarks(self) -> list[str]:
        """How far the numbers lie from all that ran, what is not covered, and what was not asked, a sentence each."""
        found = [f"Not covered: {reason}." for reason in numbers.not_covered(self.given)]
        out = [f"Not asked ({given}): {listed(titles)}." for given, titles in numbers.left_out(self.given).items()]
        return [*numbers.far_away(self.given), *found, *self.changes(), *out]

    def changes(self) -> list[str]:
        """What single changes of a tuned recipe did to public runs of the optimizer, if one is given."""
        optimizer = self.given.get("optimizer")
        return numbers.changes_of(str(optimizer)) if optimizer else []

    def columns(self) -> str:
        """The names of what to log, as ``lab watch`` reads them."""
        return ", ".join(dict.fromkeys(column for row in self.rows for column in row.risk.columns))

    def text(self) -> Iterator[str]:
        """Yield its lines for a terminal."""
        for line in (self.lead(), self.title, self.headline(), *self.remarks()):
            yield from textwrap.wrap(line, LINE_LENGTH)
        yield ""
        yield from plain_text(self.table)
        yield ""
        yield from textwrap.wrap(numbers.table()["about"], LINE_LENGTH)
        for row in self.rows:
            yield ""
            yield row.risk.title
            for sentence in about(row):
                yield from textwrap.wrap(sentence, LINE_LENGTH, initial_indent="  ", subsequent_indent="    ")
        yield ""
        yield from textwrap.wrap(f"Names to log, as lab watch reads them: {self.columns()}", LINE_LENGTH)
        yield ""
        yield "What no small model can tell"
        for sentence in numbers.table()["untold"]:
            yield from textwrap.wrap(sentence, LINE_LENGTH, initial_indent="  ", subsequent_indent="    ")

    def page(self) -> str:
        """A page of HTML."""
        return html.document(self.title, self._body())

    def _repr_html_(self) -> str:
        """What notebooks display."""
        return "\n".join(self._body())

    def _body(self) -> Iterator[Markup]:
        yield html.paragraph(self.lead(), "lead")
        yield html.paragraph(self.headline())
        yield from map(html.paragraph, self.remarks())
        yield html.table(self.table)
        yield html.paragraph(numbers.table()["about"], "note")
        for row in self.rows:
            yield html.section(row.risk.title, html.bullets(about(row)))
        yield html.section("Names to log", html.paragraph(f"As lab watch reads them: {self.columns()}."))
        yield html.section("What no small model can tell", html.bullets(numbers.table()["untold"]))
        yield html.section("How this was made", html.block(self.command))

    def as_json(self) -> str:
        """The page as a JSON object; null where a number is unknown or without end."""
        content = {
            "command": self.command,
            "numbers": dict(self.given),
            "decision": self.decision._asdict(),
            "headline": self.headline(),
            "risks": [_plain(row) for row in self.rows],
            "thresholds": self.thresholds,
            "changes": self.changes(),
            "far_away": numbers.far_away(self.given),
            "left_out": [
                f"{title} ({given})" for given, titles in numbers.left_out(self.given).items() for title in titles
            ],
            "not_covered": numbers.not_covered(self.given),
            "not_tested": numbers.table()["untold"],
        }
        return to_json(content)

    def thresholds_text(self) -> str:
        """The content of a file for ``lab watch --thresholds``."""
        return json.dumps(self.thresholds, indent=1) + "\n"


def about(row: Row) -> list[str]:
    """What a row means: sentences on its limit, the evidence at size, what to log and when to act, and the test."""
    text = html.render(
        "risk.txt",
        risk=row.risk,
        does_not_carry=row.does_not_carry,
        source=row.source,
        missing=_missing(row),
        remarks=row.remarks,
        threshold=row.threshold,
        is_public=row.source.sweep == PUBLIC_RUNS,
        sizes=first_to_last(map(count, row.source.sizes)),
        steps=first_to_last(map(short, row.source.steps)),
    )
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
    return {
        "name": risk.name,
        "title": risk.title,
        "verdict": row.verdict,
        "number": risk.number,
        "value": row.value,
        "limit": Crossing(*(end or -math.inf for end in row.limit)).plain,  # 0 stands for an end below all that ran
        "trouble": risk.trouble,
        "decades_to_limit": row.decades.plain,
        "factors_of_two_to_limit": row.factors_of_two.plain,
        "decades_of_size_between": row.beyond,
        "is_extrapolated": row.beyond > 0,
        "n": source.seeds,
        "interval_level": 0.95,
        "records": {
            "sweep": source.sweep,
            "runs": source.runs,
            "parameters": list(source.sizes),
            "steps": list(source.steps),
            "values": list(source.tried),
            "has_trend_over_size": source.has_trend,
        },
        "remarks": list(row.remarks),
        "fails": risk.fails,
        "does_not_carry": row.does_not_carry or None,
        "published": list(risk.published),
        "log": risk.log,
        "columns": list(risk.columns),
        "act": risk.act or None,
        "threshold": row.threshold._asdict() if row.threshold else None,
        "test": risk.test,
    }
