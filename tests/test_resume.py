"""A sweep that is killed loses the fleets in flight, and what it leaves in the end does not tell how often it was."""

from __future__ import annotations

import os
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
