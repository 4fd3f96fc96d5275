"""A sweep that is killed loses the fleets in flight, and what it leaves in the end does not tell how often it was."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from lab.records import store
from sweeping import RUNS, assert_same, begin, begin_forked, finish, needs_proc, processes, wait_for_runs

pytestmark = pytest.mark.xdist_group("sweeping")  # one process makes the sweep that others are compared with


def goes_on_to_the_same(folder: Path, launcher: str, expected: store.Records) -> None:
    """A sweep that was killed trains what it lacks, and nothing else."""
    left = {path: path.read_bytes() for path in (folder / "runs").glob("*/run.json")}
    assert 3 <= len(left) < RUNS
    resumed = finish(folder, launcher)
    assert {path: path.read_bytes() for path in left} == left  # not trained again, timings included
    assert_same(resumed, expected)


def test_a_sweep_killed_and_resumed_equals_one_left_alone(tmp_path: Path, alone: tuple[Path, store.Records]) -> None:
    sweep = begin_forked(tmp_path)
    wait_for_runs(tmp_path, 3, sweep.is_alive)
    sweep.kill()
    sweep.join()
    assert sweep.exitcode == -signal.SIGKILL
    goes_on_to_the_same(tmp_path, "basic", alone[1])


@pytest.mark.slow
def test_a_killed_command_resumes_to_the_same_records(tmp_path: Path, alone: tuple[Path, store.Records]) -> None:
    sweep = begin(tmp_path, "local")
    wait_for_runs(tmp_path, 3, lambda: sweep.poll() is None)
    sweep.kill()
    assert sweep.wait() == -signal.SIGKILL
    goes_on_to_the_same(tmp_path, "local", alone[1])


@pytest.mark.slow
@needs_proc
def test_an_interrupt_ends_with_130_and_leaves_no_process_behind(tmp_path: Path) -> None:
    sweep = begin(tmp_path, "local")
    wait_for_runs(tmp_path, 1, lambda: sweep.poll() is None)
    os.killpg(sweep.pid, signal.SIGINT)
    assert sweep.wait(timeout=30) == 130
    until = time.time() + 10
    while processes(sweep.pid) and time.time() < until:
        time.sleep(0.1)
    assert processes(sweep.pid) == []


@needs_proc
@pytest.mark.slow
def test_a_job_that_is_killed_loses_only_itself(tmp_path: Path) -> None:
    sweep = begin(tmp_path, "local")
    seen: set[int] = set()
    while len(seen) < 4 and sweep.poll() is None:  # the server, two jobs, and one that has just begun
        seen |= {*processes(sweep.pid, "forkserver")}
        time.sleep(0.05)
    os.kill(max(seen), signal.SIGKILL)
    assert sweep.wait(timeout=120) == 1
    assert RUNS - 2 <= len(store.read(tmp_path).runs) < RUNS
    assert len(finish(tmp_path).runs) == RUNS


@pytest.mark.slow
def test_a_damaged_run_is_trained_again_to_the_same_bits(tmp_path: Path, alone: tuple[Path, store.Records]) -> None:
    folder, whole = shutil.copytree(alone[0], tmp_path / "damaged"), alone[1]
    damaged, gone = sorted((folder / "runs").glob("*/metrics.parquet"))[:2]
    damaged.write_bytes(damaged.read_bytes()[:-100])
    gone.unlink()
    for table in ("runs.parquet", "metrics.parquet"):
        (folder / table).unlink()
    assert len(store.read(folder).runs) == RUNS - 2
    assert_same(finish(folder), whole)
