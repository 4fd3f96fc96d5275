"""Measures of the crash test: from the runs of a card to a number per seed, and its interval from a pooled spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.crossings import crossing, failing
from lab.analysis.curves import idle_parameters
from lab.analysis.sensitivity import capped, vertex
from lab.analysis.spikes.trend import FEWEST_ROWS, PER_STEPS, loss_spikes
from lab.analysis.statistics import Difference, Interval, Spread, spread_within
from lab.analysis.stress.battery import LARGEST, Battery, StressTest
from lab.core.windows import Numbers
from lab.records.plans import Setting
from lab.records.store import Records

WITHIN = 0.1  # nats above the best loss, up to which a learning rate is tolerated
FAILS_ABOVE = 0.3  # nats above the best loss, from which a learning rate fails
# A run that went less than this share of the way from its initial loss to a bigram model's is stuck: what it learned is
# about how often each token occurs.
STUCK_BELOW = 0.85

SPREADS_MORE = 0.05  # p of an F test below which seeds spread more than those of the references

# The runs of a card: for each setting a table by seed, see ``outcomes``.
Outcomes = Mapping[Setting, pd.DataFrame]


class Measured(NamedTuple):
    """A measure of a recipe.

    Attributes:
        seeds: a value per seed; without those that have none.
        is_bound: whether the value is a lower bound, since the curve ends before the loss has risen.
        stuck: of how many stressed seeds training was stuck, or diverged.
        capped: of how many seeds the loss of a run counts as that at initialization.
        caveat: why a small number says nothing of what the recipe stands; empty where nothing speaks against it.
    """

    seeds: pd.Series[float]
    is_bound: bool = False
    stuck: int = 0
    capped: int = 0
    caveat: str = ""


def outcomes(records: Records, ids: Mapping[Setting, Sequence[str]]) -> dict[Setting, pd.DataFrame]:
    """The runs of each setting all of whose runs are recorded and did not fail, by seed; columns as ``by_run`` has."""
    wanted = {run for of_setting in ids.values() for run in of_setting}
    runs = by_run(records._replace(runs=records.runs[records.runs["id"].isin(wanted)]))
    tables = {}
    for setting, of_setting in ids.items():
        if runs.index.isin(of_setting).sum() == len(set(of_setting)):
            tables[setting] = runs.loc[list(of_setting)].set_index("seed").sort_index()
    return tables


def by_run(records: Records) -> pd.DataFrame:
    """The runs that did not fail, by id.

    Columns: ``seed``, ``loss`` (capped by the loss at initialization, which replaces NaN), ``loss_at_init``,
    ``loss_bigram``, ``loss_unigram``, ``parameters``,
    ``active`` (those that act on a token), ``log_rms`` (log10 of the root mean square
    after the last block, at the end), ``spikes`` of the training loss per 1,000 steps, if it was recorded at every
    step; and of experts, if their routers were measured, ``load_cv`` (variation of loads over the experts of a block,
    at the end) and ``router_logit`` (log10 of the largest). Of every probe there is also the largest value,
    ``largest.PROBE``.
    """
    runs = records.runs[records.runs["status"] != "failed"].set_index("id")
    metrics = records.metrics[records.metrics["id"].isin(runs.index)]
    losses = metrics[metrics["probe"] == "train_loss"].sort_values("step").groupby("id")["value"]
    largest = metrics.groupby(["id", "probe"], observed=True)["value"].max().unstack()
    table = runs.reindex(columns=["seed", "loss_at_init", "loss_bigram", "loss_unigram", "parameters"]).assign(
        loss=capped(runs.rename(columns={"final_val_loss": "loss"})),
        active=runs["parameters"] - idle_parameters(records.runs),
        log_rms=np.log10(_last_rms(metrics)),
        spikes=losses.agg(lambda loss_n: spike_rate(loss_n.to_numpy(dtype=float))),
        load_cv=_last_variation(metrics),
        router_logit=np.log10(largest.get("router_logit_max", pd.Series(dtype=float))),
    )
    return table.astype({"seed": int}).join(largest.add_prefix(LARGEST))


def _last_variation(metrics: pd.DataFrame) -> pd.Series:
    """Variation of the loads of a block's experts at the last recorded step, a mean over blocks; by run id."""
    loads = metrics[metrics["probe"] == "expert_load_cv"].sort_values("step", kind="stable")
    return loads.drop_duplicates(["id", "where"], keep="last").groupby("id")["value"].mean()


