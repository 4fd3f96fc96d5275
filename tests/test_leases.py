"""Commands in one folder share its runs: a run has one holder, the dead hold nothing, and what they left is trained."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lab.records import leases, store
from lab.sweeping.job import train_fleet
from lab.sweeping.launch import train_plan
from lab.sweeping.planner import plan_sweep
from lab.sweeping.request import Request
from small import tree
from sweeping import TIMINGS, assert_same
from test_store import leave

RUNS = [f"run{number}" for number in range(6)]


def held(folder: Path, runs: Sequence[str] = RUNS, request: str = "") -> list[str]:
    """The runs that a job would get just now."""
    with leases.hold(folder, runs, request) as chosen:
        return chosen


def test_a_run_has_one_holder_until_it_is_released(tmp_path: Path) -> None:
    with leases.hold(tmp_path, RUNS[:4]) as theirs:
        assert theirs == RUNS[:4]
        assert held(tmp_path) == RUNS[4:]
        assert leases.held(tmp_path) == {*RUNS[:4]}
    assert held(tmp_path) == RUNS
    assert leases.held(tmp_path) == set()
    assert [path.name for path in (tmp_path / "plans/leases").iterdir()] == ["claims.lock"]


def test_a_command_reads_once_what_its_jobs_left_to_others(tmp_path: Path) -> None:
    leave(tmp_path, "run2")
    with leases.hold(tmp_path, RUNS[:2], "theirs"):
        assert held(tmp_path, RUNS[:4], "mine") == ["run3"]
    assert leases.left(tmp_path, "theirs") == set()
    assert leases.left(tmp_path, "mine") == {*RUNS[:3]}
    assert leases.left(tmp_path, "mine") == set()


def test_what_is_recorded_is_held_by_nobody(tmp_path: Path) -> None:
    leave(tmp_path, "run1")
    leave(tmp_path, "run2", "diverged")
    leave(tmp_path, "run3", "failed")
    assert held(tmp_path) == ["run0", "run3", "run4", "run5"]


def test_a_process_that_is_killed_holds_nothing_from_then_on(tmp_path: Path) -> None:
    program = (
        "import os; from pathlib import Path; from lab.records import leases\n"
        f"with leases.hold(Path({str(tmp_path)!r}), {RUNS!r}): print('held', flush=True); os.read(0, 1)"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout
    assert other.stdout.readline() == "held\n"
    assert held(tmp_path) == []
    other.kill()
    other.communicate()
    with leases.hold(tmp_path, RUNS) as mine:
        assert mine == RUNS
        assert held(tmp_path) == []
    assert [path.name for path in (tmp_path / "plans/leases").iterdir()] == ["claims.lock"]


def test_many_at_once_each_get_what_no_other_has(tmp_path: Path) -> None:
    runs, gate = [f"r{number}" for number in range(40)], threading.Barrier(8)

    def claim(number: int) -> list[str]:
        with leases.hold(tmp_path, runs[number:] + runs[:number]) as chosen:
            gate.wait()
            return chosen

    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(claim, range(8)))
    assert sorted(run for each in got for run in each) == sorted(runs)
    assert held(tmp_path, runs) == runs


CONFIG = ["data=synthetic", "steps=3", "model.width=16", "model.depth=1", "seq_len=16", "batch_size=4"]
CONFIG += ["probes.every=2", "validation=short"]


def trained(folder: Path, disturb: Callable[[Sequence[str]], Any]) -> store.Records:
    """The records of two fleets of two runs; ``disturb`` gets the ids of the runs before each round of jobs."""
    trees = [{**tree(f"seed={s}", f"optimizer.lr={lr}", *CONFIG), "out": str(folder)} for s in (0, 1) for lr in (1, 2)]
    plan = plan_sweep(trees, max_runs=2, is_single=False, shard="1/1", is_local=True, slots=[None])

    def launch(jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
        disturb([point.id for point in plan.mine])
        for fleet, _ in jobs:
            name, index, request = fleet.removeprefix("fleet=").split("/")
            train_fleet(folder, name, int(index), request=request)
        return []

    train_plan(plan, Mock(launch=launch), Request(command="lab"))
    records = store.read(folder)
    return store.Records(records.runs.drop(columns=TIMINGS), records.metrics)


@pytest.mark.usefixtures("unreported", "briefly")
def test_runs_that_others_hold_are_trained_once_they_leave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(tmp_path / "alone", lambda runs: None)
    assert "4 trained, 0 already there" in capsys.readouterr().out
    theirs = ExitStack()

    def hold(runs: Sequence[str]) -> None:
        if not rounds:
            theirs.enter_context(leases.hold(tmp_path / "shared", runs[1:3]))
        rounds.append(len(runs))

    def leave_them(_: float) -> None:
        assert len(store.read(tmp_path / "shared").runs) == 2
        theirs.close()

    rounds = list[int]()
    monkeypatch.setattr("lab.sweeping.launch.time.sleep", leave_them)
    assert_same(trained(tmp_path / "shared", hold), alone)
    said = capsys.readouterr()
    assert "waiting for another command, which trains 2 of these runs" in said.err
    assert "4 trained, 0 already there" in said.out
    assert len(rounds) == 2
