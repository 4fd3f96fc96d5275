"""Effects of claims on batch size: steps to a target, the best learning rate, and the noise scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts, slope
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, MissingRunsError
from lab.analysis.judging.quantities import best_of_largest, log10
from lab.analysis.judging.verdicts import BATCH, OPTIMIZER, STEPS
from lab.studies.batch_size.estimates import Numbers, steps_curve
from lab.studies.batch_size.targets import noise_scale_to_bigram, steps_to_bigram, tune
from lab.studies.batch_size.tuning import FEWEST_AT_A_BUDGET, budget_pairs

SGD, MOMENTUM, ADAM = "sgd", "momentum", "adamw"
# Fewest tuned batch sizes on which a law over batch sizes is judged.
FEWEST_BATCHES = 6
Table = pd.DataFrame | pd.Series
# Powers of the batch by which rules scale the learning rate.
RULES = {"linear": 1.0, "square_root": 0.5}


def each_batch_size(group: ComparisonGroup, *optimizers: str) -> list[ArmTables]:
    """One arm per optimizer and batch size, in rising order of batches."""
    sizes = group.values(BATCH)
    if len(sizes) < FEWEST_BATCHES:
        raise MissingRunsError(f"fewer than {FEWEST_BATCHES} batch sizes", arms_exist=False)
    return [arm for name in optimizers for arm in group.arms(*({OPTIMIZER: name, BATCH: size} for size in sizes))]


class Tuned(NamedTuple):
    """The tuned batch sizes of one optimizer: tables with a row per seed and a column per batch size.

    Attributes:
        steps: updates to the target with the best learning rate.
        lr: the best learning rate.
        noise_scale: computes the noise scale on the way to the target at this rate, sequences; NaN for batches of one
            micro-batch.
        cautions: a sentence on each batch size that is left out.
        by_lr: updates to the target with every learning rate, by batch size.
    """

    steps: pd.DataFrame
    lr: pd.DataFrame
    noise_scale: Callable[[], pd.DataFrame]
    cautions: tuple[str, ...]
    by_lr: dict[float, pd.DataFrame]

    def hyperbola(self, value: str) -> pd.Series:
        """An attribute of the ``SaturatingCurve`` fitted to each seed's steps."""
        whole = self.steps.dropna()
        fits = {seed: getattr(steps_curve(self.steps.columns, steps), value) for seed, steps in whole.iterrows()}
        return pd.Series(fits, dtype=float).reindex(self.steps.index)

    def spread(self) -> Qualified:
        """The control of laws over batch sizes: the smallest batch takes over four times the steps of the largest."""
        return exceeds(self.steps.iloc[:, 0] / self.steps.iloc[:, -1], 4)

    def exponents(self) -> pd.DataFrame:
        """Slope of log best learning rate over log batch of each seed.

        The column ``small`` is over batches up to half the critical one, ``large`` over those from twice it on; each
        over the three outermost batches at least.
        """
        sizes = np.array(self.lr.columns, dtype=float)
        critical = self.hyperbola("scale").dropna()
        middle = float(critical.median()) if len(critical) else math.inf
        small, large = max(3, int((sizes <= middle / 2).sum())), max(3, int((sizes >= 2 * middle).sum()))
        return parts(small=slope(log10(self.lr.iloc[:, :small])), large=slope(log10(self.lr.iloc[:, -large:])))

    def change_of_rate(self) -> pd.Series:
        """Log2 of the largest best learning rate over the smallest."""
        return (self.lr.max(axis=1, skipna=False) / self.lr.min(axis=1, skipna=False)).map(np.log2)


def _tuned(arms: Sequence[ArmTables]) -> dict[str, Tuned]:
    """The tuned batch sizes of each optimizer, by its name.

    Raises:
        MissingRunsError: too few batch sizes have a best learning rate inside the grid.
    """
    seeds = sorted(set.intersection(*({summary.seed for summary in arm.complete} for arm in arms)))
    names = dict.fromkeys(str(arm.setting(OPTIMIZER)) for arm in arms)
    return {
        name: _tuned_batches(name, [arm for arm in arms if arm.setting(OPTIMIZER) == name], seeds) for name in names
    }


