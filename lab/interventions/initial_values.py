"""Interventions on initial values alone: of the head, of the output projections of branches, of all matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from lab.core.hooks import HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.schema import bounded
from lab.model.config import ModelConfig

OUTPUT_PROJECTIONS = (".attention.output", ".mlp_down")


class InitialValues(HookIntervention):
    """An intervention that attaches to nothing."""

    hook_points: ClassVar = ()

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module | None:
        return None


@INTERVENTIONS.register("head_init")
@dataclass(frozen=True)
class HeadInit(InitialValues):
    """Draw the head with standard deviation ``std``; at 0 the loss starts at log vocabulary, and blocks learn later."""

    excludes: ClassVar = ("tied_head",)
    std: float = bounded(at_least=0)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return self.std if weight == "head" else std


@INTERVENTIONS.register("zero_init_projections")
@dataclass(frozen=True)
class ZeroInitProjections(InitialValues):
    """The projections back to the residual stream start at zero, so each block is at first the identity."""

    excludes: ClassVar = ("deepnorm",)

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        return 0.0 if weight.endswith(OUTPUT_PROJECTIONS) else std


@INTERVENTIONS.register("small_init")
@dataclass(frozen=True)
class SmallInit(InitialValues):
    """Std sqrt(2/(5 width)) everywhere, that of the projections back over sqrt(2 depth) (arXiv:2312.16903, sec. 2)."""

    excludes: ClassVar = ("deepnorm", "embedding_init", "head_init", "zero_init_projections")

    def initial_std(self, weight: str, std: float, config: ModelConfig) -> float:
        small = math.sqrt(2 / (5 * config.width))
        return small / math.sqrt(2 * config.depth) if weight.endswith(OUTPUT_PROJECTIONS) else small
