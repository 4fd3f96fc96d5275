"""The wheel carries everything a sweep needs, into any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lab.core import shipped
from lab.studies.claims.registry import CLAIMS
from sweeping import OutputOf

HOME = Path(__file__).parents[1]


def shipped_alone(top: Path) -> Path:
    """The results that a wheel has, as the package holds them."""
    included = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, place in included["force-include"].items():
        if source.startswith("results/"):
            (top / place).parent.mkdir(parents=True, exist_ok=True)
            (top / place).symlink_to(HOME / source)
    return top / "lab/yaml/results"


def test_what_claims_and_the_board_read_comes_with_the_package(
    here: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    results = shipped_alone(here / "site")
    monkeypatch.setattr(shipped, "data_folder", lambda name: results if name == "results" else HOME / name)
    verdicts = {
        one["name"]: one["verdict"] for one in json.loads(output_of("claims", "--source", "PaLM-540B", "--json"))
    }
    assert {name for name in CLAIMS if CLAIMS[name].source == "PaLM-540B"} == {*verdicts}
    assert {"reproduced", "not run"} & {*verdicts.values()}
    assert "These verdicts come with the lab" in output_of("claims")


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
    for command in (["claims", "--source", "PaLM-540B"], ["leaderboard", "--csv"]):
        here, in_a_clone = (
            said("-m", "lab", *command, folder=f, site=s)
            for f, s in ((tmp_path / "empty", tmp_path / "site"), (HOME, HOME))
        )
        assert here.strip().split("\n\n")[:2] == in_a_clone.strip().split("\n\n")[:2]  # what comes with the lab says so
    sweep = ("-m", "lab", "sweep", "quickstart", "scale=toy", "data=synthetic")
    assert "4 trained, 0 already there" in said(*sweep)
