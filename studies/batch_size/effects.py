"""Effects of claims on the batch size, the gradient noise scale, and batches that grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.probe_values import updates
from studies.batch_size.fits import steps_curve
from studies.batch_size.measures import (
    FEWEST_AT_A_BUDGET,
    budget_pairs,
    loss_at,
    noise_at,
    noise_scale_to_bigram,
    noise_traits,
    over_tokens,
    predicted_saving,
    tokens_to,
)
from studies.batch_size.tuning import (
    STAGES,
    TunedSteps,
    crossings,
    end_of_grid,
    ratio_of_means,
    tune,
    tuned_batches,
)
from studies.claims.curve_summaries import CurveSummary
from studies.claims.effects import Effects, Qualified, exceeds, over_rate, parts, slope
from studies.claims.evidence import ArmTables, ComparisonGroup, MissingRunsError
from studies.claims.quantities import best_of_largest, log10
from studies.claims.verdicts import BATCH, OPTIMIZER, STEPS

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


def _tuned(arms: Sequence[ArmTables]) -> dict[str, TunedSteps]:
    """The tuned batch sizes of each optimizer, by its name, over the seeds that all arms have.

    Raises:
        MissingRunsError: too few batch sizes have a best learning rate inside the grid.
    """
    seeds = sorted(set.intersection(*({summary.seed for summary in arm.complete} for arm in arms)))
    tuned = {}
    for name in dict.fromkeys(str(arm.setting(OPTIMIZER)) for arm in arms):
        by_lr = {
            float(arm.setting(BATCH)): pd.DataFrame(
                {lr: arm.column(lr, crossings, "steps").iloc[:, -1] for lr in arm.lrs}
            ).loc[seeds]
            for arm in arms
            if arm.setting(OPTIMIZER) == name
        }
        if not seeds:
            nothing = pd.DataFrame(math.nan, arms[0].seeds, list(by_lr))
            tuned[name] = TunedSteps(name, nothing, nothing, {}, by_lr)
            continue
        tuned[name] = tuned_batches(name, by_lr)
        if len(tuned[name].batches) < FEWEST_BATCHES:
            size, refusal = next(iter(tuned[name].refusals.items()))
            raise MissingRunsError(
                f"a law takes {FEWEST_BATCHES} tuned batch sizes; {name} at batch {size:g}: {refusal}"
            )
    return tuned


def _qualified(tuned: Mapping[str, TunedSteps], table: Table, control: Qualified | None = None) -> Qualified:
    """Effects with a control, and with cautions about batch sizes that are left out."""
    left_out = [(name, *refusal) for name, batches in tuned.items() for refusal in batches.refusals.items()]
    cautions = [f"left out: {name} at batch {size:g}: {refusal}" for name, size, refusal in left_out]
    return Qualified(table, control=control, caution="; ".join(cautions))


def _each_optimizer(tuned: Mapping[str, TunedSteps], value: Callable[[TunedSteps], pd.Series]) -> pd.DataFrame:
    return parts(**{name: value(batches) for name, batches in tuned.items()})


def _hyperbola(tuned: TunedSteps, value: str) -> pd.Series:
    """An attribute of the ``SaturatingCurve`` fitted to each seed's steps."""
    fits = {seed: getattr(steps_curve(tuned.batches, steps), value) for seed, steps in tuned.steps.dropna().iterrows()}
    return pd.Series(fits, dtype=float).reindex(tuned.steps.index)


def _critical_batch(tuned: TunedSteps) -> pd.Series:
    return _hyperbola(tuned, "scale")


def _spread(tuned: Mapping[str, TunedSteps]) -> Qualified:
    """The control of laws over batch sizes: the smallest batch takes over four times the steps of the largest."""
    return exceeds(_each_optimizer(tuned, lambda batches: batches.steps.iloc[:, 0] / batches.steps.iloc[:, -1]), 4)


def distance_from_hyperbola(*arms: ArmTables) -> Effects:
    """Root mean square distance of log steps from S_min (1 + B_crit / B), for each optimizer.

    The control: the smallest batch takes over four times the steps of the largest.
    """
    tuned = _tuned(arms)
    misfits = _each_optimizer(tuned, lambda batches: _hyperbola(batches, "rms_log_error"))
    return _qualified(tuned, misfits, _spread(tuned))


