"""Panels of probe values over the steps of training, from which studies make their figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.curves import epsilons
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import count
from lab.records.store import Records

FEWEST_STEPS, MOST_STEPS = 20, 150  # drawn per line
MOST_POINTS = 2600  # in all lines of a figure, so that pages load fast
MOST_STACKS = 8  # of panels, one per arm and size; beyond that only the largest size of each arm is shown
ROW_HEIGHT = 8.5  # in multiples of the size of text


class ProbeSeries(NamedTuple):
    """A probe as a row of panels.

    Attributes:
        probe: its name.
        where: where it listens; None takes the largest value over the whole model.
        label: its name for readers.
        scale: of its axis: ``log``, ``symlog``, ``linear`` or ``loss``.
    """

    probe: str
    where: str | None
    label: str
    scale: str = "log"

    @property
    def quantity(self) -> Quantity:
        """What a mark at the end of a line tells."""
        unit = "nats/token" if self.scale == "loss" else ""
        return Quantity(self.label.partition("\n(")[0].replace("\n", " "), unit, self.scale == "log")


def over_steps(
    records: Records, runs: pd.DataFrame, rows: Sequence[ProbeSeries], line_name: str = "peak learning rate"
) -> Sheet:
    """Draw probe values over steps: a stack of ``rows`` for each size and up to four arms, one line per ``lr``.

    A row that no run recorded is left out.

    Args:
        records: run cards and probe records.
        runs: may have the columns ``panel`` and ``line``, by which panels and lines are told apart instead.
        rows: of panels.
        line_name: what distinguishes the lines.

    Raises:
        NothingToDrawError: no run recorded the first row.
    """
    runs = _arranged(runs)
    values = {row: table for row in rows if len(table := _values(records, runs, row))}
    if rows[0] not in values:
        raise NothingToDrawError(f"nothing to draw: no run recorded {rows[0].probe}")
    lines = {row: _lines(table, runs, row, len(rows)) for row, table in values.items()}
    shades = style.shades(runs["line"], style.LR_SHADES)
    stacks = list(_stacks(runs))
    sheet = Sheet(layout.columns_for(runs["panel"].nunique()), [ROW_HEIGHT] * len(stacks) * len(lines))
    shared: dict[ProbeSeries, Axes] = {}
    for index, (names, size) in enumerate(stacks):
        top = index * len(lines)
        if runs["stack"].nunique() > 1:
            sheet.label_rows(top, top + len(lines) - 1, f"{count(size)} parameters")
        bottom = top + len(lines) - 1 if index + 1 == len(stacks) or stacks[index + 1][0] != names else -1
        is_first = index == 0 or stacks[index - 1][0] != names
        for sheet_row, (row, table) in enumerate(lines.items(), start=top):
            row_lines = table[(table["stack"] == size) & table["panel"].isin(names)]
            left = min(map(names.index, row_lines["panel"]), default=0)
            for name, panel_lines in row_lines.groupby("panel"):
                column = names.index(str(name))
                axes = sheet.panel(sheet_row, column, sharey=shared.get(row), sharex=sheet.first)
                shared.setdefault(row, axes)
                panel_runs = runs[(runs["panel"] == name) & (runs["stack"] == size)]
                _draw_lines(axes, panel_lines, panel_runs, shades, row, values[row])
                if row.scale == "loss":
                    panels.references(axes, runs)
                    scales.loss_axis(axes, runs, table["mean"], row.label)
                axes.set_ylabel(row.label if column == left else "")
                axes.set_xlabel("step" if sheet_row == bottom else "")
                axes.tick_params(labelleft=column == left, labelbottom=sheet_row == bottom)
                if is_first and sheet_row == top:
                    panels.title(axes, str(name))
    scales.step_axis(sheet.figure.axes[0], max(int(table["step"].max()) for table in lines.values()))
    for row, axes in shared.items():
        if row.scale != "loss":
            scales.probe_axis(axes, row.scale)
        if row.probe == "grad_rms":
            _epsilons(axes, records, runs, shades if line_name == marks.EPSILON else {})
            scales.y_ticks(axes)
    sheet.keys((line_name, layout.line_keys(shades, "{:g}".format)))
    return sheet


def _arranged(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the columns ``panel``, ``stack`` (a size, or 0 where sizes are told by panels) and ``line``."""
    if runs.groupby(["arm", "size"]).ngroups > MOST_STACKS:
        runs = runs[runs["size"] == runs.groupby("arm")["size"].transform("max")]
    runs = pd.DataFrame({"panel": runs["arm"], "stack": runs["size"], "line": runs["lr"]} | dict(runs))
    sizes = runs["size"].map(lambda size: f"{count(size)} parameters")
    if runs["panel"].nunique() == 1:
        return runs.assign(panel=sizes, stack=0)
    if runs["size"].nunique() > 1 and (runs.groupby("panel")["size"].nunique() == 1).all():
        return runs.assign(panel=runs["panel"] + ", " + sizes, stack=0)
    return runs


