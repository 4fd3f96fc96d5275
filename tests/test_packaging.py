"""The wheel carries everything a sweep needs, into any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_sweep_runs_from_a_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path / "wheel"), str(HOME)], check=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    (tmp_path / "empty").mkdir()
    words = [sys.executable, "-m", "lab", "sweep", "quickstart", "scale=toy", "data=synthetic"]
    made = subprocess.run(
        words,
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "4 trained, 0 already there" in made.stdout
    claims = [sys.executable, "-m", "lab", "claims", "runs"]  # which reads a table of the package
    judged = subprocess.run(
        claims,
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "theirs 0.007" in judged.stdout, judged.stderr
    where = [sys.executable, "-c", "import lab; print(lab.__file__)"]
    told = subprocess.run(
        where,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path / "site") in told.stdout
