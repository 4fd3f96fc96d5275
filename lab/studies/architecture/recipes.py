"""Claims on recipes of OPT-175B and GLM-130B: decay, epsilon, the scale of the embedding, and curves that cross."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.judging.effects import Effects, Qualified, by_rate, exceeds, parts
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, Config
from lab.analysis.judging.verdicts import DECAY, ON, QK, STEPS, TENFOLD, claim
from lab.analysis.probe_values import embedding_share
from lab.records.store import Records
from lab.studies.architecture.architecture import DEEP, NORMFORMER
from lab.studies.spikes.claims import GLM, OPT, held_out
from lab.studies.wortsman.gradients import MLP, late_log

SCALED, SMALL, POSITIONS, TIED = (
    f"intervention.{name}" for name in ("embedding_scale", "embedding_init", "learned_positions", "tied_head")
)
# Weight decay times steps of OPT-175B with 0.01 and with 0.1, at the learning rate 3e-4 and over 143,000 steps.
WEAK, STRONG = 0.43, 4.3
# Epsilons of OPT-175B, 1e-8 and 1e-6, times 1e4, as for a loss times 1e-4.
SMALL_EPS, LARGE_EPS = 1e-4, 1e-2
# Learning rates of OPT-175B times 100, by which the best one here stands to that of GPT-3 (6e-5): 3e-4 and 1.2e-4.
LEFT_RATE, TAKEN_RATE = 3e-2, 1.2e-2
FIFTH, TWENTIETH = 0.2, 0.05


def _first_runs(*choices: tuple[float, float]) -> partial[list[ArmTables]]:
    """An arm for each weight decay times steps and epsilon."""

    def arms(choices: tuple[tuple[float, float], ...], group: ComparisonGroup) -> list[ArmTables]:
        conditions = [
            lambda curve, chosen=chosen: (
                math.isclose(curve[DECAY] * curve[STEPS], chosen[0], rel_tol=1e-3) and curve[EPSILON] == chosen[1]
            )
            for chosen in choices
        ]
        return group.arms(*conditions)

    return partial(arms, choices)


first_runs = partial(claim, frees=[DECAY, EPSILON], holds={QK: None}, sweep="decay_and_epsilon", source=OPT)
decayed = partial(
    first_runs, arms=_first_runs((WEAK, SMALL_EPS), (STRONG, SMALL_EPS)), cause=[DECAY], shown_in="loss_over_steps"
)


def _up_to_theirs(arm: ArmTables) -> list[float]:
    """The learning rates up to that of OPT-175B's first runs."""
    highest = arm.nearest(LEFT_RATE)
    return [lr for lr in arm.lrs if lr <= highest]


@decayed(
    "run 2",
    "at a fifth of the budget the loss is higher with weight decay 0.1 than with 0.01, at every rate up to theirs",
)
def more_decay_raises_the_loss_at_a_fifth(weak: ArmTables, strong: ArmTables) -> Effects:
    """Held-out loss with the stronger decay minus that with the weaker, at each learning rate up to theirs."""
    return by_rate(_up_to_theirs(weak), lambda lr: held_out(strong, lr, FIFTH) - held_out(weak, lr, FIFTH))


@decayed(
    "run 2",
    "with weight decay 0.1 the loss levels off early: from a fifth of the budget on it falls less than with 0.01",
)
def more_decay_makes_the_loss_level_off_early(weak: ArmTables, strong: ArmTables) -> Effects:
    """Fall of the held-out loss from a fifth of the budget to its end, with the weaker decay minus with the stronger.

    At each learning rate up to theirs.
    """

    def fall(arm: ArmTables) -> pd.DataFrame:
        return by_rate(_up_to_theirs(weak), lambda lr: held_out(arm, lr, FIFTH) - held_out(arm, lr, 1.0))

    return fall(weak) - fall(strong)


epsilon = partial(
    first_runs, arms=_first_runs((STRONG, SMALL_EPS), (STRONG, LARGE_EPS)), cause=[EPSILON], unit="decades"
)


def _between(small: ArmTables) -> Qualified:
    """A control: the gradient RMS of the first MLP layer lies above the small epsilon and below the large one."""
    gradient = late_log(small, "grad_rms", MLP)[small.nearest(1e-2)].iloc[:, -1]
    return exceeds(parts(small=gradient - math.log10(SMALL_EPS), large=math.log10(LARGE_EPS) - gradient), 0)


@epsilon(
    "run 3",
    "with gradients between them (epsilon 1e-2 and 1e-4 here), the larger epsilon raises the first unstable rate",
)
def a_larger_epsilon_raises_the_lost_rate(small: ArmTables, large: ArmTables) -> Effects:
    """Log10 of the first lost learning rate at the large epsilon minus that at the small one, largest size."""
    lost = large.table("log_lost") - small.table("log_lost")
    grain = (large.grain("log_lost") ** 2 + small.grain("log_lost") ** 2) ** 0.5
    return Qualified(lost.iloc[:, -1], grain.iloc[:, -1], _between(small))


