"""Claims on architectures: where blocks normalize, LayerNorm on the embedding, biases, the activation."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds, mean
from lab.analysis.judging.evidence import LOST, ArmTables, Config, MissingRunsError
from lab.analysis.judging.verdicts import HALF_DECADE, ON, QK, claim
from lab.studies.wortsman.gradients import late_log

PALM, OPT, GLM = "PaLM-540B", "OPT-175B", "GLM-130B"
NORMFORMER, POST, DEEP, EMBEDDING, BIASES, RELU = (
    f"intervention.{name}"
    for name in ("normformer", "post_layernorm", "deepnorm", "embedding_layernorm", "biases", "relu")
)
PLAIN: Config = dict.fromkeys((NORMFORMER, POST, DEEP, EMBEDDING, BIASES, RELU))
# The tensors of each block whose gradients are compared over depth.
KINDS = ("mlp_up", "attention.key")
# Best losses this near to each other say that nothing has changed, nats/token.
LEAST_CHANGE = 0.002

architecture = partial(claim, frees=[*PLAIN], holds={QK: None}, sweep="architecture_arms")


def _arm(name: str = "") -> Config:
    """The plain architecture, or that with one intervention."""
    return {**PLAIN, **({name: ON} if name else {})}


@architecture(
    "sec. 2.1",
    "DeepNorm trains where plain post-LayerNorm is lost: at DeepNorm's best learning rate the other ends 0.3 higher",
    arms=[_arm(POST), _arm(DEEP)],
    cause=[POST, DEEP],
    side=(LOST, math.inf),
    source=GLM,
)
def deepnorm_trains_where_post_layernorm_is_lost(post: ArmTables, deep: ArmTables) -> Effects:
    """Final loss with plain post-LayerNorm minus that with DeepNorm, at the learning rate that is DeepNorm's best."""
    best = min(deep.lrs, key=lambda lr: float(deep.loss(lr).mean().iloc[-1]))
    return (post.loss(best) - deep.loss(best)).iloc[:, -1]


@architecture(
    "run 11.0",
    "NormFormer levels gradients over depth: late in training their largest ratio falls by more than 30 %",
    arms=[_arm(), _arm(NORMFORMER)],
    cause=[NORMFORMER],
    side=(-math.inf, math.log10(0.7)),
    unit="decades",
    shown_in="gradient_with_depth",
    source=OPT,
)
def normformer_levels_gradients(plain: ArmTables, normformer: ArmTables) -> Effects:
    """Log10 of the largest over the smallest late gradient RMS over blocks, with NormFormer minus without.

    The mean over the MLP's first layer and the key projection, at the learning rate nearest to 0.01.
    """
    return mean([_spread(normformer, kind) - _spread(plain, kind) for kind in KINDS])


def _spread(arm: ArmTables, kind: str) -> pd.Series:
    """Decades between the largest and the smallest late gradient RMS of one tensor over blocks."""
    blocks = [where for where in arm.locations("grad_rms") if where.endswith(f".{kind}")]
    if len(blocks) < 2:
        raise MissingRunsError(f"gradients of {kind} in fewer than two blocks")
    logs = pd.concat([late_log(arm, "grad_rms", block)[arm.nearest(1e-2)].iloc[:, -1] for block in blocks], axis=1)
    return logs.max(axis=1, skipna=False) - logs.min(axis=1, skipna=False)


@architecture(
    "run 11.10",
    "without fp16, ReLU and GELU lose learning rates within half a decade of each other",
    arms=[_arm(), _arm(RELU)],
    cause=[RELU],
    side=HALF_DECADE,
    unit="decades",
    source=OPT,
)
def relu_is_no_more_stable_than_gelu(gelu: ArmTables, relu: ArmTables) -> Effects:
    """Log10 of the first lost learning rate with ReLU minus that with GELU.

    The control: their best losses differ by more than 0.002.
    """
    grain = (relu.grain("log_lost") ** 2 + gelu.grain("log_lost") ** 2) ** 0.5
    changed = (relu.table("best") - gelu.table("best")).abs()
    return Qualified(relu.table("log_lost") - gelu.table("log_lost"), grain, exceeds(changed, LEAST_CHANGE))


@architecture(
    "sec. 2",
    "without biases training is more stable: the instability part of LR sensitivity is lower",
    arms=[_arm(BIASES), _arm()],
    cause=[BIASES],
    source=PALM,
)
def training_without_biases_is_more_stable(biases: ArmTables, plain: ArmTables) -> Effects:
    """Instability part with biases minus that without."""
    return biases.table("above") - plain.table("above")


@architecture(
    "sec. 3",
    "LayerNorm on the embedding makes training more stable: it lowers the instability part of LR sensitivity",
    arms=[_arm(), _arm(EMBEDDING)],
    cause=[EMBEDDING],
    source=GLM,
)
def embedding_layernorm_makes_training_more_stable(plain: ArmTables, normed: ArmTables) -> Effects:
    """Instability part without the LayerNorm minus that with it."""
    return plain.table("above") - normed.table("above")
