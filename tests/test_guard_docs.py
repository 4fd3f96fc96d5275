"""The page "Guard your recipe", followed word for word in a repository of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lab.core.usage import OptionParser
from lab.sweeping import launch
from lab.sweeping.planner import points
from lab.sweeping.request import find_sweep, read_request

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "guard_your_recipe.md").read_text(encoding="utf-8")
# A file's name stands in the words right above its text.
FILES = dict(re.findall(r"`([\w./]+\.(?:yaml|yml|py))`[^`]*?\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
STEPS = yaml.safe_load(FILES[".github/workflows/guard.yml"])["jobs"]["guard"]["steps"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What the page says to write; a text for the nightly sweep."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "corpus.txt").write_text((HOME / "README.md").read_text() * 20)
    return tmp_path


def shell(command: str, folder: Path, **environment: str) -> int:
    """A line of the page, in a shell that finds this Python's `lab`, `pytest` and `git`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "GIT_"))}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**plain, "PATH": path, **environment}, capture_output=True, text=True
    )
    print(command, done.stdout, done.stderr, sep="\n")
    return done.returncode


def test_the_page_names_four_files_and_its_commands_are_the_workflows() -> None:
    assert {*FILES} == {
        "sweeps/guard.yaml",
        "sweeps/nightly.yaml",
        "tests/test_recipe.py",
        ".github/workflows/guard.yml",
    }
    steps = [step["run"] for step in STEPS if "run" in step]
    assert [step.split()[:2] for step in steps] == [["pip", "install"], ["lab", "sweep"], ["lab", "check"]]
    for option in re.findall(r"--[\w-]+", " ".join(steps[2:])):
        assert option in OptionParser("check").options


@pytest.mark.parametrize(
    ("name", "written"), [("false alarms", "FALSE_ALARMS.md"), ("planted faults", "PLANTED_FAULTS.md")]
)
def test_the_tables_it_shows_are_those_that_were_measured(name: str, written: str) -> None:
    (shown,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", PAGE, re.DOTALL)
    assert shown in (HOME / "benchmarks" / written).read_text()
    assert shown.count("\n") > 10


@pytest.mark.parametrize(("name", "runs"), [("guard", 25), ("nightly", 36)])
def test_its_sweeps_are_understood(name: str, runs: int, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    request = read_request([], "lab", name=name, sweep=find_sweep(f"sweeps/{name}.yaml"))
    assert len(points(launch.compose(request).trees)) == runs


@pytest.mark.slow
def test_a_repository_made_from_the_page_guards_its_recipe(repository: Path) -> None:
    shell("git init -q . && git config user.email a@b.c && git config user.name a", repository)
    for command in COMMANDS:
        if not command.startswith("pip "):
            assert shell(command, repository) == 0, command
    assert len((repository / "baselines" / "guard.json").read_text().splitlines()) > 20
    published = [step["run"] for step in STEPS if "run" in step and not step["run"].startswith("pip ")]
    summary = {"GUARD": "guard", "GITHUB_STEP_SUMMARY": str(repository / "summary.md")}
    assert [
        shell(f"rm -rf runs/guard; {published[0]}", repository, **summary),
        shell(published[1], repository, **summary),
    ] == [0, 0]
    assert (repository / "summary.md").read_text().startswith("## ok: ")
    # somebody tidies up an epsilon
    sweep = repository / "sweeps" / "guard.yaml"
    sweep.write_text(sweep.read_text() + "optimizer: {eps: 1e-3}\n")
    assert [
        shell(f"rm -rf runs/guard; {published[0]}", repository, **summary),
        shell(published[1], repository, **summary),
    ] == [0, 1]
    assert "optimizer.eps: 1e-8 in the baseline, 0.001 now" in (repository / "summary.md").read_text()
    assert '<failure message="' in (repository / "check.xml").read_text()
    assert shell("pytest -q", repository) == 1
