"""What the study of Wortsman et al. trains with: a short text that one window holds, and a probe of the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import Tensor

from lab.core import schema
from lab.core.axes import per_run_norm
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.data.corpus import HELD_OUT_TARGETS, Corpus, fingerprint
from lab.data.packing import PackedCorpus
from lab.data.synthetic import COUNTED_SEQ_LEN, open_synthetic
from lab.probes.listener import probe


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
