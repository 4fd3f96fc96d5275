"""The log of one run under control: its losses, loss spikes and events, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.core.detectors import SpikeWatch
from lab.responses.response import Memory

At = tuple[int, int]  # the step and the batch of the data at which something happens
Event = tuple[int, int, str, float, str]  # step, batch, kind, value, note


@dataclass
class RunLog:
    """The state of control for one run; a checkpoint stores it.

    Attributes:
        losses: of the updates that led to the present state, and of those left out on the way.
        steps: the step of each of them.
        watch: the detector of loss spikes.
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
    watch: SpikeWatch = field(default_factory=SpikeWatch)
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
        """The log of which a checkpoint stored the fields."""
        return cls(**{**state, "watch": SpikeWatch(**state["watch"])})

    def note(self, at: At, kind: str, value: float, note: str = "") -> None:
        """Add an event."""
        self.events.append((*at, kind, float(value), note))

    def add(self, at: At, loss: float, median: float, deviation: float) -> bool:
        """Add the loss of an update, with median and deviation of those before; returns whether a spike begins.

        Spikes that begin and end here are noted.
        """
        span = self.watch.add(loss, median, deviation)
        self.losses.append(loss)
        self.steps.append(at[0])
        if self.watch.begins:
            self.spikes, self.peak = self.spikes + 1, -math.inf
            self.note(at, "spike", loss, f"usual loss {self.watch.usual:.4g}")
        if span or self.in_spike:
            self.peak = max(self.peak, loss)
        if span:
            self.end_spike(at, span.ending)
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
        kept = sum(each < step for each in self.steps)
        self.watch.forget()
        del self.losses[kept:], self.steps[kept:]

    def first_bad(self) -> int:
        """The first step with a non-finite loss; -1 without one."""
        return next((step for step, loss in zip(self.steps, self.losses, strict=True) if not math.isfinite(loss)), -1)

    def outcome(self) -> dict[str, Any]:
        """Columns of the run's record."""
        return {name: getattr(self, name) for name in ("ending", "spikes", "rewound_steps", "skipped_batches")}
