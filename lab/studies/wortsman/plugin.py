"""What the study of Wortsman et al. trains with: a probe of the head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lab.core.axes import per_run_norm
from lab.probes.listener import probe


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
