"""Lay out figures: a sheet of panels in rows with keys below them; write them as SVG, PDF and PNG."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from lab.analysis.rendering import hover, keys, marks, scales, style
from lab.analysis.text import number
from lab.core import files
from lab.core.printing import printable

MOST_KEYS = 9
MOST_COLUMNS = 4
MOST_FINE_CORNERS = 15  # shapes with more corners are rounded to fewer digits
PNG_DPI = 300
# In multiples of the size of text: about the room for labels left of the panels; the least width of a panel, and the
# greatest by number of columns; around each panel with its labels; from one line of text to the next.
LABELS, NARROWEST, PAD, LINE = 7.0, 9.5, 0.7, 1.2
WIDEST = {1: 34.0, 2: 21.0}


class Drawing(Figure):
    """A figure with its caption.

    Attributes:
        caption: a title, then paragraphs on everything that the figure shows, and on nothing else.
        points: marks with hover texts.
        key_texts: texts of keys, and names at the ends of lines.
    """

    caption: str = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.points: list[hover.Points] = []
        self.key_texts: list[Text] = []


class _Cell(NamedTuple):
    """The place of a panel: its row, and the first and the last of its columns."""

    row: int
    first: int
    last: int


class _Margins(NamedTuple):
    """Room that the texts around a panel take, in inches."""

    left: float
    right: float
    below: float
    above: float


class Sheet:
    """Rows of panels, with the keys below them.

    Panels have the heights that are asked, and all columns are equally wide. The texts around the panels are measured,
    and the height of the figure follows.
    """

    def __init__(self, columns: int, heights: Sequence[float], room: float = LABELS) -> None:
        """Heights of panels, by row, and the room for labels at the left are in multiples of the size of text."""
        em = style.em()
        self.columns, self.heights, self.room = columns, [height * em for height in heights], room * em
        column = min(_widest(columns, room), WIDEST.get(columns, np.inf)) * em
        self.column_width = column - PAD * em
        self.figure = Drawing(figsize=(room * em + columns * column, sum(self.heights)))
        self.headline = ""
        self._keys: list[tuple[str, list[Any]]] = []
        self._cells: dict[Axes, _Cell] = {}
        self._notes: list[str] = []
        self._explained: dict[str, str] = {}

    def panel(self, row: int, column: int, columns: int = 1, **shared: Any) -> Axes:
        """Axes in this cell, counted from the upper left, spanning ``columns`` columns.

        ``shared`` may hold ``sharex`` and ``sharey``, as in matplotlib.
        """
        row %= len(self.heights)
        left, pad = self.room + column * (self.column_width + PAD * style.em()), (columns - 1) * PAD * style.em()
        # about its final place, on which ticks and titles depend
        width, below = columns * self.column_width + pad, sum(self.heights[row + 1 :])
        axes: Axes = self.figure.add_axes(self._shares(left, below, width, self.heights[row]), **shared)
        self._cells[axes] = _Cell(row, column, column + columns - 1)
        return axes

    def _shares(self, left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
        """A place given in inches, as shares of the figure."""
        whole_width, whole_height = self.figure.get_size_inches()
        return left / whole_width, bottom / whole_height, width / whole_width, height / whole_height

    def keys(self, *groups: tuple[str, Sequence[Any]]) -> None:
        """Draw titled groups of key entries, or write their names at the ends of lines."""
        self._keys += [(title, list(entries)) for title, entries in groups if entries]

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
        named = {title: self._name_ends(entries) for title, entries in self._keys}
        for title in filter(named.get, filter(None, named)):
            self.note(f"Each line is labelled with its {title}.")
        sentences = [*self._notes, *marks.sentences(self.figure, self._explained)]
        self.figure.caption = "\n\n".join([caption, *[" ".join(sentences)] * bool(sentences)])
        groups = [(title, entries) for title, entries in self._keys if not named[title]]
        lines = keys.in_lines([*groups, ("", marks.keys(self.figure))], self.figure.get_figwidth() - 2 * style.em())
        self._place(keys.height(lines))
        top = keys.height(lines) + PAD * style.em() / 2
        self.figure.key_texts += keys.draw(self.figure, lines, PAD * style.em(), top)
        return self.figure

    def _name_ends(self, entries: Sequence[Any]) -> bool:
        """Name lines at their ends in the upper right panel, and return whether there is room."""
        axes = max(self._cells, key=lambda axes: (-self._cells[axes].row, self._cells[axes].last))
        texts = keys.name_ends(axes, self.heights[self._cells[axes].row], entries)
        self.figure.key_texts += texts
        return bool(texts)

    def _place(self, keys_height: float) -> None:
        """Place the panels beside and above one another, with room for their texts, and for the keys below them."""
        pad, width = PAD * style.em(), self.figure.get_figwidth()
        for _ in range(2):  # again, since labels are broken to fit the width of their panel
            left, right = np.zeros(self.columns), np.zeros(self.columns)
            above, below = np.zeros(len(self.heights)), np.zeros(len(self.heights))
            for axes, (row, first, last) in self._cells.items():
                self._break_labels(axes)
                margins = _margins(axes)
                left[first], right[last] = max(left[first], margins.left), max(right[last], margins.right)
                above[row], below[row] = max(above[row], margins.above), max(below[row], margins.below)
            column = (width - (left + right + pad).sum()) / self.columns
            starts = np.cumsum(left + column + right + pad) - column - right - pad / 2
            rows = above + self.heights + below + pad
            top = keys_height + rows.sum()
            bottoms = top - np.cumsum(rows) + below + pad / 2
            self.figure.set_size_inches(width, top + LINE * style.em() * bool(self.headline))
            for axes, (row, first, last) in self._cells.items():
                wide = starts[last] + column - starts[first]
                axes.set_position(self._shares(starts[first], bottoms[row], wide, self.heights[row]))
        if self.headline:
            look: dict[str, Any] = {"ha": "left", "va": "top", "weight": "bold", "size": style.page().size}
            self.figure.suptitle(self.headline, x=0.01, y=1.0, **look)

    def _break_labels(self, axes: Axes) -> None:
        """Break labels of axes that are longer than their panel, and reach its neighbour."""
        size, place = style.page().size, axes.get_position()
        width, height = self.figure.get_size_inches() * (place.width, place.height)
        for axis, room in ((axes.xaxis, width + style.em()), (axes.yaxis, height + PAD * style.em())):
            lines = axis.get_label_text().split("\n")
            axis.set_label_text("\n".join(chain(*(style.broken(line, room, size) for line in lines))))


def _margins(axes: Axes) -> _Margins:
    """Measure the texts around a panel."""
    size, small, pads = style.page().size, style.page().size * style.SMALL, matplotlib.rcParams
    width = scales.width(axes)
    x_numbers, y_numbers = tick_labels(axes.xaxis), tick_labels(axes.yaxis)
    x_label, y_label, title = axes.xaxis.get_label_text(), axes.yaxis.get_label_text(), axes.get_title()
    left = _padded(max((_width(text, small) for _, text in y_numbers), default=0.0), pads["ytick.major.pad"])
    left += _padded(_height(y_label, size), pads["axes.labelpad"])
    below = _padded(max((_height(text, small) for _, text in x_numbers), default=0.0), pads["xtick.major.pad"])
    below += _padded(_height(x_label, size), pads["axes.labelpad"])
    above = _padded(_height(title, small), pads["axes.titlepad"])
    if y_numbers:
        above, below = max(above, LINE * small / 144), max(below, LINE * small / 144)
    # what is wider than the panel, or stands at its end
    middles = [(at, _width(text, small)) for at, text in x_numbers]
    middles += [(0.5, _width(x_label, size)), (0.5, _width(title, small))]
    left = max(left, *(wide / 2 - at * width for at, wide in middles))
    right = max(0.0, *(wide / 2 - (1 - at) * width for at, wide in middles))
    names = [style.text_width(text.get_text(), small) for text in axes.texts if keys.is_key(text)]
    return _Margins(left, max(right, _padded(max(names, default=0.0), keys.GAP * size)), below, above)


def _width(text: str, size: float) -> float:
    return max(style.text_width(line, size) for line in text.split("\n"))


def _height(text: str, size: float) -> float:
    return LINE * size / 72 * (text.count("\n") + 1) if text else 0.0


def _padded(inches: float, points: float) -> float:
    """With this distance from the panel, if there is anything."""
    return inches + points / 72 if inches else 0.0


def tick_labels(axis: Axis) -> list[tuple[float, str]]:
    """The numbers shown along an axis, each with its place as a share of the axis."""
    shown = axis.get_tick_params()["labelbottom" if isinstance(axis, XAxis) else "labelleft"]
    if not (shown and axis.get_visible()):
        return []
    ends, places = axis.get_view_interval(), list(axis.get_majorticklocs())
    low, high = axis.get_transform().transform(np.array(ends))
    shares = (axis.get_transform().transform(np.asarray(places, dtype=float)) - low) / (high - low)
    texts = axis.get_major_formatter().format_ticks(places)
    return [(share, text) for share, text in zip(shares, texts, strict=True) if text and -1e-6 < share < 1 + 1e-6]


def _widest(columns: int, room: float) -> float:
    """Width that each of ``columns`` columns may have on the page, in multiples of the size of text."""
    return (style.page().width / style.em() - room) / columns


def columns_for(panels: int, narrowest: float = NARROWEST, room: float = LABELS) -> int:
    """Number of columns for ``panels`` panels: at most four and as many as fit, with rows as full as possible.

    Widths are in multiples of the size of text. ``narrowest`` is the least width of a panel, with its labels if each
    has its own. ``room`` is the width of labels at the left.
    """
    most = max((columns for columns in range(1, MOST_COLUMNS + 1) if _widest(columns, room) >= narrowest), default=1)
    return -(-panels // -(-panels // most))


def facets(
    titles: Sequence[str | None],
    labels: Sequence[str],
    height: float,
    columns: int | None = None,
    *,
    share_x: bool = True,
    share_y: bool = True,
    below: Sequence[float] = (),
    room: float = LABELS,
) -> tuple[Sheet, list[list[Axes]]]:
    """Small multiples: titles side by side, as many as fit, and for each a panel per label, one below the other.

    Args:
        titles: titles of the facets; None leaves a place empty.
        labels: labels of the y axes.
        height: height of a panel, in multiples of the size of text.
        columns: number of columns; as many as fit by default.
        share_x: whether the panels of a facet share one x axis, with numbers below the last of them.
        share_y: whether all panels of a label share one y axis, with numbers at the left.
        below: heights of further rows of the sheet.
        room: room for labels at the left, in multiples of the size of text.

    Returns:
        The sheet, and the panels of each facet from the top.
    """
    columns = columns or columns_for(len(titles), room=room)
    bands = -(-len(titles) // columns)
    sheet = Sheet(columns, [*[height] * bands * len(labels), *below], room)
    first: dict[str, Axes] = {}
    facet_axes = []
    for index, title in enumerate(titles):
        band, column = divmod(index, columns)
        panels = list[Axes]()
        for row, label in enumerate(labels if title is not None else ()):
            shared: dict[str, Any] = {"sharex": panels[0] if panels and share_x else None, "sharey": first.get(label)}
            axes = sheet.panel(band * len(labels) + row, column, **shared)
            if share_y:
                first.setdefault(label, axes)
            is_left = column == 0 or titles[index - 1] is None
            axes.set_ylabel(label if is_left else "")
            axes.tick_params(labelleft=is_left or not share_y, labelbottom=not share_x or row == len(labels) - 1)
            panels.append(axes)
        if title:
            panels[0].set_title(style.wrapped(title, sheet.column_width))
        facet_axes.append(panels)
    return sheet, facet_axes


def styled(draw: Callable[..., Sheet]) -> Callable[..., Drawing]:
    """Decorator: draw a sheet in the style of the lab and finish it; the docstring is its caption.

    In the docstring ``{axis}`` stands for ``style.axis``.
    """

    @wraps(draw)
    def drawing(*arguments: Any) -> Drawing:
        with style.drawn_for(style.page()):
            return draw(*arguments).finish((inspect.getdoc(draw) or "").format(axis=style.axis()))

    return drawing


def line_keys(shades: Mapping[float, str], spell: Callable[[float], str] = number) -> list[Line2D]:
    """Key entries for lines that differ in shade; if there are more than nine, nine from first to last."""
    values = list(shades)
    shown = [values[index] for index in scales.evenly(len(values), MOST_KEYS)]
    return [Line2D([], [], color=shades[value], label=spell(value)) for value in shown]


def svg(figure: Drawing, name: str) -> str:
    """Render a figure as one ``<svg>`` element; its ids begin with ``name``, so that several can share a page."""
    texts_by_id = {f"marks-{number}": points.drawn_texts() for number, points in enumerate(figure.points)}
    for group_id, points in zip(texts_by_id, figure.points, strict=True):
        points.line.set_gid(group_id)

    def with_texts(group: re.Match[str]) -> str:
        texts = iter(texts_by_id[group[1]])
        return re.sub("<use ", lambda _: f'<use data-hover="{_attribute(next(texts))}" ', group[0])

    with style.drawn_for(style.page()), io.StringIO() as file:
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn = file.getvalue()
    drawn = re.sub(r'<g id="(marks-\d+)">.*?(?=<g id="|\Z)', with_texts, drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r'<g id="(key|sample)-([0-9a-f]+)"', r'<g class="\1" data-colour="#\2"', drawn)
    drawn = re.sub(r'(<g) id="[^"]*"', r"\1", drawn)  # nothing refers to groups
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
    return re.sub(r'(?<= d=")[^"]+', _shorten, re.sub(r"\n +", "\n", drawn))


def _attribute(text: str) -> str:
    """Plain text escaped as the value of an attribute; line breaks are kept, in HTML and in XML."""
    return escape(printable(text)).replace("\n", "&#10;")


def png(figure: Drawing, dpi: int) -> bytes:
    """Render a figure as a PNG."""
    with style.drawn_for(style.page()), io.BytesIO() as picture:
        figure.savefig(picture, format="png", dpi=dpi)
        return picture.getvalue()


def save(figure: Drawing, path: Path, *, within: Path | None = None) -> None:
    """Write a figure as a PDF with text as text, or as a PNG, by the suffix of ``path``; see ``files.atomic_write``.

    Raises:
        RequestError: the file cannot be written.
    """
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else {}
    with style.drawn_for(style.page()), files.atomic_write(path, within=within) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=PNG_DPI, metadata=metadata)


def _shorten(path: re.Match[str]) -> str:
    """Round a path to a hundredth of a point, or to a tenth if it has many corners; both are finer than print."""
    digits = 1 if path[0].count("L") > MOST_FINE_CORNERS else 2
    rounded = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.{digits}f}", path[0])
    return re.sub(r"\s*([A-Zz])\s*", r"\1", rounded).strip()
