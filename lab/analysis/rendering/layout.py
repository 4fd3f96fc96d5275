"""Lay out figures: a sheet of panels in rows with keys beside or below them; write them as SVG, PDF and PNG."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from lab.analysis.rendering import hover, marks, style
from lab.analysis.text import number
from lab.core import files

MOST_KEYS = 9
MOST_COLUMNS = 4
MOST_FINE_CORNERS = 15  # shapes with more corners are rounded to fewer digits
PNG_DPI = 300
# In multiples of the size of text: about the room for labels left of the panels, and for keys beside them; the least
# and the greatest width of a panel; and the width of a page from which keys stand beside the panels.
LABELS, KEYS = 7.0, 13.0
NARROWEST, WIDEST = 9.5, {1: 28.0, 2: 21.0}  # by number of columns
PAGE_OF_KEYS_BESIDE = 42.0
ANY_TEXT = 100.0
PAD = 0.7  # around each panel with its labels
SAMPLE = 2.3  # width of the sample before the text of a key


class Drawing(Figure):
    """A figure with its caption.

    Attributes:
        caption: a title, then paragraphs on everything that the figure shows, and on nothing else.
        points: marks with hover texts.
    """

    caption: str = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.points: list[hover.Points] = []


class Sheet:
    """Rows of panels, with keys at the right or, on a narrow page, below; matplotlib places them.

    The height of the figure follows from the heights of the panels and the text around them.
    """

    def __init__(self, columns: int, heights: Sequence[float], room: float = LABELS) -> None:
        """Heights of panels, by row, and the room for labels at the left are in multiples of the size of text."""
        em = style.em()
        self.columns, self.heights = columns, [height * em for height in heights]
        self.keys_beside = _keys_beside()
        panel_width = min(_widest(columns, room), WIDEST.get(columns, np.inf)) * em
        self.column_width = panel_width - PAD * em
        page_width = (room + KEYS) * em + columns * panel_width if self.keys_beside else style.page().width
        self.engine = ConstrainedLayoutEngine(w_pad=PAD * em / 2, h_pad=PAD * em / 2, wspace=0, hspace=0)
        # Ample room for text until its height is known. Panels have about their final size, on which ticks and titles
        # depend.
        page_height = 2 * sum(self.heights) + ANY_TEXT * em
        self.figure = Drawing(figsize=(page_width, page_height), layout=self.engine)
        place = {"left": room * em / page_width, "right": (room * em + columns * panel_width) / page_width}
        place |= {"bottom": 0.0, "top": sum(self.heights) / page_height, "hspace": 0.0, "wspace": 0.1}
        self.grid = self.figure.add_gridspec(len(heights), columns, height_ratios=heights, **place)
        self.headline = ""
        self._keys: list[tuple[str, list[Any]]] = []
        self._row_of: dict[Axes, int] = {}
        self._notes: list[str] = []
        self._explained: dict[str, str] = {}

    def panel(self, row: int, column: int, columns: int = 1, **shared: Any) -> Axes:
        """Axes in this cell, counted from the upper left, spanning ``columns`` columns.

        ``shared`` may hold ``sharex`` and ``sharey``, as in matplotlib.
        """
        axes: Axes = self.figure.add_subplot(self.grid[row, column : column + columns], **shared)
        self._row_of[axes] = row % len(self.heights)
        return axes

    def keys(self, *groups: tuple[str, Sequence[Any]]) -> None:
        """Draw titled groups of key entries."""
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
        sentences = [*self._notes, *marks.sentences(self.figure, self._explained)]
        self.figure.caption = "\n\n".join([caption, *[" ".join(sentences)] * bool(sentences)])
        self._break_labels()
        legend = self._legend()
        if self.headline:
            self.figure.suptitle(self.headline, x=0.01, ha="left", weight="bold", size=style.page().size)
        self.engine.execute(self.figure)
        if self._break_labels():  # beside long names of rows panels are narrower than planned
            self.engine.execute(self.figure)
        height = self.figure.get_figheight()
        shares = {row: axes.get_position().height for axes, row in self._row_of.items()}
        height += sum(self.heights) - height * sum(shares.values())
        if legend and self.keys_beside:
            height = max(height, legend.get_window_extent().height / self.figure.dpi + PAD * style.em())
        self.figure.set_figheight(height)
        self.engine.execute(self.figure)  # again, since ticks may depend on the height
        self.figure.set_layout_engine(None)
        return self.figure

    def _break_labels(self) -> bool:
        """Break labels of axes that are longer than their panel, and reach its neighbour; return whether any was."""
        size, (width, height), any_broken = style.page().size, self.figure.get_size_inches(), False
        for axes in self._row_of:
            place = axes.get_position()
            rooms = {axes.xaxis: place.width * width + style.em(), axes.yaxis: place.height * height + PAD * style.em()}
            for axis, room in rooms.items():
                label = axis.get_label_text()
                text = "\n".join(chain(*(style.broken(line, room, size) for line in label.split("\n"))))
                axis.set_label_text(text)
                any_broken |= text != label
        return any_broken

    def _legend(self) -> Legend | None:
        """All key entries, each group below its title."""
        entries = list[Any]()
        for title, group in [*self._keys, ("", marks.keys(self.figure))]:
            entries += [Line2D([], [], linestyle="", label=f"{title}:")] * bool(title) + group
        if not entries:
            return None
        em, size = style.em(), style.page().size * style.SMALL
        width = KEYS * em if self.keys_beside else self.figure.get_figwidth() - em
        labels = [style.wrapped(entry.get_label(), width - SAMPLE * em) for entry in entries]
        widest = max(style.text_width(line, size) for label in labels for line in label.split("\n"))
        columns = 1 if self.keys_beside else max(1, int(width / (widest + (SAMPLE + 1.0) * em)))
        look: dict[str, Any] = {"handlelength": SAMPLE - 0.6, "handletextpad": 0.6, "labelspacing": 0.35}
        look |= {"borderaxespad": 0.35, "borderpad": 0.2, "columnspacing": 1.0}
        look |= {"loc": "outside right upper" if self.keys_beside else "outside lower left", "ncols": columns}
        legend: Legend = self.figure.legend(handles=entries, labels=labels, **look)
        return legend


def _keys_beside() -> bool:
    return style.page().width / style.em() >= PAGE_OF_KEYS_BESIDE


def _widest(columns: int, room: float) -> float:
    """Width that each of ``columns`` columns may have on the page, in multiples of the size of text."""
    return (style.page().width / style.em() - room - KEYS * _keys_beside()) / columns


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
    made = []
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
        made.append(panels)
    return sheet, made


def styled(draw: Callable[..., Sheet]) -> Callable[..., Drawing]:
    """Decorator: draw a sheet in the style of the lab and finish it; the docstring is its caption."""

    @wraps(draw)
    def drawing(*arguments: Any) -> Drawing:
        with style.drawn_for(style.page()):
            return draw(*arguments).finish(inspect.getdoc(draw) or "")

    return drawing


def line_keys(shades: Mapping[float, str], spell: Callable[[float], str] = number) -> list[Line2D]:
    """Key entries for lines that differ in shade; if there are more than nine, nine from first to last."""
    values = list(shades)
    shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_KEYS)).round().astype(int))
    return [Line2D([], [], color=shades[values[index]], label=spell(values[index])) for index in shown]


def svg(figure: Drawing, name: str) -> str:
    """Render a figure as one ``<svg>`` element; its ids begin with ``name``, so that several can share a page."""
    for index, points in enumerate(figure.points):
        points.line.set_gid(hover.group_id(index))
    with style.drawn_for(style.page()), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn = text.getvalue()
    drawn = hover.with_texts(drawn[drawn.index("<svg") :], figure.points, 72 * figure.get_figheight())
    drawn = re.sub(r'(<g) id="[^"]*"', r"\1", drawn)  # nothing refers to groups
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
    return re.sub(r'(?<= d=")[^"]+', _shorten, re.sub(r"\n +", "\n", drawn))


def narrow_svg(draw: Callable[[], Drawing], name: str) -> str:
    """Draw a figure for a narrow screen and render it; its ids differ from those of ``svg`` for this name."""
    with style.drawn_for(style.NARROW_SCREEN):
        return svg(draw(), f"{name}-narrow")


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
