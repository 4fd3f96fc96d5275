"""The scoreboard: every claim judged on results folders, as text, JSON or a table of Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.claims.evidence import Evidence
from lab.analysis.claims.judging import CLAIMS, FIGURES_OF_THE_PAPER, VERDICTS, Claim, Verdict, judge_claim
from lab.analysis.claims.replication import compare
from lab.analysis.text import plain_text
from lab.core.errors import RequestError, nearest
from lab.records import store

SOURCE = "Wortsman 2023"
# What the claims of a module are about.
SUBJECTS = {
    "attention": "attention logits and qk-layernorm",
    "output": "output logits and z-loss",
    "recipe": "warm-up, weight decay, steps and batch size",
    "gradients": "gradients and Adam's epsilon",
    "size": "width, depth and muP",
}
# Around the two tables, where a document shows them.
MARKS = ("<!-- claims -->", "<!-- end of claims -->")
SUBJECT_MARKS = ("<!-- claims by subject -->", "<!-- end of claims by subject -->")
EFFECT = "effect [95 % interval]"


class ScoreboardRow(NamedTuple):
    """A claim and its verdict."""

    claim: Claim
    verdict: Verdict

    @property
    def shown(self) -> str:
        """The folder judged and the figure of its report that shows the claim; empty where none was judged."""
        return f"{Path(self.verdict.folder).name}/{self.claim.shown_in}" if self.verdict.folder else ""

    @property
    def effect(self) -> str:
        """``0.148 [0.12, 0.17]`` and the unit."""
        effect, low, high = self.verdict.effect, self.verdict.low, self.verdict.high
        if math.isnan(effect):
            return ""
        interval = "" if math.isnan(low) else f" [{low:.3g}, {high:.3g}]"
        return f"{effect:.3g}{interval} {self.claim.unit}"


def read(folders: Sequence[Path]) -> list[Evidence]:
    """Read the folders with records among these and those right inside them, by name.

    Raises:
        RequestError: one of them is no folder, or its records cannot be read.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RequestError(f"no results folder {folder}")
    inside = [path for folder in folders for path in (folder, *sorted(folder.iterdir())) if path.is_dir()]
    records = {folder: store.find(folder) for folder in dict.fromkeys(inside)}
    return [Evidence(str(folder), table, store.commands(folder)) for folder, table in records.items() if table]


def judge_all(folders: Sequence[Evidence], figures: Collection[str] = FIGURES_OF_THE_PAPER) -> list[ScoreboardRow]:
    """Judge every claim of these figures of the paper, in their order, on these folders."""
    claims = [CLAIMS[name] for name in CLAIMS if CLAIMS[name].figure in figures]
    claims.sort(key=lambda claim: (FIGURES_OF_THE_PAPER.index(claim.figure), claim.order))
    return [ScoreboardRow(claim, judge_claim(claim, folders)) for claim in claims]


def verdicts(folder: str | Path, *figures: str) -> pd.DataFrame:
    """Judge the claims of some figures of the paper on a folder and those inside it.

    Args:
        figures: such as ``"1"`` or ``"E.7"``; all where none is given.

    Raises:
        RequestError: no such figure, no such folder, or records that cannot be read.
    """
    for figure in figures:
        if figure not in FIGURES_OF_THE_PAPER:
            raise RequestError(f"the paper has no figure {figure!r}; {nearest(figure, FIGURES_OF_THE_PAPER)}")
    return table(judge_all(read([Path(folder)]), figures or FIGURES_OF_THE_PAPER))


def table(rows: Sequence[ScoreboardRow]) -> pd.DataFrame:
    """The scoreboard with columns ``figure, claim, verdict, effect [95 % interval], seeds, why not``."""
    return pd.DataFrame(
        {
            "figure": [row.claim.figure for row in rows],
            "claim": [row.claim.sentence for row in rows],
            "verdict": [row.verdict.verdict for row in rows],
            EFFECT: [row.effect for row in rows],
            "seeds": [row.verdict.seeds for row in rows],
            "why not": [row.verdict.reason for row in rows],
        }
    )


