"""Panels: what one pair of axes shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon

from lab.analysis.rendering import scales, style
from lab.analysis.rendering.style import INK, OUTCOME_LOOK, OUTCOMES, REFERENCES
from lab.analysis.statistics import FEWEST_SEEDS, Interval

DASHED = (0, (4, 2))
KEY_LETTERS = 29


def title(axes: Axes, label: str) -> None:
    """A label as the title of a panel, in as many lines as its width takes."""
    axes.set_title(style.literal(label, int(scales.inches(axes) * 18)), size=7.5)


def over(axes: Axes, runs: pd.DataFrame, x: str, value: str, colour: str, mean: Any = np.mean) -> None:
    """Over column ``x``: mean over seeds as a line, lowest to highest as a band, a mark where a seed was lost.

    Seeds without a finite value take part in no mean, but are no less lost.
    """
    at, values, fates = (runs[column].to_numpy() for column in (x, value, "fate"))
    known = np.isfinite(values)
    places = np.unique(at[known])
    seeds = [values[known & (at == place)] for place in places]
    means = np.array([mean(some) for some in seeds])
    band(axes, places, [min(some) for some in seeds], [max(some) for some in seeds], colour)
    axes.plot(places, means, color=colour)
    lost = np.array([worst(fates[at == place]) for place in places])
    for fate, mark in {"": "o", **OUTCOMES}.items():
        look = OUTCOME_LOOK if fate else {"markersize": 3.5}
        if (lost == fate).any():
            axes.plot(places[lost == fate], means[lost == fate], mark, color=colour, **look)


def band(axes: Axes, x: Any, low: Any, high: Any, colour: str) -> None:
    """A pale area between two lines, unless they are one."""
    x, low, high = (np.asarray(some, dtype=float) for some in (x, low, high))
    known = np.isfinite(low) & np.isfinite(high)
    if (low < high).any():
        there, back = (x[known], x[known][::-1]), (low[known], high[known][::-1])
        corners = np.stack([np.concatenate(there), np.concatenate(back)], axis=1)
        axes.add_artist(Polygon(corners, color=colour, alpha=0.2, linewidth=0))
        axes.update_datalim(corners)


def worst(fates: Iterable[str]) -> str:
    """The worst of what became of several seeds."""
    return max(fates, key=["", *OUTCOMES].index)


def geometric(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=float)))))


def arm_look(place: int) -> dict[str, Any]:
    """Colour and mark of the arm at this place; the first 49 differ in one of the two."""
    arms = len(style.ARM_COLOURS)
    return {"color": style.ARM_COLOURS[place % arms], "marker": style.ARM_MARKS[(place + place // arms) % arms]}


def arm_key(arm: str, look: Mapping[str, Any]) -> Line2D:
    """The entry of an arm."""
    return Line2D([], [], markersize=5, label=style.literal(arm, KEY_LETTERS), **look)


def epsilon(axes: Axes, eps: float, colour: str = INK) -> None:
    """A dashed line at Adam's epsilon, the view made wider for it, unless it lies far from what is drawn."""
    low, high = axes.get_ylim()
    if low / 30 < eps < high * 30:
        axes.axhline(eps, color=colour, linewidth=0.9, linestyle=DASHED, zorder=1, label="Adam's epsilon")
        axes.set_ylim(min(low, eps / 1.5), max(high, eps * 1.5))


def diagonal(axes: Axes, values: pd.Series, label: str) -> None:
    """A dotted line on which the two axes are equal, as far as it is in view."""
    view, ends = axes.get_ylim(), [values.min(), values.max()]
    if view[0] < ends[1] and ends[0] < view[1]:
        axes.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (1, 1)), zorder=1, label=label)
        axes.set_ylim(view)


def references(axes: Axes, runs: pd.DataFrame) -> None:
    """Thin lines at the loss at initialization and that of the bigram model, each a mean over ``runs``."""
    for column, (name, dashes) in REFERENCES.items():
        axes.axhline(runs[column].mean(), color=INK, linewidth=0.8, linestyle=dashes, zorder=1, label=name)


def over_steps(axes: Axes, lines: pd.DataFrame, colour: str) -> None:
    """One line over column ``step``: ``mean`` with a band from ``min`` to ``max``, its ``fate`` marked at its end."""
    band(axes, lines["step"], lines["min"], lines["max"], colour)
    axes.plot(lines["step"], lines["mean"], color=colour, linewidth=1)
    end, fate = lines[np.isfinite(lines["mean"])].tail(1), worst(lines["fate"])
    if fate:
        axes.plot(
            end["step"], end["mean"], OUTCOMES[fate], color=colour, clip_on=False, **{**OUTCOME_LOOK, "markersize": 5}
        )


def sensitivities(axes: Axes, curves: pd.DataFrame, colours: Mapping[Any, str]) -> list[Line2D]:
    """Sensitivity of every arm against size, solid, and its instability part, dashed; ``curves`` as by ``by_curve``.

    ``colours`` are those of arms that have one in panels above. Returns the entries of its key.
    """
    sizes, arms, keys = sorted(curves["size"].unique()), list(curves["arm"].unique()), []
    reach = float(np.log(sizes[-1] / sizes[0])) or 1.0
    apart = 0.012 if len(sizes) > 1 else 0.2 / len(arms)
    for place, arm in enumerate(arms):
        some = curves[curves["arm"] == arm]
        look = arm_look(place) | ({"color": colours[arm]} if arm in colours else {})
        # arms stand a hair apart, or bars would hide one another
        x = some["size"].to_numpy() * np.exp(reach * apart * (place - (len(arms) - 1) / 2))
        _intervals(axes, x, list(some["total"]), **look)
        _intervals(axes, x, list(some["above"]), **look, linestyle=DASHED, markerfacecolor="white")
        keys.append(arm_key(arm, look))
    keys += [Line2D([], [], color=INK, label="sensitivity")]
    keys += [Line2D([], [], color=INK, linestyle=DASHED, label="its instability part")]
    seeds = sorted({interval.n for interval in curves["total"]})
    keys += [Line2D([], [], linestyle="", label=f"n = {' to '.join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))}")]
    if not any(interval.n for interval in curves["total"]):
        axes.text(
            0.5, 0.5, "undefined: fewer than two learning rates", transform=axes.transAxes, ha="center", color=INK
        )
    scales.size_axis(axes, sizes)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("LR sensitivity\n(nats/token)")
    return keys


def _intervals(axes: Axes, x: Any, intervals: list[Interval], **look: Any) -> None:
    """Means joined by a line, each with its interval; below three seeds the seeds themselves."""
    means = [interval.mean for interval in intervals]
    half = [interval.high - interval.mean for interval in intervals]
    axes.plot(x, means, markersize=5, **look)
    axes.errorbar(x, means, half, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2.5)
    for place, interval in zip(x, intervals, strict=True):
        if interval.n < FEWEST_SEEDS:
            axes.plot([place] * interval.n, interval.values, "_", color=look["color"], markersize=8)
