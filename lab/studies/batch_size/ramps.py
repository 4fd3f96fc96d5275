"""Batches that grow: loss and batch over the tokens seen, and the saving by a batch that follows the noise scale."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from lab.analysis.probe_values import updates
from lab.records.store import Records
from lab.studies.batch_size.estimates import Numbers
from lab.studies.batch_size.targets import crossing, noise_sums


def over_tokens(records: Records) -> dict[str, pd.DataFrame]:
    """Held-out loss and batch of each run, at the steps that recorded both; by run id.

    Returns:
        Tables indexed by step, with the columns ``tokens`` (seen before the update), ``sequences`` (of the update),
        ``loss`` (before it, nats per token) and, if the run recorded its noise, ``trace`` and ``squared_norm``. The
        last record is left out, since it is on other held-out text.
    """
    metrics = records.metrics
    parts = {
        **{name: _series(metrics, "batch", name) for name in ("tokens", "sequences")},
        "loss": _series(metrics, "val_loss", ""),
    }
    table = pd.DataFrame(parts).dropna(subset=["tokens", "sequences"]).join(noise_sums(records))
    ends = updates(records.runs) - 1
    runs = {str(name): run.droplevel("id") for name, run in table.groupby("id")}
    return {name: run[run.index < ends[name]] for name, run in runs.items()}


def _series(metrics: pd.DataFrame, probe: str, where: str) -> pd.Series:
    rows = metrics[(metrics["probe"] == probe) & (metrics["where"] == where)]
    return rows.set_index(["id", "step"])["value"].sort_index()


def loss_at(run: pd.DataFrame, tokens: ArrayLike) -> Numbers:
    """Loss of a run of ``over_tokens`` at these tokens, interpolated straight between records; NaN beyond the last."""
    losses: Numbers = np.interp(np.asarray(tokens, dtype=float), run["tokens"], run["loss"], right=math.nan)
    return losses


def tokens_to(run: pd.DataFrame, loss: float) -> float:
    """Tokens until a run of ``over_tokens`` first reaches a loss, straight between records; NaN if it never does."""
    return crossing(run["tokens"], run["loss"], loss)[0]


def predicted_saving(noise_scale: ArrayLike, batch: ArrayLike) -> float:
    """Share of the steps, and of the tokens, that these batches save over a constant batch of their mean.

    An update with batch ``B`` makes as much progress as ``1 / (1 + noise_scale / B)`` steps of an infinite batch
    (McCandlish et al. 2018, sec. 2.2). The constant batch takes ``1 + noise_scale / mean(B)`` updates for each of these
    steps.

    Args:
        noise_scale: noise scale at updates evenly spaced in training, sequences.
        batch: batch of the same updates, sequences.
    """
    noise_n, batch_n = np.asarray(noise_scale, dtype=float), np.asarray(batch, dtype=float)
    progress_n = 1 / (1 + noise_n / batch_n)
    constant = float((progress_n * (1 + noise_n / batch_n.mean())).mean())
    return 1 - 1 / constant
