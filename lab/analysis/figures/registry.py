"""Where figures are filed, and what all of them do: judge the runs, say what is missing, or that nothing applies."""

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
    """These records hold nothing of what a figure shows; a report passes over the figure."""


def figure(name: str) -> Callable[[Callable[[Records, pd.DataFrame], Figure]], Drawing]:
    """Decorator: file under ``name`` a drawing of the records and of their runs.

    The runs are ``judge(points)`` of the records, which a caller that draws many figures need not have made anew.
    Runs of shapes that no arm of growing size holds have the ways to grow as arms (``ladder.ways_to_grow``).  A figure
    of runs of which some are missing says so above its panels.  Its docstring is its caption.

    Raises:
        NothingToDrawError: no run ended, or whatever else the drawing finds missing.
    """

    def file(draw: Callable[[Records, pd.DataFrame], Figure]) -> Drawing:
        @wraps(draw)
        @style.styled
        def drawn(records: Records, runs: pd.DataFrame | None = None) -> Figure:
            runs = judge(points(records.runs)) if runs is None else runs
            if runs.empty:
                raise NothingToDrawError("nothing to draw: no run ended")
            made = draw(records, ways_to_grow(records.runs, runs))
            there, asked = extent(records.runs, runs)
            if there < asked:
                made.text(
                    0.1 / made.get_figwidth(),
                    1 - 0.05 / made.get_figheight(),
                    f"partial: {there} of {asked} runs",
                    va="top",
                    weight="bold",
                )
            return made

        FIGURES.register(name)(drawn)
        return drawn

    return file


def extent(cards: pd.DataFrame, runs: pd.DataFrame) -> tuple[int, int]:
    """How many runs there are, and how many there would be if none was missing.

    None is missing when each curve has a run at every learning rate of its arm for every seed, and none failed.
    """
    lrs = runs.groupby("arm")["lr"].nunique()
    curves = runs.groupby("arm")["curve"].nunique()
    whole = int((lrs * curves).sum()) * runs["seed"].nunique()
    return len(runs), max(whole, len(runs) + int((cards["status"] == "failed").sum()))


def band_key(runs: pd.DataFrame) -> list[Any]:
    """The entry for the bands, where there is more than one seed."""
    seeds = runs["seed"].nunique()
    return [Patch(color=style.INK, alpha=0.25, linewidth=0, label=f"range of {seeds} seeds")] if seeds > 1 else []


def outcome_keys(runs: pd.DataFrame) -> list[Any]:
    """Entries for bands and for the marks of lost runs, as far as there are any."""
    return [*band_key(runs), *(key for key in style.outcome_keys() if key.get_label() in set(runs["fate"]))]
