"""The leaderboard as a page: each panel has a drawing and a table that can be sorted, filtered and linked to by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from lab.analysis.rendering import html, layout, style
from lab.analysis.text import count, listed
from lab.studies.leaderboard.arms import arm_cards
from lab.studies.leaderboard.board import NOT_COMPARABLE, Board, Panel, Row
from lab.studies.leaderboard.curves import PART, Curve
from lab.studies.leaderboard.figures import panel_of_board
from lab.studies.leaderboard.listing import all_panels, board_notes, headline, table

PIECES = html.macros("board.html")
WIDE = style.Page(9.0, 11.0)  # narrow screens scroll its drawings
TITLE = "Which change of the recipe makes it less sensitive to its learning rate?"


def board_page(board: Board) -> str:
    """The whole page."""
    panels = all_panels(board)
    sentences = [f"{_title(panel)}, {headline(panel)}." for panel in panels]
    body = [
        Markup(PIECES.style()),
        html.paragraph(" ".join(sentences), "lead") if len(sentences) <= 2 else html.bullets(sentences),
        *(html.section(_title(panel), *_panel(panel, board)) for panel in panels),
        html.section("How to read the numbers", html.bullets(board_notes(board))),
        html.section("How this was made", *map(html.paragraph, _sources(board))),
    ]
    return html.document(TITLE, body)


def _title(panel: Panel) -> str:
    return panel.heading.replace(", ", " · ")


def _panel(panel: Panel, board: Board) -> Iterator[Markup]:
    """Yield the drawing of a panel, its table, and the arms that cannot stand in it."""
    drawn = [row for row in panel.rows if row.verdict != NOT_COMPARABLE and row.differences[PART].n]
    if drawn:
        with style.drawn_for(WIDE):
            drawing, name = panel_of_board(panel, drawn), html.anchor(panel.title)
        yield html.figure(layout.svg(drawing, name), drawing.caption, html.savers(name))
    cells = table(panel)
    sources = [panel.reference.source, *(row.curve.source for row in panel.rows)]
    cells["trained"] = [source.days for source in sources]
    cells["command"] = [source.command for source in sources]
    cells["versions"] = [source.versions for source in sources]
    columns, (first, *others) = list(cells), cells.to_numpy().tolist()
    reference = {"cells": first, "anchor": "", "curve": _points(panel.reference, panel.reference), "of_reference": ""}
    rows = [_row(panel, row, texts) for row, texts in zip(panel.rows, others, strict=True)]
    yield Markup(PIECES.table([*columns[:2], "loss by LR", *columns[2:]], reference, rows))
    if excluded := _not_beside(panel, board.panels):
        yield html.paragraph(f"Not applicable beside the reference of this panel: {listed(excluded)}.", "note")


def _row(panel: Panel, row: Row, cells: Sequence[str]) -> Mapping[str, Any]:
    return {
        "cells": cells,
        "anchor": html.anchor(f"{row.name} {row.panel}"),
        "curve": _points(row.curve, panel.reference),
        "of_reference": _points(row.reference, panel.reference, row.curve),
    }


def _points(curve: Curve, reference: Curve, *others: Curve) -> str:
    """The points of a curve in a thumbnail of 92 by 34, whose height is the range of losses of the reference."""
    lrs = np.log10([lr for shown in (curve, reference, *others) for lr in shown.losses])
    rates, losses = zip(*sorted(curve.losses.items()), strict=True)
    ends = sorted([min(reference.losses.values()), max(reference.losses.values())])
    x = np.interp(np.log10(rates), [lrs.min(), lrs.max()], [3, 89])
    y = np.interp(losses, ends, [30, 4])
    return " ".join(f"{at:.1f},{height:.1f}" for at, height in zip(x, y, strict=True))


def _not_beside(panel: Panel, panels: Sequence[Panel]) -> list[str]:
    """Arms of other panels that the interventions of this panel's reference exclude."""
    if panel.has_pairs:
        return []
    here, everywhere = {row.name for row in panel.rows}, [row.name for other in panels for row in other.rows]
    cards, excluded = arm_cards(), panel.reference.interventions
    return [
        name
        for name in dict.fromkeys(everywhere)
        if name not in here and any(excluded & set(cards[part].not_beside) for part in name.split("+") if part in cards)
    ]


def _sources(board: Board) -> Iterator[str]:
    sizes = sorted({curve.parameters for curve in board.curves})
    sizes_shown = " to ".join(dict.fromkeys(map(count, (sizes[0], sizes[-1]))))
    yield f"{sum(curve.runs for curve in board.curves):,} runs of {len(board.curves)} arms, {sizes_shown} parameters."
    for source in dict.fromkeys(curve.source for curve in board.curves):
        yield " · ".join(part for part in (source.days, source.command, source.versions) if part)
    yield "Records contain the version that trained them, but no commit."
