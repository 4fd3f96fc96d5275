"""Made-up records of the sweep ``leaderboard``: each arm has the instability part that a test gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

import planted
from lab.core.shipped import load, sweeps
from lab.records import store
from lab.records.store import Records

SEEDS = (10, 11, 12, 13, 14, 15)
LRS = planted.LRS
SPIKE_EVERY = 30  # steps from one planted spike to the next
BASE = 0.35  # instability part of an arm without effect, nats per token
SPREAD = 0.017  # of the difference of two arms over seeds, as the header of the sweep says


def arms() -> list[tuple[str, ...]]:
    """The sets of interventions of the sweep."""
    text = load(sweeps()["leaderboard"])["hydra"]["sweeper"]["params"]["intervention"]
    return [tuple(filter(None, one.strip("[] \n").split(","))) for one in text.replace(" ", "").split("],")]


def cards(
    effects: Mapping[tuple[str, ...], float],
    seeds: Sequence[int] = SEEDS,
    lrs: Sequence[float] = LRS,
    spread: float = SPREAD,
    **changes: Any,
) -> Iterator[dict[str, Any]]:
    """A card per arm, seed and learning rate.

    Args:
        effects: by the interventions of an arm, how much its instability part lies above ``BASE``; its loss is 2.0 at
            the middle learning rate, 0.3 higher at lower ones, and at all higher ones what makes that part.
        spread: standard deviation of the instability part over seeds, drawn anew for each arm.
        changes: of every card.
    """
    for names, effect in effects.items():
        for seed in seeds:
            draw = np.random.default_rng([seed, *map(ord, "+".join(names))])
            above = BASE + effect + spread / 2**0.5 * draw.normal()
            for index, lr in enumerate(lrs):
                middle = len(lrs) // 2
                # three learning rates above the best share the instability part
                excess = 0.3 if index < middle else above * len(lrs) / (len(lrs) - 1 - middle) if index > middle else 0
                numbers = {f"intervention.{name}.number": 1.0 for name in names}
                yield planted.card(
                    **{
                        "intervention.z_loss.coefficient": 1e-4 if "z_loss" in names else None,
                        **numbers,
                        "intervention": "+".join(sorted(names)) or "none",
                        "optimizer.lr": lr,
                        "seed": seed,
                        "final_val_loss": 2.0 + excess,
                        "parameters": 41_000 + 64 * len(names),
                        "parameters_without_embeddings": 24_736 + 64 * len(names),
                        **changes,
                    }
                )


def with_spikes(runs: Iterable[Mapping[str, Any]], spikes_of: Callable[[Mapping[str, Any]], int]) -> Records:
    """Records of these cards that were measured at every step, with as many loss spikes as ``spikes_of`` says of each.

    The loss is 2 nats with little noise, and 4 at the step of a spike; the first is at step 30.
    """
    watched = [{**run, "probes.every": 1, "probes.names": "train_loss"} for run in runs]
    rows = []
    for run in watched:
        loss_n = 2 + np.random.default_rng(run["seed"]).normal(0, 0.01, run["steps"])
        loss_n[[SPIKE_EVERY * (index + 1) for index in range(spikes_of(run))]] += 2
        rows += [(run["id"], step, "train_loss", "", loss) for step, loss in enumerate(loss_n.tolist())]
    metrics = pd.DataFrame(rows, columns=list(store.METRIC_COLUMNS)).astype(store.METRIC_COLUMNS)
    return Records(planted.table(watched), metrics)
