"""Progress of a sweep: fleets write theirs into the results folder; a monitor shows it, and reports whole seeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from lab.core import distributed
from lab.core.errors import RequestError
from lab.records import plans
from lab.records.plans import FleetProgress
from lab.records.status import clock
from lab.sweeping.local_jobs import run_jobs

if TYPE_CHECKING:
    from torch import Tensor

    from lab.sweeping.planner import Point
    from lab.training.loop import StepResult

WRITE_EVERY, READ_EVERY = 0.5, 0.5  # seconds
BUSY_BELOW = 0.5  # of a core, the share below which others slow a fleet down; alone it has nearly all of one
LOG_EVERY = 60.0  # seconds, and at least a tenth of the time elapsed
# Seconds of training that must be left for a growing report to be drawn; drawing one takes about as long.
WORTH_DRAWING = 15.0


class ProgressWriter:
    """Writes one fleet's progress into the results folder, at most twice a second."""

    def __init__(self, folder: Path, plan: str, index: int, steps: int, runs: int) -> None:
        self.folder, self.plan, self.index, self.steps = folder, plan, index, steps
        self.started, self.written, self.step = time.monotonic(), 0.0, 0
        self.timed_from: tuple[float, int] | None = None
        self.begun, self.evaluations, self.evaluation = self.started, 0.0, 0.0
        self.cpu: tuple[float, float] | None = None  # seconds of this process, and when, while it trains on a CPU
        self.loss_r: Tensor | None = None
        self.losses: list[float | None] = [None] * runs
        self.first = 0
        self.notes: list[str] = []

    def begin(self, evaluations: float) -> None:
        """Note that training begins, with an evaluation; the last evaluation takes ``evaluations`` times as long."""
        self.begun, self.evaluations = time.monotonic(), evaluations

    def update(self, result: StepResult, first: int = 0) -> None:
        """Note a step of the runs from number ``first`` on; losses leave the device only when they are written."""
        if result.step < self.step:  # the fleet was halved, and a half starts over
            self.timed_from = None
        self.first = first
        probed = [result.probe_values.get((probe, "")) for probe in ("val_loss", "train_loss")]
        self.loss_r = next((loss_r for loss_r in (result.val_loss_r, *probed) if loss_r is not None), self.loss_r)
        self.step = result.step
        if not result.done:
            self.evaluation = self.evaluations * (time.monotonic() - self.begun)
        if self.step and not self.timed_from:  # the first step may include compiling
            self.timed_from = time.monotonic(), self.step
        if time.monotonic() - self.written >= WRITE_EVERY:
            self.write()

    def note(self, text: str) -> None:
        """Show a line to the user, who may watch on another machine; a line that several fleets note is shown once."""
        self.notes.append(text)
        self.write()

    def end(self, verdict: str, losses: Sequence[float | None]) -> None:
        """Write the end of the fleet; the loss of a failed run is None, that of a diverged run infinite."""
        self.step, self.loss_r, self.losses = self.steps, None, list(losses)
        self.write(verdict)

    def write(self, verdict: str | None = None) -> None:
        """Write the progress so far; only the first rank does."""
        if not distributed.is_first_rank():
            return
        self.written = now = time.monotonic()
        share = None
        if self.loss_r is not None and self.loss_r.device.type == "cpu":
            spent, before = time.process_time(), self.cpu
            self.cpu = spent, now
            share = (spent - before[0]) / (now - before[1]) if before and now > before[1] else None
        if self.loss_r is not None:
            losses, self.loss_r = self.loss_r.tolist(), None
            self.losses[self.first : self.first + len(losses)] = losses
        since, first = self.timed_from or (now, self.step)
        rate = (self.step - first) / (now - since) if now > since else 0.0
        seconds = now - self.started
        progress = FleetProgress(
            self.step, self.steps, seconds, rate, self.evaluation, self.losses, self.notes, verdict, share
        )
        with suppress(RequestError):  # a run must not fail because its progress cannot be written
            plans.write_progress(self.folder, self.plan, self.index, progress)


