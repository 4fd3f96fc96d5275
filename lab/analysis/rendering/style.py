"""Style of figures: the page for which they are drawn, fonts, text that fits, colours safe for colour-blind readers."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from lab.analysis.text import LEARNING_RATE, Axis, number, shortened

FONT = "DejaVu Sans"
STYLE: dict[Any, Any] = {
    "font.family": FONT,
    "axes.titley": 1.0,  # fixed, since matplotlib would otherwise search a height for every title
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.bottom": False,  # no marks at ticks, whose grid lines show them
    "ytick.left": False,
    "xtick.major.size": 0,
    "xtick.major.pad": 6,  # keeps the numbers of the x axis below the lowest one of the y axis
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "lab",
    "pdf.fonttype": 42,
}
SMALL = 0.92  # of the size of labels: titles, numbers at ticks and keys
SMALL_TEXTS = ("axes.titlesize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")

# Okabe & Ito 2008 without yellow, which is invisible on white; then purple and brown, which differ from these colours
# as much as these do from one another, also for colour-blind readers.
ARM_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#6A2C91", "#8B5A2B")
ARM_MARKS = ("o", "s", "D", "v", "P", "X", "p")  # none of those of a diverged or unstable run
ARM_DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5, 1, 1.5)), (0, (1, 1)))  # changed when all colours are used
SIZE_SHADES, LR_SHADES = "viridis", "plasma"
INK = "#444444"
DASHED = (0, (4, 2))


# A number with a point or an exponent, and its greatest length in a label.
NUMBER, MOST_DIGITS = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e[-+]\d+)?|e[-+]\d+)(?![\w.])"), 8


class Page(NamedTuple):
    """The page for which figures are drawn: the greatest width in inches, and the size of text in points."""

    width: float
    size: float


# Figures of a report: so narrow that a phone of 420 pixels, which shows them in its width, leaves text 10 pixels high.
SCREEN = Page(5.8, 11.0)
_page: ContextVar[Page] = ContextVar("page", default=SCREEN)
_axis: ContextVar[Axis] = ContextVar("axis", default=LEARNING_RATE)


@contextmanager
def drawn_for(page: Page) -> Iterator[None]:
    """Draw the figures of this block for a page, in the style of the lab."""
    token = _page.set(page)
    small = dict.fromkeys(SMALL_TEXTS, page.size * SMALL)
    sizes = {"font.size": page.size, "axes.labelsize": page.size, "lines.linewidth": 0.14 * page.size}
    try:
        with matplotlib.rc_context(STYLE | sizes | small):
            yield
    finally:
        _page.reset(token)


def page() -> Page:
    """The page for which figures are drawn now."""
    return _page.get()


@contextmanager
def drawn_along(axis: Axis) -> Iterator[None]:
    """Draw the figures of this block for curves along an axis, whose name they show."""
    token = _axis.set(axis)
    try:
        yield
    finally:
        _axis.reset(token)


def axis() -> Axis:
    """The axis along which the curves run that are drawn now."""
    return _axis.get()


def em() -> float:
    """Size of text in inches, the unit of layouts."""
    return page().size / 72


def shades(values: Iterable[float], colours: str) -> dict[Any, str]:
    """Map sorted values to shades of a sequential colour map, dark to light, without its palest end."""
    ordered = sorted(set(values))
    spaced = matplotlib.colormaps[colours](np.linspace(0, 0.74, max(len(ordered), 2)))
    return dict(zip(ordered, map(to_hex, spaced), strict=False))


def literal(label: object) -> str:
    """Escape parts of a label that matplotlib would read as mathematics, cannot draw, or would hide."""
    escaped = _readable(label).replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _readable(label: object) -> str:
    """A label with control characters escaped, and shortened if it or its numbers are long."""
    return shortened(NUMBER.sub(_short, str(label)).encode("unicode_escape").decode())


def _short(found: re.Match[str]) -> str:
    """``0.6666666666666666 -> 0.6667``, ``1e-08 -> 1e-8``."""
    digits = 4 if len(found[0]) > MOST_DIGITS else 6
    return number(float(f"{float(found[0]):.{digits}g}"))


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Width in inches of a line of text of ``size`` points."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(family=FONT, size=size), False)
    return float(width) / 72


def wrapped(label: object, inches: float) -> str:
    """A label escaped as by ``literal``, in lines no wider than ``inches``."""
    return "\n".join(map(literal, broken(_readable(label), inches, page().size * SMALL)))


def broken(text: str, inches: float, size: float) -> list[str]:
    """Lines of a text no wider than ``inches``, broken at spaces and hyphens, and inside words that are too long."""
    for letters in range(len(text), 1, -1):
        lines = textwrap.wrap(text, letters)
        if all(text_width(line, size) <= inches for line in lines):
            return lines
    return list(text)
