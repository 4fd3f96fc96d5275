"""A file of data that changes while a plan is under way: its runs fail, and nothing is recorded under a wrong id."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from lab import Fleet, main
from lab.core.errors import RequestError
from lab.records import plans, store
from lab.sweeping import job
from lab.sweeping.planner import points
from lab.training.engine import ProbeValues
from lab.training.recorder import run_card
from small import forget_data, tree

FOX, SPHINX = "the quick brown fox jumps over the lazy dog. " * 200, "jackdaws love my big sphinx of quartz. " * 230
STEPS, CHANGED = 6, "the data changed since these runs were planned; nothing was recorded"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """The file that will change."""
    path = tmp_path / "text.txt"
    path.write_text(FOX)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where records go."""
    return tmp_path / "out"


def words(text: Path) -> list[str]:
    return ["data=text", f"data.path={text}", f"steps={STEPS}", "checkpoint.steps=2", "model.depth=1"]


def plan_of_two(folder: Path, text: Path) -> str:
    """A frozen plan of two seeds, each a fleet."""
    fleets = [[{"id": p.id, "tree": p.tree}] for p in points(tree(*words(text), f"seed={seed}") for seed in (0, 1))]
    return plans.freeze(folder, fleets)


def verdict(folder: Path, plan: str, index: int = 0) -> str:
    """Train a fleet, of which no run may be left behind; its last line."""
    assert not job.train_fleet(folder, plan, index)
    assert not (folder / "runs").exists()
    progress = plans.read_progress(folder, plan)[index]
    assert progress.notes == []
    return str(progress.verdict)


def steps_made(monkeypatch: pytest.MonkeyPatch, at_step: int, act: Callable[[], object]) -> list[int]:
    """The steps that fleets make from now on; before one of them ``act``."""
    step, made = Fleet.step, list[int]()

    def stepping(fleet: Fleet, at: int) -> ProbeValues:
        if at == at_step:
            act()
        made.append(at)
        return step(fleet, at)

    monkeypatch.setattr(Fleet, "step", stepping)
    return made


@pytest.mark.parametrize("change", [lambda text: text.write_text(SPHINX), Path.unlink], ids=["rewritten", "gone"])
def test_a_fleet_of_other_data_than_planned_fails_in_one_line(
    change: Callable[[Path], object], folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of_two(folder, text)
    change(text)
    forget_data()
    made = steps_made(monkeypatch, 0, lambda: None)
    said = verdict(folder, plan)
    assert said.startswith(f"1 failed, {CHANGED}" if text.exists() else f"1 failed, data.path={text} does not exist;")
    assert "\n" not in said
    assert made == []


def test_a_checkpoint_of_other_data_is_not_gone_on_from(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of_two(folder, text)
    made = steps_made(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(job.Preempted):
        job.train_fleet(folder, plan, 0)
    assert list(folder.glob("checkpoints/*/4.pt"))
    text.write_text(SPHINX)
    forget_data()
    assert CHANGED in verdict(folder, plan)
    text.write_text(FOX)
    forget_data()
    assert job.train_fleet(folder, plan, 0)
    assert made == [0, 1, 2, 3, 4, 5]  # the checkpoint was kept for the data it is of
    assert store.read(folder).runs["status"].tolist() == ["finished"]


def test_data_that_change_during_training_leave_no_record(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of_two(folder, text)
    made = steps_made(monkeypatch, 3, lambda: text.write_text(SPHINX))
    assert CHANGED in verdict(folder, plan)
    assert made == [*range(STEPS)]
    assert CHANGED in verdict(folder, plan, 1)  # in the same process
    assert made == [*range(STEPS)]


def test_a_file_written_again_with_the_same_text_changes_nothing(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of_two(folder, text)
    steps_made(monkeypatch, 3, lambda: text.write_text(FOX))
    assert job.train_fleet(folder, plan, 0)
    assert len(store.read(folder).runs) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("unreported", "briefly")
def test_the_next_sweep_trains_on_the_data_as_they_are(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["model.width=16", "model.head_width=8", "seq_len=12", "batch_size=4", "probes.every=5"]
    launch = ["hydra/launcher=basic", "hydra.sweeper.max_runs=1"]
    command = ["train", "-m", "seed=0,1", *words(text), *sizes, *launch, f"out={folder}"]
    monkeypatch.setattr(sys, "argv", ["lab", *command])

    def sweep() -> tuple[int, str]:
        code = main(command)
        return code, capsys.readouterr().out

    with monkeypatch.context() as patch:
        steps_made(patch, 3, lambda: text.write_text(SPHINX))
        code, out = sweep()
    assert (code, out.count(f"1 failed, {CHANGED}")) == (1, 2)
    assert "0 trained, 0 already there, 0 diverged, 2 failed" in out
    for content, texts in ((SPHINX, 1), (FOX, 2)):
        text.write_text(content)
        code, out = sweep()
        assert code == 0
        assert "2 trained, 0 already there, 0 diverged, 0 failed" in out
        assert store.read(folder).runs["data_fingerprint"].nunique() == texts


def card(text: Path) -> dict[str, object]:
    """The card of a run on this text, as a fleet leaves it."""
    (point,) = points([tree(*words(text))])
    outcome = {"status": "finished", "final_val_loss": 2.0, "loss_at_init": 5.0}
    return run_card(point.id, point.config, outcome)


def test_the_store_refuses_a_card_of_another_id(folder: Path, text: Path) -> None:
    honest = card(text)
    for key, value in {"data_fingerprint": "0" * 16, "optimizer.lr": 0.5, "seed": 7}.items():
        with pytest.raises(RequestError, match=f"run {honest['id']} is not a run of this config and data"):
            store.write_run(folder, {**honest, key: value}, [])
    assert not folder.exists()
    store.write_run(folder, {**honest, "out": "elsewhere", "device": "cuda"}, [])
    pd.testing.assert_series_equal(store.read(folder).runs["id"], pd.Series([honest["id"]], name="id", dtype="string"))