UNJUDGED = FEWEST_ROWS - 1  # the first rows of a run, in which only a large rise of the loss is seen


def spike_rate(loss_n: Numbers) -> float:
    """Loss spikes per ``PER_STEPS`` steps of a run.

    The detector needs ``UNJUDGED`` rows, 30, for a trend. So a small spike can be seen from step 30 on, counted from 0,
    and these steps alone are the exposure: 370 of the 400 of a run.
    """
    if len(loss_n) <= UNJUDGED:
        return math.nan
    spikes = sum(span.first >= UNJUDGED for span in loss_spikes(np.arange(len(loss_n)), loss_n))
    return spikes * PER_STEPS / (len(loss_n) - UNJUDGED)


def _last_rms(metrics: pd.DataFrame) -> pd.Series[float]:
    """By run the root mean square after the last block, when it was last measured."""
    rms = metrics[(metrics["probe"] == "block_rms") & metrics["where"].str.fullmatch(r"block\d+")]
    rms = rms.assign(block=rms["where"].str.removeprefix("block").astype(int)).sort_values(["step", "block"])
    return rms.groupby("id")["value"].last()


def curve(outcomes: Outcomes, words: tuple[str, ...] = ()) -> pd.DataFrame:
    """Losses of the recipe itself, or with these words: a row per learning rate, rising, and a column per seed.

    Seeds that only some learning rates have are left out.
    """
    by_lr = {setting.lr: table["loss"] for setting, table in outcomes.items() if setting.words == words}
    return pd.DataFrame({lr: by_lr[lr] for lr in sorted(by_lr)}).T.dropna(axis="columns")


def best_lr(losses: pd.DataFrame) -> float:
    """The learning rate of a curve with the lowest mean loss over seeds; NaN without one."""
    return float(losses.index[int(losses.mean(axis=1).argmin())]) if len(losses) else math.nan


def fitted_best_lrs(losses: pd.DataFrame) -> pd.Series[float]:
    """By seed the best learning rate of a curve between its own, the vertex of a parabola (``sensitivity.vertex``)."""
    lr = losses.index.to_numpy(dtype=float)
    return pd.Series({seed: vertex(lr, loss.to_numpy(dtype=float)) for seed, loss in losses.items()})


def beats_bigram(outcomes: Outcomes) -> bool:
    """Whether the recipe ends below the loss of a bigram model at any learning rate, in the mean over seeds."""
    table = next(table for setting, table in outcomes.items() if not setting.words)
    return bool(curve(outcomes).mean(axis=1).min() < table["loss_bigram"].mean())


def tolerances(
    losses: pd.DataFrame, best_losses: Mapping[int, float] | None = None
) -> dict[int, tuple[float, bool, bool]]:
    """By seed the decades of learning rate within ``WITHIN`` of a best loss, around that of the curve.

    Between two learning rates the loss is interpolated linearly in their logarithm.

    Args:
        losses: a row per learning rate, rising, and a column per seed.
        best_losses: by seed the loss that counts; the best one of the curve itself if None.

    Returns:
        By seed the decades, and whether the loss has risen by ``WITHIN`` at the lowest and the highest learning rate.
    """
    lrs = losses.index.to_numpy(dtype=float)
    at, found = np.log10(lrs), {}
    for seed, column in losses.items():
        loss = column.to_numpy(dtype=float)
        best = int(loss.argmin())
        limit = (loss[best] if best_losses is None else best_losses[int(str(seed))]) + WITHIN
        below, above = (crossing(lrs, loss, limit, start=lrs[best], below=is_below) for is_below in (True, False))
        decades = (at[best] - below.log_bound) + (above.log_bound - at[best])
        found[int(str(seed))] = (float(decades), below.times > 0, above.times > 0)
    return found


