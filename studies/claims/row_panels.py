"""Panels of rows, with a dot and its interval for each group that a row has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.rendering import layout
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.panels import dots, level, row_panels, rows


def share_axis(axes: Axes, name: str) -> None:
    """Set an x axis of shares from 0 to 1 with room for marks at both ends."""
    axes.set_xlim(-0.03, 1.03)
    axes.set_xlabel(name)


Looks = Mapping[Any, Mapping[str, Any]]  # looks of dots, by the value that they stand for


class RowPanel(NamedTuple):
    """A panel of rows.

    Attributes:
        column: the column of the table.
        label: the label of the axis.
        quantity: the quantity in hover texts.
        is_difference: whether values lie on both sides of zero, which then has a line.
        begins_at_zero: whether the axis begins at zero.
    """

    column: str
    label: str
    quantity: Quantity
    is_difference: bool = False
    begins_at_zero: bool = True


def grouped_rows(
    table: pd.DataFrame, panels_of: Sequence[RowPanel], names: Sequence[str], by: str, looks: Looks
) -> layout.Sheet:
    """A panel for each of these, with a row for each ``name`` that holds a dot for each value of the column ``by``."""
    sheet, row_axes = row_panels(names, len(panels_of))
    for axes, panel in zip(row_axes, panels_of, strict=True):
        row_panel(axes, table, panel, names, by, looks)
    return sheet


def row_panel(axes: Axes, table: pd.DataFrame, panel: RowPanel, names: Sequence[str], by: str, looks: Looks) -> None:
    """Draw one panel of ``grouped_rows``."""
    of_group = {key: table[table[by] == key] for key in looks}
    shown = [dots(of_key, panel.column, panel.quantity, names, f"{by}: {key}") for key, of_key in of_group.items()]
    rows(axes, names, list(zip(looks.values(), shown, strict=True)))
    axes.set_xlabel(panel.label)
    if panel.is_difference:
        level(axes, 0.0, "no difference", upright=True)
    elif panel.begins_at_zero:
        axes.set_xlim(left=0)
