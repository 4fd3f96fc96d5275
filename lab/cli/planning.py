"""Display of a sweep that is being planned: a line at once, and a bar if it takes longer."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Generator, Iterable
from typing import TextIO, TypeVar

Tree = TypeVar("Tree")

BAR_AFTER, REDRAW_EVERY, LOG_AFTER = 2.0, 0.1, 10.0  # seconds
BAR_WIDTH = 24  # characters


def show_planning(trees: Iterable[Tree], count: int, file: TextIO | None = None) -> Generator[Tree, None, None]:
    """Yield ``trees``, and meanwhile show on stderr that ``count`` points are planned.

    A terminal shows the line at once, adds a bar after two seconds, and is clear at the end. A log gets one line, after
    ten seconds.
    """
    file = file or sys.stderr
    shows, text = file.isatty(), f"planning {count:,} point{'s' * (count > 1)}"
    due = time.monotonic() + (BAR_AFTER if shows else LOG_AFTER)
    if shows:
        _write(file, text)
    try:
        for done, tree in enumerate(trees, 1):
            yield tree
            now = time.monotonic()
            if now >= due:
                due = now + REDRAW_EVERY if shows else math.inf
                _write(file, f"\r{text} {_bar(done / count)}" if shows else f"{text}\n")
    finally:
        if shows:
            _write(file, "\r\x1b[K")


def _bar(share: float) -> str:
    filled = round(BAR_WIDTH * share)
    return f"{'#' * filled}{'.' * (BAR_WIDTH - filled)} {share:4.0%}"


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()
