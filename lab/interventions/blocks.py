"""Interventions on the blocks: where they normalize, their activation, biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.roles import Role
from lab.model.config import ModelConfig
from lab.model.layers import Layer, LayerNorm


@INTERVENTIONS.register("normformer")
@dataclass(frozen=True)
class NormFormer(HookIntervention):
    """A gain per head, and LayerNorm on attention's output and on the MLP's hidden layer (Shleifer et al. 2021)."""

    hook_points: ClassVar = {"heads": Act.SCALE, "attention_output": Act.NORMALIZE, "mlp_hidden": Act.NORMALIZE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return HeadGain(runs, config.heads) if point.kind == "heads" else LayerNorm(runs, point.size)


class HeadGain(Layer):
    """Multiplies the output ``[r b h t k]`` of every head by a gain."""

    def __init__(self, runs: int, heads: int) -> None:
        super().__init__(runs, (heads,), Role.GAIN, fan_in=heads)

    def forward(self, mixed_rbhtk: Tensor) -> Tensor:
        return mixed_rbhtk.to(self.weight.dtype) * self.weight[:, None, :, None, None]


@INTERVENTIONS.register("post_layernorm")
@dataclass(frozen=True)
class PostLayerNorm(HookIntervention):
    """Normalize the sum of residual stream and branch, not the branch's input (Vaswani et al. 2017, sec. 3.1)."""

    hook_points: ClassVar = {"residual": Act.REPLACE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return NormalizedSum(1.0)


@INTERVENTIONS.register("deepnorm")
@dataclass(frozen=True)
class DeepNorm(HookIntervention):
    """Post-LayerNorm with the residual stream times sqrt(2 depth), as in GLM-130B (arXiv:2210.02414, sec. 2.2).

    The weights of values, of attention's output and of the MLP start 1/sqrt(2 depth) times as large.  For a decoder
    DeepNet itself has smaller powers, (2 depth)^(1/4) and (8 depth)^(-1/4) (Wang et al. 2022, arXiv:2203.00555).
    """

    hook_points: ClassVar = {"residual": Act.REPLACE}
    excludes: ClassVar = ("post_layernorm",)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return NormalizedSum((2 * config.depth) ** 0.5)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        is_scaled = weight.endswith((".attention.value", ".attention.output", ".mlp_up", ".mlp_down"))
        return std * (2 * config.depth) ** -0.5 if is_scaled else std


class NormalizedSum(nn.Module):
    """``norm(alpha x + branch(x))``."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x_rbtd: Tensor, branch: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> Tensor:
        return norm(self.alpha * x_rbtd + branch(x_rbtd))


@INTERVENTIONS.register("relu")
@dataclass(frozen=True)
class ReLU(HookIntervention):
    """ReLU in place of GELU (OPT-175B, run 11.10)."""

    hook_points: ClassVar = {"activation": Act.REPLACE}

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return nn.ReLU()


@INTERVENTIONS.register("biases")
@dataclass(frozen=True)
class Biases(HookIntervention):
    """A bias, at first zero, in every linear layer of the blocks; PaLM has none (Chowdhery et al. 2022, sec. 2)."""

    hook_points: ClassVar = dict.fromkeys(
        ("query", "key", "value", "attention_output", "mlp_up", "mlp_output"), Act.LAYER
    )

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        is_per_head = point.kind in ("query", "key", "value")
        return Bias(runs, (config.heads, 1, point.size) if is_per_head else (point.size,))

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return 0.0 if weight.endswith(".biases") else std


class Bias(Layer):
    """Adds a vector to the last axes."""

    def __init__(self, runs: int, shape: tuple[int, ...]) -> None:
        super().__init__(runs, shape, Role.BIAS, fan_in=shape[-1])

    def forward(self, x_r: Tensor) -> Tensor:
        axes = self.weight.ndim - 1
        return x_r + self.weight.view(len(self.weight), *(1,) * (x_r.ndim - 1 - axes), *self.weight.shape[1:])
