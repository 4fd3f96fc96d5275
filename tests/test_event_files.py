"""Event files of TensorBoard become a table with a row per run, whoever wrote them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab import main
from lab.analysis import study
from lab.core.errors import RequestError
from lab.records import store, trackers
from labwatch.tables import run_folders
from sweeping import OutputOf

RESULTS = Path(__file__).parents[1] / "results"
LRS = (1e-3, 1e-2, 1e-1)


def write(folder: Path, scalars: dict[str, list[float]], config: dict[str, Any] | None = None) -> None:
    """Event files with these scalars at steps 0, 10, ... as a writer of another package makes them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    if config is not None:
        writer.add_event(Event(summary=hparams_pb(config)))
    for tag, values in scalars.items():
        for index, value in enumerate(values):
            event = Event(step=10 * index)
            event.summary.value.add(tag=tag, simple_value=value)
            writer.add_event(event)
    writer.close()


def loss(lr: float, arm: str, seed: int) -> list[float]:
    return [5.0, 3.0, 2.0 + (lr > 0.05) * (arm == "base") + 0.01 * seed]


def runs() -> list[tuple[float, str, int]]:
    return [(lr, arm, seed) for lr in LRS for arm in ("base", "clip") for seed in range(3)]


def test_an_extra_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(trackers, "distribution", missing)
    (tmp_path / "events.out.tfevents.1").touch()
    assert (
        output_of("import", tmp_path, f"out={tmp_path / 'out'}", code=2)
        == "lab: tensorboard is not installed: pip install 'instability-lab[tensorboard]'\n"
    )


@pytest.mark.extras
def test_runs_are_told_apart_by_their_paths(tmp_path: Path, output_of: OutputOf) -> None:
    for lr, arm, seed in runs():
        rates = [lr / 2, lr, 0.0]
        write(tmp_path / f"logs/{arm}/lr={lr}_seed={seed}", {"eval/loss": loss(lr, arm, seed), "schedule": rates})
    words = ["import", str(tmp_path / "logs"), f"out={tmp_path / 'out'}", "--size", "1000"]
    assert main(words) == 0
    made = study(tmp_path / "out")
    assert list(made.points["arm"].unique()) == ["folder base", "folder clip"]
    worst = made.points[made.points["lr"] == 0.1].groupby("arm")["loss"].mean()
    assert worst.to_dict() == pytest.approx({"folder base": 3.01, "folder clip": 2.01})
    assert set(made.records.runs["steps"]) == {20}
    assert {*made.records.metrics["probe"]} == {"val_loss", "schedule"}
    assert "18 runs already there" in output_of(*words)


@pytest.mark.extras
@pytest.mark.parametrize("place", ["", "1700000000.5"])
def test_hyper_parameters_come_from_their_plugin(tmp_path: Path, place: str) -> None:
    """Those of ``torch.utils.tensorboard`` lie in a folder below the run's, which is no run of its own."""
    for index, (lr, arm, seed) in enumerate(runs()):
        config = {"learning_rate": lr, "random_seed": seed, "clip": arm == "clip", "n_params": 1000}
        folder = tmp_path / f"run{index}"
        write(folder, {"train/loss": loss(lr, arm, seed)}, None if place else config)
        if place:
            write(folder / place, {"metric": [1.0]}, config)
    table, measured, _ = run_folders.read_run_folder(tmp_path, {}.get)
    assert len(table) == 18
    assert measured == {"train/loss", "step"}
    assert sorted(table["learning_rate"].unique()) == sorted(LRS)
    assert set(table["clip"]) == {True, False}


@pytest.mark.extras
def test_hyper_parameters_come_from_a_file_beside_the_events(tmp_path: Path) -> None:
    write(tmp_path / "version_0", {"val_loss": [3.0, 2.0]})
    (tmp_path / "version_0/hparams.yaml").write_text("optim: {lr: 0.01, betas: [0.9, 0.95]}\nseed: 3\n")
    row = run_folders.read_run_folder(tmp_path, {}.get).table.iloc[0]
    assert (row["optim.lr"], row["seed"], row["val_loss"]) == (0.01, 3, 2.0)
    assert row["optim.betas"] == "[0.9, 0.95]"
    (tmp_path / "version_0/hparams.yaml").write_text("a: &a {lr: 1}\nb: *a\n")
    with pytest.raises(RequestError, match=r"hparams\.yaml cannot be read: it has aliases"):
        run_folders.read_run_folder(tmp_path, {}.get)


@pytest.mark.extras
def test_a_logged_learning_rate_counts_at_its_peak(tmp_path: Path) -> None:
    write(tmp_path / "a", {"loss": [3.0, 2.0, math.nan], "optim/lr": [0.0, 0.1, 0.05]})
    write(tmp_path / "lr=0.2", {"loss": [3.0, 2.0], "lr": [0.0, 0.1]})
    table = run_folders.read_run_folder(tmp_path, {}.get).table
    assert table.loc["a", "optim/lr"] == pytest.approx(0.1)
    assert table.loc["lr=0.2", "lr"] == 0.2
    assert math.isnan(table.loc["a", "loss"])


@pytest.mark.extras
def test_what_this_lab_exported_is_read_back(tmp_path: Path) -> None:
    assert main(["export", str(RESULTS / "quickstart"), "--to", "tensorboard", "--out", str(tmp_path)]) == 0
    words = [str(tmp_path / "tensorboard"), "--arm", "intervention"]
    assert main(["import", *words, f"out={tmp_path / 'out'}"]) == 0
    own, read = (study(folder).curves for folder in (RESULTS / "quickstart", tmp_path / "out"))
    for name in ("size", "total"):
        means = [
            curves[name].map(lambda value: getattr(value, "mean", value)).sort_values(ignore_index=True)
            for curves in (own, read)
        ]
        pd.testing.assert_series_equal(*means, check_exact=False, rtol=1e-5)
    assert len(store.read(tmp_path / "out").runs) == 84


