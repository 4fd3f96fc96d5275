"""Effects of claims on architectures and on recipes of OPT-175B, PaLM and GLM-130B."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.probe_values import recorded
from lab.records.store import Records
from studies.claims.effects import Effects, Qualified, exceeds, late_log, mean, parts
from studies.claims.evidence import ArmTables, ComparisonGroup, Config, MissingRunsError
from studies.claims.quantities import by_rate, held_out
from studies.claims.verdicts import DECAY, ON, STEPS

INTERVENTIONS = ("normformer", "post_layernorm", "deepnorm", "embedding_layernorm", "biases", "relu")
# The tensors of each block whose gradients are compared over depth.
KINDS = ("mlp_up", "attention.key")


def one_intervention(group: ComparisonGroup, *names: str) -> list[ArmTables]:
    """Arms by name: the plain architecture, ``none``, or the same with one intervention."""
    keys = {other: f"intervention.{other}" for other in INTERVENTIONS}
    return group.arms(*({key: ON if other == name else None for other, key in keys.items()} for name in names))


def loss_difference_at_best_rate_of_second(post: ArmTables, deep: ArmTables) -> Effects:
    """Final loss with plain post-LayerNorm minus that with DeepNorm, at DeepNorm's best learning rate."""
    best = min(deep.lrs, key=lambda lr: float(deep.loss(lr).mean().iloc[-1]))
    return (post.loss(best) - deep.loss(best)).iloc[:, -1]


def log_ratio_of_gradient_spreads(plain: ArmTables, normformer: ArmTables) -> Effects:
    """Log10 of the ratio of the largest late gradient RMS of a block to the smallest, with NormFormer minus without.

    A mean over the MLP's first layer and the key projection, at the learning rate nearest to 0.01.
    """
    return mean([_spread(normformer, kind) - _spread(plain, kind) for kind in KINDS])


def _spread(arm: ArmTables, kind: str) -> pd.Series:
    """Decades between the largest and the smallest late gradient RMS of one tensor over blocks."""
    blocks = arm.locations("grad_rms", f".{kind}")
    if len(blocks) < 2:
        raise MissingRunsError(f"gradients of {kind} in fewer than two blocks")
    logs = pd.concat([late_log(arm, "grad_rms", block)[arm.nearest(1e-2)].iloc[:, -1] for block in blocks], axis=1)
    return logs.max(axis=1, skipna=False) - logs.min(axis=1, skipna=False)


# Epsilons of OPT-175B, 1e-8 and 1e-6, times 1e4; to Adam this is the same as a loss times 1e-4.
SMALL_EPS, LARGE_EPS = 1e-4, 1e-2
# Learning rates of OPT-175B, 3e-4 and 1.2e-4, times 100: the ratio of the best one here to GPT-3's (6e-5).
LEFT_RATE, TAKEN_RATE = 3e-2, 1.2e-2
FIFTH, TWENTIETH = 0.2, 0.05


def decay_and_epsilon(group: ComparisonGroup, *choices: Sequence[float]) -> list[ArmTables]:
    """An arm for each weight decay times steps, to a thousandth, and epsilon."""
    return group.arms(*(partial(_decays, decay_times_steps=decay, epsilon=epsilon) for decay, epsilon in choices))


def _decays(curve: Config, decay_times_steps: float, epsilon: float) -> bool:
    return math.isclose(curve[DECAY] * curve[STEPS], decay_times_steps, rel_tol=1e-3) and curve[EPSILON] == epsilon


def _up_to_theirs(arm: ArmTables) -> list[float]:
    """The learning rates up to the one of OPT-175B's first runs, scaled to the models here."""
    highest = arm.nearest(LEFT_RATE)
    return [lr for lr in arm.lrs if lr <= highest]


def loss_difference_at_a_fifth(weak: ArmTables, strong: ArmTables) -> Effects:
    """Held-out loss with the stronger decay minus that with the weaker, at each learning rate up to theirs."""
    return by_rate(_up_to_theirs(weak), lambda lr: held_out(strong, lr, FIFTH) - held_out(weak, lr, FIFTH))


def difference_in_fall_after_a_fifth(weak: ArmTables, strong: ArmTables) -> Effects:
    """Fall of the held-out loss from a fifth of the budget to its end, with the weaker decay minus the stronger one.

    At each learning rate up to theirs.
    """

    def fall(arm: ArmTables) -> pd.DataFrame:
        return by_rate(_up_to_theirs(weak), lambda lr: held_out(arm, lr, FIFTH) - held_out(arm, lr, 1.0))

    return fall(weak) - fall(strong)


