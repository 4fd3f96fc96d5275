"""The board: what to add, what each arm removes against what it costs, and the matrix in colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup
from matplotlib.axes import Axes

from lab.analysis.rendering import html, layout, panels, style
from lab.analysis.rendering.layout import Drawing, Sheet
from lab.analysis.stress.cures import CURES, HARMS, IN_PART, NO, OPEN
from lab.analysis.text import first_to_last, listed
from lab.records import store
from lab.report.answer import Answer, Figure, InText, OnPage, Part, Section
from studies.board.failures import Failure
from studies.board.matrix import LESS, MORE, NEVER_ENGAGED, Judged, Matrix, Row
from studies.board.text import (
    PRICES,
    headline,
    is_tested,
    notes,
    p_shown,
    plain,
    prices,
    ranked,
    shown,
    table,
)

PIECES = html.macros("board.html")
TITLE = "Which change takes which damage away?"
WIDE = style.Page(11.2, 10.0)  # narrow screens scroll its drawing
COLOURS = {CURES: "#009E73", IN_PART: "#0072B2", NO: "#888888", OPEN: "#bbbbbb", HARMS: "#D55E00"}
COLOURS |= {LESS: "#56B4E9", MORE: "#E69F00"}
LEAST, MOST = -0.5, 1.25  # of the shares that are drawn; those beyond lie at the ends
NAMED = 3  # arms that are named in a panel: those that remove most
BETWEEN_NAMES = 0.2  # of the axis of the shares
ROOM_FOR_NAMES = 0.9  # beside a panel, of its width


def answer_of(matrix: Matrix, made: Sequence[str] = ()) -> Answer:
    """What to add, and the verdict on each arm under each failure with what it costs.

    Args:
        matrix: the board.
        made: how it was made, see ``how_made``.
    """
    said = notes(matrix)
    is_drawn = any(is_tested(matrix, failure) for failure in matrix.failures)
    acting = [row for row in ranked(matrix) if row.number(CURES) + row.number(IN_PART)]
    others = [row for row in ranked(matrix) if row not in acting]
    idle = f"{len(others)} arms that are not shown to take any away"
    parts: list[Part] = [
        OnPage([Markup(PIECES.style()), *[Figure("board", lambda: _wide_figure(matrix))] * is_drawn]),
        OnPage([Section("What takes what away", [_table(matrix, acting)])]),
        OnPage([Section(idle, [_table(matrix, others)], folded=True)]),
        InText([table(matrix)]),
        Section("How to read the numbers", [said], folded=True),
        OnPage([Section("Not tried, and why", [list(_untried(matrix))], folded=True)]),
    ]
    return Answer(headline(matrix), parts, title=TITLE, data={**plain(matrix), "notes": said}, made=made)


def _wide_figure(matrix: Matrix) -> Drawing:
    with style.drawn_for(WIDE):
        return board_figure(matrix)


@layout.styled
def board_figure(matrix: Matrix) -> Sheet:
    """The share of the control's damage that each arm removes, against its best loss beside the reference's.

    A cure leaves at most a third with its whole interval. Filled dots rest on six fresh seeds, and hollow ones on the
    screening. The arms that remove most are named. Arms without a curve have no dot.
    """
    tested = [failure for failure in matrix.failures if is_tested(matrix, failure)]
    titles = [failure.title for failure in tested]
    sheet, facet_axes = layout.facets(titles, ["removed"], 11)
    for failure, (axes,) in zip(tested, facet_axes, strict=False):
        _panel(axes, matrix, failure)
    looks = {word: {"color": colour, "marker": "o", "linestyle": ""} for word, colour in COLOURS.items()}
    sheet.keys(("verdict", panels.arm_keys(looks)))
    return sheet


def _panel(axes: Axes, matrix: Matrix, failure: Failure) -> None:
    """Draw a dot for each arm that has a price and was judged on a failure."""
    drawn = [row for row in matrix.arms if row.best.n and math.isfinite(row.cells[failure.name].share)]
    for verdict, colour in COLOURS.items():
        for is_confirmed in (False, True):
            mine = [
                row
                for row in drawn
                if (cell := row.cells[failure.name]).verdict == verdict and cell.is_confirmed == is_confirmed
            ]
            if mine:
                fill = colour if is_confirmed else "none"
                dots = axes.plot(
                    [row.best.mean for row in mine],
                    [_height(row.cells[failure.name]) for row in mine],
                    "o",
                    color=colour,
                    markerfacecolor=fill,
                    markersize=4.5,
                )
                panels.add_hover_texts(axes, dots[0], [_hover(row, failure) for row in mine])
    _name_best(axes, failure, drawn)
    panels.level(axes, 1 - matrix.board.rule.leaves, "cured", ":")
    panels.level(axes, 0.0, "nothing")
    axes.set_ylim(LEAST - 0.05, MOST + 0.1)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlabel("best loss above the reference's")


def _name_best(axes: Axes, failure: Failure, drawn: Sequence[Row]) -> None:
    """Name, to the right of the dots, the arms that remove most, each below the one before it."""
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + ROOM_FOR_NAMES * (right - left))
    helping = [row for row in drawn if row.cells[failure.name].verdict in (CURES, IN_PART, LESS)]
    height = MOST + BETWEEN_NAMES
    for row in sorted(helping, key=lambda row: -row.cells[failure.name].share)[:NAMED]:
        dot = (row.best.mean, _height(row.cells[failure.name]))
        height = min(dot[1], height - BETWEEN_NAMES)
        axes.annotate(
            row.name,
            xy=dot,
            xytext=(1 / (1 + ROOM_FOR_NAMES), height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=0.7 * style.page().size,
            arrowprops={"arrowstyle": "-", "color": style.INK, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2},
        )


def _height(cell: Judged) -> float:
    return min(max(cell.share, LEAST), MOST)


def _hover(row: Row, failure: Failure) -> str:
    cell = row.cells[failure.name]
    seeds = f"{cell.improvement.n} {'fresh ' * cell.is_confirmed}seeds"
    effect = f"removes {cell.improvement:±} {failure.unit}, p {p_shown(cell.p)}"
    place = f"\nin place of {replaced}" if (replaced := row.instead_of(failure)) else ""
    beside = f"loss beside the control: {cell.above_control:+.2f} under stress, {cell.cost_at_ease:+.2f} at ease"
    return "\n".join(
        [f"{row.name}{place}", f"{failure.title}: {cell.verdict}", effect, seeds, beside, f"best loss {row.best:±+.3f}"]
    )


def _table(matrix: Matrix, rows: Sequence[Row]) -> Markup:
    """The matrix of these arms, each cell in the colour of its verdict, and their prices."""
    heads = ["arm", *(failure.title for failure in matrix.failures), *PRICES]
    cells = [
        [
            {"text": row.name, "kind": "", "title": ""},
            *(_cell(row, failure) for failure in matrix.failures),
            *(_price(text) for text in prices(row).values()),
        ]
        for row in rows
    ]
    return Markup(PIECES.table(heads, cells))


def _price(text: str) -> dict[str, str]:
    """A price whose interval shows when a reader points at it."""
    return {"text": text.partition(" [")[0], "kind": "price", "title": text if " [" in text else ""}


def _cell(row: Row, failure: Failure) -> dict[str, str]:
    cell = row.cells[failure.name]
    title = cell.reason or (_hover(row, failure).replace("\n", ", ") if cell.improvement.n else cell.verdict)
    kind = {CURES: "cures", IN_PART: "part", HARMS: "harms", NEVER_ENGAGED: "idle"}.get(cell.verdict, "")
    return {"text": shown(row, failure), "kind": kind, "title": title}


def _untried(matrix: Matrix) -> Iterator[str]:
    """Yield a line for each failure with the arms that were not tried on it, by reason."""
    for failure in matrix.failures:
        reasons: dict[str, list[str]] = {}
        for row in matrix.arms:
            if reason := row.cells[failure.name].reason:
                reasons.setdefault(reason.removeprefix(row.name).strip(), []).append(row.name)
        for reason, names in reasons.items():
            yield f"{failure.title}: {listed(names)}: {reason}."


def how_made(matrix: Matrix) -> Iterator[str]:
    """Yield what the board took, the commands that made it, and their versions."""
    runs = store.read(matrix.folder).runs
    days = sorted({request.day for request in store.requests(matrix.folder).values()} - {""})
    yield f"{len(runs):,} runs, {runs['wall_seconds'].sum() / 3600:.1f} core-hours, {first_to_last(days)}."
    yield from store.commands(matrix.folder)
    versions = sorted(set(map(str, runs["versions"])))
    yield f"Versions: {'; '.join(versions)}."
