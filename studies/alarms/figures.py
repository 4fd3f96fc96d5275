"""Figure of alarms on labelled runs: which bursts each alarm finds, how early, and how often it is false."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.rendering import layout, panels
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import Interval
from lab.records.store import Records
from labwatch.events.detectors import LABELS
from labwatch.events.score_panels import alarm_dots
from labwatch.events.scores import NONE, score_runs, summarize
from studies.claims import row_panels

BURST_HEIGHT = 2.6  # height of the row of a burst, in multiples of the size of text


@figure("detector_scores")
def detector_scores(records: Records, runs: pd.DataFrame) -> Sheet:
    """Scores of alarms on planted loss spikes: hits, lead over the loss, and false alarms.

    A burst is a stretch of bad batches injected into the data. An alarm finds a burst if it begins between the burst's
    first step and 20 measurements after its last. Its lead is the number of steps from there to the alarm of the loss
    itself, negative if it comes later. It is false if it begins before the burst, or in a run without one. The last
    panel shows the share of runs in which each burst is found.
    """
    scores = score_runs(records)
    scores = scores[scores["id"].isin(runs["id"])]
    planted = scores[scores["bad_batches"] != NONE]
    if planted.empty:
        raise NothingToDrawError("nothing to draw: there are no runs with a burst, or none without")
    summary = summarize(scores)
    bursts = sorted(planted["bad_batches"].unique())
    looks = panels.arm_looks(LABELS[score.kind]["name"] for score in summary)
    height, columns = panels.rows_height(looks), layout.columns_for(2, panels.NARROWEST_ROWS)
    below = [height, BURST_HEIGHT * len(bursts)]
    sheet, ((shares,), (leads,)) = layout.facets(["", ""], [""], height, columns, below=below)
    alarms, of_bursts = sheet.panel(-2, 0, columns), sheet.panel(-1, 0, columns)
    for axes, (label, dots) in zip((shares, leads, alarms), alarm_dots(summary, "bursts").items(), strict=True):
        for row, look in enumerate(looks.values()):
            panels.rows(axes, list(looks), [(look, {row: dots[row]})])
        axes.set_xlabel(label)
    panels.level(leads, 0.0, "as early as the loss", upright=True)
    row_panels.share_axis(shares, "share of bursts\nfound")
    alarms.set_xlim(left=-0.03 * alarms.get_xlim()[1])
    groups = [
        (look, _by_burst(planted, score.kind, bursts)) for score, look in zip(summary, looks.values(), strict=True)
    ]
    panels.rows(of_bursts, [burst.replace("_", " ") for burst in bursts], groups)
    row_panels.share_axis(of_bursts, "share of runs found")
    sheet.keys(("alarm", panels.arm_keys(looks, linestyle="")))
    sheet.note("Bars of shares and rates are exact 95 % intervals for independent runs and alarms.")
    sheet.note("The mark of a lead is the median over bursts with both alarms, and its bar joins the quartiles.")
    sheet.note(f"{planted['id'].nunique()} runs have a burst; {summary[0].clean_steps:,} steps lie outside.")
    return sheet


def _by_burst(planted: pd.DataFrame, kind: str, bursts: Sequence[str]) -> dict[int, Dot]:
    """For each burst, the share of its runs in which the alarm finds it; by number of its row."""
    dots = {}
    for row, burst in enumerate(bursts):
        hits = planted.loc[(planted["kind"] == kind) & (planted["bad_batches"] == burst), "hit"]
        if len(hits):
            n, of = int(hits.sum()), len(hits)
            text = f"{burst.replace('_', ' ')}\n{LABELS[kind]['name']}\nfound in {n} of {of} runs"
            dots[row] = Dot(Interval(n / of, math.nan, math.nan, of), text)
    return dots
