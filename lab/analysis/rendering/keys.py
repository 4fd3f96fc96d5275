"""Say which line is which: names at the ends of lines where there is room, and keys below the panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from lab.analysis.rendering import scales, style

# In multiples of the size of text: the sample before a text, the gap after it and the gap to the next key; and from one
# line of keys to the next.
SAMPLE, AFTER_SAMPLE, BETWEEN, KEY_LINE = 1.7, 0.5, 1.2, 1.5
# Lines are named at their ends if they are few, their names short and their ends not far from where a name has room.
MOST_NAMED, LONGEST_NAME, FARTHEST, GAP = 6, 4.5, 1.0, 0.4
# The ids of SVG groups of texts of keys, and of their samples, begin so; the colour of what they name follows, which a
# page can hide.
KEY_ID, SAMPLE_ID = "key-", "sample-"


class Key(NamedTuple):
    """A key: where it begins in its line (inches), its text, and an artist like the one that it names, or None."""

    left: float
    text: str
    entry: Any


def in_lines(groups: Sequence[tuple[str, Sequence[Any]]], width: float) -> list[list[Key]]:
    """Arrange titled groups of entries in lines no wider than ``width`` inches; each titled group begins a line."""
    em, size, lines, end = style.em(), style.page().size * style.SMALL, list[list[Key]](), 0.0
    for title, entries in groups:
        heading = [(f"{title}:", None)] if title else []
        samples = [(entry.get_label(), entry if _can_be_seen(entry) else None) for entry in entries]
        for position, (label, entry) in enumerate([*heading, *samples]):
            before = (SAMPLE + AFTER_SAMPLE) * em if entry else 0.0
            text = style.wrapped(label, width - before)
            needed = before + max(style.text_width(line, size) for line in text.split("\n"))
            if not lines or end + needed > width or (heading and not position):
                lines.append([])
                end = 0.0
            lines[-1].append(Key(end, text, entry))
            end += needed + BETWEEN * em
    return lines


def height(lines: Sequence[Sequence[Key]]) -> float:
    """Height of lines of keys, in inches."""
    return sum(map(_line_height, lines))


def _line_height(line: Sequence[Key]) -> float:
    return KEY_LINE * style.SMALL * style.em() * max(key.text.count("\n") + 1 for key in line)


def draw(figure: Figure, lines: Sequence[Sequence[Key]], left: float, top: float) -> list[Text]:
    """Draw lines of keys from the upper left corner (inches) down; returns their texts."""
    em, texts, inches = style.em(), list[Text](), figure.dpi_scale_trans
    for line in lines:
        middle = top - _line_height(line) / 2
        for key in line:
            x = left + key.left
            if key.entry:
                figure.add_artist(_sample(key.entry, x, middle)).set_transform(inches)
                x += (SAMPLE + AFTER_SAMPLE) * em
            align = "center" if "\n" in key.text else "center_baseline"
            text = figure.text(x, middle, key.text, size=style.page().size * style.SMALL, va=align)
            text.set_transform(inches)
            text.set_gid(colour_id(KEY_ID, key.entry) if key.entry else None)
            texts.append(text)
        top -= _line_height(line)
    return texts


def _sample(entry: Any, left: float, middle: float) -> Any:
    """A short line, or a patch, that looks like the entry."""
    width, thick = SAMPLE * style.em(), 0.6 * style.em()
    if isinstance(entry, Line2D):
        sample: Any = Line2D([left, left + width / 2, left + width], [middle] * 3)
        sample.update_from(entry)
        sample.set_markevery([1])
    else:
        sample = Rectangle((left, middle - thick / 2), width, thick)
        sample.update_from(entry)
    sample.set_gid(colour_id(SAMPLE_ID, entry))
    sample.set_clip_path(None)  # the panel of its entry would clip it
    sample.set_clip_box(None)
    return sample


def _can_be_seen(entry: Any) -> bool:
    return not isinstance(entry, Line2D) or (entry.get_linestyle(), entry.get_marker()) != ("None", "None")


def is_key(text: Text) -> bool:
    """Whether a text names something by its colour."""
    return str(text.get_gid()).startswith(KEY_ID)


def colour_id(kind: str, entry: Any) -> str | None:
    """The id of a group that tells a colour; None for what has no colour of its own, such as the marks of outcomes."""
    colour = to_hex(entry.get_color() if isinstance(entry, Line2D) else entry.get_facecolor())
    return None if colour == style.INK else f"{kind}{colour.removeprefix('#')}"


def name_ends(axes: Axes, height: float, entries: Sequence[Any]) -> list[Text]:
    """Write the labels of entries at the ends of their lines, right of a panel of this height in inches.

    Returns:
        The texts; none if some label is long, some line has no end there, or their ends lie too near one another.
    """
    em, size = style.em(), style.page().size * style.SMALL
    labels = [style.literal(entry.get_label()) for entry in entries]
    if len(labels) > MOST_NAMED or max(style.text_width(label, size) for label in labels) > LONGEST_NAME * em:
        return []
    ends = np.array([_end(axes, entry) for entry in entries]) * height
    order = np.argsort(ends)
    places = np.array(scales.spread(list(ends[order]), style.SMALL * em))
    if not (np.abs(places - ends[order]) <= FARTHEST * em).all():  # nor if some end is NaN
        return []
    texts = []
    for index, place in zip(order, places, strict=True):
        entry = entries[index]
        gap = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (GAP * style.page().size, 0)}
        look = {"color": entry.get_color(), "size": size, "va": "center_baseline"}
        text: Text = axes.annotate(labels[index], (1, place / height), **gap, **look)  # type: ignore[arg-type]
        text.set_gid(colour_id(KEY_ID, entry))
        texts.append(text)
    return texts


def _end(axes: Axes, entry: Any) -> float:
    """Height at which the one line of this colour ends at the right, as a share of the panel; NaN without one."""
    if not isinstance(entry, Line2D):
        return np.nan
    lines = [
        line
        for line in axes.get_lines()
        if line.get_color() == entry.get_color() and line.get_linestyle() != "None" and len(line.get_xdata()) > 1  # type: ignore[arg-type]
    ]
    if len(lines) != 1:
        return np.nan
    axes.get_xlim()  # sets the view to what was drawn
    shares = (axes.transData - axes.transAxes).transform(np.asarray(lines[0].get_xydata(), dtype=float))
    shares = shares[np.isfinite(shares).all(axis=1)]
    x, y = shares[np.argmax(shares[:, 0])] if len(shares) else (np.nan, np.nan)
    return float(y) if x > 0.75 and 0 <= y <= 1 else np.nan