def _tuned_batches(name: str, arms: Sequence[ArmTables], seeds: list[str]) -> Tuned:
    arm_at = {float(arm.setting(BATCH)): arm for arm in arms}
    by_lr = {size: _steps_by_lr(arm) for size, arm in arm_at.items()}
    rows = arms[0].seeds
    if not seeds:
        nothing = pd.DataFrame(math.nan, rows, list(by_lr))
        return Tuned(nothing, nothing, lambda: nothing, (), by_lr)
    tuned = {size: tune([float(lr) for lr in steps.columns], steps.loc[seeds]) for size, steps in by_lr.items()}
    refusals = [f"{name} at batch {size:g}: {batch.refusal}" for size, batch in tuned.items() if batch.refusal]
    if len(tuned) - len(refusals) < FEWEST_BATCHES:
        raise MissingRunsError(f"a law takes {FEWEST_BATCHES} tuned batch sizes; {refusals[0]}")
    kept = {size: batch for size, batch in tuned.items() if not batch.refusal}

    def noise_scale() -> pd.DataFrame:
        return pd.DataFrame({size: _noise(arm_at[size], batch.lr_s) for size, batch in kept.items()})

    steps, lr = (
        pd.DataFrame({size: pd.Series(batch[part], seeds) for size, batch in kept.items()}).reindex(rows)
        for part in (0, 1)
    )
    return Tuned(steps, lr, noise_scale, tuple(f"left out: {refusal}" for refusal in refusals), by_lr)


def _steps_by_lr(arm: ArmTables) -> pd.DataFrame:
    """Steps to the target, a row per seed and a column per learning rate."""
    return pd.DataFrame({lr: arm.probe(lr, "val_loss", "", steps_to_bigram).iloc[:, -1] for lr in arm.lrs})


def _noise(arm: ArmTables, lr_s: Numbers) -> pd.Series:
    """Noise scale of each seed on the way to the target, at the learning rate nearest to the best one."""
    middle = float(np.log(lr_s).mean())
    best = min(arm.lrs, key=lambda lr: abs(math.log(lr) - middle))
    return arm.probe(best, "noise_scale", "", noise_scale_to_bigram).iloc[:, -1]


def _qualified(tuned: Mapping[str, Tuned], table: Table, control: Qualified | None = None) -> Qualified:
    """Effects with a control, and with cautions about batch sizes that are left out."""
    return Qualified(table, control=control, caution="; ".join(each for one in tuned.values() for each in one.cautions))


def _largest_spread(tuned: Mapping[str, Tuned]) -> Qualified:
    return Qualified(parts(**{name: one.spread().table for name, one in tuned.items()}))


def steps_lie_on_a_hyperbola(*arms: ArmTables) -> Effects:
    """Root mean square distance of log steps from S_min (1 + B_crit / B), for each optimizer.

    The control: the smallest batch takes over four times the steps of the largest.
    """
    tuned = _tuned(arms)
    misfits = {name: one.hyperbola("rms_log_error") for name, one in tuned.items()}
    return _qualified(tuned, pd.DataFrame(misfits), _largest_spread(tuned))


def noise_scale_foretells_the_critical_batch(*arms: ArmTables) -> Effects:
    """Log10 of the noise scale (geometric mean over batches of several micro-batches) over B_crit, per optimizer.

    The control: the smallest batch takes over four times the steps of the largest.
    """
    tuned = _tuned(arms)
    ratios = {
        name: log10(one.noise_scale()).mean(axis=1) - np.log10(one.hyperbola("scale")) for name, one in tuned.items()
    }
    return _qualified(tuned, pd.DataFrame(ratios), _largest_spread(tuned))


