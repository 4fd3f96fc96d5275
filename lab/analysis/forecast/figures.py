"""Forecast figures: lines fitted to the small sizes, followed past the largest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from lab.analysis.forecast.fits import Line
from lab.analysis.forecast.forecasts import GRADIENT, LOGIT, Forecast, ForecastQuantity, make_forecasts
from lab.analysis.rendering import style
from lab.analysis.rendering.panels import DASHED
from lab.analysis.rendering.style import INK, OUTCOME_LOOK, OUTCOMES
from lab.analysis.text import count
from lab.records.store import Records

# Lines are drawn to this many times the largest size.
AHEAD = 10
# A limit so many decades from all that is drawn is left out of view.
FAR = 4
LIMIT_DASHES, BENT_DASHES = (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5))


@style.styled
def logit_forecast(records: Records) -> Figure:
    """Largest attention logit early in the run against size, and where it becomes too large.

    One dot per run: the largest attention logit of block 0, a tenth into the run. Lines are power laws fitted to all
    sizes but the largest, whose dots are open; with two sizes, to both. Beyond the sizes they were fitted to they are
    dashed, with a 95 % prediction interval for one new run; dots and dashes where all sizes together bend away from a
    power law. Crosses and triangles are runs that ended unstable or diverged. Above the dotted line runs are unstable,
    as far as the runs of this sweep tell.
    """
    return _drawn(records, LOGIT, "max attention logit", "threshold")


@style.styled
def gradient_forecast(records: Records) -> Figure:
    """Gradient RMS late in the run against size, and where it meets Adam's epsilon.

    One dot per run: the RMS of the gradient of the first MLP layer of block 0, mean over the last tenth of the run.
    Lines are power laws fitted to all sizes but the largest, whose dots are open; with two sizes, to both. Beyond the
    sizes they were fitted to they are dashed, with a 95 % prediction interval for one new run; dots and dashes where
    all sizes together bend away from a power law. Crosses and triangles are runs that ended unstable or diverged. Where
    gradients are no larger than epsilon, the dotted line, updates shrink.
    """
    return _drawn(records, GRADIENT, "gradient RMS", "Adam's epsilon")


def _drawn(records: Records, quantity: ForecastQuantity, what: str, limit: str) -> Figure:
    made = make_forecasts(records, quantity)
    shades = style.shades(pd.concat([one.runs for one in made])["lr"], style.LR_SHADES)
    columns = style.columns_for(len(made))
    rows = -(-len(made) // columns)
    sheet = style.Sheet(columns, [(3.0, 0.85)] * rows)
    for place, one in enumerate(made):
        axes = sheet.panel(place // columns, place % columns, sharey=sheet.first)
        _panel(axes, one, shades)
        axes.set_title(style.literal(one.arm, 30))
        axes.set_ylabel("" if place % columns else what)
        axes.tick_params(labelleft=place % columns == 0)
    _value_axis(sheet.figure.axes[0], made)
    sheet.keys(("peak learning rate", style.line_keys(shades, "{:g}".format)), ("", _keys(made, limit)))
    return sheet.figure


def _panel(axes: Axes, made: Forecast, shades: Mapping[float, str]) -> None:
    last = made.sizes[-1]
    fitted, reach = _fitted(made)
    for lr, line in fitted.items():
        ahead = BENT_DASHES if made.way(lr) else DASHED
        _line(axes, line, (made.sizes[0], reach, AHEAD * last), shades[lr], ahead)
    for lr, colour in shades.items():
        runs = made.runs[made.runs["lr"] == lr]
        for fate, mark in {"": "o", **OUTCOMES}.items():
            some = runs[runs["fate"] == fate]
            held = some[some["size"] > reach]
            if fate:
                axes.plot(some["size"], some["value"], mark, color=colour, **OUTCOME_LOOK)
                axes.plot(held["size"], held["value"], "o", color=colour, fillstyle="none", markersize=9)
            else:
                fitted_to = some[some["size"] <= reach]
                axes.plot(fitted_to["size"], fitted_to["value"], "o", color=colour, markersize=4)
                axes.plot(held["size"], held["value"], "o", color=colour, markersize=5, markerfacecolor="white")
    if made.limit > 0:
        axes.axhline(made.limit, color=INK, linestyle=LIMIT_DASHES, linewidth=1)
    _size_axis(axes, made.sizes)


def _line(axes: Axes, line: Line, ends: tuple[float, float, float], colour: str, dashes: Any) -> None:
    first, reach, last = ends
    inside, ahead = np.array([first, reach]), np.geomspace(reach, last, 50)
    axes.plot(inside, 10 ** line.predict(inside).middle, color=colour)
    said = line.predict(ahead)
    axes.plot(ahead, 10**said.middle, color=colour, linestyle=dashes)
    axes.fill_between(ahead, 10**said.low, 10**said.high, color=colour, alpha=0.15, linewidth=0)


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Logarithmic parameters, ticks at decades."""
    axes.set_xscale("log")
    axes.set_xlim(sizes[0] / 1.5, AHEAD * sizes[-1] * 1.2)
    axes.xaxis.set_major_formatter(lambda size, _: count(size))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("parameters without embeddings")


def _value_axis(axes: Axes, made: Sequence[Forecast]) -> None:
    """Logarithmic values: all runs, all lines and the limit, unless that is far off; an interval may leave the view."""
    known = [np.log10(one.runs["value"].dropna()) for one in made]
    known += [line.predict(AHEAD * one.sizes[-1]).middle for one in made for line in _fitted(one)[0].values()]
    low, high = np.min(np.hstack(known)), np.max(np.hstack(known))
    for one in made:
        if one.limit > 0 and low - FAR < math.log10(one.limit) < high + FAR:
            low, high = min(low, math.log10(one.limit)), max(high, math.log10(one.limit))
    axes.set_yscale("log")
    axes.set_ylim(10 ** (low - 0.3), 10 ** (high + 0.3))


def _fitted(made: Forecast) -> tuple[dict[float, Line], int]:
    """The lines to be drawn, and the largest size they were fitted to."""
    return (made.score.lines, made.sizes[-2]) if made.score else (made.lines, made.sizes[-1])


def _keys(made: Sequence[Forecast], limit: str) -> list[Any]:
    keys: list[Any] = [Patch(color=INK, alpha=0.25, linewidth=0, label="95 % interval")]
    if any(one.score for one in made):
        keys += [Line2D([], [], linestyle="", marker="o", color=INK, markerfacecolor="white", label="held out")]
    lost = {fate for one in made for fate in one.runs["fate"]}
    keys += [key for key in style.outcome_keys() if key.get_label() in lost]
    if any(one.way(lr) for one in made for lr in one.bends):
        keys += [Line2D([], [], color=INK, linestyle=BENT_DASHES, label="growth bends away")]
    if any(one.limit > 0 for one in made):
        keys += [Line2D([], [], color=INK, linestyle=LIMIT_DASHES, linewidth=1, label=limit)]
    return keys
