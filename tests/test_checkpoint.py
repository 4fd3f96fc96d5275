"""A fleet that is cut off goes on from its newest checkpoint, to the same bits; a checkpoint is data, nothing else."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import Fleet, RunConfig
from lab.core import files, machine
from lab.records import plans, store
from lab.sweeping.job import train_resumably
from lab.sweeping.planner import points, unfinished_fleets
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from lab.training.loop import StepResult
from lab.training.recorder import Recorder, Row
from lab.training.shards import ShardedReader
from small import configs, tree
from sweeping import assert_same, finished, needs_proc, processes

IDS = ["a", "b", "c"]
WANTED = (
    "optimizer.lr=1e-3",
    "optimizer.lr=1e-1 seed=1",
    "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0 seed=2",
)


pytestmark = pytest.mark.xdist_group("checkpoint")  # one process makes the whole that others go on to


class CutError(Exception):
    """What ends a training that is under way."""


def go_on(
    folder: Path, wanted: list[RunConfig], *, cut_after: int = 99, ids: list[str] = IDS, **keeping: Any
) -> tuple[list[tuple[str, int | None, Sequence[Row]]], list[int], list[str]]:
    """Status, step of divergence and rows of every run, the steps made in this process, and what was noted."""
    steps: list[int] = []
    notes: list[str] = []

    def keep(result: StepResult) -> None:
        steps.append(result.step)
        if len(steps) > cut_after:
            raise CutError

    keeper = Checkpointer(folder, ids, CheckpointConfig(**{"steps": 4, "minutes": 0.0, "keep": 2, **keeping}))
    machine.configure_torch()
    try:
        tape = Recorder(Fleet(wanted))
        assert train_resumably(tape, keeper, keep, notes.append, lambda: False)
    except CutError:
        return [], steps, notes
    return [(outcome["status"], outcome["diverged_at"], rows) for outcome, rows, _ in tape.runs()], steps, notes


def left(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoints/*/*.pt"), key=lambda path: int(path.stem))


def test_a_fleet_cut_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    wanted = configs(*WANTED, shared=("probes.every=3",))
    whole, steps, _ = go_on(tmp_path / "alone", wanted)
    assert steps == [0, *range(12)]
    go_on(tmp_path, wanted, cut_after=10)
    assert [path.stem for path in left(tmp_path)] == ["4", "8"]
    resumed, steps, notes = go_on(tmp_path, wanted)
    assert steps == [8, 9, 10, 11]
    assert notes == []
    assert repr(resumed) == repr(whole)
    assert any("nan" in repr(run) for run in whole)  # one of them had diverged, before the cut


def test_a_run_that_diverged_before_the_cut_remembers_at_which_step(tmp_path: Path) -> None:
    wanted = configs(WANTED[2], shared=("probes.every=1", "intervention=[]"))
    go_on(tmp_path, wanted, ids=["c"], cut_after=10)
    ((status, diverged_at, rows),), steps, _ = go_on(tmp_path, wanted, ids=["c"])
    bad = [step for step, probe, _, value in rows if probe == "train_loss" and not math.isfinite(value)]
    assert (status, diverged_at) == ("diverged", bad[0])
    assert bad[0] < steps[0] == 8


def test_the_newest_stay_and_older_ones_go(tmp_path: Path) -> None:
    go_on(tmp_path, configs(""), cut_after=11, steps=2, keep=3)
    assert [path.stem for path in left(tmp_path)] == ["6", "8", "10"]
    assert sorted(path.name for path in left(tmp_path)[0].parent.iterdir()) == ["10.pt", "6.pt", "8.pt", "fleet.json"]


def test_minutes_count_too_and_zero_is_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    keeper = Checkpointer(tmp_path, IDS, CheckpointConfig(steps=0, minutes=10, keep=1))
    never = Checkpointer(tmp_path, IDS, CheckpointConfig(steps=0, minutes=0, keep=1))
    now[0] = 599
    assert not keeper.due(8)
    now[0] = 600
    assert keeper.due(8)
    assert not never.due(8)
    keeper.save(8, {}, {})
    assert not keeper.due(9)


def test_one_that_is_cut_short_is_noted_and_an_older_one_used(tmp_path: Path) -> None:
    wanted = configs(*WANTED)
    whole, *_ = go_on(tmp_path / "alone", wanted)
    go_on(tmp_path, wanted, cut_after=10)
    newest = left(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-500])
    resumed, steps, (note,) = go_on(tmp_path, wanted)
    assert steps[0] == 4
    assert f"{newest} is not used" in note
    assert repr(resumed) == repr(whole)


@pytest.mark.slow
def test_one_of_another_config_is_noted_and_not_used(tmp_path: Path) -> None:
    go_on(tmp_path, configs(*WANTED), cut_after=10)
    wider = configs(*WANTED, shared=("model.width=24",))
    _, steps, notes = go_on(tmp_path, wider)
    assert steps == [0, *range(12)]
    assert len(notes) == 2
    assert all("of another config" in note for note in notes)
    left(tmp_path)[0].parent.rename(tmp_path / "checkpoints" / files.digest(["x", "y", "z"]))
    _, steps, notes = go_on(tmp_path, wider, ids=["x", "y", "z"])
    assert len(notes) == 2
    assert steps[0] == 0


class Trap:
    """Unpickled, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_reading_runs_nothing(tmp_path: Path) -> None:
    go_on(tmp_path, configs(*WANTED), cut_after=10)
    sprung = tmp_path / "sprung"
    torch.save({"tensors": {}, "rest": Trap(sprung)}, left(tmp_path)[-1])
    _, steps, (note,) = go_on(tmp_path, configs(*WANTED))
    assert steps[0] == 4
    assert note.endswith("is not used: it is damaged, or holds more than tensors and plain values")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(pickle.UnpicklingError, match="is not allowed"):
        ShardedReader(tmp_path).shapes()
    assert not sprung.exists()


