"""Verdicts of a check: as text, JSON, Markdown, JUnit XML, and a page with the old and new curves over one another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html import escape
from typing import Any
from xml.etree import ElementTree

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.analysis.guard.baseline import Baseline
from lab.analysis.guard.compare import CANNOT_JUDGE, OK, REGRESSION, Change, Comparison, match_curves, runs_of, where
from lab.analysis.rendering import html, panels, scales, style
from lab.analysis.sensitivity import judge
from lab.analysis.text import count
from lab.core.files import printable

MEANING = {
    OK: "no change lies outside its margin",
    REGRESSION: "the 90 % interval of a change lies wholly outside its margin",
    CANNOT_JUDGE: "the two cannot be held against each other",
}
EXIT_CODES = {OK: 0, REGRESSION: 1, CANNOT_JUDGE: 2}
HOW = """A change is that of the mean over seeds, paired by seed where both sides have the same seeds. It counts as a
regression when its 90 % interval lies wholly outside the margin, on the worse side; as the same when it lies wholly
inside, which is the equivalence test (two one-sided t-tests, p below 0.05). d is Cohen's effect size."""
OVERLAY = """Final loss against learning rate, before and now.

Grey and dashed: the baseline. In colour: now. Lines are means over seeds, bands reach from the lowest to the highest
seed, a loss above that at initialization is drawn there. A cross marks learning rates above the best one at which some
seed ended worse than a bigram model of the text, a triangle those at which some seed diverged."""
BEFORE, NOW = "#888888", "#D55E00"


def headline(check: Comparison) -> str:
    """``regression: the 90 % interval ... (2 of 14 changes; margin 5 % of the best loss)``."""
    bad, n = sum(change.verdict == REGRESSION for change in check.changes), len(check.changes)
    tally = f"{bad} of {n} changes" if bad else f"{n} changes" if n else ""
    said = [tally] * bool(tally) + [f"margin {100 * check.margin:g} % of the best loss"]
    return f"{check.verdict}: {MEANING[check.verdict]} ({', '.join(said)})"


def table(check: Comparison) -> pd.DataFrame:
    """A row per change, for the eye."""
    return pd.DataFrame(
        {
            "verdict": [change.verdict for change in check.changes],
            "arm": [change.arm for change in check.changes],
            "parameters": [count(change.size) for change in check.changes],
            "quantity": [change.quantity for change in check.changes],
            "baseline": [f"{change.before:.3f}" for change in check.changes],
            "now": [f"{change.now:.3f}" for change in check.changes],
            "change [90 % interval]": [_interval(change) for change in check.changes],
            "margin": [f"{change.margin:.3g} {change.unit}" for change in check.changes],
            "d": [_number(change.effect, ".2f") for change in check.changes],
            "equivalence": [_probability(change.equivalence) for change in check.changes],
        }
    )


def _interval(change: Change) -> str:
    moved, low, high = (f"{round(value, 3) + 0.0:+.3f}" for value in (change.change, change.low, change.high))
    return f"{moved} [{low}, {high}]"


def _number(value: float, how: str) -> str:
    return "" if math.isnan(value) else format(value, how)


