"""Traits of the updates around a planted loss spike: their size, and their cosine with the descent of the loss."""

from __future__ import annotations

import math

import pandas as pd

from lab.analysis.events.costs import HELD_OUT, first_onsets
from lab.records.store import Records

RMS, DESCENT, LAG = "update_rms", "update_descent_cosine", "grad_lag_cosine"
EMBEDDING, ALL_WEIGHTS = "embedding", ""
# An update is large if its RMS is at least this many times the usual one.
LARGE = 1.5
TRAITS = ("lag", "rms", "embedding_rms", "largest_rms", "cosine", "rising_cosine", "large_cosine")


def update_traits(records: Records) -> pd.DataFrame:
    """Traits of the updates of each run that has a burst and recorded both cosines, indexed by its id.

    An RMS is a mean over tensors; a cosine is that of all weights together. A usual value is one over the second half
    of the updates before the burst.

    Returns:
        A row per run, NaN where nothing was recorded, with the columns

        - ``lag``: usual mean cosine of successive gradients.
        - ``rms`` and ``embedding_rms``: usual median RMS of the update; ``largest_rms``: the largest from the burst on.
        - ``cosine``: usual median cosine of the update with the descent.
        - ``rising_cosine``: mean cosine from the burst to the highest held-out loss.
        - ``large_cosine``: mean cosine over the large updates from the burst on, or that of the largest if none is
          large.
    """
    onsets = first_onsets(records)
    metrics = records.metrics[records.metrics["id"].isin(onsets.index)]
    rms = metrics[metrics["probe"] == RMS]
    series = {
        "rms": rms.groupby(["id", "step"])["value"].mean(),
        "embedding_rms": _values(rms, RMS, EMBEDDING),
        "cosine": _values(metrics, DESCENT, ALL_WEIGHTS),
        "lag": _values(metrics, LAG, ALL_WEIGHTS),
        "loss": _values(metrics, HELD_OUT, ""),
    }
    table = pd.DataFrame(series)
    of_updates = table[table["cosine"].notna()]
    by_run = {str(run): of_run.droplevel("id") for run, of_run in of_updates.groupby(level="id")}
    rows = {run: _traits(of_run, int(onsets[run])) for run, of_run in by_run.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(TRAITS), dtype=float)


def _values(metrics: pd.DataFrame, probe: str, where: str) -> pd.Series:
    of_probe = metrics[(metrics["probe"] == probe) & (metrics["where"] == where)]
    values: pd.Series = of_probe.set_index(["id", "step"])["value"]
    return values


def _traits(updates: pd.DataFrame, onset: int) -> tuple[float, ...]:
    """The traits of a run from the columns ``rms``, ``embedding_rms``, ``cosine``, ``lag``, ``loss`` by step."""
    usual, after = updates.loc[onset / 2 : onset - 1], updates.loc[onset:]
    rms = usual["rms"].median()
    losses = after["loss"].iloc[:-1]  # the last one is on all held-out text
    # the held-out loss of a step is measured before its update
    rising = after[after.index < losses.idxmax()] if losses.notna().any() else after.head(0)
    large = after[after["rms"] >= min(LARGE * rms, after["rms"].max())] if not after.empty else after
    return (
        usual["lag"].mean(),
        rms,
        usual["embedding_rms"].median(),
        after["rms"].max() if not after.empty else math.nan,
        usual["cosine"].median(),
        rising["cosine"].mean(),
        large["cosine"].mean(),
    )
