"""Responses to loss spikes: each reads one run after each update and may ask for an action."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from lab.core.axes import over
from lab.core.registry import RESPONSES
from lab.core.schema import PerRun, bounded

Memory = dict[str, float]  # what a response keeps of one run; a checkpoint stores it


class Reading(NamedTuple):
    """The measurements of one run's update.

    Attributes:
        step: updates made before it.
        loss: loss of its batch before the update, nats per token.
        norm: global norm of its gradient before clipping.
        spike_begins: whether the detector reports that a loss spike begins here.
        burst_follows: whether the next batch is the first of the first burst.
    """

    step: int
    loss: float
    norm: float
    spike_begins: bool
    burst_follows: bool = False


class Action(NamedTuple):
    """The changes to one run before its next update, in this order.

    Attributes:
        rewind: go back at least so many updates, to a snapshot of weights, optimizer state and position in the data.
        skip: leave out so many batches from there.
        only_new: leave out all batches that were met before the rewind, if those are more.
        reset: all ``moments`` of the optimizer and their age; or the ``first_moment`` alone, while the age goes
            on; or the ``second_moment`` alone, with which the age begins anew.
        lr_factor: multiply the learning rate by this from now on, whatever it was multiplied by before; None leaves it.
        fresh_loss_scale: put the loss scale back to its initial state.
        rewind_weights: put the weights alone where they were at least so many updates ago; None and 0 leave them.
        rewind_moments: the same of the optimizer's state and its age.
        eps: Adam's epsilon from now on; None leaves it.
    """

    rewind: int = 0
    skip: int = 0
    only_new: bool = False
    reset: str = ""
    fresh_loss_scale: bool = False
    lr_factor: float | None = None
    rewind_weights: float | None = None
    rewind_moments: float | None = None
    eps: float | None = None


class Gate(NamedTuple):
    """How an update is changed while it is made; None changes nothing.

    Attributes:
        keep_r: whether the update takes place; without it weights and optimizer state stay as they are.
        lr_factor_r: factor of the learning rate.
    """

    keep_r: Tensor | None = None
    lr_factor_r: Tensor | None = None


@dataclass(frozen=True)
class Response:
    """A response; subclasses are frozen dataclasses that act between updates, or gate each update as it is made.

    Attributes:
        snapshot_every: updates between two snapshots; 0 takes none.
        snapshots: how many of them are kept.
        resets_loss_scale: whether it can ask for a fresh loss scale, which takes a run that has one.
    """

    snapshot_every = 0
    snapshots = 0
    resets_loss_scale: ClassVar = False

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        """Decide after an update of one run; ``memory`` is that run's, changed in place."""
        return None

    def gate(self, step: Tensor, loss_r: Tensor, norm_r: Tensor, usual_loss_r: Tensor) -> Gate:
        """Decide within an update, as a function of tensors; ``step`` is one number, or one of each run."""
        return Gate()

    def usual_loss(self, before: float, loss: float) -> float:
        """The loss to which ``gate`` compares the next one; infinity before the first."""
        return math.inf

    def objection(self, config: Any) -> str | None:
        """Why it cannot act in a run with this ``RunConfig``, as a refusal says it; None if it can."""
        return None


@dataclass(frozen=True)
class Rewinding(Response):
    """A response that goes back to a snapshot in memory.

    Attributes:
        rewind: updates to go back at least.
        most: how often a run may go back.
    """

    rewind: int = bounded(100, above=0)
    snapshot_every: int = bounded(25, above=0)
    snapshots: int = bounded(6, above=0)
    most: int = bounded(3, above=0)

    def __post_init__(self) -> None:
        check_reach(self, "rewind", self.rewind)


def check_reach(response: Response, key: str, updates: float) -> None:
    """Refuse to go back further than the snapshots of a response.

    Raises:
        ValueError: they do not keep so many updates.
    """
    every, count = response.snapshot_every, response.snapshots
    reach = every * (count - 1)
    if updates > reach:
        raise ValueError(
            f"{key}={updates:g} reaches further back than the snapshots: snapshot_every={every} "
            f"snapshots={count} keep {reach} steps; at least snapshots={math.ceil(updates / every) + 1}"
        )


def counted(memory: Memory, most: int) -> bool:
    """Count one more action; whether it is one of the first ``most``."""
    memory["actions"] = memory.get("actions", 0) + 1
    return memory["actions"] <= most


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
