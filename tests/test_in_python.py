"""Sweeps and runs from Python: the same records as the command line, as a study."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import lab
from lab.analysis import study
from lab.core.errors import RequestError
from lab.records import store
from lab.training.fleet import Fleet

TOY = ("scale=toy", "hydra/launcher=basic", "seed=0", "optimizer.lr=1e-2,1e-1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_sweep_returns_the_study_of_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    made = lab.sweep("smoke", *TOY, out="its place")
    assert "4 trained" in capsys.readouterr().out
    pd.testing.assert_frame_equal(made.points, study("its place").points)
    assert set(made.points["lr"]) == {1e-2, 1e-1}
    assert store.commands(Path("its place")) == [f"lab sweep smoke {' '.join(TOY)} 'out='\"'\"'its place'\"'\"''"]
    again = lab.sweep("smoke", *TOY, out=Path("its place"))
    assert "0 trained, 4 already there" in capsys.readouterr().out
    pd.testing.assert_frame_equal(again.seeds, made.seeds)


def test_a_file_of_ones_own_is_a_sweep() -> None:
    Path("mine.yaml").write_text("hydra: {sweeper: {params: {schedule.warmup: '0,0.5'}}}\n")
    words = ("scale=toy", "hydra/launcher=basic", "optimizer.lr=1e-3,1e-2,1e-1")
    made = lab.sweep(Path("mine.yaml"), *words, window=(1e-3, 1e-1))
    assert made.window == (1e-3, 1e-1)
    assert set(made.seeds["lrs"]) == {3}
    assert set(made.records.runs["schedule.warmup"]) == {0.0, 0.5}
    assert Path("runs/mine/runs.parquet").exists()


def test_train_makes_one_run_or_as_many_as_its_lists() -> None:
    assert len(lab.train("scale=toy", "hydra/launcher=basic", out="one").points) == 1
    assert store.commands(Path("one")) == ["lab train scale=toy hydra/launcher=basic out=one"]
    assert len(lab.train(*TOY).points) == 2
    assert store.commands(Path("runs/train"))[0].startswith("lab train -m ")


def test_runs_that_failed_are_in_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    lab.train(*TOY)
    monkeypatch.setattr(Fleet, "step", lambda *_: 1 / 0)
    made = lab.train(*TOY[:2], "seed=1", "optimizer.lr=1e-2")
    assert (len(made.points), len(made.failed)) == (2, 1)
    with pytest.raises(RequestError, match="all 1 runs failed"):
        lab.train(*TOY[:3], out="others")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quickstrat",), "unknown sweep 'quickstrat'; nearest: quickstart"),
        (("smoke", "optimizer.rl=1"), "optimizer.lr"),
        (("smoke", "--dry-run"), "--dry-run is for the command line; here overrides are KEY=VALUE"),
        (("smoke", "seed"), "unknown word 'seed'"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        lab.sweep(*words)
    assert not Path("runs").exists()


def test_a_job_that_imports_its_script_begins_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    with pytest.raises(RequestError, match="__main__"):
        lab.sweep("smoke", *TOY)


@pytest.mark.slow
def test_jobs_of_a_script_are_processes_of_their_own() -> None:
    Path("script.py").write_text(
        'import torch\nimport lab, lab.report.build\nlab.report.build.FIGURES = {}\nif __name__ == "__main__":\n'
        '    made = lab.sweep("smoke", "scale=toy", "seed=0", "optimizer.lr=1e-2,1e-1", "hydra.sweeper.max_runs=2")\n'
        "    points, threads = len(made.points), torch.get_num_threads()\n"
        "    lab.train('scale=toy')\n"
        "    print(points, 'points', threads == torch.get_num_threads())\n"
    )
    made = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout.endswith("4 points True\n")


def test_the_page_of_commands_shows_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import lab\n.*?)```", page, re.DOTALL)
    exec(code.replace('"seed=0,1,2"', ", ".join(map(repr, TOY))), {})
    assert "with qk-layernorm" in capsys.readouterr().out


def test_importing_the_lab_loads_none_of_it() -> None:
    code = "import lab, lab.analysis, sys; sys.exit(bool({'torch', 'hydra', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
