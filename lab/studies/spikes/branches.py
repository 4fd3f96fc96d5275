"""Branches from before a loss spike of a run's own: which change of data or state removed it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lab.core.detectors import MERGE
from lab.records.store import Records

BRANCH, CHANGE, SAME = "branch", "response.change", "same"
# What a change is called.
NAMES = {
    "same": "nothing",
    "batches": "other batches",
    "first_moment": "fresh first moment",
    "second_moment": "fresh second moment",
    "moments": "fresh moments",
    "lr": "lower learning rate",
    "eps": "larger epsilon",
}
# A spike that begins within so many updates of the branch was made by the change.
AT_ONCE = 5
COLUMNS = ("step", "back", "removed", "at_once", "wait")


def branch_outcomes(records: Records) -> pd.DataFrame:
    """What became of the spike from before which each run branched, indexed by the run's id; none without a spike.

    A spike is removed if none begins from the branch up to 20 updates after the step at which it began.

    Returns:
        Columns ``step``, at which the spike began; ``back``, updates from the branch to there; ``removed`` and
        ``at_once``, 1 or 0, the latter for a spike within 5 updates of the branch, which the change made; and ``wait``,
        updates from the branch to the next spike, infinite without one.
    """
    cards = records.runs.reindex(columns=["id", "response"])
    branched = set(cards.loc[cards["response"] == BRANCH, "id"])
    events = records.events[records.events["id"].isin(branched)]
    rows = {str(run): _outcome(of_run.to_dict("records")) for run, of_run in events.groupby("id", sort=False)}
    found = {run: row for run, row in rows.items() if row}
    return pd.DataFrame.from_dict(found, orient="index", columns=list(COLUMNS), dtype=float)


def _outcome(events: Sequence[dict[Any, Any]]) -> tuple[float, ...] | None:
    """Of the events of a run, in the order in which they happened."""
    kinds = [event["kind"] for event in events]
    if "rewind" not in kinds:
        return None
    rewind = kinds.index("rewind")
    start, back = int(events[rewind]["step"]), int(events[rewind]["value"])
    spike = start + back - 1  # the run had made the update of that step
    later = [event["step"] for event in events[rewind:] if event["kind"] == "spike"]
    wait = later[0] - start if later else math.inf
    return spike, back - 1, wait > back - 1 + MERGE, wait <= AT_ONCE, wait


def branch_counts(records: Records) -> pd.DataFrame:
    """Of each run that would branch, indexed by its id: ``spikes``, 1 or 0 without one, and ``removed``, 1 or 0."""
    cards = records.runs.reindex(columns=["id", "response"])
    branching = cards.loc[cards["response"] == BRANCH, "id"].astype(str)
    removed = branch_outcomes(records)["removed"].reindex(branching)
    return pd.DataFrame({"spikes": removed.notna().astype(float), "removed": removed.fillna(0.0)})


def removable(records: Records) -> float:
    """Share of windows, as long as those in which a removed spike must not come, that hold no spike by chance.

    From the spikes of twins later on: the largest share that a change can remove which makes spikes no rarer.
    """
    table = changes(records)
    twins = table[table["change"] == SAME]
    spikes = records.events[(records.events["kind"] == "spike") & records.events["id"].isin(twins.index)]
    after = spikes["step"] > spikes["id"].map(twins["step"]) + MERGE
    steps = records.runs.set_index("id")["steps"].reindex(twins.index) - twins["step"] - MERGE
    if not steps.sum() > 0:
        return math.nan
    return math.exp(-float(after.sum()) / float(steps.sum()) * float(twins["back"].mean() + MERGE))


def changes(records: Records) -> pd.DataFrame:
    """``branch_outcomes`` with the columns ``id`` and ``change`` of each run."""
    outcomes = branch_outcomes(records)
    change = records.runs.set_index("id").reindex(columns=[CHANGE])[CHANGE].reindex(outcomes.index)
    return outcomes.assign(id=outcomes.index, change=change.astype(str))
