"""Figures of the search: which setting makes the cliff, and the curves behind it."""

from __future__ import annotations

import pandas as pd

from lab.analysis.rendering import layout, panels, style
from lab.analysis.rendering.layout import Sheet
from studies.faithful_toy.screen import FACTORS, RESPONSES, effects


@layout.styled
def screen(rows: pd.DataFrame) -> Sheet:
    """Which setting of a small model makes divergence a cliff: a learning-rate curve in each of sixteen rows.

    By how much the higher of two values of each setting raises the steepest rise above the best learning rate, in nats
    and as a share of what lies between the best loss and that of a unigram model, where runs that diverge end; and the
    range from the best rate to one that costs 0.3 nats. Intervals hold 95 %, by what single settings leave unexplained
    of the rows; one seed.
    """
    names = [f"{name}: {factor.low} to {factor.high}" for name, factor in FACTORS.items()]
    sheet, both = panels.row_panels(names, len(RESPONSES))
    for axes, (response, label) in zip(both, RESPONSES.items(), strict=True):
        found = effects(rows, response).values()
        dots = {row: panels.Dot(interval, str(interval)) for row, interval in enumerate(found)}
        panels.rows(axes, names, [(panels.arm_look(0), dots)])
        axes.set_xlabel(style.wrapped(label, sheet.column_width))
        panels.level(axes, 0.0, "no difference", upright=True)
    return sheet
