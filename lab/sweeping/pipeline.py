"""A sweep from its plan to its report: train one fleet per job, gather the records and report; or estimate the cost."""

from __future__ import annotations

import math
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.core.printing import say
from lab.records import leases, plans, store
from lab.sweeping.growing import GrowingReport
from lab.sweeping.progress import ProgressLog, ProgressMonitor, Screen

if TYPE_CHECKING:
    from lab.sweeping.planner import Point, SweepPlan
    from lab.training.config import RunConfig

# Runs jobs, each given by its overrides; returns a line for each job that died.
Launch = Callable[[Sequence[Sequence[str]]], list[str]]
LOOK_EVERY = 0.5  # seconds between two looks for runs that other commands train


def print_cautions(plan: SweepPlan) -> None:
    """Print cautions about the missing runs before they are trained, and about the arms of the whole request."""
    from lab.sweeping.cautions import find_cautions, find_single_rates

    for line in find_cautions([point.config for point in plan.missing]):
        _warn(line)
    for line in find_single_rates([point.config for point in plan.requested]):
        _warn(line)


def print_estimate(plan: SweepPlan, *, full: bool) -> None:
    """Print the estimated cost of the plan's fleets, after a few throwaway steps of each shape."""
    from lab.sweeping.dry_run import estimate

    for line in estimate(plan.fleets, len(plan.mine) - len(plan.missing), plan.host, full=full):
        say(line)


