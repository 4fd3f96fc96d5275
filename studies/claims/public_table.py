"""The scoreboard of claims on public runs, each beside the lab's own claim on small models."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from lab.analysis.text import finite
from lab.report.answer import Answer, Sorted
from studies.claims.public_claims import WORDS, JudgedClaim, effect_text, judge_public_claim
from studies.claims.registry import CLAIMS, PUBLIC_CLAIMS
from studies.claims.scoreboard import EFFECT, PUBLIC_RUNS
from studies.claims.verdicts import committed

OWN = "the lab's claim"


def judge_all() -> list[JudgedClaim]:
    """Judge the claims on public runs, on the numbers that come with their studies."""
    verdicts = {name: entry for name, entry in committed().items() if name in CLAIMS}
    data = {read: read() for read in {claim.read for claim in PUBLIC_CLAIMS.values()}}
    return [judge_public_claim(claim, data[claim.read], verdicts) for claim in PUBLIC_CLAIMS.values()]


def table(rows: list[JudgedClaim]) -> pd.DataFrame:
    """A row for each claim: what its runs show, and what the lab says of small models."""
    return pd.DataFrame(
        {
            "claim": [row.claim.sentence for row in rows],
            "runs of": [row.claim.runs_of for row in rows],
            EFFECT: [f"{effect_text(*row.decision.shown[:3])} {row.claim.unit}".strip() for row in rows],
            "null": [_null(row.claim.side) for row in rows],
            "n": [row.decision.shown.n for row in rows],
            "verdict": [row.decision.verdict for row in rows],
            OWN: [_own(row) for row in rows],
            "verdict on it": [row.word if row.claim.lab else "" for row in rows],
        }
    )


def _null(side: tuple[float, float]) -> str:
    """What an effect on the side that is claimed is not."""
    low, high = side
    if math.isinf(high):
        return f"at most {low:g}"
    return f"at least {high:g}" if math.isinf(low) else f"beyond {low:.2g} to {high:.2g}"


def _own(row: JudgedClaim) -> str:
    """The lab's claim with its effect and verdict; empty if there is none."""
    if not row.own:
        return ""
    claim = CLAIMS[row.claim.lab]
    effect = effect_text(row.own["effect"], row.own["low"], row.own["high"])
    return f"{claim.sentence}: {effect} {claim.unit}, {row.own['verdict']}"


def answer() -> Answer:
    """The claims on public runs with their verdicts, a row each."""
    rows = judge_all()
    found, data = table(rows), [_plain(row) for row in rows]
    return Answer(tally(rows), [Sorted(found, "verdict", ("claim", OWN))], title=f"Claims on {PUBLIC_RUNS}", data=data)


def tally(rows: list[JudgedClaim]) -> str:
    """How many claims of the lab hold on these runs, and how many these do not test, in a line."""
    words = [row.word for row in rows if row.claim.lab]
    counts = ", ".join(f"{words.count(word)} {word}" for word in WORDS if word in words)
    rest = len(CLAIMS.keys() - {row.claim.lab for row in rows})
    return f"{len(rows)} claims, {len(words)} of them beside one of the lab's: {counts}; {rest} of the lab's not tested"


def _plain(row: JudgedClaim) -> dict[str, Any]:
    claim, shown = row.claim, row.decision.shown
    effect = {name: finite(value) for name, value in zip(("effect", "low", "high"), shown[:3], strict=True)}
    said = {"name": claim.name, "source": claim.runs_of, "claim": claim.sentence, "verdict": row.decision.verdict}
    return {
        **said,
        **effect,
        "n": shown.n,
        "unit": claim.unit,
        "claim_of_the_lab": claim.lab or None,
        "holds": row.word,
    }
