"""What claims of papers say of a results folder: the word that answers its question, and a section of its report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from lab.analysis.rendering import html
from lab.analysis.sensitivity import WINDOW, Study
from lab.analysis.text import capitalized
from lab.core import shipped
from lab.report.judged import Judgement
from studies.claims import scoreboard
from studies.claims.decision import CONTRADICTED, IN_PART, NO_EFFECT, REPRODUCED
from studies.claims.evidence import read_evidence
from studies.claims.registry import study_of
from studies.claims.scoreboard import ScoreboardRow

AGAINST = (CONTRADICTED, NO_EFFECT)
SENTENCES = html.macros("answers.txt")  # a macro for each kind of sentence
NOTES: Mapping[str, str] = shipped.load(Path(__file__).with_suffix(".yaml"))


def judged(study: Study, folder: Path, commands: Sequence[str]) -> Judgement:
    """Judge the claims that the sweeps of a folder test, and those that answer their questions."""
    evidence = read_evidence(folder, study.records, commands)
    rows = scoreboard.judge_all([evidence], sweeps=evidence.sweeps)
    tested = [row for row in rows if row.verdict.folder and row.claim.sweep in evidence.sweeps]
    word, text = yes_or_no(rows, evidence.sweeps)
    name = next(filter(None, map(study_of, evidence.sweeps)), "")
    return Judgement(word, text, scoreboard.counts_of([row.word for row in tested]), name, _section(study, tested))


def _section(study: Study, rows: Sequence[ScoreboardRow]) -> Markup:
    if not rows:
        return Markup()
    table = scoreboard.table(rows)[["claim", "verdict", scoreboard.EFFECT, "source", "figure", "why not"]]
    shown = html.table(table, prose=("claim", scoreboard.EFFECT, "why not"))
    other = "" if study.window == WINDOW else " " + NOTES["other_window"].format(WINDOW)
    return html.section("Claims of papers", html.paragraph(f"{NOTES['about']}{other}", "note"), shown, folded=True)


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
    return word, f"{capitalized(text)}."


def _says(row: ScoreboardRow, sweeps: Collection[str]) -> str:
    verdict, denies = row.verdict.verdict, bool(set(sweeps) & set(row.claim.denies))
    if verdict == REPRODUCED or verdict in AGAINST:
        return "Yes" if (verdict == REPRODUCED) != denies else "No"
    return "In part" if verdict == IN_PART else "Undecided"


def _part(row: ScoreboardRow) -> str:
    verdict, reason = row.verdict, row.verdict.reason.partition(";")[0]
    return str(
        SENTENCES.claim(
            row.claim.sentence, verdict.verdict, reason, row.effect, verdict.seeds, is_screening=row.is_screening
        )
    )
