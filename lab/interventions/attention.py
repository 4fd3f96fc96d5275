"""Interventions on attention: norms of queries, keys and values, positions, and pointwise weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lab.core.axes import causal_mask, nonzero, over
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.schema import PerRun, bounded, one_of
from lab.interventions.embedding import Multiplied, Unrotated
from lab.interventions.norms import AcrossHeads, RMSNorm, WithoutGain
from lab.interventions.weights import Unattached
from lab.model.config import ModelConfig
from lab.model.layers import LayerNorm, Scale
from lab.model.transformer import CausalSoftmax, rotate

OTHER_ROTATIONS = ("split_qk_scaling", "late_qk_scaling", "learned_positions")
OTHER_QK_NORMS = ("qk_layernorm", "qk_layernorm_model")
QK_EPS = 1e-12  # the smallest norm that divides, as in torch's ``normalize``


def unit(x_r: Tensor) -> Tensor:
    """Divide by the norm over the last axis; a zero vector stays zero."""
    return x_r / nonzero(x_r.norm(dim=-1, keepdim=True)).clamp_min(QK_EPS)


@INTERVENTIONS.register("qk_rmsnorm")
@dataclass(frozen=True)
class QKRMSNorm(HookIntervention):
    """RMSNorm on queries and keys (OLMo 2, Gemma 3, Qwen 3).

    Attributes:
        over: each ``head``, its gain shared by the heads (Gemma 3, Qwen 3), or the ``width`` of all heads (OLMo 2).
        gain: ``learned``, or ``none`` (Llama 4).
    """

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"query": Act.NORMALIZE, "key": Act.NORMALIZE}
    excludes: ClassVar = OTHER_QK_NORMS
    over: str = one_of("head", "width", default="head")
    gain: str = one_of("learned", "none", default="learned")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        size = point.size if self.over == "head" else point.heads * point.size
        norm = RMSNorm(runs, (size,)) if self.gain == "learned" else WithoutGain(subtracts_mean=False)
        return norm if self.over == "head" else AcrossHeads(norm)


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
    """No rotary positions: attention tells the order of tokens by the causal mask alone (arXiv:2305.19466).

    Attributes:
        every: in blocks whose number, counted from 1, this divides (SmolLM3 and Llama 4: 4).
    """

    hook_points: ClassVar = {"rotation": Act.REPLACE}
    excludes: ClassVar = (*OTHER_ROTATIONS, "qk_l2norm")
    every: int = bounded(default=1, at_least=1)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module | None:
        return None if point.block % self.every else Unrotated()


@INTERVENTIONS.register("alibi")
@dataclass(frozen=True)
class ALiBi(HookIntervention):
    """No rotary positions; scores fall with the distance, in head h of n by 2^(-8h/n) a token (arXiv:2108.12409)."""

    hook_points: ClassVar = {"rotation": Act.REPLACE, "scores": Act.POSITIONS}
    excludes: ClassVar = (*OTHER_ROTATIONS, "qk_l2norm", "nope", "pb_relax", "ngpt")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Unrotated() if point.kind == "rotation" else LinearBias(config.heads)


class LinearBias(nn.Module):
    """Subtracts from the scores ``[r b h t s]`` a multiple of the distance t - s."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, scores_rbhts: Tensor) -> Tensor:
        dtype, device = scores_rbhts.dtype, scores_rbhts.device
        slope_h = torch.exp2(torch.arange(1, self.heads + 1, dtype=dtype, device=device) * (-8 / self.heads))
        position_t = torch.arange(scores_rbhts.shape[-1], dtype=dtype, device=device)
        return scores_rbhts - slope_h.view(-1, 1, 1) * (position_t[:, None] - position_t)


@INTERVENTIONS.register("grouped_query_attention")
@dataclass(frozen=True)
class GroupedQueryAttention(Unattached):
    """Fewer heads of keys and values than of queries (Ainslie et al. 2023, arXiv:2305.13245, sec. 2.2).

    Attributes:
        queries: heads of queries that share keys and values; where it does not divide their number, the next smaller
            number that does.  At 0 all of them share (multi-query attention; Shazeer 2019, arXiv:1911.02150).
    """

    queries: int = bounded(at_least=0)

    def key_value_heads(self, heads: int) -> int:
        most = min(self.queries or heads, heads)
        return heads // next(sharing for sharing in range(most, 0, -1) if heads % sharing == 0)


