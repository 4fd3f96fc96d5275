"""Measures of runs: steps to a target, the best learning rate per batch size, gradient noise, ramps of the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from lab.analysis.curves import LR, parameters
from lab.analysis.judging.evidence import MissingRunsError
from lab.analysis.probe_values import updates
from lab.analysis.sensitivity import vertex
from lab.analysis.text import format_value
from lab.records.store import Records
from lab.studies.batch_size.estimates import FEWEST_BATCHES, Numbers, SaturatingCurve, steps_curve

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


def stages(measured: pd.DataFrame, end: float) -> list[pd.DataFrame]:
    """The rows of the ``STAGES`` equal parts of the first ``end`` updates of a table that is indexed by step."""
    edges = np.linspace(0, end, STAGES + 1)
    return [measured[(measured.index >= low) & (measured.index < high)] for low, high in pairwise(edges)]


def mean_noise_scale(measured: pd.DataFrame, end: float) -> float:
    """The noise scale over the first ``end`` updates of a run, sequences.

    It is the mean over ``STAGES`` equal parts of them, without parts that have no records.

    Args:
        measured: columns ``trace`` and ``squared_norm``, indexed by step.
        end: number of updates, such as those to a target.

    Returns:
        NaN if the estimate of the squared norm is not positive in some part.
    """
    return float(np.mean([ratio_of_means(stage) for stage in stages(measured, end) if len(stage)]))


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


def noise_scale_to_bigram(records: Records, probe: str, where: str) -> pd.Series:
    """Noise scale of each run over its updates to the loss of a bigram model, sequences; indexed by run id.

    NaN if it never reached this loss, or if each update had a single micro-batch.
    """
    sums, ends = noise_sums(records), crossings(records)["steps"]
    runs = [name for name in sums.index.unique("id") if math.isfinite(ends.get(name, math.nan))]
    return pd.Series({name: mean_noise_scale(sums.loc[name], ends[name]) for name in runs}, dtype=float)


# Fewest batch sizes with equal examples, and with equal steps, for which budgets are compared.
FEWEST_AT_A_BUDGET = 3
# A learning rate is good if its loss is at most this many times the best one.
GOOD = 1.05
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


class TunedBudget(NamedTuple):
    """The batch sizes of one budget, ``equal examples`` or ``equal steps``, with the learning rate tuned for the loss.

    Attributes:
        name: the name of the budget.
        loss: best final loss, nats per token, with a row per seed and a column per batch size.
        lr: best learning rate, the vertex of a parabola; NaN if the best one is at an end of the grid.
        low: lowest good learning rate, see ``GOOD``.
        high: highest good learning rate.
    """

    name: str
    loss: pd.DataFrame
    lr: pd.DataFrame
    low: pd.DataFrame
    high: pd.DataFrame

    def cautions(self) -> Iterator[str]:
        """A sentence on each batch size whose best learning rate is at an end of the grid."""
        for batch in self.lr.columns[self.lr.isna().any()]:
            yield (
                f"Left out of laws of the learning rate: {self.name} at a batch of {format_value(float(batch))}, since "
                "the best learning rate of some seed is the lowest or the highest tried."
            )


def budget_pairs(pairs: Collection[tuple[float, float]]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The distinct pairs of batch size and steps with equal examples, and those with equal steps, in rising order."""
    examples = Counter(batch * steps for batch, steps in pairs).most_common(1)[0][0]
    count = Counter(steps for _, steps in pairs).most_common(1)[0][0]
    rising = sorted(pairs)
    return [pair for pair in rising if pair[0] * pair[1] == examples], [pair for pair in rising if pair[1] == count]


