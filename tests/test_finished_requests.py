"""A request that finished before is recognized without torch, and not when anything that it depends on has changed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.__main__ import main
from lab.core import registry
from lab.records import store
from lab.report import stamp
from lab.sweeping import requests
from lab.sweeping.requests import recognizable
from small import tree
from test_store import leave

OPTIONS = {"max_runs": None, "one": False, "shard": "1/1", "launcher": {}}
TRAIN = ["train", "data=synthetic", "model.width=16", "model.depth=1", "steps=4", "scale=toy"]
RERUN = f"""
import sys
from lab.__main__ import main
sys.argv = ["lab", *{TRAIN}, *sys.argv[1:]]
code = main()
print("torch" in sys.modules, "theirs" in sys.modules, code)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The source of a package that adds to the lab, and is installed here and in processes that are started."""
    folder = tmp_path / "site"
    (folder / "theirs-1.0.dist-info").mkdir(parents=True)
    (folder / "theirs-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "theirs-1.0.dist-info/entry_points.txt").write_text("[lab.plugins]\ntheirs = theirs.all\n")
    (folder / "theirs").mkdir()
    (folder / "theirs/__init__.py").write_text("")
    (folder / "theirs/all.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    forget()
    yield folder / "theirs/all.py"
    forget()


def forget() -> None:
    registry.points_of_others.cache_clear()
    stamp.code.cache_clear()


def test_a_rerun_that_has_nothing_to_do_loads_no_torch_even_with_a_package_that_adds_to_the_lab(
    tmp_path: Path,
    undrawn: None,
    briefly: None,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(requests, "_is_extended", lambda: False)  # other tests register entries of their own
    words = [*TRAIN, f"out={tmp_path / 'runs'}"]
    monkeypatch.setattr(sys, "argv", ["lab", *words])
    assert main(words) == 0
    first = capsys.readouterr().out
    drawn = (tmp_path / "runs/report.html").stat().st_mtime_ns
    rerun = subprocess.run([sys.executable, "-c", RERUN, words[-1]], capture_output=True, text=True, check=True)
    trained, loss, outcome = rerun.stdout.splitlines()[-3:]
    assert trained.startswith("0 trained, 1 already there")
    assert loss == first.splitlines()[-1]
    assert outcome == "False False 0"
    assert (tmp_path / "runs/report.html").stat().st_mtime_ns == drawn


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def trees(folder: Path, text: Path, *words: str) -> list[dict[str, Any]]:
    return [{**tree("data=text", f"data.path={text}", *words), "out": str(folder)}]


def ids(folder: Path, text: Path, options: dict[str, Any] = OPTIONS, words: tuple[str, ...] = ()) -> list[str] | None:
    """The points of a request that is recognized."""
    request = recognizable(trees(folder, text, *words), options)
    return request.finished_ids() if request else None


@pytest.fixture
def folder(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a request finished that consists of the runs a and b."""
    monkeypatch.setattr(requests, "_is_extended", lambda: False)
    folder = tmp_path / "runs"
    leave(folder, "a")
    leave(folder, "b", "diverged")
    store.open_folder(folder, "eager")
    request = recognizable(trees(folder, text), OPTIONS)
    assert request
    assert request.finished_ids() is None
    request.note(["a", "b"])
    assert ids(folder, text) == ["a", "b"]
    return folder


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "data": lambda folder, text: text.write_text("jackdaws love my big sphinx of quartz. " * 230),
    "a run is gone": lambda folder, text: (folder / "runs/a/run.json").unlink(),
    "a run is damaged": lambda folder, text: (folder / "runs/b/metrics.parquet").write_text("damaged"),
    "the note is damaged": lambda folder, text: [
        path.write_text(path.read_text().replace('"b"', '"a"')) for path in folder.glob("plans/*.request.json")
    ],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_request_whose_data_or_records_changed_is_planned_again(
    folder: Path, text: Path, change: Callable[[Path, Path], object]
) -> None:
    change(folder, text)
    assert ids(folder, text) is None


def test_a_request_with_a_failed_run_is_planned_again(folder: Path, text: Path) -> None:
    (folder / "runs/a/run.json").unlink()
    leave(folder, "a", "failed")
    assert ids(folder, text) is None


@pytest.mark.parametrize("options", [{**OPTIONS, "max_runs": 3}, {**OPTIONS, "launcher": {"processes": 2}}], ids=str)
def test_a_request_with_other_options_is_planned(folder: Path, text: Path, options: dict[str, Any]) -> None:
    assert ids(folder, text, options) is None


def test_other_points_are_planned(folder: Path, text: Path) -> None:
    assert ids(folder, text, words=("optimizer.lr=0.03",)) is None


def test_a_request_is_planned_again_by_other_code_or_on_another_machine(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stamp, "code", lambda: "other code")
        assert ids(folder, text) is None
    with monkeypatch.context() as patch:
        patch.setattr("platform.node", lambda: "another machine")
        assert ids(folder, text) is None
    assert ids(folder, text) == ["a", "b"]


def test_a_request_is_planned_again_when_a_package_that_adds_to_the_lab_changes(
    folder: Path, text: Path, installed: Path
) -> None:
    request = recognizable(trees(folder, text), OPTIONS)
    assert request
    assert request.finished_ids() is None  # the package was not there
    request.note(["a", "b"])
    assert ids(folder, text) == ["a", "b"]
    installed.write_text("import torch  # or something else\n")
    stamp.code.cache_clear()
    assert ids(folder, text) is None


def test_shards_and_ranks_are_planned(folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recognizable(trees(folder, text), {**OPTIONS, "shard": "1/2"}) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert recognizable(trees(folder, text), OPTIONS) is None


def test_a_lab_to_which_a_script_added_is_not_trusted_to_be_the_same(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own: ...

    monkeypatch.setattr(registry.SCHEDULES, "_entries", {"own": Own})
    assert recognizable(trees(tmp_path, text), OPTIONS) is None
