"""A sweep from its points to its report: plan, train one fleet per job, gather, report."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.core.files import printable
from lab.records import plans, store
from lab.sweep.progress import ProgressMonitor

if TYPE_CHECKING:
    from lab.sweep.planner import Point
# What the user typed, as it can be typed again; ``request`` says it.
COMMAND: ContextVar[str] = ContextVar("command", default="lab")
# Runs jobs, each given by its overrides; returns a line for each job that died.
Launch = Callable[[Sequence[Sequence[str]]], list[str]]


def run_sweep(
    trees: Sequence[Mapping[str, Any]],
    launch: Launch,
    *,
    max_runs: int | None,
    dry_run: bool,
    one: bool,
    shard: str,
    here: bool,
    seats: Sequence[str | None],
) -> None:
    """Train what is missing of the points asked for, then gather and report; what is asked is said in ``agenda``.

    Raises:
        RequestError: a point makes no sense, or the folder cannot take records; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    from lab.sweep.dry_run import estimate
    from lab.sweep.planner import plan_sweep

    if dry_run and distributed.world_size() > 1:
        raise RequestError("--dry-run tries fleets in one process; leave torchrun away")
    folder, engine, asked, mine, missing, fleets, host = plan_sweep(
        trees, max_runs=max_runs, one=one, shard=shard, here=here, seats=seats
    )
    if dry_run:
        for line in estimate(fleets, len(mine) - len(missing), host):
            print(line)
        return
    store.open_folder(folder, engine)
    store.note_command(folder, COMMAND.get())
    if fleets:
        name = plans.freeze(folder, {"fleets": [[{"id": p.id, "tree": p.tree} for p in fleet] for fleet in fleets]})
        jobs = [[f"fleet={name}/{index}", f"out={quoted(folder.absolute())}"] for index in range(len(fleets))]
        with _monitor(folder, name, fleets, [point for point in mine if point not in missing]):
            deaths = launch(jobs) if distributed.world_size() == 1 else _on_every_rank(folder, name, len(jobs))
        for death in deaths:
            _warn(death)
    store.note_command(folder, COMMAND.get())  # again: another shard that began just then may have missed it
    _gather_and_report(folder, asked, mine, missing)


def _monitor(folder: Path, plan: str, fleets: Sequence[Sequence[Point]], there: Sequence[Point]) -> ProgressMonitor:
    """Who tells the user how far these fleets are: line by line, and in a terminal on a live block as well."""
    from lab.sweep.planner import training_flops
    from lab.training.recorder import fleet_label

    labels = [fleet_label([point.config for point in fleet]) for fleet in fleets]
    sizes = [sum(training_flops(point.config) for point in fleet) for fleet in fleets]
    if not sys.stdout.isatty() or "utf" not in sys.stdout.encoding.lower():
        return ProgressMonitor(folder, plan, labels, sizes, partial(print, flush=True, file=sys.stdout), _warn)
    from lab.sweep.terminal import Terminal, scene

    losses = dict(store.read(folder).runs[["id", "final_val_loss"]].values) if there else {}
    terminal = Terminal(sys.stdout, scene(fleets, [(point, losses[point.id]) for point in there]))
    return ProgressMonitor(folder, plan, labels, sizes, terminal.say, _warn, terminal)


def train_planned_fleet(folder: Path, plan: str, index: int) -> None:
    """One fleet, in this process.

    Raises:
        SystemExit: told to stop, with a checkpoint left; or a fault on one of several ranks, since the others wait for
            it in vain.
    """
    from lab.sweep import job

    try:
        whole = job.train_fleet(folder, plan, index)
    except job.Preempted:
        raise SystemExit(machine.EXIT_PREEMPTED) from None
    if not whole and distributed.world_size() > 1:
        raise SystemExit(1)


def _on_every_rank(folder: Path, plan: str, fleets: int) -> list[str]:
    for index in range(fleets):
        distributed.send_to_all((str(folder), plan, index))
        train_planned_fleet(folder, plan, index)
    return []


def follow_first_rank() -> None:
    """Train, on a rank that is not the first, what the first tells.

    Raises:
        SystemExit: the first rank is gone, having said why.
    """
    try:
        while (told := distributed.receive_from_first()) is not None:
            folder, plan, index = told
            train_planned_fleet(Path(folder), plan, index)
    except ConnectionError:
        raise SystemExit(1) from None


def _warn(text: str) -> None:
    print("lab:", printable(text), file=sys.stderr)


def quoted(folder: Path) -> str:
    """A path as the value of an override; Hydra reads a backslash as one, except before a quote."""
    text = re.sub(r"(\\*)(?='|$)", r"\1\1", str(folder)).replace("'", "\\'")
    return f"'{text}'"


def _gather_and_report(folder: Path, asked: Sequence[Point], mine: Sequence[Point], missing: Sequence[Point]) -> None:
    from lab.analysis.report import build
    from lab.analysis.sensitivity import study
    from lab.training import checkpoint

    ended = store.statuses(folder)
    checkpoint.remove(folder, [name for name, status in ended.items() if status != "failed"])
    status = [ended.get(point.id, "failed") for point in mine]  # a run whose job died left no card
    elsewhere = len({point.id for point in asked} - {point.id for point in mine} - set(ended))
    end = f"{elsewhere} points of other shards are still missing in {folder}" if elsewhere else f"report: {folder}"
    if not elsewhere and {"finished", "diverged"} & set(ended.values()):
        store.gather(folder)
        made = study([folder])
        end = f"report: {build.write_report(made, [folder])}"
        print(printable(build.summary(made)))
    failed, diverged = (status.count(word) for word in ("failed", "diverged"))
    counts = f"{len(missing) - failed} trained, {len(mine) - len(missing)} already there"
    print(printable(f"{counts}, {diverged} diverged, {failed} failed; {end}"))
    if failed:
        raise SystemExit(1)
