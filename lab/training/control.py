"""Control of a fleet between its steps: reads each run after an update and carries out what its response asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.core.detectors import FLOOR_FOR, STALLED_FOR, WINDOW, SpikeWatch, window_statistics
from lab.core.schema import stack
from lab.responses.response import Action, Memory, Reading, Response
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.snapshots import Snapshots

FreshState = Callable[[str], Mapping[str, Tensor]]
Event = tuple[int, int, str, float, str]  # step, batch, kind, value, note


def is_controlled(config: RunConfig) -> bool:
    """Whether runs of this config are read after every update: with a burst, response, ledger or loss scale."""
    return any(group is not None for group in (config.burst, config.response, config.ledger, config.loss_scale))


def begin_readings(runs: int, device: torch.device) -> dict[str, Tensor]:
    """What an update writes down of each run ``[r]``, and the usual loss, which the next update reads."""
    readings = {name: torch.zeros(runs, dtype=torch.float64, device=device) for name in ("loss", "norm", "at_floor")}
    kept_r = torch.ones(runs, dtype=torch.float64, device=device)
    return {**readings, "kept": kept_r, "usual_loss": torch.full_like(kept_r, math.inf)}


@dataclass
class RunLog:
    """What control keeps of one run; a checkpoint stores it.

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
        restarts: how many of the ledger's have been carried out.
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
    spikes: int = 0
    rewound_steps: int = 0
    skipped_batches: int = 0
    left_out: int = 0
    left_out_in_a_row: int = 0

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> RunLog:
        """The log of which a checkpoint stored the fields."""
        return cls(**{**state, "watch": SpikeWatch(**state["watch"])})

    def forget_from(self, step: int) -> None:
        """Drop the losses of this step and later ones, from which training went back."""
        kept = sum(each < step for each in self.steps)
        self.watch.forget()
        del self.losses[kept:], self.steps[kept:]

    def first_bad(self) -> int:
        """The first step with a non-finite loss; -1 without one."""
        return next((step for step, loss in zip(self.steps, self.losses, strict=True) if not math.isfinite(loss)), -1)


