"""Where each run of a controlled fleet stands: its clock, its log, and snapshots from which it may go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.core.spike_trigger import SpikeTrigger
from lab.responses.response import Memory


@dataclass
class Clock:
    """Where each run of a fleet stands before its next update.

    Attributes:
        step_r: updates made, which the schedule of the learning rate follows.
        batch_r: index of the batch of the data that comes next.
        age_r: updates since the optimizer's state was fresh, which Adam's bias correction follows.
        lr_factor_r: what the learning rate is multiplied by.
    """

    step_r: NDArray[np.int64]
    batch_r: NDArray[np.int64]
    age_r: NDArray[np.int64]
    lr_factor_r: NDArray[np.float64]

    @classmethod
    def begin(cls, runs: int) -> Clock:
        """The clock before the first update."""
        step_r, batch_r, age_r = np.zeros((3, runs), dtype=np.int64)
        return cls(step_r, batch_r, age_r, np.ones(runs))

    def at(self, run: int) -> tuple[int, int]:
        """The step that a run makes next, and the batch of the data that it sees."""
        return int(self.step_r[run]), int(self.batch_r[run])

    def tick(self, run: int, *, updated: bool) -> None:
        """Count a batch of a run, and its update unless it was left out."""
        self.batch_r[run] += 1
        self.step_r[run] += updated
        self.age_r[run] += updated

    def position(self) -> dict[str, list[int]]:
        """Where all runs stand, as plain numbers; a snapshot keeps it."""
        return {name: getattr(self, name).tolist() for name in ("step_r", "batch_r", "age_r")}

    def go_back(self, run: int, position: Mapping[str, list[int]]) -> None:
        """Put one run where a snapshot was taken; its factor of the learning rate stays."""
        for name, numbers in position.items():
            getattr(self, name)[run] = numbers[run]

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {**self.position(), "lr_factor_r": self.lr_factor_r.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        for name, numbers in state.items():
            getattr(self, name)[:] = numbers


At = tuple[int, int]  # the step and the batch of the data at which something happens
Event = tuple[int, int, str, float, str]  # step, batch, kind, value, note


@dataclass
class RunLog:
    """The state of control for one run; a checkpoint stores it.

    Attributes:
        losses: of the updates that led to the present state, and of those left out on the way.
        steps: the step of each of them.
        watch: what triggers the response.
        memory: of the response.
        events: what happened.
        ending: of the last spike.
        peak: largest loss of the spike under way.
        usual_loss: to which the response compares the next one.
        in_burst: whether the last batch held sequences of a burst.
        restarts: how many of the restart schedule's have been carried out.
        eps: Adam's epsilon, if the response set it.
    """

    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    watch: SpikeTrigger = field(default_factory=SpikeTrigger)
    memory: Memory = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ending: str = "none"
    peak: float = -math.inf
    usual_loss: float = math.inf
    in_burst: bool = False
    restarts: int = 0
    eps: float | None = None
    spikes: int = 0
    rewound_steps: int = 0
    skipped_batches: int = 0
    left_out: int = 0
    left_out_in_a_row: int = 0

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> RunLog:
        """The log whose fields a checkpoint stored."""
        return cls(**{**state, "watch": SpikeTrigger(**state["watch"])})

    def note(self, at: At, kind: str, value: float, note: str = "") -> None:
        """Add an event."""
        self.events.append((*at, kind, float(value), note))

    def add(self, at: At, loss: float, median: float, deviation: float) -> bool:
        """Add the loss of an update, with median and deviation of those before; returns whether a spike begins.

        Spikes that begin and end here are noted.
        """
        ending = self.watch.add(loss, median, deviation)
        self.losses.append(loss)
        self.steps.append(at[0])
        if self.watch.begins:
            self.spikes, self.peak = self.spikes + 1, -math.inf
            self.note(at, "spike", loss, f"usual loss {self.watch.usual:.4g}")
        if ending or self.in_spike:
            self.peak = max(self.peak, loss)
        if ending:
            self.end_spike(at, ending)
        return self.watch.begins

    @property
    def in_spike(self) -> bool:
        """Whether a spike is under way."""
        return self.watch.first >= 0

    def end_spike(self, at: At, ending: str) -> None:
        """Note how a spike ended."""
        self.ending = ending
        self.note(at, ending, self.peak, "largest loss of the spike")

    def count(self, at: At, norm: float, *, updated: bool) -> None:
        """Count an update that was made or left out; the first of several left out in a row is noted."""
        if updated:
            self.left_out_in_a_row = 0
            return
        if not self.left_out_in_a_row:
            self.note(at, "skip_update", norm, "gradient norm")
        self.left_out, self.skipped_batches = self.left_out + 1, self.skipped_batches + 1
        self.left_out_in_a_row += 1

    def forget_from(self, step: int) -> None:
        """Drop the losses of this step and later ones, from which training went back."""
        kept = sum(earlier < step for earlier in self.steps)
        self.watch.forget()
        del self.losses[kept:], self.steps[kept:]

    def first_bad(self) -> int:
        """The first step with a non-finite loss; -1 without one."""
        return next((step for step, loss in zip(self.steps, self.losses, strict=True) if not math.isfinite(loss)), -1)

    def outcome(self) -> dict[str, Any]:
        """Columns of the run's record."""
        return {name: getattr(self, name) for name in ("ending", "spikes", "rewound_steps", "skipped_batches")}


