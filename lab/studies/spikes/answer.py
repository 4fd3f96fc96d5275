"""Quantities that answer questions about loss spikes: heights of peaks, and losses after restarts and repeats."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.contrasts import ANY_SWEEP, Measures, by_column, by_rate, by_size, final_losses, valued
from lab.analysis.events.costs import NONE, named_costs, spike_costs
from lab.analysis.grouping import arm_labels
from lab.analysis.probe_values import late, near
from lab.analysis.sensitivity import Study
from lab.studies.spikes.own_effects import CLEAN_LOSS, OWN_LOSS
from lab.studies.spikes.own_spikes import (
    ALL,
    CHANGE_NAMES,
    NO_REMEDY,
    SAME,
    WHOLE,
    WITHOUT,
    changes,
    remedy_names,
    remedy_traits,
    source_traits,
    spike_traits,
)
from lab.studies.spikes.planted import CLEAN, RECIPE, arm_costs, factors_by_seed, repeated_costs, update_traits

NATS, NO_RESPONSE, PEAK = "nats/token", "no response", "Peak of the held-out loss above the usual one"
STATES = {
    "data": "state of the spike",
    "weights": "earlier weights",
    "moments": "earlier moments",
    "state": "both earlier",
}
MEASURES = Measures()
MEASURES.add("Final loss", NATS, by_rate, "lower", reference="ledger none", asked_by=("ledgers", "hot_swaps"))(
    final_losses
)


@MEASURES.add(
    "Share of spikes removed", "", by_size, "higher", reference=CHANGE_NAMES[SAME], asked_by=("spike_causes",)
)
def _by_change(study: Study) -> pd.DataFrame:
    """Whether the spike was removed, 1 or 0, by what was changed before it."""
    table = changes(study.records).set_index("id")
    return valued(study, table["removed"], arm=table["change"].map(CHANGE_NAMES))


@MEASURES.add(
    "Loss spikes in 10,000 steps",
    "",
    by_rate,
    "lower",
    asked_by=("own_spikes", "own_spike_curvature", "own_spike_arms"),
)
def _own_rates(study: Study) -> pd.DataFrame:
    """Spikes in 10,000 steps that no bad data brought, of runs measured at every step."""
    traits = spike_traits(study.records)
    return valued(study, traits["rate"]) if len(traits) else study.points.head(0)


@MEASURES.add(
    "Loss spikes after the first, in 1,000 updates trained",
    "",
    by_size,
    "lower",
    reference=NO_REMEDY,
    asked_by=("own_spike_remedies",),
)
def _further_spikes(study: Study) -> pd.DataFrame:
    """Spikes after the first, in 1,000 updates trained after it, by the remedy."""
    names = pd.Series(remedy_names(study.records.runs.to_dict("records")), dtype=object)
    return valued(study, remedy_traits(study.records)["rate"].reindex(names.index), arm=names)


@MEASURES.add("Cosine of the update with the descent while the loss rises", "", by_column, asked_by=("adam_theory",))
def _rising_cosine(study: Study) -> pd.DataFrame:
    return _traits(study, "rising_cosine")


@MEASURES.add(PEAK, NATS, by_column, "lower", asked_by=("adam_theory",))
def _peak(study: Study) -> pd.DataFrame:
    return _traits(study, "peak")


def _traits(study: Study, trait: str) -> pd.DataFrame:
    """A trait of the updates, or the peak, by batch size and epsilon, in a column for each burst."""
    traits = update_traits(study.records).join(spike_costs(study.records)[["peak"]])
    cards = study.records.runs.set_index("id").reindex(traits.index)
    arms = pd.Series(
        arm_labels(study.records.runs, [key for key in map(str, study.records.runs) if key.startswith("burst")])
    )
    return valued(study, traits[trait], arm=arms, column="after " + cards["burst"].str.replace("_", " "))


@MEASURES.add("Final loss", NATS, by_rate, "lower", reference=CLEAN, asked_by=("repeated_bursts",))
def _after_repeats(study: Study) -> pd.DataFrame:
    costs = repeated_costs(study.records).sort_values(["number", "name"], kind="stable").set_index("id")
    return valued(study, costs["final"], arm=costs["name"])


@MEASURES.add("Loss scale at the end", "", by_size, "higher", is_log=True, asked_by=("fp16_sums",))
def _loss_scales(study: Study) -> pd.DataFrame:
    return valued(study, np.log10(near(study.records, "loss_scale", "", 1.0)))


@MEASURES.add("Rise of the held-out loss", NATS, by_column, reference=STATES["data"], asked_by=("state_and_data",))
def _by_state(study: Study) -> pd.DataFrame:
    """The rise of the peak that the batches of a burst cause, by the state of the run in which they come."""
    factors = factors_by_seed(study.records, "peak").reset_index()
    if factors.empty:
        return study.points.head(0)
    parts = [
        factors.assign(arm=name, value=factors["data"] - (factors[key] if key != "data" else 0))
        for key, name in STATES.items()
    ]
    rows = pd.concat(parts)
    return rows.assign(column="of " + rows["burst"].astype(str).str.replace("_", " "), seed=rows["seed"].astype(str))


@MEASURES.add("Gradient-norm spikes in 1000 steps", "", by_size, "lower", reference=WHOLE, asked_by=("source_filter",))
def _by_source(study: Study) -> pd.DataFrame:
    traits = source_traits(study.records).reindex(columns=["rate"])
    cards = study.records.runs.set_index("id").reindex(index=traits.index, columns=[WITHOUT])
    arms = ("without " + cards[WITHOUT].astype(str)).where(cards[WITHOUT] != ALL, WHOLE)
    return valued(study, traits["rate"], arm=arms)


@MEASURES.add("Late held-out loss", NATS, by_column, "lower", asked_by=("escape_characters",))
def _held_out(study: Study) -> pd.DataFrame:
    """The loss on clean held-out text, and that on held-out text of the corpus as it is, in the last tenth of a run."""
    names = {"of clean text": CLEAN_LOSS, "of the corpus as it is": OWN_LOSS}
    values = {name: late(study.records, probe, "") for name, probe in names.items()}
    tables = [valued(study, value, column=pd.Series(name, value.index)) for name, value in values.items()]
    return pd.concat(tables if all(map(len, tables)) else [study.points.head(0)])


@MEASURES.add(PEAK, NATS, by_size, "lower", asked_by=("new_data",))
def _peaks_of_new_data(study: Study) -> pd.DataFrame:
    return valued(study, spike_costs(study.records)["peak"])


@MEASURES.add(PEAK, NATS, by_column, "lower", reference=RECIPE, asked_by=("optimizer_arms",))
def _peaks_of_arms(study: Study) -> pd.DataFrame:
    return _peaks(study, arm_costs(study.records))


@MEASURES.add(PEAK, NATS, by_column, "lower", reference=NO_RESPONSE, asked_by=(ANY_SWEEP,))
def _peaks_of_responses(study: Study) -> pd.DataFrame:
    return _peaks(study, named_costs(study.records))


def _peaks(study: Study, costs: pd.DataFrame) -> pd.DataFrame:
    """Peaks of runs by ``name``, in a column for each ``burst``; empty if there is one name only."""
    costs = costs[costs["burst"] != NONE].set_index("id")
    after = "after " + costs["burst"].astype(str).str.replace("_", " ")
    points = valued(study, costs["peak"], arm=costs["name"].replace(NONE, NO_RESPONSE), column=after)
    return points if points["arm"].nunique() > 1 else points.head(0)
