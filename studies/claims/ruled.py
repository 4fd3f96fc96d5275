"""Claims on runs of others, each beside the lab's own claim on small models."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from lab.analysis.text import finite
from lab.report.answer import Answer, Sorted
from studies.claims.as_functions import WORDS, JudgedRule, effect_text, judge_rule
from studies.claims.registry import CLAIMS, RULED
from studies.claims.scoreboard import EFFECT
from studies.claims.verdicts import committed

OWN = "the lab's claim"


def judge_all(source: str) -> list[JudgedRule]:
    """Judge the claims of a source, a key of ``RULED``, on the numbers that come with it."""
    module = RULED[source]
    data, verdicts = module.read(), {name: entry for name, entry in committed().items() if name in CLAIMS}
    return [judge_rule(rule, data, verdicts) for rule in module.RULES]


def table(rows: list[JudgedRule]) -> pd.DataFrame:
    """A row for each claim: what its runs show, and what the lab says of small models."""
    return pd.DataFrame(
        {
            "claim": [row.rule.sentence for row in rows],
            "runs of": [row.rule.source for row in rows],
            EFFECT: [f"{effect_text(*row.decision.shown[:3])} {row.rule.unit}".strip() for row in rows],
            "null": [_null(row.rule.side) for row in rows],
            "n": [row.decision.shown.n for row in rows],
            "verdict": [row.decision.verdict for row in rows],
            OWN: [_own(row) for row in rows],
            "verdict on it": [row.word if row.rule.lab else "" for row in rows],
        }
    )


def _null(side: tuple[float, float]) -> str:
    """What an effect on the side that is claimed is not."""
    low, high = side
    if math.isinf(high):
        return f"at most {low:g}"
    return f"at least {high:g}" if math.isinf(low) else f"beyond {low:.2g} to {high:.2g}"


def _own(row: JudgedRule) -> str:
    """The lab's claim with its effect and verdict; empty if there is none."""
    if not row.own:
        return ""
    claim = CLAIMS[row.rule.lab]
    effect = effect_text(row.own["effect"], row.own["low"], row.own["high"])
    return f"{claim.sentence}: {effect} {claim.unit}, {row.own['verdict']}"


def answer_of(source: str) -> Answer:
    """The claims of a source with their verdicts, a row each."""
    rows = judge_all(source)
    found, data = table(rows), [_plain(row) for row in rows]
    return Answer(tally(rows), [Sorted(found, "verdict", ("claim", OWN))], title=f"Claims on {source}", data=data)


def tally(rows: list[JudgedRule]) -> str:
    """How many claims of the lab hold on these runs, and how many these do not test, in a line."""
    words = [row.word for row in rows if row.rule.lab]
    counts = ", ".join(f"{words.count(word)} {word}" for word in WORDS if word in words)
    rest = len(CLAIMS.keys() - {row.rule.lab for row in rows})
    return f"{len(rows)} claims, {len(words)} of them beside one of the lab's: {counts}; {rest} of the lab's not tested"


def _plain(row: JudgedRule) -> dict[str, Any]:
    rule, shown = row.rule, row.decision.shown
    effect = {name: finite(value) for name, value in zip(("effect", "low", "high"), shown[:3], strict=True)}
    said = {"name": rule.name, "source": rule.source, "claim": rule.sentence, "verdict": row.decision.verdict}
    return {**said, **effect, "n": shown.n, "unit": rule.unit, "claim_of_the_lab": rule.lab or None, "holds": row.word}
