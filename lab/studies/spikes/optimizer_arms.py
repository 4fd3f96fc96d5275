"""Costs of a planted loss spike for each arm, named by the settings in which it differs from the default recipe."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import pandas as pd

from lab.analysis.curves import arm_factors, points, setting_name, setting_text
from lab.analysis.events.costs import NONE, spike_costs
from lab.core.shipped import default_recipe
from lab.records.store import Records

RECIPE = "recipe"  # the name of the arm that is the default recipe
ON = "on"  # the value of an intervention that is present


def arm_costs(records: Records) -> pd.DataFrame:
    """``spike_costs`` of runs with a burst but no response or restart log; with ``id``, ``burst`` and ``name``.

    The name holds the settings in which an arm differs from the default recipe: ``beta2 0.98``.
    """
    cards = records.runs.reindex(columns=["id", "burst", "response", "ledger", "status"])
    is_plain = (cards[["response", "ledger"]].fillna(NONE) == NONE).all(axis=1)
    plain = cards[(cards["burst"].fillna(NONE) != NONE) & is_plain]
    names: dict[str, str] = {}
    for _, of_burst in plain[plain["status"] != "failed"].groupby("burst"):
        names |= _names(records.runs[records.runs["id"].isin(of_burst["id"])])
    costs = spike_costs(records)
    costs = costs[costs.index.isin(list(names))]
    burst = plain.set_index("id")["burst"].reindex(costs.index)
    return costs.assign(id=costs.index, burst=burst, name=costs.index.map(names))


def _names(runs: pd.DataFrame) -> dict[str, str]:
    """The name of each run's arm, by run id."""
    names = {label: _name(factors) for label, factors in arm_factors(runs).items()}
    labelled = points(runs)
    return dict(zip(labelled["id"], labelled["arm"].map(names), strict=True))


def _name(factors: Mapping[str, Hashable]) -> str:
    recipe = default_recipe()
    unusual = {key: value for key, value in factors.items() if value != recipe.get(key)}
    named = [key for key, value in unusual.items() if value is not None or recipe.get(key) == ON]
    return " + ".join(_setting(key, unusual[key], recipe.get(key)) for key in named) or RECIPE


def _setting(key: str, value: Hashable, usual: Hashable) -> str:
    """``beta2 0.98``, ``no clip``, ``embedding gradient shrink``; of a variant's name the part after the usual one."""
    name = setting_name(key, [key]).replace("_", " ")
    if ON in (value, usual):
        return name if value == ON else f"no {name}"
    if isinstance(value, str):
        return value.removeprefix(f"{usual}_").replace("_", " ")
    return f"no {name}" if value == math.inf else setting_text(name, value)