Snapshot = dict[str, Any]  # position of the clock, tensors, and which runs may still go back to it


class Snapshots:
    """A ring of snapshots of all runs; a run that went back may no longer use those taken after.

    Args:
        tensors: the state of the fleet ``[r ...]`` by name, which is copied and restored.
        most: how many snapshots are kept.
    """

    def __init__(self, tensors: Mapping[str, Tensor], most: int) -> None:
        self.tensors, self.most = tensors, most
        self.ring: list[Snapshot] = []

    @torch.no_grad()
    def take(self, clock: Clock) -> None:
        """Copy the present state, in place of the oldest copy once the ring is full."""
        if len(self.ring) == self.most:
            self.ring.pop(0)  # before its memory is needed again
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        position = clock.position()
        self.ring.append({"position": position, "tensors": copies, "usable_r": [True] * len(position["step_r"])})

    @torch.no_grad()
    def go_back(self, run: int, clock: Clock, updates: int) -> None:
        """Restore one run from its newest snapshot at least so many updates back, or else from its oldest."""
        index = self._newest(run, clock, updates)
        for name, tensor in self.tensors.items():
            tensor[run].copy_(self.ring[index]["tensors"][name][run])
        clock.go_back(run, self.ring[index]["position"])
        for later in self.ring[index + 1 :]:
            later["usable_r"][run] = False

    @torch.no_grad()
    def restore_part(self, run: int, clock: Clock, updates: float, *, weights: bool) -> int:
        """As ``go_back``, but of one run's weights alone, or of its optimizer's state and age alone; the rest goes on.

        Returns:
            Updates between that snapshot and now.
        """
        snapshot = self.ring[self._newest(run, clock, updates)]
        for name, tensor in self.tensors.items():
            if name.startswith("weight.") == weights:
                tensor[run].copy_(snapshot["tensors"][name][run])
        if not weights:
            clock.age_r[run] = snapshot["position"]["age_r"][run]
        return int(clock.step_r[run]) - int(snapshot["position"]["step_r"][run])

    def _newest(self, run: int, clock: Clock, updates: float) -> int:
        """Index of the newest snapshot of a run that is at least so many updates back, or else of its oldest."""
        usable = [index for index, snapshot in enumerate(self.ring) if snapshot["usable_r"][run]]
        limit = clock.step_r[run] - updates
        return max((i for i in usable if self.ring[i]["position"]["step_r"][run] <= limit), default=usable[0])