@epsilon(
    "run 3",
    "a larger epsilon (1e-2 for 1e-4 here) is more than a lower rate: from the best to the first unstable one is wider",
)
def a_larger_epsilon_widens_the_range(small: ArmTables, large: ArmTables) -> Effects:
    """Decades from the best learning rate to the first lost one at the large epsilon minus those at the small one."""
    widths = [arm.table("log_lost") - arm.table("log_best") for arm in (small, large)]
    grains = [arm.grain(quantity) ** 2 for arm in (small, large) for quantity in ("log_lost", "log_best")]
    return Qualified((widths[1] - widths[0]).iloc[:, -1], (sum(grains) ** 0.5).iloc[:, -1], _between(small))


def log_share(records: Records, probe: str, where: str, start: float, end: float) -> pd.Series:
    """Log10 of ``embedding_share``, mean over the recorded steps in a range of shares of the run; by run id."""
    shares = embedding_share(records)
    progress = shares["step"] / (shares["id"].map(records.runs.set_index("id")["steps"]) - 1)
    chosen = shares[(progress >= start) & (progress <= end)]
    return pd.Series(np.log10(chosen["value"]).groupby(chosen["id"]).mean())


def _share(arm: ArmTables, start: float, end: float) -> pd.Series:
    """``log_share`` at the lowest learning rate, of the largest model."""
    return arm.probe(arm.lrs[0], "grad_rms", "embedding", log_share, start=start, end=end).iloc[:, -1]


embedding = partial(
    claim, frees=["intervention"], unit="decades", sweep="embedding_gradients", shown_in="embedding_gradient"
)


def _without_scaling(positions: str, positions_of: Config) -> None:
    """File that an embedding without scaling has a larger share of the gradient, beside positions of one kind."""
    filed = embedding(
        "run 12.00",
        "without scaling, at standard deviation 0.006, the embedding's gradient over that of all other weights begins "
        f"more than 10 times larger, beside {positions} positions",
        arms=[{SCALED: ON, **positions_of}, {SMALL: ON, **positions_of}],
        cause=[SCALED, SMALL],
        side=TENFOLD,
        source=OPT,
    )

    def effects(scaled: ArmTables, small: ArmTables) -> Effects:
        """Log10 of the ratio of ``embedding_share`` at the first step, without scaling over with it."""
        return _share(small, 0, 0) - _share(scaled, 0, 0)

    effects.__name__ = f"a_small_embedding_has_a_larger_share_beside_{positions}_positions"
    filed(effects)


_without_scaling("learned", {POSITIONS: ON})
_without_scaling("rotary", {POSITIONS: None})


@embedding(
    "sec. 3",
    "early in training the gradient of a tied embedding is more than 3 times that of a block, with DeepNorm or not",
    arms=[{TIED: ON, DEEP: None}, {TIED: ON, DEEP: ON}],
    cause=["step"],
    side=(math.log10(3), math.inf),
    source=GLM,
)
def the_embeddings_gradient_is_larger_early_in_training(*arms: ArmTables) -> Effects:
    """Log10 of the norm of the embedding's gradient over that of a block (root mean square over blocks).

    Geometric mean over the first fifth of the run, which is 200 steps of 1000. The control: it is larger than in the
    last tenth.
    """
    early, late = ([_share(arm, start, end) for arm in arms] for start, end in ((0, FIFTH), (0.9, 1)))
    falls = [first - last for first, last in zip(early, late, strict=True)]
    per_block = 0.5 * math.log10(float(arms[0].setting("model.depth")))
    return Qualified(pd.concat(early, axis=1) + per_block, control=exceeds(pd.concat(falls, axis=1), 0))


@partial(claim, frees=["intervention", "optimizer.beta2", "optimizer.clip", DECAY])(
    "run 12.00",
    "a known recipe begins higher and ends lower: run 12.00 against 11.0, each at its own learning rate",
    arms=[{NORMFORMER: ON, SCALED: ON}, {SMALL: ON}],
    cause=["intervention", "optimizer.lr"],
    sweep="recipe_arms",
    shown_in="loss_over_steps",
    source=OPT,
)
def a_known_recipe_begins_higher_and_ends_lower(left: ArmTables, taken: ArmTables) -> Effects:
    """Held-out loss of 12.00 minus that of 11.0 at a twentieth of the budget; final loss of 11.0 minus that of 12."""
    left_rate, taken_rate = left.nearest(LEFT_RATE), taken.nearest(TAKEN_RATE)
    higher = held_out(taken, taken_rate, TWENTIETH) - held_out(left, left_rate, TWENTIETH)
    return parts(early=higher, late=(left.loss(left_rate) - taken.loss(taken_rate)).iloc[:, -1])
