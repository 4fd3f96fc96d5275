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
    from lab.config import RunConfig
    from lab.record import Run
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
    trees: Sequence[Mapping[str, Any]],
    launch: Launch,
    *,
    max_runs: int | None,
    dry_run: bool,
    one: bool,
    here: bool,
    processes: int,
) -> None:
    """Train what is missing of the points asked for, then gather and report.

    ``one`` refuses more than one point; ``here`` says that jobs run on this machine, so many ``processes`` at once, so
    its devices and its memory must do.

    Raises:
        RequestError: a point makes no sense, or the folder cannot take records; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    from lab.cost import estimate
    from lab.engine import can_compile
    from lab.memory import Host, find_host, most_runs
    from lab.record import label
    from lab.sweep import engine_for, pack, points, training_flops, with_engine

    asked = points(trees)
    outs = sorted({str(tree["out"]) for tree in trees})
    if one and len(asked) > 1:
        raise RequestError("several values given: lab train -m trains a sweep")
    if len(outs) > 1 or not outs[0]:
        raise RequestError(f"out must name one folder, not {', '.join(outs) or 'nothing'}")
    folder = Path(outs[0])
    devices = {point.config.device for point in asked}
    hosts = {device: find_host(device, processes) if here else Host() for device in devices}
    if here and any(point.config.engine == "compiled" for point in asked) and not can_compile():
        raise RequestError("engine=compiled needs a C++ compiler and Python's headers; engine=eager needs neither")
    there = store.statuses(folder)
    engine = store.check_version(folder) or (engine_for(asked) if can_compile() else "eager")
    asked = with_engine(asked, engine)
    missing = [point for point in asked if there.get(point.id, "failed") == "failed"]
    fleets = pack(missing, lambda config: most_runs(config, hosts[config.device], max_runs))
    if dry_run:
        for line in estimate(fleets, len(asked) - len(missing), hosts[asked[0].config.device]):
            print(line)
        return
    store.open_folder(folder, engine)
    store.note_command(folder, COMMAND.get())
    if fleets:
        name = plans.freeze(folder, {"fleets": [[{"id": p.id, "tree": p.tree} for p in fleet] for fleet in fleets]})
        labels = [label([point.config for point in fleet]) for fleet in fleets]
        sizes = [sum(training_flops(point.config) for point in fleet) for fleet in fleets]
        jobs = [[f"fleet={name}/{index}", f"out={quoted(folder)}"] for index in range(len(fleets))]
        with Watcher(folder, name, labels, sizes, _say, live=sys.stdout.isatty()):
            deaths = launch(jobs)
        for death in deaths:
            print(f"lab: {death}", file=sys.stderr)
    _close(folder, asked, missing)


def _say(text: str) -> None:
    print(text, end="", flush=True)


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
    from lab.config import run_config
    from lab.halving import outcomes
    from lab.record import card, verdict

    machine.settle()
    fleet = plans.thaw(folder, plan)["fleets"][index]
    ids, configs = [point["id"] for point in fleet], [run_config(point["tree"]) for point in fleet]
    progress = Sayer(folder, plan, index, configs[0].steps)
    progress.say(0)
    runs: list[Run] = []
    ended = outcomes(configs, partial(_attempt, progress), lambda text: print(f"lab: {text}", file=sys.stderr))
    for name, config, run in zip(ids, configs, ended, strict=True):
        store.write_run(folder, card(name, config, run[0]), run[1])
        runs.append(run)
    progress.say(configs[0].steps, verdict(runs))


def _attempt(progress: Sayer, configs: Sequence[RunConfig]) -> Sequence[Run]:
    """Train runs as one fleet; raises when memory gives out, and only then."""
    from lab.fleet import Fleet
    from lab.record import Tape, failure
    from lab.train import train

    try:
        tape = Tape(Fleet(configs))
        for moment in train(tape.fleet):
            tape.keep(moment)
            progress.say(moment.step)
        return tape.runs()
    except Exception as fault:
        if machine.is_out_of_memory(fault):
            raise
        traceback.print_exc()
        return [failure(f"{type(fault).__name__}: {fault}")] * len(configs)
