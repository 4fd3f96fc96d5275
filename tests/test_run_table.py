"""Tables with a row per run, from any trainer: read in every format, reported like any results folder, or refused."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from lab import main
from lab.analysis import from_frame, study
from lab.records import run_table, store
from lab.studies.figures import FIGURES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "your_own_sweep.md"
PUBLISHED = DOCS / "tables" / "z_loss_16M_to_221M.csv"
LRS = (1e-3, 1e-2, 1e-1, 3e-1)


def table(seeds: int = 3, **columns: object) -> pd.DataFrame:
    """Two arms at two sizes; the arm ``clip`` off is unstable at the highest learning rate, and worse by its seed."""
    rows = [
        {
            "Learning Rate": lr,
            "eval/loss": 3.0 - size / 1e6 + (2.0 if clip == "off" and lr == 0.3 else 0.0) + 0.01 * seed,
            "n_params": size,
            "seed": seed,
            "clip": clip,
            "tokens/s": 100.0 * lr + seed,
            "host": f"node{seed}",
        }
        for clip in ("off", "on")
        for size in (100_000, 400_000)
        for lr in LRS
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows).assign(**columns)


def import_it(folder: Path, frame: pd.DataFrame, *options: str) -> int:
    frame.to_csv(folder / "runs.csv", index=False)
    return main(["import", str(folder / "runs.csv"), f"out={folder / 'out'}", *options])


def test_columns_are_found_and_settings_told_from_measurements(tmp_path: Path) -> None:
    assert import_it(tmp_path, table(), "--steps", "500") == 0
    records = store.read(tmp_path / "out")
    points = from_frame(table()).points
    assert list(dict.fromkeys(points["arm"])) == ["clip off", "clip on"]
    assert sorted(points["size"].unique()) == [100_000, 400_000]
    assert sorted(points["lr"].unique()) == sorted(LRS)
    assert set(records.runs["steps"]) == {500}
    assert set(records.runs["notes"]) == {f"host: node{seed}" for seed in range(3)}
    assert {*records.metrics["probe"]} == {"val_loss", "tokens/s"}
    assert set(records.metrics["step"]) == {500}


def test_every_format_gives_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table().assign(**{"eval/loss": lambda runs: runs["eval/loss"].where(runs["seed"] > 0)})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "b.tsv", index=False, sep="\t")
    frame.to_json(tmp_path / "c.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "d.parquet")
    monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / "c.jsonl").read_text()))
    sources = [*map(str, sorted(tmp_path.iterdir())), "-"]
    columns = run_table.Columns(initial_loss="9")
    first, *others = [run_table.records_of(run_table.read_table(source), columns) for source in sources]
    assert (first.runs["status"] == "diverged").sum() == 16
    for one in others:
        pd.testing.assert_frame_equal(one.runs, first.runs)
        pd.testing.assert_frame_equal(one.metrics, first.metrics)


def test_published_runs_have_the_published_sensitivity() -> None:
    """16M to 221M parameters with and without z-loss (arXiv 2601.02031): S as computed from the same losses by hand."""
    published = from_frame(pd.read_csv(PUBLISHED))
    curves = published.curves.set_index(["arm", "size"])["total"].map(lambda interval: interval.mean)
    shown = [round(curves[("z-loss off", size)], 3) for size in (16_000_000, 29_000_000, 57_000_000)]
    assert shown == [0.262, 0.336, 0.435]
    shown = [round(curves[("z-loss on", size)], 3) for size in (16_000_000, 29_000_000, 57_000_000)]
    assert shown == [0.046, 0.028, 0.201]
    assert published.curves["total"].map(lambda interval: interval.n).eq(1).all()


def test_the_page_shows_what_its_code_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its tables, the second; the first has the sensitivity of the runs of the lab that it was made from."""
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(DOCS.parent)
    [_, in_python] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(in_python, {})  # the page's own code
    assert capsys.readouterr().out in page
    with (DOCS / "tables" / "my_trainer.csv").open() as file:
        assert "".join(next(file) for _ in range(3)) in page
    own = study("results/quickstart").curves["total"].map(lambda interval: interval.mean)
    read = from_frame(pd.read_csv(DOCS / "tables" / "my_trainer.csv"), initial_loss="eval/loss_at_step_0").curves
    assert read["total"].map(lambda interval: interval.mean).tolist() == pytest.approx(own.tolist())


def test_the_commands_of_the_page_run_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    """All but the one on event files, which takes an extra."""
    page = PAGE.read_text(encoding="utf-8")
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    commands = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    without_extra = [line for line in commands if "--tensorboard" not in line]
    assert len(without_extra) == len(commands) - 1 == 8
    for line in without_extra:
        assert main(shlex.split(line)[1:]) == 0, line
    (forecast,) = re.findall(r"```text\n(Best learning rate\n.*?)```", page, re.DOTALL)
    assert forecast in capsys.readouterr().out
    assert "from 0.001 to 0.3" in Path("runs/my_trainer/report.html").read_text()


