"""Interventions on norms: where the model normalizes, by which statistic, and what takes the place of a norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lab.core.axes import in_whole_vectors
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.schema import bounded, one_of
from lab.interventions.blocks import Bias
from lab.model.config import ModelConfig
from lab.model.layers import LAYERNORM_EPS, LayerNorm, Scale
from lab.model.low_precision import rounded_gain


class AcrossHeads(nn.Module):
    """Applies a layer of ``[r b t d]`` to heads ``[r b h t k]``, joined and split again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_rbhtk: Tensor) -> Tensor:
        x_rbtd: Tensor = self.layer(rearrange(x_rbhtk, "r b h t k -> r b t (h k)"))
        return rearrange(x_rbtd, "r b t (h k) -> r b h t k", h=x_rbhtk.shape[2])


def rms_normalized(x_r: Tensor) -> Tensor:
    """Divide by the root mean square over the last axis (epsilon 1e-6)."""
    return x_r * (x_r.square().mean(-1, keepdim=True) + LAYERNORM_EPS).rsqrt()


class RMSNorm(Scale):
    """``gain x / rms(x)`` over the last axis, without a mean (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4).

    The gain is the weight plus ``offset``, and one at first.
    """

    def __init__(self, runs: int, shape: tuple[int, ...], offset: float = 0.0) -> None:
        super().__init__(runs, shape, 1.0 - offset)
        self.offset = offset

    def forward(self, x_r: Tensor) -> Tensor:
        return super().forward(rms_normalized(x_r.to(self.weight.dtype)))

    def value(self) -> Tensor:
        gain_r = self.weight + self.offset if self.offset else self.weight
        return rounded_gain(gain_r, self.gain_rounding)


class WithoutGain(nn.Module):
    """LayerNorm without a gain, or RMSNorm without one."""

    def __init__(self, *, subtracts_mean: bool) -> None:
        super().__init__()
        self.subtracts_mean = subtracts_mean

    def forward(self, x_r: Tensor) -> Tensor:
        return F.layer_norm(x_r, x_r.shape[-1:], eps=LAYERNORM_EPS) if self.subtracts_mean else rms_normalized(x_r)