def _probability(value: float) -> str:
    return "" if math.isnan(value) else "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def text(check: Comparison) -> Iterator[str]:
    """The verdict, what it is about, every change, and what else is to be known."""
    yield headline(check)
    yield f"{check.folder} against {check.baseline}"
    yield from (f"- {reason}" for reason in check.reasons)
    if check.changes:
        rows = [list(table(check)), *table(check).to_numpy().tolist()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield ""
        yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    if check.remarks:
        yield ""
        yield from (f"- {remark}" for remark in check.remarks)


def as_json(check: Comparison) -> str:
    """An object with ``verdict`` (``ok | regression | cannot judge``), ``reasons``, ``changes``; null where unknown."""
    changes = [{key: _known(value) for key, value in change._asdict().items()} for change in check.changes]
    told = {"verdict": check.verdict, **check._asdict(), "changes": changes}
    return json.dumps(told, indent=1, allow_nan=False)


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(check: Comparison) -> str:
    """For the summary of a step on GitHub."""
    head = list(map(str, table(check)))
    rows: list[list[str]] = [head, ["---"] * len(head), *table(check).to_numpy().tolist()]
    cells = [f"| {' | '.join(_literal(cell) for cell in row)} |" for row in rows] if check.changes else []
    lists = [f"- {_literal(line)}" for line in (*check.reasons, *check.remarks)]
    about = f"{_literal(check.folder)} against {_literal(check.baseline)}"
    return "\n".join([f"## {headline(check)}", "", about, "", *cells, *[""] * bool(cells), *lists]).rstrip() + "\n"


def _literal(text: str) -> str:
    """Text in a row of a Markdown table, none of it markup."""
    return escape(re.sub(r"([\\`*\[\]|_~])", r"\\\1", printable(text).replace("\n", " ")))


def junit(check: Comparison) -> str:
    """JUnit XML: a test case per change, one that is in error for each reason why it cannot be judged."""
    bad = sum(change.verdict == REGRESSION for change in check.changes)
    counts = {"tests": len(check.changes) + len(check.reasons), "failures": bad, "errors": len(check.reasons)}
    suite = ElementTree.Element("testsuite", {"name": "lab check", **{key: str(n) for key, n in counts.items()}})
    for change in check.changes:
        name = f"{change.arm}, {change.size} parameters: {change.quantity}"
        case = ElementTree.SubElement(suite, "testcase", {"classname": check.baseline, "name": name})
        if change.verdict == REGRESSION:
            said = f"{_interval(change)} {change.unit}, margin {change.margin:.3g}"
            ElementTree.SubElement(case, "failure", {"message": said})
    for reason in check.reasons:
        case = ElementTree.SubElement(suite, "testcase", {"classname": check.baseline, "name": CANNOT_JUDGE})
        ElementTree.SubElement(case, "error", {"message": reason})
    for element in suite.iter():  # XML has no letters for control characters
        element.attrib.update({key: printable(value) for key, value in element.attrib.items()})
    ElementTree.indent(suite, " ")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def as_html(check: Comparison, curves: tuple[Baseline, Baseline] | None) -> str:
    """The page: verdict, curves, table, remarks, and how baseline and runs were made, as far as they could be read."""
    body = [html.paragraph(headline(check), "lead"), html.paragraph(f"{check.folder} against {check.baseline}")]
    if check.reasons:
        body.append(html.section("Why it cannot be judged", html.bullets(check.reasons)))
    if check.changes and curves:
        drawn = html.figure(style.svg(overlay(*curves), "overlay"), OVERLAY)
        body.append(html.section("Before and now", drawn))
        body.append(html.section("Changes", html.paragraph(HOW), html.table(table(check))))
    if check.remarks:
        body.append(html.section("What else differs", html.bullets(check.remarks)))
    for name, some in zip(("baseline", "runs"), curves or (), strict=False):
        body.append(
            html.section(f"How the {name} came to be", *(html.block("\n".join(lines)) for lines in some.made.values()))
        )
    return html.document(f"Check: {check.verdict}", body)


@style.styled
def overlay(old: Baseline, new: Baseline) -> Figure:
    """Every curve of a baseline with its like over it: a column per arm, a row per size."""
    pairs, _ = match_curves(old, new)
    places = {number: where(old, number) for number in pairs}
    arms, sizes = (list(dict.fromkeys(place[part] for place in places.values())) for part in (0, 1))
    sheet = style.Sheet(len(arms), [(2.3, 0.85)] * len(sizes), headroom=0.55)
    curves = {number: (judge(runs_of(old, number)), judge(runs_of(new, other))) for number, other in pairs.items()}
    every = pd.concat([runs for both in curves.values() for runs in both])
    for number, (before, now) in curves.items():
        arm, size = places[number]
        row, column = sizes.index(size), arms.index(arm)
        axes = sheet.panel(row, column, sharey=sheet.first)
        panels.over(axes, before, "lr", "capped", BEFORE)
        for line in axes.lines:
            line.set_linestyle(panels.DASHED)
        panels.over(axes, now, "lr", "capped", NOW)
        panels.title(axes, f"{arm}, {count(size)} parameters")
        scales.lr_axis(axes, before["lr"])
        scales.loss_axis(
            axes, every, every["capped"], "" if column else "final held-out loss\n(nats/token)", bigram=False
        )
        axes.tick_params(labelleft=column == 0)
    keys = [
        Line2D([], [], color=BEFORE, linestyle=panels.DASHED, label="baseline"),
        Line2D([], [], color=NOW, label="now"),
    ]
    sheet.keys(("", [*keys, *style.outcome_keys()]))
    return sheet.figure