def test_runs_of_wandb_become_a_table_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for ``wandb``, whose runs have nested configs and summaries."""
    runs = [
        SimpleNamespace(
            config={"optimizer": {"lr": lr}, "seed": seed, "n_params": 1000},
            summary=SimpleNamespace(_json_dict={"eval/loss": 2 + lr + seed, "_step": 99, "_runtime": 3.5}),
        )
        for lr in LRS
        for seed in range(3)
    ]
    projects = {"me/my-project": runs}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=lambda: SimpleNamespace(runs=projects.__getitem__)))
    monkeypatch.chdir(tmp_path)
    [of_wandb, _] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(of_wandb, {})  # the page's own code
    for is_new in (True, False):
        capsys.readouterr()
        assert main(["import", "runs.csv", "out=out", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"folder": "out", "runs": len(runs), "is_new": is_new}
    records = store.read(tmp_path / "out")
    assert sorted(records.runs["optimizer.lr"].unique()) == sorted(LRS)
    assert set(records.runs["steps"]) == {99}


def test_a_diverged_run_counts_at_its_initial_loss() -> None:
    frame = table(seeds=1)
    frame.loc[frame["Learning Rate"] == 0.3, "eval/loss"] = [math.nan, math.inf, math.nan, -math.inf]
    points = from_frame(frame, initial_loss=7.0).points
    assert points.loc[points["lr"] == 0.3, "capped"].tolist() == [7.0] * 4
    assert set(points.loc[points["lr"] == 0.3, "outcome"]) == {"diverged"}


def test_all_commands_work_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, base = tmp_path / "out", tmp_path / "baseline.json"
    assert import_it(tmp_path, table(), "--initial-loss", "9") == 0
    assert main(["report", str(out)]) == 0
    assert (out / "figures" / "learning_rate_sensitivity.svg").exists()
    page = (out / "report.html").read_text()
    assert "imported from runs.csv" in page
    assert " is lowest for clip on: 0.000" in page
    assert "model size: " in page
    assert "without embeddings" not in page
    assert main(["status", str(out)]) == 0
    assert main(["compare", str(out), str(out)]) == 0
    assert main(["export", str(out), "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    assert main(["baseline", "save", str(out), str(base)]) == 0
    assert main(["check", str(out), "--baseline", str(base)]) == 0
    assert main(["claims", str(out)]) == 0
    assert main(["predict", str(out)]) == 2
    assert main(["batch", str(out)]) == 2
    assert "A fault of the lab" not in capsys.readouterr().err


def test_a_table_is_imported_once_or_replaced_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_it(tmp_path, table()) == 0
    first = (tmp_path / "out" / "runs.parquet").read_bytes()
    assert import_it(tmp_path, table()) == 0
    assert "48 runs already there" in capsys.readouterr().out
    assert import_it(tmp_path, table(seeds=2)) == 2
    assert "holds another table; --replace replaces it" in capsys.readouterr().err
    assert (tmp_path / "out" / "runs.parquet").read_bytes() == first
    assert import_it(tmp_path, table(seeds=2), "--replace") == 0
    assert len(store.read(tmp_path / "out").runs) == 32


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("second", ["two", "one"])
def test_no_run_of_two_tables_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str], second: str) -> None:
    """Tables have arms of their own by name; of two tables with one name, what repeats a point is named."""
    worse = table().assign(**{"eval/loss": lambda runs: runs["eval/loss"] + 0.5})
    outs = [tmp_path / "first", tmp_path / "second"]
    for frame, out, name in ((table(), outs[0], "one"), (worse, outs[1], second)):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        assert main(["import", str(tmp_path / f"{name}.csv"), f"out={out}"]) == 0
    assert main(["report", *map(str, outs)]) == 0
    said = capsys.readouterr().out
    arms = {f"clip {clip}, table {name}.csv" for clip in ("off", "on") for name in ("one", "two")}
    is_told_apart = second == "two"
    assert set(study(outs).points["arm"]) == (arms if is_told_apart else {"clip off", "clip on"})
    assert ("Left out, since another run is the same point: 48 runs" in said) != is_told_apart


def test_trained_records_are_never_replaced(tmp_path: Path) -> None:
    assert import_it(tmp_path, table()) == 0
    records = store.read(tmp_path / "out")
    store.write_imported(tmp_path / "out", records._replace(runs=records.runs.assign(versions="lab 0.1.0")))
    assert import_it(tmp_path, table(seeds=2), "--replace") == 2


@pytest.mark.usefixtures("undrawn")
def test_a_table_without_some_runs_of_a_grid_is_not_called_partial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_it(tmp_path, table().iloc[:-1], "--initial-loss", "9") == 0
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Partial: " not in (tmp_path / "out" / "report.html").read_text()
    figure = FIGURES["learning_rate_sensitivity"](store.read(tmp_path / "out"))
    assert not [text for text in figure.texts if "partial" in text.get_text()]
