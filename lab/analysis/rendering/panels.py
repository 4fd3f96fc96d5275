"""Draw inside one panel: lines over a column with bands and outcome marks, rows of intervals, reference lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon

from lab.analysis.rendering import hover, layout, marks, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.marks import OUTCOME_LOOK, OUTCOMES
from lab.analysis.rendering.style import DASHED, INK
from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t

REFERENCES = {"loss_at_init": (marks.AT_INIT, (0, (1, 1.5))), "loss_bigram": (marks.BIGRAM, (0, (5, 2)))}
FINAL_LOSS = Quantity("final held-out loss", "nats/token")
# Width of the widest name of a row, in multiples of the size of text, and as a share of the page.
ROW_NAME, ROW_NAME_SHARE = 15.0, 0.28
NUMBER = 4.5  # room along the axis for each number, in multiples of the size of text
ROOM = 0.7  # the share of a row's height over which its dots are spread
# Panels of rows, with the names at the left, stand below one another if they would be narrower than this.
NARROWEST_ROWS = 16.0


class Dot(NamedTuple):
    """A dot in a row: its interval, and its hover text."""

    interval: Interval
    text: str


def over(axes: Axes, runs: pd.DataFrame, x: str, value: str, quantity: Quantity, **look: Any) -> None:
    """Draw column ``value`` over column ``x``: a line at the mean over seeds, and their band.

    Marks show the worst outcome of the seeds. A seed without a finite value counts there, but not in the mean. The
    ``look`` has a ``color``, and may have a ``linestyle`` and a ``marker`` for stable runs.
    """
    xs, values, outcomes = (runs[column].to_numpy() for column in (x, value, "outcome"))
    finite = np.isfinite(values)
    ticks = np.unique(xs[finite])
    seeds = [values[finite & (xs == tick)] for tick in ticks]
    means = mean_line(axes, ticks, seeds, quantity, **look | {"marker": ""})
    worst = np.array([worst_outcome(outcomes[xs == tick]) for tick in ticks])
    columns = {name: runs[name].to_numpy() for name in hover.COLUMNS if name in runs}
    texts = []
    for tick, of_tick in zip(ticks, seeds, strict=True):
        of_runs = {name: column[xs == tick] for name, column in columns.items()}
        texts.append(hover.text(of_runs, quantity, of_tick, *[f"block {tick:g}"] * (x == "block")))
    for outcome in ("", *OUTCOMES):
        shown = worst == outcome
        if shown.any():
            outcome_marks(axes, ticks[shown], means[shown], outcome, compress(texts, shown), **look)


def lines(
    axes: Axes, runs: pd.DataFrame, by: str, looks: Mapping[Any, Any], x: str, value: str, quantity: Quantity
) -> None:
    """Draw a line of ``over`` for each value of the column ``by``, in its shade or with its look."""
    shown = runs[[column for column in runs if column in (by, x, value, *hover.COLUMNS)]]  # so that groups are quick
    for key, of_key in shown.groupby(by, sort=False):
        look = looks[key]
        over(axes, of_key, x, value, quantity, **({"color": look} if isinstance(look, str) else look))


def mean_line(
    axes: Axes, x: Any, seeds: Sequence[np.ndarray], quantity: Quantity, texts: Iterable[str] = (), **look: Any
) -> np.ndarray:
    """Draw a line through the mean over the seeds at each x, with their band; returns the means."""
    means = np.array([quantity.mean(values) for values in seeds])
    ends = np.array([marks.band_ends(values) for values in seeds]).reshape(-1, 2)
    order = np.argsort(np.asarray(x))
    low, high = ends[order].T
    band(axes, np.asarray(x)[order], low, high, look["color"], max(map(len, seeds), default=0))
    (line,) = axes.plot(x, means, **{"marker": "o", "markersize": 3.5, **look})
    if texts:
        add_hover_texts(axes, line, texts)
    return means


def outcome_marks(axes: Axes, x: Any, y: Any, outcome: str, texts: Iterable[str], **look: Any) -> None:
    """Draw the marks of an outcome, or of stable runs if it is empty, with their texts."""
    usual = {**OUTCOME_LOOK, "marker": OUTCOMES[outcome]} if outcome else {"markersize": 3.5}
    (line,) = axes.plot(x, y, **{"marker": "o", **look, **usual, "linestyle": ""})
    if outcome:
        marks.name(line, outcome)
    add_hover_texts(axes, line, texts)


def add_hover_texts(axes: Axes, line: Line2D, texts: Iterable[str]) -> None:
    """Give every mark of a line a text for the pointer."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, layout.Drawing)
    figure.points.append(hover.Points(line, list(texts)))