class Control:
    """Watches every run of a fleet and moves each at its own pace.

    A run ends once it has made all its updates.  One that went back takes more moments than the others, whose final
    state is kept aside meanwhile.  So all runs make the same number of updates that count; what going back cost is in
    ``rewound_steps`` and ``skipped_batches``.  A run stalls, and ends, when ``STALLED_FOR`` updates in a row are left
    out, ``FLOOR_FOR`` at the floor of the loss scale, or more in all than it has steps.

    Args:
        configs: of each run.
        readings: as from ``begin_readings``; a step writes them.
        tensors: everything that a step changes, by name ``[r ...]``.
        fresh: the state of a link, or of the loss scale, before the first update, by names of ``tensors``.
    """

    def __init__(
        self,
        configs: Sequence[RunConfig],
        readings: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        fresh: FreshState,
    ) -> None:
        self.configs, self.steps, self.readings, self.tensors = configs, configs[0].steps, readings, tensors
        self.fresh = fresh
        self.responses: list[Response] = [c.response.entry if c.response else Response() for c in configs]
        self.bursts = [config.burst.entry if config.burst else None for config in configs]
        self.restarts_in_force = [0] * len(configs)  # of each run, in the config of the fleet
        self.clock = Clock.begin(len(configs))
        self.snapshot_every = self.responses[0].snapshot_every
        self.snapshots = Snapshots(tensors, self.responses[0].snapshots)
        self.logs = [RunLog() for _ in configs]
        self.moments = 0
        self.final: dict[int, dict[str, Tensor]] = {}  # states of the runs that have ended

    @property
    def has_ended(self) -> bool:
        """Whether all runs have."""
        return len(self.final) == len(self.logs)

    def steps_now(self) -> tuple[int, ...]:
        """The step that each run makes next; -1 for one that has ended."""
        return tuple(-1 if run in self.final else step for run, step in enumerate(self.clock.step_r.tolist()))

    def before_step(self) -> None:
        """Take a snapshot if one is due, and note bursts that begin."""
        if self.snapshot_every and self.moments % self.snapshot_every == 0:
            self.snapshots.take(self.clock)
        for run, (burst, log) in enumerate(zip(self.bursts, self.logs, strict=True)):
            if burst and run not in self.final:
                batch = int(self.clock.batch_r[run])
                was_in_burst, log.in_burst = log.in_burst, burst.covers(batch, self.steps)
                if log.in_burst and not was_in_burst:
                    self._note(run, "burst", burst.share(batch, self.steps), "share of the sequences")

    def restarted(self) -> RunConfig | None:
        """Carry out the restarts due; the config with which the fleet goes on if they, or a checkpoint, bring another.

        Each run restarts at its own step: where updates are left out, runs of a fleet do not keep pace.
        """
        for run in range(len(self.logs)):
            self._carry_out_restarts(run)
        carried_out = [log.restarts for log in self.logs]
        if carried_out == self.restarts_in_force:
            return None
        self.restarts_in_force = carried_out
        config: RunConfig = stack([self._in_force(run) for run in range(len(self.logs))], self.readings["loss"].device)
        return config

    def _in_force(self, run: int) -> RunConfig:
        """The config of a run after the restarts carried out."""
        return self.configs[run].phases[self.logs[run].restarts]

    def _carry_out_restarts(self, run: int) -> None:
        ledger, log, step = self.configs[run].ledger, self.logs[run], int(self.clock.step_r[run])
        while ledger and log.restarts < len(ledger.restarts) and ledger.restarts[log.restarts].step <= step:
            self._note(run, "restart", step, ledger.entries[log.restarts])
            if ledger.restarts[log.restarts].fresh_loss_scale:
                self._begin_anew(run, "loss_scale")
            before = self._in_force(run).optimizer.links
            log.restarts += 1
            self._begin_links(run, [name for name in self._in_force(run).optimizer.links if name not in before])

    def _begin_links(self, run: int, names: Sequence[str]) -> None:
        """Give links their fresh state, and the optimizer another age if one of them makes the direction."""
        for name in names:
            self._begin_anew(run, name)
        if set(names) & set(self._rules(run)):
            self.clock.age_r[run] = 0

    def _rules(self, run: int) -> list[str]:
        """The links that make the direction, such as Adam."""
        return [name for name, link in self._in_force(run).optimizer.links.items() if link.makes == "direction"]

    @torch.no_grad()
    def _begin_anew(self, run: int, name: str) -> None:
        for key, tensor in self.fresh(name).items():
            self.tensors[key][run].copy_(tensor[run])

    def after_step(self) -> None:
        """Read what the update measured, count it, and carry out what the responses ask for."""
        self.moments += 1
        losses, norms, kept, at_floor = (self.readings[name].tolist() for name in ("loss", "norm", "kept", "at_floor"))
        medians, deviations = (number_r.tolist() for number_r in self._statistics())
        for run, (response, log) in enumerate(zip(self.responses, self.logs, strict=True)):
            if run in self.final:
                continue
            if kept[run] or math.isfinite(losses[run]):
                reading = self._read(run, losses[run], norms[run], medians[run], deviations[run])
            else:  # an overflow: the run is as it was
                reading = Reading(int(self.clock.step_r[run]), losses[run], norms[run], spike_begins=False)
            reading = reading._replace(burst_follows=self._burst_follows(run))
            log.usual_loss = response.usual_loss(log.usual_loss, reading.loss)
            self._count(run, reading, updated=bool(kept[run]))
            action = response.act(reading, log.memory)
            if action:
                self._carry_out(run, action)
            self._end_if_done(run, at_floor[run])
        if any(math.isfinite(log.usual_loss) for log in self.logs):
            self._write_usual_losses()

    def _burst_follows(self, run: int) -> bool:
        burst = self.bursts[run]
        return burst is not None and int(self.clock.batch_r[run]) + 1 == burst.batches(self.steps)[0].start

    def _write_usual_losses(self) -> None:
        usual_losses = [log.usual_loss for log in self.logs]
        self.readings["usual_loss"].copy_(torch.tensor(usual_losses, dtype=torch.float64))

    def _statistics(self) -> tuple[Any, Any]:
        """Median and deviation ``[r]`` of the losses before this one."""
        window_rw = np.full((len(self.logs), WINDOW), math.nan)
        for row_w, log in zip(window_rw, self.logs, strict=True):
            if log.losses:
                row_w[: len(log.losses)] = log.losses[-WINDOW:]
        return window_statistics(window_rw)

    def _read(self, run: int, loss: float, norm: float, median: float, deviation: float) -> Reading:
        """Show a loss to the detector, and note spikes that begin and end here."""
        log, step = self.logs[run], int(self.clock.step_r[run])
        span = log.watch.add(loss, median, deviation)
        log.losses.append(loss)
        log.steps.append(step)
        if log.watch.begins:
            log.spikes, log.peak = log.spikes + 1, -math.inf
            self._note(run, "spike", loss, f"usual loss {log.watch.usual:.4g}")
        if span or log.watch.first >= 0:
            log.peak = max(log.peak, loss)
        if span:
            self._end_spike(run, span.ending)
        return Reading(step, loss, norm, log.watch.begins)

    def _end_spike(self, run: int, ending: str) -> None:
        log = self.logs[run]
        log.ending = ending
        self._note(run, ending, log.peak, "largest loss of the spike")

    def _count(self, run: int, reading: Reading, *, updated: bool) -> None:
        log = self.logs[run]
        if not updated:
            log.left_out, log.skipped_batches = log.left_out + 1, log.skipped_batches + 1
            if not log.left_out_in_a_row:
                self._note(run, "skip_update", reading.norm, "gradient norm")
        log.left_out_in_a_row = 0 if updated else log.left_out_in_a_row + 1
        self.clock.tick(run, updated=updated)

    @torch.no_grad()
    def _carry_out(self, run: int, action: Action) -> None:
        log, clock = self.logs[run], self.clock
        if action.rewind:
            before = int(clock.step_r[run])
            spiking = log.watch.first >= 0
            self.snapshots.go_back(run, clock, action.rewind)
            step = int(clock.step_r[run])
            log.forget_from(step)
            log.rewound_steps += before - step
            if spiking:
                self._end_spike(run, "recovered")
            self._note(run, "rewind", before - step, f"from step {before}")
        if action.skip:
            self._note(run, "skip_batches", action.skip, "")
            clock.batch_r[run] += action.skip
            log.skipped_batches += action.skip
        if action.reset:
            self._begin_links(run, self._rules(run))
            self._note(run, "reset", 0.0, "moments of the optimizer")
        if action.fresh_loss_scale:
            self._note(run, "fresh_loss_scale", float(self.tensors["loss_scale.scale"][run]), "scale before")
            self._begin_anew(run, "loss_scale")
        for part, updates in (("weights", action.rewind_weights), ("moments", action.rewind_moments)):
            if updates is not None:
                is_weights = part == "weights"
                gone_back = self.snapshots.restore_part(run, clock, updates, weights=is_weights) if updates else 0
                self._note(run, f"rewind_{part}", gone_back, "updates gone back; the data go on")
        if action.lr_factor is not None and action.lr_factor != clock.lr_factor_r[run]:
            clock.lr_factor_r[run] = action.lr_factor
            self._note(run, "lr_factor", action.lr_factor, "")

    @torch.no_grad()
    def _end_if_done(self, run: int, at_floor: float) -> None:
        log = self.logs[run]
        stalled = at_floor >= FLOOR_FOR or log.left_out_in_a_row >= STALLED_FOR or log.left_out > self.steps
        if not stalled and self.clock.step_r[run] < self.steps:
            return
        if stalled:
            log.ending = "stalled"
            self._note(run, "stalled", log.left_out, "updates left out")
        elif log.watch.first >= 0:
            self._end_spike(run, "stuck")
        self.final[run] = {name: tensor[run].clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def restore_final(self) -> None:
        """Put every run into the state in which it ended."""
        for run, tensors in self.final.items():
            for name, tensor in tensors.items():
                self.tensors[name][run].copy_(tensor)

    def _note(self, run: int, kind: str, value: float, note: str) -> None:
        event = int(self.clock.step_r[run]), int(self.clock.batch_r[run]), kind, float(value), note
        self.logs[run].events.append(event)

    def outcome(self, run: int) -> dict[str, Any]:
        """Columns of a run's record."""
        log = self.logs[run]
        return {name: getattr(log, name) for name in ("ending", "spikes", "rewound_steps", "skipped_batches")}

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores besides the fleet's tensors."""
        logs = [asdict(log) for log in self.logs]
        ring = self.snapshots.ring
        return {
            "clock": self.clock.state(), "logs": logs, "moments": self.moments, "ring": ring, "final": self.final
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        device = self.readings["loss"].device
        self.clock.restore(state["clock"])
        self.logs = [RunLog.restored(log) for log in state["logs"]]
        self.moments = state["moments"]
        self.snapshots.ring = [
            {**snapshot, "tensors": {name: tensor.to(device) for name, tensor in snapshot["tensors"].items()}}
            for snapshot in state["ring"]
        ]
        self.final = {
            run: {name: tensor.to(device) for name, tensor in tensors.items()}
            for run, tensors in state["final"].items()
        }
        self._write_usual_losses()