def beyond_the_critical_batch_tokens_are_wasted(*arms: ArmTables) -> Effects:
    """Tokens to the target at 4 B_crit over those at B_crit, interpolated log-log between tuned batch sizes.

    The hyperbola predicts (1 + 4) / (1 + 1). The control: the smallest batch takes over four times the steps of the
    largest.
    """
    tuned = _tuned(arms)
    (one,) = tuned.values()
    critical = one.hyperbola("scale")
    sizes = np.log(np.array(one.steps.columns, dtype=float))
    ratios = {}
    for seed, steps in one.steps.iterrows():
        ends = np.log(float(critical[str(seed)])) + np.log([1.0, 4.0])
        tokens = np.interp(ends, sizes, np.log(steps.to_numpy(dtype=float)) + sizes)
        ratios[seed] = math.exp(tokens[1] - tokens[0])
    return _qualified(tuned, pd.Series(ratios), one.spread())


def three_regimes(*arms: ArmTables) -> Effects:
    """Slopes of log steps over log batch, for each optimizer, so that both claimed regimes lie above zero.

    The first is -0.9 minus the slope at the three smallest batches, the second the slope at the three largest plus 0.1.
    """
    tuned = _tuned(arms)
    ends = {}
    for name, one in tuned.items():
        steps = log10(one.steps)
        ends[f"{name} small"] = -0.9 - slope(steps.iloc[:, :3])
        ends[f"{name} large"] = slope(steps.iloc[:, -3:]) + 0.1
    return _qualified(tuned, parts(**ends))


def momentum_and_adam_use_larger_batches(*arms: ArmTables) -> Effects:
    """Log2 of B_crit over that of SGD; at B_crit, twice the batch still saves a quarter of the steps."""
    tuned = _tuned(arms)
    critical = {name: np.log2(one.hyperbola("scale")) for name, one in tuned.items()}
    return _qualified(tuned, parts(momentum=critical[MOMENTUM] - critical[SGD], adam=critical[ADAM] - critical[SGD]))


def best_rate_of_sgd_saturates(*arms: ArmTables) -> Effects:
    """A quarter minus the distance of the exponent from 1 up to B_crit / 2, and from 0 from 2 B_crit on."""
    tuned = _tuned(arms)
    exponents = tuned[SGD].exponents()
    return _qualified(tuned, parts(small=0.25 - (exponents["small"] - 1).abs(), large=0.25 - exponents["large"].abs()))


def best_rate_of_adam_rises_by_a_power(*arms: ArmTables) -> Effects:
    """Slope of log best learning rate over log batch up to B_crit / 2."""
    tuned = _tuned(arms)
    return _qualified(tuned, tuned[ADAM].exponents()["small"])


def no_rule_for_the_rate_holds(*arms: ArmTables) -> Effects:
    """Log2 of the factor by which each rule misses the best learning rate at some batch of some optimizer.

    It is the least such factor over all starting points of the rule. The control: with each optimizer the best learning
    rate changes by more than twofold.
    """
    tuned = _tuned(arms)
    misses = {}
    for rule, power in RULES.items():
        offsets = [np.log2(one.lr) - power * np.log2(np.array(one.lr.columns, dtype=float)) for one in tuned.values()]
        misses[rule] = pd.concat([(table.max(axis=1) - table.min(axis=1)) / 2 for table in offsets], axis=1).max(axis=1)
    return _qualified(tuned, parts(**misses), _changes_of_rate(tuned))


def scaled_rates_cost_steps(*arms: ArmTables) -> Effects:
    """Steps at the largest batch with the learning rate of the cheaper rule, over those with the best; per optimizer.

    If the rule's learning rate lies outside those that reached the target, the nearest of these counts, which makes the
    cost too low. The control: with each optimizer the best learning rate changes by more than twofold.
    """
    tuned = _tuned(arms)
    costs = {
        name: pd.concat([_cost(one, power) for power in RULES.values()], axis=1).min(axis=1, skipna=False)
        for name, one in tuned.items()
    }
    return _qualified(tuned, parts(**costs), _changes_of_rate(tuned))


