"""Answers of sweeps on updates around loss spikes, on the embedding's gradient, and on learned positions."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.figures.steps import begins_unusually
from lab.analysis.figures.updates import BATCH
from lab.analysis.probe_values import DISTANCE, POSITIONS, embedding_share, near
from lab.analysis.report.findings import of_arm
from lab.analysis.sensitivity import Study
from lab.analysis.spikes.costs import spike_costs
from lab.analysis.spikes.updates import update_traits
from lab.analysis.statistics import FEWEST_SEEDS, student_t
from lab.analysis.text import listed, spell


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


def distance_answer(study: Study) -> str:
    """How far learned positions end from their initial values, by arm; empty where there is one arm, or no distance."""
    metrics = study.records.metrics
    if not ((metrics["probe"] == DISTANCE) & (metrics["where"] == POSITIONS)).any():
        return ""
    points = study.points.assign(distance=study.points["id"].map(near(study.records, DISTANCE, POSITIONS, 1.0)))
    moves = []
    for arm, runs in points.groupby("arm", sort=False):
        by_rate = runs.groupby("lr")["distance"].mean()
        moves.append(f"{by_rate.min():.2g} to {by_rate.max():.2g} {of_arm(str(arm))}")
    if len(moves) < 2:
        return ""
    return (
        "From the lowest to the highest learning rate the table of positions moves by so many times the norm of its "
        f"initial values: {listed(moves)}."
    )


def embedding_answer(study: Study) -> str:
    """Between which arms the embedding's share of the gradient lies at the first step and at the last.

    Geometric means over seeds and learning rates. Empty where every embedding begins as usual, or the gradient is not
    on record.
    """
    shares = embedding_share(study.records).merge(study.points[["id", "arm"]], on="id")
    if shares.empty or not begins_unusually(study.records):
        return ""
    by_step = np.exp(np.log(shares["value"]).groupby([shares["step"], shares["arm"]]).mean())
    first, last = (by_step.loc[step] for step in (shares["step"].min(), shares["step"].max()))
    low, high = first.idxmin(), first.idxmax()
    return (
        f"The norm of the embedding's gradient over that of all other weights begins between {first[low]:.2g} "
        f"{of_arm(low)} and {first[high]:.2g} {of_arm(high)}, and ends between {last.min():.2g} and {last.max():.2g}."
    )


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
