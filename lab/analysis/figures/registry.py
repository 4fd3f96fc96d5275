"""The registry of figures, and what all of them do: judge the runs, and mark a figure of incomplete sweeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.analysis.curves import points
from lab.analysis.grouping import ways_to_grow
from lab.analysis.rendering import style
from lab.analysis.sensitivity import judge
from lab.core.errors import RequestError
from lab.core.registry import Registry
from lab.records.store import Records

Drawing = Callable[..., Figure]
FIGURES: Registry[Drawing] = Registry("figure", "figures")


class NothingToDrawError(RequestError):
    """Raised where records hold nothing that a figure shows; a report leaves the figure out."""


def figure(name: str) -> Callable[[Callable[[Records, pd.DataFrame], Figure]], Drawing]:
    """Decorator: register a function that draws records as the figure ``name``; its docstring is the caption.

    The function gets the records and their runs, ``judge(points)`` regrouped by ``ways_to_grow``. The registered
    drawing takes the runs as an optional second argument, so that a caller of many figures judges them once. If runs
    are missing, it says so above the panels.

    Raises:
        NothingToDrawError: no run ended, or the function finds nothing to draw.
    """

    def register(draw: Callable[[Records, pd.DataFrame], Figure]) -> Drawing:
        @wraps(draw)
        @style.styled
        def drawing(records: Records, runs: pd.DataFrame | None = None) -> Figure:
            runs = judge(points(records.runs)) if runs is None else runs
            if runs.empty:
                raise NothingToDrawError("nothing to draw: no run ended")
            made = draw(records, ways_to_grow(records.runs, runs))
            ended, expected = run_counts(records.runs, runs)
            if ended < expected:
                x, y = 0.1 / made.get_figwidth(), 1 - 0.05 / made.get_figheight()
                made.text(x, y, f"partial: {ended} of {expected} runs", va="top", weight="bold")
            return made

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


def band_key(runs: pd.DataFrame) -> list[Any]:
    """Key entry for the bands; none for a single seed."""
    seeds = runs["seed"].nunique()
    return [Patch(color=style.INK, alpha=0.25, linewidth=0, label=f"range of {seeds} seeds")] if seeds > 1 else []


def outcome_keys(runs: pd.DataFrame) -> list[Any]:
    """Key entries for bands and for those outcome marks that occur."""
    return [*band_key(runs), *(key for key in style.outcome_keys() if key.get_label() in set(runs["outcome"]))]
