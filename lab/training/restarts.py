"""Restarts of a controlled fleet: which config is in force for each run, and what begins anew with another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lab.optim.links import Link
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.run_log import RunLog

# Resets a run's state of a link, or of the loss scale: all of it, or the tensors whose names begin so.
Reset = Callable[..., None]
# How names of the tensors begin that are reset.
MOMENTS = {"moments": "", "first_moment": "mean.", "second_moment": "square."}


class RestartSchedule:
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
        ledger, log, at = self.configs[run].ledger, self.logs[run], self.clock.at(run)
        while ledger and log.restarts < len(ledger.restarts) and ledger.restarts[log.restarts].step <= at[0]:
            log.note(at, "restart", at[0], ledger.entries[log.restarts])
            if ledger.restarts[log.restarts].fresh_loss_scale:
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
