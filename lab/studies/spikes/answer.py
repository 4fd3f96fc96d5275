"""The answer of a sweep of loss spikes: responses, arms, restarts by hand, or updates around a spike."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.events.costs import NONE, named_costs, spike_costs
from lab.analysis.sensitivity import Study
from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t
from lab.analysis.text import listed, spell
from lab.studies.spikes.adam_updates import update_traits
from lab.studies.spikes.optimizer_arms import RECIPE, arm_costs
from lab.studies.spikes.repeats import CLEAN, repeated_costs, with_changes
from lab.studies.spikes.restarts import LEDGER
from lab.studies.spikes.state_and_data import factors_by_seed
from lab.studies.spikes.update_figures import BATCH


def sentence(study: Study) -> str:
    """By burst, how high the loss peaks without a response, and which responses, arms or earlier states change that.

    Of restarts by hand, which of them lower the final loss, and of bursts that come several times, which raise it.
    Empty where runs compare none of these.
    """
    return _updates(study) or _repeats(study) or _responses(study) or _arms(study) or _states(study) or _ledgers(study)


def _updates(study: Study) -> str:
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


def _repeats(study: Study) -> str:
    """At each learning rate, with which numbers of bursts the final loss is certainly higher than without one."""
    costs = with_changes(repeated_costs(study.records).merge(study.points, on="id")).dropna(subset=["change"])
    parts = []
    for lr, of_rate in costs[costs["name"] != CLEAN].groupby("lr"):
        changes = {str(name): student_t(rows["change"]) for name, rows in of_rate.groupby("name", sort=False)}
        higher = [_by(name, change) for name, change in changes.items() if change.low > 0]
        parts.append(f"at learning rate {lr:g} with {listed(higher) if higher else 'none of those tried'}")
    return f"The final loss (nats/token) is certainly higher than without a burst {'; '.join(parts)}." if parts else ""


def _responses(study: Study) -> str:
    costs = named_costs(study.records)
    parts = [_burst(burst, peaks) for burst, peaks in _peaks(study, costs[costs["burst"] != NONE], NONE)]
    return f"Peaks of the held-out loss above the usual one, paired by seed: {'; '.join(parts)}." if parts else ""


def _peaks(study: Study, costs: pd.DataFrame, reference: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """By burst, peaks with a column for each name and a row for each seed, where there is more than the reference."""
    costs = costs.merge(study.points, on="id")
    for burst, of_burst in costs[np.isfinite(costs["peak"])].groupby("burst"):
        pair = ["size", "lr", "seed"]
        peaks = of_burst.drop_duplicates([*pair, "name"]).pivot(index=pair, columns="name", values="peak")
        if reference in peaks and len(peaks.columns) > 1:
            yield str(burst).replace("_", " "), peaks


def _changes(peaks: pd.DataFrame, reference: str) -> dict[str, Interval]:
    """By name, the change of the peak from the reference."""
    others = [str(name) for name in peaks if name != reference]
    return {name: student_t((peaks[name] - peaks[reference]).dropna()) for name in others}


def _burst(burst: str, peaks: pd.DataFrame) -> str:
    lower = [name for name, change in _changes(peaks, NONE).items() if change.high < 0]
    with_each = f"certainly lower with {listed(lower)}" if lower else "certainly lower with none of those tried"
    return f"after {burst} {_level(peaks[NONE], 'without a response')}, {with_each}"


def _level(peaks: pd.Series, phrase: str) -> str:
    usual = student_t(peaks.dropna())
    interval = f" (95 % interval {usual.low:.2f} to {usual.high:.2f})" if usual.n > 2 else ""
    return f"{usual.mean:.2f} nats/token {phrase}{interval}"


def _arms(study: Study) -> str:
    """Which arms the loss certainly peaks lower or higher with than with the recipe."""
    parts = []
    for burst, peaks in _peaks(study, arm_costs(study.records), RECIPE):
        changes = _changes(peaks, RECIPE)
        lower = [name for name, change in changes.items() if change.high < 0]
        higher = [name for name, change in changes.items() if change.low > 0]
        sides = {"certainly lower with": lower, "certainly higher with": higher}
        certain = [f"{side} {listed(names)}" for side, names in sides.items() if names]
        parts.append(
            f"after {burst} the held-out loss peaks {_level(peaks[RECIPE], 'above the usual one with the recipe')}, "
            + (" and ".join(certain) or "and certainly lower or higher with none of the others")
        )
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}." if parts else ""


def _states(study: Study) -> str:
    by_seed = factors_by_seed(study.records, "peak")
    parts = [_added(str(burst), seeds) for burst, seeds in by_seed.groupby(level=0)]
    return f"To the peak of the held-out loss {'; '.join(parts)}." if parts else ""


def _added(burst: str, seeds: pd.DataFrame) -> str:
    """What a burst adds to the peak, and in which earlier states it certainly adds less."""
    own = student_t(seeds["data"])
    states = {"weights": "earlier weights", "moments": "earlier moments", "state": "both"}
    less = [text for name, text in states.items() if student_t(seeds[name]).low > 0]
    added = f"{burst.replace('_', ' ')} add {own.mean:.2f} nats/token (95 % interval {own.low:.2f} to {own.high:.2f})"
    return f"{added}, certainly less with {listed(less)}" if less else f"{added}, certainly less in no earlier state"


def _ledgers(study: Study) -> str:
    """How high runs without restarts end at the highest learning rate, and which ledgers certainly change that."""
    ledgers = study.records.runs.set_index("id").reindex(columns=[LEDGER])[LEDGER].fillna(NONE)
    points = study.points.assign(ledger=study.points["id"].map(ledgers))
    points = points[(points["lr"] == points["lr"].max()) & (points["size"] == points["size"].max())]
    losses = points.drop_duplicates(["seed", LEDGER]).pivot(index="seed", columns=LEDGER, values="capped")
    if NONE not in losses or len(losses.columns) < 2:
        return ""
    untreated = student_t(losses[NONE].dropna())
    changes = {str(name): student_t((losses[name] - losses[NONE]).dropna()) for name in losses if name != NONE}
    lower = [_by(name, change) for name, change in changes.items() if change.high < 0]
    higher = [_by(name, change) for name, change in changes.items() if change.low > 0]
    sides = {"lower": lower, "higher": higher}
    parts = [f"certainly {side} with {listed(names)}" for side, names in sides.items() if names]
    interval = f" (95 % interval {untreated.low:.2f} to {untreated.high:.2f})" if untreated.n > 2 else ""
    return (
        f"At learning rate {points['lr'].iloc[0]:g} runs without restarts end at {untreated.mean:.2f} nats/token"
        f"{interval}, {'; '.join(parts) or 'certainly neither lower nor higher with any ledger tried'}."
    )


def _by(ledger: str, change: Interval) -> str:
    return f"{ledger.replace('_', ' ')} (by {abs(change.mean):.2f})"
