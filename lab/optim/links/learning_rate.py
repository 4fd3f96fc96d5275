"""Links that multiply an update: by the peak learning rate, its schedule, factors, and agreement with the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from lab.core.axes import over, per_run_mean, per_run_norm, per_run_rms
from lab.core.registry import LINKS
from lab.core.roles import MATRICES
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors

SMALLEST_RMS = 1e-3
FEWEST_AGREEING = 1e-3  # share of the entries by which a cautious update is divided at least


@LINKS.register("peak")
@dataclass(frozen=True)
class Peak(Link):
    """Multiply by the peak learning rate and the parametrization's multiplier for that tensor."""

    takes: ClassVar = ("gradient", "direction")
    makes: ClassVar = "step"
    lr: PerRun = bounded(above=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(self.lr * now.lr_factor[name], u) for name, u in updates.items()}


@LINKS.register("lr_factor")
@dataclass(frozen=True)
class LRFactor(Link):
    """Multiply by ``lr_factor``: 1, but for roles with a number of their own, whose rate follows a sweep's."""

    takes: ClassVar = ("direction", "step")
    lr_factor: PerRun = bounded(above=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(self.lr_factor, u) for name, u in updates.items()}


@LINKS.register("rms_scale")
@dataclass(frozen=True)
class RMSScale(Link):
    """Multiply by the RMS of the weight, at least 1e-3, so that the LR is relative (Shazeer & Stern 2018, sec. 8)."""

    takes: ClassVar = ("direction", "step")

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        rms = {name: per_run_rms(now.weights[name]).clamp(min=SMALLEST_RMS) for name in updates}
        return {name: u * over(rms[name], u) for name, u in updates.items()}


@LINKS.register("to_weight_norm")
@dataclass(frozen=True)
class ToWeightNorm(Link):
    """Scale the update of each of the blocks' matrices to the norm of the matrix, so that the LR is relative.

    With ``keep_norm`` at the end of the chain this is the hyperball step: the learning rate is about the angle by which
    a matrix turns.
    """

    takes: ClassVar = ("direction",)
    roles: ClassVar = MATRICES

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        scaled = {}
        for name, u in updates.items():
            norm_r, weight_r = per_run_norm([u]), per_run_norm([now.weights[name]])
            scaled[name] = u * over(torch.where(norm_r == 0, 0.0, weight_r / norm_r), u)
        return scaled


@LINKS.register("cautious")
@dataclass(frozen=True)
class Cautious(Link):
    """Leave out entries of the update against the present gradient, and enlarge the others (arXiv:2411.16085, alg. 2).

    They are divided by their share in the tensor, 1e-3 at least.
    """

    takes: ClassVar = ("direction", "step")

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        kept = {}
        for name, u in updates.items():
            is_uphill = u * now.gradients[name] <= 0
            share_r = per_run_mean(torch.where(is_uphill, 0.0, torch.ones_like(u))).clamp(min=FEWEST_AGREEING)
            kept[name] = torch.where(is_uphill, 0.0, u / over(share_r, u))
        return kept


@LINKS.register("schedule")
@dataclass(frozen=True)
class Schedule(Link):
    """Multiply by the schedule's shape."""

    takes: ClassVar = ("step",)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(now.shape_r, u) for name, u in updates.items()}
