"""Costs of a planted loss spike, and of the response to it: one row of numbers per run.

A burst is a stretch of bad batches that a config injects into the data of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.text import format_value
from lab.core.spike_trigger import LEAST_RISE
from lab.records.store import Records
from labwatch.events.scores import REPEATS

NONE = "none"
ONSETS = ("burst", "rewind_weights")  # events at the first step of a burst, also of one with ordinary batches instead
HELD_OUT, BEFORE = "val_loss", 4  # the probe, and how many of its values before a burst make the usual loss
Arrays = tuple[Any, ...]
NOTHING: Arrays = (np.empty(0), np.empty(0, dtype=object))
COSTS = ("peak", "recovery", "final", "rewound", "skipped", "spikes", "false_alarms", "clean_steps")


def spike_costs(records: Records) -> pd.DataFrame:
    """Costs of each run whose spikes were counted in training, indexed by its id.

    Held-out losses are those of the updates that were kept. So a spike from which a run went back is not in them; the
    columns ``rewound`` and ``skipped`` hold what going back cost.

    The usual loss is the median of the last four held-out losses before the burst. A burst that comes several times has
    the largest ``peak`` and the sum of each ``recovery``, read from one burst to the next; its usual loss never rises.

    Returns:
        A row per run with the columns

        - ``peak``: the largest held-out loss from the burst on minus the usual one, nats/token; infinite if some loss
          is not finite.
        - ``recovery``: updates from the burst until the loss is back within 0.1 nats of the usual one for good; the
          rest of the run if it never is, and 0 if it never rose further.
        - ``final``: the final held-out loss, nats/token.
        - ``rewound`` updates and ``skipped`` batches.
        - ``spikes`` since the burst began.
        - ``false_alarms``: spikes before the burst, or all spikes of a run without one.
        - ``clean_steps``: steps in which a false alarm could occur.
    """
    runs = records.runs
    watched = runs[runs["spikes"].notna()] if "spikes" in runs else runs.head(0)
    if watched.empty:
        return pd.DataFrame([], [], list(COSTS), dtype=float)
    metrics = records.metrics[records.metrics["probe"] == HELD_OUT].sort_values("step", kind="stable")
    losses, events = _by_run(metrics, "step", "value"), _by_run(records.events, "step", "kind")
    names = ("final_val_loss", "rewound_steps", "skipped_batches", "spikes", "steps")
    table = watched.reindex(columns=[*names, REPEATS]).to_numpy(dtype=float)
    rows = [
        _costs(numbers, losses.get(run, NOTHING), events.get(run, NOTHING))
        for run, numbers in zip(watched["id"], table, strict=True)
    ]
    return pd.DataFrame(rows, watched["id"].to_list(), list(COSTS), dtype=float)


def named_costs(records: Records) -> pd.DataFrame:
    """``spike_costs`` with columns ``id``, ``bad_batches``, and ``name`` of the response, or else of the restart log.

    The names of responses of one kind include the settings in which they differ.
    """
    costs = spike_costs(records)
    cards = records.runs.set_index("id").loc[costs.index]
    return costs.assign(id=costs.index, bad_batches=cards.get("bad_batches", NONE), name=_names(cards))


def _names(cards: pd.DataFrame) -> pd.Series:
    """The response of each run, or else its restart log; in brackets the keys in which runs of one response differ."""
    none = pd.Series(NONE, cards.index)
    response, restarts = (cards.get(name, none).astype(str) for name in ("response", "restarts"))
    names = response.where(response != NONE, restarts)
    labels = names.str.replace("_", " ")
    for _, group in cards.groupby(names):
        keys = [key for key in map(str, group) if key.startswith("response.") and group[key].nunique() > 1]
        if keys:
            settings = [[f"{key.partition('.')[2]} {format_value(value)}" for value in group[key]] for key in keys]
            labels.loc[group.index] += [f" ({', '.join(each)})" for each in zip(*settings, strict=True)]
    return labels


def first_onsets(records: Records) -> pd.Series:
    """The first step of the first burst of each run that has one, indexed by run id."""
    onsets = records.events[records.events["kind"].isin(ONSETS)]
    return onsets.drop_duplicates("id").set_index("id")["step"]


def _by_run(table: pd.DataFrame, *columns: str) -> dict[str, Arrays]:
    """These columns of each run, in the order of the table; by run id."""
    arrays = [table[column].to_numpy() for column in columns]
    indices = table.groupby("id").indices
    return {str(run): tuple(array[index] for array in arrays) for run, index in indices.items()}


def _costs(numbers: Any, losses: Arrays, events: Arrays) -> tuple[float, ...]:
    final, rewound, skipped, spikes, steps, repeats = numbers
    step_n, kind_n = events
    onsets_n = step_n[np.isin(kind_n, ONSETS)]
    onset = float(onsets_n[0]) if len(onsets_n) else math.inf  # events are in the order in which they happened
    # a run that goes back sees its burst again, which is not another burst
    onsets = sorted({onset, *onsets_n.tolist()}) if repeats > 1 else [onset]
    alarms = int((step_n[kind_n == "spike"] < onset).sum())
    return *_excesses(losses, onsets, steps), final, rewound, skipped, spikes - alarms, alarms, min(onset, steps)


def _excesses(losses: Arrays, onsets: Sequence[float], steps: float) -> tuple[float, float]:
    """The largest peak and the sum of recoveries; NaN if no held-out loss lies on one side of an onset."""
    peaks, recoveries, usual = list[float](), list[float](), math.inf
    for onset, until in pairwise([*onsets, steps]):
        peak, recovery, usual = _excess(losses, onset, until, steps, usual)
        peaks.append(peak)
        recoveries.append(recovery)
    return float(np.fmax.reduce(peaks)), sum(recoveries)


def _excess(losses: Arrays, onset: float, until: float, steps: float, usual: float) -> tuple[float, float, float]:
    """Peak and recovery before step ``until``, and the usual loss, at most ``usual``."""
    step_n, value_n = losses
    on_slice_n = (step_n > 0) & (step_n < steps - 1)  # the first and last are on all held-out text
    before_n = value_n[on_slice_n & (step_n <= onset)][-BEFORE:]
    is_after_n = on_slice_n & (step_n > onset) & (step_n <= until)
    after_n, at_n = value_n[is_after_n], step_n[is_after_n]
    if not len(before_n) or not len(after_n):
        return math.nan, math.nan, usual
    usual = float(np.minimum(usual, np.median(before_n)))
    excess_n = np.where(np.isfinite(after_n), after_n - usual, math.inf)
    high_n = np.flatnonzero(excess_n > LEAST_RISE)
    if not len(high_n):
        return float(excess_n.max()), 0.0, usual
    is_back = high_n[-1] + 1 < len(at_n)
    return float(excess_n.max()), float((at_n[high_n[-1] + 1] if is_back else until) - onset), usual
