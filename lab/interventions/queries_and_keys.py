"""Interventions on queries, keys and values: other norms than LayerNorm, and attention without positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from lab.core.axes import nonzero
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.interventions.embedding import Unrotated
from lab.interventions.norms import RMSNorm
from lab.model.config import ModelConfig
from lab.model.layers import LayerNorm, Scale
from lab.model.transformer import rotate

OTHER_ROTATIONS = ("split_qk_scaling", "late_qk_scaling", "learned_positions")
OTHER_QK_NORMS = ("qk_layernorm", "qk_layernorm_model")
EPS = 1e-12  # the smallest norm that divides, as in torch's ``normalize``


def unit(x_r: Tensor) -> Tensor:
    """Divide by the norm over the last axis; a zero vector stays zero."""
    return x_r / nonzero(x_r.norm(dim=-1, keepdim=True)).clamp_min(EPS)


@INTERVENTIONS.register("qk_rmsnorm")
@dataclass(frozen=True)
class QKRMSNorm(HookIntervention):
    """RMSNorm on queries and keys, per head, its gain shared by the heads (OLMo 2, Gemma 3, Qwen 3)."""

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"query": Act.NORMALIZE, "key": Act.NORMALIZE}
    excludes: ClassVar = OTHER_QK_NORMS

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return RMSNorm(runs, (point.size,))


@INTERVENTIONS.register("qk_l2norm")
@dataclass(frozen=True)
class QKL2Norm(HookIntervention):
    """Queries and keys of unit norm, one learned gain per channel for both, products times the root of head width.

    A product is at most the root of head width times the largest gain squared (nGPT, arXiv:2410.01131, eq. 15-16).
    """

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"rotation": Act.REPLACE}
    excludes: ClassVar = (*OTHER_ROTATIONS, *OTHER_QK_NORMS, "qk_rmsnorm", "pb_relax")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return UnitQueriesAndKeys(runs, config)


class UnitQueriesAndKeys(Scale):
    """Rotary positions of queries and keys of unit norm, both times the gain, the queries times sqrt(head width)."""

    def __init__(self, runs: int, config: ModelConfig) -> None:
        super().__init__(runs, (config.heads, 1, config.head_width), 1.0, stored=config.width**-0.5)

    def forward(self, q_tk: Tensor, k_sk: Tensor, scale: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q_tk, k_sk = (super(UnitQueriesAndKeys, self).forward(unit(rotate(z))) for z in (q_tk, k_sk))
        return q_tk * q_tk.shape[-1] ** 0.5, k_sk


@INTERVENTIONS.register("qkv_norm")
@dataclass(frozen=True)
class QKVNorm(HookIntervention):
    """LayerNorm on queries, keys and values in place of the norm before attention (arXiv:2410.16682, sec. 3)."""

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {
        **dict.fromkeys(("query", "key", "value"), Act.NORMALIZE),
        "norm": Act.REPLACE,
    }
    excludes: ClassVar = (
        *(*OTHER_QK_NORMS, "qk_rmsnorm", "qk_l2norm"),
        *("rmsnorm", "norm_without_gain", "dyt", "ln_scaling", "post_layernorm", "deepnorm", "reordered_norm"),
    )

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module | None:
        if point.kind != "norm":
            return LayerNorm(runs, point.size)
        return nn.Identity() if point.where.endswith(".attention") else None


@INTERVENTIONS.register("nope")
@dataclass(frozen=True)
class NoPositions(HookIntervention):
    """No rotary positions: attention tells the order of tokens by the causal mask alone (arXiv:2305.19466)."""

    hook_points: ClassVar = {"rotation": Act.REPLACE}
    excludes: ClassVar = (*OTHER_ROTATIONS, "qk_l2norm")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Unrotated()
