"""Figure of alarms on labelled runs: which bursts each finds, how early, and how often it is false."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.events.scores import NONE, AlarmScore, score_runs, summarize
from lab.analysis.rendering import layout, marks, panels, style
from lab.analysis.rendering.layout import Sheet
from lab.core.detectors import LABELS
from lab.records.store import Records

# Room for names of alarms and bursts, and heights of their rows, in multiples of the size of text.
ROW_LABELS, ROW_HEIGHT, BURST_HEIGHT = 7.0, 1.9, 2.6
ALARM_ROOM = 0.8  # of the row of a burst, the part that the alarms share
SHARES = (-0.03, 1.03)
Bar = tuple[float, float, float, str]  # value, low end, high end, and what the mark says


@figure("detector_scores")
def detector_scores(records: Records, runs: pd.DataFrame) -> Sheet:
    """How well each alarm finds planted loss spikes: its hits, its lead before the loss, its false alarms.

    An alarm finds a burst if it begins between the burst's first step and 20 measurements after its last. It leads by
    the steps from there to the alarm of the loss itself, and below zero it follows. It is false if it begins before the
    burst, or anywhere in a run without one. The last panel shows in what share of runs each burst is found.
    """
    scores = score_runs(records)
    scores = scores[scores["id"].isin(runs["id"])]
    planted = scores[scores["burst"] != NONE]
    if planted.empty:
        raise NothingToDrawError("nothing to draw: not both runs with a burst and runs without one")
    summary = summarize(scores)
    bursts = sorted(planted["burst"].unique())
    columns = layout.columns_for(2, gap=ROW_LABELS)
    heights = [ROW_HEIGHT * (len(summary) + 0.5)] * (4 - columns)
    sheet = Sheet(columns, [*heights, BURST_HEIGHT * len(bursts)])
    shares = sheet.panel(0, 0, gap=ROW_LABELS)
    leads = sheet.panel(*((0, 1) if columns == 2 else (1, 0)), gap=0 if columns == 2 else ROW_LABELS)
    leads.tick_params(labelleft=columns == 1)
    alarms, of_bursts = (sheet.panel(len(heights) - back, 0, columns=columns, gap=ROW_LABELS) for back in (1, 0))
    names = [LABELS[score.kind][0] for score in summary]
    _rows(shares, names, "share of bursts\nfound", map(_found, summary))
    _rows(leads, names, "lead over the loss\n(steps)", map(_lead, summary))
    _rows(alarms, names, "false alarms in 1000 steps", map(_false_alarms, summary))
    marks.name(leads.axvline(0.0, color=style.INK, linewidth=0.9, zorder=1), "as early as the loss")
    shares.set_xlim(*SHARES)
    alarms.set_xlim(left=-0.03 * alarms.get_xlim()[1])
    _by_burst(of_bursts, planted, [score.kind for score in summary], bursts)
    looks = [panels.arm_look(position) | {"linestyle": ""} for position in range(len(names))]
    sheet.keys(("alarm", [panels.arm_key(name, look) for name, look in zip(names, looks, strict=True)]))
    sheet.note("Bars of shares and rates are exact 95 % intervals, as if runs and alarms were independent.")
    sheet.note("The mark of a lead is the median of the bursts with both alarms, and its bar joins the quartiles.")
    sheet.note(
        f"{planted['id'].nunique()} runs have a burst; {summary[0].clean_steps:,} steps are before one or without."
    )
    return sheet


def _found(score: AlarmScore) -> Bar:
    share = score.found
    text = f"found {round(share.mean * share.n)} of {share.n} bursts\n95 % interval {share.low:.2f} to {share.high:.2f}"
    return share.mean, share.low, share.high, text


def _lead(score: AlarmScore) -> Bar:
    low, median, high = score.lead
    text = f"median lead {median:g} steps\nquartiles {low:g} to {high:g}\n{score.leads} bursts with both alarms"
    return median, low, high, text


def _false_alarms(score: AlarmScore) -> Bar:
    rate = score.false_alarms
    text = f"{rate.n} false alarms in {score.clean_steps:,} steps\n95 % interval {rate.low:.3g} to {rate.high:.3g}"
    return rate.mean, rate.low, rate.high, text


def _rows(axes: Axes, names: Sequence[str], label: str, bars: Iterable[Bar]) -> None:
    """A row per alarm: a mark with a bar, and none where there is no value."""
    for row, (value, low, high, text) in enumerate(bars):
        if np.isfinite(value):
            look = panels.arm_look(row)
            ends = [[value - low], [high - value]]
            axes.errorbar([value], [row], xerr=ends, fmt="none", ecolor=look["color"], elinewidth=1, capsize=2.5)
            (line,) = axes.plot([value], [row], markersize=5, linestyle="", **look)
            panels.say(axes, line, [f"{names[row]}\n{text}"])
    _label_rows(axes, names)
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=4)


def _by_burst(axes: Axes, planted: pd.DataFrame, kinds: Sequence[str], bursts: Sequence[str]) -> None:
    """A row per burst, with the share of its runs in which each alarm finds it."""
    hits: Any = planted.groupby(["burst", "kind"])["hit"].agg(["sum", "count"])
    for position, kind in enumerate(kinds):
        offset = ALARM_ROOM * ((position + 0.5) / len(kinds) - 0.5)
        rows = [row for row, burst in enumerate(bursts) if (burst, kind) in hits.index]
        counts = [tuple(hits.loc[(bursts[row], kind)]) for row in rows]
        look = panels.arm_look(position)
        y = [row + offset for row in rows]
        (line,) = axes.plot([n / of for n, of in counts], y, markersize=4, linestyle="", **look)
        texts = [
            f"{bursts[row].replace('_', ' ')}\n{LABELS[kind][0]}\nfound in {n} of {of} runs"
            for row, (n, of) in zip(rows, counts, strict=True)
        ]
        panels.say(axes, line, texts)
    _label_rows(axes, [burst.replace("_", " ") for burst in bursts])
    axes.set_xlim(*SHARES)
    axes.set_xlabel("share of runs found")
    axes.locator_params(axis="x", nbins=4)


def _label_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [style.wrapped(name, ROW_LABELS * style.em()) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
