"""The wheel carries everything a sweep needs, into any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_holds_sweeps_and_results(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path / "wheel"), str(HOME)], check=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    (tmp_path / "empty").mkdir()

    def said(*words: str, folder: Path = tmp_path / "empty", site: Path = tmp_path / "site") -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        words = (sys.executable, *words)
        return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout

    assert str(tmp_path / "site") in said("-c", "import lab; print(lab.__file__)")
    board = ("-m", "lab", "leaderboard", "--csv")
    assert said(*board) == said(*board, folder=HOME, site=HOME)
    claims = said("-c", "import lab; print(lab.main(['claims']))")
    assert claims == "2\n"  # the refusal is tested without the studies
    sweep = ("-m", "lab", "sweep", "quickstart", "scale=toy", "data=synthetic")
    assert "4 trained, 0 already there" in said(*sweep)
