"""Sweeps and runs from Python: the same records as the command line, as a study."""

from __future__ import annotations

import math
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

import lab
import lab.analysis
from lab import Fleet
from lab.analysis import study
from lab.cli import in_python
from lab.core import registry
from lab.core.errors import RequestError
from lab.records import store
from lab.sweeping import compose, launch

HERE = {"hydra/launcher": "basic"}
TOY = ("scale=toy", "hydra/launcher=basic", "seed=0", "optimizer.lr=1e-2,1e-1")


pytestmark = pytest.mark.usefixtures("here", "unreported", "briefly")


def test_a_sweep_returns_the_study_of_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    made = lab.sweep("smoke", *TOY, out="its place")
    assert "4 trained" in capsys.readouterr().out
    pd.testing.assert_frame_equal(made.points, study("its place").points)
    assert set(made.points["lr"]) == {1e-2, 1e-1}
    assert store.commands(Path("its place")) == [f"lab sweep smoke {' '.join(TOY)} 'out='\"'\"'its place'\"'\"''"]
    again = lab.sweep("smoke", *TOY, out=Path("its place"))
    assert "0 trained, 4 already there" in capsys.readouterr().out
    pd.testing.assert_frame_equal(again.seeds, made.seeds)


@pytest.mark.slow
def test_a_file_of_ones_own_is_a_sweep() -> None:
    Path("mine.yaml").write_text("hydra: {sweeper: {params: {schedule.warmup: '0,0.5'}}}\n")
    words = ("scale=toy", "hydra/launcher=basic", "optimizer.lr=1e-3,1e-2,1e-1")
    made = lab.sweep(Path("mine.yaml"), *words, window=(1e-3, 1e-1))
    assert made.window == (1e-3, 1e-1)
    assert set(made.seeds["lrs"]) == {3}
    assert set(made.records.runs["schedule.warmup"]) == {0.0, 0.5}
    assert Path("runs/mine/runs.parquet").exists()


@pytest.mark.slow
def test_train_makes_one_run_or_as_many_as_its_lists() -> None:
    assert len(lab.train("scale=toy", "hydra/launcher=basic", out="one").points) == 1
    assert store.commands(Path("one")) == ["lab train scale=toy hydra/launcher=basic out=one"]
    assert len(lab.train(*TOY).points) == 2
    assert store.commands(Path("runs/train"))[0].startswith("lab train -m ")


def test_keywords_are_overrides_and_lists_are_swept_over() -> None:
    made = lab.train("scale=toy", steps=5, seed=np.arange(2), **{"optimizer.lr": [1e-2, np.float64(0.1)], **HERE})
    assert sorted(zip(made.points["seed"], made.points["lr"], strict=True)) == [
        ("0", 0.01), ("0", 0.1), ("1", 0.01), ("1", 0.1)
    ]  # fmt: skip
    assert set(made.records.runs["steps"]) == {5}
    words = "scale=toy steps=5 seed=0,1 optimizer.lr=0.01,0.1 hydra/launcher=basic"
    assert store.commands(Path("runs/train")) == [f"lab train -m {words}"]
    assert len(lab.train(*words.split()).points) == 4
    swept = lab.sweep("smoke", "scale=toy", seed=0, intervention=[[], ["z_loss"]], **{"optimizer.lr": 0.1, **HERE})
    assert set(swept.points["arm"]) == {"without z-loss", "with z-loss"}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (None, "null"),
        (1e-5, "1e-05"),
        (math.inf, "inf"),
        ("1e-3", "'1e-3'"),
        ("a, b='c'", "'a, b=\\'c\\''"),
        ("${scale.middle}", "'${scale.middle}'"),
        (Path("a b/c.txt"), "'a b/c.txt'"),
        ([True, "on it"], "true,'on it'"),
        ((1, (2, "x")), "1,[2,x]"),
    ],
)
def test_a_keyword_means_its_value(value: object, word: str) -> None:
    assert in_python.override("key", value) == f"key={word}"
    (parsed,) = compose.parse([f"key={word}"])
    assert parsed.is_swept == isinstance(value, list | tuple | range)
    assert parsed.is_swept or parsed.value == (str(value) if isinstance(value, Path) else value)


