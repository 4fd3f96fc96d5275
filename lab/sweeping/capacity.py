"""Memory: how much a run takes, computed from its shape alone, whether it fits, and how many runs share a fleet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.optim.links import Link
from lab.sweeping.local_jobs import Slot
from lab.training.building import mlp_parts, pick_device
from lab.training.config import RunConfig
from lab.training.evaluation import PASS_TOKENS
from lab.training.identity import updates_in_lockstep

BYTES = 4  # per number
SAMPLE = 64  # width of a matrix of which links say what they keep
TOKEN = 8  # bytes of a token while its batch is drawn
SCHEDULE = 40  # bytes per step while the shape of a schedule is computed
OVERCOUNT = 1.3  # ``bytes_asked`` is at most this many times what a run takes
PROCESS = 150e6  # bytes of a job before it holds a fleet: data, and libraries loaded late
# Measured overhead of the allocator, as a factor and in bytes: freed blocks fit no later tensor exactly.
SPLIT, HOLES = 1.3, 10e6
ROOM = 0.8  # the share of free memory that fleets may fill
ENOUGH_ON_CPU = 8  # runs; more in a fleet gain nothing on a CPU


class Host(NamedTuple):
    """The machine on which fleets train: its kind of device, a slot per fleet that trains at once, and free memory.

    Attributes:
        memory: bytes that each fleet may take when all slots are busy.
        alone: bytes that one fleet may take when the other slots are idle.
    """

    kind: str = "cpu"
    slots: Sequence[Slot] = (None,)
    memory: float = math.inf
    alone: float = math.inf


def measure_host(device: str, slots: Sequence[Slot]) -> Host:
    """This machine, as a host of jobs that request ``device`` and run one at a time on each slot.

    Raises:
        RequestError: the device is not available.
    """
    kind = pick_device(device).type
    if kind != "cuda":
        free = machine.free_memory()
        return Host(kind, slots, free / len(slots), free)
    gpus = machine.visible_gpus()
    # a job without a GPU of its own takes the first one; each rank takes one
    jobs = Counter(gpus[index % len(gpus)] if slot is None else slot for index, slot in enumerate(slots))
    free_of_gpu = {gpu: machine.free_memory(kind, gpus.index(gpu)) for gpu in jobs}
    return Host(kind, slots, min(free_of_gpu[gpu] / jobs[gpu] for gpu in jobs), max(free_of_gpu.values()))


def bytes_asked(config: RunConfig) -> float:
    """Bytes of tensors that one more run adds to a fleet at its peak.

    Permanent are the schedule, weights, gradients, and the state of the optimizer, such as Adam's two moments. The
    largest of three temporary parts is added: activations kept for the backward pass, with full attention scores; a
    held-out pass; two more tensors per weight in the optimizer. Tensors are counted one by one, as if all gradients
    existed at once. A step of micro-batches keeps the activations of one of them, the sum of the gradients, and the
    tokens of all. A run with a response to spikes keeps weights and moments again in each snapshot; one that
    ``is_controlled`` keeps also the state in which it ended.
    """
    vocabulary: int = config.data.entry.open().vocabulary
    depth, width, length = config.model.depth, config.model.width, config.seq_len
    scores = config.model.heads * length  # of one query; all numbers below are per token
    hidden = math.prod(mlp_parts(config))
    more = hidden - 4 * width  # hidden units of all experts beyond those of a dense MLP, kept four times
    kept = depth * (27 * width + 4 * more + scores) + 3 * width + max(4 * vocabulary, 8 * width + 2 * scores)
    passing = max(14 * width + 2 * more, 9 * width + 3 * scores, 2 * width + 2 * vocabulary)
    weights = depth * (4 * width**2 + 2 * width * hidden) + 2 * vocabulary * width
    temporary = max(config.rows * length * kept, max(PASS_TOKENS, length) * passing, 2 * weights)
    summed = 0 if config.batch is None else BYTES * weights + TOKEN * config.batch_size * length
    snapshots = config.response.entry.snapshots if config.response else 0
    copies = snapshots + config.is_controlled
    links = {name: link for phase in config.phases for name, link in phase.optimizer.links.items()}
    moments = sum(map(_kept_per_weight, links.values())) * weights
    return float(
        BYTES * (2 * weights + moments + (weights + moments) * copies + temporary) + SCHEDULE * config.steps + summed
    )


def _kept_per_weight(link: Link) -> int:
    """How many numbers a link keeps of each weight; what it keeps of a whole tensor or run is not counted."""
    sample = {"sample": torch.empty(1, SAMPLE, SAMPLE)}
    return sum(tensor.numel() for tensor in link.begin(sample).values()) // SAMPLE**2


def bytes_per_run(config: RunConfig) -> float:
    """Bytes of memory that a run takes once the allocator's overhead is added to ``bytes_asked``.

    Fragmentation varies, and can add up to half as much again.
    """
    return HOLES + SPLIT * bytes_asked(config)


def most_runs(config: RunConfig, host: Host, max_runs: int | None = None) -> int:
    """How many runs of this shape share a fleet: as many as fit into memory, on a CPU at most eight, and at least one.

    ``max_runs`` replaces the limit of eight, and sets a limit on other devices; memory still limits the fleet.
    A run that chooses its own batches trains alone, as does one that may fall behind the others at a restart.
    """
    if config.adaptive or not updates_in_lockstep(config):
        return 1
    limit = max_runs or (ENOUGH_ON_CPU if host.kind == "cpu" else math.inf)
    return max(1, int(min(limit, (ROOM * host.memory - PROCESS) / bytes_per_run(config))))


def check_fits(config: RunConfig, host: Host) -> None:
    """Check that a run fits into the memory of the host, by a low estimate of the memory it takes alone.

    A custom model passes unchecked, since its tensors cannot be counted from its config.

    Raises:
        RequestError: the run does not fit.
    """
    ranks = distributed.world_size()
    free = host.alone if ranks == 1 else host.memory

    def least(config: RunConfig) -> float:
        return PROCESS + bytes_asked(config) / OVERCOUNT / ranks

    if config.custom_model or least(config) <= free:
        return
    shape = f"model.width={config.model.width} model.depth={config.model.depth} seq_len={config.seq_len}"
    rows = f"{config.rows_key}={config.rows} steps={config.steps}"
    needed = f"{shape} {rows} take at least {least(config) / 1e9:,.1f} GB"
    choice = _smaller(config, lambda smaller: least(smaller) <= free)
    raise RequestError(f"{needed} of memory, and {free / 1e9:,.1f} GB are free; {choice}")


def _smaller(config: RunConfig, fits: Callable[[RunConfig], bool]) -> str:
    """Advice: the first key that makes the run fit if it alone is halved often enough."""
    for key, value in ((config.rows_key, config.rows), ("steps", config.steps), ("seq_len", config.seq_len)):
        while value := value // 2:
            if fits(_changed(config, key, value)):
                return f"{key}={value} would fit"
    return "a smaller model may fit"


def _changed(config: RunConfig, key: str, value: int) -> RunConfig:
    if key != "batch.micro_batch" or config.batch is None:
        return replace(config, **{key: value})  # type: ignore[arg-type]
    return replace(config, batch=replace(config.batch, entry=replace(config.batch.entry, micro_batch=value)))
