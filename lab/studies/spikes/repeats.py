"""Costs of bursts that come several times, beside runs with fewer bursts or fewer batches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd

from lab.analysis.events.costs import NONE, REPEATS, repeats_of, spike_costs
from lab.core.schema import batches_of_bursts
from lab.records.store import Records

START, FRACTION, STEPS = "burst.start", "burst.fraction", "steps"
CLEAN = "no burst"


def repeated_costs(records: Records) -> pd.DataFrame:
    """``spike_costs`` of runs with a burst, if it comes several times in some of them; else no rows.

    Returns:
        These columns with ``id``, ``number`` of bursts, and ``name``. The name contains the first step if it is not
        that of the earliest burst, and the number of batches by which the run is shorter than the longest.
    """
    cards = records.runs[records.runs.get("burst", pd.Series(NONE, records.runs.index)).fillna(NONE) != NONE]
    if cards.empty or REPEATS not in cards or cards[REPEATS].isna().all():
        return spike_costs(records).head(0).assign(id="", number=0, name="")
    first, longest = cards[START].min(), int(cards[STEPS].max())
    rows = {
        card["id"]: (_number(card), _name(card, card[START] == first, longest)) for card in cards.to_dict("records")
    }
    names = pd.DataFrame.from_dict(rows, orient="index", columns=["number", "name"])
    return spike_costs(records).join(names, how="inner").rename_axis("id").reset_index()


def with_changes(costs: pd.DataFrame) -> pd.DataFrame:
    """These costs with ``size``, ``lr`` and ``seed`` of their runs, in rising order of the number of bursts.

    Returns:
        With a new column ``change``: the final loss minus that of the run of equal size, learning rate and seed without
        a burst; NaN if there is none.
    """
    pair = ["size", "lr", "seed"]
    clean = costs[costs["name"] == CLEAN].drop_duplicates(pair).set_index(pair)["final"]
    change = costs["final"] - clean.reindex(pd.MultiIndex.from_frame(costs[pair])).to_numpy()
    return costs.assign(change=change).sort_values(["number", "name"], kind="stable")


def _number(card: Mapping[Hashable, Any]) -> int:
    return repeats_of(card) if card[FRACTION] else 0


def _name(card: Mapping[Hashable, Any], is_first: bool, longest: int) -> str:
    number, fewer = _number(card), longest - int(card[STEPS])
    name = f"{number} burst{'s' * (number > 1)}" if number else CLEAN
    if number and not is_first:
        start = batches_of_bursts(float(card[START]), 0, int(card[STEPS]))[0].start
        name += f" from step {start}"
    return name + (f" and {fewer} batches fewer" if fewer else "")
