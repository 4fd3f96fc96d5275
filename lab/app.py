"""The Hydra task and the sweep around it: freeze the points, train one fleet per job, gather, report."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
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
    with suppress(FileNotFoundError):
        os.chdir(HydraConfig.get().runtime.cwd)  # workers of a cluster start anywhere; paths are meant from here
    plan, index = str(config.fleet).rsplit("/", 1)
    train_fleet(Path(config.out), plan, int(index))


# Not a decorator: a launcher sends the task to other processes by its name.
hydra_main = hydra.main(version_base="1.3", config_path=str(data_folder("conf")), config_name="config")(hydra_task)


def run_sweep(
    trees: Sequence[Mapping[str, Any]],
    launch: Launch,
    *,
    max_runs: int,
    dry_run: bool,
    one: bool,
    shard: str,
    here: bool,
) -> None:
    """Train what is missing of the points asked for, then gather and report.

    ``one`` refuses more than one point; ``shard`` i/n trains the i-th of n parts of them; ``here`` says that jobs run
    on this machine, so its devices must do.

    Raises:
        RequestError: a point makes no sense, or the folder cannot take records; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    from lab.cost import estimate, training_flops
    from lab.fleet import pick_device
    from lab.record import label
    from lab.sweep import pack, part, points

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
    mine, there = part(asked, max_runs, shard), store.statuses(folder)
    missing = [point for point in mine if there.get(point.id, "failed") == "failed"]
    fleets = pack(missing, max_runs)
    if dry_run:
        for line in estimate(fleets, len(mine) - len(missing)):
            print(line)
        return
    store.open_folder(folder)
    store.note_command(folder, COMMAND.get())
    if fleets:
        name = plans.freeze(folder, {"fleets": [[{"id": p.id, "tree": p.tree} for p in fleet] for fleet in fleets]})
        labels = [label([point.config for point in fleet]) for fleet in fleets]
        sizes = [sum(training_flops(point.config) for point in fleet) for fleet in fleets]
        jobs = [[f"fleet={name}/{index}", f"out={quoted(folder.absolute())}"] for index in range(len(fleets))]
        with Watcher(folder, name, labels, sizes, _say, live=sys.stdout.isatty()):
            deaths = launch(jobs)
        for death in deaths:
            print(f"lab: {death}", file=sys.stderr)
    store.note_command(folder, COMMAND.get())  # again: another shard that began just then may have missed it
    _close(folder, asked, mine, missing)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def quoted(folder: Path) -> str:
    """A path as the value of an override; Hydra reads a backslash as one, except before a quote."""
    text = re.sub(r"(\\*)(?='|$)", r"\1\1", str(folder)).replace("'", "\\'")
    return f"'{text}'"


def _close(folder: Path, asked: Sequence[Point], mine: Sequence[Point], missing: Sequence[Point]) -> None:
    from lab.analysis import report

    ended = store.statuses(folder)
    status = [ended.get(point.id, "failed") for point in mine]  # a run whose job died left no card
    elsewhere = len({point.id for point in asked} - {point.id for point in mine} - set(ended))
    end = f"{elsewhere} points of other shards are still missing in {folder}" if elsewhere else f"report: {folder}"
    if not elsewhere and {"finished", "diverged"} & set(ended.values()):
        store.gather(folder)
        end = f"report: {report.build([folder])}"
        print(report.summary([folder]))
    failed, diverged = (status.count(word) for word in ("failed", "diverged"))
    counts = f"{len(missing) - failed} trained, {len(mine) - len(missing)} already there"
    print(f"{counts}, {diverged} diverged, {failed} failed; {end}")
    if failed:
        raise SystemExit(1)


def train_fleet(folder: Path, plan: str, index: int) -> None:
    """Train one fleet of a plan and leave its runs behind; a fault of a run is recorded, not raised."""
    from lab.config import run_config
    from lab.fleet import Fleet
    from lab.record import Tape, card, verdict
    from lab.train import train

    machine.settle()
    fleet = plans.thaw(folder, plan)["fleets"][index]
    ids, configs = [point["id"] for point in fleet], [run_config(point["tree"]) for point in fleet]
    progress = Sayer(folder, plan, index, configs[0].steps)
    progress.say(0)
    try:
        tape = Tape(Fleet(configs))
        for moment in train(tape.fleet):
            tape.keep(moment)
            progress.say(moment.step)
        runs = tape.runs()
    except Exception as fault:
        traceback.print_exc()
        runs = [({"status": "failed", "reason": f"{type(fault).__name__}: {fault}".split("\n")[0]}, [])] * len(ids)
    for name, config, (outcome, metrics) in zip(ids, configs, runs, strict=True):
        store.write_run(folder, card(name, config, outcome), metrics)
    progress.say(configs[0].steps, verdict(runs))
