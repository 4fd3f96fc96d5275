"""Points of the measures of loss spikes: heights of peaks, and losses after restarts and repeats."""

from __future__ import annotations

import pandas as pd

from lab.analysis.grouping import arm_labels
from lab.analysis.probe_values import late
from lab.analysis.sensitivity import Study
from studies.claims.costs import NONE, named_costs, spike_costs
from studies.claims.points import in_columns, valued
from studies.spikes.own_effects import CLEAN_LOSS, OWN_LOSS
from studies.spikes.own_spikes import (
    ALL,
    CHANGE_NAMES,
    WHOLE,
    WITHOUT,
    changes,
    remedy_names,
    remedy_traits,
    source_traits,
)
from studies.spikes.planted import arm_costs, factors_by_seed, repeated_costs, update_traits

NO_RESPONSE = "no response"
STATES = {
    "data": "state of the spike",
    "weights": "earlier weights",
    "moments": "earlier moments",
    "state": "both earlier",
}


def by_change(study: Study) -> pd.DataFrame:
    """Whether the spike was removed, 1 or 0, by what was changed before it."""
    table = changes(study.records).set_index("id")
    return valued(study, table["removed"], arm=table["change"].map(CHANGE_NAMES))


def further_spikes(study: Study) -> pd.DataFrame:
    """Spikes after the first, in 1,000 updates trained after it, by the remedy."""
    names = pd.Series(remedy_names(study.records.runs.to_dict("records")), dtype=object)
    return valued(study, remedy_traits(study.records)["rate"].reindex(names.index), arm=names)


def rising_cosines(study: Study) -> pd.DataFrame:
    """Cosines of the update with the descent while the loss rises, by batch size and epsilon."""
    return _by_batch_and_epsilon(study, update_traits(study.records)["rising_cosine"])


def peaks_by_batch_and_epsilon(study: Study) -> pd.DataFrame:
    """Peaks of runs that recorded their updates, by batch size and epsilon."""
    return _by_batch_and_epsilon(study, spike_costs(study.records)["peak"].reindex(update_traits(study.records).index))


def _by_batch_and_epsilon(study: Study, values: pd.Series) -> pd.DataFrame:
    """Values in a column for each burst."""
    cards = study.records.runs.set_index("id").reindex(values.index)
    keys = [key for key in map(str, study.records.runs) if key.startswith("bad_batches")]
    arms = pd.Series(arm_labels(study.records.runs, keys))
    return valued(study, values, arm=arms, column="after " + cards["bad_batches"].str.replace("_", " "))


def losses_after_repeats(study: Study) -> pd.DataFrame:
    """Final losses by the number of bursts."""
    costs = repeated_costs(study.records).sort_values(["number", "name"], kind="stable").set_index("id")
    return valued(study, costs["final"], arm=costs["name"])


def rises_by_state(study: Study) -> pd.DataFrame:
    """The rise of the peak that the batches of a burst cause, by the state of the run in which they come."""
    factors = factors_by_seed(study.records, "peak").reset_index()
    if factors.empty:
        return study.points.head(0)
    parts = [
        factors.assign(arm=name, value=factors["data"] - (factors[key] if key != "data" else 0))
        for key, name in STATES.items()
    ]
    rows = pd.concat(parts)
    names = rows["bad_batches"].astype(str).str.replace("_", " ")
    return rows.assign(column="of " + names, seed=rows["seed"].astype(str))


def by_source(study: Study) -> pd.DataFrame:
    """Gradient-norm spikes in 1000 steps, by the source of text that was left out."""
    traits = source_traits(study.records).reindex(columns=["rate"])
    without = study.records.runs.set_index("id").reindex(index=traits.index, columns=[WITHOUT])[WITHOUT]
    return valued(study, traits["rate"], arm=("without " + without.astype(str)).where(without != ALL, WHOLE))


def late_held_out_losses(study: Study) -> pd.DataFrame:
    """The loss on clean held-out text, and that on held-out text of the corpus as it is, in the last tenth of a run."""
    probes = {"of clean text": CLEAN_LOSS, "of the corpus as it is": OWN_LOSS}
    values = {name: late(study.records, probe, "") for name, probe in probes.items()}
    return in_columns(study, values if all(map(len, values.values())) else {"": pd.Series(dtype=float)})


def peaks_of_arms(study: Study) -> pd.DataFrame:
    """Peaks by the settings in which an arm differs from the recipe."""
    return _peaks(study, arm_costs(study.records))


def peaks_of_responses(study: Study) -> pd.DataFrame:
    """Peaks by the response to a spike."""
    return _peaks(study, named_costs(study.records))


def _peaks(study: Study, costs: pd.DataFrame) -> pd.DataFrame:
    """Peaks of runs by ``name``, in a column for each of ``bad_batches``; empty if there is one name only."""
    costs = costs[costs["bad_batches"] != NONE].set_index("id")
    after = "after " + costs["bad_batches"].astype(str).str.replace("_", " ")
    points = valued(study, costs["peak"], arm=costs["name"].replace(NONE, NO_RESPONSE), column=after)
    return points if points["arm"].nunique() > 1 else points.head(0)
