"""What a reader of a figure would complain of: texts over one another or cut off, words for what is not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon
from matplotlib.text import Text

from lab.analysis.rendering import style
from lab.analysis.rendering.layout import Drawing

SLACK = 1.0  # pixels by which boxes of texts may touch


def complaints(figure: Drawing) -> list[str]:
    """Everything wrong with a figure, a sentence each."""
    return [*_misplaced(figure), *_absent(figure)]


def _misplaced(figure: Drawing) -> Iterator[str]:
    with style.drawn_for(style.page()):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        texts = [text for text in _texts(figure) if text.get_visible() and text.get_text().strip()]
        boxes = np.array([text.get_window_extent(renderer).extents for text in texts])
    width, height = figure.get_size_inches() * figure.dpi
    for text, (left, bottom, right, top) in zip(texts, boxes, strict=True):
        if left < 0 or bottom < 0 or right > width or top > height:
            yield f"{text.get_text()!r} is cut off"
    low, high = boxes[:, :2] + SLACK, boxes[:, 2:] - SLACK
    meet = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(axis=-1)
    for first, second in np.argwhere(np.triu(meet, 1)):
        yield f"{texts[first].get_text()!r} lies over {texts[second].get_text()!r}"


def _texts(figure: Drawing) -> Iterator[Text]:
    yield from figure.texts
    for axes in figure.axes:
        yield from (axes.title, axes._left_title, axes._right_title, *axes.texts)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_visible():
                yield axis.label
                yield from (tick.label1 for tick in axis._update_ticks())


def _lines(figure: Drawing) -> list[Line2D]:
    """The lines of panels that are in view."""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    return [line for line in lines if _in_view(line)]


def _in_view(line: Line2D) -> bool:
    is_upright = line.get_transform() == line.axes.get_xaxis_transform()
    low, high = sorted(line.axes.get_xlim() if is_upright else line.axes.get_ylim())
    values = np.asarray(line.get_xdata() if is_upright else line.get_ydata(), dtype=float)
    return bool(((values >= low) & (values <= high)).any())


def _dashes(line: Line2D) -> tuple[float, ...]:
    return tuple(line._unscaled_dash_pattern[1] or ()) if line.get_linestyle() not in ("-", "None", "", " ") else ()


def _has_line(test: Callable[[Line2D], bool]) -> Callable[[Drawing], bool]:
    return lambda figure: any(map(test, _lines(figure)))


def _has_area(kind: type) -> Callable[[Drawing], bool]:
    return lambda figure: any(isinstance(artist, kind) for axes in figure.axes for artist in axes.get_children())


def _has_bars(figure: Drawing) -> bool:
    bars = [each for axes in figure.axes for each in axes.collections if isinstance(each, LineCollection)]
    return any(bar.get_transform() == bar.axes.transData and np.isfinite(bar.get_segments()).all() for bar in bars)


def _is_hollow(line: Line2D) -> bool:
    empty = line.get_markerfacecolor() == "white" or line.get_fillstyle() == "none"
    return line.get_marker() not in ("None", "", "x", "_", "|") and empty


THERE: dict[str, Callable[[Drawing], bool]] = {
    r"\bdashed\b": _has_line(lambda line: len(_dashes(line)) == 2 and _dashes(line)[0] > 1.7),
    r"\bdotted\b": _has_line(lambda line: len(_dashes(line)) == 2 and _dashes(line)[0] <= 1.7),
    r"dots and dashes": _has_line(lambda line: len(_dashes(line)) == 4),
    r"\bcross|^unstable$": _has_line(lambda line: line.get_marker() == "x"),
    r"\btriangle|^diverged$": _has_line(lambda line: line.get_marker() == "^" and line.get_fillstyle() == "none"),
    r"\bhollow\b|^held out$": _has_line(_is_hollow),
    r"\bbands?\b|^range of|^middle 80": _has_area(Polygon),
    r"\bshaded areas?\b": _has_area(PolyCollection),
    r"\bbars?\b": _has_bars,
    r"\bshort line\b": _has_line(lambda line: line.get_marker() in ("_", "|")),
    r"\bleft edge\b": _has_line(lambda line: line.get_marker() in ("o", "x", "^") and len(line.get_xdata()) == 1),
    r"^bigram model$": _has_line(lambda line: line.get_label() == "bigram model"),
    r"^at initialization$": _has_line(lambda line: line.get_label() == "at initialization"),
    r"^Adam's epsilon$": _has_line(lambda line: line.get_label() == "Adam's epsilon" or _dashes(line) == (1, 1.5)),
}
# What is drawn must also be told of.
TOLD = {
    "cross": r"\bcross|^unstable$",
    "triangle": r"\btriangle|^diverged$",
    "band": r"\bbands?\b|^range of|^middle 80",
}


def _absent(figure: Drawing) -> Iterator[str]:
    keys = [text.get_text().replace("\n", " ") for text in figure.key_texts]
    for words, is_there in THERE.items():
        for told in (figure.caption, *keys):
            if re.search(words, told, re.IGNORECASE) and not is_there(figure):
                yield f"{told!r} names what is not there"
    for word, words in TOLD.items():
        if THERE[words](figure) and word not in figure.caption.lower():
            yield f"no word on a {word}"
