"""Claims on settings that meet a loss spike: Adam's memory of squares, clipping, a shrunk embedding gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd

from lab.analysis.events.costs import NONE, spike_costs
from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from lab.analysis.judging.verdicts import OPTIMIZER, claim
from lab.core.detectors import LEAST_RISE
from lab.studies.spikes.claims import BURST, GLM, HALF, OPT, PALM, PEAK_STEP

BETA2, CLIP, SHRINK = "optimizer.beta2", "optimizer.clip", "intervention.embedding_gradient_shrink"
USUAL: Config = {OPTIMIZER: "adamw", BETA2: 0.95, CLIP: 1.0, SHRINK: None}
RAMP: Config = {OPTIMIZER: "adamw_beta2_ramp", BETA2: None}
Cost = Callable[[ArmTables], pd.Series]


def _crossed(*changes: Config) -> Callable[[ComparisonGroup], list[ArmTables]]:
    """An arm for each burst and each change of the recipe, bursts outermost."""

    def arms(group: ComparisonGroup) -> list[ArmTables]:
        bursts = [burst for burst in group.values(BURST) if burst != NONE]
        if not bursts:
            raise MissingRunsError("no run has a burst", arms_exist=False)
        return group.arms(*({**USUAL, **change, BURST: burst} for burst in bursts for change in changes))

    return arms


def met(figure: str, sentence: str, first: Config, second: Config, **others: object) -> Callable[..., object]:
    """As ``claim``, for two changes of the recipe, crossed with the bursts."""
    filed: Callable[..., Callable[..., object]] = partial(
        claim, frees=(BURST, OPTIMIZER, "optimizer", SHRINK), sweep="optimizer_arms", shown_in="spike_arms"
    )
    return filed(figure, sentence, arms=_crossed(first, second), **others)


def _of(column: str) -> Cost:
    """A cost per seed, of the largest model at the largest learning rate."""
    return lambda arm: arm.column(arm.top, spike_costs, column).iloc[:, -1]


_peak, _recovery = _of("peak"), _of("recovery")


def _pairs(arms: Sequence[ArmTables]) -> Mapping[str, tuple[ArmTables, ArmTables]]:
    """The two arms of each burst."""
    return {str(one.setting(BURST)): (one, other) for one, other in zip(arms[::2], arms[1::2], strict=True)}


def _less(value: Cost, arms: Sequence[ArmTables], grain: float) -> Qualified:
    """By how much a cost of the second arm is below that of the first, in each burst.

    The control: the first arm's held-out loss peaks more than 0.1 nats above the usual.
    """
    pairs = _pairs(arms)
    less = parts(**{burst: value(first) - value(second) for burst, (first, second) in pairs.items()})
    harm = parts(**{burst: _peak(first) for burst, (first, _) in pairs.items()})
    return Qualified(less, grain, control=exceeds(harm, LEAST_RISE))


@met(
    "runs 3 and 11.7",
    "a spike peaks lower with beta2 0.95 than with 0.98",
    {BETA2: 0.98},
    {},
    cause=[BETA2],
    source=OPT,
)
def a_shorter_memory_of_squares_lowers_the_peak(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss at beta2 0.98 minus that at 0.95."""
    return _less(_peak, arms, PEAK_STEP)


@met(
    "runs 11.2 to 12.16",
    "a spike peaks lower where gradients are clipped at 0.3 than where they are clipped at 2.5",
    {CLIP: 2.5},
    {CLIP: 0.3},
    cause=[CLIP],
    source=OPT,
)
def a_tight_clip_lowers_the_peak(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss, clipped at 2.5, minus that clipped at 0.3."""
    return _less(_peak, arms, PEAK_STEP)


@met(
    "runs 11.2 to 12.16",
    "a spike ends sooner where gradients are clipped at 0.3 than where they are clipped at 2.5",
    {CLIP: 2.5},
    {CLIP: 0.3},
    cause=[CLIP],
    unit="updates",
    source=OPT,
)
def a_tight_clip_ends_the_spike_sooner(*arms: ArmTables) -> Effects:
    """Updates until the held-out loss is back within 0.1 nats, clipped at 2.5, minus those clipped at 0.3."""
    return _less(_recovery, arms, 1.0)


@met(
    "sec. 5.1",
    "spikes come in spite of clipping at 1: more than half of the peak without clipping stays",
    {CLIP: math.inf},
    {},
    cause=[CLIP],
    side=(HALF, math.inf),
    unit="share of the peak",
    source=PALM,
)
def spikes_come_in_spite_of_clipping(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss, clipped at 1, over that without clipping.

    The control: clipping changes the peak, in either direction, by more than the 0.01 nats to which it is known.
    """
    pairs = _pairs(arms)
    stays = parts(**{burst: _peak(clipped) / _peak(free) for burst, (free, clipped) in pairs.items()})
    moved = parts(**{burst: (_peak(clipped) - _peak(free)).abs() for burst, (free, clipped) in pairs.items()})
    return Qualified(stays, control=exceeds(moved, PEAK_STEP))


@met(
    "sec. 5",
    "the memory of squares that serves rare tokens, beta2 = 1 - k^-0.8, raises the peak of a spike over that at 0.95",
    RAMP,
    {},
    cause=[OPTIMIZER],
    source=PALM,
)
def a_growing_memory_of_squares_raises_the_peak(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss with beta2 that grows with the steps minus that with beta2 0.95."""
    return _less(_peak, arms, PEAK_STEP)


@met(
    "sec. 3",
    "a tenth of the embedding's gradient lowers the peak of a spike",
    {},
    {SHRINK: "on"},
    cause=[SHRINK],
    source=GLM,
)
def a_shrunk_embedding_gradient_lowers_the_peak(*arms: ArmTables) -> Effects:
    """Peak excess of the held-out loss with the whole gradient minus that with a tenth of it."""
    return _less(_peak, arms, PEAK_STEP)
