"""The report of a sweep that is still training: drawn when the first seed is complete, and again after each other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core.errors import RequestError
from lab.sweeping.local_jobs import run_jobs

if TYPE_CHECKING:
    from lab.sweeping.planner import Point

# Seconds of training that must be left for a growing report to be drawn; drawing one takes about as long.
WORTH_DRAWING = 15.0


class GrowingReport:
    """Draws the report of the complete seeds in a process of its own, one at a time, while the sweep goes on.

    Args:
        folder: the results folder.
        requested: all points of the sweep.
        fleets: the points that are to be trained, packed into fleets.
    """

    def __init__(self, folder: Path, requested: Sequence[Point], fleets: Sequence[Sequence[Point]]) -> None:
        self.folder, self.requested = folder, requested
        self.fleets_of = {point.config.seed: set[int]() for point in requested}
        for index, fleet in enumerate(fleets):
            for point in fleet:
                self.fleets_of[point.config.seed].add(index)
        self.drawn = len(self.complete(set()))
        self.drawing: threading.Thread | None = None
        self.over = threading.Event()
        self.line = ""

    def complete(self, ended: set[int]) -> set[Any]:
        """Seeds all of whose runs are recorded once these fleets have ended."""
        return {seed for seed, fleets in self.fleets_of.items() if fleets <= ended}

    def update(self, ended: set[int], seconds_left: float | None) -> str:
        """Begin to draw if more seeds are complete and enough training is left; returns a line once it is drawn."""
        if self.drawing and not self.drawing.is_alive():
            self.drawing, line = None, self.line
            return line
        seeds = self.complete(ended)
        is_worth_it = self.drawn < len(seeds) < len(self.fleets_of) and (seconds_left or 0) >= WORTH_DRAWING
        if self.drawing or not is_worth_it:
            return ""
        self.drawn = len(seeds)
        ids = frozenset(point.id for point in self.requested if point.config.seed in seeds)
        self.drawing = threading.Thread(target=self._draw, args=(ids, len(seeds)), daemon=True)
        self.drawing.start()
        return ""

    def close(self) -> None:
        """Stop drawing: the report of all runs follows, or the sweep was interrupted."""
        self.over.set()
        if self.drawing:
            self.drawing.join()

    def _draw(self, ids: frozenset[str], seeds: int) -> None:
        growth = f"{seeds} of {len(self.fleets_of)} seeds"
        ends = run_jobs(draw, [(self.folder, ids, growth)], [None], stop_requested=self.over.is_set)
        self.line = f"report of {growth}: {self.folder / 'report.html'}" if ends and ends[0].answer else ""


def draw(folder: Path, ids: frozenset[str], growth: str) -> bool:
    """Write a report of these runs that says it is not final; returns whether any of them can be reported."""
    from lab.report import build

    with suppress(RequestError):  # all of them failed
        build.make_growing_report(folder, ids, growth)
        return True
    return False
