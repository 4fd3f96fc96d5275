"""Responses to loss spikes: each reads one run after each update and may ask for an action."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from lab.core.schema import bounded

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
