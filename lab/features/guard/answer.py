"""The answer to whether runs are worse than a baseline: the verdict, each change, and what moved."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from lab.analysis.guard.compare import CANNOT_JUDGE, DRIFT, OK, REGRESSION, UNCLEAR, Change, Comparison
from lab.analysis.guard.quantities import STEPS, TENFOLD
from lab.analysis.sensitivity import WINDOW
from lab.analysis.statistics import DIFFERENCE_LEVEL
from lab.analysis.text import count, format_value
from lab.report.answer import Answer, Case, Section

MEANING = {
    OK: "no significant change",
    DRIFT: "a significant change, no regression beyond its margin",
    UNCLEAR: "the seeds leave open whether a change lies beyond its margin",
    REGRESSION: "the 90 % interval of a change lies wholly outside its margin",
    CANNOT_JUDGE: "runs and baseline cannot be compared",
}


def answer_of(check: Comparison) -> Answer:
    """The comparison, with a row for each change; a case that fails is one for which the check fails."""
    data = {"verdict": check.verdict, "interval_level": DIFFERENCE_LEVEL, **check._asdict(), "window": [*check.window]}
    return Answer(
        _headline(check),
        [
            [*check.reasons, *check.removed],
            pd.DataFrame(map(_cells, check.changes)),
            Section("What moved, and at which learning rates", [list(_moved(check))]),
            check.remarks,
        ],
        title=f"{check.folder} against {check.baseline}",
        data=data,
        cases=[
            *(_case(check, change) for change in check.changes),
            *(Case(line, line, "failure") for line in check.removed),
            *(Case(CANNOT_JUDGE, reason, "error") for reason in check.reasons),
        ],
    )


def _headline(check: Comparison) -> str:
    """``regression: the 90 % interval ... (2 of 14 quantities, margin 5 % of the best loss)``."""
    n, is_open = len(check.changes), check.verdict == UNCLEAR
    decisive = sum(change.is_undecided if is_open else change.verdict == check.verdict for change in check.changes)
    details = [f"{decisive} of {n} quantities" if decisive else f"{n} quantities compared"] * bool(n)
    details += [f"margin {100 * check.margin:g} % of the best loss"]
    details += ["half the gap between the zones of a test"] * check.of_cards
    details += [] if check.window == WINDOW else [f"sensitivity over learning rates from {check.window}"]
    return f"{check.verdict}: {MEANING[check.verdict]} ({', '.join(details)})"


def _cells(change: Change) -> dict[str, str]:
    """A row of the table, numbers rounded for readers."""
    return {
        "verdict": change.verdict,
        "arm": change.arm,
        "parameters": count(change.size),
        "quantity": change.quantity,
        "baseline": _value(change, change.before),
        "now": _value(change, change.now),
        "change [90 % interval]": f"{change.interval:+.3f}",
        "margin": f"{change.margin:.3g} {change.unit}",
        "d": "" if math.isnan(change.effect) else f"{change.effect:.2f}",
        "equivalence": _probability(change.equivalence),
        "no change": _probability(change.p),
    }


def _value(change: Change, value: float) -> str:
    """A value of the quantity of a change to three digits, if it is a learning rate or a headroom, or decimals."""
    if change.unit in (STEPS, TENFOLD):
        return f"{value:.3g}" if math.isfinite(value) else "none"
    return f"{value:z.3f}"


def _probability(value: float) -> str:
    return "" if math.isnan(value) else "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _moved(check: Comparison) -> Iterator[str]:
    """Yield a line per arm and number: ``z_loss at 12.4k parameters, final loss (nats/token): +0.31 at 0.1``."""
    lines: dict[str, list[str]] = {}
    for move in check.moves:
        subject = f"{move.arm} at {count(move.size)} parameters, {move.number} ({move.unit})"
        change = f"{move.change:+.3f} at {format_value(move.lr)}" + ("" if move.is_certain else " (uncertain)")
        lines.setdefault(subject, []).append(change)
    yield from (f"{subject}: {', '.join(changes)}" for subject, changes in lines.items())


def _case(check: Comparison, change: Change) -> Case:
    before, now = (_value(change, value) for value in (change.before, change.now))
    fails = change.verdict == REGRESSION or (check.strict and change.is_certain)
    fails |= check.fails_on_unclear and change.is_undecided
    return Case(
        f"{change.arm}, {change.size} parameters: {change.quantity}",
        f"{before} -> {now}: {change.interval:+.3f} {change.unit}, margin {change.margin:.3g}",
        "failure" if fails else "",
    )