def test_a_checkpoint_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    rows, _, notes = go_on(tmp_path, configs(""))
    assert len(rows) == 1
    assert len(notes) == 2
    assert all("cannot write" in note for note in notes)


def test_what_was_begun_as_a_fleet_stays_one(tmp_path: Path) -> None:
    asked = points(tree(f"seed={seed}") for seed in range(5))
    names = [point.id for point in asked]
    begun = [names[1:3], ["gone"], names[2:4], names[3:5]]
    assert [[p.id for p in fleet] for fleet in unfinished_fleets(asked, begun, None)] == [names[1:3], names[3:5]]
    assert unfinished_fleets(asked, begun, 2) == unfinished_fleets(asked, begun, None), "a full fleet goes on"
    assert unfinished_fleets(asked, begun, 1) == []


def test_checkpoints_go_when_all_runs_of_their_fleet_have_ended(tmp_path: Path) -> None:
    go_on(tmp_path, configs(*WANTED), cut_after=10)
    plans.remove_checkpoints(tmp_path, ["a", "b"])
    assert plans.checkpointed_fleets(tmp_path) == [IDS]
    plans.remove_checkpoints(tmp_path, ["a", "b", "c", "d"])
    assert plans.checkpointed_fleets(tmp_path) == []


# Two fleets, in each of which a run diverges long before the first checkpoint.
LONG = [
    "train",
    "-m",
    "seed=0,1",
    "data=synthetic",
    "validation=short",
    "model.width=16",
    "steps=120",
    "checkpoint.steps=20",
]
LONG += ["optimizer.lr=1e-2,1e30", "optimizer.clip=inf", "schedule.warmup=0", "hydra.sweeper.max_runs=2"]


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lab", *LONG, *words, f"out={folder}"]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_checkpoint(folder: Path, sweep: subprocess.Popen[str]) -> None:
    while not left(folder) and sweep.poll() is None:
        time.sleep(0.01)


def finish(folder: Path) -> store.Records:
    return finished(folder, *LONG, "hydra/launcher=basic")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> store.Records:
    records = finish(tmp_path_factory.mktemp("alone"))
    diverged_at = records.runs.loc[records.runs["optimizer.lr"] == 1e30, "diverged_at"]
    assert len(diverged_at) == 2
    assert diverged_at.between(0, 19).all()
    return records


@pytest.mark.slow
def test_a_sweep_killed_in_mid_run_goes_on_to_the_same_records(tmp_path: Path, whole: store.Records) -> None:
    sweep = begin(tmp_path, "hydra/launcher=basic")
    wait_for_checkpoint(tmp_path, sweep)
    sweep.kill()
    sweep.communicate()
    assert left(tmp_path)
    assert not (tmp_path / "runs").exists()
    assert_same(finish(tmp_path), whole)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("everybody", [False, True])
def test_sigterm_keeps_and_exits_75(everybody: bool, tmp_path: Path, whole: store.Records) -> None:
    """As a scheduler sends it: to the command, or to every process of it."""
    sweep = begin(tmp_path, "hydra/launcher=local", "hydra.launcher.processes=1")
    wait_for_checkpoint(tmp_path, sweep)
    (os.killpg if everybody else os.kill)(sweep.pid, signal.SIGTERM)
    error = sweep.communicate(timeout=60)[1]
    assert sweep.returncode == 75, error
    assert "preempted; the same command resumes from the checkpoint" in error
    until = time.time() + 10
    while processes(sweep.pid) and time.time() < until:
        time.sleep(0.1)
    assert processes(sweep.pid) == []
    assert left(tmp_path)
    assert_same(finish(tmp_path), whole)


@pytest.mark.slow
@needs_proc
def test_hundreds_of_signals_stop_a_worker_once(tmp_path: Path, whole: store.Records) -> None:
    """They come while it trains, saves and ends, faster than a handler returns, and to the command as well."""
    sweep = begin(tmp_path, "hydra/launcher=local", "hydra.launcher.processes=1")
    wait_for_checkpoint(tmp_path, sweep)
    for _ in range(500):
        for process in processes(sweep.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
    error = sweep.communicate(timeout=60)[1]
    assert sweep.returncode == 75, error
    assert "Traceback" not in error
    assert error.count("stopping") == 1
    assert left(tmp_path)
    assert_same(finish(tmp_path), whole)