def test_a_keyword_swept_over_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match=r"seed is swept over nothing"):
        lab.train(seed=[])


@pytest.mark.parametrize("value", [{"lr": 1}, object(), b"x"])
def test_a_keyword_that_is_no_value_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match=r"optimizer: .* is no value"):
        lab.train(optimizer=value)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_runs_that_failed_are_in_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    lab.train(*TOY)
    monkeypatch.setattr(Fleet, "step", lambda *_: 1 / 0)
    made = lab.train(*TOY[:2], "seed=1", "optimizer.lr=1e-2")
    assert (len(made.points), len(made.failed)) == (2, 1)
    with pytest.raises(RequestError, match="all 1 runs failed"):
        lab.train(*TOY[:3], out="others")


def test_a_job_that_imports_its_script_begins_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    with pytest.raises(RequestError, match="__main__"):
        lab.sweep("smoke", *TOY)


NOTEBOOK = """
from dataclasses import dataclass
from typing import ClassVar
import lab
@lab.register("intervention", "half_logits")
@dataclass(frozen=True)
class HalfLogits(lab.LossTerm):
    uses: ClassVar = ("log_z_rbt",)
    coefficient: lab.PerRun = lab.bounded(at_least=0)
    def __call__(self, predictions):
        return 0 * predictions.log_z_rbt
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A session whose ``__main__`` no other process can import, after the cell ``NOTEBOOK``."""
    session = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", session)
    monkeypatch.setattr(registry.INTERVENTIONS, "_entries", dict(registry.INTERVENTIONS._entries))
    exec(NOTEBOOK, vars(session))
    return session


@pytest.mark.slow
@pytest.mark.usefixtures("notebook")
def test_what_a_notebook_registers_trains_in_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("scale=toy", "intervention=[]", "+intervention.half_logits.coefficient=1", "hydra.launcher.processes=2")
    made = lab.train(*words, **{"optimizer.lr": [1e-2, 1e-1], "hydra.sweeper.max_runs": 1})
    assert set(made.runs["intervention"]) == {"half_logits"}
    assert (len(made.points), len(made.failed)) == (2, 0)
    assert "lab: training in this process, the only one that has half_logits\n" in capfd.readouterr().err


@pytest.mark.usefixtures("notebook")
def test_only_what_a_notebook_registers_trains_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(launch, "train", lambda composed, *_, **__: asked.append(type(composed.launcher).__name__))
    with pytest.raises(RequestError):  # nothing was trained
        lab.train("scale=toy")
    with pytest.raises(RequestError):
        lab.train("scale=toy", "+intervention.half_logits.coefficient=1")
    assert asked == ["LocalLauncher", "BasicLauncher"]


def test_a_script_is_imported_by_its_jobs(notebook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "__file__", "recipe.py", raising=False)
    assert in_python.known_here_only([{"intervention": {"half_logits": {"coefficient": 1}}}]) == []


def test_a_cell_of_a_notebook_may_run_again(notebook: ModuleType) -> None:
    first = registry.INTERVENTIONS["half_logits"]
    exec(NOTEBOOK, vars(notebook))
    assert registry.INTERVENTIONS["half_logits"] is notebook.HalfLogits is not first
    with pytest.raises(RequestError, match="already registered"):
        exec(NOTEBOOK.replace("class HalfLogits", "class Another"), vars(notebook))


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


def test_the_page_of_commands_shows_what_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import lab\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("seed=[0, 1, 2]", ", ".join(map(repr, TOY))), names)
    assert "with qk-layernorm" in names["made"]._repr_html_()


@pytest.mark.parametrize("module", [lab, lab.analysis])
def test_a_notebook_can_complete_public_names(module: ModuleType) -> None:
    assert set(module.__all__) <= set(dir(module))


def test_importing_the_lab_loads_none_of_it() -> None:
    code = "import lab, lab.analysis, sys; sys.exit(bool({'torch', 'hydra', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
