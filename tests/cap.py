"""Interventions such as users add, with a number per run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lab import HookIntervention, LossTerm, PerRun, Predictions, bounded, over
from lab.core.hooks import HookPoint


@dataclass(frozen=True)
class Cap(HookIntervention):
    """Squash what passes into (-cap, cap)."""

    hook_points: ClassVar = ("scores",)
    cap: PerRun = bounded(above=0)

    def attach(self, point: HookPoint, runs: int, config: Any) -> nn.Module:
        squash = nn.Module()
        squash.forward = lambda x_r: over(self.cap, x_r) * torch.tanh(x_r / over(self.cap, x_r))  # type: ignore
        return squash


@dataclass(frozen=True)
class HiddenQuartic(LossTerm):
    """Punish large hidden states by their fourth power (a LayerNorm's mean square hardly moves)."""

    uses: ClassVar = ("hidden_rbtd",)
    coefficient: PerRun = bounded(at_least=0)

    def __call__(self, predictions: Predictions) -> Tensor:
        quartic_rbt = predictions.hidden_rbtd.pow(4).mean(-1)
        return over(self.coefficient, quartic_rbt) * quartic_rbt


@dataclass(frozen=True)
class LogitOfTarget(LossTerm):
    """Punish the square of the target's own logit."""

    uses: ClassVar = ("logits_rbtv", "targets_rbt")
    coefficient: PerRun = bounded(at_least=0)

    def __call__(self, predictions: Predictions) -> Tensor:
        own_rbt = predictions.logits_rbtv.gather(-1, predictions.targets_rbt.unsqueeze(-1)).squeeze(-1)
        return over(self.coefficient, own_rbt) * own_rbt.square()
