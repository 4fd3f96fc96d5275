"""The noise scale and the held-out loss along training, run by run."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from lab.analysis.probe_values import updates
from lab.records.store import Records
from lab.studies.batch_size.targets import noise_sums

# Parts of a run; the noise scale of each is a ratio of means.
TENTHS = 10


def by_tenth(records: Records) -> pd.DataFrame:
    """Held-out loss and noise scale in each tenth of each run.

    Returns:
        Indexed by ``id`` and ``tenth`` (from 0). Columns ``loss`` (nats per token, a mean without the run's last
        record, which is on other held-out text) and ``noise_scale`` (sequences). Rows with NaN, or a scale of zero, are
        left out.
    """
    steps = updates(records.runs)
    losses = records.metrics[(records.metrics["probe"] == "val_loss") & (records.metrics["where"] == "")]
    losses = losses[losses["step"] < losses["id"].map(steps).astype(int) - 1]
    loss = losses.groupby(["id", _tenths(losses, steps)])["value"].mean()
    sums = noise_sums(records).reset_index()
    scale = _ratios(sums, ["id", _tenths(sums, steps)])
    tenths = pd.DataFrame({"loss": loss, "noise_scale": scale}).rename_axis(["id", "tenth"]).dropna()
    return tenths[tenths["noise_scale"] > 0]


def _ratios(sums: pd.DataFrame, keys: list[str | pd.Series]) -> pd.Series:
    """Mean trace over mean squared norm in each group; NaN if the estimate of the squared norm is not positive."""
    finite = np.isfinite(sums["trace"]) & np.isfinite(sums["squared_norm"])
    means = sums[finite].groupby(keys)[["trace", "squared_norm"]].mean()
    return pd.Series(means["trace"].clip(lower=0) / means["squared_norm"].where(means["squared_norm"] > 0))


def _tenths(rows: pd.DataFrame, steps: pd.Series) -> pd.Series:
    of_run = rows["id"].map(steps).astype(int)
    return (rows["step"] * TENTHS // of_run).clip(upper=TENTHS - 1).astype(int).rename("tenth")


def noise_rank(records: Records, probe: str, where: str) -> pd.Series:
    """Rank correlation of loss and noise scale over the tenths of each run, by run id; NaN if either is constant."""
    return _each_run(records, lambda run: float(run["loss"].rank().corr(run["noise_scale"].rank())))


def noise_growth(records: Records, probe: str, where: str) -> pd.Series:
    """Log10 of the noise scale in the last tenth of each run over that in the first, by id."""
    return _each_run(records, lambda run: math.log10(run["noise_scale"].iloc[-1] / run["noise_scale"].iloc[0]))


def first_loss(records: Records, probe: str, where: str) -> pd.Series:
    """Loss in the first tenth of each run, by id."""
    return _each_run(records, lambda run: float(run["loss"].iloc[0]))


def last_loss(records: Records, probe: str, where: str) -> pd.Series:
    """Loss in the last tenth of each run, by id."""
    return _each_run(records, lambda run: float(run["loss"].iloc[-1]))


def noise_at(records: Records, probe: str, where: str, loss: float) -> pd.Series:
    """Noise scale of each run at a loss, by run id; its log is interpolated straight over the loss between tenths."""
    return _each_run(records, lambda run: _interpolated(run.sort_values("loss"), loss))


def _interpolated(rising: pd.DataFrame, loss: float) -> float:
    return math.exp(float(np.interp(loss, rising["loss"], np.log(rising["noise_scale"]))))


def _each_run(records: Records, measure: Callable[[pd.DataFrame], float]) -> pd.Series:
    tenths = by_tenth(records)
    return pd.Series({name: measure(run) for name, run in tenths.groupby("id")}, dtype=float)


def noise_late(records: Records, probe: str, where: str) -> pd.Series:
    """Log10 of the noise scale over the second half of each run, by id."""
    steps = updates(records.runs)
    sums = noise_sums(records).reset_index()
    scales = _ratios(sums[sums["step"] >= sums["id"].map(steps).astype(int) / 2], ["id"])
    return pd.Series(np.log10(scales.where(scales > 0)))