def log_noise_scale_over_critical_batch(*arms: ArmTables) -> Effects:
    """Log10 of the noise scale (geometric mean over batches of several micro-batches) over B_crit, per optimizer.

    The noise scale is that on the way to the target, at the learning rate nearest to the best one. The control: the
    smallest batch takes over four times the steps of the largest.
    """
    tuned = _tuned(arms)
    noise: dict[str, dict[float, pd.Series]] = {name: {} for name in tuned}
    for arm in arms:
        name, size = str(arm.setting(OPTIMIZER)), float(arm.setting(BATCH))
        if size in tuned[name].lr:
            middle = float(np.log(tuned[name].lr[size].dropna()).mean())
            nearest = min((abs(math.log(lr) - middle), lr) for lr in arm.lrs)[1]
            noise[name][size] = arm.probe(nearest, "noise_scale", "", noise_scale_to_bigram).iloc[:, -1]
    ratios = {
        name: log10(pd.DataFrame(noise[name])).mean(axis=1) - np.log10(_critical_batch(batches))
        for name, batches in tuned.items()
    }
    return _qualified(tuned, pd.DataFrame(ratios), _spread(tuned))


def tokens_at_four_critical_batches(*arms: ArmTables) -> Effects:
    """Tokens to the target at 4 B_crit over those at B_crit, interpolated log-log between tuned batch sizes.

    The hyperbola predicts (1 + 4) / (1 + 1). The control: the smallest batch takes over four times the steps of the
    largest.
    """
    tuned = _tuned(arms)
    (batches,) = tuned.values()
    critical, log_sizes, ratios = _critical_batch(batches), np.log(batches.batches), {}
    for seed, steps in batches.steps.iterrows():
        ends = np.log(float(critical[str(seed)])) + np.log([1.0, 4.0])
        tokens = np.interp(ends, log_sizes, np.log(steps.to_numpy(dtype=float)) + log_sizes)
        ratios[seed] = math.exp(tokens[1] - tokens[0])
    return _qualified(tuned, pd.Series(ratios), _spread(tuned))


def slopes_of_steps_in_both_regimes(*arms: ArmTables) -> Effects:
    """Slopes of log steps over log batch, for each optimizer, so that both claimed regimes lie above zero.

    The first is -0.9 minus the slope at the three smallest batches, the second the slope at the three largest plus 0.1.
    """
    tuned = _tuned(arms)
    ends = {}
    for name, batches in tuned.items():
        steps = log10(batches.steps)
        ends[f"{name} small"] = -0.9 - slope(steps.iloc[:, :3])
        ends[f"{name} large"] = slope(steps.iloc[:, -3:]) + 0.1
    return _qualified(tuned, parts(**ends))


def doublings_of_critical_batch_over_sgd(*arms: ArmTables) -> Effects:
    """Log2 of B_crit over SGD's; at B_crit, twice the batch still saves a quarter of the steps."""
    tuned = _tuned(arms)
    critical = np.log2(_each_optimizer(tuned, _critical_batch))
    return _qualified(tuned, parts(momentum=critical[MOMENTUM] - critical[SGD], adam=critical[ADAM] - critical[SGD]))


def _exponents(tuned: TunedSteps) -> pd.DataFrame:
    """Slope of log best learning rate over log batch of each seed.

    The column ``small`` is over batches up to half the critical one, ``large`` over those from twice it on; each over
    the three outermost batches at least.
    """
    critical = _critical_batch(tuned).dropna()
    middle = float(critical.median()) if len(critical) else math.inf
    small, large = (
        max(3, int(is_outer.sum())) for is_outer in (tuned.batches <= middle / 2, tuned.batches >= 2 * middle)
    )
    return parts(small=slope(log10(tuned.lr.iloc[:, :small])), large=slope(log10(tuned.lr.iloc[:, -large:])))


def distance_of_rate_exponents_of_sgd(*arms: ArmTables) -> Effects:
    """A quarter minus the distance of the exponent from 1 up to B_crit / 2, and from 0 from 2 B_crit on."""
    tuned = _tuned(arms)
    exponents = _exponents(tuned[SGD])
    return _qualified(tuned, parts(small=0.25 - (exponents["small"] - 1).abs(), large=0.25 - exponents["large"].abs()))


def exponent_of_best_rate_of_adam(*arms: ArmTables) -> Effects:
    """Slope of log best learning rate over log batch up to B_crit / 2."""
    tuned = _tuned(arms)
    return _qualified(tuned, _exponents(tuned[ADAM])["small"])


def _range(table: pd.DataFrame) -> pd.Series:
    return table.max(axis=1, skipna=False) - table.min(axis=1, skipna=False)


