"""What a request would cost: points, fleets, parameters, FLOPs, and time and memory from a few throwaway steps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice

from lab.memory import Host
from lab.sweep import Point, training_flops
from lab.training.config import RunConfig, columns, static_key
from lab.training.recorder import fleet_label
from lab.trial import Trial, attempt


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
    keys, at_once = swept([point for fleet in fleets for point in fleet]), min(len(host.seats), len(fleets))
    trials = _trials([[point.config for point in fleet] for fleet in fleets], host.seats[:at_once])
    for index, (fleet, trial) in enumerate(zip(fleets, trials, strict=True)):
        yield f"fleet {index + 1}: {fleet_label([point.config for point in fleet])}, {_told(fleet[0].config, trial)}"
        for point in fleet:
            row = columns(point.config)
            yield "  ".join(["", point.id, *(f"{key}={row.get(key)}" for key in keys)])
    flops = sum(training_flops(point.config) for fleet in fleets for point in fleet)
    yield f"in all {flops:.2g} FLOPs, {_summed([trial for trial in trials if trial], at_once, host)}"


def _trials(fleets: Sequence[Sequence[RunConfig]], seats: Sequence[str | None]) -> list[Trial | None]:
    """What each fleet would take; those of one shape and size take the same, and are tried together.

    As many trials as will train at once keep as many processes busy, since they slow one another down.
    """
    shapes = [(static_key(configs[0]), len(configs)) for configs in fleets]
    alike = dict(zip(shapes, fleets, strict=True))
    tried = list(islice(cycle(alike), max(len(seats), len(alike))))
    found: dict[tuple[str, int], list[Trial | None]] = {}
    for shape, trial in zip(tried, attempt([alike[shape] for shape in tried], seats), strict=True):
        found.setdefault(shape, []).append(trial)
    return [_middle(found[shape]) for shape in shapes]


def _middle(trials: Sequence[Trial | None]) -> Trial | None:
    """The trial of median wall time; none, where one ended badly."""
    there = [trial for trial in trials if trial]
    return sorted(there)[len(there) // 2] if len(there) == len(trials) else None


def _told(config: RunConfig, trial: Trial | None) -> str:
    flops = f"{training_flops(config):.2g} FLOPs each"
    if trial is None:
        return f"{flops}, too large for the memory there is"
    each, bare = trial.parameters
    size = f"{each:,} parameters each ({bare:,} without embeddings), {flops}"
    return f"{size}, about {trial.seconds:.0f} s and {trial.peak / 1e9:.2f} GB"


def _summed(trials: Sequence[Trial], at_once: int, host: Host) -> str:
    seconds, own = [trial.seconds for trial in trials], sorted(trial.own for trial in trials)
    shared = max((trial.peak - trial.own for trial in trials), default=0.0)
    time = f"about {sum(seconds) / 60:.1f} min one fleet after another"
    together = f", {makespan(seconds, at_once) / 60:.1f} min with {at_once} at once" if at_once > 1 else ""
    memory = f"at most {(sum(own[-at_once:]) + shared) / 1e9:.1f} GB of memory"
    free = f" of {host.memory * len(host.seats) / 1e9:.1f} GB free" if math.isfinite(host.memory) else ""
    return f"{time}{together}, {memory}{free}"


def swept(points: Sequence[Point]) -> list[str]:
    """The config columns in which points differ."""
    rows = [columns(point.config) for point in points]
    keys = {key: None for row in rows for key in row}
    return [key for key in keys if len({repr(row.get(key)) for row in rows}) > 1]