def render(folders: Sequence[Path], *style: str) -> str:
    """All of it for ``lab claims``: for the eye, or as ``--json`` or ``--markdown``."""
    evidence = read(folders)
    rows = judge_all(evidence)
    if style:
        return {"--json": as_json, "--markdown": markdown_tables}[style[-1]](rows)
    return "\n".join([*text(rows), "", *compare(evidence)])


def text(rows: Sequence[ScoreboardRow]) -> Iterator[str]:
    """A line per claim, why it is not reproduced below it; a count at the end."""
    columns = table(rows)
    head, *lines = plain_text(
        pd.DataFrame(
            {
                "paper": "fig " + columns["figure"],
                **columns[["verdict", EFFECT, "seeds"]],
                "claim (our figure)": [f"{row.claim.sentence}{row.shown and f' ({row.shown})'}" for row in rows],
            }
        )
    )
    yield head
    for line, reason in zip(lines, columns["why not"], strict=True):
        yield line
        if reason:
            yield f"{' ' * head.index('verdict')}{reason}"
    yield tally(rows)


def tally(rows: Sequence[ScoreboardRow]) -> str:
    """``60 claims: 30 reproduced, ...``."""
    counts = pd.Series([row.verdict.verdict for row in rows]).value_counts()
    return f"{len(rows)} claims: {', '.join(f'{counts.get(verdict, 0)} {verdict}' for verdict in VERDICTS)}"


def as_json(rows: Sequence[ScoreboardRow]) -> str:
    """A list of objects, null where unknown.

    Their keys: ``source, figure, claim, verdict, effect, low, high, seeds, sweep, parameters, steps, reason``;
    ``parameters`` and ``steps`` are ``[smallest, largest]`` of what was judged.
    """
    return json.dumps([_plain(row) for row in rows], indent=1, allow_nan=False, ensure_ascii=False)


def _plain(row: ScoreboardRow) -> dict[str, Any]:
    verdict = row.verdict
    numbers = {name: getattr(verdict, name) for name in ("effect", "low", "high")}
    return {
        "source": SOURCE,
        "figure": row.claim.figure,
        "claim": row.claim.sentence,
        "verdict": verdict.verdict,
        **{name: None if math.isnan(value) else value for name, value in numbers.items()},
        "seeds": verdict.seeds,
        "sweep": verdict.sweep,
        "parameters": _ends(verdict.parameters),
        "steps": _ends(verdict.steps),
        "reason": verdict.reason,
    }


def _ends(rising: Sequence[int]) -> list[int] | None:
    return [rising[0], rising[-1]] if rising else None


def markdown_tables(rows: Sequence[ScoreboardRow]) -> str:
    """Both tables of Markdown, each between its marks: the counts by subject, then every claim."""
    return f"{markdown_by_subject(rows)}\n\n{markdown(rows)}"


def markdown_by_subject(rows: Sequence[ScoreboardRow]) -> str:
    """The table of the README: how many claims on each subject have which verdict."""
    verdicts_by_subject: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for row in rows:
        verdicts_by_subject[row.claim.effects.__module__.rpartition(".")[2]].append(row.verdict.verdict)
    head = [
        "| claims on | claims |" + "".join(f" {name} |" for name in VERDICTS),
        "|---|" + "---:|" * (len(VERDICTS) + 1),
    ]
    lines = [_count_row(SUBJECTS[subject], names) for subject, names in verdicts_by_subject.items()]
    total = _count_row("all", [row.verdict.verdict for row in rows])
    return "\n".join([SUBJECT_MARKS[0], *head, *lines, total, SUBJECT_MARKS[1]])


def _count_row(label: str, names: Sequence[str]) -> str:
    counts = [str(count) for count in (len(names), *map(names.count, VERDICTS))]
    return f"| {' | '.join([label, *counts])} |"


def markdown(rows: Sequence[ScoreboardRow]) -> str:
    """The table of `results/README.md`: every claim, and how it came out."""
    columns = table(rows).astype(str)
    cells = [[cell.replace("|", "&#124;") for cell in line] for line in columns.to_numpy().tolist()]
    lines = [f"| {' | '.join(line)} |" for line in [list(columns), *cells]]
    lines.insert(1, "|---" * columns.shape[1] + "|")
    return "\n".join([MARKS[0], *lines, "", f"{tally(rows)}.", MARKS[1]])
