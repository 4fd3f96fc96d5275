"""Yes, no, in part or undecided: the answer of claims to the question of the sweep that tests them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from lab.analysis.judging.decision import CONTRADICTED, IN_PART, NO_EFFECT, NOT_TESTABLE, REPRODUCED
from lab.analysis.judging.verdicts import LOG10
from lab.analysis.text import alike
from lab.report.scoreboard import ScoreboardRow

AGAINST = (CONTRADICTED, NO_EFFECT)


def yes_or_no(rows: Sequence[ScoreboardRow], sweeps: Collection[str]) -> tuple[str, str]:
    """The word, and a text with each claim on which it rests, its effect and its interval.

    Args:
        rows: claims judged on these runs.
        sweeps: the sweeps that trained them.

    Returns:
        Two empty texts if no claim answers the question, such as one that asks which or how much.
    """
    answering = [row for row in rows if row.verdict.folder and set(sweeps) & {*row.claim.affirms, *row.claim.denies}]
    if not answering:
        return "", ""
    says = [_says(row, sweeps) for row in answering]
    word = says[0] if len(set(says)) == 1 else "In part" if {"Yes", "In part"} & set(says) else "Undecided"
    text = "; ".join(map(_part, answering))
    return word, f"{text[:1].upper()}{text[1:]}."


def _says(row: ScoreboardRow, sweeps: Collection[str]) -> str:
    verdict, denies = row.verdict.verdict, bool(set(sweeps) & set(row.claim.denies))
    if verdict == REPRODUCED or verdict in AGAINST:
        return "Yes" if (verdict == REPRODUCED) != denies else "No"
    return "In part" if verdict == IN_PART else "Undecided"


def _part(row: ScoreboardRow) -> str:
    verdict, sentence = row.verdict.verdict, row.claim.sentence
    seeds = f"{row.verdict.seeds} {'seed' if row.verdict.seeds == 1 else 'seeds'}{', a screening' * row.is_screening}"
    shown = f" ({_effect(row)}, {seeds})" if row.effect else f" ({seeds})"
    if verdict == REPRODUCED:
        return f"{sentence}{shown}"
    if verdict in AGAINST:
        return f"it is not the case that {sentence}{shown}"
    if verdict == IN_PART:
        return f"it holds in part that {sentence}{shown}: {row.verdict.reason.partition(';')[0]}"
    if verdict == NOT_TESTABLE:
        return f"these runs cannot test whether {sentence}"
    return f"it is open whether {sentence}{shown}: {row.verdict.reason.partition(';')[0]}"


def _effect(row: ScoreboardRow) -> str:
    """The effect with its interval in equal decimals, and its unit; a log of a number is shown as that number."""
    verdict, unit = row.verdict, row.claim.unit
    if unit.startswith(LOG10):
        return row.effect
    effect, low, high = alike([verdict.effect, verdict.low, verdict.high])
    interval = "" if math.isnan(verdict.low) else f" [{low}, {high}]"
    return f"{effect}{interval} {unit}".rstrip()
