"""Figure of batches that grow: batch size and loss at equal tokens, by batch schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import arm_labels
from lab.analysis.rendering import hover, layout, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import student_t
from lab.analysis.text import number
from lab.records.store import Records
from lab.studies.batch_size.estimates import Numbers
from lab.studies.batch_size.ramps import loss_at, over_tokens

CONSTANT = "constant"
DIFFERENCE = Quantity("final loss minus that of the constant batch", "nats/token")
LEVEL = "constant batch"
TICKS = (1, 2, 5, 10, 20, 50, 100)
SHARES = np.geomspace(1, 100, 80)  # of the tokens, percent, at which lines are drawn

Curves = dict[str, pd.DataFrame]  # by seed, a run of ``over_tokens``


@figure("batch_ramps")
def batch_ramps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Batch size and held-out loss over the tokens, one line per batch schedule, and final losses.

    Losses are relative to the constant batch with the same seed and at as many tokens: below zero a schedule is ahead.
    Each schedule and seed has the learning rate with the lowest final loss of those tried. Lines and dots are means
    over seeds. The axis of tokens is logarithmic.
    """
    best = _best(records, runs)
    names = list(dict.fromkeys(best["batch"]))
    looks = {name: panels.arm_look(position) for position, name in enumerate(names)}
    curves = _curves(records, best)
    rows = [name for name in names if name != CONSTANT]
    columns = layout.columns_for(2, panels.NARROWEST_ROWS)
    below = [panels.rows_height(rows)]
    sheet, ((batch_axes,), (loss_axes,)) = layout.facets(["", ""], [""], 15.0, columns, share_y=False, below=below)
    for name, look in looks.items():
        _line(batch_axes, np.array([_held(run) for run in curves[name].values()]), look)
        seeds = [seed for seed in curves[name] if seed in curves[CONSTANT]]
        if name != CONSTANT and seeds:
            losses_of, constants = ([loss_at(curves[key][seed], SHARES) for seed in seeds] for key in (name, CONSTANT))
            _line(loss_axes, np.array(losses_of) - np.array(constants), look)
    for axes, label in ((batch_axes, "batch, sequences"), (loss_axes, "loss minus that of the\nconstant (nats/token)")):
        scales.x_axis(axes, "tokens, % of the run", SHARES, TICKS, number)
        axes.set_ylabel(label)
    scales.probe_axis(batch_axes)
    panels.level(loss_axes, 0.0, LEVEL, style.DASHED)
    bottom = sheet.panel(-1, 0, sheet.columns)
    for group in _final(best, rows, looks):
        panels.rows(bottom, rows, [group])
    panels.level(bottom, 0.0, LEVEL, style.DASHED, upright=True)
    bottom.set_xlabel("final held-out loss minus that\nof the constant batch (nats/token)")
    sheet.keys(("batch", [panels.arm_key(name, look | {"marker": ""}) for name, look in looks.items()]))
    sheet.explain(LEVEL, "The dashed lines are the constant batch itself.")
    return sheet


def _best(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """The best run of each seed and batch schedule, at the largest size, with the column ``batch``.

    Raises:
        NothingToDrawError: there is no growing batch beside a constant one, other settings differ, too, or no run
            recorded its batch.
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
    """Loss and batch over tokens, in percent of the run's tokens, by batch schedule and seed."""
    over = over_tokens(records.of(best["id"]))
    total = records.runs.set_index("id")["tokens"].astype(float)
    shares = {name: run.assign(tokens=run["tokens"] * 100 / total[name]) for name, run in over.items()}
    return {
        str(name): {str(seed): shares[run] for seed, run in zip(group["seed"], group["id"], strict=True)}
        for name, group in best.groupby("batch")
    }


def _line(axes: Axes, values_sn: Numbers, look: Mapping[str, Any]) -> None:
    """Draw the mean over seeds at each of ``SHARES``, with the band from the lowest to the highest."""
    axes.plot(SHARES, values_sn.mean(axis=0), color=look["color"], linestyle=look["linestyle"])
    panels.band(axes, SHARES, values_sn.min(axis=0), values_sn.max(axis=0), look["color"], len(values_sn))


def _held(run: pd.DataFrame) -> Numbers:
    """Batch at each of ``SHARES``: that of the last record before."""
    at = np.searchsorted(run["tokens"].to_numpy(dtype=float), SHARES, side="right") - 1
    held: Numbers = run["sequences"].to_numpy(dtype=float)[at]
    return held


def _final(
    best: pd.DataFrame, names: Sequence[str], looks: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], dict[int, Dot]]]:
    """Yield, for each schedule, its look and the dot of its final loss minus that of the constant batch, by row."""
    constant = best[best["batch"] == CONSTANT].set_index("seed")["capped"]
    for row, name in enumerate(names):
        of_name = best[best["batch"] == name]
        changes = (of_name.set_index("seed")["capped"] - constant).dropna().to_numpy()
        text = hover.HoverText(of_name).point(slice(None), DIFFERENCE, changes)
        yield {**looks[name], "marker": "o"}, {row: Dot(student_t(changes), text)} if len(changes) else {}