def _changes_of_rate(tuned: Mapping[str, TunedSteps]) -> Qualified:
    """The control of rules for the learning rate: with each optimizer the best one changes by more than twofold."""
    return exceeds(_each_optimizer(tuned, lambda batches: _range(batches.lr.map(math.log2))), 1)


def largest_miss_of_rate_rules(*arms: ArmTables) -> Effects:
    """Log2 of the factor by which each rule misses the best learning rate at some batch of some optimizer.

    It is the least such factor over all starting points of the rule. The control: with each optimizer the best learning
    rate changes by more than twofold.
    """
    tuned = _tuned(arms)
    misses = {}
    for rule, power in RULES.items():
        offsets = [batches.lr.map(math.log2) - power * np.log2(batches.batches) for batches in tuned.values()]
        misses[rule] = pd.concat([_range(table) / 2 for table in offsets], axis=1).max(axis=1)
    return _qualified(tuned, parts(**misses), _changes_of_rate(tuned))


def steps_with_scaled_rate_over_best(*arms: ArmTables) -> Effects:
    """Steps at the largest batch with the learning rate of the cheaper rule, over those with the best; per optimizer.

    If the rule's learning rate lies outside those that reached the target, the nearest of these counts, which makes the
    cost too low. The control: with each optimizer the best learning rate changes by more than twofold.
    """
    tuned = _tuned(arms)
    costs = {
        name: pd.concat([_cost(batches, power) for power in RULES.values()], axis=1).min(axis=1, skipna=False)
        for name, batches in tuned.items()
    }
    return _qualified(tuned, parts(**costs), _changes_of_rate(tuned))


def _cost(tuned: TunedSteps, power: float) -> pd.Series:
    """Steps at the largest batch over the fewest, if a rule scales the learning rate of a 16 times smaller batch."""
    largest = tuned.batches[-1]
    start = min(tuned.batches, key=lambda size: abs(math.log(size * 16 / largest)))
    log_scaled = np.log(tuned.lr[start] * (largest / start) ** power)
    costs = {}
    for seed, steps in tuned.by_lr[largest].iterrows():
        reached = np.log(steps.dropna())
        at_scaled = np.interp(log_scaled[str(seed)], np.log(reached.index), reached) if len(reached) else math.nan
        costs[seed] = math.exp(at_scaled)
    return pd.Series(costs).div(tuned.steps[largest])


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


def loss_of_largest_batch_at_both_budgets(*arms: ArmTables) -> Effects:
    """Best loss of the largest batch minus the smallest's at equal examples, and the reverse at equal steps."""
    best = {name: list(map(best_of_largest, group)) for name, group in _by_budget(arms).items()}
    examples, steps = best["equal_examples"], best["equal_steps"]
    return parts(equal_examples=examples[-1] - examples[0], equal_steps=steps[0] - steps[-1])


def slope_of_width_of_good_rates(*arms: ArmTables) -> Effects:
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


# Points in the range of losses that all sizes pass through, at which their noise scales are compared.
PARTS_OF_THE_RANGE = (0.25, 0.5, 0.75)


def _best_arm(arm: ArmTables) -> float:
    """The learning rate with the lowest final loss, mean over seeds and sizes."""
    return min(arm.lrs, key=lambda lr: float(pd.Series(arm.loss(lr).to_numpy().ravel()).mean()))


def growth_of_noise_scale(arm: ArmTables) -> Effects:
    """Two parts at each size, which lie above zero if the noise scale grows at least threefold as the loss falls.

    The first is -0.8 minus the rank correlation of loss and noise scale over tenths of training. The second is log10 of
    a third of the noise scale in the last tenth over that in the first.
    """
    rank, growth = (arm.column(_best_arm(arm), noise_traits, column) for column in ("rank", "growth"))
    return pd.concat([-0.8 - rank, growth - math.log10(3)], axis=1, keys=["rank", "growth"])


def ratio_of_noise_scales_over_size(arm: ArmTables) -> Effects:
    """Largest over smallest noise scale of the sizes, at three losses that all pass through, at the best learning rate.

    The control: the final losses of the smallest and the largest size differ by more than 0.05.
    """
    if len(arm.sizes) < 2:
        raise MissingRunsError("models of one size only")
    best = _best_arm(arm)
    first, last = (arm.column(best, noise_traits, loss).to_numpy() for loss in ("first_loss", "last_loss"))
    losses = arm.loss(best)
    low, high = float(np.fmax.reduce(last, axis=None)), float(np.fmin.reduce(first, axis=None))
    ratios = {}
    for part in PARTS_OF_THE_RANGE:
        at_loss = arm.probe(best, "noise_scale", "", noise_at, loss=high + part * (low - high))
        ratios[part] = at_loss.max(axis=1, skipna=False) / at_loss.min(axis=1, skipna=False)
    return Qualified(pd.DataFrame(ratios), control=exceeds((losses.iloc[:, 0] - losses.iloc[:, -1]).abs(), 0.05))


