"""Interventions on blocks: where they normalize, activation, biases, scales of the branches, and other MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.core.axes import in_whole_vectors, over
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.roles import Role
from lab.core.schema import PerRun, bounded, one_of
from lab.interventions.embedding import Multiplied
from lab.model.config import ModelConfig
from lab.model.layers import Layer, LayerNorm, Linear, Scale, gelu


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

    Attributes:
        init: what the initial values are before they are scaled: as the parametrization chooses (``fan_in``), or in the
            MLP of std sqrt(2 / (inputs + outputs)), as in GLM-130B (``xavier``).
    """

    hook_points: ClassVar = {"residual": Act.REPLACE}
    excludes: ClassVar = ("post_layernorm",)
    init: str = one_of("fan_in", "xavier", default="fan_in")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return NormalizedSum((2 * config.depth) ** 0.5)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        if self.init == "xavier" and weight.endswith((".mlp_up", ".mlp_down")):
            std = math.sqrt(2 / (5 * config.width))  # of width and four times the width
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
    """A bias, at first zero, in every linear layer of the blocks; PaLM has none (Chowdhery et al. 2022, sec. 2).

    Attributes:
        layers: ``qkv`` are those of queries, keys and values (Qwen 2.5), ``not_qkv`` all others (ViT-22B).
    """

    hook_points: ClassVar = dict.fromkeys(
        ("query", "key", "value", "attention_output", "mlp_up", "mlp_output"), Act.LAYER
    )
    layers: str = one_of("all", "qkv", "not_qkv", default="all")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module | None:
        is_per_head = point.kind in ("query", "key", "value")
        if self.layers == ("not_qkv" if is_per_head else "qkv"):
            return None
        return Bias(runs, (point.heads, 1, point.size) if is_per_head else (point.size,))

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return 0.0 if weight.endswith(".biases") else std


class Bias(Layer):
    """Adds a vector to the last axes."""

    def __init__(self, runs: int, shape: tuple[int, ...]) -> None:
        super().__init__(runs, shape, Role.BIAS, fan_in=shape[-1])

    def forward(self, x_r: Tensor) -> Tensor:
        axes = self.weight.ndim - 1
        return x_r + self.weight.view(len(self.weight), *(1,) * (x_r.ndim - 1 - axes), *self.weight.shape[1:])


BRANCHES = {"attention_output": Act.SCALE, "mlp_output": Act.SCALE}


@INTERVENTIONS.register("layerscale")
@dataclass(frozen=True)
class LayerScale(HookIntervention):
    """Multiply each branch by a learned gain per channel, ``init`` at first (Touvron et al. 2021, arXiv:2103.17239)."""

    hook_points: ClassVar = BRANCHES
    init: float = bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Scale(runs, (point.size,), self.init)


@INTERVENTIONS.register("rezero")
@dataclass(frozen=True)
class ReZero(HookIntervention):
    """Multiply each branch by one learned number, at first 0: each block is the identity (arXiv:2003.04887)."""

    hook_points: ClassVar = BRANCHES
    excludes: ClassVar = ("layerscale",)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Scale(runs, (1,), 0.0)


@INTERVENTIONS.register("depth_scaling")
@dataclass(frozen=True)
class DepthScaling(HookIntervention):
    """Multiply each branch by base depth over depth (CompleteP with alpha 1, arXiv:2505.01618, table 1).

    CompleteP is this with ``parametrization=mup_full``; at alpha 1 no learning rate depends on the depth.
    """

    hook_points: ClassVar = BRANCHES
    base_depth: int = bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return Multiplied(self.base_depth / config.depth)


@INTERVENTIONS.register("relu2")
@dataclass(frozen=True)
class SquaredReLUActivation(HookIntervention):
    """Squared ReLU in place of GELU (So et al. 2021, arXiv:2109.08668, sec. 4)."""

    hook_points: ClassVar = {"activation": Act.REPLACE}
    excludes: ClassVar = ("relu", "fp16_gelu")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return ReLUSquare()


class ReLUSquare(nn.Module):
    """``relu(x)^2``."""

    def forward(self, x_rbtm: Tensor) -> Tensor:
        return x_rbtm.relu().square()


@INTERVENTIONS.register("swiglu")
@dataclass(frozen=True)
class SwiGLU(HookIntervention):
    """SwiGLU in place of GELU: the MLP's hidden layer times silu(x W), a third matrix (Shazeer 2020, arXiv:2002.05202).

    Attributes:
        limit: silu's argument is at most this, and the hidden layer within plus or minus this; infinity clamps nothing.
            DeepSeek-V4 takes 10 throughout (DeepSeek-AI 2026, sec. 4.2.3), gpt-oss 7 beside a silu of another slope.
        gate: ``gelu`` in place of silu is GeGLU (Gemma, GLM-130B).
    """

    hook_points: ClassVar = {"activation": Act.REPLACE, "mlp_gate": Act.OTHER}
    excludes: ClassVar = ("relu", "relu2", "fp16_gelu")
    limit: PerRun = bounded(above=0, infinite=True)
    gate: str = one_of("silu", "gelu", default="silu")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        if point.kind == "activation":
            return nn.Identity()
        return GatedUnit(runs, config.width, point.size, self.limit, is_gelu=self.gate == "gelu")


class GatedUnit(Linear):
    """The hidden layer ``[r b t m]`` times silu, or GELU, of a linear layer of the branch's input ``[r b t d]``."""

    def __init__(self, runs: int, width: int, hidden: int, limit: Tensor | float, *, is_gelu: bool) -> None:
        super().__init__(runs, width, hidden, None)
        self.limit, self.is_gelu = limit, is_gelu

    def forward(self, hidden_rbtm: Tensor, x_rbtd: Tensor) -> Tensor:  # type: ignore[override]
        gate_rbtm = super().forward(x_rbtd).to(x_rbtd.dtype)
        limit = over(torch.as_tensor(self.limit), gate_rbtm)
        assert isinstance(limit, Tensor)
        hidden_rbtm = torch.maximum(torch.minimum(hidden_rbtm, limit), -limit)
        gate_rbtm = torch.minimum(gate_rbtm, limit)
        return hidden_rbtm * (gelu(gate_rbtm) if self.is_gelu else in_whole_vectors(F.silu, gate_rbtm))


@INTERVENTIONS.register("parallel_blocks")
@dataclass(frozen=True)
class ParallelBlocks(HookIntervention):
    """Attention and MLP side by side, with one norm before both: x + attend(norm(x)) + mlp(norm(x)) (PaLM, sec. 2)."""

    hook_points: ClassVar = {"branches": Act.REPLACE}
    excludes: ClassVar = ("post_layernorm", "deepnorm", "reordered_norm", "ngpt", "qkv_norm")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return SideBySide()


class SideBySide(nn.Module):
    """``x + attend(norm(x)) + mlp(norm(x))``."""

    def forward(
        self,
        x_rbtd: Tensor,
        attend: Callable[[Tensor], Tensor],
        mlp: Callable[[Tensor], Tensor],
        norm: Callable[[Tensor], Tensor],
    ) -> Tensor:
        normed_rbtd = norm(x_rbtd)
        return x_rbtd + attend(normed_rbtd) + mlp(normed_rbtd)
