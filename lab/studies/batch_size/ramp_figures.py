"""Figure of batches that grow: the batch and the loss at equal tokens, by batch schedule."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import arm_labels
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.statistics import student_t
from lab.records.store import Records
from lab.studies.batch_size.estimates import Numbers
from lab.studies.batch_size.ramps import loss_at, over_tokens

CONSTANT = "constant"
DIFFERENCE = Quantity("final loss minus that of the constant batch", "nats/token")
LEVEL = "constant batch"
SHARES = np.geomspace(1, 100, 80)  # of the tokens, percent, at which lines are drawn
ROW = 1.8  # height of a row of the lower panel, in multiples of the size of text

Curves = dict[str, pd.DataFrame]  # by seed, a run of ``over_tokens``


@figure("batch_ramps")
def batch_ramps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Batch size and held-out loss over the tokens, one line per batch schedule, and final losses.

    Losses are those minus the loss of the constant batch, the same seed at as many tokens: below zero a schedule is
    ahead. Each schedule and seed has the learning rate with the lowest final loss of those tried. Lines and dots are
    means over seeds; the axis of tokens is logarithmic.
    """
    best = _best(records, runs)
    names = list(dict.fromkeys(best["batch"]))
    looks = {name: panels.arm_look(position) for position, name in enumerate(names)}
    curves = _curves(records, best)
    columns = layout.columns_for(2, gap=layout.LEFT)
    below = 2 // columns
    sheet = Sheet(columns, [15.0] * below + [ROW * (len(names) - 1) + 0.8])
    batch_axes = sheet.panel(0, 0)
    loss_axes = sheet.panel(below - 1, columns - 1, gap=layout.LEFT * (columns - 1), sharex=batch_axes)
    for name, look in looks.items():
        _draw_batch(batch_axes, curves[name], look)
        if name != CONSTANT:
            _draw_differences(loss_axes, curves[name], curves[CONSTANT], look)
    scales.share_axis(batch_axes, float(SHARES[0]))
    for axes, label in ((batch_axes, "batch, sequences"), (loss_axes, "loss minus that of the\nconstant (nats/token)")):
        axes.set_xlabel("tokens, % of the run")
        axes.set_ylabel(label)
    scales.probe_axis(batch_axes)
    marks.name(loss_axes.axhline(0, color=style.INK, linewidth=0.9, linestyle=style.DASHED, zorder=1), LEVEL)
    _draw_final(sheet.panel(below, 0, columns, gap=1.5), best, looks)
    sheet.keys(("batch", [panels.arm_key(name, look | {"marker": ""}) for name, look in looks.items()]))
    sheet.explain(LEVEL, "The dashed lines are the constant batch itself.")
    return sheet


def _best(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """The best run of each seed and batch schedule, at the largest size, with the column ``batch``.

    Raises:
        NothingToDrawError: there is no constant batch and another, other settings differ too, or no batch was recorded.
    """
    names = records.runs.set_index("id").reindex(columns=["batch.name"])["batch.name"]
    best: pd.DataFrame = runs[(runs["lr"] == runs["best_lr"]) & (runs["size"] == runs["size"].max())]
    best = best.assign(batch=best["id"].map(names)).dropna(subset=["batch"])
    if CONSTANT not in set(best["batch"]) or best["batch"].nunique() < 2:
        raise NothingToDrawError("nothing to draw: no batch that grows beside a constant one")
    of_batch = [key for key in map(str, records.runs) if key.startswith("batch.")]
    if best["id"].map(arm_labels(records.runs, [*of_batch, "steps"])).nunique() > 1:
        raise NothingToDrawError("nothing to draw: other settings differ besides the batch")
    if not set(best["id"]) <= set(records.metrics.loc[records.metrics["probe"] == "batch", "id"]):
        raise NothingToDrawError("nothing to draw: no run recorded its batch")
    return best.sort_values("batch", key=lambda each: each == CONSTANT, kind="stable")


def _curves(records: Records, best: pd.DataFrame) -> dict[str, Curves]:
    """By batch schedule and seed, loss and batch over tokens in percent of the run's."""
    over = over_tokens(records.of(best["id"]))
    total = records.runs.set_index("id")["tokens"].astype(float)
    shares = {name: run.assign(tokens=run["tokens"] * 100 / total[name]) for name, run in over.items()}
    return {
        str(name): {str(seed): shares[run] for seed, run in zip(group["seed"], group["id"], strict=True)}
        for name, group in best.groupby("batch")
    }


def _draw_batch(axes: Axes, curves: Curves, look: Mapping[str, Any]) -> None:
    batch_sn = np.array([_held(run) for run in curves.values()])
    axes.plot(SHARES, batch_sn.mean(axis=0), color=look["color"])
    panels.band(axes, SHARES, batch_sn.min(axis=0), batch_sn.max(axis=0), str(look["color"]), len(batch_sn))


def _held(run: pd.DataFrame) -> Numbers:
    """Batch at each of ``SHARES``, that of the last record."""
    at = np.searchsorted(run["tokens"].to_numpy(dtype=float), SHARES, side="right") - 1
    held: Numbers = run["sequences"].to_numpy(dtype=float)[at]
    return held


def _draw_differences(axes: Axes, curves: Curves, constants: Curves, look: Mapping[str, Any]) -> None:
    seeds = [seed for seed in curves if seed in constants]
    if not seeds:
        return
    ahead_sn = np.array([loss_at(curves[seed], SHARES) - loss_at(constants[seed], SHARES) for seed in seeds])
    axes.plot(SHARES, ahead_sn.mean(axis=0), color=look["color"])
    panels.band(axes, SHARES, ahead_sn.min(axis=0), ahead_sn.max(axis=0), str(look["color"]), len(seeds))


def _draw_final(axes: Axes, best: pd.DataFrame, looks: Mapping[Hashable, Mapping[str, Any]]) -> None:
    """A row per schedule but the constant one: its final loss minus that of the constant batch, paired by seed."""
    told = hover.HoverText(best)
    constant = best[best["batch"] == CONSTANT].set_index("seed")["capped"]
    shown = [name for name in looks if name != CONSTANT]
    for row, name in enumerate(shown):
        of_name = best[best["batch"] == name].set_index("seed")["capped"]
        interval = student_t((of_name - constant).dropna())
        text = told.point((best["batch"] == name).to_numpy(), DIFFERENCE, np.array(interval.values))
        look = {**looks[name], "marker": "o", "linestyle": ""}
        if not math.isnan(interval.mean):
            panels.draw_intervals(axes, [row], [interval], [text], sideways=True, **look)
    marks.name(axes.axvline(0, color=style.INK, linewidth=0.9, linestyle=style.DASHED, zorder=1), LEVEL)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks(range(len(shown)), [str(name) for name in shown])
    scales.x_label(axes, "final held-out loss minus that of the constant batch (nats/token)")
