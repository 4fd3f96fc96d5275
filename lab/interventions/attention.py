"""Interventions on attention: normalized queries and keys, transplanted kappa, pointwise weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from lab.core.axes import over
from lab.core.hooks import HookIntervention
from lab.core.registry import INTERVENTIONS
from lab.core.schema import PerRun, bounded
from lab.model.config import ModelConfig
from lab.model.layers import LayerNorm

EPS = 1e-12  # added to a mean square, so that a zero vector stays zero


@INTERVENTIONS.register("qk_layernorm")
@dataclass(frozen=True)
class QKLayerNorm(HookIntervention):
    """LayerNorm on queries and keys, per head, its gain shared by the heads (Wortsman et al. 2023, sec. 3.1.1)."""

    hook_points: ClassVar = ("query", "key")

    def attach(self, runs: int, config: ModelConfig) -> nn.Module:
        return LayerNorm(runs, config.head_width)


@INTERVENTIONS.register("qk_layernorm_model")
@dataclass(frozen=True)
class QKLayerNormModel(HookIntervention):
    """LayerNorm on queries and keys over the model width, all heads together (Wortsman et al. 2023, fig. E.8)."""

    hook_points: ClassVar = ("query", "key")
    excludes: ClassVar = ("qk_layernorm",)

    def attach(self, runs: int, config: ModelConfig) -> nn.Module:
        return AcrossHeads(LayerNorm(runs, config.width))


class AcrossHeads(nn.Module):
    """Applies a layer of ``[r b t d]`` to heads ``[r b h t k]``, joined and split again."""

    def __init__(self, layer: LayerNorm) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_rbhtk: Tensor) -> Tensor:
        x_rbtd: Tensor = self.layer(rearrange(x_rbhtk, "r b h t k -> r b t (h k)"))
        return rearrange(x_rbtd, "r b t (h k) -> r b h t k", h=x_rbhtk.shape[2])


@INTERVENTIONS.register("kappa_transplant")
@dataclass(frozen=True)
class KappaTransplant(HookIntervention):
    """Scale every query and key to mean square kappa, and so their scores (Wortsman et al. 2023, fig. 10)."""

    hook_points: ClassVar = ("query", "key")
    kappa: PerRun = bounded(above=0)

    def attach(self, runs: int, config: ModelConfig) -> nn.Module:
        return MeanSquare(self.kappa)


class MeanSquare(nn.Module):
    """``z -> sqrt(kappa) z / sqrt(mean z^2)`` over the last axis; a zero vector stays zero."""

    def __init__(self, kappa: Tensor | float) -> None:
        super().__init__()
        self.kappa = kappa

    def forward(self, z_r: Tensor) -> Tensor:
        return z_r * (over(self.kappa, z_r) / (z_r.square().mean(-1, keepdim=True) + EPS)).sqrt()


@INTERVENTIONS.register("pointwise_attention")
@dataclass(frozen=True)
class PointwiseAttention(HookIntervention):
    """Attention weights relu(score)^2 / sqrt(length) in place of softmax (Wortsman et al. 2023, fig. E.11)."""

    hook_points: ClassVar = ("weighing",)

    def attach(self, runs: int, config: ModelConfig) -> nn.Module:
        return SquaredReLU()


class SquaredReLU(nn.Module):
    """Scores ``[... t s]`` to weights relu(score)^2 / sqrt(length), causal: 0 at later keys."""

    def forward(self, scores_ts: Tensor) -> Tensor:
        past_ts = torch.ones(scores_ts.shape[-2:], dtype=torch.bool, device=scores_ts.device).tril()
        positive_ts = torch.where(past_ts, scores_ts, 0.0).relu()
        return positive_ts.square() / math.sqrt(scores_ts.shape[-1])
