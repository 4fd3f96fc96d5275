"""The monitor of a controlled fleet: reads what each update measured, and logs losses, loss spikes and bursts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lab.core.detectors import WINDOW, window_statistics
from lab.responses.response import Reading
from lab.training.clock import Clock
from lab.training.config import RunConfig
from lab.training.run_log import RunLog


class Monitor:
    """Reads every run of a fleet; all it changes is their logs.

    Args:
        configs: of each run.
        clock: where each run stands.
        logs: of each run.
    """

    def __init__(self, configs: Sequence[RunConfig], clock: Clock, logs: Sequence[RunLog]) -> None:
        self.clock, self.logs, self.steps = clock, logs, configs[0].steps
        self.bursts = [config.burst.entry if config.burst else None for config in configs]

    def look_ahead(self, run: int) -> None:
        """Note a burst that begins with the next batch."""
        burst, log, at = self.bursts[run], self.logs[run], self.clock.at(run)
        if burst:
            was_in_burst, log.in_burst = log.in_burst, burst.covers(at[1], self.steps)
            if log.in_burst and not was_in_burst:
                log.note(at, "burst", burst.share(at[1], self.steps), "share of the sequences")

    def read(self, runs: Iterable[int], measured: Mapping[str, Sequence[float]]) -> dict[int, Reading]:
        """Log the losses of these runs, and spikes that begin or end with them.

        Args:
            runs: those to read.
            measured: ``loss``, ``norm`` and ``kept`` of every run.
        """
        medians, deviations = (number_r.tolist() for number_r in self._statistics())
        readings = {}
        for run in runs:
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
