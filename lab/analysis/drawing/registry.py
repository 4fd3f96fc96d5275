"""The registry of figures, and what all of them do: judge the runs, and mark a figure of incomplete sweeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import pandas as pd

from lab.analysis.curves import points
from lab.analysis.grouping import ways_to_grow
from lab.analysis.rendering import layout
from lab.analysis.rendering.layout import Drawing, Sheet
from lab.analysis.sensitivity import WINDOW, Window, judge
from lab.core.errors import RequestError
from lab.core.registry import Registry
from lab.records.store import Records

DrawFigure = Callable[..., Drawing]
FIGURES: Registry[DrawFigure] = Registry("figure", "figures")


class NothingToDrawError(RequestError):
    """Raised where records hold nothing that a figure shows; a report leaves the figure out."""


def figure(name: str, *, over_window: bool = False) -> Callable[[Callable[..., Sheet]], DrawFigure]:
    """Decorator: register a function that draws records as the figure ``name``; its docstring begins the caption.

    The function gets the records and their runs, ``judge(points)`` regrouped by ``ways_to_grow``, and returns a sheet.
    With ``over_window`` it gets the window of learning rates of the sensitivity that it draws, too. The registered
    function returns the finished figure. It takes the runs as an optional second argument, so that a caller of many
    figures judges them once, and the window as an optional third one. If runs are missing, it says so above the panels.
    The docstring says what is always in the figure. What is there for some records only has its sentence where it is
    drawn: ``Sheet.explain``.

    Raises:
        NothingToDrawError: no run ended, or the function finds nothing to draw.
    """

    def register(draw: Callable[..., Sheet]) -> DrawFigure:
        @layout.styled
        @wraps(draw)
        def drawing(records: Records, runs: pd.DataFrame | None = None, window: Window = WINDOW) -> Sheet:
            runs = judge(points(records.runs)) if runs is None else runs
            if runs.empty:
                raise NothingToDrawError("nothing to draw: no run ended")
            sheet = draw(records, ways_to_grow(records.runs, runs), *[window] * over_window)
            ended, expected = run_counts(records.runs, runs)
            if ended < expected:
                sheet.headline = f"partial: {ended} of {expected} runs"
            return sheet

        FIGURES.register(name)(drawing)
        return drawing

    return register


def run_counts(cards: pd.DataFrame, runs: pd.DataFrame) -> tuple[int, int]:
    """How many runs ended, and how many would have, had none failed and every curve the full grid of its arm.

    The full grid is every learning rate of the arm, for every seed.
    """
    lrs = runs.groupby("arm")["lr"].nunique()
    curves = runs.groupby("arm")["curve"].nunique()
    full_grid = int((lrs * curves).sum()) * runs["seed"].nunique()
    return len(runs), max(full_grid, len(runs) + int((cards["status"] == "failed").sum()))
