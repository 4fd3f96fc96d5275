"""Responses to loss spikes that one study compares: two remedies within an update, and two counterfactuals.

The counterfactuals are earlier weights or moments at a burst, and one change from before a spike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lab.core.axes import over, per_run_rms
from lab.core.hooks import HookIntervention, HookPoint
from lab.core.registry import RESPONSES
from lab.core.schema import PerRun, bounded, one_of
from lab.optim.links.adam import Adam
from lab.responses.response import Action, Gate, Memory, Reading, Response, check_reach

GUARD_POWER, GUARD_MEMORY = -4, 0.2  # of metaseq's guard: the exponent, and 2 / (span + 1) of a span of 9 losses


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


@RESPONSES.register("earlier_state")
@dataclass(frozen=True)
class EarlierState(Response):
    """Where a burst begins, put weights, moments or both back; the steps and the data go on.

    It is no remedy but an ablation of what a spike belongs to.  PaLM fed the batches around a spike to an earlier
    checkpoint, which did not spike (Chowdhery et al. 2022, arXiv 2204.02311, sec. 5.1).

    Attributes:
        rewind_weights: updates by which the weights go back at least; 0 leaves them.
        rewind_moments: the same of the optimizer's state and its age.
    """

    rewind_weights: PerRun = bounded(100.0, at_least=0)
    rewind_moments: PerRun = bounded(100.0, at_least=0)
    snapshot_every: int = bounded(20, above=0)
    snapshots: int = bounded(6, above=0)

    def __post_init__(self) -> None:
        for key, updates in (("rewind_weights", self.rewind_weights), ("rewind_moments", self.rewind_moments)):
            if not isinstance(updates, Tensor):  # a fleet's numbers were checked before they were stacked
                check_reach(self, key, updates)

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Go back before the first batch of the burst."""
        if not reading.burst_follows:
            return None
        return Action(rewind_weights=float(self.rewind_weights), rewind_moments=float(self.rewind_moments))

    def objection(self, config: Any) -> str | None:
        """It waits for a burst."""
        if config.bad_batches is None:
            return f"response={config.response.name} acts where a burst begins; add bad_batches=rare_tokens"
        return None


NEGLIGIBLE = 1e-6  # share of the first moment's bias that need not be undone
OF_ADAM = ("first_moment", "second_moment", "eps")  # changes that only Adam can make


@RESPONSES.register("branch")
@dataclass(frozen=True)
class Branch(Response):
    """Where the first loss spike begins, go back to before it, make one change, and go on: a counterfactual.

    It is no remedy, but an ablation of what a spike belongs to.  All runs of a seed are one run up to the spike, so
    their branches are of the same spike.  With ``change=same`` the same updates follow bit for bit, and so does the
    spike; PaLM asked the same of the data (Chowdhery et al. 2022, arXiv 2204.02311, sec. 5.1).

    Attributes:
        change: ``same`` changes nothing; ``batches`` leaves out ``skip`` batches; ``first_moment`` and
            ``second_moment`` reset that of Adam alone, which begins at zero with a bias correction of its own while
            the other goes on; ``moments`` resets both; ``lr`` multiplies the learning rate by ``lr_factor``; ``eps``
            sets Adam's epsilon to ``eps``.
        start: updates before which a spike does not count, since the model is still learning.
        rewind: updates to go back at least.
        beta1: of Adam, by which the learning rate makes up for a wrong bias of the first moment.
    """

    change: str = one_of("same", "batches", "first_moment", "second_moment", "moments", "lr", "eps", default="same")
    start: int = bounded(500, at_least=0)
    rewind: int = bounded(20, above=0)
    skip: int = bounded(100, above=0)
    lr_factor: float = bounded(0.5, above=0, at_most=1)
    eps: float = bounded(1e-3, above=0)
    beta1: float = bounded(0.9, at_least=0, below=1)
    snapshot_every: int = bounded(10, above=0)
    snapshots: int = bounded(4, above=0)

    def __post_init__(self) -> None:
        check_reach(self, "rewind", self.rewind)

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Branch where the first spike begins; after each update from there, make up for the bias of the first moment.

        With the second moment its age begins anew, so the first, which is kept, counts 1 / (1 - beta1 ** n) times too
        much at the n-th update from there. A first moment that begins anew alone counts too little by that factor.
        """
        if not memory:
            if not reading.spike_begins or reading.step < self.start:
                return None
            memory["bias"] = self.beta1 if self.change in ("first_moment", "second_moment") else 0.0
            return self._action(memory["bias"])
        bias = memory["bias"]
        if not bias:
            return None
        memory["bias"] = bias * self.beta1 if bias > NEGLIGIBLE else 0.0
        return self._unbiased(memory["bias"])

    def _action(self, bias: float) -> Action:
        changes = {
            "same": Action(),
            "batches": Action(skip=self.skip),
            "moments": Action(reset="moments"),
            "lr": Action(lr_factor=self.lr_factor),
            "eps": Action(eps=self.eps),
        }
        change = changes.get(self.change) or self._unbiased(bias)._replace(reset=self.change)
        return change._replace(rewind=self.rewind)

    def _unbiased(self, bias: float) -> Action:
        return Action(lr_factor=1 - bias if self.change == "second_moment" else 1 / (1 - bias))

    def objection(self, config: Any) -> str | None:
        """Some changes are of Adam, and a bias is made up for by its own beta1."""
        if self.change not in OF_ADAM:
            return None
        adam = next((link for link in config.optimizer.links.values() if isinstance(link, Adam)), None)
        if adam is None:
            return f"response.change={self.change} changes Adam, which the chain lacks; say optimizer=adamw"
        if self.beta1 != adam.beta1:
            return f"response.beta1={self.beta1:g} is not the optimizer's; say response.beta1={adam.beta1:g}"
        return None
