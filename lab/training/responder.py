"""The responder of a controlled fleet: asks each run's response what to do after an update, and carries it out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lab.responses.response import Action, Reading, Response
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.restarts import RestartSchedule
from lab.training.run_log import RunLog
from lab.training.snapshots import Snapshots
from lab.training.state import TrainingState


class Responder:
    """Carries out on single runs what their responses ask for.

    Args:
        configs: of each run.
        state: of the fleet.
        clock: where each run stands.
        logs: of each run.
        restarts: what resets an optimizer or a loss scale.
    """

    def __init__(
        self,
        configs: Sequence[RunConfig],
        state: TrainingState,
        clock: Clock,
        logs: Sequence[RunLog],
        restarts: RestartSchedule,
    ) -> None:
        self.state, self.clock, self.logs, self.restarts = state, clock, logs, restarts
        self.responses: list[Response] = [c.response.entry if c.response else Response() for c in configs]
        self.snapshot_every = self.responses[0].snapshot_every
        self.snapshots = Snapshots(state.tensors(), self.responses[0].snapshots)

    def take_snapshot(self, iteration: int) -> None:
        """Take a snapshot of all runs if one is due before this iteration."""
        if self.snapshot_every and iteration % self.snapshot_every == 0:
            self.snapshots.take(self.clock)

    def respond(self, run: int, reading: Reading) -> None:
        """Show a reading to the response of a run, and carry out what it asks for."""
        response, log = self.responses[run], self.logs[run]
        log.usual_loss = response.usual_loss(log.usual_loss, reading.loss)
        action = response.act(reading, log.memory)
        if action:
            self.carry_out(run, action)

    def write_usual_losses(self) -> None:
        """Write down the usual losses for the gates of the next update."""
        usual_losses = [log.usual_loss for log in self.logs]
        self.state.readings["usual_loss"].copy_(torch.tensor(usual_losses, dtype=torch.float64))

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
            log.note(clock.at(run), "fresh_loss_scale", float(self.state.loss_scale["scale"][run]), "scale before")
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
