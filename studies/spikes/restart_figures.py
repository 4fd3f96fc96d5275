"""The figure of restarts by hand: loss over steps beside runs without restarts, and the changes of each restart.

A restart log (config group ``restarts``) lists the steps at which a run is restarted with other settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import arm_labels
from lab.analysis.rendering import layout, marks, scales, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import number
from lab.records.store import ENTRIES, Records
from studies.spikes.restart_effects import NONE, RESTARTS, RecordedRestart, restarts_of

LOSSES = {"val_loss": "held-out loss\n(nats/token)", "train_loss": "training loss\n(nats/token)"}
FEWEST_STEPS, MOST_POINTS = 10, 100  # fewest steps of a loss that is drawn, most points of a line
START = 0.05  # first share of the steps, left out since every loss falls steeply there
# In multiples of the size of text: the height of the lines, of the leaders to texts and of the gap at their end; and
# the distance from one text to the next.
CURVES, LEADERS, GAP, APART = 9.0, 1.0, 0.25, 1.2
MOST_TICKS = 5
CONTROL = "without restarts"


@figure("restarts")
def restart_schedules(records: Records, runs: pd.DataFrame) -> Sheet:
    """Loss over steps of runs with a restart log, beside runs that differ only in having none.

    A restart log lists the steps at which a run is restarted with other settings. A thin upright line is a restart, and
    the text above it shows the settings that changed. Learning rates (LR) and weight decays are multiples of those at
    the start. Solid lines are means over the seeds of restarted runs and over a few steps. The first twentieth of the
    steps is left out.
    """
    table = _arranged(records, runs)
    groups = [group for _, group in table[table[RESTARTS] != NONE].groupby(["rest", RESTARTS], sort=False)]
    if not groups:
        raise NothingToDrawError("nothing to draw: no run has a restart log")
    label, lines = _lines(records, table)
    steps = int(records.runs["steps"].max())
    cards = {card["id"]: card for card in records.runs.to_dict("records")}
    restarts = [restarts_of(cards[group["id"].iloc[0]]) for group in groups]
    heights = [CURVES + LEADERS + _longest(changes) for changes in restarts]
    sheet = Sheet(1, heights)
    shades = style.shades(table["lr"], style.LR_SHADES)
    for row, (group, group_restarts) in enumerate(zip(groups, restarts, strict=True)):
        axes = sheet.panel(row, 0)
        untreated = table[(table[RESTARTS] == NONE) & (table["rest"] == group["rest"].iloc[0])]
        for (_, lr), line in lines[lines["curve"].isin(untreated["curve"])].groupby(["curve", "lr"]):
            (drawn,) = axes.plot(line["step"], line["value"], color=shades[lr], linewidth=1, linestyle=style.DASHED)
            marks.name(drawn, CONTROL)
        for (_, lr), line in lines[lines["curve"].isin(group["curve"])].groupby(["curve", "lr"]):
            axes.plot(line["step"], line["value"], color=shades[lr])
        axes.set_xlim(START * steps, steps)
        _restarts(axes, lines["value"], group_restarts, heights[row])
        axes.set_ylabel(label, y=CURVES / heights[row] / 2)
        axes.set_xlabel("step" if row == len(groups) - 1 else "")
        axes.tick_params(labelbottom=row == len(groups) - 1)
        axes.set_title(style.wrapped(group["name"].iloc[0], sheet.column_width))
    sheet.keys(("peak learning rate", layout.line_keys(shades)))
    sheet.explain(CONTROL, "Dashed lines are those of runs without restarts.")
    for sentence in _onsets(records):
        sheet.note(sentence)
    return sheet


def _arranged(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the columns ``restarts``, ``rest`` (the label of the arm without it) and ``name`` of a panel."""
    schedules = records.runs.set_index("id").reindex(columns=[RESTARTS])[RESTARTS].fillna(NONE)
    rest = arm_labels(records.runs, (RESTARTS, ENTRIES))
    table = runs.assign(**{RESTARTS: runs["id"].map(schedules), "rest": runs["id"].map(rest)})
    names = table[RESTARTS] + (", " + table["rest"] if table["rest"].nunique() > 1 else "")
    return table.assign(name=names.str.replace("_", " "))


def _lines(records: Records, table: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The label of the loss that is drawn, and its mean over seeds and a few steps, by ``curve`` and ``lr``.

    Raises:
        NothingToDrawError: no run recorded a loss at more than a few steps.
    """
    metrics = records.metrics.merge(table[["id", "curve", "lr"]], on="id").merge(records.runs[["id", "steps"]], on="id")
    for probe, label in LOSSES.items():
        # the held-out loss of the last step is on all held-out text, others are on a slice
        inner = (metrics["step"] >= START * metrics["steps"]) & (metrics["step"] < metrics["steps"] - 1)
        values = metrics[(metrics["probe"] == probe) & np.isfinite(metrics["value"]) & inner]
        steps, rank = np.unique(values["step"], return_inverse=True)
        if len(steps) >= FEWEST_STEPS:
            points = min(len(steps), MOST_POINTS)
            by_point = values.groupby(["curve", "lr", rank * points // len(steps)])[["step", "value"]]
            return label, by_point.mean().reset_index(["curve", "lr"])
    raise NothingToDrawError("nothing to draw: no run recorded its loss over steps")


def _longest(changes: Sequence[RecordedRestart]) -> float:
    """Length of the longest text, in multiples of the size of text; without restarts that of none."""
    small = style.page().size * style.SMALL
    return max((style.text_width(restart.changes, small) for restart in changes), default=0.0) / style.em() + 0.3


def _restarts(axes: Axes, values: pd.Series, changes: Sequence[RecordedRestart], height: float) -> None:
    """Set the y axis of a panel of this height, so that lines take its lower part only, and mark the restarts."""
    low, high = float(values.min()) / 1.03, float(values.max()) * 1.03
    axes.set_yscale("log")
    axes.set_ylim(low, low * (high / low) ** (height / CURVES))
    ticks = scales.log_ticks(low, high, MOST_TICKS)
    axes.set_yticks(ticks, list(map(number, ticks)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.spines["left"].set_bounds(low, high)
    end, below_text = (low * (high / low) ** (1 + part / CURVES) for part in (LEADERS - GAP, LEADERS))
    least = APART * style.SMALL * style.em() / scales.width(axes) * np.diff(axes.get_xlim())[0]
    for restart, x in zip(changes, scales.spread([restart.step for restart in changes], least), strict=True):
        corners = [restart.step, restart.step, x], [low, high, end]
        axes.plot(*corners, color=style.INK, linewidth=0.7, zorder=1)
        look: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "bottom", "size": style.page().size * style.SMALL}
        axes.text(x, below_text, restart.changes, **look)


def _onsets(records: Records) -> list[str]:
    """A sentence on the first step of each burst."""
    cards = records.runs.reindex(columns=["id", "bad_batches"])
    bursts = records.events[records.events["kind"] == "burst"].merge(cards, on="id")
    steps = bursts.groupby("bad_batches")["step"].agg(["min", "max"])
    return [
        f"The burst {name.replace('_', ' ')} begins at step {first}{'' if first == last else f' to {last}'}."
        for name, (first, last) in zip(steps.index, steps.itertuples(index=False), strict=True)
    ]
