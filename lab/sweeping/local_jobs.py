"""Jobs on this machine: each in a fresh process, one at a time on each GPU or core."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from lab.core import machine
from lab.core.errors import RequestError
from lab.core.printing import say

POLL_SECONDS = 0.1
# A job that is to stop gets SIGTERM at once, again every so many seconds, since one that has just started may have
# missed it, and is killed after so many.
SIGNAL_EVERY, STOP_WITHIN = 5.0, 20.0
MAX_SLOTS = 4096

Slot = str | None  # a GPU, as CUDA_VISIBLE_DEVICES names it, or a core (None)


def choose_slots(processes: int, devices: Sequence[Any] | None, device: str) -> list[Slot]:
    """Choose ``processes`` slots, spread over the GPUs if there are any; 0 means one per GPU, or else one per core.

    Args:
        processes: how many jobs run at once.
        devices: the GPUs to use; None means all visible ones, unless ``device`` is the CPU.
        device: the config key ``device``.

    Raises:
        RequestError: a number out of bounds, or a GPU that is not visible.
    """
    if processes < 0:
        raise _refusal(f"processes must be at least 0, not {processes}; 0 means one per device or core")
    if processes > MAX_SLOTS:
        raise _refusal(f"processes must be at most {MAX_SLOTS}, not {processes}")
    gpus = _choose_gpus(devices, device)
    count = processes or len(gpus) or machine.cores()
    return [gpus[index % len(gpus)] if gpus else None for index in range(count)]


def _choose_gpus(devices: Sequence[Any] | None, device: str) -> list[str]:
    if devices is None and device not in ("auto", "cuda"):
        return []
    visible = machine.visible_gpus()
    requested = visible if devices is None else [str(name) for name in devices]
    if unknown := [name for name in requested if name not in visible]:
        raise _refusal(f"devices names {', '.join(unknown)}; there: {', '.join(visible) or 'none'}")
    return requested


def check_timeout(minutes: float | None) -> float:
    """A timeout in seconds; infinite for None.

    Raises:
        RequestError: it is not above 0.
    """
    if minutes is not None and not minutes > 0:
        raise _refusal(f"timeout_minutes must be above 0, not {minutes}; null means never")
    return math.inf if minutes is None else 60 * minutes


def _refusal(line: str) -> RequestError:
    return RequestError(f"hydra.launcher.{line}")


class JobEnd(NamedTuple):
    """How a job ended: its exit code, whether it was killed at the timeout, its wall time in seconds, and its result.

    ``answer`` is the result of ``work``; None for a job that died.
    """

    exit_code: int
    timed_out: bool
    seconds: float
    answer: Any


@dataclass
class _RunningJob:
    index: int
    slot: Slot
    process: Any
    answer: Connection
    started: float
    timed_out: bool = False
    signals: int = 0
    kill_at: float = math.inf  # on the clock of ``started``

    def stop(self) -> None:
        """Ask it to stop, as often as it is time to."""
        now = time.perf_counter()
        self.kill_at = min(self.kill_at, now + STOP_WITHIN)
        if now >= self.kill_at:
            self.kill()
        elif now >= self.kill_at - STOP_WITHIN + self.signals * SIGNAL_EVERY:
            self.process.terminate()
            self.signals += 1

    def kill(self) -> None:
        """End it, since a job that hangs may ignore SIGTERM."""
        self.process.kill()
        self.process.join()

    def end(self) -> JobEnd:
        seconds = time.perf_counter() - self.started
        try:
            answer = self.answer.recv() if self.answer.poll() else None
        except EOFError:  # it died
            answer = None
        self.answer.close()
        return JobEnd(self.process.exitcode, self.timed_out, seconds, answer)


def run_jobs(
    work: Callable[..., Any],
    arguments: Iterable[tuple[Any, ...]],
    slots: Sequence[Slot],
    *,
    imports: Sequence[str] = machine.TRAINING_MODULES,
    timeout: float = math.inf,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[JobEnd]:
    """Call ``work`` with each tuple of arguments in a fresh process, in order, as soon as a slot is free.

    A job that dies stops no other. Once ``stop_requested`` is true, no job is started, and running jobs get SIGTERM;
    those that have not ended after ``STOP_WITHIN`` seconds are killed.

    Args:
        work: a function that can be imported; it returns a few bytes.
        arguments: taken one by one, each when its job starts.
        slots: where jobs run at once.
        imports: modules that every job needs.
        timeout: seconds after which a job is killed.
        stop_requested: called ten times a second.

    Returns:
        The end of each job, in order; jobs that were not started are missing at the end of the list.
    """
    processes: Any = machine.clean_process_context(imports)
    free, running = list(slots), list[_RunningJob]()
    ends: dict[int, JobEnd] = {}
    waiting = enumerate(arguments)
    try:
        while True:
            while free and not stop_requested() and (following := next(waiting, None)):
                running.append(_start(processes, work, *following, free.pop(0)))
            if not running:
                return [ends[index] for index in sorted(ends)]
            for job in _wait(running, timeout, stop=stop_requested()):
                running.remove(job)
                free.append(job.slot)
                ends[job.index] = job.end()
    finally:
        while running:  # after an error or Ctrl-C
            for job in _wait(running, timeout, stop=True):
                running.remove(job)


def saying_so(stop_requested: Callable[[], bool]) -> Callable[[], bool]:
    """The same function, which prints what a stop saves when it is first true."""
    is_said = False

    def requested() -> bool:
        nonlocal is_said
        if stop_requested() and not is_said:
            is_said = True
            saves = f"running jobs save checkpoints, within {STOP_WITHIN:.0f} s; runs that have ended are recorded"
            say(f"lab: stopping: {saves}", error=True)
        return stop_requested()

    return requested


def _wait(running: Sequence[_RunningJob], timeout: float, *, stop: bool) -> list[_RunningJob]:
    """Wait a tenth of a second; returns the jobs that have ended, including those killed at the timeout."""
    for job in running:
        if time.perf_counter() - job.started >= timeout:
            job.timed_out = job.process.exitcode is None
            job.kill()
        elif stop:
            job.stop()
    wait([job.process.sentinel for job in running], POLL_SECONDS)
    return [job for job in running if job.process.exitcode is not None]


def _start(processes: Any, work: Callable[..., Any], index: int, arguments: tuple[Any, ...], slot: Slot) -> _RunningJob:
    ours, theirs = processes.Pipe(duplex=False)
    started = time.perf_counter()
    process = processes.Process(target=_run_in_child, args=(work, arguments, slot, theirs))
    process.start()
    theirs.close()
    return _RunningJob(index, slot, process, ours, started)


def _run_in_child(work: Callable[..., Any], arguments: tuple[Any, ...], slot: Slot, answer: Connection) -> None:
    if slot is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot  # in time: torch is loaded, but has not yet looked for devices
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the interrupt, and ends its jobs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the process that forked this one ignores it
    threading.Thread(target=_die_with_parent, daemon=True).start()
    answer.send(work(*arguments))


def _die_with_parent() -> None:
    """Leave no job behind when its parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
