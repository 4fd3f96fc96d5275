"""One fleet of a plan, trained and its records left behind."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lab import checkpoint, machine, ranks, store
from lab import plan as plans
from lab.config import RunConfig, run_config
from lab.fleet import Fleet
from lab.halving import outcomes
from lab.progress import Sayer
from lab.record import Run, Tape, card, failure, verdict
from lab.resumable import train_on

Named = tuple[str, RunConfig]


class Preempted(Exception):  # noqa: N818  (no error)
    """Told to stop by SIGTERM, with a checkpoint left."""


def train_fleet(folder: Path, plan: str, index: int, note: Callable[[str], None]) -> bool:
    """Train one fleet of a plan and leave its runs behind; whether no run failed.  A fault is recorded, not raised.

    Raises:
        Preempted: the same plan goes on from a checkpoint.
    """
    machine.settle()
    named = [(point["id"], run_config(point["tree"])) for point in plans.thaw(folder, plan)["fleets"][index]]
    steps = named[0][1].steps
    progress = Sayer(folder, plan, index, steps)
    progress.say(0)
    runs: list[Run] = []
    attempt = partial(_attempt, folder, progress, note)
    for (name, config), run in zip(named, outcomes(named, attempt, note), strict=True):
        if ranks.is_first():
            store.write_run(folder, card(name, config, run[0]), run[1])
        runs.append(run)
    progress.say(steps, verdict(runs))
    ended = [name for (name, _), run in zip(named, runs, strict=True) if run[0]["status"] != "failed"]
    if ranks.is_first():
        checkpoint.forget(folder, ended)
    return len(ended) == len(named)


def _attempt(folder: Path, progress: Sayer, note: Callable[[str], None], named: Sequence[Named]) -> Sequence[Run]:
    """Train runs as one fleet; raises when they are preempted, or memory gives out in a process of its own."""
    names, configs = zip(*named, strict=True)
    try:
        tape = Tape(Fleet(configs))
        keeper = checkpoint.Keeper(folder, names, configs[0].checkpoint)
        if train_on(tape, keeper, progress.say, note):
            return tape.runs()
    except Exception as fault:
        if machine.is_out_of_memory(fault) and not ranks.joined():
            raise
        note(traceback.format_exc().rstrip())
        return [failure(f"{type(fault).__name__}: {fault}")] * len(names)
    raise Preempted