def busy(progress: Mapping[int, FleetProgress]) -> str:
    """That other programs take the cores on which fleets train, ``busy machine: 4 % of a core``; else empty."""
    shares = [fleet.cpu for fleet in progress.values() if fleet.cpu is not None and not fleet.verdict]
    share = fmean(shares) if shares else 1.0
    return f"busy machine: {share:.0%} of a core".replace("%", " %") if share < BUSY_BELOW else ""


def summary(progress: Mapping[int, FleetProgress], fleets: int, done: float, elapsed: float) -> str:
    """Progress of a sweep in a line; ``fleets`` is their number, ``done`` a share of the work, ``elapsed`` seconds."""
    ended = sum(bool(fleet.verdict) for fleet in progress.values())
    diverged = sum(fleet.diverged for fleet in progress.values())
    left = seconds_left(done, elapsed)
    time = f"{clock(elapsed)} elapsed, {'?' if left is None else clock(left)} left"
    return "  ".join(
        filter(None, [f"{done:4.0%}  {ended}/{fleets} fleets  {diverged} diverged  {time}", busy(progress)])
    )


def seconds_left(done: float, elapsed: float) -> float | None:
    """Estimated seconds left when a share ``done`` took ``elapsed`` seconds; None if the share is too small."""
    return elapsed / done * (1 - done) if done > 0.01 else None