def budgets(records: Records, runs: pd.DataFrame) -> list[TunedBudget]:
    """Tune the learning rate of every batch size at equal examples and at equal steps.

    Args:
        runs: judged points of curves (``judge``).

    Returns:
        Two budgets; none if either has fewer than ``FEWEST_AT_A_BUDGET`` batch sizes, or one learning rate only.
    """
    cards = records.runs.set_index("id").reindex(runs["id"], columns=["batch_size", "steps"])
    runs = runs.merge(cards.reset_index(), on="id")
    pairs = set(zip(runs["batch_size"].astype(float), runs["steps"].astype(float), strict=True))
    at_budgets = budget_pairs(pairs)
    if (
        not _are_one_arm(runs, "batch_size", "steps", "lr")
        or min(map(len, at_budgets)) < FEWEST_AT_A_BUDGET
        or runs["lr"].nunique() == 1
    ):
        return []
    at_examples, at_steps = at_budgets
    return [_budget("equal examples", at_examples, runs), _budget("equal steps", at_steps, runs)]


def _budget(name: str, pairs: list[tuple[float, float]], runs: pd.DataFrame) -> TunedBudget:
    at_budget = runs.merge(pd.DataFrame(pairs, columns=["batch_size", "steps"]), on=["batch_size", "steps"])
    curves = at_budget.sort_values("lr").groupby(["batch_size", "seed"])
    best = {curve: _best(rows["lr"].to_numpy(), rows["capped"].to_numpy()) for curve, rows in curves}
    table = pd.DataFrame.from_dict(best, orient="index").rename_axis(["batch", "seed"])
    loss, lr, low, high = (table[part].unstack("batch") for part in ("loss", "lr", "low", "high"))
    return TunedBudget(name, loss, lr, low, high)


def _best(lr_l: Numbers, loss_l: Numbers) -> dict[str, float]:
    best = int(loss_l.argmin())
    is_inside = 0 < best < len(lr_l) - 1
    fine = np.geomspace(lr_l[0], lr_l[-1], 1001)
    good = fine[np.interp(np.log(fine), np.log(lr_l), loss_l) <= GOOD * loss_l.min()]
    ends = {"low": float(good[0]), "high": float(good[-1])}
    return {"loss": float(loss_l.min()), "lr": vertex(lr_l, loss_l) if is_inside else math.nan, **ends}


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


def noise_traits(records: Records) -> pd.DataFrame:
    """How the noise scale of each run goes along with its loss, indexed by run id.

    Returns:
        Over the tenths of the run, columns ``rank``, the rank correlation of loss and noise scale, NaN if either is
        constant; ``growth``, log10 of the last noise scale over the first; ``first_loss`` and ``last_loss``, nats per
        token. And ``late``, log10 of the noise scale over the second half of the run.

    Raises:
        MissingRunsError: no run recorded the noise scale.
    """
    if not (records.metrics["probe"] == "noise_scale").any():
        raise MissingRunsError("no run recorded noise_scale")
    runs = by_tenth(records).groupby("id")
    first, last = runs.first(), runs.last()
    ranks = {run: tenths["loss"].rank().corr(tenths["noise_scale"].rank()) for run, tenths in runs}
    sums = noise_sums(records).reset_index()
    is_late = sums["step"] >= sums["id"].map(updates(records.runs)).astype(int) / 2
    late = _ratios(sums[is_late], ["id"])
    traits = {
        "rank": pd.Series(ranks, dtype=float),
        "growth": np.log10(last["noise_scale"] / first["noise_scale"]),
        "first_loss": first["loss"],
        "last_loss": last["loss"],
        "late": np.log10(late.where(late > 0)),
    }
    return pd.DataFrame(traits)


def noise_at(records: Records, probe: str, where: str, loss: float) -> pd.Series:
    """Noise scale of each run at a loss, by run id; its log is interpolated straight over the loss between tenths."""
    rising = by_tenth(records).sort_values("loss").groupby("id")
    logs = {run: np.interp(loss, tenths["loss"], np.log(tenths["noise_scale"])) for run, tenths in rising}
    return pd.Series(np.exp(pd.Series(logs, dtype=float)))


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
