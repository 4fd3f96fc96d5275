"""Sides of a comparison: each is a set of processes that step on request, so that rounds can alternate between them."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import shapes

from lab.core import machine

CORES = machine.cores()
WARM_UP_STEPS = 3  # untimed; they compile


@dataclass(frozen=True)
class Side:
    """One way to train: what a worker runs, in how many processes at once, and the threads of each."""

    kind: str  # torch | jax | lab | products
    options: tuple[str, ...] = ()
    workers: int = 1
    threads: int = 1


def maker(kind: str, width: int, threads: int, options: tuple[str, ...]) -> Callable[[], Callable[[], int]]:
    """Return the function that builds the step of a side; only the worker loads the libraries."""
    if kind == "torch":
        import torch_loop

        flags = {flag: flag in options for flag in ("amp", "compiled", "explicit")}
        return lambda: torch_loop.loop(width, threads, **flags)
    if kind == "jax":
        import jax_loop

        return lambda: jax_loop.loop(width, vmap="vmap" in options)
    import lab_fleet

    if kind == "products":
        return lambda: lab_fleet.products(width, *options, runs=shapes.runs(width))
    runs = next((int(option[5:]) for option in options if option.startswith("runs=")), shapes.runs(width))
    overrides = [option for option in options if not option.startswith("runs=")]
    return lambda: lab_fleet.loop(width, *overrides, runs=runs)


def work(kind: str, width: int, threads: int, options: tuple[str, ...]) -> None:
    """Run a worker: for every line read, step for that many seconds and print how many model-steps were done."""
    machine.configure_allocator()  # on every side
    if kind in ("lab", "products"):  # the lab's other settings are part of its speed
        machine.configure_process()
    step = maker(kind, width, threads, options)()
    for _ in range(WARM_UP_STEPS):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        print(steps_within(step, float(line)), flush=True)


def steps_within(step: Callable[[], int], seconds: float) -> int:
    """Step for that many seconds, at least once; returns how many model-steps were done."""
    done, until = 0, time.perf_counter() + seconds
    while done == 0 or time.perf_counter() < until:
        done += step()
    return done


class RunningSide:
    """A side whose workers are ready."""

    def __init__(self, side: Side, width: int) -> None:
        command = [sys.executable, __file__, side.kind, str(width), str(side.threads), *side.options]
        environment = {**os.environ, "OMP_NUM_THREADS": str(side.threads), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        pipe = subprocess.PIPE
        # one after the other, so that the second finds the code compiled by the first
        self.workers = []
        for _ in range(side.workers):
            worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
            self.workers.append(worker)
            assert worker.stdout is not None
            while (line := worker.stdout.readline()) != "ready\n":
                if not line:
                    raise RuntimeError(f"{' '.join(command)} died")

    def milliseconds(self, seconds: float, workers: int) -> float:
        """Return wall time over all model-steps done, in ms, with this many of the workers busy."""
        busy = self.workers[:workers]
        started = time.perf_counter()
        for worker in busy:
            assert worker.stdin is not None
            print(seconds, file=worker.stdin, flush=True)
        done = sum(int(worker.stdout.readline()) for worker in busy if worker.stdout)
        return (time.perf_counter() - started) / done * 1e3

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.kill()
            worker.wait()


def compare(sides: Mapping[str, Side], width: int, rounds: int, seconds: float) -> dict[tuple[str, int], list[float]]:
    """Time all sides in alternating rounds, after all are set up.

    Returns:
        Milliseconds per model-step in each round, by (name of the side, workers busy).
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(CORES) as pool:  # set-up is mostly compiling
        running = dict(zip(sides, pool.map(lambda side: RunningSide(side, width), sides.values()), strict=True))
    timings: dict[tuple[str, int], list[float]] = {}
    try:
        for _ in range(rounds):
            for name, side in running.items():
                for workers in sorted({1, sides[name].workers}):
                    timings.setdefault((name, workers), []).append(side.milliseconds(seconds, workers))
    finally:
        for side in running.values():
            side.close()
    return timings


def ratios(slow: Side, fast: Side, width: int, rounds: int, seconds: float) -> list[float]:
    """Time of a step of one side over that of the other, both with one worker, one per round."""
    timings = compare({"slow": slow, "fast": fast}, width, rounds, seconds)
    return [ours / theirs for ours, theirs in zip(timings["slow", 1], timings["fast", 1], strict=True)]


def medians(timings: Mapping[tuple[str, int], list[float]]) -> dict[tuple[str, int], float]:
    """Return the median over rounds of each side."""
    return {key: statistics.median(values) for key, values in timings.items()}


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), tuple(sys.argv[4:]))