class Screen(Protocol):
    """A terminal that shows the progress of a sweep."""

    def show(self, fleets: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Redraw: progress of each fleet that has started, the share of work done, and the seconds elapsed."""

    def close(self) -> None:
        """Leave a clean terminal."""


class ProgressLog:
    """Progress where there is no terminal: a line at intervals that grow with the time elapsed."""

    def __init__(self, fleets: int, say: Callable[[str], None]) -> None:
        self.fleets, self.say, self.due = fleets, say, LOG_EVERY

    def show(self, fleets: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Print the progress of the sweep if the last line is old enough."""
        if elapsed < self.due:
            return
        self.due = elapsed + max(LOG_EVERY, elapsed / 10)
        self.say(summary(fleets, self.fleets, done, elapsed).strip())

    def close(self) -> None:
        """Leave nothing to clear."""


class GrowingReport:
    """Draws the report of the complete seeds in a process of its own, one at a time, while the sweep goes on.

    Of the first seed each size counts by itself, because a first figure is wanted before the largest model is trained.

    Args:
        folder: the results folder.
        requested: all points of the sweep, sorted by seed.
        fleets: the points that are to be trained, packed into fleets.
    """

    def __init__(self, folder: Path, requested: Sequence[Point], fleets: Sequence[Sequence[Point]]) -> None:
        self.folder, self.requested = folder, requested
        self.fleet_of = {point.id: index for index, fleet in enumerate(fleets) for point in fleet}
        self.parts: dict[Hashable, list[str]] = {}
        for point in requested:
            self.parts.setdefault(point.config.seed, []).append(point.id)
            if point.config.seed == requested[0].config.seed:
                size = point.config.model.width, point.config.model.depth
                self.parts.setdefault(size, []).append(point.id)
        self.drawn = self.complete(set())
        self.drawing: threading.Thread | None = None
        self.over = threading.Event()
        self.line = ""

    def complete(self, ended: set[int]) -> frozenset[str]:
        """The ids of the runs of all parts that are recorded once these fleets have ended."""
        pending = {name for name, fleet in self.fleet_of.items() if fleet not in ended}
        return frozenset(name for part in self.parts.values() if pending.isdisjoint(part) for name in part)

    def update(self, ended: set[int], seconds_left: float | None) -> str:
        """Begin to draw if more parts are complete and enough training is left; returns a line once it is drawn."""
        if self.drawing and not self.drawing.is_alive():
            self.drawing, line = None, self.line
            return line
        ids = self.complete(ended)
        is_worth_it = self.drawn < ids and len(ids) < len(self.requested) and (seconds_left or 0) >= WORTH_DRAWING
        if self.drawing or not is_worth_it:
            return ""
        self.drawn = ids
        self.drawing = threading.Thread(target=self._draw, args=(ids,), daemon=True)
        self.drawing.start()
        return ""

    def close(self) -> None:
        """Stop drawing: the report of all runs follows, or the sweep was interrupted."""
        self.over.set()
        if self.drawing:
            self.drawing.join()

    def _draw(self, ids: frozenset[str]) -> None:
        growth = f"{len(ids)} of {len(self.requested)} runs"
        ends = run_jobs(draw, [(self.folder, ids, growth)], [None], stop_requested=self.over.is_set)
        self.line = f"report of {growth}: {self.folder / 'report.html'}" if ends and ends[0].answer else ""


def draw(folder: Path, ids: frozenset[str], growth: str) -> bool:
    """Write a report of these runs that says it is not final; returns whether any of them can be reported."""
    from lab.report import build

    with suppress(RequestError):  # all of them failed
        build.make_growing_report(folder, ids, growth)
        return True
    return False


class ProgressMonitor(threading.Thread):
    """Monitor of a sweep within a block: twice a second it prints a line per finished fleet, and redraws the screen.

    Args:
        folder: the results folder.
        plan: name of the plan.
        labels: a label for each fleet.
        sizes: FLOPs of each fleet.
        say: prints a line.
        warn: prints a note of a fleet.
        screen: redrawn at each reading.
        growing: the report of complete seeds, updated at each reading.
    """

    def __init__(
        self,
        folder: Path,
        plan: str,
        labels: Sequence[str],
        sizes: Sequence[float],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        screen: Screen | None = None,
        growing: GrowingReport | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.folder, self.plan, self.labels, self.sizes = folder, plan, labels, sizes
        self.say, self.warn, self.screen, self.over = say, warn, screen, threading.Event()
        self.growing = growing
        self.started, self.ended, self.noted = time.monotonic(), set[int](), set[str]()

    def __enter__(self) -> ProgressMonitor:
        self.forget()
        self.start()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.over.set()
            self.join()
            self.report()
        finally:  # even if interrupted meanwhile
            if self.growing:
                self.growing.close()
            if self.screen:
                self.screen.close()
        self.forget()

    def forget(self) -> None:
        """Delete the progress of the plan; a fleet of another command with the same plan soon writes its own again."""
        plans.forget_progress(self.folder, self.plan)

    def run(self) -> None:
        """Report repeatedly until the block is left."""
        while not self.over.wait(READ_EVERY):
            self.report()

    def report(self) -> None:
        """Print new notes, each once, and fleets that have ended; then redraw the screen."""
        progress = plans.read_progress(self.folder, self.plan)
        fleets = {index: fleet for index, fleet in progress.items() if index < len(self.labels)}
        for index, fleet in sorted(fleets.items()):
            for note in fleet.notes:
                if note not in self.noted:
                    self.noted.add(note)
                    self.warn(note)
            if fleet.verdict and index not in self.ended:
                self.ended.add(index)
                with suppress(BrokenPipeError):  # the output is closed, but training goes on
                    self.say(self.last_line(index, fleet))
        done = sum(self.sizes[index] * fleet.share for index, fleet in fleets.items()) / sum(self.sizes)
        elapsed = time.monotonic() - self.started
        if self.growing and (line := self.growing.update(self.ended, seconds_left(done, elapsed))):
            with suppress(BrokenPipeError):
                self.say(line)
        if self.screen:
            self.screen.show(fleets, done, elapsed)

    def last_line(self, index: int, fleet: FleetProgress) -> str:
        """The line of a fleet that has ended."""
        count = f"{len(self.ended):>{len(str(len(self.labels)))}}/{len(self.labels)}"
        return f"{count}  {self.labels[index]}  {fleet.seconds:.0f} s  {fleet.verdict}"