def failing_lrs(losses: pd.DataFrame) -> dict[int, float]:
    """By seed the learning rate above its best one from which the loss exceeds the best one by ``FAILS_ABOVE``.

    It is interpolated as in ``tolerances``, and NaN where the loss never does.
    """
    return {int(str(seed)): failing(losses.index, loss, FAILS_ABOVE).at for seed, loss in losses.items()}


def extension(test: StressTest, losses: pd.DataFrame, battery: Battery) -> list[float]:
    """Learning rates by which the curve must be extended for a test, a decade at an end.

    The tolerance needs a curve whose loss has risen at both ends. A test at a multiple of the best learning rate needs
    one that reaches from below each seed's best one to this multiple of it, a multiple farther if need be.
    """
    low, high = battery.farthest
    lrs = list(map(float, losses.index))
    steps = battery.curve[1] / battery.curve[0], battery.curve[-1] / battery.curve[-2]
    if test.stressed:
        high = max(high * test.stressed.times_best, high)
        best = fitted_best_lrs(losses)
        stressed = best * test.stressed.times_best
        is_closed_below = bool((best > lrs[0]).all() and (stressed >= lrs[0]).all())
        is_closed_above = bool((np.maximum(best, stressed) <= lrs[-1]).all())
    else:
        found = tolerances(losses).values()
        is_closed_below, is_closed_above = (all(seed[end] for seed in found) for end in (1, 2))
    more = list[float]()
    if not is_closed_below:
        more += [lrs[0] / 10, lrs[0] / 10 * steps[0]]
    if not is_closed_above:
        more += [lrs[-1] * 10 / steps[1], lrs[-1] * 10]
    return [lr for lr in (float(f"{lr:.6g}") for lr in more) if low <= lr <= high]


def wanted(battery: Battery, tests: Sequence[StressTest], done: Outcomes) -> list[Setting]:
    """The settings to train next: first the curve, then whatever depends on its best learning rate.

    Args:
        battery: the crash test.
        tests: the tests of the card.
        done: the runs that there are.
    """
    uses_curve = any(test.needs_best or not test.places for test in tests)
    start = [Setting((), lr) for lr in battery.curve] if uses_curve else []
    if missing := [setting for setting in start if setting not in done]:
        return missing
    losses = curve(done)
    best = best_lr(losses)
    settings = [place.setting(best) for test in tests if not test.reads_curve for place in test.places]
    settings += [Setting((), lr) for test in tests if test.reads_curve for lr in extension(test, losses, battery)]
    return [setting for setting in dict.fromkeys(settings) if setting not in done]


def measure(test: StressTest, done: Outcomes, battery: Battery) -> Measured | None:
    """The measure of a test; None as long as some of its runs are missing."""
    losses = curve(done)
    if (test.needs_best or test.reads_curve) and not len(losses):
        return None
    if test.reads_curve and any(Setting((), lr) not in done for lr in extension(test, losses, battery)):
        return None
    if test.is_on_curve:
        return _rise(test, losses, done)
    if not test.places:
        found = tolerances(losses)
        is_bound = any(not (below and above) for _, below, above in found.values())
        return Measured(pd.Series({seed: decades for seed, (decades, *_) in found.items()}), is_bound)
    best = best_lr(losses)
    tables = [done.get(place.setting(best)) for place in test.places]
    if any(table is None for table in tables):
        return None
    *references, stressed = (table for table in tables if table is not None)
    values = stressed[test.metric] - (references[0][test.metric] if references else 0.0)
    capped = int(np.logical_or.reduce([is_capped(table) for table in (*references, stressed)]).sum())
    caveat = caveat_of(references[0]) if references else ""
    return Measured(values.dropna(), False, int(is_stuck(stressed).sum()), capped * (test.metric == "loss"), caveat)