def _changes_of_rate(tuned: Mapping[str, Tuned]) -> Qualified:
    return exceeds(parts(**{name: one.change_of_rate() for name, one in tuned.items()}), 1)


def _cost(tuned: Tuned, power: float) -> pd.Series:
    """Steps at the largest batch over the fewest, if a rule scales the learning rate of a 16 times smaller batch."""
    sizes = [float(size) for size in tuned.steps.columns]
    largest = sizes[-1]
    start = min(sizes, key=lambda size: abs(math.log(size * 16 / largest)))
    scaled = tuned.lr[start] * (largest / start) ** power
    costs = {}
    for seed, steps in tuned.by_lr[largest].iterrows():
        reached = steps.dropna()
        log_lrs, log_steps = (np.log(np.array(values, dtype=float)) for values in (reached.index, reached))
        nearest = np.interp(math.log(scaled[str(seed)]), log_lrs, log_steps) if len(reached) else math.nan
        costs[seed] = math.exp(nearest) / tuned.steps[largest][str(seed)]
    return pd.Series(costs)


def budgets(group: ComparisonGroup) -> list[ArmTables]:
    """Arms with equal numbers of examples, then arms with equal numbers of steps, each in rising order of batches.

    Raises:
        MissingRunsError: there are not three batch sizes or more of each.
    """
    at_examples, at_steps = budget_pairs({(curve[BATCH], curve[STEPS]) for curve in group.curves.values()})
    if min(len(at_examples), len(at_steps)) < FEWEST_AT_A_BUDGET:
        raise MissingRunsError("fewer than three batch sizes at equal examples and at equal steps", arms_exist=False)
    return group.arms(*({BATCH: size, STEPS: count} for size, count in [*at_examples, *at_steps]))


def _by_budget(arms: Sequence[ArmTables]) -> dict[str, list[ArmTables]]:
    """The arms of ``budgets`` by budget: the second one begins where batches no longer rise."""
    second = next(n for n in range(1, len(arms)) if arms[n].setting(BATCH) <= arms[n - 1].setting(BATCH))
    return {"equal_examples": list(arms[:second]), "equal_steps": list(arms[second:])}


def larger_batches_end_higher_at_equal_examples_only(*arms: ArmTables) -> Effects:
    """Best loss of the largest batch minus that of the smallest at equal examples, and the reverse at equal steps."""
    best = {name: list(map(best_of_largest, group)) for name, group in _by_budget(arms).items()}
    examples, steps = best["equal_examples"], best["equal_steps"]
    return parts(equal_examples=examples[-1] - examples[0], equal_steps=steps[0] - steps[-1])


def good_rates_narrow_at_equal_examples_only(*arms: ArmTables) -> Effects:
    """Slope over log10 batch of the width of the range of learning rates within 5 % of the best loss.

    At equal examples it is the negative of that. The width is in doublings and ends where the grid does; the loss is
    interpolated straight over log learning rate.
    """
    slopes = {
        name: slope(pd.concat({arm.setting(BATCH): _good_width(arm) for arm in group}, axis=1))
        for name, group in _by_budget(arms).items()
    }
    return parts(equal_examples=-slopes["equal_examples"], equal_steps=slopes["equal_steps"])


def _good_width(arm: ArmTables) -> pd.Series:
    """Width of the range of learning rates within 5 % of the best loss, doublings."""
    losses = pd.concat({lr: arm.loss(lr).iloc[:, -1] for lr in arm.lrs}, axis=1)
    fine = np.linspace(math.log2(arm.lrs[0]), math.log2(arm.lrs[-1]), 1001)
    widths = {}
    for seed, row in losses.iterrows():
        drawn = np.interp(fine, np.log2(arm.lrs), row.to_numpy(dtype=float))
        good = drawn <= 1.05 * drawn.min()
        widths[seed] = good.mean() * (fine[-1] - fine[0]) if np.isfinite(drawn).all() else math.nan
    return pd.Series(widths)
