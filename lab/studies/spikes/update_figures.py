"""The figure of updates around planted loss spikes: their size, and cosines of updates and gradients."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator

from lab.analysis.curves import EPSILON
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.events.costs import HELD_OUT, NONE, first_onsets
from lab.analysis.rendering import panels, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import spell
from lab.records.store import Records
from lab.studies.spikes.adam_updates import ALL_WEIGHTS, DESCENT, LAG, RMS
from lab.studies.spikes.figures import BURST

# Steps shown before the burst begins, and after it.
BEFORE, AFTER = 30, 60
LARGE_SHARE, MEAN = "update_large", "mean over tensors"
BATCH = "batch_size"
UNCORRELATED = "uncorrelated"
ROWS = (
    ProbeSeries(HELD_OUT, "", "held-out loss\n(nats/token)"),
    ProbeSeries(RMS, MEAN, "update RMS"),
    ProbeSeries(LARGE_SHARE, MEAN, "share of entries\nabove 0.8", "linear"),
    ProbeSeries(DESCENT, ALL_WEIGHTS, "cosine with\nthe descent", "linear"),
    ProbeSeries(LAG, ALL_WEIGHTS, "cosine with the\nlast gradient", "linear"),
)


@figure("updates_and_descent")
def updates_and_descent(records: Records, runs: pd.DataFrame) -> Sheet:
    """Updates around a planted loss spike, on one axis of steps, one line per batch size.

    The first panel is the held-out loss before each update. Then come the root mean square of the update and the share
    of its entries above 0.8, both means over tensors. Below is the cosine of the update with the steepest descent of
    the held-out loss, which is positive for an update that lowers this loss. The last panel is the cosine of the
    gradient with that of the step before. The update is Adam's, before learning rate and decay. Lines are means over
    seeds.
    """
    onsets = first_onsets(records)
    around = _around(records, onsets)
    cards = records.runs.set_index("id").reindex(columns=["burst", "response", BATCH, EPSILON])
    met = runs[runs["id"].isin(onsets.index) & runs["id"].map(cards["response"]).fillna(NONE).eq(NONE)]
    met = met[met["lr"] == met["lr"].max()]
    met = met.join(cards[["burst", BATCH, EPSILON]], on="id").sort_values(["burst", EPSILON, BATCH])
    bursts = met["burst"].astype(str).str.replace("_", " ")
    titles = bursts + ", epsilon " + met[EPSILON].map(spell) if met[EPSILON].nunique() > 1 else bursts
    met = met.assign(panel=titles, line=met[BATCH])
    sheet = over_steps(around, met, ROWS, "sequences of a batch")
    onset = float(onsets[met["id"]].median())
    for axes in sheet.figure.axes:
        axes.set_xlim(onset - BEFORE, onset + AFTER)
        axes.xaxis.set_major_locator(FixedLocator([onset, onset + AFTER / 2, onset + AFTER]))
        panels.level(axes, onset, BURST, style.DASHED, upright=True)
        if any((np.asarray(line.get_ydata()) < 0).any() for line in axes.lines[:-1]):
            panels.level(axes, 0.0, UNCORRELATED)
    sheet.explain(BURST, "The dashed line marks the beginning of the burst, a stretch of injected bad batches.")
    return sheet


def _around(records: Records, onsets: pd.Series) -> Records:
    """The records near the onsets, with means over tensors.

    Raises:
        NothingToDrawError: no run with a burst recorded the cosines.
    """
    metrics = records.metrics[records.metrics["id"].isin(onsets.index)]
    if not {DESCENT, LAG} <= set(metrics["probe"]):
        raise NothingToDrawError(f"nothing to draw: no run has a burst and recorded {DESCENT} and {LAG}")
    metrics = metrics[(metrics["step"] - metrics["id"].map(onsets)).between(-BEFORE, AFTER)]
    of_tensors = metrics[metrics["probe"].isin([RMS, LARGE_SHARE])]
    means = of_tensors.groupby(["id", "step", "probe"], observed=True)["value"].mean().reset_index()
    return records._replace(metrics=pd.concat([metrics, means.assign(where=MEAN)]))
