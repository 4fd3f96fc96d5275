"""Render a comparison as text, JSON, Markdown or JUnit XML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html import escape
from xml.etree import ElementTree

import pandas as pd

from lab.analysis.guard.compare import CANNOT_JUDGE, DRIFT, OK, REGRESSION, UNCLEAR, Change, Comparison
from lab.analysis.guard.quantities import STEPS, TENFOLD
from lab.analysis.sensitivity import WINDOW
from lab.analysis.statistics import DIFFERENCE_LEVEL
from lab.analysis.text import count, format_value, json_rows, markdown_table, plain_text
from lab.core.printing import printable

MEANING = {
    OK: "no significant change",
    DRIFT: "a significant change, no regression beyond its margin",
    UNCLEAR: "the seeds leave open whether a change lies beyond its margin",
    REGRESSION: "the 90 % interval of a change lies wholly outside its margin",
    CANNOT_JUDGE: "runs and baseline cannot be compared",
}


def headline(check: Comparison) -> str:
    """``regression: the 90 % interval ... (2 of 14 quantities, margin 5 % of the best loss)``."""
    n = len(check.changes)
    is_told = (
        change.is_undecided if check.verdict == UNCLEAR else change.verdict == check.verdict for change in check.changes
    )
    told = sum(is_told)
    tally = f"{told} of {n} quantities" if told else f"{n} quantities compared" if n else ""
    details = [tally] * bool(tally) + [f"margin {100 * check.margin:g} % of the best loss"]
    details += ["half the gap between the zones of a test"] * check.of_cards
    details += [] if check.window == WINDOW else [f"sensitivity over learning rates from {check.window}"]
    return f"{check.verdict}: {MEANING[check.verdict]} ({', '.join(details)})"


def table(check: Comparison) -> pd.DataFrame:
    """A row per change, numbers rounded for readers."""
    return pd.DataFrame(
        {
            "verdict": [change.verdict for change in check.changes],
            "arm": [change.arm for change in check.changes],
            "parameters": [count(change.size) for change in check.changes],
            "quantity": [change.quantity for change in check.changes],
            "baseline": [_value(change, change.before) for change in check.changes],
            "now": [_value(change, change.now) for change in check.changes],
            "change [90 % interval]": [_interval(change) for change in check.changes],
            "margin": [f"{change.margin:.3g} {change.unit}" for change in check.changes],
            "d": ["" if math.isnan(change.effect) else f"{change.effect:.2f}" for change in check.changes],
            "equivalence": [_probability(change.equivalence) for change in check.changes],
            "no change": [_probability(change.p) for change in check.changes],
        }
    )


def _rounded(value: float, sign: str = "") -> str:
    """Three decimals, zero without a minus."""
    return f"{round(value, 3) + 0.0:{sign}.3f}"


def _value(change: Change, value: float) -> str:
    """A value of the quantity of a change to three digits, if it is a learning rate or a headroom, or decimals."""
    if change.unit in (STEPS, TENFOLD):
        return f"{value:.3g}" if math.isfinite(value) else "none"
    return _rounded(value)


def _interval(change: Change) -> str:
    mean, low, high = (_rounded(value, "+") for value in (change.change, change.low, change.high))
    return f"{mean} [{low}, {high}]"


def _probability(value: float) -> str:
    return "" if math.isnan(value) else "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def text(check: Comparison) -> Iterator[str]:
    """Lines for a terminal: the verdict, what was compared, reasons, a table of changes, moves, remarks."""
    yield headline(check)
    yield f"{check.folder} against {check.baseline}"
    yield from (f"- {line}" for line in (*check.reasons, *check.removed))
    if check.changes:
        yield from ("", *plain_text(table(check)))
    if check.moves:
        yield from ("", "What moved, and at which learning rates:", *(f"- {line}" for line in moved(check)))
    if check.remarks:
        yield from ("", *(f"- {remark}" for remark in check.remarks))


def moved(check: Comparison) -> Iterator[str]:
    """Yield a line per arm and number: ``z_loss at 12.4k parameters, final loss (nats/token): +0.31 at 0.1``."""
    lines: dict[str, list[str]] = {}
    for move in check.moves:
        subject = f"{move.arm} at {count(move.size)} parameters, {move.number} ({move.unit})"
        change = f"{move.change:+.3f} at {format_value(move.lr)}" + ("" if move.is_certain else " (uncertain)")
        lines.setdefault(subject, []).append(change)
    yield from (f"{subject}: {', '.join(changes)}" for subject, changes in lines.items())


def as_json(check: Comparison) -> str:
    """The comparison as JSON, with its ``verdict`` (``ok | drift | unclear | ...``); NaN is null."""
    rows = {"changes": json_rows(check.changes), "moves": json_rows(check.moves)}
    content = {"verdict": check.verdict, "interval_level": DIFFERENCE_LEVEL, **check._asdict(), **rows}
    if check.window == WINDOW:
        del content["window"]
    if not check.of_cards:
        del content["of_cards"]
    return json.dumps(content, indent=1, allow_nan=False)


def markdown(check: Comparison) -> str:
    """The comparison as Markdown, for the summary of a step on GitHub."""
    cells = [markdown_table(table(check).rename(columns=_literal).map(_literal))] if check.changes else []
    lists = [f"- {_literal(line)}" for line in (*check.reasons, *check.removed, *moved(check), *check.remarks)]
    subject = f"{_literal(check.folder)} against {_literal(check.baseline)}"
    return "\n".join([f"## {headline(check)}", "", subject, "", *cells, *[""] * bool(cells), *lists]).rstrip() + "\n"


def _literal(text: str) -> str:
    """Text in a row of a Markdown table, with all markup escaped."""
    return escape(re.sub(r"([\\`*\[\]|_~])", r"\\\1", printable(text).replace("\n", " ")))


def junit(check: Comparison) -> str:
    """JUnit XML: a test case per change and lost intervention, failed if it is a regression, or what else fails.

    Each reason not to judge is an error.
    """
    cases: list[tuple[str, str, str]] = []
    for change in check.changes:
        before, now = (_value(change, value) for value in (change.before, change.now))
        message = f"{before} -> {now}: {_interval(change)} {change.unit}, margin {change.margin:.3g}"
        fails = change.verdict == REGRESSION or (check.strict and change.is_certain)
        fails |= check.fails_on_unclear and change.is_undecided
        name = f"{change.arm}, {change.size} parameters: {change.quantity}"
        cases.append((name, "failure" if fails else "", message))
    cases += [(line, "failure", line) for line in check.removed]
    cases += [(CANNOT_JUDGE, "error", reason) for reason in check.reasons]
    suite = ElementTree.Element("testsuite", {"name": "lab check", "tests": str(len(cases))})
    for kind in ("failure", "error"):
        suite.set(f"{kind}s", str(sum(case[1] == kind for case in cases)))
    for name, kind, message in cases:
        case = ElementTree.SubElement(suite, "testcase", {"classname": check.baseline, "name": name})
        if kind:
            ElementTree.SubElement(case, kind, {"message": message})
    for element in suite.iter():  # XML cannot hold control characters
        element.attrib.update({key: printable(value) for key, value in element.attrib.items()})
    ElementTree.indent(suite, " ")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
