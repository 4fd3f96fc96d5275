"""Write ``docs/interventions/``: an index, and a page for every arm of the board, from ``arms.yaml`` and the results.

``python docs/interventions.py`` writes them anew; a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.analysis.rendering import html
from lab.analysis.stress.arms import FILE, ArmCard, arm_cards, board_arms, left_out
from lab.analysis.stress.cures import CURES, HARMS, IN_PART
from lab.analysis.text import listed
from lab.core import shipped
from lab.core.errors import RequestError
from studies.board.failures import read_failures
from studies.board.matrix import Judged, Matrix, Row, read_matrix
from studies.board.text import PRICES, headline, is_costly_at_ease, notes, p_shown, prices
from studies.board.training import excludes

FOLDER = Path(__file__).with_name("interventions")
LR_MEANINGS = {
    "same": "means the same as in the reference",
    "shifted": "has the same unit but another best value",
    "other": "has another unit",
}
COLUMNS = ("failure", "verdict", "share", "removes", "p (Bonferroni)", "seeds", "nats above the control at ease")


class Cells(NamedTuple):
    """The rows of a page's table, and what the arm costs, under the names of ``PRICES``."""

    rows: Sequence[tuple[str, ...]]
    prices: Mapping[str, str]


def markdown_pages(matrix: Matrix | None, excludes: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The pages by file name, including the index.

    Args:
        matrix: the board; None before it is trained.
        excludes: the interventions that exclude each intervention, by its name.
    """
    rows = {row.name: row for row in matrix.arms} if matrix else {}
    texts = {"index.md": _index(matrix, rows)}
    for name, card in arm_cards().items():
        texts[f"{name}.md"] = _page(card, matrix, rows.get(name), excludes.get(name, ()))
    return texts


def _page(card: ArmCard, matrix: Matrix | None, row: Row | None, excluded: Collection[str]) -> str:
    return html.render(
        "arm.md",
        card=card,
        answer=_answer(card, row),
        group="optimizer" if card.is_optimizer else "intervention",
        lr_meaning=LR_MEANINGS[card.lr],
        excluded=sorted(excluded),
        arms=arm_cards(),
        command=_command(card),
        is_arm=card.name in board_arms(),
        columns=COLUMNS,
        cells=_cells(matrix, row) if matrix and row else None,
        untried=_untried(matrix, row) if matrix and row else [],
    )


def _answer(card: ArmCard, row: Row | None) -> str:
    """What an arm does about the failures of the board, in a sentence that follows its name."""
    if card.name not in board_arms():
        return "The board does not try it"
    if row is None:
        return "The board has not tried it yet"
    words = {CURES: "cures {}", IN_PART: "helps in part against {}", HARMS: "makes {} worse"}
    failures = {verdict: [f"*{failure}*" for failure in _failures(row, verdict)] for verdict in words}
    found = [words[verdict].format(listed(named)) for verdict, named in failures.items() if named]
    return f"Tried against the failures of [the board](index.md), it {listed(found) if found else 'cures none'}"


def _command(card: ArmCard) -> str:
    if card.is_optimizer:
        return f"lab stress optimizer={card.name}"
    if card.needs:
        return f"lab stress mixtral_moe --cures all --arms {card.name}"
    if card.name in board_arms():
        return f"lab stress --cures all --arms {card.name}"
    return f"lab stress 'intervention=[{card.name}]'"


def _cells(matrix: Matrix, row: Row) -> Cells:
    rows = []
    for failure in matrix.failures:
        cell = row.cells[failure.name]
        if cell.improvement.n:
            interval = cell.improvement
            takes = f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}] {failure.unit}"
            seeds = f"{interval.n}{' fresh' * cell.is_confirmed}"
            cost = "" if math.isnan(cell.cost_at_ease) else f"{cell.cost_at_ease:+.2f}"
            cost = f"**{cost}**" if is_costly_at_ease(cell) else cost
            rows.append((failure.title, cell.verdict, f"{cell.share:.0%}", takes, p_shown(cell.p), seeds, cost))
        elif not cell.reason:
            rows.append((failure.title, cell.verdict, *[""] * (len(COLUMNS) - 2)))
    return Cells(rows, {name: text for name, text in prices(row).items() if text})


def _untried(matrix: Matrix, row: Row) -> list[str]:
    return [
        f"{failure.title}: {cell.reason}"
        for failure in matrix.failures
        if (cell := row.cells[failure.name]).reason and not cell.improvement.n
    ]


def _index(matrix: Matrix | None, rows: Mapping[str, Row]) -> str:
    cards = arm_cards()
    groups = {
        title: [
            (f"[{name}]({name}.md)", card.title, *_counts(rows.get(name)))
            for name, card in cards.items()
            if card.is_optimizer == is_optimizer
        ]
        for title, is_optimizer in (("Interventions", False), ("Optimizers", True))
    }
    return html.render(
        "arms.md",
        headline=headline(matrix) if matrix else "",
        notes=list(notes(matrix)) if matrix else [],
        groups={title: cells for title, cells in groups.items() if cells},
        left_out=left_out(),
        not_here=shipped.load(FILE)["not_here"],
        arms=cards,
        prices=PRICES,
    )


def _counts(row: Row | None) -> list[str]:
    """The failures that an arm cures, cures in part and worsens, and its best loss."""
    if row is None:
        return ["", "", "", ""]
    return [*(", ".join(_failures(row, verdict)) for verdict in (CURES, IN_PART, HARMS)), prices(row)["best loss"]]


def _failures(row: Row, verdict: str) -> list[str]:
    """The failures on which an arm has a verdict, each with what the arm costs at ease where that is too much."""
    titles = {name: failure.title for name, failure in read_failures().failures.items()}
    return [_with_cost(titles[name], cell) for name, cell in row.cells.items() if cell.verdict == verdict]


def _with_cost(title: str, cell: Judged) -> str:
    """A failure, with the nats that the arm costs at ease where they are too many."""
    return f"{title} ({cell.cost_at_ease:+.2f} at ease)" if is_costly_at_ease(cell) else title


def pages() -> dict[str, str]:
    """The pages by file name."""
    try:
        matrix = read_matrix(shipped.data_folder("results") / "board")
    except RequestError:  # not trained yet
        matrix = None
    return markdown_pages(matrix, excludes())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for old in FOLDER.iterdir():
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        FOLDER.joinpath(name).write_text(text, encoding="utf-8")
