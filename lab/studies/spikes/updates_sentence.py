"""The answer of sweeps on updates around loss spikes."""

from __future__ import annotations

import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.events.costs import spike_costs
from lab.analysis.sensitivity import Study
from lab.analysis.statistics import FEWEST_SEEDS, student_t
from lab.analysis.text import listed, spell
from lab.studies.spikes.adam_updates import update_traits
from lab.studies.spikes.update_figures import BATCH


def update_answer(study: Study) -> str:
    """How updates lie to the descent as the loss rises, and what batch size and epsilon change.

    Values are means over seeds, and those of batch and epsilon over bursts as well.  Empty where no run met a burst and
    recorded the cosine with the descent.
    """
    traits = update_traits(study.records)
    if traits.empty:
        return ""
    cards = study.records.runs.set_index("id").reindex(columns=["burst", "seed", BATCH, EPSILON])
    table = traits.join(spike_costs(study.records)[["peak"]]).join(cards, how="inner")
    usual = table[table[EPSILON] == table[EPSILON].min()]
    parts = [
        _descent(usual),
        _between(usual, BATCH, "batches of {}", "lag", "the cosine of successive gradients"),
        _between(table, EPSILON, "epsilon {}", "embedding_rms", "the RMS of the embedding's update"),
    ]
    return "; ".join(filter(None, parts)) + "."


def _descent(table: pd.DataFrame) -> str:
    falls = [
        f"from {runs['cosine'].mean():.2f} to {runs['rising_cosine'].mean():.2f} with {str(burst).replace('_', ' ')}"
        for burst, runs in table.groupby("burst")
    ]
    return f"While the loss rises, the cosine of the update with the descent falls {listed(falls)}"


def _between(table: pd.DataFrame, key: str, name: str, trait: str, text: str) -> str:
    """A trait and the peak at both ends of a setting; empty where it has one value."""
    low, high = table[key].min(), table[key].max()
    if low == high:
        return ""
    by_seed = table.groupby([key, "seed"])[[trait, "peak"]].mean()
    first, last = by_seed.loc[low], by_seed.loc[high]
    higher = student_t((last["peak"] - first["peak"]).to_numpy(dtype=float))
    side = "higher" if higher.mean > 0 else "lower"
    amount = higher if higher.mean > 0 else -higher
    bounds = f" (95 % interval {amount.low:.2f} to {amount.high:.2f})" if amount.n >= FEWEST_SEEDS else ""
    return (
        f"with {name.format(spell(high))} instead of {spell(low)} {text} is {last[trait].mean():.2g} instead of "
        f"{first[trait].mean():.2g} and the peak {amount.mean:.2f} nats/token {side}{bounds}"
    )