def _rise(test: StressTest, losses: pd.DataFrame, done: Outcomes) -> Measured:
    """The loss at a multiple of the best learning rate minus the lowest loss, both of a seed's own curve.

    The best learning rate is that of the seed, so its uncertainty is in the interval over seeds. Between two learning
    rates of the curve the loss is interpolated linearly in their logarithm.
    """
    assert test.stressed
    at, tables = np.log10(losses.index.to_numpy(dtype=float)), [done[Setting((), float(lr))] for lr in losses.index]
    lrs = (fitted_best_lrs(losses) * test.stressed.times_best).map(math.log10)

    def at_multiple(values: pd.DataFrame) -> pd.Series[float]:
        return pd.Series({seed: np.interp(lr, at, values[seed].astype(float)) for seed, lr in lrs.items()})

    # a run on either side of the multiple counts
    stuck, capped = (int((at_multiple(pd.DataFrame(map(told, tables))) > 0).sum()) for told in (is_stuck, is_capped))
    return Measured(at_multiple(losses) - losses.min(), False, stuck, capped)


def caveat_of(reference: pd.DataFrame) -> str:
    """Why a small difference from these runs says nothing: they learned too little to lose; empty where they did not.

    Runs that end no better than a bigram model lose little under any stress. So a test would credit an optimizer for
    being slow at the learning rate of its reference.
    """
    loss, bigram = float(reference["loss"].mean()), float(reference["loss_bigram"].mean())
    if loss < bigram:
        return ""
    return f"the runs that it is compared with end at {loss:.3f}, no better than a bigram model ({bigram:.3f})"


def is_capped(table: pd.DataFrame) -> pd.Series[bool]:
    """By seed whether a run counts with its loss at initialization, since it ended above it or diverged."""
    return table["loss"] >= table["loss_at_init"]


def is_stuck(table: pd.DataFrame) -> pd.Series[bool]:
    """By seed whether a run learned little more than how often each token occurs, or diverged."""
    way = table["loss_at_init"] - table["loss_bigram"]
    return table["loss_at_init"] - table["loss"] < STUCK_BELOW * way


def pooled_sd(groups: Sequence[np.ndarray], spread: Spread) -> Spread:
    """The standard deviation within groups of values, estimated from them and from reference records together.

    It assumes that all recipes have one spread, unless the values spread significantly more than the references do, by
    an F test at 5 %: these count alone. With no reference records they always do.
    """
    own = spread_within(groups)
    if own.squares and spread.freedom:
        ratio = (own.sd / spread.sd) ** 2 if spread.sd else math.inf
        if scipy.special.fdtrc(own.freedom, spread.freedom, ratio) < SPREADS_MORE:
            return own
    return own.combine(spread)


def pooled_interval(values: Sequence[float], spread: Spread, level: float = 0.95) -> Interval:
    """Student's interval of a mean whose spread is that of ``pooled_sd``; without references it takes two values."""
    known = np.array(values, dtype=float)
    return pooled_sd([known], spread).interval(known, level)


def of_difference(spread: Spread) -> Spread:
    """The spread of the difference of two recipes on one seed, as if they shared nothing of it.

    Recipes of the reference records share little: their differences spread about as much.
    """
    return spread._replace(sd=spread.sd * math.sqrt(2))


def pooled_difference(old: pd.Series, new: pd.Series, spread: Spread) -> Difference:
    """The mean of new values minus that of old ones, by seed: paired where both have the same seeds, else not.

    Args:
        old: a value per seed, indexed by seed.
        new: likewise.
        spread: of one of the values over seeds.

    Returns:
        The difference; its error is NaN where nothing tells the spread.
    """
    if set(old.index) == set(new.index):
        changes = (new - old).to_numpy(dtype=float)
        sd, freedom = pooled_sd([changes], of_difference(spread))
        mean, error = float(changes.mean()) if len(changes) else math.nan, sd / math.sqrt(max(len(changes), 1))
    else:
        groups = [side.to_numpy(dtype=float) for side in (old, new)]
        sd, freedom = pooled_sd(groups, spread)
        mean = float(new.mean() - old.mean())
        error = sd * math.sqrt(sum(1 / max(len(group), 1) for group in groups))
    return Difference(mean, error, freedom, mean / sd if sd > 0 else math.nan)
