"""Control of a fleet between its steps: each run is read after an update, responded to, and ended in its own time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.core.spike_trigger import STALLED_FOR
from lab.core.windows import WINDOW, window_statistics
from lab.optim.links import Link
from lab.responses.response import Action, Reading, Response
from lab.training.clock import Clock, RunLog, Snapshots
from lab.training.config import RunConfig
from lab.training.step import TrainingState

# Resets a run's state of a link, or of the loss scale: all of it, or the tensors whose names begin so.
Reset = Callable[..., None]
# How names of the tensors begin that are reset.
MOMENTS = {"moments": "", "first_moment": "mean.", "second_moment": "square."}
# Overflows in a row at the floor of the loss scale, after which a run has stalled.
FLOOR_FOR = 20


class Restarts:
    """Restarts each run at its own step: where updates are left out, runs of a fleet do not keep pace.

    Args:
        configs: of each run before its first restart.
        clock: where each run stands.
        logs: of each run, with the number of its restarts carried out.
        reset: resets a state.
    """

    def __init__(self, configs: Sequence[RunConfig], clock: Clock, logs: Sequence[RunLog], reset: Reset) -> None:
        self.configs, self.clock, self.logs, self.reset = configs, clock, logs, reset
        # of each run, the restarts and the epsilon in the config that the fleet goes on with
        self.known: list[tuple[int, float | None]] = [(0, None)] * len(configs)

    def due(self) -> list[RunConfig] | None:
        """Carry out the restarts due; the configs with which runs go on if these, or a checkpoint, bring others."""
        for run in range(len(self.logs)):
            self._carry_out(run)
        carried_out = [(log.restarts, log.eps) for log in self.logs]
        if carried_out == self.known:
            return None
        self.known = carried_out
        return [self._in_force(run) for run in range(len(self.logs))]

    def _in_force(self, run: int) -> RunConfig:
        """The config of a run after the restarts carried out, with the epsilon that its response set."""
        config, eps = self.configs[run].phases[self.logs[run].restarts], self.logs[run].eps
        return config if eps is None else replace(config, optimizer=config.optimizer.with_number("eps", eps))

    def _carry_out(self, run: int) -> None:
        schedule, log, at = self.configs[run].restarts, self.logs[run], self.clock.at(run)
        while schedule and log.restarts < len(schedule.restarts) and schedule.restarts[log.restarts].step <= at[0]:
            log.note(at, "restart", at[0], schedule.entries[log.restarts])
            if schedule.restarts[log.restarts].fresh_loss_scale:
                self.reset(run, "loss_scale")
            before = self._in_force(run).optimizer.links
            log.restarts += 1
            links = self._in_force(run).optimizer.links
            self._reset_links(run, {name: link for name, link in links.items() if name not in before})

    def reset_optimizer(self, run: int, moments: str) -> None:
        """Reset the links that make the direction, such as Adam, and with them the optimizer's age.

        Args:
            run: whose links they are.
            moments: all their ``moments``; or the ``first_moment`` alone, without the age; or the ``second_moment``.
        """
        links = self._in_force(run).optimizer.links
        makers = {name: link for name, link in links.items() if link.makes == "direction"}
        age = int(self.clock.age_r[run])
        self._reset_links(run, makers, MOMENTS[moments])
        if moments == "first_moment":
            self.clock.age_r[run] = age

    def _reset_links(self, run: int, links: Mapping[str, Link], begin_of_names: str = "") -> None:
        for name in links:
            self.reset(run, name, begin_of_names)
        if any(link.makes == "direction" for link in links.values()):
            self.clock.age_r[run] = 0


class Control:
    """Lets every run of a fleet go at its own pace, from its first update to its end.

    A run ends once it has made all its updates.  One that went back takes more iterations than the others, whose final
    state is kept aside meanwhile.  So all runs make the same number of updates that count; what going back cost is in
    ``rewound_steps`` and ``skipped_batches``.  A run stalls, and ends, when ``STALLED_FOR`` updates in a row are left
    out, ``FLOOR_FOR`` at the floor of the loss scale, or more in all than it has steps.

    Args:
        configs: of each run.
        state: of the fleet; a step writes its readings.
        reset: puts a run's state of a link, or of the loss scale, to what it was before the first update.
    """

    def __init__(self, configs: Sequence[RunConfig], state: TrainingState, reset: Reset) -> None:
        self.steps, self.tensors = configs[0].steps, state.tensors()
        self.readings, self.loss_scale = state.readings, state.loss_scale
        self.clock, self.logs = Clock.begin(len(configs)), [RunLog() for _ in configs]
        self.restarts = Restarts(configs, self.clock, self.logs, reset)
        self.bursts = [config.bad_batches.entry if config.bad_batches else None for config in configs]
        self.responses = [config.response.entry if config.response else Response() for config in configs]
        self.snapshot_every = self.responses[0].snapshot_every
        self.snapshots = Snapshots(self.tensors, self.responses[0].snapshots)
        self.iterations = 0  # steps of the fleet, in which a run may go back or leave out its update
        self.final: dict[int, dict[str, Tensor]] = {}  # states of the runs that have ended

    @property
    def has_ended(self) -> bool:
        """Whether all runs have."""
        return len(self.final) == len(self.logs)

    def steps_now(self) -> tuple[int, ...]:
        """The step that each run makes next; -1 for one that has ended."""
        return tuple(-1 if run in self.final else step for run, step in enumerate(self.clock.step_r.tolist()))

    def _running(self) -> list[int]:
        return [run for run in range(len(self.logs)) if run not in self.final]

    def before_step(self) -> None:
        """Take a snapshot if one is due, and note bursts that begin with the next batch."""
        if self.snapshot_every and self.iterations % self.snapshot_every == 0:
            self.snapshots.take(self.clock)
        for run in self._running():
            burst, log, at = self.bursts[run], self.logs[run], self.clock.at(run)
            if burst:
                was_in_burst, log.in_burst = log.in_burst, burst.covers(at[1], self.steps)
                if log.in_burst and not was_in_burst:
                    log.note(at, "burst", burst.share(at[1], self.steps), "share of the sequences")

    def after_step(self) -> None:
        """Read what the update measured, count it, and carry out what the responses ask for."""
        self.iterations += 1
        measured = {name: self.readings[name].tolist() for name in ("loss", "norm", "kept", "at_floor")}
        for run, reading in self.read(measured).items():
            updated = bool(measured["kept"][run])
            self.logs[run].count(self.clock.at(run), reading.norm, updated=updated)
            self.clock.tick(run, updated=updated)
            self._respond(run, reading)
            self._end_if_done(run, measured["at_floor"][run])
        if any(math.isfinite(log.usual_loss) for log in self.logs):
            self._write_usual_losses()

    def read(self, measured: Mapping[str, Sequence[float]]) -> dict[int, Reading]:
        """Log the losses of the runs under way, and spikes that begin or end with them.

        Args:
            measured: ``loss``, ``norm`` and ``kept`` of every run.
        """
        medians, deviations = (number_r.tolist() for number_r in self._statistics())
        readings = {}
        for run in self._running():
            loss, at, spike_begins = measured["loss"][run], self.clock.at(run), False
            if measured["kept"][run] or math.isfinite(loss):  # else an overflow: the run is as it was
                spike_begins = self.logs[run].add(at, loss, medians[run], deviations[run])
            burst = self.bursts[run]
            burst_follows = burst is not None and at[1] + 1 == burst.batches(self.steps)[0].start
            readings[run] = Reading(at[0], loss, measured["norm"][run], spike_begins, burst_follows)
        return readings

    def _statistics(self) -> tuple[Any, Any]:
        """Median and deviation ``[r]`` of the losses before this one."""
        window_rw = np.full((len(self.logs), WINDOW), math.nan)
        for row_w, log in zip(window_rw, self.logs, strict=True):
            if log.losses:
                row_w[: len(log.losses)] = log.losses[-WINDOW:]
        return window_statistics(window_rw)

    def _respond(self, run: int, reading: Reading) -> None:
        """Show a reading to the response of a run, and carry out what it asks for."""
        response, log = self.responses[run], self.logs[run]
        log.usual_loss = response.usual_loss(log.usual_loss, reading.loss)
        action = response.act(reading, log.memory)
        if action:
            self.carry_out(run, action)

    def _write_usual_losses(self) -> None:
        """Write down the usual losses for the gates of the next update."""
        usual_losses = [log.usual_loss for log in self.logs]
        self.readings["usual_loss"].copy_(torch.tensor(usual_losses, dtype=torch.float64))

    @torch.no_grad()
    def carry_out(self, run: int, action: Action) -> None:
        """Do to one run what its response asks for, and note it."""
        log, clock = self.logs[run], self.clock
        _, batch = clock.at(run)
        if action.rewind:
            self._rewind(run, action.rewind)
        skip = max(action.skip, batch - clock.at(run)[1]) if action.only_new else action.skip
        if skip:
            log.note(clock.at(run), "skip_batches", skip)
            clock.batch_r[run] += skip
            log.skipped_batches += skip
        if action.reset:
            self.restarts.reset_optimizer(run, action.reset)
            log.note(clock.at(run), "reset", 0.0, f"{action.reset.replace('_', ' ')} of the optimizer")
        if action.fresh_loss_scale:
            log.note(clock.at(run), "fresh_loss_scale", float(self.loss_scale["scale"][run]), "scale before")
            self.restarts.reset(run, "loss_scale")
        for part, updates in (("weights", action.rewind_weights), ("moments", action.rewind_moments)):
            if updates is not None:
                is_weights = part == "weights"
                gone_back = self.snapshots.restore_part(run, clock, updates, weights=is_weights) if updates else 0
                log.note(clock.at(run), f"rewind_{part}", gone_back, "updates gone back; the data go on")
        if action.lr_factor is not None and action.lr_factor != clock.lr_factor_r[run]:
            clock.lr_factor_r[run] = action.lr_factor
            log.note(clock.at(run), "lr_factor", action.lr_factor)
        if action.eps is not None:
            log.eps = action.eps
            log.note(clock.at(run), "eps", action.eps, "epsilon of the optimizer")

    def _rewind(self, run: int, updates: int) -> None:
        log, (before, _), was_in_spike = self.logs[run], self.clock.at(run), self.logs[run].in_spike
        self.snapshots.go_back(run, self.clock, updates)
        at = self.clock.at(run)
        log.forget_from(at[0])
        log.rewound_steps += before - at[0]
        if was_in_spike:
            log.end_spike(at, "recovered")
        log.note(at, "rewind", before - at[0], f"from step {before}")

    @torch.no_grad()
    def _end_if_done(self, run: int, at_floor: float) -> None:
        log, at = self.logs[run], self.clock.at(run)
        stalled = at_floor >= FLOOR_FOR or log.left_out_in_a_row >= STALLED_FOR or log.left_out > self.steps
        if not stalled and at[0] < self.steps:
            return
        if stalled:
            log.ending = "stalled"
            log.note(at, "stalled", log.left_out, "updates left out")
        elif log.in_spike:
            log.end_spike(at, "stuck")
        self.final[run] = {name: tensor[run].clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def restore_final(self) -> None:
        """Put every run into the state in which it ended."""
        for run, tensors in self.final.items():
            for name, tensor in tensors.items():
                self.tensors[name][run].copy_(tensor)

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores besides the fleet's tensors."""
        return {
            "clock": self.clock.state(),
            "logs": [asdict(log) for log in self.logs],
            "iterations": self.iterations,
            "ring": self.snapshots.ring,
            "final": self.final,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        device = self.readings["loss"].device
        self.clock.restore(state["clock"])
        self.logs[:] = [RunLog.restored(log) for log in state["logs"]]
        self.iterations = state["iterations"] if "iterations" in state else state["moments"]  # in older checkpoints
        self.snapshots.ring = [
            {**snapshot, "tensors": {name: tensor.to(device) for name, tensor in snapshot["tensors"].items()}}
            for snapshot in state["ring"]
        ]
        self.final = {
            run: {name: tensor.to(device) for name, tensor in tensors.items()}
            for run, tensors in state["final"].items()
        }
        self._write_usual_losses()