@INTERVENTIONS.register("qk_layernorm")
@dataclass(frozen=True)
class QKLayerNorm(HookIntervention):
    """LayerNorm on queries and keys, per head, its gain shared by the heads (Wortsman et al. 2023, sec. 3.1.1)."""

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"query": Act.NORMALIZE, "key": Act.NORMALIZE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return LayerNorm(runs, config.head_width)


@INTERVENTIONS.register("qk_layernorm_model")
@dataclass(frozen=True)
class QKLayerNormModel(HookIntervention):
    """LayerNorm on queries and keys over the model width, all heads together (Wortsman et al. 2023, fig. E.8)."""

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"query": Act.NORMALIZE, "key": Act.NORMALIZE}
    excludes: ClassVar = ("qk_layernorm",)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return AcrossHeads(LayerNorm(runs, point.heads * point.size))


@INTERVENTIONS.register("pointwise_attention")
@dataclass(frozen=True)
class PointwiseAttention(HookIntervention):
    """Attention weights relu(score)^2 / sqrt(length) in place of softmax (Wortsman et al. 2023, fig. E.11)."""

    hook_points: ClassVar = {"weighing": Act.REPLACE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return SquaredReLU()


class SquaredReLU(nn.Module):
    """Scores ``[... t s]`` to weights relu(score)^2 / sqrt(length), causal: 0 at later keys."""

    def forward(self, scores_ts: Tensor) -> Tensor:
        positive_ts = torch.where(causal_mask(scores_ts), scores_ts, 0.0).relu()
        return positive_ts.square() / math.sqrt(scores_ts.shape[-1])


@INTERVENTIONS.register("split_qk_scaling")
@dataclass(frozen=True)
class SplitQKScaling(HookIntervention):
    """Scale queries and keys each by the root of the attention scale (OPT-175B, run 11.10)."""

    hook_points: ClassVar = {"rotation": Act.REPLACE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return SplitScaling()


class SplitScaling(nn.Module):
    """Rotary positions of queries and keys, both times the root of the scale."""

    def forward(self, q_tk: Tensor, k_sk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return rotate(q_tk, scale**0.5), rotate(k_sk, scale**0.5)


@INTERVENTIONS.register("late_qk_scaling")
@dataclass(frozen=True)
class LateQKScaling(HookIntervention):
    """Scale the products of queries and keys by 1/sqrt(head width), not the queries (Vaswani et al. 2017, sec. 3.2.1).

    In exact arithmetic nothing changes; a product in half precision may overflow before it is scaled.
    """

    hook_points: ClassVar = {"rotation": Act.REPLACE, "scores": Act.SCALE}
    excludes: ClassVar = ("split_qk_scaling",)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        factor = config.head_width**-0.5
        return Multiplied(factor) if point.kind == "scores" else Rescaled(1 / factor)


class Rescaled(nn.Module):
    """Rotary positions of queries and keys, the queries times the scale times ``factor``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, q_tk: Tensor, k_sk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return rotate(q_tk, scale * self.factor), rotate(k_sk)


@INTERVENTIONS.register("pb_relax")
@dataclass(frozen=True)
class PBRelax(HookIntervention):
    """Take scores over ``alpha`` and softmax of alpha times their distance to the largest (CogView, sec. 2.3)."""

    hook_points: ClassVar = {"query": Act.REARRANGE, "weighing": Act.REPLACE}
    excludes: ClassVar = ("pointwise_attention",)
    alpha: PerRun = bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Divided(self.alpha) if point.kind == "query" else RelaxedSoftmax(self.alpha)


class Divided(nn.Module):
    """Divides by a number per run."""

    def __init__(self, divisor: Tensor | float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, x_r: Tensor) -> Tensor:
        return x_r / over(self.divisor, x_r)


class RelaxedSoftmax(nn.Module):
    """Scores ``[r ... t s]`` over alpha to attention weights."""

    def __init__(self, alpha: Tensor | float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, scores_rts: Tensor) -> Tensor:
        past_ts = causal_mask(scores_rts)
        largest_rt1 = torch.where(past_ts, scores_rts, -torch.inf).amax(-1, keepdim=True).detach()
        below_rts = torch.where(past_ts, scores_rts - largest_rt1, 0.0) * over(self.alpha, scores_rts)
        return CausalSoftmax.apply(below_rts)  # type: ignore
