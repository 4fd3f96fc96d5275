"""An intervention of studies: transplanted kappas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from lab.core import schema
from lab.core.axes import nonzero, over
from lab.core.hooks import Act, HookIntervention, HookPoint
from lab.core.registry import INTERVENTIONS
from lab.core.schema import PerRun
from lab.model.config import ModelConfig

EPS = 1e-12  # added to a mean square; it bounds the gradient of vectors that are nearly zero


@INTERVENTIONS.register("kappa_transplant")
@dataclass(frozen=True)
class KappaTransplant(HookIntervention):
    """Scale every query and key to mean square kappa, and so their scores (Wortsman et al. 2023, fig. 10)."""

    normalizes_queries_and_keys: ClassVar = True
    hook_points: ClassVar = {"query": Act.TRANSPLANT, "key": Act.TRANSPLANT}
    kappa: PerRun = schema.bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: ModelConfig) -> nn.Module:
        return MeanSquare(self.kappa)


class MeanSquare(nn.Module):
    """``z -> sqrt(kappa) z / sqrt(mean z^2)`` over the last axis; a zero vector stays zero."""

    def __init__(self, kappa: Tensor | float) -> None:
        super().__init__()
        self.kappa = kappa

    def forward(self, z_r: Tensor) -> Tensor:
        square_r = nonzero(z_r.square().mean(-1, keepdim=True))
        return z_r * (over(self.kappa, z_r) / (square_r + EPS)).sqrt()
