"""The Hydra task and the sweep around it: freeze the points, train one fleet per job, gather, report."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig

from lab import machine, store
from lab import plan as plans
from lab.progress import Sayer, Watcher
from lab.registry import RequestError

if TYPE_CHECKING:
    from lab.sweep import Point


# What the user typed, as it can be typed again; the door says it.
COMMAND: ContextVar[str] = ContextVar("command", default="lab")
# Runs jobs, each given by its overrides; returns a line for each job that died.
Launch = Callable[[Sequence[Sequence[str]]], list[str]]


def data_folder(name: str) -> Path:
    """``conf`` or ``sweeps``: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / name
    return inside if inside.is_dir() else Path(__file__).parent.parent / name


def hydra_task(config: DictConfig) -> None:
    """One job trains one fleet of a frozen plan."""
    machine.prepare()
    plan, index = str(config.fleet).rsplit("/", 1)
    train_fleet(Path(config.out), plan, int(index))


# Not a decorator: a launcher sends the task to other processes by its name.
hydra_main = hydra.main(version_base="1.3", config_path=str(data_folder("conf")), config_name="config")(hydra_task)


def run_sweep(
    trees: Sequence[Mapping[str, Any]], launch: Launch, *, max_runs: int, dry_run: bool, one: bool, here: bool
) -> None:
    """Train what is missing of the points asked for, then gather and report.

    ``one`` refuses more than one point; ``here`` says that jobs run on this machine, so its devices must do.

    Raises:
        RequestError: a point makes no sense, or the folder cannot take records; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    from lab.cost import estimate
    from lab.engine import can_compile
    from lab.fleet import pick_device
    from lab.sweep import engine_for, pack, points, with_engine
    from lab.trackers import require

    asked = points(trees)
    outs = sorted({str(tree["out"]) for tree in trees})
    if one and len(asked) > 1:
        raise RequestError("several values given: lab train -m trains a sweep")
    if len(outs) > 1 or not outs[0]:
        raise RequestError(f"out must name one folder, not {', '.join(outs) or 'nothing'}")
    folder = Path(outs[0])
    if here:
        for device in {point.config.device for point in asked}:
            pick_device(device)
        if any(point.config.engine == "compiled" for point in asked) and not can_compile():
            raise RequestError("engine=compiled needs a C++ compiler and Python's headers; engine=eager needs neither")
    for point in asked:
        require(point.config.tracker.entry)
    there = store.statuses(folder)
    engine = store.check_version(folder) or (engine_for(asked) if can_compile() else "eager")
    asked = with_engine(asked, engine)
    missing = [point for point in asked if there.get(point.id, "failed") == "failed"]
    fleets = pack(missing, max_runs)
    if dry_run:
        for line in estimate(fleets, len(asked) - len(missing)):
            print(line)
        return
    store.open_folder(folder, engine)
    store.note_command(folder, COMMAND.get())
    if fleets:
        name = plans.freeze(folder, {"fleets": [[{"id": p.id, "tree": p.tree} for p in fleet] for fleet in fleets]})
        jobs = [[f"fleet={name}/{index}", f"out={quoted(folder)}"] for index in range(len(fleets))]
        with _watcher(folder, name, fleets, [point for point in asked if point not in missing]):
            deaths = launch(jobs)
        for death in deaths:
            _warn(f"lab: {death}")
    _close(folder, asked, missing)


def _watcher(folder: Path, plan: str, fleets: Sequence[Sequence[Point]], there: Sequence[Point]) -> Watcher:
    """Who tells the user how far these fleets are: line by line, and in a terminal on a live block as well."""
    from lab.record import label
    from lab.sweep import training_flops

    labels = [label([point.config for point in fleet]) for fleet in fleets]
    sizes = [sum(training_flops(point.config) for point in fleet) for fleet in fleets]
    if not sys.stdout.isatty() or "utf" not in sys.stdout.encoding.lower():
        return Watcher(folder, plan, labels, sizes, partial(print, flush=True, file=sys.stdout), _warn)
    from lab.live import Terminal, scene

    losses = dict(store.read(folder).runs[["id", "final_val_loss"]].values) if there else {}
    terminal = Terminal(sys.stdout, scene(fleets, [(point, losses[point.id]) for point in there]))
    return Watcher(folder, plan, labels, sizes, terminal.say, _warn, terminal)


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def quoted(folder: Path) -> str:
    """A path as the value of an override; Hydra reads a backslash as one, except before a quote."""
    text = re.sub(r"(\\*)(?='|$)", r"\1\1", str(folder)).replace("'", "\\'")
    return f"'{text}'"


def _close(folder: Path, asked: Sequence[Point], missing: Sequence[Point]) -> None:
    from lab.analysis import report

    ended = store.statuses(folder)
    status = [ended.get(point.id, "failed") for point in asked]  # a run whose job died left no card
    page = folder
    if {"finished", "diverged"} & set(ended.values()):
        store.gather(folder)
        page = report.build([folder])
        print(report.summary([folder]))
    failed, diverged = (status.count(word) for word in ("failed", "diverged"))
    counts = f"{len(missing) - failed} trained, {len(asked) - len(missing)} already there"
    print(f"{counts}, {diverged} diverged, {failed} failed; report: {page}")
    if failed:
        raise SystemExit(1)


def train_fleet(folder: Path, plan: str, index: int) -> None:
    """Train one fleet of a plan and leave its runs behind; a fault of a run is recorded, not raised."""
    from lab.config import columns, run_config
    from lab.fleet import Fleet
    from lab.record import Tape, card, verdict
    from lab.tracking import Tracking
    from lab.train import train

    machine.settle()
    fleet = plans.thaw(folder, plan)["fleets"][index]
    ids, configs = [point["id"] for point in fleet], [run_config(point["tree"]) for point in fleet]
    progress = Sayer(folder, plan, index, configs[0].steps)
    tracked = dict(zip(ids, map(columns, configs), strict=True))
    with Tracking(configs[0].tracker.entry, folder, tracked, progress.note) as tracking:
        try:
            tape = Tape(Fleet(configs))
            for moment in train(tape.fleet):
                tape.keep(moment)
                progress.hear(moment)
                if tracking.open and moment.heard:
                    tracking.log(moment.step, dict(zip(ids, tape.latest(), strict=True)))
            runs = tape.runs()
        except Exception as fault:
            progress.note(traceback.format_exc().rstrip())
            runs = [({"status": "failed", "reason": f"{type(fault).__name__}: {fault}".split("\n")[0]}, [])] * len(ids)
        for name, config, (outcome, metrics) in zip(ids, configs, runs, strict=True):
            row = card(name, config, outcome)
            store.write_run(folder, row, metrics)
            tracking.end(row)
    progress.end(verdict(runs), [o["final_val_loss"] for o, _ in runs if o["status"] != "failed"])
