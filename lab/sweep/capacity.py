"""How much memory a run takes, from its shape alone, and how many runs share a fleet on a given host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lab.core import machine
from lab.training.config import RunConfig
from lab.training.fleet import PASS_TOKENS, pick_device

BYTES = 4  # of a number
PROCESS = 150e6  # bytes of a job before it holds a fleet: data, libraries that are loaded late
# What an allocator takes over what it is asked for, measured: freed blocks fit no later tensor exactly.
SPLIT, HOLES = 1.3, 10e6
ROOM = 0.8  # the share of free memory that is packed
ENOUGH_ON_CPU = 8  # runs; more of them gain nothing there


class Host(NamedTuple):
    """Where fleets train: the kind of device, a GPU or a core (None) for each at once, bytes that each may take."""

    kind: str = "cpu"
    seats: Sequence[str | None] = (None,)
    memory: float = math.inf


def measure_host(device: str, seats: Sequence[str | None]) -> Host:
    """This machine, for jobs that ask for ``device``, one at a time on each of ``seats``.

    Raises:
        RequestError: the device is not there.
    """
    kind = pick_device(device).type
    if kind != "cuda":
        return Host(kind, seats, machine.free_memory() / len(seats))
    there = machine.visible_gpus()
    # without a seat of its own a job takes the first; ranks take one each
    jobs = Counter(there[place % len(there)] if seat is None else seat for place, seat in enumerate(seats))
    free = min(machine.free_memory(kind, there.index(seat)) / count for seat, count in jobs.items())
    return Host(kind, seats, free)


def bytes_asked(config: RunConfig) -> float:
    """Bytes of tensors that one more run adds to a fleet at its peak: weights, gradients, two moments, what passes.

    What passes is the largest of three: activations kept for the backward pass, with scores in full; a held-out pass;
    two more tensors per weight in the optimizer.  Counted tensor by tensor, as if all gradients were there at once.
    """
    vocabulary: int = config.data.entry.open().vocabulary
    depth, width, length = config.model.depth, config.model.width, config.seq_len
    scores = config.model.heads * length  # of one query, as all that follows is of one token
    kept = depth * (27 * width + scores) + 3 * width + max(4 * vocabulary, 8 * width + 2 * scores)
    passing = max(14 * width, 9 * width + 3 * scores, 2 * width + 2 * vocabulary)
    weights = 12 * depth * width**2 + 2 * vocabulary * width
    comes_and_goes = max(config.batch_size * length * kept, max(PASS_TOKENS, length) * passing, 2 * weights)
    return float(BYTES * (4 * weights + comes_and_goes))


def bytes_per_run(config: RunConfig) -> float:
    """What ``bytes_asked`` takes of main memory; by chance up to half as much again: holes lie as they fall."""
    return HOLES + SPLIT * bytes_asked(config)


def most_runs(config: RunConfig, host: Host, max_runs: int | None = None) -> int:
    """How many runs of this shape share a fleet there: as many as fit, on a CPU at most eight, and at least one.

    ``max_runs``, if given, stands in for the eight, or for no limit; memory limits it still.
    """
    wanted = max_runs or (ENOUGH_ON_CPU if host.kind == "cpu" else math.inf)
    return max(1, int(min(wanted, (ROOM * host.memory - PROCESS) / bytes_per_run(config))))
