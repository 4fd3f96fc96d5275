"""A few throwaway steps of a fleet in a process of its own: how long it would train, how much memory it would take."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
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
from lab.training.config import RunConfig, run_id
from lab.training.fleet import VALIDATION_TOKENS, Fleet, pick_device
from lab.training.loop import Moment
from lab.training.recorder import Recorder, run_card

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


def attempt(fleets: Sequence[Sequence[RunConfig]], seats: Sequence[str | None]) -> list[Trial | None]:
    """Try every fleet in a fresh process, as a launcher trains it, one at a time on each GPU or core (None).

    It is ``None`` where memory did not do.

    Raises:
        RequestError: a fleet cannot be tried on this machine.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for seat in seats:
        free.put(seat)
    with ThreadPoolExecutor(len(seats)) as pool:
        return list(pool.map(partial(_watched, free), fleets))


def _watched(free: SimpleQueue[str | None], configs: Sequence[RunConfig]) -> Trial | None:
    seat = free.get()
    try:
        return _in_a_process(configs, seat)
    finally:
        free.put(seat)


def _in_a_process(configs: Sequence[RunConfig], seat: str | None) -> Trial | None:
    processes = machine.clean_process_context()
    ours, theirs = processes.Pipe(duplex=False)
    started = time.perf_counter()
    process = processes.Process(target=_job, args=(configs, seat, theirs), daemon=True)  # type: ignore[attr-defined]
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


def _job(configs: Sequence[RunConfig], seat: str | None, answer: Connection) -> None:
    if seat is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = seat
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked hears it
    machine.configure_process()
    machine.configure_torch()
    try:
        answer.send(_try(configs))
    except Exception as fault:
        if not machine.is_out_of_memory(fault):
            answer.send(str(fault) or type(fault).__name__)


def _try(configs: Sequence[RunConfig]) -> tuple[Trial, float]:
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
