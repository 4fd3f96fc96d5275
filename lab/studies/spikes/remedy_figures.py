"""The figure of remedies for loss spikes: how many more spikes follow, and what each remedy costs."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.events.costs import NONE, spike_costs
from lab.analysis.rendering import panels
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records
from lab.studies.spikes.figures import Cost, change, cost_rows
from lab.studies.spikes.remedies import NO_REMEDY, remedy_names, remedy_traits

OWN = "the model's own"
COSTS = (
    Cost("more", "spikes of a run\nafter the first", Quantity("spikes after the first")),
    Cost("lost", "updates gone back and\nbatches left out", Quantity("updates and batches lost")),
    Cost(
        "change",
        "change of the final\nloss (nats/token)",
        Quantity("final loss minus that without a remedy", "nats/token"),
        is_difference=True,
    ),
)


@figure("own_spike_remedies")
def own_spike_remedies(records: Records, runs: pd.DataFrame) -> Sheet:
    """Remedies for loss spikes that no bad data bring: the spikes that still follow the first, and what each costs.

    Runs of a seed are one run up to its first spike, save those with a shrunk embedding gradient. A spike that comes
    back after a run went back counts again. The change of the final loss is relative to the same seed without a remedy.
    """
    costs = _costs(records).merge(runs, on="id")
    own = costs[costs["spikes"] == OWN]
    if own["name"].nunique() < 2 or NO_REMEDY not in set(own["name"]):
        raise NothingToDrawError("nothing to draw: no remedy for a spike of a run's own is beside a run without one")
    costs = costs.assign(burst=costs["spikes"])
    costs["change"] = change(costs, "final", NO_REMEDY).where(costs["name"] != NO_REMEDY)
    means = costs[costs["spikes"] == OWN].groupby("name")["more"].mean()
    names = sorted(means.index, key=lambda name: (name != NO_REMEDY, means[name]))
    kinds = sorted(costs["spikes"].unique(), key=lambda kind: (kind != OWN, kind))
    looks = {kind: panels.arm_look(place) for place, kind in enumerate(kinds)}
    sheet = cost_rows(costs[costs["name"].isin(names)], COSTS, names, "spikes", looks)
    if len(kinds) > 1:
        sheet.keys(("spikes", [panels.arm_key(kind, look) for kind, look in looks.items()]))
        sheet.note("Runs with planted bad data have these once, and are of another length.")
    return sheet


def _costs(records: Records) -> pd.DataFrame:
    """``COSTS`` of runs with a remedy or without one: ``spikes`` is what these are of, ``name`` the remedy."""
    cards = records.runs.reindex(columns=["id", "burst"]).set_index("id")
    burst = cards["burst"].fillna(NONE).astype(str)
    planted = spike_costs(records)
    planted = planted[planted.index.map(burst.to_dict()) != NONE]
    planted = planted.assign(more=(planted["spikes"] - 1).clip(lower=0), lost=planted["rewound"] + planted["skipped"])
    both = pd.concat([remedy_traits(records), planted])[["more", "lost", "final"]]
    names = remedy_names(records.runs.to_dict("records"))
    kinds = both.index.map(burst.to_dict()).str.replace("_", " ").to_series(both.index).replace(NONE, OWN)
    return both.assign(id=both.index, spikes=kinds, name=both.index.map(names)).dropna(subset=["name"])
