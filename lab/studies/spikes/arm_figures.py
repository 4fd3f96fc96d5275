"""Figure of arms trained on the same planted bursts of bad data."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records
from lab.studies.spikes.figures import PEAK, RECOVERY, Cost, change, leaderboard, note_of_lost
from lab.studies.spikes.optimizer_arms import RECIPE, arm_costs

COSTS = (
    PEAK,
    Cost(
        "peak_change",
        "change of that peak\n(nats/token)",
        Quantity("peak excess loss minus that of the recipe", "nats/token"),
        is_difference=True,
    ),
    RECOVERY,
    Cost(
        "final_change",
        "change of the final\nloss (nats/token)",
        Quantity("final loss minus that of the recipe", "nats/token"),
        is_difference=True,
    ),
)


@figure("spike_arms")
def spike_arms(records: Records, runs: pd.DataFrame) -> Sheet:
    """Costs of a planted loss spike for each arm; the arm with the lowest peak of the held-out loss is at the top.

    A burst is a stretch of bad batches injected into the data. An arm is named by the settings in which it differs from
    the default recipe. The usual loss is that before the burst; a run is back when its loss is within 0.1 nats of it.
    Changes are relative to the recipe with the same burst and seed: left of the line the arm does better.
    """
    costs = arm_costs(records).merge(runs, on="id").dropna(subset=["peak"])
    if costs["name"].nunique() < 2 or RECIPE not in set(costs["name"]):
        raise NothingToDrawError("nothing to draw: no burst is in runs of the recipe and of another arm")
    changes = {f"{column}_change": change(costs, column, RECIPE) for column in ("peak", "final")}
    costs = costs.assign(**changes)
    sheet = leaderboard(costs, COSTS, RECIPE)
    note_of_lost(sheet, costs)
    return sheet
