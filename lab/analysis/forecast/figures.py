"""Forecast figures: power laws fitted to the small sizes, extrapolated past the largest."""

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

# Lines are drawn up to this many times the largest size.
AHEAD = 10
# The view does not include a limit that is this many decades away from all runs and lines.
FAR = 4
LIMIT_DASHES, BENT_DASHES = (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5))


@style.styled
def logit_forecast(records: Records) -> Figure:
    """Largest attention logit early in the run against size, and where it becomes too large.

    One dot per run: the largest attention logit of block 0, a tenth into the run. Lines are power laws fitted to all
    sizes but the largest, whose dots are open; with two sizes, to both and no further. Beyond the sizes they were
    fitted to they are dashed, with a 95 % prediction interval for one new run; dots and dashes where all sizes together
    bend away from a power law. Crosses and triangles are runs that ended unstable or diverged. Above the dotted line
    runs are unstable, as far as the runs of this sweep tell.
    """
    return _draw(records, LOGIT, "max attention logit", "threshold")


@style.styled
def gradient_forecast(records: Records) -> Figure:
    """Gradient RMS late in the run against size, and where it meets Adam's epsilon.

    One dot per run: the RMS of the gradient of the first MLP layer of block 0, mean over the last tenth of the run.
    Lines are power laws fitted to all sizes but the largest, whose dots are open; with two sizes, to both and no
    further. Beyond the sizes they were fitted to they are dashed, with a 95 % prediction interval for one new run; dots
    and dashes where all sizes together bend away from a power law. Crosses and triangles are runs that ended unstable
    or diverged. Where gradients are no larger than epsilon, the dotted line, updates shrink.
    """
    return _draw(records, GRADIENT, "gradient RMS", "Adam's epsilon")


def _draw(records: Records, quantity: ForecastQuantity, label: str, limit_label: str) -> Figure:
    forecasts = make_forecasts(records, quantity)
    shades = style.shades(pd.concat([forecast.runs for forecast in forecasts])["lr"], style.LR_SHADES)
    columns = style.columns_for(len(forecasts))
    rows = -(-len(forecasts) // columns)
    sheet = style.Sheet(columns, [(3.0, 0.85)] * rows)
    for index, forecast in enumerate(forecasts):
        axes = sheet.panel(index // columns, index % columns, sharey=sheet.first)
        _panel(axes, forecast, shades)
        axes.set_title(style.literal(forecast.arm, 30))
        axes.set_ylabel("" if index % columns else label)
        axes.tick_params(labelleft=index % columns == 0)
    _value_axis(sheet.figure.axes[0], forecasts)
    sheet.keys(("peak learning rate", style.line_keys(shades, "{:g}".format)), ("", _keys(forecasts, limit_label)))
    return sheet.figure


def _panel(axes: Axes, forecast: Forecast, shades: Mapping[float, str]) -> None:
    lines, largest_fitted = _fitted(forecast)
    ends = (forecast.sizes[0], largest_fitted, AHEAD * forecast.sizes[-1] if forecast.scored else largest_fitted)
    for lr, line in lines.items():
        _line(axes, line, ends, shades[lr], BENT_DASHES if forecast.bend_sign(lr) else DASHED)
    for lr, colour in shades.items():
        runs = forecast.runs[forecast.runs["lr"] == lr]
        for outcome, mark in {"": "o", **OUTCOMES}.items():
            alike = runs[runs["outcome"] == outcome]
            fitted, held_out = alike[alike["size"] <= largest_fitted], alike[alike["size"] > largest_fitted]
            if outcome:
                axes.plot(alike["size"], alike["value"], mark, color=colour, **OUTCOME_LOOK)
                axes.plot(held_out["size"], held_out["value"], "o", color=colour, fillstyle="none", markersize=9)
            else:
                axes.plot(fitted["size"], fitted["value"], "o", color=colour, markersize=4)
                axes.plot(held_out["size"], held_out["value"], "o", color=colour, markersize=5, markerfacecolor="white")
    if forecast.limit > 0:
        axes.axhline(forecast.limit, color=INK, linestyle=LIMIT_DASHES, linewidth=1)
    _size_axis(axes, forecast.sizes)


def _line(axes: Axes, line: Line, ends: tuple[float, float, float], colour: str, dashes: Any) -> None:
    """Draw a line from the first to the second of ``ends``, then dashed with its interval to the third."""
    first, largest_fitted, last = ends
    inside, ahead = np.array([first, largest_fitted]), np.geomspace(largest_fitted, last, 50)
    axes.plot(inside, 10 ** line.predict(inside).middle, color=colour)
    prediction = line.predict(ahead)
    axes.plot(ahead, 10**prediction.middle, color=colour, linestyle=dashes)
    axes.fill_between(ahead, 10**prediction.low, 10**prediction.high, color=colour, alpha=0.15, linewidth=0)


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Set a logarithmic x axis of parameter counts with ticks at decades."""
    axes.set_xscale("log")
    axes.set_xlim(sizes[0] / 1.5, AHEAD * sizes[-1] * 1.2)
    axes.xaxis.set_major_formatter(lambda size, _: count(size))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("parameters without embeddings")


def _value_axis(axes: Axes, forecasts: Sequence[Forecast]) -> None:
    """Set a logarithmic y axis that spans all runs, lines and nearby limits; intervals may leave the view."""
    shown = [np.log10(forecast.runs["value"].dropna()) for forecast in forecasts]
    for forecast in forecasts:
        shown += [line.predict(AHEAD * forecast.sizes[-1]).middle for line in _fitted(forecast)[0].values()]
    low, high = np.min(np.hstack(shown)), np.max(np.hstack(shown))
    for limit in [math.log10(forecast.limit) for forecast in forecasts if forecast.limit > 0]:
        if low - FAR < limit < high + FAR:
            low, high = min(low, limit), max(high, limit)
    axes.set_yscale("log")
    axes.set_ylim(10 ** (low - 0.3), 10 ** (high + 0.3))


def _fitted(forecast: Forecast) -> tuple[dict[float, Line], int]:
    """The lines to draw, and the largest size they were fitted to."""
    if forecast.score:
        return forecast.score.lines, forecast.sizes[-2]
    return forecast.lines, forecast.sizes[-1]


def _keys(forecasts: Sequence[Forecast], limit_label: str) -> list[Any]:
    keys: list[Any] = [Patch(color=INK, alpha=0.25, linewidth=0, label="95 % interval")]
    if any(forecast.score for forecast in forecasts):
        keys += [Line2D([], [], linestyle="", marker="o", color=INK, markerfacecolor="white", label="held out")]
    outcomes = {outcome for forecast in forecasts for outcome in forecast.runs["outcome"]}
    keys += [key for key in style.outcome_keys() if key.get_label() in outcomes]
    if any(forecast.bend_sign(lr) for forecast in forecasts for lr in forecast.bends):
        keys += [Line2D([], [], color=INK, linestyle=BENT_DASHES, label="growth bends away")]
    if any(forecast.limit > 0 for forecast in forecasts):
        keys += [Line2D([], [], color=INK, linestyle=LIMIT_DASHES, linewidth=1, label=limit_label)]
    return keys
