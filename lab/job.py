"""One fleet of a plan, trained and its records left behind."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lab import checkpoint, machine, ranks, store
from lab import plan as plans
from lab.config import RunConfig, columns, run_config
from lab.fleet import Fleet
from lab.halving import outcomes
from lab.progress import Sayer
from lab.record import Run, Tape, card, failure, verdict
from lab.resumable import train_on
from lab.trackers import NoTracker
from lab.tracking import Tracking
from lab.train import Moment

Named = tuple[str, RunConfig]


class Preempted(Exception):  # noqa: N818  (no error)
    """Told to stop by SIGTERM, with a checkpoint left."""


def train_fleet(folder: Path, plan: str, index: int) -> bool:
    """Train one fleet of a plan and leave its runs behind; whether no run failed.  A fault is recorded, not raised.

    Raises:
        Preempted: the same plan goes on from a checkpoint.
    """
    machine.settle()
    named = [(point["id"], run_config(point["tree"])) for point in plans.thaw(folder, plan)["fleets"][index]]
    config, runs = named[0][1], list[Run]()
    progress = Sayer(folder, plan, index, config.steps)
    tracker = config.tracker.entry if ranks.is_first() else NoTracker()
    with Tracking(tracker, folder, {name: columns(config) for name, config in named}, progress.note) as tracking:
        attempt = partial(_attempt, folder, progress, tracking)
        for (name, config), run in zip(named, outcomes(named, attempt, progress.note), strict=True):
            row = card(name, config, run[0])
            if ranks.is_first():
                store.write_run(folder, row, run[1])
            tracking.end(row)
            runs.append(run)
    ended = {name: run[0] for (name, _), run in zip(named, runs, strict=True) if run[0]["status"] != "failed"}
    progress.end(verdict(runs), [outcome["final_val_loss"] for outcome in ended.values()])
    if ranks.is_first():
        checkpoint.forget(folder, ended)
    return len(ended) == len(named)


def _attempt(folder: Path, progress: Sayer, tracking: Tracking, named: Sequence[Named]) -> Sequence[Run]:
    """Train runs as one fleet; raises when they are preempted, or memory gives out in a process of its own."""
    names, configs = zip(*named, strict=True)

    def hear(moment: Moment) -> None:
        progress.hear(moment)
        if tracking.open:
            for step, values in tape.news():
                tracking.log(step, dict(zip(names, values, strict=True)))

    try:
        tape = Tape(Fleet(configs))
        if train_on(tape, checkpoint.Keeper(folder, names, configs[0].checkpoint), hear, progress.note):
            return tape.runs()
    except Exception as fault:
        if machine.is_out_of_memory(fault) and not ranks.joined():
            raise
        progress.note(traceback.format_exc().rstrip())
        return [failure(f"{type(fault).__name__}: {fault}")] * len(names)
    raise Preempted
