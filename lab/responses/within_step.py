"""Responses within an update: skipping it, lowering its learning rate, clamping activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lab.core.axes import over, per_run_rms
from lab.core.hooks import HookIntervention, HookPoint
from lab.core.registry import RESPONSES
from lab.core.schema import PerRun, bounded
from lab.responses.response import Gate, Response

GUARD_POWER, GUARD_MEMORY = -4, 0.2  # of metaseq's guard: the exponent, and 2 / (span + 1) of a span of 9 losses


@RESPONSES.register("skip_update")
@dataclass(frozen=True)
class SkipUpdate(Response):
    """Leave out the update of a batch whose gradient norm is too large or not finite (OPT-175B, run 11.6).

    Weights, moments and their age stay as they are, and the batch is lost.

    Attributes:
        norm: largest norm of a gradient, before clipping.
        start: updates before any is left out, since norms are large at initialization.
    """

    norm: PerRun = bounded(1.0, above=0)
    start: int = bounded(50, at_least=0)

    def gate(self, step: Tensor, loss_r: Tensor, norm_r: Tensor, usual_loss_r: Tensor) -> Gate:
        """Keep updates up to the norm; a norm that is not a number is none of them."""
        return Gate(keep_r=(norm_r <= over(self.norm, norm_r)) | (step < self.start))


@RESPONSES.register("soft_lr_guard")
@dataclass(frozen=True)
class SoftLRGuard(Response):
    """Multiply the learning rate of an update by (loss / usual loss)^-4 if the loss is above the usual (metaseq).

    The usual loss is an exponential mean of those before it, with a span of 9.
    """

    def gate(self, step: Tensor, loss_r: Tensor, norm_r: Tensor, usual_loss_r: Tensor) -> Gate:
        """Lower the rate of this update alone."""
        ratio_r = loss_r.to(usual_loss_r.dtype) / usual_loss_r
        return Gate(lr_factor_r=torch.where(ratio_r > 1, ratio_r**GUARD_POWER, 1.0))

    def usual_loss(self, before: float, loss: float) -> float:
        """The exponential mean with one more loss; a loss that is not finite does not count."""
        if not math.isfinite(loss):
            return before
        return loss if math.isinf(before) else (1 - GUARD_MEMORY) * before + GUARD_MEMORY * loss


@RESPONSES.register("activation_clamp")
@dataclass(frozen=True)
class ActivationClamp(Response, HookIntervention):
    """Clamp the residual stream after each block to so many times its RMS (OPT-175B, chronicles at 56 %).

    Attributes:
        multiple: of the RMS over the batch.
    """

    hook_points: ClassVar = ("block_output",)
    multiple: PerRun = bounded(10.0, above=0)

    def attach(self, point: HookPoint, runs: int, config: Any) -> nn.Module:
        return Clamp(self.multiple)


class Clamp(nn.Module):
    """``x -> min(max(x, -limit), limit)`` with the limit a multiple of each run's RMS, a constant for gradients."""

    def __init__(self, multiple: Tensor | float) -> None:
        super().__init__()
        self.multiple = multiple

    def forward(self, x_rbtd: Tensor) -> Tensor:
        limit_rbtd = over(per_run_rms(x_rbtd.detach()) * self.multiple, x_rbtd)
        return torch.where(x_rbtd > limit_rbtd, limit_rbtd, torch.where(x_rbtd < -limit_rbtd, -limit_rbtd, x_rbtd))
