"""The leaderboard as a page: each panel has a drawing and a table that can be sorted, filtered and linked to by row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from lab.analysis.rendering import html
from lab.analysis.text import count, listed
from lab.studies.leaderboard.arms import arm_cards
from lab.studies.leaderboard.board import MARGIN, NOT_COMPARABLE, Board, Panel, Row
from lab.studies.leaderboard.curves import PART, Curve
from lab.studies.leaderboard.listing import all_panels, change, compared_with, headline, table
from lab.studies.leaderboard.notes import board_notes

PIECES = html.pieces(Path(__file__).with_name("board.html"))
# In units of the drawings: both ends of the axis, the height of a row, the height below the axis, and the width of a
# character of a name.
LEFT, RIGHT, ROW, BELOW, CHARACTER = 204.0, 744.0, 16.0, 34.0, 6.8
SCATTER_HEIGHT, NAMED_POINTS, NAME_HEIGHT = 300.0, 16, 13.0
THUMB = (92.0, 34.0)
TITLE = "Which change of the recipe makes it less sensitive to its learning rate?"


def board_page(board: Board) -> str:
    """The whole page."""
    panels = all_panels(board)
    body = [
        Markup(PIECES.style()),
        _lead(panels),
        *(section for panel in panels for section in _sections(panel, _not_beside(panel, board.panels))),
        html.section("How to read the numbers", html.bullets(list(board_notes(board)))),
        html.section("How this was made", *map(html.paragraph, _sources(board))),
    ]
    return html.document(TITLE, body)


def _lead(panels: Sequence[Panel]) -> Markup:
    """The arms that help, in a sentence for each panel; a list of more than two sentences."""
    said = [f"{_title(panel)}, {headline(panel)}." for panel in panels]
    return html.paragraph(" ".join(said), "lead") if len(said) <= 2 else html.bullets(said)


def _title(panel: Panel) -> str:
    return panel.heading.replace(", ", " · ")


def _not_beside(panel: Panel, panels: Sequence[Panel]) -> list[str]:
    """Arms of other panels that the interventions of this panel's reference exclude."""
    if panel.has_pairs:
        return []
    here, everywhere = {row.name for row in panel.rows}, [row.name for other in panels for row in other.rows]
    cards = arm_cards()
    excluded = panel.reference.interventions
    return [
        name
        for name in dict.fromkeys(everywhere)
        if name not in here and any(excluded & set(cards[part].not_beside) for part in name.split("+") if part in cards)
    ]


def _sections(panel: Panel, not_beside: Sequence[str]) -> Iterator[Markup]:
    drawn = [row for row in panel.rows if row.verdict != NOT_COMPARABLE and row.differences[PART].n]
    parts = []
    if drawn:
        parts += [Markup(PIECES.forest(_forest(panel, drawn)))]
        parts += [
            _note(
                f"Instability part minus that of {compared_with(panel)}, with 95 % intervals; shaded: the margin. "
                "Blue helps, orange harms, green makes no difference, grey is open."
            )
        ]
    parts.append(Markup(PIECES.table(_table(panel))))
    if not_beside:
        parts.append(_note(f"Not applicable beside the reference of this panel: {listed(not_beside)}."))
    costed = [row for row in drawn if math.isfinite(row.cost)]
    if costed and not panel.has_pairs:
        parts += [Markup(PIECES.scatter(_scatter(panel, costed)))]
        parts += [
            _note(
                "Instability part minus that of the reference, against the time of a run over that of the reference, "
                "each the shortest over seeds. Other work ran on the machine, so small differences in time say nothing."
            )
        ]
    yield html.section(_title(panel), *parts)


def _note(text: str) -> Markup:
    return html.paragraph(text, "note")


class _Shown(NamedTuple):
    """A row of the table."""

    anchor: str
    kind: str
    cells: Sequence[str]
    lines: Sequence[str]
    of_reference: str


def anchor(row: Row) -> str:
    """The fragment of the address of a row."""
    return re.sub(r"[^a-z0-9]+", "-", f"{row.name} {row.panel}".lower()).strip("-")


def _table(panel: Panel) -> dict[str, Any]:
    cells = table(panel)
    sources = [panel.reference.source, *(row.curve.source for row in panel.rows)]
    cells["trained"] = [source.days for source in sources]
    cells["command"] = [source.command for source in sources]
    cells["versions"] = [source.versions for source in sources]
    first, *others = cells.to_numpy().tolist()
    columns = list(cells)
    reference = _thumb(panel.reference, panel.reference)
    return {
        "columns": [*columns[:2], "loss by LR", *columns[2:]],
        "pinned": [_Shown("", "", first, reference, "")],
        "rows": [
            _Shown(
                anchor(row),
                _kind(row),
                line,
                _thumb(row.curve, panel.reference),
                _thumb(row.reference, panel.reference, row.curve)[0],
            )
            for row, line in zip(panel.rows, others, strict=True)
        ],
    }


def _kind(row: Row) -> str:
    return row.verdict.replace(" ", "-")


