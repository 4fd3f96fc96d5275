"""What a planted loss spike cost each run, and what its response did about it: one row of numbers per run."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.text import spell
from lab.core.detectors import LEAST_RISE
from lab.records.store import Records

NONE, REPEATS = "none", "burst.repeats"
ONSETS = ("burst", "rewind_weights")  # events with which a burst begins, or would, if its batches were ordinary
HELD_OUT, BEFORE = "val_loss", 4  # the probe that is read, and how many of its values before a burst are the usual loss
Arrays = tuple[Any, ...]
NOTHING: Arrays = (np.empty(0), np.empty(0, dtype=object))
COSTS = ("peak", "recovery", "final", "rewound", "skipped", "spikes", "false_alarms", "clean_steps")


def spike_costs(records: Records) -> pd.DataFrame:
    """Costs of each run that was watched, indexed by its id.

    Held-out losses are those of the updates that count, so a spike that a run went back from is not in them; what going
    back cost is in ``rewound`` and ``skipped``.

    Returns:
        Columns ``peak``, the largest held-out loss from the burst on minus the usual one before it, nats/token, or
        infinity if one is not finite; ``recovery``, updates from there until the loss is back within 0.1 nats of the
        usual one, the rest of the run if it never is, 0 if it never left; ``final`` held-out loss; ``rewound`` updates
        and ``skipped`` batches; ``spikes`` since the burst began; ``false_alarms``, spikes before it, or at all in a
        run without a burst; and ``clean_steps``, in which these could occur.  Of a burst that comes several times,
        ``peak`` is the largest and ``recovery`` the sum, each read until it comes again, and the usual loss is never
        above the one before.
    """
    runs = records.runs
    watched = runs[runs["spikes"].notna()] if "spikes" in runs else runs.head(0)
    metrics = records.metrics[records.metrics["probe"] == HELD_OUT].sort_values("step", kind="stable")
    losses, events = _by_run(metrics, "step", "value"), _by_run(records.events, "step", "kind")
    names = ("final_val_loss", "rewound_steps", "skipped_batches", "spikes", "steps")
    table = watched.reindex(columns=[*names, REPEATS]).to_numpy(dtype=float)
    rows = [
        _costs(numbers, losses.get(run, NOTHING), events.get(run, NOTHING))
        for run, numbers in zip(watched["id"], table, strict=True)
    ]
    return pd.DataFrame(rows, watched["id"].to_list(), list(COSTS), dtype=float)


def repeats_of(card: Mapping[Hashable, Any]) -> int:
    """How often the burst of a run comes; runs on which it comes once have no such column, or nothing in it."""
    repeats = float(card.get(REPEATS, 1))
    return 1 if math.isnan(repeats) else int(repeats)


def named_costs(records: Records) -> pd.DataFrame:
    """``spike_costs`` with the columns ``id``, ``burst``, and ``name`` of the response, or else of the ledger.

    Responses of one kind are told apart by the keys in which they differ.
    """
    costs = spike_costs(records)
    cards = records.runs.set_index("id").loc[costs.index]
    return costs.assign(id=costs.index, burst=cards.get("burst", NONE), name=_names(cards))


def _names(cards: pd.DataFrame) -> pd.Series:
    """The response of each run, or else its ledger; in brackets the keys in which runs of one response differ."""
    responses, ledgers = (cards.get(name, pd.Series(NONE, cards.index)).astype(str) for name in ("response", "ledger"))
    names = responses.where(responses != NONE, ledgers)
    labels = names.str.replace("_", " ")
    for _, group in cards.groupby(names):
        keys = [key for key in map(str, group) if key.startswith("response.") and group[key].nunique() > 1]
        if keys:
            settings = [[f"{key.partition('.')[2]} {spell(value)}" for value in group[key]] for key in keys]
            labels.loc[group.index] += [f" ({', '.join(each)})" for each in zip(*settings, strict=True)]
    return labels


def first_onsets(records: Records) -> pd.Series:
    """The step at which the first burst of each run that met one begins, indexed by its id."""
    onsets = records.events[records.events["kind"].isin(ONSETS)]
    return onsets.drop_duplicates("id").set_index("id")["step"]


def _by_run(table: pd.DataFrame, *columns: str) -> dict[str, Arrays]:
    """By run id, these columns in the order of the table."""
    arrays = [table[column].to_numpy() for column in columns]
    indices = table.groupby("id").indices
    return {str(run): tuple(array[index] for array in arrays) for run, index in indices.items()}


def _costs(numbers: Any, losses: Arrays, events: Arrays) -> tuple[float, ...]:
    final, rewound, skipped, spikes, steps, repeats = numbers
    step_n, kind_n = events
    onsets_n = step_n[np.isin(kind_n, ONSETS)]
    onset = float(onsets_n[0]) if len(onsets_n) else math.inf  # events are in the order in which they happened
    # a run that goes back meets a burst again, which is no other burst
    onsets = sorted({onset, *onsets_n.tolist()}) if repeats > 1 else [onset]
    alarms = int((step_n[kind_n == "spike"] < onset).sum())
    return *_excesses(losses, onsets, steps), final, rewound, skipped, spikes - alarms, alarms, min(onset, steps)


def _excesses(losses: Arrays, onsets: Sequence[float], steps: float) -> tuple[float, float]:
    """The largest peak and the sum of recoveries; NaN without a held-out loss on both sides of an onset."""
    peaks, recoveries, usual = list[float](), list[float](), math.inf
    for onset, until in pairwise([*onsets, steps]):
        peak, recovery, usual = _excess(losses, onset, until, steps, usual)
        peaks.append(peak)
        recoveries.append(recovery)
    return float(np.fmax.reduce(peaks)), sum(recoveries)


def _excess(losses: Arrays, onset: float, until: float, steps: float, usual: float) -> tuple[float, float, float]:
    """Peak and recovery before step ``until``, and the usual loss, at most ``usual``."""
    step_n, value_n = losses
    on_slice_n = (step_n > 0) & (step_n < steps - 1)  # the first and the last are of the whole held-out text
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
