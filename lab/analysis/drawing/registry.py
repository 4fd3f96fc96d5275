"""The registry of figures; every registered figure judges the runs first, and is marked if the sweep is incomplete."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import pandas as pd

from lab.analysis.curves import named_axis, points
from lab.analysis.grouping import ways_to_grow
from lab.analysis.rendering import layout, marks, style
from lab.analysis.rendering.layout import Drawing, Sheet
from lab.analysis.sensitivity import WINDOW, Window, judge
from lab.analysis.text import LEARNING_RATE
from lab.core.errors import RequestError
from lab.core.registry import Registry
from lab.records.imported import is_imported
from lab.records.store import Records

DrawFigure = Callable[..., Drawing]
MOST_ARMS = 40  # arms that a figure draws; of more a page has one figure
FIGURES: Registry[DrawFigure] = Registry("figure", "figures")


class NothingToDrawError(RequestError):
    """Raised if the records hold nothing that the figure shows; a report leaves the figure out."""


def figure(name: str, *, over_window: bool = False) -> Callable[[Callable[..., Sheet]], DrawFigure]:
    """Decorator: register a function that draws records as the figure ``name``; its docstring begins the caption.

    In the docstring ``{axis}`` stands for the ``Axis`` along which curves run.

    The decorated function takes the records and their runs (``judge(points)``, regrouped by ``ways_to_grow``), and
    returns a sheet. With ``over_window`` it also takes the window of learning rates of the sensitivity that it draws.
    Its runs are those of the first ``MOST_ARMS`` arms, and the caption says so if there are more.

    The registered function returns the finished figure. Its optional second argument is the table of runs, so that a
    caller of many figures judges the runs once; the optional third one is the window. If runs are missing, a line above
    the panels says so. The docstring describes what is always in the figure; ``Sheet.explain`` adds sentences on parts
    that only some records have.

    Raises:
        NothingToDrawError: no run ended, or the function finds nothing to draw.
    """

    def register(draw: Callable[..., Sheet]) -> DrawFigure:
        @layout.styled
        @wraps(draw)
        def drawing(records: Records, runs: pd.DataFrame | None, window: Window) -> Sheet:
            runs = judge(points(records.runs)) if runs is None else runs
            if runs.empty:
                raise NothingToDrawError("nothing to draw: no run ended")
            arms = runs["arm"].unique()
            shown = runs[runs["arm"].isin(arms[:MOST_ARMS])]
            sheet = draw(records, ways_to_grow(records.runs, shown), *[window] * over_window)
            if len(shown) < len(runs):
                sheet.note(f"Drawn are the first {MOST_ARMS} of {len(arms)} arms; the tables have all.")
            ended, expected = run_counts(records, runs)
            if ended < expected:
                sheet.headline = f"partial: {ended} of {expected} runs"
            return sheet

        @wraps(draw)
        def along_axis(records: Records, runs: pd.DataFrame | None = None, window: Window = WINDOW) -> Drawing:
            with style.drawn_along(named_axis(records.runs)):
                figure = drawing(records, runs, window)
            if records.runs["loss_bigram"].isna().all():
                figure.caption = figure.caption.replace(*marks.OF_TABLES)
            return figure

        along_axis.__doc__ = (draw.__doc__ or "").format(axis=LEARNING_RATE)
        FIGURES.register(name)(along_axis)
        return along_axis

    return register


def run_counts(records: Records, runs: pd.DataFrame) -> tuple[int, int]:
    """How many runs ended, and how many would have ended on the full grid: every learning rate and seed of each arm.

    Of imported runs nobody knows the grid.
    """
    if is_imported(records):
        return len(runs), len(runs)
    lrs = runs.groupby("arm")["lr"].nunique()
    curves = runs.groupby("arm")["curve"].nunique()
    full_grid = int((lrs * curves).sum()) * runs["seed"].nunique()
    return len(runs), max(full_grid, len(runs) + int((records.runs["status"] == "failed").sum()))
