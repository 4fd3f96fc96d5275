"""Draw inside one panel: lines over a column with bands and outcome marks, sensitivities, reference lines."""

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
KEY_LETTERS = 29  # to a line of an arm's label in a key


def title(axes: Axes, label: str) -> None:
    """Set a label as the title of a panel, wrapped to its width."""
    axes.set_title(style.literal(label, int(scales.inches(axes) * 18)), size=7.5)


def over(axes: Axes, runs: pd.DataFrame, x: str, value: str, colour: str, mean: Any = np.mean) -> None:
    """Draw column ``value`` over column ``x``: a line at the mean over seeds, a band from lowest to highest.

    Marks show the worst outcome of the seeds; seeds without a finite value count there, but not in the mean.
    """
    xs, values, outcomes = (runs[column].to_numpy() for column in (x, value, "outcome"))
    finite = np.isfinite(values)
    ticks = np.unique(xs[finite])
    seeds = [values[finite & (xs == tick)] for tick in ticks]
    means = np.array([mean(at_tick) for at_tick in seeds])
    band(axes, ticks, list(map(min, seeds)), list(map(max, seeds)), colour)
    axes.plot(ticks, means, color=colour)
    worst = np.array([worst_outcome(outcomes[xs == tick]) for tick in ticks])
    for outcome, mark in {"": "o", **OUTCOMES}.items():
        look = OUTCOME_LOOK if outcome else {"markersize": 3.5}
        if (worst == outcome).any():
            axes.plot(ticks[worst == outcome], means[worst == outcome], mark, color=colour, **look)


def band(axes: Axes, x: Any, low: Any, high: Any, colour: str) -> None:
    """Fill the area between two lines with a pale colour, unless they coincide."""
    x, low, high = (np.asarray(values, dtype=float) for values in (x, low, high))
    finite = np.isfinite(low) & np.isfinite(high)
    if (low < high).any():
        x, low, high = x[finite], low[finite], high[finite]
        corners = np.stack([np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])], axis=1)
        axes.add_artist(Polygon(corners, color=colour, alpha=0.2, linewidth=0))
        axes.update_datalim(corners)


def worst_outcome(outcomes: Iterable[str]) -> str:
    """The worst outcome among seeds; empty where all are stable."""
    return max(outcomes, key=["", *OUTCOMES].index)


def geometric(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(np.asarray(values, dtype=float)))))


def arm_look(position: int) -> dict[str, Any]:
    """Colour and mark of the arm at this position; the first 49 arms all look different."""
    colours = len(style.ARM_COLOURS)
    mark = style.ARM_MARKS[(position + position // colours) % colours]
    return {"color": style.ARM_COLOURS[position % colours], "marker": mark}


def arm_key(arm: str, look: Mapping[str, Any]) -> Line2D:
    """Key entry of an arm."""
    return Line2D([], [], markersize=5, label=style.literal(arm, KEY_LETTERS), **look)


def epsilon(axes: Axes, eps: float, colour: str = INK) -> None:
    """Draw a dashed line at Adam's epsilon and widen the view for it, unless it lies far outside."""
    low, high = axes.get_ylim()
    if low / 30 < eps < high * 30:
        axes.axhline(eps, color=colour, linewidth=0.9, linestyle=DASHED, zorder=1, label="Adam's epsilon")
        axes.set_ylim(min(low, eps / 1.5), max(high, eps * 1.5))


def diagonal(axes: Axes, values: pd.Series, label: str) -> None:
    """Draw a dotted line at y = x over the range of ``values``, if it is in view, and keep the view."""
    view, ends = axes.get_ylim(), [values.min(), values.max()]
    if view[0] < ends[1] and ends[0] < view[1]:
        axes.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (1, 1)), zorder=1, label=label)
        axes.set_ylim(view)


def references(axes: Axes, runs: pd.DataFrame) -> None:
    """Draw thin lines at the loss at initialization and at the bigram model's, both means over ``runs``."""
    for column, (name, dashes) in REFERENCES.items():
        axes.axhline(runs[column].mean(), color=INK, linewidth=0.8, linestyle=dashes, zorder=1, label=name)


def over_steps(axes: Axes, lines: pd.DataFrame, colour: str) -> None:
    """Draw a line over column ``step``: ``mean``, a band from ``min`` to ``max``, the ``outcome`` marked at its end."""
    band(axes, lines["step"], lines["min"], lines["max"], colour)
    axes.plot(lines["step"], lines["mean"], color=colour, linewidth=1)
    end, outcome = lines[np.isfinite(lines["mean"])].tail(1), worst_outcome(lines["outcome"])
    if outcome:
        look = {**OUTCOME_LOOK, "markersize": 5}
        axes.plot(end["step"], end["mean"], OUTCOMES[outcome], color=colour, clip_on=False, **look)


def sensitivities(axes: Axes, curves: pd.DataFrame, colours: Mapping[Any, str]) -> list[Line2D]:
    """Draw the sensitivity of every arm against size, solid, and its instability part, dashed.

    Args:
        axes: the panel.
        curves: as made by ``by_curve``.
        colours: by arm, for those that have a colour in other panels.

    Returns:
        Entries of its key.
    """
    sizes, arms, keys = sorted(curves["size"].unique()), list(curves["arm"].unique()), []
    log_range = float(np.log(sizes[-1] / sizes[0])) or 1.0
    offset = 0.012 if len(sizes) > 1 else 0.2 / len(arms)
    for position, arm in enumerate(arms):
        own = curves[curves["arm"] == arm]
        look = arm_look(position) | ({"color": colours[arm]} if arm in colours else {})
        # shift arms sideways, so that their bars do not hide one another
        x = own["size"].to_numpy() * np.exp(log_range * offset * (position - (len(arms) - 1) / 2))
        _intervals(axes, x, list(own["total"]), **look)
        _intervals(axes, x, list(own["above"]), **look, linestyle=DASHED, markerfacecolor="white")
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
    """Draw means joined by a line, each with its interval; below three seeds draw a dash per seed."""
    means = [interval.mean for interval in intervals]
    half = [interval.high - interval.mean for interval in intervals]
    axes.plot(x, means, markersize=5, **look)
    axes.errorbar(x, means, half, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2.5)
    for x_of_interval, interval in zip(x, intervals, strict=True):
        if interval.n < FEWEST_SEEDS:
            axes.plot([x_of_interval] * interval.n, interval.values, "_", color=look["color"], markersize=8)
