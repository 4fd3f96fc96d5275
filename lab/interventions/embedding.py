"""Interventions on the embedding: its gradient, scale, norm and initial values, learned positions, and a tied head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lab.core.axes import over
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.roles import Role
from lab.core.schema import PerRun, bounded, one_of
from lab.model.config import ModelConfig
from lab.model.layers import Layer, LayerNorm, Operands, product


@INTERVENTIONS.register("embedding_gradient_shrink")
@dataclass(frozen=True)
class EmbeddingGradientShrink(HookIntervention):
    """Multiply the gradient that reaches the embedding by ``alpha`` (CogView; GLM-130B, sec. 2.2).

    A tied head adds its own gradient in full.  The link ``shrink_embedding`` changes the factor over the steps.
    """

    hook_points: ClassVar = {"embedding": Act.LAYER}
    alpha: PerRun = bounded(at_least=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return ShrunkGradient(self.alpha)


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number per run."""

    @staticmethod
    def forward(ctx: Any, x_r: Tensor, factor_r: Tensor) -> Tensor:
        ctx.save_for_backward(factor_r)
        return x_r.view_as(x_r)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor_r,) = ctx.saved_tensors
        return gradients[0] * over(factor_r, gradients[0]), None


class ShrunkGradient(nn.Module):
    """Hands a tensor on as it is, and ``factor`` times its gradient back."""

    def __init__(self, factor: Tensor | float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_rbtd: Tensor) -> Tensor:
        factor = self.factor if isinstance(self.factor, Tensor) else x_rbtd.new_tensor(self.factor)
        return ScaleGradient.apply(x_rbtd, factor.expand(len(x_rbtd)))  # type: ignore


@INTERVENTIONS.register("embedding_layernorm")
@dataclass(frozen=True)
class EmbeddingLayerNorm(HookIntervention):
    """LayerNorm on the embedded tokens (BLOOM; Dettmers et al. 2021, sec. 2.3)."""

    hook_points: ClassVar = {"embedding": Act.NORMALIZE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return LayerNorm(runs, config.width)


@INTERVENTIONS.register("embedding_scale")
@dataclass(frozen=True)
class EmbeddingScale(HookIntervention):
    """Multiply the embedded tokens by the root of the width (Vaswani et al. 2017, sec. 3.4; OPT-175B, run 11)."""

    hook_points: ClassVar = {"embedding": Act.SCALE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Multiplied(math.sqrt(config.width))


class Multiplied(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_r: Tensor) -> Tensor:
        return x_r * self.factor


@INTERVENTIONS.register("embedding_init")
@dataclass(frozen=True)
class EmbeddingInit(HookIntervention):
    """Draw the embedding with standard deviation ``std``: 0.006 as OPT-175B, 1 as PaLM."""

    hook_points: ClassVar = {"embedding": Act.LAYER}
    std: float = bounded(at_least=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return nn.Identity()

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return self.std if weight == "embedding" else std


@INTERVENTIONS.register("learned_positions")
@dataclass(frozen=True)
class LearnedPositions(HookIntervention):
    """Add a learned vector per position to the tokens, in place of rotary positions (OPT-175B, runs 11 and 12).

    The table begins as sines and cosines of RMS sqrt(1/2) (``init: sinusoidal``; Vaswani et al. 2017, sec. 3.5) or
    with standard deviation ``std`` (``init: gaussian``).  It has ``positions`` rows, at least as many as a window.
    """

    hook_points: ClassVar = {"embedding": Act.POSITIONS, "rotation": Act.REPLACE}
    excludes: ClassVar = ("split_qk_scaling", "late_qk_scaling")
    init: str = one_of("gaussian", "sinusoidal")
    std: float = bounded(at_least=0)
    positions: int = bounded(above=0)

    @property
    def most_positions(self) -> int:
        return self.positions

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        if point.kind == "rotation":
            return Unrotated()
        return Positions(runs, self.positions, config.width, is_sinusoidal=self.init == "sinusoidal")

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return self.std if weight == "embedding.learned_positions" else std


class Positions(Layer):
    """Adds to ``[r b t d]`` a vector per position."""

    def __init__(self, runs: int, positions: int, width: int, *, is_sinusoidal: bool) -> None:
        super().__init__(runs, (positions, width), Role.EMBEDDING, fan_in=width)
        self.is_sinusoidal = is_sinusoidal

    def forward(self, x_rbtd: Tensor) -> Tensor:
        return x_rbtd + self.weight[:, None, : x_rbtd.shape[2]]

    def fixed_value(self) -> Tensor | None:
        return sinusoids(*self.weight.shape[1:]) if self.is_sinusoidal else None


def sinusoids(positions: int, width: int) -> Tensor:
    """Sines and cosines ``[t d]`` of the positions, of wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    frequency_d = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle_td = torch.outer(torch.arange(positions, dtype=torch.float64), frequency_d)
    return torch.stack([angle_td.sin(), angle_td.cos()], -1).flatten(1)[:, :width]


class Unrotated(nn.Module):
    """Queries times the scale, and keys, without rotary positions."""

    def forward(self, q_tk: Tensor, k_sk: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return q_tk * scale, k_sk


@INTERVENTIONS.register("tied_head")
@dataclass(frozen=True)
class TiedHead(HookIntervention):
    """Use the embedding as the head, logits times 1/sqrt(width) (PaLM, sec. 5).

    Attributes:
        scale: ``none`` leaves logits as they are (GPT-2, Gemma).
    """

    hook_points: ClassVar = {"readout": Act.REPLACE}
    scale: str = one_of("inverse_root", "none", default="inverse_root")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return TiedReadout(config.width**-0.5 if self.scale == "inverse_root" else 1.0)


class TiedReadout(nn.Module):
    """Hidden states ``[r b t d]`` to logits ``[r b t v]`` by the embedding ``[r v d]``, times ``scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, hidden_rbtd: Tensor, embedding_rvd: Tensor, operands: Operands | None) -> Tensor:
        head_rdv = embedding_rvd.transpose(-1, -2)
        logits_rnv = product(hidden_rbtd.flatten(1, 2) * self.scale, head_rdv, operands, has_weight=True)
        return logits_rnv.view(*hidden_rbtd.shape[:3], -1)