@pytest.mark.extras
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--loss", "train/los"], "--loss: no column 'train/los'; nearest: train/loss"),
        ([], "run lr=0.3 has no values of train/loss"),
        (["--lr", "rate"], "--lr: no column 'rate'; known: "),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    tmp_path: Path, output_of: OutputOf, options: list[str], said: str
) -> None:
    for lr in LRS:
        write(tmp_path / f"logs/lr={lr}", {"train/loss": [3.0, lr]})
    if not options:
        write(tmp_path / "logs/lr=0.3", {"grad_norm": [1.0]})
    words = [str(tmp_path / "logs"), f"out={tmp_path / 'out'}", "--size", "1000", *options]
    error = output_of("import", *words, code=2)
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.extras
def test_a_diverged_run_counts_at_the_loss_of_its_first_step(tmp_path: Path) -> None:
    for lr in LRS:
        write(tmp_path / f"logs/lr={lr}", {"loss": [6.0, math.nan if lr == 0.1 else 2.0]})
    assert main(["import", str(tmp_path / "logs"), f"out={tmp_path / 'out'}"]) == 0
    assert set(study(tmp_path / "out").points["capped"]) == {2.0, 6.0}


def grid(folder: Path, write_run: Callable[[Path, float, int, list[float]], None], suffix: str = "") -> None:
    """A run for each of three learning rates and two seeds; the highest learning rate diverges at once."""
    for lr in LRS:
        for seed in range(2):
            losses = [6.0, 5.0, *[math.nan] * 2] if lr == 0.1 else [6.0, 5.0, 4.0, 2.0 + lr + seed / 100]
            path = folder / f"lr={lr:g}_seed={seed}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_run(path, lr, seed, losses)


def hydra(path: Path, lr: float, seed: int, losses: list[float]) -> None:
    place = path.parent / f"{len(list(path.parent.iterdir()))}"
    (place / ".hydra").mkdir(parents=True)
    (place / ".hydra/overrides.yaml").write_text(f"- optim.lr={lr:g}\n- seed={seed}\n- +model=tiny\n")
    rows = [f"[2026-01-01][train][INFO] - step {10 * n} | loss {loss} | norm 1.0" for n, loss in enumerate(losses)]
    (place / "train.log").write_text("\n".join([*rows, ""]))


def ray(path: Path, lr: float, seed: int, losses: list[float]) -> None:
    path.mkdir()
    rows = [
        {"loss": loss, "training_iteration": n, "config": {"lr": lr, "seed": seed}} for n, loss in enumerate(losses)
    ]
    (path / "result.json").write_text("\n".join(map(json.dumps, rows)))


def json_lines(path: Path, lr: float, seed: int, losses: list[float]) -> None:
    """Rows of training and of evaluation, and a last one that was cut."""
    rows = [row for n, loss in enumerate(losses) for row in ({"step": n, "norm": 1.0}, {"step": n, "eval/loss": loss})]
    path.write_text("\n".join([*map(json.dumps, rows), '{"step": 1']))


def transformers(path: Path, lr: float, seed: int, losses: list[float]) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"learning_rate": lr, "seed": seed, "n_params": "124M"}))
    history = [{"step": n, "eval_loss": loss} for n, loss in enumerate(losses)]
    (path / "trainer_state.json").write_text(json.dumps({"log_history": history}, indent=2))


def comma_separated(path: Path, lr: float, seed: int, losses: list[float]) -> None:
    path.write_text("\n".join(["step,val_loss", *(f"{n},{loss}" for n, loss in enumerate(losses))]))


@pytest.mark.parametrize(
    ("write_run", "suffix"),
    [(hydra, ""), (ray, ""), (json_lines, ".jsonl"), (transformers, ""), (comma_separated, ".csv")],
)
def test_a_folder_of_runs_is_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write_run: Callable[..., None], suffix: str
) -> None:
    grid(tmp_path / "runs", write_run, suffix)
    assert main(["import", str(tmp_path / "runs"), f"out={tmp_path / 'out'}"]) == 0
    points = study(tmp_path / "out").points
    assert points["arm"].nunique() == 1
    assert sorted(points["lr"].unique()) == list(LRS)
    assert points.groupby("lr")["capped"].mean().tolist() == pytest.approx([2.006, 2.015, 6.0])
    assert "diverged" in capsys.readouterr().out


def test_what_is_no_log_is_named(tmp_path: Path, output_of: OutputOf) -> None:
    grid(tmp_path / "runs", comma_separated, ".csv")
    (tmp_path / "runs/README.txt").write_text("Nothing here.\n")
    assert re.search(r"not read +README.txt: ", output_of("import", tmp_path / "runs", f"out={tmp_path / 'out'}"))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_trainer_state_is_read_on_one_line_or_many(tmp_path: Path, indent: int | None) -> None:
    (tmp_path / "lr=0.1").mkdir()
    history = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in ((10, 3.0), (20, 2.5))]
    state = json.dumps({"epoch": 1.0, "log_history": history}, indent=indent)
    (tmp_path / "lr=0.1" / "trainer_state.json").write_text(state)
    row = run_folders.read_run_folder(tmp_path, {}.get).table.loc["lr=0.1"]
    assert (row["loss"], row["step"], row["lr"]) == (2.5, 20, 0.1)
