"""Style of figures: fonts, colours safe for colour-blind readers, layout in inches, keys, reproducible SVG."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titley": 1.0,  # fixed, since matplotlib would search every title's height
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "lab",
}
styled = matplotlib.rc_context(STYLE)

# Okabe & Ito 2008, without yellow, which is invisible on white.
ARM_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ARM_MARKS = ("o", "s", "^", "D", "v", "P", "X")
SIZE_SHADES, LR_SHADES = "viridis", "plasma"
OUTCOMES = {"unstable": "x", "diverged": "^"}
OUTCOME_LOOK: dict[str, Any] = {"markersize": 7, "markeredgewidth": 1.6, "fillstyle": "none"}
REFERENCES = {"loss_at_init": ("at initialization", (0, (1, 1.5))), "loss_bigram": ("bigram model", (0, (5, 2)))}
INK = "#444444"
MOST_KEYS = 9
LEFT, BETWEEN, KEYS = 1.0, 0.2, 2.3  # inches: left of all panels, between two panels, right of all panels
MOST_COLUMNS = 4
MOST_FINE_CORNERS = 15  # shapes with more corners are rounded to fewer digits


def shades(values: Iterable[float], colours: str) -> dict[Any, str]:
    """Map sorted values to shades of a sequential colour map, dark to light, without its palest end."""
    ordered = sorted(set(values))
    spaced = matplotlib.colormaps[colours](np.linspace(0, 0.78, max(len(ordered), 2)))
    return dict(zip(ordered, map(to_hex, spaced), strict=False))


def literal(label: object, width: int) -> str:
    """Wrap a label and escape what matplotlib would take for mathematics, cannot draw, or would hide."""
    escaped = str(label).encode("unicode_escape").decode().replace("$", r"\$")
    escaped = re.sub(rf"\S{{{width + 1},}}", lambda word: word[0].replace("=", "= "), escaped)
    return textwrap.fill(f" {escaped}" if escaped.startswith("_") else escaped, width, drop_whitespace=False)


def columns_for(panels: int) -> int:
    """Number of columns for so many panels: at most four, with rows as full as possible."""
    return -(-panels // -(-panels // MOST_COLUMNS))


class Sheet:
    """A figure with a grid of cells for panels, counted from the upper left, and a right margin for keys.

    Cells are given in inches, since a layout engine would draw every figure several times.
    """

    def __init__(self, columns: int, rows: Sequence[tuple[float, float]], headroom: float = 0.4) -> None:
        """Each of ``rows`` is a height and the space below it; ``headroom`` is the space above the first. In inches."""
        self.column_width = {1: 3.7, 2: 2.8, 3: 2.35}.get(columns, 1.75)
        self.rows, self.headroom = list(rows), headroom
        width = LEFT + columns * (self.column_width + BETWEEN) - BETWEEN + KEYS
        self.figure = Figure(figsize=(width, headroom + sum(map(sum, self.rows))))

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
            gap: inches kept free at the left of the cell, for labels.
            **shared: ``sharex`` and ``sharey``, as in matplotlib.
        """
        width, height = self.figure.get_size_inches()
        x = LEFT + column * (self.column_width + BETWEEN)
        y = height - self.headroom - sum(map(sum, self.rows[:row])) - self.rows[row][0]
        panel_width = columns * (self.column_width + BETWEEN) - BETWEEN
        return self.figure.add_axes(
            ((x + gap) / width, y / height, (panel_width - gap) / width, self.rows[row][0] / height), **shared
        )

    def label_rows(self, first: int, last: int, text: str) -> None:
        """Write text upwards at the far left of rows ``first`` to ``last``."""
        width, height = self.figure.get_size_inches()
        above = [self.headroom + sum(map(sum, self.rows[:row])) for row in (first, last)]
        middle = 1 - (above[0] + above[1] + self.rows[last][0]) / 2 / height
        self.figure.text(0.06 / width, middle, text, rotation=90, va="center", weight="bold", size=8)

    def keys(self, *groups: tuple[str, Sequence[Any]], row: int = 0) -> None:
        """Draw titled groups of key entries in the right margin, one below the other, from the top of this row down."""
        handles = []
        for title, entries in groups:
            heading = [Line2D([], [], linestyle="", label=f"{title}:")] if title and entries else []
            handles += [*heading, *entries]
        width, height = self.figure.get_size_inches()
        corner = (1 - (KEYS - 0.12) / width, 1 - (self.headroom + sum(map(sum, self.rows[:row]))) / height)
        look: dict[str, Any] = {"borderaxespad": 0, "handlelength": 1.7, "alignment": "left", "labelspacing": 0.35}
        look |= {"loc": "upper left", "bbox_to_anchor": corner}
        self.figure.legend(handles, [handle.get_label() for handle in handles], **look)


def line_keys(shades: Mapping[float, str], spell: Callable[[float], str]) -> list[Line2D]:
    """Key entries for lines told apart by shade; of more than nine, nine from first to last."""
    values = list(shades)
    shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_KEYS)).round().astype(int))
    return [Line2D([], [], color=shades[values[index]], label=spell(values[index])) for index in shown]


def outcome_keys() -> list[Line2D]:
    """Key entries for the marks of unstable and diverged runs."""
    return [
        Line2D([], [], linestyle="", color=INK, marker=mark, label=outcome, **OUTCOME_LOOK)
        for outcome, mark in OUTCOMES.items()
    ]


def reference_keys(axes: Axes) -> list[Line2D]:
    """Key entries for the reference lines that are in view."""
    low, high = axes.get_ylim()
    names = [name for name, _ in REFERENCES.values()]
    return [line for line in axes.lines if line.get_label() in names and low <= np.max(line.get_ydata()) <= high]


def svg(figure: Figure, name: str) -> str:
    """Render a figure as one ``<svg>`` element; its ids begin with ``name``, so that several can share a page."""
    for axes in figure.axes:
        _draw_grid(axes)
    with matplotlib.rc_context(STYLE), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn = text.getvalue()
    drawn = re.sub(r'(<g) id="[^"]*"', r"\1", drawn[drawn.index("<svg") :])  # nothing refers to groups
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
    return re.sub(r'(?<= d=")[^"]+', _shorten, re.sub(r"\n +", "\n", drawn))


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
        look = {"colors": STYLE["grid.color"], "linewidths": STYLE["grid.linewidth"], "zorder": 0.5}
        axes.add_collection(LineCollection(lines, transform=transform, **look), autolim=False)
        axis.set_visible(axis.get_tick_params().get(labels, True) or bool(axis.get_label_text()))


def _shorten(path: re.Match[str]) -> str:
    """Round a path to a hundredth of a point, one of many corners to a tenth; both are finer than print."""
    digits = 1 if path[0].count("L") > MOST_FINE_CORNERS else 2
    rounded = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.{digits}f}", path[0])
    return re.sub(r"\s*([A-Zz])\s*", r"\1", rounded).strip()
