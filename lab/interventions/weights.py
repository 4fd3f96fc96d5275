"""Interventions on weights: initial values, the spectral norm, and how gains, learning rates and head are trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.core.axes import in_whole_vectors, nonzero, over, per_run_norm
from lab.core.hooks import Act, HookIntervention, HookPoint, WeightIntervention
from lab.core.registry import INTERVENTIONS
from lab.core.roles import Role
from lab.core.schema import bounded, one_of
from lab.model.config import ModelConfig
from lab.model.layers import Layer, Scale

OUTPUT_PROJECTIONS = (".attention.output", ".mlp_down")


class Unattached(HookIntervention):
    """An intervention that attaches to nothing."""

    hook_points: ClassVar = ()

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module | None:
        return None


@INTERVENTIONS.register("head_init")
@dataclass(frozen=True)
class HeadInit(Unattached):
    """Draw the head with standard deviation ``std``; at 0 the loss starts at log vocabulary, and blocks learn later."""

    excludes: ClassVar = ("tied_head",)
    std: float = bounded(at_least=0)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return self.std if weight == "head" else std


@INTERVENTIONS.register("zero_init_projections")
@dataclass(frozen=True)
class ZeroInitProjections(Unattached):
    """The projections back to the residual stream start at zero, so each block is at first the identity."""

    excludes: ClassVar = ("deepnorm",)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return 0.0 if weight.endswith(OUTPUT_PROJECTIONS) else std


@INTERVENTIONS.register("small_init")
@dataclass(frozen=True)
class SmallInit(Unattached):
    """Std sqrt(2/(5 width)) for all matrices, those back over sqrt(2 depth) (Takase et al., arXiv:2312.16903, sec. 2).

    Attributes:
        std: this standard deviation at every width (GPT-2: 0.02, DeepSeek-V3: 0.006); at 0 it follows the width.
        projections_back: ``over_root_depth``, or the ``same`` as all others (OLMo 2).
    """

    excludes: ClassVar = ("deepnorm", "embedding_init", "head_init", "zero_init_projections")
    std: float = bounded(default=0.0, at_least=0)
    projections_back: str = one_of("over_root_depth", "same", default="over_root_depth")

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        if std == 0 and weight.endswith(("bias", "biases")):  # a bias stays at zero
            return std
        small = self.std or math.sqrt(2 / (5 * config.width))
        is_divided = self.projections_back == "over_root_depth" and weight.endswith(OUTPUT_PROJECTIONS)
        return small / math.sqrt(2 * config.depth) if is_divided else small


SQUARINGS = 7  # of the Gram matrix, which makes 2^7 steps of the power iteration


@INTERVENTIONS.register("sigma_reparam")
@dataclass(frozen=True)
class SigmaReparam(HookIntervention):
    """Divide each matrix of the blocks by its spectral norm, times a learned number (arXiv:2303.06296, sec. 3).

    The number starts at 1 + sqrt(outputs / inputs), the spectral norm of a wide random matrix of std 1/sqrt(inputs), so
    a model begins nearly as it would without.  A matrix of zeros, such as the queries' at first in ``mup_full``,
    is divided by 1 (as in ``flax.linen.SpectralNorm``); it has a norm from its first update on.
    """

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"weight": Act.NORMALIZE}
    excludes: ClassVar = ("zero_init_projections", "ngpt")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return UnitSpectralNorm(runs)


class UnitSpectralNorm(Scale):
    """A matrix ``[r i o]`` over its spectral norm, times a gain."""

    def __init__(self, runs: int) -> None:
        super().__init__(runs, (1,))

    def forward(self, weight_rio: Tensor) -> Tensor:
        inputs, outputs = weight_rio.shape[1:]
        unit_rio = weight_rio / nonzero(spectral_norm(weight_rio))
        return super().forward(unit_rio) * (1 + math.sqrt(outputs / inputs))


MATRICES_OF_BLOCKS = (*(f".attention.{part}" for part in ("query", "key", "value", "output")), ".mlp_up", ".mlp_down")


@INTERVENTIONS.register("magnitude_direction")
@dataclass(frozen=True)
class MagnitudeDirection(HookIntervention, WeightIntervention):
    """Train direction and magnitudes of the blocks' matrices apart (Hägele et al. 2026, arXiv:2606.25971, alg. 2).

    A matrix is diag(softplus(a)) W diag(softplus(b)), with a gain of 1 at first for each input and each output.  The
    entries of W start with variance 1/width, and after each update W has the Frobenius norm that follows from it.  The
    optimizer of the run acts on W and on the gains, which take the same learning rate (``gain_lr`` sets another).
    Train it without weight decay, which does nothing to W and shrinks the gains.

    Two things differ from the paper: a clip sees the gradients of W and the gains, and not that of the product; and
    embedding and head are trained as usual, where they have rows of unit norm there.
    """

    hook_points: ClassVar = {"weight": Act.SCALE}
    excludes: ClassVar = ("sigma_reparam", "ngpt", "zero_init_projections", "small_init", "deepnorm")

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return InputAndOutputGains(runs, point.inputs, point.size)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return config.width**-0.5 if weight.endswith(MATRICES_OF_BLOCKS) else std

    def after_update(self, weights: Mapping[str, Tensor]) -> None:
        width = weights["embedding"].shape[-1]
        for name, weight_rio in weights.items():
            if name.endswith(MATRICES_OF_BLOCKS):
                norm = math.sqrt(math.prod(weight_rio.shape[1:]) / width)
                weight_rio.mul_(over(norm / per_run_norm([weight_rio]), weight_rio))


class InputAndOutputGains(nn.Module):
    """A matrix ``[r i o]`` times a positive gain for each input and each output."""

    def __init__(self, runs: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = PositiveGain(runs, inputs), PositiveGain(runs, outputs)

    def forward(self, weight_rio: Tensor) -> Tensor:
        return weight_rio * self.inputs().unsqueeze(-1) * self.outputs().unsqueeze(-2)  # type: ignore[no-any-return]


class PositiveGain(Layer):
    """``softplus`` of a weight ``[r n]``, at first 1."""

    def __init__(self, runs: int, size: int) -> None:
        super().__init__(runs, (size,), Role.GAIN, fan_in=size)

    def fixed_value(self) -> Tensor:
        return torch.full(self.weight.shape[1:], math.log(math.expm1(1)), dtype=torch.float64)

    def forward(self) -> Tensor:
        return in_whole_vectors(F.softplus, self.weight)


def spectral_norm(weight_rio: Tensor) -> Tensor:
    """Largest singular value ``[r 1 1]``, differentiable with its singular vectors held fixed.

    Vectors are multiplied entry by entry: bits of products of few multiplications may depend on the runs beside a run.
    """
    with torch.no_grad():
        gram_roo = weight_rio.transpose(-1, -2) @ weight_rio
        for _ in range(SQUARINGS):
            trace_r = gram_roo.diagonal(dim1=-2, dim2=-1).sum(-1)
            gram_roo = torch.linalg.matrix_power(gram_roo / nonzero(trace_r)[:, None, None], 2)
        most_r11 = gram_roo.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None]
        right_r1o = _unit(gram_roo.gather(-2, most_r11.expand(-1, 1, gram_roo.shape[-1])), -1)
        left_ri1 = _unit((weight_rio * right_r1o).sum(-1, keepdim=True), -2)
    return (weight_rio * (left_ri1 * right_r1o)).sum((-2, -1), keepdim=True)


def _unit(vector_r: Tensor, axis: int) -> Tensor:
    return vector_r / nonzero(vector_r.square().sum(axis, keepdim=True).sqrt())


@INTERVENTIONS.register("fixed_gains")
@dataclass(frozen=True)
class FixedGains(WeightIntervention):
    """All gains of norms stay at one: they have no gradient, no decay and no update."""

    def lr_factor(self, role: str) -> float:
        return 0.0 if role == Role.GAIN else 1.0


@INTERVENTIONS.register("gain_lr")
@dataclass(frozen=True)
class GainLR(WeightIntervention):
    """Multiply the learning rate of all gains by ``factor``."""

    factor: float = bounded(above=0)

    def lr_factor(self, role: str) -> float:
        return self.factor if role == Role.GAIN else 1.0


@INTERVENTIONS.register("mu_centering")
@dataclass(frozen=True)
class MuCentering(WeightIntervention):
    """After each update subtract from the head its mean over the vocabulary (arXiv:2601.02031).

    Every logit of a token shifts by the same number, so probabilities stay.
    """

    excludes: ClassVar = ("tied_head",)

    def after_update(self, weights: Mapping[str, Tensor]) -> None:
        head_rdv = weights["head"]
        head_rdv.sub_(head_rdv.mean(-1, keepdim=True))
