"""What a planted loss spike cost each run, and what its response did about it: one row of numbers per run."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lab.core.detectors import LEAST_RISE
from lab.records.store import Records

HELD_OUT, BEFORE = "val_loss", 4  # the probe that is read, and how many of its values before a burst are the usual loss
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
        run without a burst; and ``clean_steps``, in which these could occur.
    """
    runs = records.runs
    watched = runs[runs["spikes"].notna()] if "spikes" in runs else runs.head(0)
    events = dict(list(records.events.groupby("id")))
    losses = dict(list(records.metrics[records.metrics["probe"] == HELD_OUT].groupby("id")))
    rows = {
        run["id"]: _costs(run, events.get(run["id"], records.events.head(0)), losses.get(run["id"]))
        for _, run in watched.iterrows()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(COSTS), dtype=float)


def _costs(run: pd.Series, events: pd.DataFrame, losses: pd.DataFrame | None) -> tuple[float, ...]:
    bursts = events.loc[events["kind"] == "burst", "step"]
    onset = float(bursts.iloc[0]) if len(bursts) else math.inf  # events are in the order in which they happened
    alarms = int((events.loc[events["kind"] == "spike", "step"] < onset).sum())
    peak, recovery = math.nan, math.nan
    if losses is not None and math.isfinite(onset):
        peak, recovery = _excess(losses, onset, int(run["steps"]))
    numbers = run["final_val_loss"], run["rewound_steps"], run["skipped_batches"], run["spikes"] - alarms
    return peak, recovery, *map(float, numbers), alarms, min(onset, float(run["steps"]))


def _excess(losses: pd.DataFrame, onset: float, steps: int) -> tuple[float, float]:
    """Peak and recovery; NaN without a held-out loss on both sides of the onset."""
    losses = losses.sort_values("step")
    losses = losses[(losses["step"] > 0) & (losses["step"] < steps - 1)]  # these two are of the whole held-out text
    step_n, value_n = losses["step"].to_numpy(dtype=float), losses["value"].to_numpy(dtype=float)
    before_n, after_n = value_n[step_n <= onset][-BEFORE:], value_n[step_n > onset]
    if not len(before_n) or not len(after_n):
        return math.nan, math.nan
    excess_n = np.where(np.isfinite(after_n), after_n - float(np.median(before_n)), math.inf)
    high = np.flatnonzero(excess_n > LEAST_RISE)
    if not len(high):
        return float(excess_n.max()), 0.0
    after = min(high[-1] + 1, len(after_n) - 1)
    return float(excess_n.max()), float(step_n[step_n > onset][after] - onset)
