"""Effects of claims on batches that grow, at equal tokens and with the learning rate tuned for each ramp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables, CurveSummary, MissingRunsError
from lab.analysis.judging.quantities import best_of_largest
from lab.analysis.judging.verdicts import STEPS
from lab.analysis.probe_values import updates
from lab.analysis.text import spell
from lab.studies.batch_size.ramps import loss_at, over_tokens, predicted_saving, tokens_to
from lab.studies.batch_size.targets import STAGES, ratio_of_means, tune

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


def _best(arm: ArmTables) -> dict[str, str]:
    """The id of each seed's run with the lowest final loss.

    Raises:
        MissingRunsError: the learning rate with the lowest mean loss ends the grid, so that it may not be the best.
    """
    summaries = _largest(arm)
    if summaries:
        means = [np.mean([summary.runs[lr].loss for summary in summaries]) for lr in arm.lrs]
        _check_inside(arm, int(np.argmin(means)))
    return {summary.seed: min(summary.runs.values(), key=lambda run: run.loss).id for summary in summaries}


def _check_inside(arm: ArmTables, best: int) -> None:
    if best in (0, len(arm.lrs) - 1):
        end = "lowest" if best == 0 else "highest"
        raise MissingRunsError(
            f"batch={arm.setting(NAME)}: the best learning rate, {spell(arm.lrs[best])}, is the {end} tried"
        )


def _curves(arm: ArmTables) -> Curves:
    """Loss over tokens of each seed's best run.

    Raises:
        MissingRunsError: the learning rate is not tuned, or a run did not record its batch.
    """
    best = _best(arm)
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
    made = updates(arm.evidence.records.runs)
    return pd.Series({seed: made[name] for seed, name in _best(arm).items()}, dtype=float)


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
    """Loss of the second run minus that of the first, at the second's first record after ``tokens`` tokens.

    The first run is interpolated straight between records, which lies above a falling curve, so its lead is not too
    large.
    """
    after = second[second["tokens"] >= tokens]
    if after.empty:
        return math.nan
    return float(after["loss"].iloc[0]) - float(loss_at(first, after["tokens"].iloc[0]))


def doubling_saves_tokens_and_steps(palm: ArmTables, constant: ArmTables, quarter: ArmTables) -> Effects:
    """Share of tokens saved on the way to the constant batch's last loss; and share of the small batch's steps saved.

    A ramp that is never as low counts all tokens.
    """
    saved = _each_seed(partial(_saved, tokens=_tokens(constant)), _curves(palm), _curves(constant))
    return parts(tokens=saved, steps=1 - _updates(palm) / _updates(quarter))


def small_batches_lead_early_and_large_ones_late(quarter: ArmTables, constant: ArmTables) -> Effects:
    """Lead of the small batch, at equal tokens, where PaLM first doubled its batch; final lead of the large batch."""
    early = partial(_ahead, tokens=FIRST_DOUBLING * _tokens(constant))
    return parts(
        early=_each_seed(early, _curves(quarter), _curves(constant)),
        late=best_of_largest(quarter) - best_of_largest(constant),
    )


def leads_and_ends_level(ramp: ArmTables, constant: ArmTables, quarter: ArmTables) -> Effects:
    """Lead of the ramp over the constant batch when it ends; and final loss of the constant batch + 0.01 minus its own.

    Both are at equal tokens. The control: a batch that stays small ends above the ramp. Otherwise small batches would
    be better throughout, and growing would gain nothing.
    """
    end = partial(_ahead, tokens=float(ramp.setting("batch.ramp")) * float(ramp.setting("seq_len")))
    lead = _each_seed(end, _curves(ramp), _curves(constant))
    level = parts(lead=lead, final=MARGIN - (best_of_largest(ramp) - best_of_largest(constant)))
    return Qualified(level, control=exceeds(best_of_largest(quarter) - best_of_largest(ramp), 0.0))


def following_the_noise_saves_tokens(adaptive: ArmTables, *constants: ArmTables) -> Effects:
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
