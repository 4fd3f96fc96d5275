"""The status of a results folder: which runs are there, and which are failed, running or missing."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lab.core.errors import RequestError
from lab.records import plans, store

SILENT = 60.0  # seconds without a sign, after which a fleet no longer counts as running


class FleetStatus(NamedTuple):
    """A fleet that has begun and not ended.

    Attributes:
        plan: name of its plan.
        number: of the fleet in the plan, from 0.
        runs: ids of its runs without a record.
        step: steps done.
        steps: steps in all.
        seconds: from its start to its last sign.
        left: seconds to its end at its present rate; None if not known.
        silent: seconds since its last sign.
    """

    plan: str
    number: int
    runs: list[str]
    step: int
    steps: int
    seconds: float
    left: float | None
    silent: float

    @property
    def is_running(self) -> bool:
        """Whether it gave a sign of late."""
        return self.silent < SILENT

    def line(self) -> str:
        """Its state in a line."""
        done = f"{len(self.runs)} runs of fleet {self.number}: step {self.step} of {self.steps}"
        if not self.is_running:
            return f"{done}, and no sign for {clock(self.silent)}: killed, or cut off from this folder"
        left = "" if self.left is None else f", about {clock(self.left)} left"
        return f"{done} after {clock(self.seconds)}{left}"


class Status(NamedTuple):
    """The runs of a results folder, and those of its plans that are missing.

    Attributes:
        finished: how many runs finished; likewise ``diverged``, ``failed``, ``running``.
        missing: how many runs are in a plan, have no record and are not running.
        reasons: how many runs failed, by reason.
        seconds: what all recorded runs took, one after another.
        fleets: fleets that have begun and not ended.
    """

    folder: str
    finished: int
    diverged: int
    failed: int
    running: int
    missing: int
    reasons: dict[str, int]
    seconds: float
    fleets: list[FleetStatus]

    def lines(self) -> Iterator[str]:
        """The status as lines for a terminal."""
        counts = {name: getattr(self, name) for name in (*store.STATUSES, "running", "missing")}
        yield f"{self.folder}: {', '.join(f'{n} {name}' for name, n in counts.items())}"
        if self.seconds or not self.finished:  # runs of a table do not say
            yield f"trained for {clock(self.seconds)}, one fleet after another"
        yield from (f"failed: {runs} runs, {reason}" for reason, runs in self.reasons.items())
        yield from (fleet.line() for fleet in self.fleets)

    def as_json(self) -> str:
        """The status as a JSON object."""
        return json.dumps({**self._asdict(), "fleets": [fleet._asdict() for fleet in self.fleets]}, indent=1)


def read_status(folder: Path) -> Status:
    """Read the status of a results folder.

    Raises:
        RequestError: there is neither a run nor a plan, or the records are damaged or of another version.
    """
    if not folder.is_dir():
        raise RequestError(f"no results folder {folder}")
    records, planned = store.find(folder), plans.fleets_of_plans(folder)
    if not records and not planned:
        raise RequestError(f"no runs and no plans in {folder}")
    statuses = dict(zip(records.runs["id"], records.runs["status"], strict=True)) if records else {}
    fleets = [fleet for name in planned for fleet in _fleets_under_way(folder, name, planned[name], statuses)]
    running = {name for fleet in fleets if fleet.is_running for name in fleet.runs}
    unrecorded = {name for plan in planned.values() for fleet in plan for name in fleet} - set(statuses)
    reasons: Iterable[str] = ()
    if records:
        failed = records.runs[records.runs["status"].eq("failed") & ~records.runs["id"].isin(running)]
        reasons = failed["reason"].fillna("no reason")
    counts = Counter(status for name, status in statuses.items() if name not in running)
    return Status(
        str(folder),
        finished=counts["finished"],
        diverged=counts["diverged"],
        failed=counts["failed"],
        running=len(running),
        missing=len(unrecorded - running),
        reasons=dict(Counter(reasons).most_common()),
        seconds=float(records.runs["wall_seconds"].sum()) if records else 0.0,
        fleets=fleets,
    )


def _fleets_under_way(
    folder: Path, plan: str, fleets: list[list[str]], statuses: dict[str, str]
) -> Iterator[FleetStatus]:
    for index, progress in sorted(plans.read_progress(folder, plan).items()):
        if index < len(fleets) and not progress.verdict:
            runs = [name for name in fleets[index] if statuses.get(name, "failed") == "failed"]
            silent = max(0.0, time.time() - plans.progress_written(folder, plan, index))
            yield FleetStatus(plan, index, runs, progress.step, progress.steps, progress.seconds, progress.left, silent)


def clock(seconds: float) -> str:
    """``75 -> 1:15``, ``3675 -> 1:01:15``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
