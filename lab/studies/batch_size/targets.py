"""Steps to a target loss: the step at which each run reached it, and the best learning rate at each batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from lab.analysis.probe_values import updates
from lab.analysis.sensitivity import vertex
from lab.analysis.text import spell
from lab.records.store import Records
from lab.studies.batch_size.estimates import Numbers

# Learning rates that must reach the target before one of them counts as tuned (Shallue et al. 2018, sec. 4).
FEWEST_TRIALS = 3
# Parts of a run over which the noise scale is averaged: a ratio of means in each part, then the mean of these.
STAGES = 4


def crossing(steps: ArrayLike, losses: ArrayLike, target: float) -> tuple[float, float]:
    """Updates until the loss is first at most ``target``, straight between records, and the steps between these.

    NaN if no record is as low; losses that are not finite are left out.
    """
    step_n, loss_n = np.asarray(steps, dtype=float), np.asarray(losses, dtype=float)
    finite_n = np.isfinite(loss_n)
    step_n, loss_n = step_n[finite_n], loss_n[finite_n]
    low = np.flatnonzero(loss_n <= target)
    if not len(low):
        return math.nan, math.nan
    after = int(low[0])
    if after == 0:
        return float(step_n[0]), 0.0
    interval = float(step_n[after] - step_n[after - 1])
    share = (loss_n[after - 1] - target) / (loss_n[after - 1] - loss_n[after])
    return float(step_n[after - 1] + share * interval), interval


def crossings(records: Records) -> pd.DataFrame:
    """The updates after which each run reached the loss of the bigram model of its text.

    Held-out losses on the fixed slice count, and so not the last one, which is on other held-out text.

    Returns:
        Indexed by run id; columns ``steps`` and ``interval``, the results of ``crossing``.
    """
    losses = records.metrics[(records.metrics["probe"] == "val_loss") & (records.metrics["where"] == "")]
    losses = losses.merge(records.runs[["id", "loss_bigram"]], on="id").join(updates(records.runs), on="id")
    losses = losses[losses["step"] < losses["updates"] - 1].sort_values(["id", "step"])
    ids = losses["id"].to_numpy()
    steps, values, targets = (losses[name].to_numpy(dtype=float) for name in ("step", "value", "loss_bigram"))
    first = [n for n in range(len(ids)) if n == 0 or ids[n] != ids[n - 1]]
    rows = {
        ids[begin]: crossing(steps[begin:end], values[begin:end], targets[begin])
        for begin, end in pairwise([*first, len(ids)])
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["steps", "interval"])


def steps_to_bigram(records: Records, probe: str, where: str) -> pd.Series:
    """Column ``steps`` of ``crossings``, in the form of a function of ``lab.analysis.probe_values``."""
    return crossings(records)["steps"]


class TunedBatch(NamedTuple):
    """One arm at one batch size, with its learning rate tuned.

    Attributes:
        steps_s: updates to the target with each seed's best learning rate.
        lr_s: this learning rate, the vertex of a parabola of log steps over log learning rate.
        refusal: the reason why the batch size does not count; empty if it does.
    """

    steps_s: Numbers
    lr_s: Numbers
    refusal: str


def tune(lrs: Sequence[float], steps_sl: ArrayLike) -> TunedBatch:
    """Find each seed's best learning rate of the rising ``lrs``; ``steps_sl`` is NaN where the target is not reached.

    The batch size is refused if fewer than ``FEWEST_TRIALS`` learning rates reached the target with every seed. It is
    also refused if the best one (mean over seeds) is at an end of the grid.
    """
    table_sl = np.asarray(steps_sl, dtype=float)
    reached_l = np.isfinite(table_sl).all(axis=0)
    nothing_s = np.full(len(table_sl), math.nan)
    if reached_l.sum() < FEWEST_TRIALS:
        reached = f"{reached_l.sum()} of {len(lrs)} learning rates reached the target"
        refusal = f"{reached}, a tuned one takes {FEWEST_TRIALS}"
        return TunedBatch(nothing_s, nothing_s, refusal)
    mean_l = np.where(reached_l, np.log(np.where(reached_l, table_sl, 1.0)).mean(axis=0), math.inf)
    best = int(mean_l.argmin())
    if best in (0, len(lrs) - 1):
        end = "lowest" if best == 0 else "highest"
        return TunedBatch(nothing_s, nothing_s, f"the best learning rate, {spell(lrs[best])}, is the {end} tried")
    lr_l = np.asarray(lrs, dtype=float)
    seeds = [(lr_l[np.isfinite(row)], row[np.isfinite(row)]) for row in table_sl]
    lr_s = np.array([vertex(rates, np.log(steps)) for rates, steps in seeds])
    return TunedBatch(np.array([steps.min() for _, steps in seeds]), lr_s, "")


def mean_noise_scale(measured: pd.DataFrame, end: float) -> float:
    """The noise scale over the first ``end`` updates of a run, sequences.

    It is the mean over ``STAGES`` equal parts of them, without parts that have no records.

    Args:
        measured: columns ``trace`` and ``squared_norm``, indexed by step.
        end: number of updates, such as those to a target.

    Returns:
        NaN if the estimate of the squared norm is not positive in some part.
    """
    step_n, edges = measured.index.to_numpy(), np.linspace(0, end, STAGES + 1)
    trace_n, squared_n = (measured[part].to_numpy(dtype=float) for part in ("trace", "squared_norm"))
    stages = [(step_n >= low) & (step_n < high) for low, high in pairwise(edges)]
    return float(np.mean([_ratio(trace_n[stage], squared_n[stage]) for stage in stages if stage.any()]))


def ratio_of_means(measured: pd.DataFrame) -> float:
    """Mean trace over mean squared norm; NaN if the estimate of the squared norm is not positive."""
    return _ratio(*(measured[part].to_numpy(dtype=float) for part in ("trace", "squared_norm")))


def _ratio(trace_n: Numbers, squared_n: Numbers) -> float:
    finite_n = np.isfinite(trace_n) & np.isfinite(squared_n)
    if not finite_n.any() or not squared_n[finite_n].mean() > 0:
        return math.nan
    return float(max(trace_n[finite_n].mean(), 0.0) / squared_n[finite_n].mean())


def noise_sums(records: Records) -> pd.DataFrame:
    """Trace and squared norm of the whole gradient, summed over groups of weights, indexed by run id and step.

    NaN if any group has NaN, since the sum over the others would be that of a smaller gradient.
    """
    measured = records.metrics[records.metrics["probe"] == "noise_scale"]
    part = measured["where"].map(lambda where: where.partition(".")[0]).rename("part")
    groups = measured.assign(is_nan=measured["value"].isna()).groupby(["id", "step", part])
    sums = groups["value"].sum().mask(groups["is_nan"].any()).unstack("part")
    return sums.reindex(columns=["trace", "squared_norm"])


def noise_scale_to_bigram(records: Records, probe: str, where: str) -> pd.Series:
    """Noise scale of each run over its updates to the loss of a bigram model, sequences; indexed by run id.

    NaN if it never reached this loss, or if each update had a single micro-batch.
    """
    sums, ends = noise_sums(records), crossings(records)["steps"]
    runs = [name for name in sums.index.unique("id") if math.isfinite(ends.get(name, math.nan))]
    return pd.Series({name: mean_noise_scale(sums.loc[name], ends[name]) for name in runs}, dtype=float)
