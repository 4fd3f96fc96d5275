"""Forecast figures: power laws fitted to the small sizes, extrapolated past the largest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.laws.fits import Line
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.marks import OUTCOMES
from lab.analysis.rendering.style import DASHED
from lab.analysis.text import count
from lab.features.predict.forecasts import GRADIENT, LOGIT, Forecast, ForecastQuantity, make_forecasts
from lab.records.imported import size_name
from lab.records.store import Records

# Lines are drawn up to this many times the largest size.
AHEAD = 10
# The view does not include a limit that is this many decades away from all runs and lines.
FAR = 4
LIMIT_DASHES, BENT_DASHES = (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5))
EXTRAPOLATED, BENT, INTERVAL, HELD_OUT = "extrapolated", "growth bends away", "95 % interval", "held out"
THRESHOLD = "threshold"
SENTENCES = {
    EXTRAPOLATED: "Beyond the sizes they were fitted to, lines are dashed.",
    BENT: "Lines of dots and dashes: the runs of all sizes together bend away from a power law.",
    INTERVAL: "Shaded areas are 95 % prediction intervals for one new run.",
    HELD_OUT: "Hollow dots are runs of the largest size, which are left out of the fit.",
    THRESHOLD: "The dotted line separates unstable from stable runs of this sweep best; unstable ones lie above it.",
    marks.EPSILON: "The dotted line is Adam's epsilon: where gradients are no larger, updates shrink.",
}


@layout.styled
def logit_forecast(records: Records) -> Sheet:
    """Largest attention logit early in the run against size, and where it becomes too large.

    One mark per run: the largest attention logit of block 0, a tenth into the run. Lines are power laws.
    """
    return _draw(records, LOGIT, Quantity("max attention logit", log=True), THRESHOLD)


@layout.styled
def gradient_forecast(records: Records) -> Sheet:
    """Gradient RMS late in the run against size, and where it meets Adam's epsilon.

    One mark per run: the RMS of the gradient of the first MLP layer of block 0, mean over the last tenth of the run.
    Lines are power laws.
    """
    return _draw(records, GRADIENT, Quantity("gradient RMS", log=True), marks.EPSILON)


def _draw(records: Records, forecast_quantity: ForecastQuantity, quantity: Quantity, limit_name: str) -> Sheet:
    forecasts = make_forecasts(records, forecast_quantity)
    shades = style.shades(pd.concat([forecast.runs for forecast in forecasts])["lr"], style.LR_SHADES)
    sheet, facet_axes = layout.facets([forecast.arm for forecast in forecasts], [quantity.name], 19.0)
    for forecast, (axes,) in zip(forecasts, facet_axes, strict=True):
        _panel(axes, forecast, shades, quantity, limit_name, size_name(records))
    _value_axis(sheet.figure.axes[0], forecasts)
    sheet.keys(("peak learning rate", layout.line_keys(shades)))
    for kind, sentence in SENTENCES.items():
        sheet.explain(kind, sentence)
    return sheet


def _panel(
    axes: Axes, forecast: Forecast, shades: Mapping[float, str], quantity: Quantity, limit_name: str, size: str
) -> None:
    lines, largest_fitted = _fitted(forecast)
    ends = (forecast.sizes[0], largest_fitted, AHEAD * forecast.sizes[-1] if forecast.scored else largest_fitted)
    for lr, line in lines.items():
        _line(axes, line, ends, shades[lr], bent=bool(forecast.bends[lr]))
    for lr, colour in shades.items():
        runs = forecast.runs[(forecast.runs["lr"] == lr) & forecast.runs["value"].notna()]
        for outcome in ("", *OUTCOMES):
            alike = runs[runs["outcome"] == outcome]
            fitted, held_out = alike[alike["size"] <= largest_fitted], alike[alike["size"] > largest_fitted]
            for group, name in ((fitted, ""), (held_out, HELD_OUT)):
                if len(group):
                    _dots(axes, group, colour, outcome, name, quantity)
    if forecast.limit > 0:
        panels.level(axes, forecast.limit, limit_name, LIMIT_DASHES)
    first, last = forecast.sizes[0], AHEAD * forecast.sizes[-1]
    scales.x_axis(axes, size, [first, last], scales.decades([first, last]), count)


def _dots(axes: Axes, runs: pd.DataFrame, colour: str, outcome: str, name: str, quantity: Quantity) -> None:
    """Draw a mark per run, within a hollow dot if it was held out."""
    values = runs["value"].to_numpy()
    texts = [hover.text(runs.iloc[[row]], quantity, values[[row]]) for row in range(len(runs))]
    panels.outcome_marks(axes, runs["size"], values, outcome, texts, color=colour)
    if name:
        (ring,) = axes.plot(runs["size"], values, "o", color=colour, fillstyle="none", markersize=9)
        marks.name(ring, name)


def _line(axes: Axes, line: Line, ends: tuple[float, float, float], colour: str, bent: bool) -> None:
    """Draw a line from the first to the second of ``ends``, then dashed with its interval to the third."""
    first, largest_fitted, last = ends
    inside, ahead = np.array([first, largest_fitted]), np.geomspace(largest_fitted, last, 50)
    axes.plot(inside, 10 ** line.predict(inside).middle, color=colour)
    prediction = line.predict(ahead)
    (beyond,) = axes.plot(ahead, 10**prediction.middle, color=colour, linestyle=BENT_DASHES if bent else DASHED)
    marks.name(beyond, BENT if bent else EXTRAPOLATED)
    if np.isfinite(prediction.low).all():
        area = axes.fill_between(ahead, 10**prediction.low, 10**prediction.high, color=colour, alpha=0.15, linewidth=0)
        marks.name(area, INTERVAL)


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
    scales.y_ticks(axes)


def _fitted(forecast: Forecast) -> tuple[dict[float, Line], int]:
    """The lines to draw, and the largest size they were fitted to."""
    if forecast.score:
        return forecast.score.lines, forecast.sizes[-2]
    return forecast.lines, forecast.sizes[-1]