def fall_of_noise_scale_with_rate(arm: ArmTables) -> Effects:
    """Minus the slope over log learning rate of the log noise scale in the second half of training, at each size."""
    return -over_rate({lr: arm.column(lr, noise_traits, "late") for lr in arm.lrs})


def slope_of_late_noise_scale_over_size(arm: ArmTables) -> Effects:
    """Slope over log10 size of log10 of the noise scale in the second half of training, at the best learning rate."""
    return slope(arm.column(_best_arm(arm), noise_traits, "late"))


NAME = "batch.name"
# Share of the tokens after which PaLM first doubled its batch.
FIRST_DOUBLING = 5 / 74
# Nats per token within which two final losses count as equal.
MARGIN = 0.01
# Resolution of shares of tokens, which are interpolated between recorded steps.
SHARE_STEP = 0.01

Curves = Mapping[str, pd.DataFrame]  # by seed, a run of ``over_tokens``


def _largest(arm: ArmTables) -> list[CurveSummary]:
    """The summaries of the largest model for seeds with every learning rate."""
    return [summary for summary in arm.complete if summary.size == arm.sizes[-1]]


def _best_ramp(arm: ArmTables) -> dict[str, str]:
    """The id of each seed's run with the lowest final loss.

    Raises:
        MissingRunsError: the learning rate with the lowest mean loss ends the grid, so that it may not be the best.
    """
    summaries = _largest(arm)
    if summaries:
        means = [np.mean([summary.runs[lr].loss for summary in summaries]) for lr in arm.lrs]
        if refusal := end_of_grid(arm.lrs, int(np.argmin(means))):
            raise MissingRunsError(f"batch={arm.setting(NAME)}: {refusal}")
    return {summary.seed: min(summary.runs.values(), key=lambda run: run.loss).id for summary in summaries}


def _curves(arm: ArmTables) -> Curves:
    """Loss over tokens of each seed's best run.

    Raises:
        MissingRunsError: the learning rate is not tuned, or a run did not record its batch.
    """
    best = _best_ramp(arm)
    runs = _recorded(arm, best.values())
    return {seed: runs[name] for seed, name in best.items()}


def _recorded(arm: ArmTables, ids: Iterable[str]) -> Curves:
    """``over_tokens`` of these runs, by run id."""
    records = arm.evidence.records
    runs = over_tokens(records.of(list(ids)))
    if missing := [name for name in ids if name not in runs]:
        raise MissingRunsError(f"run {missing[0]} did not record batch and val_loss")
    return runs


def _each_seed(effect: Callable[..., float], *arms: Curves) -> pd.Series:
    """An effect of the runs of each seed that all arms have."""
    seeds = sorted(set.intersection(*(set(arm) for arm in arms)))
    return pd.Series({seed: effect(*(arm[seed] for arm in arms)) for seed in seeds}, dtype=float)


def _updates(arm: ArmTables) -> pd.Series:
    """Updates of each seed's best run."""
    by_run = updates(arm.evidence.records.runs)
    return pd.Series({seed: by_run[name] for seed, name in _best_ramp(arm).items()}, dtype=float)


def _tokens(constant: ArmTables) -> float:
    """Tokens of a run with a constant batch."""
    return math.prod(float(constant.setting(key)) for key in (STEPS, "batch_size", "seq_len"))


def _saved(ramp: pd.DataFrame, constant: pd.DataFrame, tokens: float) -> float:
    """Share of tokens that the ramp saves until it is as low as the constant batch's last recorded loss.

    Tokens of both are counted until they first reach it; a ramp that never does counts all ``tokens``.
    """
    target = float(constant["loss"].iloc[-1])
    needed = tokens_to(ramp, target)
    return 1 - (tokens if math.isnan(needed) else needed) / tokens_to(constant, target)


def _ahead(first: pd.DataFrame, second: pd.DataFrame, tokens: float) -> float:
    """Loss of the second run minus the first's, at the second's first record after ``tokens`` tokens.

    The first run is interpolated straight between records, which lies above a falling curve, so its lead is not too
    large.
    """
    after = second[second["tokens"] >= tokens]
    if after.empty:
        return math.nan
    return float(after["loss"].iloc[0]) - float(loss_at(first, after["tokens"].iloc[0]))


