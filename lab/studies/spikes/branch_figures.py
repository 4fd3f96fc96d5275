"""The figure of branches from before loss spikes: how many of them each change removes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.rendering import layout, panels, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import Interval, share_interval
from lab.core.detectors import MERGE
from lab.records.store import Records
from lab.studies.spikes.branches import AT_ONCE, NAMES, SAME, changes, removable

SHARES = (-0.03, 1.03)
REMOVED, AT_ONCE_NAME = "removed", "another at once"
CHANCE = "no spike by chance"


@figure("spike_causes")
def spike_causes(records: Records, runs: pd.DataFrame) -> Sheet:
    """How many loss spikes each change removes, made once, some updates before the spike began.

    Each run trains until its first spike, goes back to before it, makes one change, and goes on. Runs of a seed are one
    run up to there, so all changes are of the same spikes; without a change the spike comes again, bit for bit. Bars
    are exact 95 % intervals.
    """
    outcomes = changes(records)
    outcomes = outcomes[outcomes["id"].isin(runs["id"])]
    if outcomes.empty or SAME not in set(outcomes["change"]):
        raise NothingToDrawError("nothing to draw: no run branched from before a loss spike")
    of_change = {name: outcomes[outcomes["change"] == change] for change, name in NAMES.items()}
    of_change = {name: rows for name, rows in of_change.items() if len(rows)}
    names = sorted(of_change, key=lambda name: (name != NAMES[SAME], -of_change[name]["removed"].mean()))
    columns = layout.columns_for(2, panels.NARROWEST_ROWS)
    sheet, ((shares,), (waits,)) = layout.facets(["", ""], [""], panels.rows_height(names), columns)
    looks = {name: panels.arm_look(place) for place, name in enumerate((REMOVED, AT_ONCE_NAME))}
    columns_of = {REMOVED: "removed", AT_ONCE_NAME: "at_once"}
    groups = [
        (look, {row: _share(name, of_change[name][columns_of[kind]], kind) for row, name in enumerate(names)})
        for kind, look in looks.items()
    ]
    panels.rows(shares, names, groups)
    if (most := removable(records)) < 1:
        panels.level(shares, most, CHANCE, style.DASHED, upright=True)
        sheet.explain(CHANCE, "A dashed line is the share of equally long stretches without a spike, later in the run.")
    shares.set_xlim(*SHARES)
    shares.set_xlabel("share of spikes")
    waited = {row: of_change[name]["wait"] for row, name in enumerate(names)}
    rows = {row: _wait(names[row], wait) for row, wait in waited.items() if np.isfinite(wait).any()}
    panels.rows(waits, names, [(looks[REMOVED], rows)])
    waits.set_xlabel("updates from the change\nto the next spike")
    waits.set_xlim(left=0)
    sheet.keys(("share", [panels.arm_key(name, look | {"linestyle": ""}) for name, look in looks.items()]))
    spikes, back = len(of_change[NAMES[SAME]]), of_change[NAMES[SAME]]["back"]
    sheet.note(
        f"{spikes} spikes; changes were made {back.min():.0f} to {back.max():.0f} updates before. A spike is removed "
        f"if none begins up to {MERGE} updates after its step. One within {AT_ONCE} updates was made by the change."
    )
    sheet.note("Marks on the right are medians of the runs that spiked again, and their bars join the quartiles.")
    return sheet


def _share(name: str, hits: pd.Series, kind: str) -> Dot:
    share = share_interval(int(hits.sum()), len(hits))
    interval = f"95 % interval {share.low:.2f} to {share.high:.2f}"
    return Dot(share, f"{name}\n{kind}: {int(hits.sum())} of {len(hits)}\n{interval}")


def _wait(name: str, wait: pd.Series) -> Dot:
    """Median and quartiles of the waits that ended."""
    ended = wait[np.isfinite(wait)]
    low, middle, high = (float(ended.quantile(share)) for share in (0.25, 0.5, 0.75))
    quartiles = f"median {middle:.0f} updates\nquartiles {low:.0f} to {high:.0f}"
    return Dot(
        Interval(middle, low, high, len(ended)), f"{name}\n{quartiles}\n{len(ended)} of {len(wait)} spiked again"
    )
