"""Responses that act between updates: going back, leaving out batches, resetting Adam, another learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from lab.core.registry import RESPONSES
from lab.core.schema import PerRun, bounded, one_of
from lab.responses.response import Action, Memory, Reading, Response, Rewinding, check_reach, counted


@RESPONSES.register("rewind_and_skip")
@dataclass(frozen=True)
class RewindAndSkip(Rewinding):
    """Go back about 100 steps and leave out 200 to 500 batches (Chowdhery et al. 2022, arXiv 2204.02311, sec. 5.1).

    With ``skip=0`` the same batches come again, and so does the same spike.  WeLM skips 200 batches and also lowers the
    learning rate (``lr_factor=0.5``); GLM-130B skips ranges of 200 steps.

    Attributes:
        skip: batches to leave out, counted from the snapshot.
        lr_factor: factor of the learning rate after each rewind.
        only_new: whether no batch comes twice: those met since the snapshot are left out too, if ``skip`` are fewer.
            Else a spike soon after a rewind might meet its batches again and again, from the same snapshot.
    """

    skip: int = bounded(300, at_least=0)
    lr_factor: float = bounded(1.0, above=0, at_most=1)
    only_new: bool = False

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Rewind where a spike begins."""
        if not reading.spike_begins or not counted(memory, self.most):
            return None
        lr_factor = self.lr_factor ** memory["actions"]
        return Action(self.rewind, self.skip, only_new=self.only_new, lr_factor=lr_factor)


@RESPONSES.register("rewind_and_rescale")
@dataclass(frozen=True)
class RewindAndRescale(RewindAndSkip):
    """As ``rewind_and_skip``, and begin the loss scale anew after each rewind.

    WeLM-10B goes back about 100 steps, leaves out 200 batches, lowers the learning rate and resets the loss scale.
    """

    resets_loss_scale: ClassVar = True

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Rewind and rescale where a spike begins."""
        action = super().act(reading, memory)
        return action and action._replace(fresh_loss_scale=True)


@RESPONSES.register("lower_lr")
@dataclass(frozen=True)
class LowerLR(Response):
    """Lower the learning rate at each spike, and go on (OPT-175B, runs 11.1 and 12.42).

    Attributes:
        lr_factor: factor of the learning rate at each spike.
        most: how often it is lowered.
    """

    lr_factor: float = bounded(0.5, above=0, at_most=1)
    most: int = bounded(3, above=0)

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Lower the rate where a spike begins."""
        if not reading.spike_begins or not counted(memory, self.most):
            return None
        return Action(lr_factor=self.lr_factor ** memory["actions"])


@RESPONSES.register("restart_and_lower")
@dataclass(frozen=True)
class RestartAndLower(Rewinding):
    """Go back to a healthy snapshot with a lower learning rate, lower still if the spike returns soon.

    The same batches come again (Zhang et al. 2022, arXiv 2205.01068, sec. 2.5; OPT-175B, runs 12.42 to 12.53).

    Attributes:
        first_factor: factor of the learning rate at a spike.
        repeated_factor: factor at a spike less than ``repeated_within`` updates after the last.
        repeated_within: updates.
    """

    first_factor: float = bounded(0.9, above=0, at_most=1)
    repeated_factor: float = bounded(2 / 3, above=0, at_most=1)
    repeated_within: int = bounded(200, at_least=0)

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Rewind and lower the rate where a spike begins."""
        if not reading.spike_begins or not counted(memory, self.most):
            return None
        is_repeated = "spiked_at" in memory and reading.step - memory["spiked_at"] < self.repeated_within
        factor = memory.get("lr_factor", 1.0) * (self.repeated_factor if is_repeated else self.first_factor)
        memory |= {"spiked_at": reading.step, "lr_factor": factor}
        return Action(self.rewind, lr_factor=factor)


@RESPONSES.register("adam_reset")
@dataclass(frozen=True)
class AdamReset(Response):
    """Forget Adam's moments and their age at each spike (plan B of OPT-175B, run 12.16).

    Attributes:
        most: how often they are forgotten.
    """

    most: int = bounded(3, above=0)

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Reset where a spike begins."""
        return Action(reset="moments") if reading.spike_begins and counted(memory, self.most) else None


@RESPONSES.register("adam_reset_warmup")
@dataclass(frozen=True)
class AdamResetWarmup(AdamReset):
    """Forget Adam's moments at each spike and warm the learning rate up again from 0 (OPT-175B, run 12.16).

    Attributes:
        warmup: updates in which the learning rate rises in a straight line.
    """

    warmup: int = bounded(100, above=0)

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Reset where a spike begins, and raise the rate after each update."""
        if reading.spike_begins and counted(memory, self.most):
            memory["warmed"] = 0.0
            return Action(reset="moments", lr_factor=0.0)
        if memory.get("warmed", self.warmup) >= self.warmup:
            return None
        memory["warmed"] += 1
        return Action(lr_factor=memory["warmed"] / self.warmup)


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
        if config.burst is None:
            return f"response={config.response.name} acts where a burst begins; add burst=rare_tokens"
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
