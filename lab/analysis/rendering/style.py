"""How figures look: one style, colours for colour-blind eyes, SVG that is the same bytes each time."""

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
    "axes.titley": 1.0,  # or every title would be laid out to keep clear of ticks above panels, which have none
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

# Okabe & Ito 2008, without the yellow that white paper swallows; each with a mark of its own.
ARM_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ARM_MARKS = ("o", "s", "^", "D", "v", "P", "X")
SIZE_SHADES, LR_SHADES = "viridis", "plasma"
OUTCOMES = {"unstable": "x", "diverged": "^"}
OUTCOME_LOOK: dict[str, Any] = {"markersize": 7, "markeredgewidth": 1.6, "fillstyle": "none"}
REFERENCES = {"loss_at_init": ("at initialization", (0, (1, 1.5))), "loss_bigram": ("bigram model", (0, (5, 2)))}
INK = "#444444"
MOST_KEYS = 9
LEFT, BETWEEN, KEYS = 1.0, 0.2, 2.3  # inches: at the left of all panels, between two, at their right
MOST_COLUMNS = 4
MOST_CORNERS = 15  # of a shape that is drawn with care


def shades(values: Iterable[float], colours: str) -> dict[Any, str]:
    """Each value, in order, to a shade from dark to light of a sequential map; its palest end is left out."""
    ordered = sorted(set(values))
    picked = matplotlib.colormaps[colours](np.linspace(0, 0.78, max(len(ordered), 2)))
    return dict(zip(ordered, map(to_hex, picked), strict=False))


def literal(label: object, width: int) -> str:
    """A label as it is, wrapped: matplotlib finds no mathematics, no unknown letter and no leave to hide it."""
    visible = str(label).encode("unicode_escape").decode().replace("$", r"\$")
    visible = re.sub(rf"\S{{{width + 1},}}", lambda word: word[0].replace("=", "= "), visible)
    return textwrap.fill(f" {visible}" if visible.startswith("_") else visible, width, drop_whitespace=False)


def columns_for(panels: int) -> int:
    """How many of so many panels stand side by side: at most four, in rows as full as can be."""
    return -(-panels // -(-panels // MOST_COLUMNS))


class Sheet:
    """An empty figure with places for panels, counted from the upper left, and a margin at the right for keys.

    Places are measured in inches and not found by a layout engine, which would draw every figure several times over.
    """

    def __init__(self, columns: int, rows: Sequence[tuple[float, float]], headroom: float = 0.4) -> None:
        """``rows`` are pairs of a height and the space below it; ``headroom`` is for titles above the first."""
        self.wide = {1: 3.7, 2: 2.8, 3: 2.35}.get(columns, 1.75)
        self.rows, self.headroom = list(rows), headroom
        width = LEFT + columns * (self.wide + BETWEEN) - BETWEEN + KEYS
        self.figure = Figure(figsize=(width, headroom + sum(map(sum, self.rows))))

    @property
    def first(self) -> Axes | None:
        """The panel made before all others."""
        return self.figure.axes[0] if self.figure.axes else None

    def panel(self, row: int, column: int, columns: int = 1, gap: float = 0.0, **shared: Any) -> Axes:
        """Axes in this place, over so many columns, ``gap`` inches of it left free for labels at their left.

        ``sharex`` and ``sharey`` are as matplotlib has them.
        """
        width, height = self.figure.get_size_inches()
        x = LEFT + column * (self.wide + BETWEEN)
        y = height - self.headroom - sum(map(sum, self.rows[:row])) - self.rows[row][0]
        wide = columns * (self.wide + BETWEEN) - BETWEEN
        return self.figure.add_axes(
            ((x + gap) / width, y / height, (wide - gap) / width, self.rows[row][0] / height), **shared
        )

    def beside(self, first: int, last: int, text: str) -> None:
        """Words at the far left of these rows, upwards."""
        width, height = self.figure.get_size_inches()
        above = [self.headroom + sum(map(sum, self.rows[:row])) for row in (first, last)]
        middle = 1 - (above[0] + above[1] + self.rows[last][0]) / 2 / height
        self.figure.text(0.06 / width, middle, text, rotation=90, va="center", weight="bold", size=8)

    def keys(self, *groups: tuple[str, Sequence[Any]], row: int = 0) -> None:
        """Named groups of entries in the right margin, one below the other, from the top of this row down."""
        handles = []
        for title, some in groups:
            handles += [Line2D([], [], linestyle="", label=f"{title}:"), *some] if title and some else list(some)
        width, height = self.figure.get_size_inches()
        at = (1 - (KEYS - 0.12) / width, 1 - (self.headroom + sum(map(sum, self.rows[:row]))) / height)
        look: dict[str, Any] = {"borderaxespad": 0, "handlelength": 1.7, "alignment": "left", "labelspacing": 0.35}
        look |= {"loc": "upper left", "bbox_to_anchor": at}
        self.figure.legend(handles, [handle.get_label() for handle in handles], **look)


def line_keys(shades: Mapping[float, str], spell: Callable[[float], str]) -> list[Line2D]:
    """Entries for lines told apart by shade; of very many, a few from first to last."""
    values = list(shades)
    shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_KEYS)).round().astype(int))
    return [Line2D([], [], color=shades[values[place]], label=spell(values[place])) for place in shown]


