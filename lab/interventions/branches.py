"""Interventions on the branches of a block: learned and fixed scales, and other MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lab.core.axes import in_whole_vectors, over
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.schema import PerRun, bounded
from lab.interventions.embedding import Multiplied
from lab.model.config import ModelConfig
from lab.model.layers import Linear, Scale

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
        limit: silu's argument is at most this, and the hidden layer within plus or minus this; infinity clamps nothing
            (gpt-oss takes 7).
    """

    hook_points: ClassVar = {"activation": Act.REPLACE, "mlp_gate": Act.OTHER}
    excludes: ClassVar = ("relu", "relu2", "fp16_gelu")
    limit: PerRun = bounded(above=0, infinite=True)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return nn.Identity() if point.kind == "activation" else SiLUGate(runs, config.width, point.size, self.limit)


class SiLUGate(Linear):
    """The hidden layer ``[r b t m]`` times silu of a linear layer of the branch's input ``[r b t d]``."""

    def __init__(self, runs: int, width: int, hidden: int, limit: Tensor | float) -> None:
        super().__init__(runs, width, hidden, None)
        self.limit = limit

    def forward(self, hidden_rbtm: Tensor, x_rbtd: Tensor) -> Tensor:  # type: ignore[override]
        gate_rbtm = super().forward(x_rbtd).to(x_rbtd.dtype)
        limit = over(torch.as_tensor(self.limit), gate_rbtm)
        assert isinstance(limit, Tensor)
        hidden_rbtm = torch.maximum(torch.minimum(hidden_rbtm, limit), -limit)
        return hidden_rbtm * in_whole_vectors(torch.nn.functional.silu, torch.minimum(gate_rbtm, limit))
