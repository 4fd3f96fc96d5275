"""Panels of probe values over the steps of training, from which the figures of studies are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.curves import epsilons
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.sensitivity import capped
from lab.analysis.text import count
from lab.records.store import Records

FEWEST_STEPS, MOST_STEPS = 20, 150  # steps drawn per line
MOST_POINTS = 2600  # points in all lines of a figure, so that pages load fast
MOST_PANELS = 8  # panels in a row; with more arms and sizes, only the largest size of each arm is shown
ROW_HEIGHT = 8.5  # in multiples of the size of text


class ProbeSeries(NamedTuple):
    """A probe as a row of panels.

    Attributes:
        probe: the name of the probe.
        where: the part of the model where it is measured; None takes the largest value over the whole model.
        label: the name of the probe for readers.
        scale: the scale of the axis: ``log``, ``asinh``, ``linear`` or ``loss``.
    """

    probe: str
    where: str | None
    label: str
    scale: str = "log"

    @property
    def quantity(self) -> Quantity:
        """The quantity in the hover text of a mark at the end of a line."""
        unit = "nats/token" if self.scale == "loss" else ""
        return Quantity(self.label.partition("\n(")[0].replace("\n", " "), unit, self.scale == "log")


def over_steps(
    records: Records, runs: pd.DataFrame, rows: Sequence[ProbeSeries], line_name: str | None = None
) -> Sheet:
    """Draw probe values over steps: ``rows`` of panels for each arm and size, one line per ``lr``.

    A row that no run recorded is left out.

    Args:
        records: run cards and probe records.
        runs: the runs to draw; columns ``panel`` and ``line``, if present, replace arm and learning rate.
        rows: the rows of panels.
        line_name: the name of the setting in which lines differ, for the key; the axis unless given.

    Raises:
        NothingToDrawError: no run recorded the first row.
    """
    runs = _titled(runs)
    values = {row: table for row in rows if len(table := _values(records, runs, row))}
    if rows[0] not in values:
        raise NothingToDrawError(f"nothing to draw: no run recorded {rows[0].probe}")
    lines = {row: _lines(table, runs, row.scale == "log", len(rows)) for row, table in values.items()}
    shades = style.shades(runs["line"], style.LR_SHADES)
    columns = layout.columns_for(runs["panel"].nunique())
    titles = _grid(runs, columns)
    sheet, facet_axes = layout.facets(titles, [row.label for row in lines], ROW_HEIGHT, columns)
    steps = max(int(table["step"].max()) for table in lines.values())
    runs_of = dict(list(runs[["title", "line", *hover.COLUMNS]].groupby(["title", "line"])))
    for number, (row, table) in enumerate(lines.items()):
        facets = zip(titles, facet_axes, strict=True)
        axes_of: dict[Any, Axes] = {title: of_facet[number] for title, of_facet in facets if of_facet}
        for (title, key), line in table.groupby(["title", "line"]):
            _draw_line(axes_of[title], line, runs_of[title, key], row.quantity, values[row], shades[key])
        if row.scale == "loss":
            for axes in axes_of.values():
                panels.references(axes, runs)
    for of_facet in facet_axes:
        for axes in of_facet[-1:]:
            scales.step_axis(axes, steps)
    for axes, (row, table) in zip(facet_axes[0], lines.items(), strict=True):
        if row.scale == "loss":
            scales.loss_axis(axes, runs, table["mean"])
        else:
            scales.probe_axis(axes, row.scale)
        if row.probe == "grad_rms":
            _epsilons(axes, records, runs, shades if line_name == marks.EPSILON else {})
            scales.y_ticks(axes)
    name = style.axis().peak if line_name is None else line_name
    sheet.keys((name, layout.line_keys(shades) if name else []))
    return sheet


def _titled(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the columns ``panel``, ``line``, and ``title``: the panel, and the size if there are several."""
    if runs.groupby(["arm", "size"]).ngroups > MOST_PANELS:
        runs = runs[runs["size"] == runs.groupby("arm")["size"].transform("max")]
    runs = pd.DataFrame({"panel": runs["arm"], "line": runs["lr"]} | dict(runs))
    sizes = runs["size"].map(count)
    if runs["panel"].nunique() == 1:
        return runs.assign(title=sizes + " parameters")
    return runs.assign(title=runs["panel"] + ", " + sizes if sizes.nunique() > 1 else runs["panel"])