def band(axes: Axes, x: Any, low: Any, high: Any, colour: str, seeds: int) -> None:
    """Fill the area between the ends of the bands of ``seeds`` seeds with a pale colour, unless they coincide."""
    x, low, high = (np.asarray(values, dtype=float) for values in (x, low, high))
    finite = np.isfinite(low) & np.isfinite(high)
    if (low < high).any():
        x, low, high = x[finite], low[finite], high[finite]
        corners = np.stack([np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])], axis=1)
        area = axes.add_artist(Polygon(corners, color=colour, alpha=0.2, linewidth=0))
        marks.name(area, marks.kind_of_band(seeds), seeds)
        axes.update_datalim(corners)


def worst_outcome(outcomes: Iterable[str]) -> str:
    """The worst outcome among seeds; empty if all are stable."""
    return max(outcomes, key=["", *OUTCOMES].index)


def arm_look(position: int) -> dict[str, Any]:
    """Colour, dashes and mark of the arm at this position; all differ among the first 63 arms."""
    turn, colour = divmod(position, len(style.ARM_COLOURS))
    return {
        "color": style.ARM_COLOURS[colour],
        "linestyle": style.ARM_DASHES[turn % len(style.ARM_DASHES)],
        "marker": style.ARM_MARKS[position % len(style.ARM_MARKS)],
    }


def arm_looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The looks of these arms, or of whatever else differs in colour and mark, by name."""
    return {name: arm_look(position) for position, name in enumerate(names)}


def arm_keys(looks: Mapping[str, Mapping[str, Any]], **changes: Any) -> list[Line2D]:
    """Key entries of arms by name; ``changes`` replace parts of their looks."""
    return [Line2D([], [], label=arm, **{"markersize": 5, **look, **changes}) for arm, look in looks.items()]


def epsilon(axes: Axes, eps: float, colour: str = INK) -> None:
    """Draw a dashed line at Adam's epsilon and widen the view for it, unless it lies far outside."""
    low, high = axes.get_ylim()
    if low / 30 < eps < high * 30:
        level(axes, eps, marks.EPSILON, DASHED, colour)
        axes.set_ylim(min(low, eps / 1.5), max(high, eps * 1.5))


def diagonal(axes: Axes, values: pd.Series, label: str) -> None:
    """Draw a dotted line at y = x over the range of ``values`` if it is in view; the view does not change."""
    view, ends = axes.get_ylim(), [values.min(), values.max()]
    if view[0] < ends[1] and ends[0] < view[1]:
        (line,) = axes.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (1, 1)), zorder=1, label=label)
        marks.name(line, label)
        axes.set_ylim(view)


def level(axes: Axes, at: float, name: str, linestyle: Any = "-", colour: str = INK, *, upright: bool = False) -> None:
    """Draw a thin line across the panel at a value, named in the key."""
    draw = axes.axvline if upright else axes.axhline
    marks.name(draw(at, color=colour, linewidth=0.9, linestyle=linestyle, zorder=1, label=name), name)


def references(axes: Axes, runs: pd.DataFrame) -> None:
    """Draw thin lines at the loss at initialization and at the bigram model's, both means over ``runs``."""
    for column, (name, dashes) in REFERENCES.items():
        level(axes, runs[column].mean(), name, dashes)


