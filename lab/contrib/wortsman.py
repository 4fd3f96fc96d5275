"""What the study of Wortsman et al. trains with: a short text, transplanted kappas, and a probe of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from lab.core import schema
from lab.core.axes import nonzero, over, per_run_norm
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import DATA, INTERVENTIONS
from lab.core.schema import PerRun, PerRunSeed
from lab.data.corpus import HELD_OUT_TARGETS, Corpus, fingerprint
from lab.data.packing import PackedCorpus
from lab.data.synthetic import COUNTED_SEQ_LEN, open_synthetic
from lab.model.config import ModelConfig
from lab.probes.listener import probe

EPS = 1e-12  # added to a mean square; it bounds the gradient of vectors that are nearly zero


@DATA.register("synthetic_sample")
@dataclass(frozen=True)
class SyntheticSample:
    """The first ``tokens`` tokens of the synthetic language's held-out rows, on which runs are trained and validated.

    With ``seq_len = tokens - 1`` one window holds the whole text: every gradient is exact, and the validation loss is
    the mean over all that there is to predict.
    """

    tokens: int = schema.bounded(512, at_least=2, at_most=HELD_OUT_TARGETS)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Draw the text, once per process."""
        return _open_sample(self.tokens)


@cache
def _open_sample(size: int) -> Corpus:
    tokens = open_synthetic().held_out(COUNTED_SEQ_LEN).ravel()[:size].astype(np.uint8)
    return PackedCorpus(
        training=tokens, reserved=tokens, fingerprint=fingerprint(tokens), notes={"held_out": "the training text"}
    )


@INTERVENTIONS.register("kappa_transplant")
@dataclass(frozen=True)
class KappaTransplant(HookIntervention):
    """Scale every query and key to mean square kappa, and so their scores (Wortsman et al. 2023, fig. 10)."""

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"query": Act.TRANSPLANT, "key": Act.TRANSPLANT}
    kappa: PerRun = schema.bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return MeanSquare(self.kappa)


class MeanSquare(nn.Module):
    """``z -> sqrt(kappa) z / sqrt(mean z^2)`` over the last axis; a zero vector stays zero."""

    def __init__(self, kappa: Tensor | float) -> None:
        super().__init__()
        self.kappa = kappa

    def forward(self, z_r: Tensor) -> Tensor:
        square_r = nonzero(z_r.square().mean(-1, keepdim=True))
        return z_r * (over(self.kappa, z_r) / (square_r + EPS)).sqrt()


@probe(event="parameters")
def head_common_mode(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of the head's norm in its common mode, the mean over the vocabulary, which moves all logits alike.

    From 0 (the columns ``[d]`` of the head add up to zero) to 1 (all are equal), about 1/sqrt(vocabulary) at the start.
    A custom model has no head by this name.
    """
    if "head" not in weights:
        return {}
    head_rdv = weights["head"]
    common_rd = head_rdv.mean(-1) * head_rdv.shape[-1] ** 0.5
    return {"head": per_run_norm([common_rd]) / per_run_norm([head_rdv])}