def _grid(runs: pd.DataFrame, columns: int) -> list[str | None]:
    """Titles of the cells, row by row: panels side by side, sizes below one another; None for an empty cell."""
    by_panel = [list(group.sort_values("size")["title"].unique()) for _, group in runs.groupby("panel", sort=False)]
    by_panel += [[]] * (-len(by_panel) % columns)
    bands = (by_panel[start : start + columns] for start in range(0, len(by_panel), columns))
    return [title for band in bands for row in zip_longest(*band) for title in row]


def _draw_line(
    axes: Axes, line: pd.DataFrame, runs: pd.DataFrame, quantity: Quantity, values: pd.DataFrame, colour: str
) -> None:
    """Draw columns ``mean``, ``low`` and ``high`` over ``step``, with the worst outcome of the runs at the end."""
    step_n, mean_n, low_n, high_n = (line[name].to_numpy(dtype=float) for name in ("step", "mean", "low", "high"))
    panels.band(axes, step_n, low_n, high_n, colour, len(runs))
    axes.plot(step_n, mean_n, color=colour, linewidth=1)
    outcome, drawn = panels.worst_outcome(runs["outcome"]), np.flatnonzero(np.isfinite(mean_n))
    if outcome and len(drawn):
        step, mean = int(step_n[drawn[-1]]), mean_n[drawn[-1]]
        at_end = values.loc[(values["step"] == step) & values["id"].isin(runs["id"]), "value"].to_numpy()
        text = hover.text(runs, quantity, at_end, f"step {step}")
        look = {"color": colour, "markersize": 5, "clip_on": False}
        panels.outcome_marks(axes, [step], [mean], outcome, [text], **look)


def _values(records: Records, runs: pd.DataFrame, row: ProbeSeries) -> pd.DataFrame:
    """The values of a row, with their runs; NaN where they cannot be drawn, and losses capped at the initial one."""
    metrics = records.metrics[records.metrics["probe"] == row.probe]
    if row.where is not None:
        metrics = metrics[metrics["where"] == row.where]
    values = metrics.groupby(["id", "step"])["value"].max().reset_index()
    values = values.merge(runs[["id", "title", "line", "loss_at_init"]], on="id")
    if row.scale == "loss":
        values["value"] = capped(values.rename(columns={"value": "loss"}))
    values["value"] = values["value"].where(
        np.isfinite(values["value"]) & ((values["value"] > 0) | (row.scale != "log"))
    )
    return values


def _lines(values: pd.DataFrame, runs: pd.DataFrame, log: bool, rows: int) -> pd.DataFrame:
    """Columns ``title``, ``line``, ``step``, and ``mean``, ``low`` and ``high``, the band over seeds."""
    keys = ["title", "line"]
    most = int(np.clip(MOST_POINTS // (rows * runs.groupby(keys).ngroups), FEWEST_STEPS, MOST_STEPS))

    def is_drawn(steps: pd.Series) -> pd.Series:
        recorded = np.unique(steps)
        return steps.isin(recorded[scales.evenly(len(recorded), most)])

    kept = values[values.groupby("title")["step"].transform(is_drawn)]
    kept = kept.assign(mean=np.log(kept["value"]) if log else kept["value"])
    by_step = kept.groupby([*keys, "step"], sort=False)
    lines = by_step.agg(mean=("mean", "mean"), low=("value", "min"), high=("value", "max"))
    if marks.kind_of_band(runs.groupby(keys).size().max()) == marks.MIDDLE:
        lines["low"] = by_step["value"].quantile(marks.MIDDLE_PART[0])
        lines["high"] = by_step["value"].quantile(marks.MIDDLE_PART[1])
    lines["mean"] = np.exp(lines["mean"]) if log else lines["mean"]
    # end a line where any seed ends, since the mean over the seeds that remain would jump
    seeds = by_step.size()
    return lines.where(by_step["value"].count() == seeds.groupby(keys).transform("max")).reset_index()


def _epsilons(first: Axes, records: Records, runs: pd.DataFrame, shades: Mapping[float, str]) -> None:
    """Draw Adam's epsilons in all panels of a row, each in the colour of its line if ``shades`` has one."""
    for eps in epsilons(records.runs).reindex(runs["id"]).unique():
        for axes in first.get_shared_y_axes().get_siblings(first):
            panels.epsilon(axes, eps, shades.get(eps, style.INK))
