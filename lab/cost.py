"""What a request would cost: points, fleets, parameters, FLOPs, and time and memory from a few throwaway steps."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lab import machine
from lab.config import RunConfig, columns, static_key
from lab.fleet import Fleet, pick_device
from lab.record import label
from lab.sweep import Point, training_flops

TIMED_STEPS = 3


def _seconds(fleet: Fleet) -> float:
    """Estimated wall time of the whole fleet, from a few steps and one look at all that is held out."""
    config = fleet.config
    fleet.step(0)
    started = time.perf_counter()
    for step in range(TIMED_STEPS):
        fleet.step(step % config.steps)
    stepped = time.perf_counter()
    fleet.evaluate(whole=True)
    looked = time.perf_counter()
    looks = 2 + 0.06 * config.steps / config.probes.every  # the slice in between is about a sixteenth of the whole
    return float((stepped - started) / TIMED_STEPS * config.steps + (looked - stepped) * looks)


def _peak_gigabytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1.0 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def estimate(fleets: Sequence[Sequence[Point]], there: int) -> Iterator[str]:
    """Say, line by line, what training these fleets would take; nothing of it is kept."""
    machine.settle()
    yield f"to train: {sum(map(len, fleets))} runs in {len(fleets)} fleets; {there} already there"
    keys = swept([point for fleet in fleets for point in fleet])
    trials: dict[tuple[str, int], tuple[float, str]] = {}  # fleets of one shape and size cost the same: tried once
    total = 0.0
    for index, fleet in enumerate(fleets):
        configs = [point.config for point in fleet]
        shape = (static_key(configs[0]), len(configs))
        if shape not in trials:
            trials[shape] = _try(configs)
        seconds, size = trials[shape]
        total += seconds
        yield f"fleet {index + 1}: {label(configs)}, {size}, about {seconds:.0f} s"
        for point in fleet:
            row = columns(point.config)
            yield "  ".join(["", point.id, *(f"{key}={row.get(key)}" for key in keys)])
    if fleets:
        flops = sum(training_flops(point.config) for fleet in fleets for point in fleet)
        memory = f"{_peak_gigabytes(pick_device(fleets[0][0].config.device)):.1f} GB of memory a fleet"
        yield f"in all {flops:.2g} FLOPs, about {total / 60:.1f} min one fleet after another, at most {memory}"


def _try(configs: Sequence[RunConfig]) -> tuple[float, str]:
    """Estimated wall time in seconds of a fleet of these runs, and how large each is."""
    trial = Fleet([replace(config, engine="eager") for config in configs])
    each, bare = trial.parameters()
    flops = f"{training_flops(configs[0]):.2g} FLOPs each"
    return _seconds(trial), f"{each:,} parameters each ({bare:,} without embeddings), {flops}"


def swept(points: Sequence[Point]) -> list[str]:
    """The config columns in which points differ."""
    rows = [columns(point.config) for point in points]
    keys = {key: None for row in rows for key in row}
    return [key for key in keys if len({repr(row.get(key)) for row in rows}) > 1]
