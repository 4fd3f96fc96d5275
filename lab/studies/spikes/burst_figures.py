"""Figure of bursts that come several times: the final loss by their number."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.rendering import layout, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records
from lab.studies.spikes.figures import PEAK, Cost, cost_rows
from lab.studies.spikes.repeats import CLEAN, repeated_costs, with_changes

COLUMNS = (
    Cost(
        "change",
        "final loss above\nthat without a burst\n(nats/token)",
        Quantity("final loss minus that without a burst", "nats/token"),
        is_difference=True,
    ),
    PEAK._replace(label="largest peak above\nthe usual held-out\nloss (nats/token)"),
)


@figure("repeated_bursts")
def repeated_bursts(records: Records, runs: pd.DataFrame) -> Sheet:
    """Final loss and largest peak by the number of bursts, a mark per learning rate.

    A burst is a stretch of bad batches injected into the data. The final loss is relative to the longest run of the
    same learning rate and seed without a burst. Lasting damage is the excess of many bursts over both the last of them
    alone and a run that is shorter by as many batches.
    """
    costs = with_changes(repeated_costs(records).merge(runs, on="id"))
    if costs["change"].isna().all():
        raise NothingToDrawError("nothing to draw: no burst comes several times beside runs without one")
    names = [name for name in dict.fromkeys(costs["name"]) if name != CLEAN]
    shades = style.shades(costs["lr"], style.LR_SHADES)
    looks = {lr: {"color": shade, "marker": "o"} for lr, shade in shades.items()}
    sheet = cost_rows(costs, COLUMNS, names, "lr", looks)
    sheet.keys(("peak learning rate", layout.line_keys(shades)))
    return sheet
