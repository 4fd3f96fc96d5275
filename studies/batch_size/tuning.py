"""What runs say of batch sizes: steps to a target, the best learning rate of each, and the noise scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from lab.analysis.curves import LR, parameters
from lab.analysis.probe_values import recorded
from lab.analysis.sensitivity import vertex
from lab.analysis.text import format_value
from lab.records.store import Records
from studies.batch_size.fits import FEWEST_BATCHES, Numbers, SaturatingCurve, steps_curve

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
    losses = recorded(records, "val_loss", "").merge(records.runs[["id", "loss_bigram"]], on="id")
    losses = losses[losses["step"] < losses["updates"] - 1].sort_values("step")
    rows = {
        run: crossing(of_run["step"], of_run["value"], of_run["loss_bigram"].iloc[0])
        for run, of_run in losses.groupby("id")
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["steps", "interval"])


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
        reached = (
            f"{reached_l.sum()} of {len(lrs)} learning rates reached the target, a tuned one takes {FEWEST_TRIALS}"
        )
        return TunedBatch(nothing_s, nothing_s, reached)
    mean_l = np.where(reached_l, np.log(np.where(reached_l, table_sl, 1.0)).mean(axis=0), math.inf)
    if refusal := end_of_grid(lrs, int(mean_l.argmin())):
        return TunedBatch(nothing_s, nothing_s, refusal)
    lr_l = np.asarray(lrs, dtype=float)
    seeds = [(lr_l[np.isfinite(row)], row[np.isfinite(row)]) for row in table_sl]
    lr_s = np.array([vertex(rates, np.log(steps)) for rates, steps in seeds])
    return TunedBatch(np.array([steps.min() for _, steps in seeds]), lr_s, "")


def end_of_grid(lrs: Sequence[float], best: int) -> str:
    """The reason why the learning rate at this position is not tuned, if it ends the rising ``lrs``; else empty."""
    if 0 < best < len(lrs) - 1:
        return ""
    return f"the best learning rate, {format_value(lrs[best])}, is the {'lowest' if best == 0 else 'highest'} tried"


def ratio_of_means(measured: pd.DataFrame) -> float:
    """Mean trace over mean squared norm; NaN if the estimate of the squared norm is not positive."""
    trace_n, squared_n = (measured[part].to_numpy(dtype=float) for part in ("trace", "squared_norm"))
    finite_n = np.isfinite(trace_n) & np.isfinite(squared_n)
    if not finite_n.any() or not squared_n[finite_n].mean() > 0:
        return math.nan
    return float(max(trace_n[finite_n].mean(), 0.0) / squared_n[finite_n].mean())


def noise_sums(records: Records) -> pd.DataFrame:
    """Trace and squared norm of the whole gradient, summed over groups of weights, indexed by run id and step.

    NaN if any group has NaN, since the sum over the others would belong to a smaller gradient.
    """
    measured = records.metrics[records.metrics["probe"] == "noise_scale"]
    part = measured["where"].map(lambda where: where.partition(".")[0]).rename("part")
    groups = measured.assign(is_nan=measured["value"].isna()).groupby(["id", "step", part])
    sums = groups["value"].sum().mask(groups["is_nan"].any()).unstack("part")
    return sums.reindex(columns=["trace", "squared_norm"])


OPTIMIZER_NAMES = {"sgd": "SGD", "momentum": "momentum", "adamw": "Adam"}


class TunedSteps(NamedTuple):
    """The batch sizes of one optimizer and model size, with the learning rate tuned for steps to the target.

    Attributes:
        name: the optimizer, with the size if there are several.
        steps: updates to the target, with a row per seed and a column per batch size that is not refused.
        lr: the best learning rate, in the same rows and columns.
        refusals: the reason why a batch size is left out, by batch size.
        by_lr: updates to the target with every learning rate (column) and seed (row), by batch size.
    """

    name: str
    steps: pd.DataFrame
    lr: pd.DataFrame
    refusals: dict[float, str]
    by_lr: Mapping[float, pd.DataFrame]

    @property
    def batches(self) -> Numbers:
        """Batch sizes with a tuned learning rate, sequences, in rising order."""
        return self.steps.columns.to_numpy(dtype=float)

    @property
    def has_fit(self) -> bool:
        """Whether there are enough batch sizes for ``fit``."""
        return len(self.batches) >= FEWEST_BATCHES

    @property
    def fit(self) -> SaturatingCurve:
        """The hyperbola through the geometric means over seeds.

        Raises:
            ValueError: fewer than ``FEWEST_BATCHES`` batch sizes.
        """
        return steps_curve(self.batches, np.exp(np.log(self.steps).mean(axis=0)))

    def cautions(self) -> Iterator[str]:
        """A sentence on each batch size that is left out."""
        for batch, refusal in self.refusals.items():
            yield f"Left out: {self.name} at a batch of {format_value(batch)}, since {refusal}."


def tuned_steps(records: Records) -> list[TunedSteps]:
    """Tune the learning rate of every batch size for steps to the loss of a bigram model.

    Only runs with a constant schedule count, since with decay the length of the run sets when a loss is reached. The
    list is sorted by size and optimizer; it is empty if no optimizer has several batch sizes and learning rates.
    """
    runs = records.runs[(records.runs["status"] != "failed") & (records.runs["schedule.name"] == "constant")]
    several = [
        (key, group)
        for key, group in runs.assign(size=parameters(runs)).groupby(["size", "optimizer.name"])
        if group["batch_size"].nunique() > 1 and group[LR].nunique() > 1 and _are_one_arm(group, "batch_size", LR)
    ]
    if not several:
        return []
    steps = crossings(records)["steps"]
    sizes = {size for (size, _), _ in several}
    tuned = []
    for (size, optimizer), group in several:
        name = OPTIMIZER_NAMES.get(str(optimizer), str(optimizer))
        reached = group.assign(to_target=group["id"].map(steps).astype(float)).groupby("batch_size")
        by_lr = {float(str(batch)): rows.pivot_table("to_target", "seed", LR, dropna=False) for batch, rows in reached}
        tuned.append(tuned_batches(name if len(sizes) == 1 else f"{name}, {size} parameters", by_lr))
    return tuned


def _are_one_arm(runs: pd.DataFrame, *keys: str) -> bool:
    """Whether the runs differ in nothing but these keys and the seed."""
    return not runs.duplicated([*keys, "seed"]).any()


def tuned_batches(name: str, by_lr: Mapping[float, pd.DataFrame]) -> TunedSteps:
    """Tune each batch size of an optimizer; for the arguments see ``TunedSteps``."""
    tuned = {batch: tune([float(lr) for lr in table.columns], table) for batch, table in by_lr.items()}
    kept = {batch: result for batch, result in tuned.items() if not result.refusal}
    steps = pd.DataFrame({batch: pd.Series(result.steps_s, by_lr[batch].index) for batch, result in kept.items()})
    lr = pd.DataFrame({batch: pd.Series(result.lr_s, by_lr[batch].index) for batch, result in kept.items()})
    refusals = {batch: result.refusal for batch, result in tuned.items() if result.refusal}
    return TunedSteps(name, steps, lr, refusals, by_lr)
