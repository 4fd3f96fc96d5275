"""Figures of loss spikes of a run's own: typical ones with what moves first, and alarms on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.events.costs import HELD_OUT
from lab.analysis.events.scores import AlarmScore, summarize
from lab.analysis.probe_values import TRAIN
from lab.analysis.rendering import layout, panels, scales
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import Interval
from lab.core.detectors import LABELS
from lab.records.store import Records
from lab.studies.spikes.figures import AROUND, PANEL_HEIGHT
from lab.studies.spikes.figures import SPIKE as BEGINS
from lab.studies.spikes.own_alarms import score_own
from lab.studies.spikes.own_spikes import (
    DEEP,
    EMBEDDING,
    GRADIENT,
    KEYS,
    UPDATE,
    Series,
    find_spikes,
    measured,
)

SHARES = (-0.03, 1.03)


class Line(NamedTuple):
    """A line of a panel: a probe, where it listens, and its name in the legend."""

    probe: str
    where: str
    name: str


# By the label of its axis, the lines of each panel.
PANELS = {
    "loss\n(nats/token)": (Line(TRAIN, "", "training"), Line(HELD_OUT, "", "held-out")),
    "gradient RMS": (
        Line(GRADIENT, EMBEDDING, "embedding"),
        Line(GRADIENT, DEEP, "first MLP layer"),
        Line(GRADIENT, "head", "head"),
    ),
    "update RMS": (Line(UPDATE, EMBEDDING, "embedding"), Line(UPDATE, KEYS, "keys of block 0")),
}
NAMES = list(dict.fromkeys(line.name for lines in PANELS.values() for line in lines))


@figure("own_spikes")
def typical_spikes(records: Records, runs: pd.DataFrame) -> Sheet:
    """Typical loss spikes that no bad data bring: of each arm the one of median size at its highest learning rate.

    From above: training loss and the loss on fixed held-out rows, then the root mean square of gradients and of Adam's
    updates, before the learning rate, of some tensors. A spike of a batch alone would leave the held-out loss as it is.
    """
    series = measured(records)
    shown = set(runs["id"])
    spikes = find_spikes({run: each for run, each in series.items() if run in shown})
    if not spikes:
        raise NothingToDrawError("nothing to draw: no run without bad data had a spike and was measured at every step")
    chosen = _typical(pd.DataFrame(spikes), runs).head(layout.columns_for(len(spikes)))
    sheet, facet_axes = layout.facets(chosen["title"].tolist(), list(PANELS), PANEL_HEIGHT, len(chosen), share_y=False)
    looks = {name: {"color": panels.arm_look(place)["color"], "linewidth": 1} for place, name in enumerate(NAMES)}
    for row, of_spike in zip(chosen.to_dict("records"), facet_axes, strict=True):
        step = int(row["step"])
        for axes, lines in zip(of_spike, PANELS.values(), strict=True):
            for line in lines:
                _draw(axes, series[str(row["run"])], line, step, looks[line.name])
            if axes is not of_spike[0]:
                scales.probe_axis(axes)
            panels.level(axes, float(step), BEGINS, (0, (1, 1)), upright=True)
            axes.set_xlim(step - AROUND, step + AROUND)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        of_spike[-1].set_xlabel("step")
    sheet.keys(("line", [Line2D([], [], label=name, **look) for name, look in looks.items()]))
    sheet.explain(BEGINS, "A dotted line is where the detector reports the spike.")
    sheet.note(f"{len(spikes)} spikes in all, in {len(series)} runs.")
    return sheet


def _typical(spikes: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Of each arm, at the highest learning rate at which it spikes, the spike of median size, with a ``title``."""
    table = spikes.merge(runs[["id", "arm", "lr", "seed"]], left_on="run", right_on="id")
    table = table[table["lr"] == table.groupby("arm")["lr"].transform("max")].sort_values("size", kind="stable")
    chosen = pd.DataFrame([of_arm.iloc[len(of_arm) // 2] for _, of_arm in table.groupby("arm", sort=False)])
    chosen = chosen.sort_values("size", ascending=False, kind="stable")
    return chosen.assign(title=chosen["arm"].astype(str))


def _draw(axes: Axes, series: Series, line: Line, step: int, look: dict[str, object]) -> None:
    value_n = series.get((line.probe, line.where), np.empty(0))[max(0, step - AROUND) : step + AROUND + 1]
    step_n = np.arange(max(0, step - AROUND), max(0, step - AROUND) + len(value_n))
    shown_n = np.isfinite(value_n) & (value_n > 0)
    axes.plot(step_n[shown_n], value_n[shown_n], **look)  # type: ignore[arg-type]


@figure("alarms_on_own_spikes")
def alarms_on_own_spikes(records: Records, runs: pd.DataFrame) -> Sheet:
    """How well each alarm finds loss spikes that no bad data bring: its hits, its lead, its false alarms.

    Runs are those at the highest learning rate. An alarm finds a spike if it begins from 40 steps before it to 20
    after. It is false if it begins far from any.
    """
    scores = score_own(records)
    scores = scores[scores["id"].isin(runs["id"])]
    summary = [score for score in summarize(scores) if score.found.n]
    if not summary:
        raise NothingToDrawError("nothing to draw: no run without bad data had a spike and was measured at every step")
    names = [LABELS[score.kind][0] for score in summary]
    columns = layout.columns_for(3, panels.NARROWEST_ROWS)
    sheet, facet_axes = layout.facets(["", "", ""], [""], panels.rows_height(names), columns)
    quantities = {
        "share of spikes\nfound": {row: _found(score) for row, score in enumerate(summary)},
        "lead over the loss\n(steps)": {row: _lead(score) for row, score in enumerate(summary) if score.leads},
        "false alarms in 1000 steps": {row: _false(score) for row, score in enumerate(summary)},
    }
    for (axes,), (label, dots) in zip(facet_axes, quantities.items(), strict=True):
        panels.rows(axes, names, [(panels.arm_look(0), dots)])
        axes.set_xlabel(label)
    (shares,), (leads,), (rates,) = facet_axes
    shares.set_xlim(*SHARES)
    panels.level(leads, 0.0, "as early as the loss", upright=True)
    rates.set_xlim(left=0)
    sheet.note(f"{summary[0].found.n} spikes; {summary[0].clean_steps:,} steps are far from any.")
    sheet.note("Bars of shares and rates are exact 95 % intervals, as if spikes and alarms were independent.")
    sheet.note("The mark of a lead is the median of the spikes found, and its bar joins the quartiles.")
    return sheet


def _found(score: AlarmScore) -> Dot:
    share = score.found
    hits = f"found {round(share.mean * share.n)} of {share.n} spikes"
    return Dot(share, f"{LABELS[score.kind][0]}\n{hits}\n95 % interval {share.low:.2f} to {share.high:.2f}")


def _lead(score: AlarmScore) -> Dot:
    low, median, high = score.lead
    quartiles = f"median lead {median:g} steps\nquartiles {low:g} to {high:g}"
    return Dot(Interval(median, low, high, score.leads), f"{LABELS[score.kind][0]}\n{quartiles}")


def _false(score: AlarmScore) -> Dot:
    rate = score.false_alarms
    interval = f"95 % interval {rate.low:.3g} to {rate.high:.3g}"
    return Dot(rate, f"{LABELS[score.kind][0]}\n{rate.n} false alarms in {score.clean_steps:,} steps\n{interval}")
