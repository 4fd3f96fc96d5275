"""Interventions that add a term to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lab.core.axes import over
from lab.core.hooks import LossTerm, Predictions
from lab.core.registry import INTERVENTIONS
from lab.core.schema import PerRun, bounded


@INTERVENTIONS.register("z_loss")
@dataclass(frozen=True)
class ZLoss(LossTerm):
    """coefficient * (log Z)^2 per token; Z is the softmax normalizer (PaLM; Wortsman et al. 2023, sec. 3.1.2)."""

    uses: ClassVar = ("log_z_rbt",)
    coefficient: PerRun = bounded(at_least=0)

    def __call__(self, predictions: Predictions) -> Tensor:
        log_z_rbt = predictions.log_z_rbt
        return over(self.coefficient, log_z_rbt) * log_z_rbt.square()
