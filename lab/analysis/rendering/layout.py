"""Lay out figures: a sheet of panels in rows, keys beside or below them, all text in its place without overlap."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from lab.analysis.rendering import hover, marks, style
from lab.core import files

MOST_KEYS = 9
MOST_COLUMNS = 4
MOST_FINE_CORNERS = 15  # shapes with more corners are rounded to fewer digits
PNG_DPI = 300
# In multiples of the size of text.
LEFT, RIGHT, BETWEEN, KEYS = 7.0, 1.2, 1.6, 13.0  # margins, the space between two panels, the width of keys beside them
NARROWEST, WIDEST = 9.5, {1: 28.0, 2: 21.0}  # panels; by number of columns
PAGE_OF_KEYS_BESIDE = 42.0  # on a narrower page keys stand below the panels
LINE, ROW_GAP, BAND_OF_TITLE = 1.2, 0.9, 0.55
MOST_STRETCH = 1.7  # of the last panels, where their keys are longer
TICKS, LABEL = 7.0, 4.0  # points between a panel and the numbers at its ticks, and between these and its label
SAMPLE = 1.7  # width of the sample beside the text of a key


class Drawing(Figure):
    """A figure with its caption.

    Attributes:
        caption: a title, then paragraphs on what is in the figure, and only that.
        points: marks that say something when the pointer rests on them.
    """

    caption: str = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.points: list[hover.Points] = []


class Sheet:
    """A grid of cells for panels, counted from the upper left, with keys at the right or below.

    Widths are known from the start and heights of rows are given, so text is placed by counting its lines: a layout
    engine would draw every figure several times.
    """

    def __init__(self, columns: int, heights: Sequence[float]) -> None:
        """``heights`` are those of panels, by row, in multiples of the size of text."""
        self.em, self.heights, self.columns = style.em(), list(heights), columns
        self.keys_beside = _keys_beside()
        self.column_width = min(_widest(columns), WIDEST.get(columns, np.inf)) * self.em
        width = LEFT * self.em + columns * (self.column_width + BETWEEN * self.em) - BETWEEN * self.em
        width = width + (KEYS + RIGHT) * self.em if self.keys_beside else style.page().width
        self.figure = Drawing(figsize=(width, self.em * (sum(self.heights) + 1)))
        self.headline = ""
        self._cells: dict[Axes, int] = {}
        self._row_labels: list[tuple[int, int, str]] = []
        self._keys: list[tuple[int, str, list[Any]]] = []
        self._notes: list[str] = []
        self._explained: dict[str, str] = {}

    @property
    def first(self) -> Axes | None:
        """The panel that was made first; None before that."""
        return self.figure.axes[0] if self.figure.axes else None

    def panel(self, row: int, column: int, columns: int = 1, gap: float = 0.0, **shared: Any) -> Axes:
        """Axes in this cell.

        Args:
            row: from 0, at the top.
            column: from 0, at the left.
            columns: how many columns the panel spans.
            gap: kept free at the left of the cell, for labels, in multiples of the size of text.
            **shared: ``sharex`` and ``sharey``, as in matplotlib.
        """
        width, height = self.figure.get_size_inches()
        between = BETWEEN * self.em
        x = (LEFT + gap) * self.em + column * (self.column_width + between)
        panel_width = columns * (self.column_width + between) - between - gap * self.em
        # the height is that of the row; finish() sets the position
        box = (x / width, 0.0, panel_width / width, self.heights[row] * self.em / height)
        axes = self.figure.add_axes(box, **shared)
        self._cells[axes] = row
        return axes

    def label_rows(self, first: int, last: int, text: str) -> None:
        """Write text upwards at the far left of rows ``first`` to ``last``."""
        self._row_labels.append((first, last, text))

    def keys(self, *groups: tuple[str, Sequence[Any]], row: int = 0) -> None:
        """Draw titled groups of key entries at the right of this row, or below all rows on a narrow page."""
        self._keys += [(row, title, list(entries)) for title, entries in groups if entries]

    def note(self, sentence: str) -> None:
        """Add a sentence to the caption."""
        self._notes.append(sentence)

    def explain(self, kind: str, sentence: str) -> None:
        """Add a sentence to the caption if artists of this kind (see ``marks``) are drawn."""
        self._explained[kind] = sentence

    def finish(self, caption: str) -> Drawing:
        """Place everything.

        Args:
            caption: title and paragraphs; sentences on what is drawn are added.
        """
        sentences = [*self._notes, *marks.sentences(self.figure, self._explained)]
        self.figure.caption = "\n\n".join([caption, *[" ".join(sentences)] * bool(sentences)])
        self._keys.insert(sum(row == 0 for row, _, _ in self._keys), (0, "", marks.keys(self.figure)))
        legends = list(self._legends())
        tops, bottoms, height = self._rows([(row, lines) for row, _, lines in legends])
        self._place(tops, height)
        self._place_legends(legends, tops, bottoms, height)
        return self.figure

    def _rows(self, legends: Sequence[tuple[int, float]]) -> tuple[list[float], list[float], float]:
        """Upper and lower edge of each row of panels, and the height of the figure, from its top in inches."""
        axes_of_row = [
            [axes for axes, row_of in self._cells.items() if row_of == row] for row in range(len(self.heights))
        ]
        keys_end = {row: sum(lines for row_of, lines in legends if row_of == row) for row, _ in legends}
        tops, bottoms, used, keys_until = [], [], 0.4 * self.em, 0.0
        if self.headline:
            used += 1.5 * self.em
        for row, panels in enumerate(axes_of_row):
            top = used + max([self._above(axes) for axes in panels], default=0.0)
            if self.keys_beside and row in keys_end:
                top = max(top, keys_until + self.em)
                keys_until = top + keys_end[row] * self.em
                if row == len(axes_of_row) - 1:
                    self._stretch(row, keys_end[row])
            tops.append(top)
            bottoms.append(top + self.heights[row] * self.em)
            used = bottoms[-1] + max([self._below(axes) for axes in panels], default=0.0) + ROW_GAP * self.em
        if not self.keys_beside:
            return tops, bottoms, used + (sum(lines for _, lines in legends) + 0.5) * self.em
        return tops, bottoms, max(used, keys_until + 0.3 * self.em)

    def _stretch(self, row: int, keys: float) -> None:
        """Make the panels of the last row as high as the keys beside them, within ``MOST_STRETCH``."""
        below = max(self._below(axes) for axes, row_of in self._cells.items() if row_of == row)
        self.heights[row] = max(self.heights[row], min(keys - below / self.em, MOST_STRETCH * self.heights[row]))

    def _above(self, axes: Axes) -> float:
        title = max((axes.get_title(loc) for loc in ("left", "center")), key=len)
        return ((title.count("\n") + 1) * LINE * style.SMALL + BAND_OF_TITLE) * self.em if title else 0.0

    def _below(self, axes: Axes) -> float:
        below = 0.0
        if axes.xaxis.get_tick_params().get("labelbottom", True):
            below += TICKS / 72 + LINE * style.SMALL * self.em
        if label := axes.get_xlabel():
            below += LABEL / 72 + (label.count("\n") + 1) * LINE * self.em
        return below

    def _place(self, tops: Sequence[float], height: float) -> None:
        self.figure.set_figheight(height)
        width = self.figure.get_figwidth()
        for axes, row in self._cells.items():
            box, panel_height = axes.get_position(), self.heights[row] * self.em
            axes.set_position((box.x0, 1 - (tops[row] + panel_height) / height, box.width, panel_height / height))
        for first, last, text in self._row_labels:
            middle = (tops[first] + tops[last] + self.heights[last] * self.em) / 2
            self.figure.text(
                0.15 * self.em / width,
                1 - middle / height,
                style.wrapped(text, tops[last] + self.heights[last] * self.em - tops[first]),
                rotation=90,
                va="center",
                weight="bold",
                size=style.page().size * style.SMALL,
            )
        if self.headline:
            self.figure.text(0.6 * self.em / width, 1 - 0.3 * self.em / height, self.headline, va="top", weight="bold")

    def _legends(self) -> Iterator[tuple[int, Legend, float]]:
        """Each group of keys with its row and its height in multiples of the size of text."""
        width = KEYS if self.keys_beside else self.figure.get_figwidth() / self.em - 1
        room = width - SAMPLE * style.SMALL - 1.2
        for row, title, entries in self._keys:
            if not entries:
                continue
            labels = [style.wrapped(entry.get_label(), room * self.em) for entry in entries]
            widest = max(
                style.text_width(line, style.page().size * style.SMALL)
                for label in labels
                for line in label.split("\n")
            )
            columns = 1 if self.keys_beside else max(1, int(width / (widest / self.em + SAMPLE + 2.6)))
            look: dict[str, Any] = {"borderaxespad": 0, "borderpad": 0, "handlelength": SAMPLE, "labelspacing": 0.35}
            look |= {"loc": "upper left", "alignment": "left", "columnspacing": 1.4, "ncols": columns}
            if title:
                look |= {
                    "title": style.wrapped(f"{title}:", (width - 0.5) * self.em),
                    "title_fontsize": style.page().size * style.SMALL,
                }
            lines = sum(
                max(label.count("\n") + 1 for label in labels[i :: -(-len(labels) // columns)]) * LINE + 0.4
                for i in range(-(-len(labels) // columns))
            )
            yield (
                row,
                Legend(self.figure, entries, labels, **look),
                style.SMALL * (lines + (1.6 if title else 0.0)) + 0.45,
            )

    def _place_legends(
        self,
        legends: Sequence[tuple[int, Legend, float]],
        tops: Sequence[float],
        bottoms: Sequence[float],
        height: float,
    ) -> None:
        width = self.figure.get_figwidth()
        below = height - (sum(lines for _, _, lines in legends) + 0.3) * self.em
        ends: dict[int, float] = {}
        for row, legend, lines in legends:
            y = ends.get(row, tops[row]) if self.keys_beside else below
            x = width - KEYS * self.em if self.keys_beside else 0.6 * self.em
            legend.set_bbox_to_anchor((x / width, 1 - y / height), self.figure.transFigure)
            self.figure.add_artist(legend)
            ends[row], below = y + lines * self.em, below + lines * self.em


def _keys_beside() -> bool:
    return style.page().width / style.em() >= PAGE_OF_KEYS_BESIDE


def _widest(columns: int) -> float:
    """Width that each of so many columns may have on the page, in multiples of the size of text."""
    room = style.page().width / style.em() - LEFT - RIGHT - KEYS * _keys_beside()
    return (room + BETWEEN) / columns - BETWEEN


def columns_for(panels: int, gap: float = 0.0) -> int:
    """Number of columns for so many panels: at most four and as many as fit, with rows as full as possible.

    Args:
        panels: how many there are.
        gap: kept free for labels at the left of each panel but the first, in multiples of the size of text.
    """
    fitting = [columns for columns in range(1, MOST_COLUMNS + 1) if _widest(columns) - gap >= NARROWEST]
    most = max(fitting, default=1)
    return -(-panels // -(-panels // most))


def styled(draw: Callable[..., Sheet]) -> Callable[..., Drawing]:
    """Decorator: draw a sheet in the style of the lab and finish it; the docstring is its caption."""

    @wraps(draw)
    def drawing(*arguments: Any) -> Drawing:
        with style.drawn_for(style.page()):
            return draw(*arguments).finish(inspect.getdoc(draw) or "")

    return drawing


def line_keys(shades: Mapping[float, str], spell: Callable[[float], str]) -> list[Line2D]:
    """Key entries for lines told apart by shade; of more than nine, nine from first to last."""
    values = list(shades)
    shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_KEYS)).round().astype(int))
    return [Line2D([], [], color=shades[values[index]], label=spell(values[index])) for index in shown]


def svg(figure: Drawing, name: str) -> str:
    """Render a figure as one ``<svg>`` element; its ids begin with ``name``, so that several can share a page."""
    for axes in figure.axes:
        _draw_grid(axes)
    for number, points in enumerate(figure.points):
        points.line.set_gid(hover.group_id(number))
    with style.drawn_for(style.page()), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn = text.getvalue()
    drawn = hover.with_texts(drawn[drawn.index("<svg") :], figure.points, 72 * figure.get_figheight())
    drawn = re.sub(r'(<g) id="[^"]*"', r"\1", drawn)  # nothing refers to groups
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
    return re.sub(r'(?<= d=")[^"]+', _shorten, re.sub(r"\n +", "\n", drawn))


def save(figure: Drawing, path: Path, *, within: Path | None = None) -> None:
    """Write a figure as a PDF with text as text, or as a PNG; its suffix decides.  See ``files.atomic_write``.

    Raises:
        RequestError: the file cannot be written.
    """
    for axes in figure.axes:
        _draw_grid(axes)
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
    with style.drawn_for(style.page()), files.atomic_write(path, within=within) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=PNG_DPI, metadata=metadata)


def _draw_grid(axes: Axes) -> None:
    """Draw grid lines as one collection per axis, and ticks only beside labels: matplotlib's own ticks are slow."""
    directions = [
        (axes.xaxis, "labelbottom", axes.get_xaxis_transform()),
        (axes.yaxis, "labelleft", axes.get_yaxis_transform()),
    ]
    for axis, labels, transform in directions:
        low, high = sorted(axis.get_view_interval())
        ticks = [float(tick) for tick in axis.get_majorticklocs() if low <= tick <= high]
        lines = [[(tick, 0.0), (tick, 1.0)] if axis is axes.xaxis else [(0.0, tick), (1.0, tick)] for tick in ticks]
        look = {"colors": style.STYLE["grid.color"], "linewidths": style.STYLE["grid.linewidth"], "zorder": 0.5}
        axes.add_collection(LineCollection(lines, transform=transform, **look), autolim=False)
        axis.set_visible(axis.get_tick_params().get(labels, True) or bool(axis.get_label_text()))


def _shorten(path: re.Match[str]) -> str:
    """Round a path to a hundredth of a point, one of many corners to a tenth; both are finer than print."""
    digits = 1 if path[0].count("L") > MOST_FINE_CORNERS else 2
    rounded = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.{digits}f}", path[0])
    return re.sub(r"\s*([A-Zz])\s*", r"\1", rounded).strip()
