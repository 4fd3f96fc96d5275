"""A sweep that is killed loses the fleets in flight, and what it leaves in the end does not tell how often it was."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from lab import store

WORDS = ["train", "-m", "seed=0,1,2", "optimizer.lr=1e-2,1e-1", "intervention=[],[qk_layernorm]"]
SIZE = ["data=synthetic", "model.width=16", "steps=60", "hydra.sweeper.max_runs=2"]
TIMINGS = ["wall_seconds", "model_steps_per_second", "out"]


def begin(folder: Path, launcher: str, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "lab", *WORDS, *SIZE, f"hydra/launcher={launcher}", f"out={folder}", *more]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def finish(folder: Path, launcher: str = "local") -> store.Records:
    assert begin(folder, launcher).wait() == 0
    records = store.read(folder)
    return store.Records(records.runs.drop(columns=TIMINGS), records.metrics)


def wait_for_runs(folder: Path, count: int, sweep: subprocess.Popen[bytes]) -> None:
    while len(list(folder.glob("runs/*/run.json"))) < count and sweep.poll() is None:
        time.sleep(0.01)


def processes(group: int, pattern: str = "") -> list[int]:
    """Ids of the living processes of a group whose command line holds the pattern, oldest first."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            command = (place / "cmdline").read_text()
            if command and pattern in command and os.getpgid(int(place.name)) == group:
                found.append(int(place.name))
    return sorted(found)


needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")


def assert_same(records: store.Records, expected: store.Records) -> None:
    pd.testing.assert_frame_equal(records.runs, expected.runs, check_exact=True)
    order = ["id", "step", "probe", "where"]
    both = (part.metrics.sort_values(order, ignore_index=True) for part in (records, expected))
    pd.testing.assert_frame_equal(*both, check_exact=True)


@pytest.mark.parametrize("launcher", ["basic", "local"])
def test_a_sweep_killed_and_resumed_equals_one_left_alone(launcher: str, tmp_path: Path) -> None:
    sweep = begin(tmp_path / "killed", launcher)
    wait_for_runs(tmp_path / "killed", 3, sweep)
    sweep.kill()
    assert sweep.wait() == -signal.SIGKILL
    left = {path: path.read_bytes() for path in (tmp_path / "killed" / "runs").glob("*/run.json")}
    assert 3 <= len(left) < 12
    resumed = finish(tmp_path / "killed", launcher)
    assert {path: path.read_bytes() for path in left} == left  # not trained again, timings included
    assert_same(resumed, finish(tmp_path / "alone"))


@needs_proc
def test_an_interrupt_ends_with_130_and_leaves_no_process_behind(tmp_path: Path) -> None:
    sweep = begin(tmp_path, "local")
    wait_for_runs(tmp_path, 1, sweep)
    os.killpg(sweep.pid, signal.SIGINT)
    assert sweep.wait(timeout=30) == 130
    until = time.time() + 10
    while processes(sweep.pid) and time.time() < until:
        time.sleep(0.1)
    assert processes(sweep.pid) == []


@needs_proc
def test_a_job_that_is_killed_loses_only_itself(tmp_path: Path) -> None:
    sweep = begin(tmp_path, "local")
    wait_for_runs(tmp_path, 1, sweep)
    while len(server_and_jobs := processes(sweep.pid, "forkserver")) < 2 and sweep.poll() is None:
        time.sleep(0.01)
    os.kill(server_and_jobs[-1], signal.SIGKILL)
    assert sweep.wait(timeout=120) == 1
    assert 10 <= len(store.read(tmp_path).runs) < 12
    assert len(finish(tmp_path).runs) == 12


def test_a_damaged_run_is_trained_again_to_the_same_bits(tmp_path: Path) -> None:
    whole = finish(tmp_path)
    damaged, gone = sorted((tmp_path / "runs").glob("*/metrics.parquet"))[:2]
    damaged.write_bytes(damaged.read_bytes()[:-100])
    gone.unlink()
    for table in ("runs.parquet", "metrics.parquet"):
        (tmp_path / table).unlink()
    assert len(store.read(tmp_path).runs) == 10
    assert_same(finish(tmp_path), whole)


@pytest.mark.slow
def test_many_kills_change_nothing(tmp_path: Path) -> None:
    chance, expected = random.Random(0), finish(tmp_path / "alone")
    for attempt in range(12):
        sweep = begin(tmp_path / "killed", ("basic", "local")[attempt % 2])
        time.sleep(chance.uniform(0.5, 6))
        sweep.kill()
        sweep.wait()
    assert_same(finish(tmp_path / "killed"), expected)
