"""Figure of bursts that come several times: what their number does to the final loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.rendering import hover, layout, marks, panels, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.statistics import Interval, student_t
from lab.records.store import Records
from lab.studies.spikes.figures import Cost
from lab.studies.spikes.repeats import CLEAN, repeated_costs, with_changes

# Room for names of rows and their height, in multiples of the size of text.
ROW_LABELS, ROW_HEIGHT = 11.0, 2.4
ROOM = 0.5  # of a row, the part that the learning rates share


COLUMNS = (
    Cost(
        "change",
        "final loss above\nthat without a burst\n(nats/token)",
        Quantity("final loss minus that without a burst", "nats/token"),
    ),
    Cost(
        "peak", "largest peak above\nthe usual held-out\nloss (nats/token)", Quantity("peak excess loss", "nats/token")
    ),
)


@figure("repeated_bursts")
def repeated_bursts(records: Records, runs: pd.DataFrame) -> Sheet:
    """Final loss and largest peak by the number of bursts, a mark per learning rate.

    The final loss is the change from the run of the same learning rate and seed that meets no burst and is as long as
    the longest. Damage that lasts is what many bursts add to the last of them alone, and to a run that is shorter by as
    many batches.
    """
    costs = with_changes(repeated_costs(records).merge(runs, on="id"))
    if costs["change"].isna().all():
        raise NothingToDrawError("nothing to draw: no burst comes several times beside runs without one")
    names = [name for name in dict.fromkeys(costs["name"]) if name != CLEAN]
    columns = layout.columns_for(len(COLUMNS), gap=ROW_LABELS)
    sheet = Sheet(columns, [ROW_HEIGHT * (len(names) + 0.5)] * -(-len(COLUMNS) // columns))
    shades = style.shades(costs["lr"], style.LR_SHADES)
    for index, column in enumerate(COLUMNS):
        axes = sheet.panel(index // columns, index % columns, gap=ROW_LABELS if index % columns == 0 else 0.0)
        _panel(axes, costs, names, column, shades)
        axes.set_yticks(range(len(names)), [style.wrapped(name, ROW_LABELS * style.em()) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(labelleft=index % columns == 0)
        axes.set_xlabel(column.label)
        axes.locator_params(axis="x", nbins=4)
        marks.name(axes.axvline(0.0, color=style.INK, linewidth=0.9, zorder=1), "no difference")
    sheet.keys(("peak learning rate", layout.line_keys(shades, "{:g}".format)))
    return sheet


def _panel(axes: Axes, costs: pd.DataFrame, names: Sequence[str], column: Cost, shades: dict[float, str]) -> None:
    """A dot and an interval for each row and learning rate."""
    for position, (lr, shade) in enumerate(shades.items()):
        offset = ROOM * ((position + 0.5) / len(shades) - 0.5)
        values, rows, texts = list[Interval](), list[float](), list[str]()
        for row, name in enumerate(names):
            shown = costs[(costs["name"] == name) & (costs["lr"] == lr)]
            numbers = shown[column.column].replace([np.inf, -np.inf], np.nan).dropna().to_numpy(dtype=float)
            if len(numbers):
                values.append(student_t(numbers))
                rows.append(row + offset)
                texts.append(
                    hover.HoverText(shown).point(np.ones(len(shown), dtype=bool), column.quantity, numbers, name)
                )
        if values:
            panels.draw_intervals(axes, rows, values, texts, sideways=True, linestyle="", marker="o", color=shade)