def _thumb(curve: Curve, reference: Curve, *others: Curve) -> list[str]:
    """The points of a curve in a thumbnail whose axes span those of the reference."""
    lrs = [lr for one in (curve, reference, *others) for lr in one.losses]
    low, high = min(reference.losses.values()), max(reference.losses.values())
    x = linear([math.log10(min(lrs)), math.log10(max(lrs))], (3, THUMB[0] - 3))
    y = linear((low, high), (THUMB[1] - 4, 4))
    shown = ((x(math.log10(lr)), min(max(y(loss), 1), THUMB[1] - 1)) for lr, loss in sorted(curve.losses.items()))
    return [" ".join(f"{at:.1f},{height:.1f}" for at, height in shown)]


def linear(values: Sequence[float], ends: tuple[float, float]) -> Any:
    """A linear map from the range of these values to a range of a drawing."""
    low, high = float(min(values)), float(max(values))
    width = high - low or 1.0
    return lambda value: ends[0] + (value - low) / width * (ends[1] - ends[0])


def _forest(panel: Panel, rows: Sequence[Row]) -> dict[str, Any]:
    intervals = [row.differences[PART] for row in rows]
    ends = [end for one in intervals for end in (one.mean, one.low, one.high) if math.isfinite(end)]
    span = (min(*ends, -2 * MARGIN), max(*ends, 2 * MARGIN))
    x = linear(span, (LEFT, RIGHT))
    drawn = [
        {
            "name": row.name,
            "kind": _kind(row),
            "y": ROW * (index + 1),
            "x": round(x(one.mean), 1),
            "low": round(x(one.low if math.isfinite(one.low) else one.mean), 1),
            "high": round(x(one.high if math.isfinite(one.high) else one.mean), 1),
            "hover": _hover(row),
        }
        for index, (row, one) in enumerate(zip(rows, intervals, strict=True))
    ]
    return {
        "label": f"differences in the instability part, {panel.title}",
        "height": ROW * (len(rows) + 1) + BELOW,
        "more": max(0.0, math.ceil(CHARACTER * max(len(row.name) for row in rows)) - LEFT),
        "rows": drawn,
        "zero": round(x(0), 1),
        "margin": (round(x(-MARGIN), 1), round(x(MARGIN) - x(-MARGIN), 1)),
        "ticks": [{"x": round(x(tick), 1), "text": f"{tick:g}"} for tick in _ticks(*span)],
        "axis": f"instability part minus that of {compared_with(panel)} (nats/token)",
    }


def _scatter(panel: Panel, rows: Sequence[Row]) -> dict[str, Any]:
    costs, means = [row.cost for row in rows], [row.differences[PART].mean for row in rows]
    widths, heights = (min(*costs, 0.9), max(*costs, 1.1)), (min(*means, -MARGIN), max(*means, MARGIN))
    x, y = linear(widths, (LEFT + 12, RIGHT - 12)), linear(heights, (SCATTER_HEIGHT - BELOW - 10, 10))
    named = _named([(row.name, x(row.cost), y(row.differences[PART].mean)) for row in _by_size(rows)])
    return {
        "label": f"differences in the instability part against the time of a run, {panel.title}",
        "height": SCATTER_HEIGHT,
        "rows": [
            {
                "name": row.name,
                "kind": _kind(row),
                "x": round(x(row.cost), 1),
                "y": round(y(row.differences[PART].mean), 1),
                "shown": row.name in named,
                "hover": f"{_hover(row)}\n{row.cost:.2f} times the time of the reference",
            }
            for row in rows
        ],
        "zero": round(y(0), 1),
        "one": round(x(1), 1),
        "ticks": [{"x": round(x(tick), 1), "text": f"{tick:g}"} for tick in _ticks(*widths)],
        "heights": [{"y": round(y(tick), 1), "text": f"{tick:g}"} for tick in _ticks(*heights)],
        "axis": "time of a run, over that of the reference",
    }


def _by_size(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -abs(row.differences[PART].mean))


def _named(points: Sequence[tuple[str, float, float]]) -> set[str]:
    """The points whose names are written, chosen in the given order so that no name covers another."""
    written: list[tuple[str, float, float]] = []
    width = 2 * CHARACTER * max(len(name) for name, _, _ in points)  # names reach from their points to either side
    for point in points:
        if all(abs(point[1] - x) > width or abs(point[2] - y) > NAME_HEIGHT for _, x, y in written):
            written.append(point)
    return {name for name, _, _ in written[:NAMED_POINTS]}


def _hover(row: Row) -> str:
    of_pair = f"\nbetter half: {row.pair.better}" if row.pair else ""
    difference = f"{row.verdict}: {change(row.differences[PART])} nats/token"
    return f"{row.name}, {row.panel}{of_pair}\n{difference}\n{row.seeds} seeds"


def _ticks(low: float, high: float) -> list[float]:
    """About six round numbers in a range."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    return [round(step * index, 10) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _sources(board: Board) -> Iterator[str]:
    sizes = sorted({one.parameters for one in board.curves})
    sizes_shown = " to ".join(dict.fromkeys(map(count, (sizes[0], sizes[-1]))))
    yield f"{sum(one.runs for one in board.curves):,} runs of {len(board.curves)} arms, {sizes_shown} parameters."
    sources: Mapping[Any, None] = dict.fromkeys(one.source for one in board.curves)
    for source in sources:
        yield " · ".join(part for part in (source.days, source.command, source.versions) if part)
    yield "Records contain the version that trained them, but no commit."
