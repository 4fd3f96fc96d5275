"""Responses that act between updates: going back, leaving out batches, resetting Adam, another learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lab.core.registry import RESPONSES
from lab.core.schema import bounded
from lab.responses.response import Action, Memory, Reading, Response, Rewinding, counted


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