def _draw_lines(
    axes: Axes,
    lines: pd.DataFrame,
    runs: pd.DataFrame,
    shades: Mapping[Any, str],
    row: ProbeSeries,
    values: pd.DataFrame,
) -> None:
    """Draw the lines of a panel."""
    for key, line in lines.groupby("line"):
        of_line = (runs["line"] == key).to_numpy()

        def text_at(step: int, of_line: Any = of_line) -> str:
            at_end = values.loc[(values["step"] == step) & values["id"].isin(runs["id"][of_line]), "value"]
            return hover.HoverText(runs).point(of_line, row.quantity, at_end.to_numpy(), f"step {step}")

        panels.over_steps(axes, line, shades[key], int(of_line.sum()), text_at)


def _stacks(runs: pd.DataFrame) -> Iterator[tuple[list[str], int]]:
    """Groups of panels that stand side by side, with each of their sizes."""
    names = list(dict.fromkeys(runs["panel"]))
    columns = layout.columns_for(len(names))
    for start in range(0, len(names), columns):
        group = names[start : start + columns]
        for size in sorted(runs.loc[runs["panel"].isin(group), "stack"].unique()):
            yield group, int(size)


def _values(records: Records, runs: pd.DataFrame, row: ProbeSeries) -> pd.DataFrame:
    """The values of a row that can be drawn, with their runs; others are NaN, but losses at initialization."""
    metrics = records.metrics[records.metrics["probe"] == row.probe]
    if row.where is not None:
        metrics = metrics[metrics["where"] == row.where]
    values = metrics.groupby(["id", "step"])["value"].max().reset_index().merge(runs, on="id")
    if row.scale == "loss":
        init = values["loss_at_init"]
        values["value"] = np.where(np.isfinite(values["value"]), np.fmin(values["value"], init), init)
    values["value"] = values["value"].where(
        np.isfinite(values["value"]) & ((values["value"] > 0) | (row.scale != "log"))
    )
    return values


def _lines(values: pd.DataFrame, runs: pd.DataFrame, row: ProbeSeries, rows: int) -> pd.DataFrame:
    """Columns ``panel``, ``stack``, ``line``, ``step``; ``mean`` and band over seeds; and the worst ``outcome``."""
    keys = ["panel", "stack", "line"]
    most = int(np.clip(MOST_POINTS // (rows * runs.groupby(keys).ngroups), FEWEST_STEPS, MOST_STEPS))
    thinned = [
        table[table["step"].isin(_evenly(table["step"], most))]
        for _, table in values.groupby(["panel", "stack"], sort=False)
    ]
    kept = pd.concat([values.head(0), *thinned])
    kept["mean"] = np.log(kept["value"]) if row.scale == "log" else kept["value"]
    by_step = kept.groupby([*keys, "step"], sort=False)
    lines = by_step.agg(mean=("mean", "mean"), low=("value", "min"), high=("value", "max"))
    if marks.kind_of_band(runs.groupby(keys).size().max()) == marks.MIDDLE:
        lines["low"] = by_step["value"].quantile(marks.MIDDLE_PART[0])
        lines["high"] = by_step["value"].quantile(marks.MIDDLE_PART[1])
    lines["mean"] = np.exp(lines["mean"]) if row.scale == "log" else lines["mean"]
    # end a line where any seed ends, since the mean over the seeds that remain would jump
    seeds = by_step.size()
    lines = lines.where(by_step["value"].count() == seeds.groupby(keys).transform("max")).reset_index()
    return lines.merge(runs.groupby(keys)["outcome"].agg(panels.worst_outcome).reset_index(), on=keys)


def _evenly(steps: pd.Series, most: int) -> Any:
    """At most so many of the steps, evenly spaced from first to last."""
    recorded = np.unique(steps)
    return recorded[np.unique(np.linspace(0, len(recorded) - 1, min(len(recorded), most)).round().astype(int))]


def _epsilons(first: Axes, records: Records, runs: pd.DataFrame, shades: Mapping[float, str]) -> None:
    """Draw Adam's epsilons in all panels of a row, each in the colour of its line if ``shades`` has one."""
    for eps in epsilons(records.runs).reindex(runs["id"]).unique():
        for axes in first.get_shared_y_axes().get_siblings(first):
            panels.epsilon(axes, eps, shades.get(eps, style.INK))