@INTERVENTIONS.register("rmsnorm")
@dataclass(frozen=True)
class RMSNorms(HookIntervention):
    """RMSNorm with a gain in place of every LayerNorm of the model (Zhang and Sennrich 2019, arXiv:1910.07467).

    Attributes:
        offset: the gain is this plus a weight; with 1, as in Gemma, weights start at zero and decay pulls gains to one.
    """

    hook_points: ClassVar = {"norm": Act.REPLACE}
    offset: float = bounded(default=0.0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return RMSNorm(runs, (point.size,), self.offset)


@INTERVENTIONS.register("norm_without_gain")
@dataclass(frozen=True)
class NormWithoutGain(HookIntervention):
    """LayerNorm without a gain, as in OLMo 1, or RMSNorm without one, in place of every LayerNorm of the model."""

    hook_points: ClassVar = {"norm": Act.REPLACE}
    excludes: ClassVar = ("rmsnorm", "fixed_gains", "gain_lr")
    norm: str = one_of("layernorm", "rmsnorm", default="layernorm")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return WithoutGain(subtracts_mean=self.norm == "layernorm")


@INTERVENTIONS.register("norm_biases")
@dataclass(frozen=True)
class NormBiases(HookIntervention):
    """A bias, at first zero, in every LayerNorm of the model (Ba et al. 2016, arXiv:1607.06450, sec. 3)."""

    hook_points: ClassVar = {"norm": Act.REPLACE}
    excludes: ClassVar = ("rmsnorm", "norm_without_gain", "dyt", "ln_scaling", "qkv_norm", "ngpt")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return BiasedLayerNorm(runs, point.size)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return 0.0 if weight.endswith(".norm_biases.bias") else std


class BiasedLayerNorm(nn.Module):
    """LayerNorm with a gain and a bias."""

    def __init__(self, runs: int, width: int) -> None:
        super().__init__()
        self.gain, self.bias = LayerNorm(runs, width), Bias(runs, (width,))

    def forward(self, x_r: Tensor) -> Tensor:
        return self.bias(self.gain(x_r))  # type: ignore[no-any-return]


@INTERVENTIONS.register("dyt")
@dataclass(frozen=True)
class DynamicTanh(HookIntervention):
    """``gain tanh(alpha x) + bias`` in place of every LayerNorm, alpha learned (Zhu et al. 2025, arXiv:2503.10622)."""

    hook_points: ClassVar = {"norm": Act.REPLACE}
    excludes: ClassVar = ("rmsnorm", "norm_without_gain")
    alpha: float = bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return ScaledTanh(runs, point.size, self.alpha)


class ScaledTanh(nn.Module):
    """``gain tanh(alpha x) + bias``."""

    def __init__(self, runs: int, width: int, alpha: float) -> None:
        super().__init__()
        self.alpha, self.gain, self.bias = Scale(runs, (1,), alpha), Scale(runs, (width,)), Bias(runs, (width,))

    def forward(self, x_r: Tensor) -> Tensor:
        return self.bias(self.gain(in_whole_vectors(torch.tanh, self.alpha(x_r))))  # type: ignore[no-any-return]


@INTERVENTIONS.register("ln_scaling")
@dataclass(frozen=True)
class LayerNormScaling(HookIntervention):
    """Divide the norms of block l by the root of l, counted from 1 (Sun et al. 2025, arXiv:2502.05795)."""

    hook_points: ClassVar = {"norm": Act.REPLACE}
    excludes: ClassVar = ("rmsnorm", "norm_without_gain", "dyt")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module | None:
        return DividedNorm(runs, point.size, point.block) if point.block else None


class DividedNorm(LayerNorm):
    """LayerNorm over the root of the number of its block."""

    def __init__(self, runs: int, width: int, block: int) -> None:
        super().__init__(runs, width)
        self.share = 1 / math.sqrt(block)

    def forward(self, x_r: Tensor) -> Tensor:
        return super().forward(x_r) * self.share


@INTERVENTIONS.register("peri_ln")
@dataclass(frozen=True)
class PeriLN(HookIntervention):
    """Normalize each branch before it and after it: x + norm(branch(norm(x))) (Kim et al. 2025, arXiv:2502.02732).

    Attributes:
        norm: the norm after the branch.
    """

    hook_points: ClassVar = {"attention_output": Act.NORMALIZE, "mlp_output": Act.NORMALIZE}
    excludes: ClassVar = ("normformer",)
    norm: str = one_of("layernorm", "rmsnorm", default="layernorm")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return LayerNorm(runs, point.size) if self.norm == "layernorm" else RMSNorm(runs, (point.size,))


@INTERVENTIONS.register("reordered_norm")
@dataclass(frozen=True)
class ReorderedNorm(HookIntervention):
    """Normalize each branch after it instead of before it: x + norm(branch(x)) (OLMo 2, arXiv:2501.00656, sec. 3.3)."""

    hook_points: ClassVar = {"residual": Act.REPLACE}
    excludes: ClassVar = ("post_layernorm", "deepnorm", "peri_ln")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return NormalizedBranch()


class NormalizedBranch(nn.Module):
    """``x + norm(branch(x))``."""

    def forward(self, x_rbtd: Tensor, branch: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> Tensor:
        return x_rbtd + norm(branch(x_rbtd))


@INTERVENTIONS.register("sub_ln")
@dataclass(frozen=True)
class SubLN(HookIntervention):
    """LayerNorm before each output projection, of attention and of the MLP (Wang et al. 2022, arXiv:2210.06423)."""

    hook_points: ClassVar = {"heads": Act.NORMALIZE, "mlp_hidden": Act.NORMALIZE}
    excludes: ClassVar = ("normformer",)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return AcrossHeads(LayerNorm(runs, config.width)) if point.kind == "heads" else LayerNorm(runs, point.size)


@INTERVENTIONS.register("embedding_rmsnorm")
@dataclass(frozen=True)
class EmbeddingRMSNorm(HookIntervention):
    """RMSNorm without a gain on the embedded tokens (modded-nanogpt)."""

    hook_points: ClassVar = {"embedding": Act.NORMALIZE}
    excludes: ClassVar = ("embedding_layernorm",)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return WithoutGain(subtracts_mean=False)
