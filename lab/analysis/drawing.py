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
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
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
FATES = {"unstable": "x", "diverged": "^"}
FATE_LOOK: dict[str, Any] = {"markersize": 7, "markeredgewidth": 1.6, "fillstyle": "none"}
REFERENCES = {"loss_at_init": ("at initialization", (0, (1, 1.5))), "loss_bigram": ("bigram model", (0, (5, 2)))}
INK = "#444444"
MOST_KEYS = 9


def shades(values: Iterable[float], colours: str) -> dict[float, str]:
    """Each value, in order, to a shade from dark to light of a sequential map; its palest end is left out."""
    ordered = sorted(set(values))
    picked = matplotlib.colormaps[colours](np.linspace(0, 0.78, max(len(ordered), 2)))
    return dict(zip(ordered, map(to_hex, picked), strict=False))


def literal(label: object, width: int) -> str:
    """A label as it is, wrapped: matplotlib finds no mathematics, no unknown letter and no leave to hide it."""
    visible = str(label).encode("unicode_escape").decode().replace("$", r"\$")
    return textwrap.fill(f" {visible}" if visible.startswith("_") else visible, width, drop_whitespace=False)


def canvas(columns: int, height: float) -> Figure:
    """An empty figure, ``height`` inches high and wide enough for so many panels and the keys at their right."""
    wide = {1: 4.2, 2: 5.8}.get(columns, 2.4 * columns)
    return Figure(figsize=(wide + 1.6, height), layout="constrained")


def line_keys(shades: Mapping[float, str], spell: Callable[[float], str]) -> list[Line2D]:
    """Entries for lines told apart by shade; of very many, a few from first to last."""
    values = list(shades)
    shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_KEYS)).round().astype(int))
    return [Line2D([], [], color=shades[values[place]], label=spell(values[place])) for place in shown]


def fate_keys() -> list[Line2D]:
    """Entries for the marks of lost runs."""
    return [
        Line2D([], [], linestyle="", color=INK, marker=mark, label=fate, **FATE_LOOK) for fate, mark in FATES.items()
    ]


def reference_keys(axes: Axes) -> list[Line2D]:
    """Entries for the thin lines, as far as they are in view."""
    low, high = axes.get_ylim()
    names = [name for name, _ in REFERENCES.values()]
    return [line for line in axes.lines if line.get_label() in names and low <= np.max(line.get_ydata()) <= high]


def beside(axes: Axes, handles: Sequence[Any], title: str = "", lower: bool = False) -> None:
    """A key at the right of a panel, from its top down or standing on its bottom."""
    look: dict[str, Any] = {"borderaxespad": 0, "handlelength": 1.8, "alignment": "left", "title": title}
    look |= {"loc": "lower left" if lower else "upper left", "bbox_to_anchor": (1.02, 0.0 if lower else 1.0)}
    legend = Legend(axes, handles, [handle.get_label() for handle in handles], **look)
    axes.add_artist(legend)
    legend.set_clip_on(False)  # else the layout leaves no room for what lies beside the panel


def svg(figure: Figure, name: str) -> str:
    """The figure as one ``<svg>`` element; its ids begin with ``name``, so that several can share a page."""
    with matplotlib.rc_context(STYLE), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn = text.getvalue()
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawn[drawn.index("<svg") :])
