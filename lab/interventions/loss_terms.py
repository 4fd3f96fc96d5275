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


@INTERVENTIONS.register("max_z_loss")
@dataclass(frozen=True)
class MaxZLoss(LossTerm):
    """coefficient * (largest logit)^2 per token (Baichuan 2, arXiv:2309.10305, sec. 3.3)."""

    uses: ClassVar = ("logits_rbtv",)
    coefficient: PerRun = bounded(at_least=0)

    def __call__(self, predictions: Predictions) -> Tensor:
        largest_rbt = predictions.logits_rbtv.amax(-1)
        return over(self.coefficient, largest_rbt) * largest_rbt.square()


@INTERVENTIONS.register("label_smoothing")
@dataclass(frozen=True)
class LabelSmoothing(LossTerm):
    """Give every token the same share of ``amount`` of the target (Szegedy et al. 2015, arXiv:1512.00567, sec. 7)."""

    uses: ClassVar = ("logits_rbtv", "targets_rbt")
    amount: PerRun = bounded(at_least=0, at_most=1)

    def __call__(self, predictions: Predictions) -> Tensor:
        logits_rbtv, targets_rbt = predictions.logits_rbtv, predictions.targets_rbt
        target_rbt = logits_rbtv.gather(-1, targets_rbt.unsqueeze(-1)).squeeze(-1)
        return over(self.amount, target_rbt) * (target_rbt - logits_rbtv.mean(-1))
