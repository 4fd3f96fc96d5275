"""Dry runs: estimate the cost of a sweep by its FLOPs, over the throughput of a few steps of its largest fleet."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.core import machine
from lab.core.errors import RequestError
from lab.model.low_precision import PRECISIONS as LOW_PRECISIONS
from lab.probes.listener import Listener
from lab.records import store
from lab.sweeping import own_code
from lab.sweeping.capacity import Host, bytes_asked
from lab.sweeping.local_jobs import Slot, run_jobs
from lab.sweeping.planner import Point, makespan, training_flops
from lab.training.building import (
    active_parameters,
    build_model,
    count_parameters,
    failure_of_own_code,
    pick_device,
)
from lab.training.config import RunConfig, run_config
from lab.training.evaluation import VALIDATION_TOKENS
from lab.training.fleet import Fleet
from lab.training.identity import columns, differs_in_fleet, run_id
from lab.training.loop import StepResult
from lab.training.recorder import Recorder, fleet_label, run_card

# Seconds after which one kind of work has been timed long enough: without its first call, and including it.
ENOUGH, TOO_LONG = 0.25, 1.0
# Measured: seconds to compile a shape for the first time, and how many times faster its steps are then.
COMPILING, COMPILED_SPEED = 80.0, {"fp32": 1.2, "bf16": 1.8, "fp16_emulated": 1.8}
COMPILED_SPEED |= dict.fromkeys(LOW_PRECISIONS, 1.2)
FEW_VALUES = 12  # of a key, in a summary

Fleets = Sequence[Sequence[Point]]


class Cost(NamedTuple):
    """The cost of a fleet.

    Attributes:
        seconds: wall time of its training.
        start: wall time of its process besides, which starts, reads data and writes records.
        own: bytes of memory at its peak that no other process shares.
        shared: the other bytes.
    """

    seconds: float
    start: float
    own: float
    shared: float


def try_fleet(fleet: Sequence[Point], slots: Sequence[Slot], code: own_code.Entries = ()) -> Cost | None:
    """The cost of a fleet by a few throwaway steps of it, in a fresh process on each slot, of which the median counts.

    Processes slow one another down, so as many try it as fleets will train at once; each registers the user's own
    code. None if memory ran out.

    Raises:
        RequestError: it cannot be tried on this machine.
    """
    costs = list[Cost]()
    # as plain values, since classes that are made of the user's own code cannot be pickled
    trees = [point.tree for point in fleet]
    for end in run_jobs(_run_trial_process, [(trees, code)] * len(slots), slots):
        if isinstance(end.answer, str):
            raise RequestError(f"cannot be tried here: {end.answer}")
        if end.answer is None:  # it ran out of memory, or the system killed it for that
            return None
        cost, timed = end.answer
        costs.append(cost._replace(start=end.seconds - timed))
    return sorted(costs, key=lambda cost: cost.seconds)[len(costs) // 2]


def _run_trial_process(trees: Sequence[Mapping[str, Any]], code: own_code.Entries) -> tuple[Cost, float] | str | None:
    """The cost and the seconds that were timed, an error message, or None when out of memory."""
    machine.configure_process()
    machine.configure_torch()
    configs: list[RunConfig] = []
    try:
        own_code.register(code)
        configs = list(map(run_config, trees))
        return _run_trial(configs)
    except BaseException as error:  # of the user's own code any, since Ctrl-C does not reach this process
        own = failure_of_own_code(error, configs[0]) if configs else ""
        if machine.is_out_of_memory(error) and not (own and len(configs) == 1):
            return None
        return (own or str(error) or type(error).__name__)[:1000]


def _run_trial(configs: Sequence[RunConfig]) -> tuple[Cost, float]:
    """Train a few steps, with what comes before and after them; returns the cost and the seconds that were timed."""
    kind, clock = pick_device(configs[0].device).type, _Clock()
    peak_before = machine.peak_memory(kind)
    fleet, losses = Fleet([replace(config, engine="eager") for config in configs]), list[Tensor]()
    config, recorder, listener = fleet.config, Recorder(fleet), Listener(fleet.config.probes.names)
    probe_steps = [step for step in range(config.steps) if config.probes.fires(step, config.steps)]
    last, passes_s = config.steps - 1, config.micro_batches
    # late steps, since a batch that grows is whole only then; the time of a step is proportional to its micro-batches
    plain_step = next((step for step in range(last, -1, -1) if step not in probe_steps), last)
    probed = clock.seconds(lambda: listener.probe_values.update(fleet.step(last))) / passes_s[last]
    plain = clock.seconds(lambda: fleet.step(plain_step)) / passes_s[plain_step]
    evaluation = clock.seconds(lambda: losses.append(fleet.evaluation.loss(whole=False)))
    recorder.keep(StepResult(0, 0, listener.probe_values, losses[0]))
    with TemporaryDirectory() as folder:
        for of_run, run in zip(configs, recorder.runs(), strict=True):
            card = run_card(run_id(of_run, fleet.corpus.fingerprint), of_run, run.outcome)
            store.write_run(Path(folder), card, run.metrics)
    seconds = plain * passes_s.sum() + max(0.0, probed - plain) * passes_s[probe_steps].sum()
    if configs[0].engine == "compiled":  # compiling would take longer than the trial
        seconds = plain * passes_s.sum() / COMPILED_SPEED[config.precision]
    evaluated = listener.measures("val_loss") + listener.measures("clean_val_loss")
    slices = len({*probe_steps} - {0, config.steps - 1}) * evaluated
    # all held-out tokens are evaluated at the end, and once per seed at the start; in between, probes evaluate a slice
    whole = max(1.0, len(fleet.evaluation.held_out_nt) * config.seq_len / VALIDATION_TOKENS)
    seconds += evaluation * (whole * (1 + fleet.evaluation.models_at_init() / fleet.runs) + slices)
    return Cost(seconds, 0.0, machine.peak_memory(kind) - peak_before, peak_before), clock.spent


class _Clock:
    """A timer of work, which adds up the seconds of all calls."""

    def __init__(self) -> None:
        self.spent = 0.0

    def seconds(self, work: Callable[[], object]) -> float:
        """Mean wall time of ``work`` over a few calls; the first, which is slower, counts only if there is no other."""
        times: list[float] = []
        while sum(times[1:]) < ENOUGH and sum(times) < TOO_LONG:
            machine.synchronize()
            started = time.perf_counter()
            work()
            machine.synchronize()
            times.append(time.perf_counter() - started)
        self.spent += sum(times)
        return mean(times[1:] or times)


def estimate(
    fleets: Fleets, done: int, host: Host, *, full: bool = False, code: own_code.Entries = ()
) -> Iterator[str]:
    """Yield lines about the cost of training these fleets; ``done`` runs are trained already.

    There is a line per shape of fleet, or if ``full`` a line per fleet and per run. Processes that try a fleet register
    the user's own ``code``.

    Raises:
        RequestError: a run does not fit into memory even alone in a fleet, or cannot be tried here.
    """
    points, at_once = [point for fleet in fleets for point in fleet], min(len(host.slots), len(fleets))
    costs = _costs(fleets, host.slots[:at_once], code) if fleets else []
    yield f"to train: {len(points)} runs in {len(fleets)} fleets; {done} already there"
    if not fleets:
        return
    yield from (_each_run if full else _each_shape)(fleets, costs, swept_values(points))
    yield f"in all {sum(training_flops(point.config) for point in points):.2g} FLOPs, {_total(costs, at_once, host)}"


def _costs(fleets: Fleets, slots: Sequence[Slot], code: own_code.Entries) -> list[Cost]:
    """The cost of each fleet: it takes as long for a FLOP, and as much for a byte of tensors, as the largest one.

    A fleet that memory does not hold trains in halves, so it is one of its halves that is tried.
    """
    flops = [sum(training_flops(point.config) for point in fleet) for fleet in fleets]
    tried = fleets[flops.index(max(flops))]
    while not (trial := try_fleet(tried, slots, code)):
        if len(tried) == 1:
            label = fleet_label([point.config for point in tried])
            raise RequestError(f"too large for the free memory: {label}; give a smaller model or batch_size")
        tried = tried[: len(tried) // 2]
    seconds_per_flop = trial.seconds / sum(training_flops(point.config) for point in tried)
    per_byte = trial.own / sum(bytes_asked(point.config) for point in tried)
    costs, begun = [], Counter[str]()
    for fleet, flops_of_fleet in zip(fleets, flops, strict=True):
        shape, engine = fleet[0].shape, fleet[0].config.engine
        begun[shape] += 1
        # fleets that train at once compile their shape each for itself; later ones reuse it
        compiling = COMPILING if engine == "compiled" and begun[shape] <= len(slots) else 0.0
        own = per_byte * sum(bytes_asked(point.config) for point in fleet)
        costs.append(trial._replace(seconds=seconds_per_flop * flops_of_fleet + compiling, own=own))
    return costs


SweptValues = Mapping[str, Sequence[Any]]


def _each_run(fleets: Fleets, costs: Sequence[Cost], swept: SweptValues) -> Iterator[str]:
    for index, (fleet, cost) in enumerate(zip(fleets, costs, strict=True)):
        configs = [point.config for point in fleet]
        yield f"fleet {index + 1}: {fleet_label(configs)}, {_fleet_line(configs[0], cost)}"
        for point in fleet:
            row = columns(point.config)
            yield "  ".join(["", point.id, *(f"{key}={row.get(key)}" for key in swept)])


def _each_shape(fleets: Fleets, costs: Sequence[Cost], swept: SweptValues) -> Iterator[str]:
    for key, values in swept.items():
        yield f"  {key}: {_listed(values)}"
    indices: dict[tuple[str, int], list[int]] = {}
    for index, fleet in enumerate(fleets):
        indices.setdefault((fleet[0].shape, len(fleet)), []).append(index)
    for (_, runs), (first, *others) in indices.items():
        count = f"{1 + len(others)} fleet{'s' * bool(others)} of {runs} run{'s' * (runs > 1)}"
        config = fleets[first][0].config
        row = columns(config)
        shape = "".join(f"  {key}={row[key]}" for key in swept if key in row and not differs_in_fleet(config, key))
        yield f"{count}:{shape}  {_fleet_line(config, costs[first])}"


def _listed(values: Sequence[Any]) -> str:
    """All values if they are few, else the first two and the last."""
    few = len(values) <= FEW_VALUES
    return ", ".join(map(str, values)) if few else f"{values[0]}, {values[1]}, .. {values[-1]} ({len(values)} values)"


def _fleet_line(config: RunConfig, cost: Cost) -> str:
    with torch.device("cpu" if config.custom_model else "meta"):  # where a model takes no memory
        model = build_model(config, 1)
    (total, bare), active = count_parameters(model), active_parameters(config, model)
    counted = "embeddings included" if config.custom_model else f"{bare:,} without embeddings"
    counted += f", {active:,} act on a token" if active < total else ""
    takes = f"about {cost.start + cost.seconds:.0f} s and {(cost.own + cost.shared) / 1e9:.2f} GB"
    return f"{total:,} parameters each ({counted}), {training_flops(config):.2g} FLOPs each, {takes}"


def _total(costs: Sequence[Cost], at_once: int, host: Host) -> str:
    seconds, own = [cost.start + cost.seconds for cost in costs], sorted(cost.own for cost in costs)
    time = f"about {sum(seconds) / 60:.1f} min one fleet after another"
    together = f", {makespan(seconds, at_once) / 60:.1f} min with {at_once} at once" if at_once > 1 else ""
    memory = f"at most {(sum(own[-at_once:]) + costs[0].shared) / 1e9:.1f} GB of memory"
    free = f" of {host.memory * len(host.slots) / 1e9:.1f} GB free" if math.isfinite(host.memory) else ""
    return f"{time}{together}, {memory}{free}"


def swept_values(points: Sequence[Point]) -> dict[str, list[Any]]:
    """The config columns in which points differ, each with its values in the order of the points; None if absent."""
    values: dict[str, dict[str, Any]] = {}
    rows: Counter[str] = Counter()
    for point in points:
        for key, value in columns(point.config).items():
            values.setdefault(key, {}).setdefault(repr(value), value)
            rows[key] += 1
    for key, by_text in values.items():
        if rows[key] < len(points):
            by_text.setdefault("None", None)
    values.pop("tokens", None)  # they follow from steps and batches
    return {key: list(by_text.values()) for key, by_text in values.items() if len(by_text) > 1}
