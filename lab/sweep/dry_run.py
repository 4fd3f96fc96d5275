"""Dry runs: what a sweep would cost, from a few throwaway steps of each shape."""

from __future__ import annotations

import heapq
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from torch import Tensor

from lab.core import machine
from lab.core.errors import RequestError
from lab.probes.listener import Listener
from lab.records import store
from lab.sweep.capacity import Host
from lab.sweep.planner import Point, training_flops
from lab.training.config import RunConfig, columns, run_id, static_key
from lab.training.fleet import VALIDATION_TOKENS, Fleet, pick_device
from lab.training.loop import Moment
from lab.training.recorder import Recorder, fleet_label, run_card

ENOUGH, TOO_LONG = 0.25, 1.0  # seconds of a kind of work that are timed, and after which no more of it is done
# Seconds to compile a shape for the first time, as measured, and how many times faster its steps are then.
COMPILING, COMPILED_SPEED = 80.0, {"fp32": 1.2, "bf16": 1.8}


class Trial(NamedTuple):
    """What a fleet would take: seconds of its process, bytes at the peak, and of these what no other process shares.

    ``parameters`` are those of one run: all, and without input embedding and output head.
    """

    seconds: float
    peak: float
    own: float
    parameters: tuple[int, int]


def run_trials(fleets: Sequence[Sequence[RunConfig]], seats: Sequence[str | None]) -> list[Trial | None]:
    """Try every fleet in a fresh process, as a launcher trains it, one at a time on each GPU or core (None).

    It is ``None`` where memory did not do.

    Raises:
        RequestError: a fleet cannot be tried on this machine.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for seat in seats:
        free.put(seat)
    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(partial(_in_free_slot, free), fleets))


def _in_free_slot(free: SimpleQueue[str | None], configs: Sequence[RunConfig]) -> Trial | None:
    seat = free.get()
    try:
        return _in_process(configs, seat)
    finally:
        free.put(seat)


def _in_process(configs: Sequence[RunConfig], seat: str | None) -> Trial | None:
    processes = machine.clean_process_context()
    ours, theirs = processes.Pipe(duplex=False)
    started = time.perf_counter()
    process = processes.Process(target=_trial_process, args=(configs, seat, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        told = ours.recv()
    except EOFError:  # killed, as happens where memory gives out
        return None
    finally:
        process.join()
        ours.close()
    if isinstance(told, str):
        raise RequestError(f"cannot be tried here: {told}")
    trial, spread = told
    # what is not spread over the steps is spent once: the process starts, the data are read, the records are written
    return trial._replace(seconds=trial.seconds + time.perf_counter() - started - spread)  # type: ignore[no-any-return]


def _trial_process(configs: Sequence[RunConfig], seat: str | None, answer: Connection) -> None:
    if seat is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = seat
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked hears it
    machine.configure_process()
    machine.configure_torch()
    try:
        answer.send(_run_trial(configs))
    except Exception as fault:
        if not machine.is_out_of_memory(fault):
            answer.send(str(fault) or type(fault).__name__)


def _run_trial(configs: Sequence[RunConfig]) -> tuple[Trial, float]:
    """A few steps, what comes before and after them; also the seconds that stand for many."""
    kind, clock = pick_device(configs[0].device).type, _Clock()
    at_birth = machine.peak_memory(kind)
    fleet, looks = Fleet([replace(config, engine="eager") for config in configs]), list[Tensor]()
    config, tape, listener = fleet.config, Recorder(fleet), Listener(fleet.config.probes.names)
    heard_at = [step for step in range(config.steps) if config.probes.fires(step, config.steps)]
    heard = clock.seconds(lambda: listener.heard.update(fleet.step(0)))
    plain = clock.seconds(lambda: fleet.step(next((step for step in range(config.steps) if step not in heard_at), 0)))
    glance = clock.seconds(lambda: looks.append(fleet.evaluate(whole=False)))
    tape.keep(Moment(0, 0, listener.heard, looks[0]))
    with TemporaryDirectory() as nowhere:
        for one, (outcome, metrics) in zip(configs, tape.runs(), strict=True):
            store.write_run(Path(nowhere), run_card(run_id(one, fleet.corpus.fingerprint), one, outcome), metrics)
    between = len({*heard_at} - {0, config.steps - 1}) * listener.hears("val_loss")
    # all that is held out at the end, at the start once per seed, and a slice of it when probes listen in between
    whole = max(1.0, len(fleet.held_out_nt) * config.seq_len / VALIDATION_TOKENS)
    glances = whole * (1 + len(set(config.seed)) / fleet.runs) + between
    seconds = plain * config.steps + max(0.0, heard - plain) * len(heard_at)
    if configs[0].engine == "compiled":  # compiling for the trial would take longer than a trial may
        seconds = COMPILING + plain * config.steps / COMPILED_SPEED[config.precision]
    seconds += glance * glances
    peak = machine.peak_memory(kind)
    return Trial(seconds, peak, peak - at_birth, fleet.parameters()), clock.spent


class _Clock:
    """Times work, and knows what all of it took."""

    def __init__(self) -> None:
        self.spent = 0.0

    def seconds(self, work: Callable[[], object]) -> float:
        """Wall time of ``work``, the mean over a moment; the first, which is slower, counts only alone."""
        taken: list[float] = []
        while sum(taken[1:]) < ENOUGH and sum(taken) < TOO_LONG:
            machine.synchronize()
            started = time.perf_counter()
            work()
            machine.synchronize()
            taken.append(time.perf_counter() - started)
        self.spent += sum(taken)
        return mean(taken[1:] or taken)


def makespan(seconds: Iterable[float], processes: int) -> float:
    """When the last of these jobs is done, each begun in its order by the first process that is free."""
    ends = [0.0] * processes
    for job in seconds:
        heapq.heapreplace(ends, ends[0] + job)
    return max(ends)


def estimate(fleets: Sequence[Sequence[Point]], there: int, host: Host) -> Iterator[str]:
    """Say, line by line, what training these fleets would take; nothing of it is kept."""
    yield f"to train: {sum(map(len, fleets))} runs in {len(fleets)} fleets; {there} already there"
    if not fleets:
        return
    keys, at_once = swept_keys([point for fleet in fleets for point in fleet]), min(len(host.seats), len(fleets))
    trials = _trials([[point.config for point in fleet] for fleet in fleets], host.seats[:at_once])
    for index, (fleet, trial) in enumerate(zip(fleets, trials, strict=True)):
        configs = [point.config for point in fleet]
        yield f"fleet {index + 1}: {fleet_label(configs)}, {_fleet_line(configs[0], trial)}"
        for point in fleet:
            row = columns(point.config)
            yield "  ".join(["", point.id, *(f"{key}={row.get(key)}" for key in keys)])
    flops = sum(training_flops(point.config) for fleet in fleets for point in fleet)
    yield f"in all {flops:.2g} FLOPs, {_total_line([trial for trial in trials if trial], at_once, host)}"


def _trials(fleets: Sequence[Sequence[RunConfig]], seats: Sequence[str | None]) -> list[Trial | None]:
    """What each fleet would take; those of one shape and size take the same, and are tried together.

    As many trials as will train at once keep as many processes busy, since they slow one another down.
    """
    shapes = [(static_key(configs[0]), len(configs)) for configs in fleets]
    alike = dict(zip(shapes, fleets, strict=True))
    tried = list(islice(cycle(alike), max(len(seats), len(alike))))
    found: dict[tuple[str, int], list[Trial | None]] = {}
    for shape, trial in zip(tried, run_trials([alike[shape] for shape in tried], seats), strict=True):
        found.setdefault(shape, []).append(trial)
    return [_median(found[shape]) for shape in shapes]


def _median(trials: Sequence[Trial | None]) -> Trial | None:
    """The trial of median wall time; none, where one ended badly."""
    there = [trial for trial in trials if trial]
    return sorted(there)[len(there) // 2] if len(there) == len(trials) else None


def _fleet_line(config: RunConfig, trial: Trial | None) -> str:
    flops = f"{training_flops(config):.2g} FLOPs each"
    if trial is None:
        return f"{flops}, too large for the memory there is"
    each, bare = trial.parameters
    size = f"{each:,} parameters each ({bare:,} without embeddings), {flops}"
    return f"{size}, about {trial.seconds:.0f} s and {trial.peak / 1e9:.2f} GB"


def _total_line(trials: Sequence[Trial], at_once: int, host: Host) -> str:
    seconds, own = [trial.seconds for trial in trials], sorted(trial.own for trial in trials)
    shared = max((trial.peak - trial.own for trial in trials), default=0.0)
    time = f"about {sum(seconds) / 60:.1f} min one fleet after another"
    together = f", {makespan(seconds, at_once) / 60:.1f} min with {at_once} at once" if at_once > 1 else ""
    memory = f"at most {(sum(own[-at_once:]) + shared) / 1e9:.1f} GB of memory"
    free = f" of {host.memory * len(host.seats) / 1e9:.1f} GB free" if math.isfinite(host.memory) else ""
    return f"{time}{together}, {memory}{free}"


def swept_keys(points: Sequence[Point]) -> list[str]:
    """The config columns in which points differ."""
    rows = [columns(point.config) for point in points]
    keys = {key: None for row in rows for key in row}
    return [key for key in keys if len({repr(row.get(key)) for row in rows}) > 1]
