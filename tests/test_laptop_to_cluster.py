"""The commands of the page "From laptop to cluster", as they stand there, only smaller."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

import slurm
from lab.__main__ import main
from lab.sweeping.dry_run import Cost
from sampling import few
from test_extras import RAY, needs_ray, needs_slurm

PAGE = (Path(__file__).parents[1] / "docs" / "laptop_to_cluster.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
COMMANDS = [shlex.split(line, comments=True)[1:] for line in LINES if line.startswith("lab ")]
TOY = ["scale=toy", "data=synthetic"]


def of_launcher(name: str) -> list[list[str]]:
    """The page's commands for this launcher, for none when the name is empty."""
    return [
        words for words in COMMANDS if name in " ".join(words) and (name or "hydra/launcher" not in " ".join(words))
    ]


def test_there_are_commands_of_all_kinds() -> None:
    kinds = [of_launcher(""), of_launcher("launcher=slurm"), of_launcher("launcher=ray_cluster")]
    assert all(len(kind) >= 2 for kind in kinds)
    assert sum(map(len, kinds)) == len(COMMANDS) == sum("lab sweep" in line and "sbatch" not in line for line in LINES)
    assert any("shard=1/3" in words for words in COMMANDS)
    wrapped = [shlex.split(line)[-1] for line in LINES if line.startswith("sbatch")]
    assert all(shlex.split(command)[1:3] == ["sweep", "quickstart"] for command in wrapped)


@pytest.mark.parametrize("words", few(of_launcher(""), 3), ids=" ".join)
def test_each_command_is_understood(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With devices that are not here, so nothing can be tried on them."""
    monkeypatch.chdir(tmp_path)
    Plugins.instance()
    monkeypatch.setattr("lab.core.machine.visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr("lab.sweeping.dry_run.try_fleet", lambda fleet, slots, register: Cost(1.0, 1.0, 1e9, 1e9))
    dry = [*words, *TOY, "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["lab", *dry])
    assert main(dry) == 0


def ran(words: list[str], folder: Path, **environment: str) -> str:
    """The last line that a command of the page says."""
    command = [sys.executable, "-m", "lab", *words, *TOY]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.extras
@needs_slurm
@pytest.mark.parametrize("words", of_launcher("launcher=slurm"), ids=" ".join)
def test_each_command_runs_on_slurm(words: list[str], tmp_path: Path) -> None:
    path = f"{slurm.install(tmp_path / 'bin')}:{os.environ['PATH']}"
    assert ran(words, tmp_path, PATH=path).startswith("4 trained, 0 already there, 0 diverged, 0 failed")
    asked = [word.removeprefix("hydra.launcher.").split("=", 1) for word in words if word.startswith("hydra.launcher.")]
    script = (tmp_path / "bin" / "script.sh").read_text()
    for key, value in asked:
        told = {"array_parallelism": "%2", "timeout_min": "time=30", "setup": "\nmodule load python\n"}
        assert told.get(key, f"{key.replace('_', '-')}={value}") in script


@pytest.mark.extras
@needs_ray
def test_the_first_command_runs_on_ray(tmp_path: Path) -> None:
    words = of_launcher("launcher=ray_cluster")[0]
    assert ran(words, tmp_path, **RAY).startswith("4 trained, 0 already there, 0 diverged, 0 failed")


@pytest.mark.extras
@needs_ray
@pytest.mark.parametrize("words", of_launcher("launcher=ray_cluster")[1:], ids=" ".join)
def test_each_other_command_is_understood_by_ray(words: list[str], tmp_path: Path) -> None:
    assert ran([*words, "--dry-run"], tmp_path, **RAY).startswith("in all")
