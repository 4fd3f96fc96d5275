"""Figures of probes: what runs away as the learning rate rises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.crossings import rate_text
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import facets
from lab.analysis.rendering import layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.style import DASHED
from lab.analysis.runaway import Rate, rates, read_runaways
from lab.analysis.text import count
from lab.records.store import Records

OTHERS = ("output_logits", "residual_stream", "router_logits", "gradients")  # that run away, besides attention logits
LEVEL, CROSSING = "level", "crossing"


@figure("max_attention_logit")
def max_attention_logit(records: Records, runs: pd.DataFrame) -> Sheet:
    """Largest attention logit against {axis.name}.

    The logit is the score before softmax: its peak over the run and over the recorded blocks, a geometric mean over
    seeds. Where the logit diverges, training is unstable.
    """
    return _runaways(records, runs, ["attention_logits"])


@figure("runaway_rates")
def runaway_rates(records: Records, runs: pd.DataFrame) -> Sheet:
    """Quantities that run away against {axis.name}.

    Output logits are the root of the mean square of log Z. Of them, as of the residual stream and of router logits, the
    largest value of the run counts; of epsilon over gradients the last value, a geometric mean over tensors. Lines are
    geometric means over seeds. A quantity is drawn if it passes its level somewhere.
    """
    found = rates(records, runs, OTHERS)
    passed = {rate.quantity for rate in found if any(each.times for each in rate.seeds)}
    return _runaways(records, runs, [name for name in OTHERS if name in passed])


def _runaways(records: Records, runs: pd.DataFrame, names: Sequence[str]) -> Sheet:
    """Quantities against learning rate, a line for each size or arm, and where it passes the level of the quantity."""
    shown_by_name = {name: read_runaways()[name] for name in names}
    peaks = runs.assign(**{name: runs["id"].map(runaway.of_runs(records)) for name, runaway in shown_by_name.items()})
    peaks[names] = peaks[names].where(np.isfinite(peaks[names]))
    if not names or peaks[names].isna().all(axis=None) or runs["lr"].nunique() == 1:
        raise NothingToDrawError("nothing to draw: no run recorded what runs away, or all have one learning rate")
    drawn = peaks[names].notna().any(axis=1).groupby(peaks["curve"]).transform("any")
    shown, found = facets(records.runs, peaks[drawn]), rates(records, runs, names)
    labels = [f"{each.takes}\n{each.title}" for each in shown_by_name.values()]
    sheet, facet_axes = layout.facets([title for title, _ in shown.panels], labels, 13.0)
    for of_facet, (_, panel_runs) in zip(facet_axes, shown.panels, strict=True):
        looks = {curve: shown.looks[keys.iloc[0]] for curve, keys in panel_runs.groupby("curve")[shown.line]}
        for axes, (name, runaway) in zip(of_facet, shown_by_name.items(), strict=True):
            quantity = Quantity(f"{runaway.takes} {runaway.title}", log=True)
            panels.lines(axes, panel_runs, shown.line, shown.looks, "lr", name, quantity)
            panels.level(axes, runaway.level, LEVEL, DASHED, style.INK)
            for rate in found:
                if rate.quantity == name and rate.curve in looks:
                    _mark_crossing(axes, rate, runaway.level, looks[rate.curve])
            scales.lr_axis(axes, runs["lr"])
    for axes in facet_axes[0]:
        scales.probe_axis(axes)
    means = "; ".join(f"{each.title} {each.level:g} ({each.means})" for each in shown_by_name.values())
    sheet.explain(LEVEL, f"The dashed line is the level above which a quantity has run away: {means}.")
    sheet.explain(CROSSING, "A diamond marks the learning rate at which it passes, with its interval over seeds.")
    sheet.keys((shown.name, shown.keys))
    return sheet


def _mark_crossing(axes: Axes, rate: Rate, level: float, look: Any) -> None:
    if math.isnan(rate.rate.mean):
        return
    colour = look if isinstance(look, str) else look["color"]
    axes.plot(rate.rate[1:3], [level, level], color=colour, linewidth=1.2)
    (mark,) = axes.plot([rate.rate.mean], [level], "D", color=colour, markersize=6, fillstyle="none")
    marks.name(mark, CROSSING)
    slope = f"{rate.slope:.2g} decades per decade of learning rate"
    text = f"{rate.arm}, {count(rate.size)} parameters\n{rate.level} at {rate_text(rate.rate)}\n{slope}"
    panels.add_hover_texts(axes, mark, [text])