def dots(table: pd.DataFrame, column: str, quantity: Quantity, names: Iterable[str], *others: str) -> dict[int, Dot]:
    """A dot for the runs of each ``name``, by number of its row; a name without a finite value has none.

    Args:
        table: the runs, with a column ``name``.
        column: the column of the values.
        quantity: the quantity that they measure.
        names: the names of the rows.
        *others: further lines for the hover text of each dot.
    """
    dots_by_row = {}
    for row, name in enumerate(names):
        runs = table[table["name"] == name]
        values = runs[column].to_numpy(dtype=float)
        values = values[np.isfinite(values)]
        if len(values):
            text = hover.text(runs, quantity, values, name, *others)
            dots_by_row[row] = Dot(student_t(values), text)
    return dots_by_row


def rows_height(names: Iterable[str]) -> float:
    """Height of a panel of ``rows``, in multiples of the size of text."""
    lines = [row_name(name).count("\n") + 1 for name in names]
    return len(lines) * (1.2 * max(lines) + 0.9) + 1.0


def row_panels(names: Sequence[str], count: int) -> tuple[layout.Sheet, list[Axes]]:
    """A sheet of panels that share rows of these names: beside one another where they fit."""
    columns = layout.columns_for(count, NARROWEST_ROWS)
    sheet, facet_axes = layout.facets([""] * count, [""], rows_height(names), columns)
    return sheet, [axes for (axes,) in facet_axes]


def rows_room(names: Iterable[str]) -> float:
    """Room for the names of ``rows`` at the left, in multiples of the size of text."""
    size = style.page().size * style.SMALL
    widest = max(style.text_width(line, size) for name in names for line in row_name(name).split("\n"))
    return max(layout.LABELS, widest / style.em() + 1.0)


def row_name(name: str) -> str:
    """The name of a row, broken into lines."""
    return style.wrapped(name, min(ROW_NAME * style.em(), ROW_NAME_SHARE * style.page().width))


def rows(axes: Axes, names: Sequence[str], groups: Sequence[tuple[Mapping[str, Any], Mapping[int, Dot]]]) -> None:
    """Draw a row for each name, the first at the top, and in it a dot with its interval for each group that has one.

    Groups stand one above the other, unless no row has dots of two.

    Args:
        axes: the panel.
        names: the names of the rows.
        groups: for each group the look of its dots, and the dots by number of their row.
    """
    taken = [row for _, dots_of in groups for row in dots_of]
    room = ROOM if len(set(taken)) < len(taken) else 0.0
    for position, (look, dots_of) in enumerate(groups):
        offset = room * ((position + 0.5) / len(groups) - 0.5)
        if dots_of:
            heights = [row + offset for row in dots_of]
            draw_dots(axes, heights, list(dots_of.values()), sideways=True, **{**look, "linestyle": ""})
    axes.set_yticks(range(len(names)), list(map(row_name, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=max(1, min(4, int(scales.width(axes) / (NUMBER * style.em())))))


def draw_dots(axes: Axes, x: Any, shown: Sequence[Dot], sideways: bool = False, **look: Any) -> None:
    """Draw dots joined by a line, each with its interval; below three seeds draw a dash per seed.

    With ``sideways``, ``x`` are heights, and values go to the right.
    """
    intervals = [dot.interval for dot in shown]
    means = np.array([interval.mean for interval in intervals])
    ends = np.array([[interval.low, interval.high] for interval in intervals]).T
    xy = (means, x) if sideways else (x, means)
    bars: dict[str, Any] = {"fmt": "none", "xerr" if sideways else "yerr": np.abs(ends - means)}
    drawn = axes.errorbar(*xy, **bars, ecolor=look["color"], elinewidth=1, capsize=2.5)
    # the error is NaN if the interval is not Student's
    if seeds_of := [interval.n for interval in intervals if np.isfinite(interval.error)]:
        marks.name(drawn.lines[2][0], marks.INTERVAL, max(seeds_of))
    (line,) = axes.plot(*xy, **{"markersize": 5, **look})
    add_hover_texts(axes, line, [dot.text for dot in shown])
    for place, interval in zip(x, intervals, strict=True):
        if 0 < interval.n < FEWEST_SEEDS and interval.values:
            seeds = ([place] * len(interval.values), interval.values)
            mark = "|" if sideways else "_"
            (dashes,) = axes.plot(*(seeds[::-1] if sideways else seeds), mark, color=look["color"], markersize=8)
            marks.name(dashes, marks.SEED, interval.n)
