"""Interventions on how weights are trained: gains that stay at one, their learning rate, a head without a mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lab.core.hooks import WeightIntervention
from lab.core.registry import INTERVENTIONS
from lab.core.roles import Role
from lab.core.schema import bounded


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
