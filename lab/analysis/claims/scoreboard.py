"""The scoreboard: every claim judged on results folders, as text, JSON or a table of Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lab.analysis.claims.evidence import Evidence
from lab.analysis.claims.judging import CLAIMS, FIGURES_OF_THE_PAPER, VERDICTS, Claim, Verdict, judge_claim
from lab.analysis.claims.replication import compare
from lab.core.errors import RequestError, nearest
from lab.records import store

# Our figure, where it is not the one that shows loss and sensitivity.
OURS = {
    "2": "loss_over_steps",
    "4": "output_logits_over_steps",
    "8": "best_loss_with_size",
    "9": "attention_logit_with_size",
    "10": "loss_against_setting",
    "11": "gradient_with_size",
    "12": "loss_against_setting",
    "13": "updates_by_epsilon",
    "C.1": "block_output_with_size",
    "E.1": "queries_and_keys_over_steps",
    "E.3": "best_loss_with_size",
    "E.10": "loss_against_setting",
    "E.11": "max_attention_logit",
    "E.12": "key_gradient_with_size",
    "E.13": "updates_over_steps",
    "E.14": "best_loss_with_size",
    "E.15": "loss_against_setting",
}
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


class ScoreboardRow(NamedTuple):
    """A claim and how it came out."""

    claim: Claim
    verdict: Verdict

    @property
    def shown(self) -> str:
        """Our figure of it: the folder judged, and the name of the figure."""
        name = OURS.get(self.claim.figure, "learning_rate_sensitivity")
        return f"{Path(self.verdict.folder).name}/{name}" if self.verdict.folder else ""

    @property
    def effect(self) -> str:
        """``0.148 [0.12, 0.17]`` and the unit."""
        found = self.verdict
        if math.isnan(found.effect):
            return ""
        interval = "" if math.isnan(found.low) else f" [{found.low:.3g}, {found.high:.3g}]"
        return f"{found.effect:.3g}{interval} {self.claim.unit}"


def read(places: Sequence[Path]) -> list[Evidence]:
    """The folders with records among these and those right inside them, by name.

    Raises:
        RequestError: a place is no folder, or its records cannot be read.
    """
    for place in places:
        if not place.is_dir():
            raise RequestError(f"no results folder {place}")
    inside = [folder for place in places for folder in (place, *sorted(place.iterdir())) if folder.is_dir()]
    found = {folder: store.find(folder) for folder in dict.fromkeys(inside)}
    return [Evidence(str(folder), records) for folder, records in found.items() if records]


def judge_all(folders: Sequence[Evidence], figures: Collection[str] = FIGURES_OF_THE_PAPER) -> list[ScoreboardRow]:
    """Every claim of these figures of the paper, in their order, judged on these folders."""
    known = sorted((CLAIMS[name] for name in CLAIMS), key=lambda one: (_order(one), one.place))
    return [ScoreboardRow(claim, judge_claim(claim, folders)) for claim in known if claim.figure in figures]


def verdicts(place: str | Path, *figures: str) -> pd.DataFrame:
    """Claims of some figures of the paper (``"1"``, ``"E.7"``; none is all), judged on a folder and those inside it.

    Raises:
        RequestError: no such figure, no such folder, or records that cannot be read.
    """
    for figure in figures:
        if figure not in FIGURES_OF_THE_PAPER:
            raise RequestError(f"the paper has no figure {figure!r}; {nearest(figure, FIGURES_OF_THE_PAPER)}")
    lines = judge_all(read([Path(place)]), figures or FIGURES_OF_THE_PAPER)
    return pd.DataFrame(
        {
            "figure": [one.claim.figure for one in lines],
            "claim": [one.claim.sentence for one in lines],
            "verdict": [one.verdict.verdict for one in lines],
            "effect [95 % interval]": [one.effect for one in lines],
            "seeds": [one.verdict.seeds for one in lines],
            "why not": [one.verdict.reason for one in lines],
        }
    )


def _order(claim: Claim) -> int:
    return FIGURES_OF_THE_PAPER.index(claim.figure)


def render(places: Sequence[Path], *style: str) -> str:
    """All of it for ``lab claims``: for the eye, or as ``--json`` or ``--markdown``."""
    folders = read(places)
    lines = judge_all(folders)
    if style:
        return {"--json": as_json, "--markdown": markdown_tables}[style[-1]](lines)
    return "\n".join([*text(lines), "", *compare(folders)])


def text(lines: Sequence[ScoreboardRow]) -> Iterator[str]:
    """A line per claim, the reason of one that did not come out below it; a count at the end."""
    rows = [(f"fig {one.claim.figure}", one.verdict.verdict, one.effect, str(one.verdict.seeds)) for one in lines]
    rows = [("paper", "verdict", "effect [95 % interval]", "seeds"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heads = ["  ".join(map(str.ljust, row, widths)) for row in rows]
    yield f"{heads[0]}  claim (our figure)"
    for head, one in zip(heads[1:], lines, strict=True):
        yield f"{head}  {one.claim.sentence}{f' ({one.shown})' if one.shown else ''}"
        if one.verdict.reason:
            yield f"{' ' * (widths[0] + 2)}{one.verdict.reason}"
    yield tally(lines)


def tally(lines: Sequence[ScoreboardRow]) -> str:
    """``60 claims: 30 reproduced, ...``."""
    came = [one.verdict.verdict for one in lines]
    return f"{len(lines)} claims: {', '.join(f'{came.count(name)} {name}' for name in VERDICTS)}"


def as_json(lines: Sequence[ScoreboardRow]) -> str:
    """A list of objects with ``claim, figure, verdict, effect, low, high, seeds, reason``; null where unknown."""
    return json.dumps([_plain(one) for one in lines], indent=1, allow_nan=False, ensure_ascii=False)


def _plain(line: ScoreboardRow) -> dict[str, str | float | int | None]:
    found = line.verdict
    numbers = {name: getattr(found, name) for name in ("effect", "low", "high")}
    known = {name: None if math.isnan(value) else value for name, value in numbers.items()}
    said = {"claim": line.claim.sentence, "figure": line.claim.figure, "verdict": found.verdict}
    return {**said, **known, "seeds": found.seeds, "reason": found.reason}


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


def markdown(lines: Sequence[ScoreboardRow]) -> str:
    """The table of `results/README.md`: every claim, and how it came out."""
    head = ["| figure | claim | verdict | effect [95 % interval] | seeds | why not |", "|---|---|---|---|---|---|"]
    cells = [
        (o.claim.figure, o.claim.sentence, o.verdict.verdict, o.effect, str(o.verdict.seeds), o.verdict.reason)
        for o in lines
    ]
    rows = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells]
    return "\n".join([MARKS[0], *head, *rows, "", f"{tally(lines)}.", MARKS[1]])