def train(
    plan: SweepPlan,
    launch: Launch,
    *,
    command: str,
    question: str = "",
    recipe_lrs: Mapping[str, float] | None = None,
    one: bool = False,
    trains_here: bool = False,
) -> None:
    """Train what is missing of a plan, then gather and report.

    Args:
        plan: as ``plan_sweep`` makes it.
        launch: runs the jobs.
        command: the command line, for the folder to note.
        question: the question of the sweep file, for the folder to note.
        recipe_lrs: learning rates of the recipe itself, for the folder to note, see ``store.RecordedCommand``.
        one: whether the plan is a single run, whose outcome is printed.
        trains_here: whether to train a single fleet in this process, which saves loading torch again.

    Raises:
        RequestError: the folder cannot take records; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    elsewhere = train_missing(
        plan, launch, command=command, question=question, recipe_lrs=recipe_lrs, trains_here=trains_here
    )
    ids, requested = [point.id for point in plan.mine], [point.id for point in plan.requested]
    _gather_and_report(plan.folder, requested, ids, len(plan.missing), len(elsewhere), one=one)


def train_missing(
    plan: SweepPlan,
    launch: Launch,
    *,
    command: str,
    question: str = "",
    recipe_lrs: Mapping[str, float] | None = None,
    trains_here: bool = False,
    screen: Screen | None = None,
) -> set[str]:
    """Train what is missing of a plan, without a report; the arguments are those of ``train``.

    Args:
        screen: shows the progress instead of the usual lines and display.

    Returns:
        The ids of the runs that other commands train.

    Raises:
        RequestError: the folder cannot take records; nothing is written then.
    """
    folder, engine, _, _, _, fleets, _ = plan
    store.open_folder(folder, engine)
    store.note_command(folder, command, question, recipe_lrs)
    elsewhere = set[str]()  # runs that other commands train
    while fleets:
        elsewhere -= {point.id for fleet in fleets for point in fleet}
        elsewhere |= _train_fleets(plan._replace(fleets=fleets), launch, trains_here=trains_here, screen=screen)
        left = _left_by_others(folder, elsewhere)
        fleets = [rest for fleet in plan.fleets if (rest := [point for point in fleet if point.id in left])]
    # noted again, since a shard that began at the same time may have overwritten it
    store.note_command(folder, command, question, recipe_lrs)
    return elsewhere


def _train_fleets(plan: SweepPlan, launch: Launch, *, trains_here: bool, screen: Screen | None) -> set[str]:
    """Freeze a plan and train its fleets; returns the ids of the runs that other commands hold or have trained."""
    folder, fleets, request = plan.folder, plan.fleets, secrets.token_hex(8)
    name = plans.freeze(folder, (list(map(_planned, fleet)) for fleet in fleets))
    jobs = [[f"fleet={name}/{index}/{request}", f"out={quoted(folder.absolute())}"] for index in range(len(fleets))]
    with _monitor(plan, name, screen):
        if distributed.world_size() > 1:
            deaths = _on_every_rank(folder, name, len(jobs), request)
        else:
            alone = trains_here and len(jobs) == 1
            deaths = _train_here(folder, name, fleets[0], request) if alone else launch(jobs)
    for death in deaths:
        _warn(death)
    return leases.left(folder, request)


def _left_by_others(folder: Path, elsewhere: Collection[str]) -> set[str]:
    """Wait for the runs that other commands train; returns those that nobody holds any more and nobody has recorded.

    Raises:
        SystemExit: a stop was requested meanwhile.
    """
    runs, is_said = {*elsewhere}, False
    with machine.catching_sigterm() as stop_requested:
        while runs := {run for run in runs if not store.is_recorded(folder, run)}:
            if stop_requested():
                raise SystemExit(machine.EXIT_PREEMPTED)
            unheld = runs - leases.held(folder)
            # looked up again, since a job records a run before it releases it
            if free := {run for run in unheld if not store.is_recorded(folder, run)}:
                return free
            if not is_said:
                _warn(f"waiting for another command, which trains {len(runs)} of these runs")
                is_said = True
            time.sleep(LOOK_EVERY)
    return set()


def _planned(point: Point) -> dict[str, Any]:
    """The entry of a point in a plan: its config, the data it was planned on, and its id, which follows from both."""
    return {"id": point.id, "tree": point.tree, "data_fingerprint": point.config.data.entry.open().fingerprint}


def _monitor(plan: SweepPlan, name: str, screen: Screen | None) -> ProgressMonitor:
    """A monitor of the plan frozen under this name; it prints lines, and draws a live display in a terminal.

    With a screen of its own it shows only that.
    """
    from lab.sweeping.planner import training_flops
    from lab.training.recorder import fleet_label

    folder, _, requested, mine, missing, fleets, _ = plan
    labels = [fleet_label([point.config for point in fleet]) for fleet in fleets]
    sizes = [sum(training_flops(point.config) for point in fleet) for fleet in fleets]
    if screen:
        return ProgressMonitor(folder, name, labels, sizes, lambda line: None, _warn, screen)
    # a shard does not know which seeds the other shards have completed
    growing = GrowingReport(folder, mine, fleets) if len(mine) == len(requested) else None
    if not sys.stdout.isatty() or "utf" not in sys.stdout.encoding.lower():
        log = ProgressLog(len(fleets), _warn)
        return ProgressMonitor(folder, name, labels, sizes, say, _warn, log, growing)
    from lab.sweeping.terminal import Terminal, scene

    untrained = {point.id for point in missing}
    done = [point for point in mine if point.id not in untrained]
    losses = _last_losses(folder) if done else {}
    terminal = Terminal(sys.stdout, scene(fleets, [(point, losses[point.id]) for point in done]))
    return ProgressMonitor(folder, name, labels, sizes, terminal.say, _warn, terminal, growing)


def _last_losses(folder: Path) -> dict[str, float]:
    """The final loss of each run of a folder by id; infinite if it diverged."""
    runs = store.read(folder).runs
    return dict(zip(runs["id"], runs["final_val_loss"].where(runs["status"] != "diverged", math.inf), strict=True))


def train_planned_fleet(
    folder: Path, plan: str, index: int, configs: Mapping[str, RunConfig] | None = None, **how: Any
) -> None:
    """Train one fleet of a plan in this process; the arguments are those of ``train_fleet``.

    Raises:
        KeyboardInterrupt: see ``train_fleet``.
        SystemExit: a stop was requested, and a checkpoint is saved; or a run failed on one of several ranks, for which
            the others would wait forever.
    """
    from lab.sweeping import job

    try:
        succeeded = job.train_fleet(folder, plan, index, configs, **how)
    except job.Preempted:
        raise SystemExit(machine.EXIT_PREEMPTED) from None
    if not succeeded and distributed.world_size() > 1:
        raise SystemExit(1)


def _train_here(folder: Path, plan: str, fleet: Sequence[Point], request: str) -> list[str]:
    """Train the only fleet of a plan in this process; returns a line if it died, as a job would."""
    import torch

    try:
        configs = {point.id: point.config for point in fleet}
        train_planned_fleet(folder, plan, 0, configs, request=request, interrupts=True)
    except RequestError as refusal:  # a full disk
        return [f"a job died: {refusal}"]
    except Exception as error:
        say(traceback.format_exc().rstrip(), error=True)
        return [f"a job died: {type(error).__name__}: {error}"]
    finally:
        torch.set_flush_denormal(False)  # a setting for training, not for the report
    return []


def _on_every_rank(folder: Path, plan: str, fleets: int, request: str) -> list[str]:
    for index in range(fleets):
        distributed.send_to_all((str(folder), plan, index))
        train_planned_fleet(folder, plan, index, request=request)
    return []


def follow_first_rank() -> None:
    """Train, on a rank that is not the first, every fleet that the first rank sends.

    Raises:
        SystemExit: the first rank has ended, and has printed why.
    """
    try:
        while (message := distributed.receive_from_first()) is not None:
            folder, plan, index = message
            train_planned_fleet(Path(folder), plan, index)
    except ConnectionError:
        raise SystemExit(1) from None


def _warn(text: str) -> None:
    say(f"lab: {text}", error=True)


def _gather_and_report(
    folder: Path, requested: Sequence[str], mine: Sequence[str], missing: int, elsewhere: int, *, one: bool
) -> None:
    statuses = store.statuses(folder)
    plans.remove_checkpoints(folder, [name for name, status in statuses.items() if status != "failed"])
    mine_statuses = [statuses.get(name, "failed") for name in mine]  # a run whose job died has no card
    others = len({*requested} - {*mine} - set(statuses))
    ending = f"{others} points of other shards are still missing in {folder}" if others else f"report: {folder}"
    if not others and {"finished", "diverged"} & set(statuses.values()):
        summary = _report(folder)
        if summary and not one:  # a table of one run has nothing to compare
            say(summary)
        ending = f"report: {folder / 'report.html'}"
    failed, diverged = (mine_statuses.count(status) for status in ("failed", "diverged"))
    by_others = f", {elsewhere} by another command" if elsewhere else ""
    counts = f"{missing - elsewhere - failed} trained{by_others}, {len(mine) - missing} already there"
    say(f"{counts}, {diverged} diverged, {failed} failed; {ending}")
    if one and not failed:
        runs = store.read(folder).runs
        say(outcome_line(runs[runs["id"] == requested[0]].iloc[0].to_dict()))
    if failed:
        raise SystemExit(1)


def _report(folder: Path) -> str:
    """Gather the records and draw the report, unless one was drawn since the tables were written; returns its summary.

    The summary of a report that is left as it is, is empty.
    """
    if store.digest_of_tables(folder) is None:
        store.gather(folder)
    elif _has_new_report(folder):
        return ""
    from lab.report import build  # slow to load

    return build.make_report([folder])[1]


def _has_new_report(folder: Path) -> bool:
    """Whether the report of a folder was written after its tables, and after the last command was noted."""
    page, sources = folder / "report.html", [*folder.glob("*.parquet"), folder / "requests.json"]
    written = [path.stat().st_mtime_ns for path in (page, *sources) if path.exists()]
    return page.exists() and written[0] == max(written)


def outcome_line(card: Mapping[Any, Any]) -> str:
    """The outcome of a run in a sentence, from its card: the final held-out loss, and whether the run diverged."""
    ending = "did not diverge"
    if card["status"] == "diverged":
        step = "" if pd.isna(card["diverged_at"]) else f" at step {card['diverged_at']}"
        ending = f"diverged{step}: {card['reason']}"
    return f"final held-out loss {card['final_val_loss']:.4f} nats/token; {ending}"