def gradients_lie_between_the_epsilons(small: ArmTables, large: ArmTables) -> Effects:
    """Decades by which the gradient RMS of the first MLP layer lies above the small epsilon and below the large one."""
    gradient = late_log(small, "grad_rms", "block0.mlp_up")[small.nearest(1e-2)].iloc[:, -1]
    return parts(small=gradient - math.log10(SMALL_EPS), large=math.log10(LARGE_EPS) - gradient)


def difference_in_decades_to_costly_rate(small: ArmTables, large: ArmTables) -> Effects:
    """Decades from the best to the first costly learning rate, at the large epsilon minus those at the small one."""
    widths = [arm.table("log_lost") - arm.table("log_best") for arm in (small, large)]
    resolutions = [arm.resolution(quantity) ** 2 for arm in (small, large) for quantity in ("log_lost", "log_best")]
    return Qualified((widths[1] - widths[0]).iloc[:, -1], (sum(resolutions) ** 0.5).iloc[:, -1])


def embedding_share(records: Records) -> pd.DataFrame:
    """Norm of the embedding's gradient over the norm of all other gradients; columns ``id``, ``step``, ``value``.

    The gradient of a tied embedding comes from both its uses. NaN if either norm is, or if no other weight has one.
    """
    runs = records.runs.set_index("id")
    tables = 2 - runs["intervention"].str.contains("tied_head", regex=False).astype(int)
    entries = (runs["parameters"] - runs["parameters_without_embeddings"]) / tables
    squares = recorded(records, "grad_rms", "embedding")
    squares["value"] = squares["value"] ** 2 * squares["id"].map(entries).astype(float)
    whole = recorded(records, "grad_norm_clipped", "")
    both = squares.merge(whole, on=["id", "step"], suffixes=("", "_whole"))
    rest = both["value_whole"] ** 2 - both["value"]
    return both[["id", "step"]].assign(value=np.sqrt(both["value"] / rest.where(rest > 0)))


def log_share(records: Records, probe: str, where: str, start: float, end: float) -> pd.Series:
    """Log10 of ``embedding_share``, a mean over the recorded steps from one share of the run to another; by run id."""
    shares = embedding_share(records)
    steps = shares["id"].map(records.runs.set_index("id")["steps"]).astype(float)  # of no share, too
    progress = shares["step"] / (steps - 1)
    chosen = shares[(progress >= start) & (progress <= end)]
    return pd.Series(np.log10(chosen["value"]).groupby(chosen["id"]).mean())


def _share(arm: ArmTables, start: float, end: float) -> pd.Series:
    """``log_share`` at the lowest learning rate, of the largest model."""
    return arm.probe(arm.lrs[0], "grad_rms", "embedding", log_share, start=start, end=end).iloc[:, -1]


def share_at_the_first_step(scaled: ArmTables, small: ArmTables) -> Effects:
    """Log10 of ``embedding_share`` at the first step without a scaled embedding, minus that with one."""
    return _share(small, 0, 0) - _share(scaled, 0, 0)


def log_share_of_embedding_gradient_early(*arms: ArmTables) -> Effects:
    """Log10 of the gradient norm of the embedding over a block's (root mean square over blocks).

    A geometric mean over the first fifth of the run, which is 200 steps of 1000. The control: it is larger than in the
    last tenth.
    """
    early, late = ([_share(arm, start, end) for arm in arms] for start, end in ((0, FIFTH), (0.9, 1)))
    falls = [first - last for first, last in zip(early, late, strict=True)]
    per_block = 0.5 * math.log10(float(arms[0].setting("model.depth")))
    return Qualified(pd.concat(early, axis=1) + per_block, control=exceeds(pd.concat(falls, axis=1), 0))


def loss_differences_early_and_at_end(left: ArmTables, taken: ArmTables) -> Effects:
    """Held-out loss of run 12.00 minus 11.0's at a twentieth of the budget; final loss of 11.0 minus 12.00's.

    The control: at equal learning rates, either of the two, 12.00 ends below 11.0, so that the rate alone is not the
    cause.
    """
    left_rate, taken_rate = left.nearest(LEFT_RATE), taken.nearest(TAKEN_RATE)
    higher = held_out(taken, taken_rate, TWENTIETH) - held_out(left, left_rate, TWENTIETH)
    at_equal_rates = {
        f"at equal rates of {lr:g}": (left.loss(lr) - taken.loss(lr)).iloc[:, -1] for lr in (taken_rate, left_rate)
    }
    late = (left.loss(left_rate) - taken.loss(taken_rate)).iloc[:, -1]
    return Qualified(parts(early=higher, late=late), control=exceeds(parts(**at_equal_rates), 0.0))
