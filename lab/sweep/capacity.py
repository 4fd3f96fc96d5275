"""Memory: how much a run takes, from its shape alone, and how many runs of a shape fit into a fleet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lab.core import machine
from lab.sweep.local_jobs import Slot
from lab.training.config import RunConfig
from lab.training.fleet import PASS_TOKENS, pick_device

BYTES = 4  # per number
PROCESS = 150e6  # bytes of a job before it holds a fleet: data, and libraries loaded late
# Measured overhead of the allocator, as a factor and in bytes: freed blocks fit no later tensor exactly.
SPLIT, HOLES = 1.3, 10e6
ROOM = 0.8  # the share of free memory that fleets may fill
ENOUGH_ON_CPU = 8  # runs; more in a fleet gain nothing on a CPU


class Host(NamedTuple):
    """Where fleets train: the kind of device, a slot for each that trains at once, and the bytes each may take."""

    kind: str = "cpu"
    slots: Sequence[Slot] = (None,)
    memory: float = math.inf


def measure_host(device: str, slots: Sequence[Slot]) -> Host:
    """This machine, as a host of jobs that request ``device`` and run one at a time on each slot.

    Raises:
        RequestError: the device is not available.
    """
    kind = pick_device(device).type
    if kind != "cuda":
        return Host(kind, slots, machine.free_memory() / len(slots))
    gpus = machine.visible_gpus()
    # a job without a GPU of its own takes the first; ranks take one each
    jobs = Counter(gpus[index % len(gpus)] if slot is None else slot for index, slot in enumerate(slots))
    free = min(machine.free_memory(kind, gpus.index(gpu)) / count for gpu, count in jobs.items())
    return Host(kind, slots, free)


def bytes_asked(config: RunConfig) -> float:
    """Bytes of tensors that one more run adds to a fleet at its peak.

    These are weights, gradients, two moments, and the largest of three temporary parts: activations kept for the
    backward pass, with attention scores in full; a held-out pass; two more tensors per weight in the optimizer.
    Counted tensor by tensor, as if all gradients existed at once.
    """
    vocabulary: int = config.data.entry.open().vocabulary
    depth, width, length = config.model.depth, config.model.width, config.seq_len
    scores = config.model.heads * length  # of one query; all numbers below are per token
    kept = depth * (27 * width + scores) + 3 * width + max(4 * vocabulary, 8 * width + 2 * scores)
    passing = max(14 * width, 9 * width + 3 * scores, 2 * width + 2 * vocabulary)
    weights = 12 * depth * width**2 + 2 * vocabulary * width
    temporary = max(config.batch_size * length * kept, max(PASS_TOKENS, length) * passing, 2 * weights)
    return float(BYTES * (4 * weights + temporary))


def bytes_per_run(config: RunConfig) -> float:
    """Main memory that ``bytes_asked`` takes in the end; fragmentation varies and can add up to half as much again."""
    return HOLES + SPLIT * bytes_asked(config)


def most_runs(config: RunConfig, host: Host, max_runs: int | None = None) -> int:
    """How many runs of this shape share a fleet: as many as fit, on a CPU at most eight, and at least one.

    ``max_runs`` replaces the limit of eight, or sets one on other devices; memory still limits the fleet.
    """
    limit = max_runs or (ENOUGH_ON_CPU if host.kind == "cpu" else math.inf)
    return max(1, int(min(limit, (ROOM * host.memory - PROCESS) / bytes_per_run(config))))
