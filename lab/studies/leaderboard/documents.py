"""A page of Markdown for every arm of the leaderboard, its description and its results, and a drawing of its curves."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lab.analysis.rendering import html
from lab.analysis.text import format_p
from lab.studies.leaderboard.arms import ArmCard, arm_cards, left_out, not_here
from lab.studies.leaderboard.board import ALPHA, MARGIN, NOT_COMPARABLE, QK, WITH, WITHOUT, Board, Row
from lab.studies.leaderboard.curves import PART, Source
from lab.studies.leaderboard.listing import change, headline, ranks_shown

LR_MEANINGS = {
    "same": "means the same as in the reference",
    "shifted": "has the same unit but another best value",
    "other": "has another unit, so sensitivities are not compared",
}
COLUMNS = (
    *("arm", "panel", "verdict", "instability part", "p (Holm)", "rank", "best loss", "log10 unstable/best LR"),
    *("parameters", "time", "seeds"),
)
# Of a panel of a drawing: its size, and the ends of its axes.
WIDTH, HEIGHT, IN_A_ROW = 380, 272, 2
LEFT, RIGHT, TOP, BOTTOM = 44, 368, 54, 222
SCHEDULE = "constant"  # that an optimizer needs for itself, and that then stands in the name of its row
DECADES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
BESIDE = "z_loss"  # the intervention of the default recipe, which an example command combines with an arm


def markdown_pages(board: Board | None, excludes: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The pages and drawings by file name, including the index.

    Args:
        board: the board; None before it is trained.
        excludes: the interventions that exclude each intervention, by its name.
    """
    rows = board.rows if board else []
    texts = {"index.md": _index(board, excludes)}
    for name, card in arm_cards().items():
        drawn = [row for row in _alone(name, rows) if row.curve.losses and row.reference.losses]
        texts[f"{name}.md"] = _page(card, rows, excludes.get(name, ()), is_drawn=bool(drawn))
        if drawn:
            texts[f"{name}.svg"] = _drawing(name, drawn)
    return texts


def _alone(name: str, rows: Collection[Row]) -> list[Row]:
    """The comparisons of an arm without others, but with the schedule that an optimizer needs."""
    return [row for row in rows if row.name in (name, f"{name}+{SCHEDULE}")]


def _drawing(name: str, rows: Sequence[Row]) -> str:
    panels = [_panel(row) for row in rows]
    return html.render(
        "arm.svg", name=name, panels=panels, width=WIDTH, height=HEIGHT, columns=min(IN_A_ROW, len(rows))
    )


def _panel(row: Row) -> dict[str, Any]:
    """The places of both curves and of the ticks, in units of the drawing."""
    curves = (row.curve.losses, row.reference.losses)
    lrs, losses = [lr for curve in curves for lr in curve], [loss for curve in curves for loss in curve.values()]
    low, high = min(losses), max(losses)

    def x(lr: float) -> float:
        return float(np.interp(math.log(lr), np.log([min(lrs), max(lrs)]), [LEFT + 8, RIGHT - 8]))

    def y(loss: float) -> float:
        return float(np.interp(loss, [low, high], [BOTTOM - 8, TOP + 8]))

    def points(curve: Mapping[float, float]) -> str:
        return " ".join(f"{x(lr):.1f},{y(loss):.1f}" for lr, loss in sorted(curve.items()))

    beside, _, setting = row.panel.partition(", ")
    return {
        "beside": beside,
        "setting": setting,
        "of_arm": points(row.curve.losses),
        "of_reference": points(row.reference.losses),
        "lrs": [(round(x(lr), 1), f"{lr:g}") for lr in DECADES if min(lrs) <= lr <= max(lrs)],
        "losses": [(round(y(loss), 1), f"{loss:.2f}") for loss in (low, (low + high) / 2, high)],
        "left": LEFT,
        "right": RIGHT,
        "bottom": BOTTOM,
    }


def _page(card: ArmCard, rows: Collection[Row], excluded: Collection[str], *, is_drawn: bool) -> str:
    mine = [row for row in rows if card.name in row.name.split("+")]
    return html.render(
        "arm.md",
        card=card,
        group="optimizer" if card.is_optimizer else "intervention",
        lr_meaning=LR_MEANINGS[card.lr],
        excluded=sorted(excluded),
        arms=arm_cards(),
        command=_command(card),
        is_drawn=is_drawn,
        columns=COLUMNS,
        rows=list(map(_cells, mine)),
        sources=[_about(source) for source in dict.fromkeys(row.curve.source for row in mine)],
    )


def _command(card: ArmCard) -> str:
    sweep = "optimizer.lr=1e-3,1e-2,1e-1 seed=0,1,2 out=runs/" + card.name
    if card.is_optimizer:
        return f"lab train -m optimizer=adamw,{card.name} {sweep}"
    without = [] if card.name == BESIDE else [BESIDE]
    choices = ",".join(f"[{','.join(sorted(names))}]" for names in (without, [*without, card.name]))
    return f"lab train -m 'intervention={choices}' {sweep}"


def _about(source: Source) -> str:
    first, *others = source.command.split("; ")
    more = f" and {len(others)} more ([results](../../results/README.md#what-the-folders-hold))" if others else ""
    return " · ".join(part for part in (source.days, f"`{first}`{more}" if first else "", source.versions) if part)


def _cells(row: Row) -> Sequence[str]:
    return (
        row.name,
        row.panel,
        row.verdict,
        change(row.differences[PART]) if row.verdict != NOT_COMPARABLE else "",
        format_p(row.p_adjusted),
        ranks_shown(row.ranks),
        change(row.differences["best"]),
        change(row.differences["range"]),
        f"{row.parameters_added:+,}",
        "" if math.isnan(row.cost) else f"x {row.cost:.2f}",
        str(row.seeds),
    )


def _index(board: Board | None, excludes: Mapping[str, Collection[str]]) -> str:
    rows, panels = (board.rows, board.panels) if board else ([], [])
    cards = arm_cards()
    groups = {
        title: [
            (f"[{name}]({name}.md)", card.title, *_verdicts(card, rows, excludes.get(name, ())))
            for name, card in cards.items()
            if card.is_optimizer == is_optimizer
        ]
        for title, is_optimizer in (("Interventions", False), ("Optimizers", True))
    }
    return html.render(
        "arms.md",
        alpha=f"{ALPHA:g}",
        margin=f"{MARGIN:g}",
        headlines=[f"{panel.title}: {headline(panel)}" for panel in panels],
        groups={title: cells for title, cells in groups.items() if cells},
        left_out=left_out(),
        not_here=not_here(),
        arms=cards,
    )


def _verdicts(card: ArmCard, rows: Collection[Row], excluded: Collection[str]) -> list[str]:
    """The verdict of an arm without qk-layernorm, and with it."""
    words = []
    for panel in (WITHOUT, WITH):
        mine = [row.verdict for row in _alone(card.name, rows) if row.panel.startswith(panel)]
        applies = panel == WITHOUT or (card.name != QK and QK not in {*excluded, *card.not_beside})
        words.append(mine[0] if mine else "not trained" if applies else "not applicable")
    return words
