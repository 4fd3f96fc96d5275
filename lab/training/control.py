"""Control of a fleet between its steps: each run is read after an update, responded to, and ended in its own time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lab.core.detectors import FLOOR_FOR, STALLED_FOR
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.monitor import Monitor
from lab.training.responder import Responder
from lab.training.restarts import Reset, RestartSchedule
from lab.training.run_log import RunLog
from lab.training.state import TrainingState


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
        self.steps, self.readings, self.tensors = configs[0].steps, state.readings, state.tensors()
        self.clock, self.logs = Clock.begin(len(configs)), [RunLog() for _ in configs]
        self.monitor = Monitor(configs, self.clock, self.logs)
        self.restarts = RestartSchedule(configs, self.clock, self.logs, reset)
        self.responder = Responder(configs, state, self.clock, self.logs, self.restarts)
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
        """Take a snapshot if one is due, and note bursts that begin."""
        self.responder.take_snapshot(self.iterations)
        for run in self._running():
            self.monitor.look_ahead(run)

    def after_step(self) -> None:
        """Read what the update measured, count it, and carry out what the responses ask for."""
        self.iterations += 1
        measured = {name: self.readings[name].tolist() for name in ("loss", "norm", "kept", "at_floor")}
        for run, reading in self.monitor.read(self._running(), measured).items():
            updated = bool(measured["kept"][run])
            self.logs[run].count(self.clock.at(run), reading.norm, updated=updated)
            self.clock.tick(run, updated=updated)
            self.responder.respond(run, reading)
            self._end_if_done(run, measured["at_floor"][run])
        if any(math.isfinite(log.usual_loss) for log in self.logs):
            self.responder.write_usual_losses()

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
            "moments": self.iterations,
            "ring": self.responder.snapshots.ring,
            "final": self.final,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        device = self.readings["loss"].device
        self.clock.restore(state["clock"])
        self.logs[:] = [RunLog.restored(log) for log in state["logs"]]
        self.iterations = state["moments"]
        self.responder.snapshots.ring = [
            {**snapshot, "tensors": {name: tensor.to(device) for name, tensor in snapshot["tensors"].items()}}
            for snapshot in state["ring"]
        ]
        self.final = {
            run: {name: tensor.to(device) for name, tensor in tensors.items()}
            for run, tensors in state["final"].items()
        }
        self.responder.write_usual_losses()
