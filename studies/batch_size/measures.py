"""Measures of runs: learning rates tuned at a budget, gradient noise, ramps of the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from lab.analysis.probe_values import recorded, updates
from lab.analysis.sensitivity import vertex
from lab.analysis.text import format_value
from lab.records.store import Records
from studies.batch_size.fits import Numbers
from studies.batch_size.tuning import STAGES, _are_one_arm, crossing, crossings, noise_sums, ratio_of_means
from studies.claims.evidence import MissingRunsError

# Fewest batch sizes with equal examples, and with equal steps, for which budgets are compared.
FEWEST_AT_A_BUDGET = 3
# A learning rate is good if its loss is at most this many times the best one.
GOOD = 1.05


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
    losses = recorded(records, "val_loss", "")
    losses = losses[losses["step"] < losses["updates"] - 1]
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
    places = {"tokens": ("batch", "tokens"), "sequences": ("batch", "sequences"), "loss": ("val_loss", "")}
    series = {name: recorded(records, *place).set_index(["id", "step"])["value"] for name, place in places.items()}
    table = pd.DataFrame(series).sort_index().dropna(subset=["tokens", "sequences"]).join(noise_sums(records))
    ends = updates(records.runs) - 1
    runs = {str(name): run.droplevel("id") for name, run in table.groupby("id")}
    return {name: run[run.index < ends[name]] for name, run in runs.items()}


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


def mean_noise_scale(measured: pd.DataFrame, end: float) -> float:
    """The noise scale over the first ``end`` updates of a run, sequences.

    It is the mean over ``STAGES`` equal parts of them, without parts that have no records.

    Args:
        measured: columns ``trace`` and ``squared_norm``, indexed by step.
        end: number of updates, such as those to a target.

    Returns:
        NaN if the estimate of the squared norm is not positive in some part.
    """
    edges = np.linspace(0, end, STAGES + 1)
    stages = [measured[(measured.index >= low) & (measured.index < high)] for low, high in pairwise(edges)]
    return float(np.mean([ratio_of_means(stage) for stage in stages if len(stage)]))


def noise_scale_to_bigram(records: Records, probe: str, where: str) -> pd.Series:
    """Noise scale of each run over its updates to the loss of a bigram model, sequences; indexed by run id.

    NaN if it never reached this loss, or if each update had a single micro-batch.
    """
    sums, ends = noise_sums(records), crossings(records)["steps"]
    runs = [name for name in sums.index.unique("id") if math.isfinite(ends.get(name, math.nan))]
    return pd.Series({name: mean_noise_scale(sums.loc[name], ends[name]) for name in runs}, dtype=float)


def exponent(batch_sizes: ArrayLike, learning_rates: ArrayLike) -> float:
    """Slope of log best learning rate over log batch size: 1 is the linear rule, 1/2 the square-root rule.

    Raises:
        ValueError: fewer than two batch sizes.
    """
    log_b, log_lr = np.log(np.asarray(batch_sizes, dtype=float)), np.log(np.asarray(learning_rates, dtype=float))
    if len(log_b) < 2:
        raise ValueError("an exponent takes two batch sizes")
    return float(np.polyfit(log_b, log_lr, 1)[0])
