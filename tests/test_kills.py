"""Sweeps that are killed at any moment, and sweeps that run beside one another, leave what one sweep alone leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from lab import Fleet
from lab.core import machine
from lab.records import leases, store
from lab.sweeping.job import train_fleet
from lab.sweeping.launch import train_plan
from lab.sweeping.planner import plan_sweep
from lab.sweeping.request import Request
from small import brief, tree
from sweeping import TIMINGS, assert_same, needs_proc, processes

pytestmark = pytest.mark.xdist_group("sweeping")  # where processes to fork from are there already

RUNS = 4  # in two fleets
CONFIG = ["data=synthetic", "steps=20", "model.width=16", "model.depth=1", "seq_len=16", "batch_size=4"]
CONFIG += ["probes.every=4", "checkpoint.steps=5"]
WORDS = ["train", "-m", "seed=0,1", "optimizer.lr=1e-2,1e-1", "hydra.sweeper.max_runs=2", *CONFIG]


def sweep(folder: Path, trees: Sequence[dict[str, Any]], begun: Any) -> None:
    """The same points without Hydra, fleet after fleet; no figures are drawn, and little is held out."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    begin, patch = Fleet.__init__, pytest.MonkeyPatch()
    patch.setattr("lab.report.build.FIGURES", {})
    patch.setattr(Fleet, "__init__", lambda fleet, *configs: (begin(fleet, *configs), brief(fleet))[0])

    def launch(jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        for fleet, _ in jobs:
            plan, index, request = fleet.removeprefix("fleet=").split("/")
            train_fleet(folder, plan, int(index), request=request)
        return []

    begun.set()
    points = [{**tree, "out": str(folder)} for tree in trees]
    plan = plan_sweep(points, max_runs=2, is_single=False, shard="1/1", is_local=True, slots=[None])
    train_plan(plan, Mock(launch=launch), Request(command="lab"))


class Forked:
    """The sweep in a process that has torch already."""

    def __init__(self, folder: Path) -> None:
        processes: Any = machine.clean_process_context()
        trees = [tree(f"seed={seed}", f"optimizer.lr={lr}", *CONFIG) for seed in (0, 1) for lr in (1e-2, 1e-1)]
        begun = processes.Event()
        self.process = processes.Process(target=sweep, args=(folder, trees, begun))
        self.process.start()
        begun.wait()

    def ended(self, seconds: float | None = None) -> int | None:
        """Its exit code; None if it has not ended after so many seconds."""
        self.process.join(seconds)
        code: int | None = self.process.exitcode
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def left(folder: Path) -> store.Records:
    """What is left of a sweep that came to its end, timings left out."""
    runs, metrics, _ = store.read(folder)
    assert pd.read_parquet(folder / "runs.parquet")["id"].is_unique
    assert (folder / "report.html").exists()
    assert not list(folder.glob("checkpoints/*"))
    return store.Records(runs.drop(columns=TIMINGS), metrics)


def assert_whole(folder: Path, expected: store.Records) -> None:
    """Every record is there exactly once, as a sweep alone leaves it, in the tables and apart from them."""
    assert_same(left(folder), expected)
    assert len(list(folder.glob("runs/*/run.json"))) == RUNS
    for table in ("runs.parquet", "metrics.parquet"):
        (folder / table).unlink()
    records = store.read(folder)
    assert_same(store.Records(records.runs.drop(columns=TIMINGS), records.metrics), expected)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[store.Records, float]:
    """The records of a sweep, and the seconds it takes once it has begun."""
    folder = tmp_path_factory.mktemp("alone")
    swept, began = Forked(folder), time.perf_counter()
    assert swept.ended() == 0
    return left(folder), time.perf_counter() - began


@pytest.mark.slow
def test_a_sweep_killed_at_any_moment_is_the_sweep(tmp_path: Path, alone: tuple[store.Records, float]) -> None:
    """It begins again wherever it was killed, and another where one came to its end."""
    kills, chance, folder = 10, random.Random(0), tmp_path / "first"
    while kills:
        swept = Forked(folder)
        if swept.ended(chance.uniform(0, alone[1])) is None:
            swept.kill()
            kills -= 1
        else:
            assert swept.ended() == 0
            assert_whole(folder, alone[0])
            folder = tmp_path / f"{kills} to go"
    assert Forked(folder).ended() == 0
    assert_whole(folder, alone[0])


def together(folder: Path) -> list[subprocess.Popen[str]]:
    """Two commands that train the same in a folder; each holds runs already."""
    words = [sys.executable, "-m", "lab", *WORDS, "steps=300", "hydra/launcher=basic", f"out={folder}"]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True) for _ in range(2)]
    while len(leases.held(folder)) < RUNS and not any(one.poll() for one in both):
        time.sleep(0.01)
    return both


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> store.Records:
    folder = tmp_path_factory.mktemp("longer")
    words = [sys.executable, "-m", "lab", *WORDS, "steps=300", "hydra/launcher=basic", f"out={folder}"]
    subprocess.run(words, check=True, capture_output=True)
    return left(folder)


@pytest.mark.slow
def test_two_commands_in_one_folder_share_the_fleets(tmp_path: Path, longer: store.Records) -> None:
    both = together(tmp_path)
    for said, _ in [one.communicate() for one in both]:
        assert "2 trained, 2 by another command, 0 already there, 0 diverged, 0 failed" in said
    assert_whole(tmp_path, longer)


@pytest.mark.slow
def test_one_of_two_commands_takes_over_from_a_killed_one(tmp_path: Path, longer: store.Records) -> None:
    killed, kept = together(tmp_path)
    killed.kill()
    killed.communicate()
    said, warned = kept.communicate()
    assert kept.returncode == 0, warned
    assert "4 trained, 0 already there, 0 diverged, 0 failed" in said
    assert_whole(tmp_path, longer)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "ended with exit code -9"), (signal.SIGSTOP, "was killed")]
)
def test_a_job_that_dies_or_hangs_costs_its_own_runs(number: int, said: str, tmp_path: Path) -> None:
    """As the kernel kills what takes too much memory, or as a job waits for ever for a disk."""
    words = [sys.executable, "-m", "lab", *WORDS, "steps=300", "hydra.launcher.timeout_minutes=1", f"out={tmp_path}"]
    swept = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(list(tmp_path.glob("plans/*.progress/*"))) < 2 and swept.poll() is None:
        time.sleep(0.01)
    os.kill(max(processes(swept.pid, "forkserver")), number)
    out, error = swept.communicate()
    assert swept.returncode == 1
    assert "2 trained, 0 already there, 0 diverged, 2 failed" in out
    [line] = [line for line in error.splitlines() if line.startswith("lab: a job died: job ")]  # beside progress
    assert said in line
    assert len(store.read(tmp_path).runs) == RUNS - 2
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    assert len(store.read(tmp_path).runs) == RUNS