def tokens_and_steps_saved_by_ramp(palm: ArmTables, constant: ArmTables, quarter: ArmTables) -> Effects:
    """Share of tokens saved on the way to the constant batch's last loss; and share of the small batch's steps saved.

    A ramp that is never as low counts all tokens.
    """
    saved = _each_seed(partial(_saved, tokens=_tokens(constant)), _curves(palm), _curves(constant))
    return parts(tokens=saved, steps=1 - _updates(palm) / _updates(quarter))


def leads_of_small_early_and_large_late(quarter: ArmTables, constant: ArmTables) -> Effects:
    """Lead of the small batch, at equal tokens, where PaLM first doubled its batch; final lead of the large batch."""
    early = partial(_ahead, tokens=FIRST_DOUBLING * _tokens(constant))
    return parts(
        early=_each_seed(early, _curves(quarter), _curves(constant)),
        late=best_of_largest(quarter) - best_of_largest(constant),
    )


def lead_and_closeness_at_end(ramp: ArmTables, constant: ArmTables, quarter: ArmTables) -> Effects:
    """Lead of the ramp over the constant batch when it ends; and final loss of the constant batch + 0.01 minus its own.

    Both are at equal tokens. The control: a batch that stays small ends above the ramp. Otherwise small batches would
    be better throughout, and growing would gain nothing.
    """
    end = partial(_ahead, tokens=float(ramp.setting("batch.ramp")) * float(ramp.setting("seq_len")))
    lead = _each_seed(end, _curves(ramp), _curves(constant))
    level = parts(lead=lead, final=MARGIN - (best_of_largest(ramp) - best_of_largest(constant)))
    return Qualified(level, control=exceeds(best_of_largest(quarter) - best_of_largest(ramp), 0.0))


def tokens_saved_by_adaptive_batch(adaptive: ArmTables, *constants: ArmTables) -> Effects:
    """Share of tokens to the bigram model's loss that is saved, minus half the share by ``predicted_saving``.

    It is the saving over a constant batch of the same mean, whose tokens are interpolated log-log between the two that
    were trained. The control: the predicted saving.
    """
    ways = _ways_to_bigram(adaptive)
    others = [_ways_to_bigram(constant) for constant in constants]
    predicted = _each_seed(_predicted, ways)
    effect = _each_seed(_saved_over_constants, ways, *others) - predicted / 2
    return Qualified(effect, SHARE_STEP, control=exceeds(predicted, 0))


def _ways_to_bigram(arm: ArmTables) -> Curves:
    """For each seed, the run that reached the bigram model's loss in the fewest tokens, up to that loss.

    Raises:
        MissingRunsError: the learning rate is not tuned.
    """
    summaries = _largest(arm)
    if not summaries:
        return {}
    runs = _recorded(arm, [run.id for summary in summaries for run in summary.runs.values()])
    bigram = arm.evidence.records.runs.set_index("id")["loss_bigram"]
    needed = [
        [tokens_to(runs[summary.runs[lr].id], float(bigram[summary.runs[lr].id])) for lr in arm.lrs]
        for summary in summaries
    ]
    if refusal := tune(arm.lrs, needed).refusal:
        raise MissingRunsError(f"batch={arm.setting(NAME)}: {refusal}")
    ways = {}
    for summary, tokens in zip(summaries, needed, strict=True):
        fewest = int(np.nanargmin(tokens))
        run = runs[summary.runs[arm.lrs[fewest]].id]
        ways[summary.seed] = run[run["tokens"] < tokens[fewest]].assign(needed=tokens[fewest])
    return ways


def _saved_over_constants(adaptive: pd.DataFrame, *constants: pd.DataFrame) -> float:
    ordered = sorted(constants, key=lambda run: float(run["sequences"].mean()))
    batches, tokens = (np.log([float(run[name].mean()) for run in ordered]) for name in ("sequences", "needed"))
    constant = math.exp(np.interp(math.log(adaptive["sequences"].mean()), batches, tokens))
    return 1 - float(adaptive["needed"].iloc[0]) / constant


def _predicted(way: pd.DataFrame) -> float:
    """Saving predicted by the noise scale, a ratio of means in each of several equal parts of the way."""
    stages = [stage for stage in np.array_split(np.arange(len(way)), STAGES) if len(stage)]
    noise = [ratio_of_means(way[["trace", "squared_norm"]].iloc[stage]) for stage in stages]
    return predicted_saving(noise, [float(way["sequences"].iloc[stage].mean()) for stage in stages])