def outcome_keys() -> list[Line2D]:
    """Entries for the marks of lost runs."""
    return [
        Line2D([], [], linestyle="", color=INK, marker=mark, label=fate, **OUTCOME_LOOK)
        for fate, mark in OUTCOMES.items()
    ]


def reference_keys(axes: Axes) -> list[Line2D]:
    """Entries for the thin lines, as far as they are in view."""
    low, high = axes.get_ylim()
    names = [name for name, _ in REFERENCES.values()]
    return [line for line in axes.lines if line.get_label() in names and low <= np.max(line.get_ydata()) <= high]


def svg(figure: Figure, name: str) -> str:
    """The figure as one ``<svg>`` element; its ids begin with ``name``, so that several can share a page."""
    for axes in figure.axes:
        _rule(axes)
    with matplotlib.rc_context(STYLE), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn = text.getvalue()
    drawn = re.sub(r'(<g) id="[^"]*"', r"\1", drawn[drawn.index("<svg") :])  # no link leads to a group
    drawn = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn)
    return re.sub(r'(?<= d=")[^"]+', _terse, re.sub(r"\n +", "\n", drawn))


def _rule(axes: Axes) -> None:
    """Grid lines as one thing each way, and ticks where there are labels only: each tick is five, and takes long."""
    ways = [
        (axes.xaxis, "labelbottom", axes.get_xaxis_transform()),
        (axes.yaxis, "labelleft", axes.get_yaxis_transform()),
    ]
    for axis, labels, where in ways:
        low, high = sorted(axis.get_view_interval())
        at = [float(place) for place in axis.get_majorticklocs() if low <= place <= high]
        lines = [[(x, 0.0), (x, 1.0)] if axis is axes.xaxis else [(0.0, x), (1.0, x)] for x in at]
        look = {"colors": STYLE["grid.color"], "linewidths": STYLE["grid.linewidth"], "zorder": 0.5}
        axes.add_collection(LineCollection(lines, transform=where, **look), autolim=False)
        axis.set_visible(axis.get_tick_params().get(labels, True) or bool(axis.get_label_text()))


def _terse(path: re.Match[str]) -> str:
    """A path to a hundredth of a point, a curve of many corners to a tenth: no eye or press is finer."""
    digits = 1 if path[0].count("L") > MOST_CORNERS else 2
    rounded = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.{digits}f}", path[0])
    return re.sub(r"\s*([A-Zz])\s*", r"\1", rounded).strip()
