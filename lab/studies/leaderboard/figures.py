"""The figure of the board: every change beside the reference, without and with qk-layernorm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.rendering import layout, panels, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.sensitivity import Window
from lab.analysis.statistics import Interval
from lab.core.errors import RequestError
from lab.records.store import Records
from lab.studies.leaderboard.arms import meanings
from lab.studies.leaderboard.board import HARMS, HELPS, MARGIN, NO_DIFFERENCE, OPEN, Board, Panel, Row
from lab.studies.leaderboard.curves import PART, curves_of

# Arms of a board. Fewer are compared by every other figure; more take long, and lab leaderboard --html draws them.
FEWEST_ARMS, MOST_ARMS = 12, 150
BLUE, ORANGE, GREEN = style.ARM_COLOURS[:3]
LOOKS = {
    HELPS: {"color": BLUE, "marker": "o", "linestyle": ""},
    NO_DIFFERENCE: {"color": GREEN, "marker": "o", "markerfacecolor": "none", "linestyle": ""},
    OPEN: {"color": style.INK, "marker": "d", "markerfacecolor": "none", "linestyle": ""},
    HARMS: {"color": ORANGE, "marker": "X", "linestyle": ""},
}


@figure("leaderboard", over_window=True, of_all_arms=True)
def leaderboard(records: Records, runs: pd.DataFrame, window: Window) -> Sheet:
    """Instability part of LR sensitivity minus that of the reference, by intervention.

    A row per intervention, without and with qk-layernorm. Differences are paired by seed, and bars are 95 % intervals.
    Left of zero an arm is less sensitive to learning rates above the best one than the reference. Within the dotted
    lines differences count as none.
    """
    names, shown = comparable(records, window, runs["arm"].nunique())
    columns = layout.columns_for(len(shown), panels.NARROWEST_ROWS)
    sheet, facet_axes = layout.facets(list(shown), [""], panels.rows_height(names), columns)
    for rows, (axes,) in zip(shown.values(), facet_axes, strict=True):
        _differences(axes, names, rows)
    sheet.keys(("verdict", panels.arm_keys(LOOKS)))
    return sheet


@layout.styled
def panel_of_board(panel: Panel, rows: Sequence[Row]) -> Sheet:
    """Differences from the reference in the instability part of LR sensitivity, and the relative time of a run.

    Differences are paired by seed, and bars are 95 % intervals. A pair of arms is compared with its better half. Within
    the dotted lines differences count as none. The time of an arm is its shortest over seeds; ignore small
    differences in time, since other work ran on the machine.
    """
    by_name = {row.name: row for row in rows}
    names, height = list(by_name), panels.rows_height(by_name)
    timed = {} if panel.has_pairs else {name: row for name, row in by_name.items() if math.isfinite(row.cost)}
    columns = 1 + bool(timed)
    sheet, [[axes], *beside] = layout.facets([""] * columns, [""], height, columns, room=panels.rows_room(names))
    _differences(axes, names, by_name)
    for (times,) in beside:
        dots = {
            index: Dot(Interval(timed[name].cost, math.nan, math.nan, 1), f"{name}\n{timed[name].cost:.2f} times")
            for index, name in enumerate(names)
            if name in timed
        }
        panels.rows(times, names, [(LOOKS[OPEN], dots)])
        panels.level(times, 1.0, "reference", upright=True)
        times.set_xlabel("time of a run, over that\nof the reference")
    verdicts = {row.verdict for row in rows}
    sheet.keys(("verdict", panels.arm_keys({word: look for word, look in LOOKS.items() if word in verdicts})))
    return sheet


def _differences(axes: Axes, names: Sequence[str], rows: Mapping[str, Row]) -> None:
    """Draw a row for each name, with the difference of its instability part in the look of its verdict."""
    panels.rows(axes, names, [(look, _dots(rows, names, verdict)) for verdict, look in LOOKS.items()])
    panels.level(axes, 0.0, "reference", upright=True)
    for end in (-MARGIN, MARGIN):
        panels.level(axes, end, f"margin of {MARGIN:g}", ":", upright=True)
    axes.set_xlabel("difference in the instability part\n(nats/token)")


def comparable(records: Records, window: Window, arms: int) -> tuple[list[str], dict[str, dict[str, Row]]]:
    """The names of the arms whose learning rate means the same, and their rows by panel, in order of the difference.

    Args:
        arms: the number of arms in these records.

    Raises:
        NothingToDrawError: the records are no board, or one of too few or too many arms.
    """
    if not FEWEST_ARMS <= arms <= MOST_ARMS:
        raise NothingToDrawError(f"nothing to draw: {arms} arms, of the {FEWEST_ARMS} to {MOST_ARMS} of a board")
    try:
        board = Board(curves_of(records, {}, window), meanings())
    except RequestError as refusal:
        raise NothingToDrawError(f"nothing to draw: {refusal}") from None
    panels = {panel.title: _rows(panel) for panel in board.panels}
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    if len(names) < FEWEST_ARMS:
        raise NothingToDrawError(f"nothing to draw: {len(names)} of the {FEWEST_ARMS} arms that a board takes")
    return names, panels


def _rows(panel: Panel) -> dict[str, Row]:
    rows = [row for row in panel.rows if row.verdict in LOOKS]
    return {row.name: row for row in sorted(rows, key=lambda row: row.differences[PART].mean)}


def _dots(rows: Mapping[str, Row], names: Sequence[str], verdict: str) -> dict[int, Dot]:
    dots = {}
    for index, name in enumerate(names):
        row = rows.get(name)
        if row is not None and row.verdict == verdict:
            interval = row.differences[PART]
            dots[index] = Dot(interval, f"{name}\n{verdict}\n{interval.bare} nats/token\n{row.seeds} seeds")
    return dots
