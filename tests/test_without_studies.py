"""A copy of the lab without its studies does everything but judge claims, and without one all that the others say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.core import shelf, shipped
from sampling import some
from studies.claims.registry import study_of

HOME = Path(__file__).parents[1]
COMMANDS = f"""
import sys
sys.path = [place for place in sys.path if place != {str(HOME)!r}]  # there an editable install finds the studies
from lab import main
from lab.core import shelf
from lab.report import build
assert not shelf.studies()
only = "learning_rate_sensitivity"  # since drawing takes most of the time, and no figure of the lab knows a study
build.FIGURES = {{only: build.FIGURES[only]}}
for words in (
    ["report", "records"],
    ["leaderboard"],
    ["list"],
    ["stress", "--params", "1e9", "lr=3e-4"],
    ["watch", "log.csv"],
):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert not code, (words, code)
assert main(["claims"]) == 2
assert main(["leaderboard", "results/board"]) == 2
import lab.analysis
from lab.core.errors import RequestError
for face in (lab, lab.analysis):
    for name in face.__all__:
        getattr(face, name)
for name in ("verdicts", "leaderboard"):
    try:
        getattr(lab.analysis, name)("records")
    except RequestError as refusal:
        print(refusal, file=sys.stderr)
    else:
        raise AssertionError(f"{{name}} worked without the studies")
"""
# With what is left of the studies on the shelf.
OTHERS = """
import sys
import lab
from lab import main
from lab.analysis.drawing.registry import FIGURES
from lab.core import shelf
from lab.report import build
from studies.claims.registry import CLAIMS
gone = sys.argv[1]
assert lab.__file__.startswith(sys.path[1])
assert gone not in {study.__name__.rpartition(".")[2] for study in shelf.studies()}
assert {name for study in shelf.studies() for name in getattr(study, "FIRST_FIGURES", ())} <= set(FIGURES)
assert len(CLAIMS) > 100
for words in (["claims"], ["claims", "--source", "public runs"]):
    assert main(words) == 0, words
"""
SHARED = ("board", "claims")
STUDIES = [name for study in shelf.studies() if (name := study.__name__.rpartition(".")[2]) not in SHARED]


def copy_lab(to: Path, without: str) -> None:
    """A checkout that lacks a study, or all ``studies``; with bytecode, which is still that of the copied files."""
    shutil.copytree(HOME / "lab", to / "lab")
    if without != "studies":
        shutil.copytree(HOME / "studies", to / "studies", ignore=shutil.ignore_patterns(without))
    for name in ("conf", "labwatch", "hydra_plugins", "results"):
        (to / name).symlink_to(HOME / name)


@pytest.mark.parametrize("study", some(STUDIES, ["wortsman", "alarms"]))
def test_without_one_study_and_its_sweeps_all_others_are_there(study: str, tmp_path: Path) -> None:
    copy_lab(tmp_path, study)
    (tmp_path / "sweeps").mkdir()
    for name, path in shipped.sweeps().items():
        if study_of(name) != study:
            shutil.copy(path, tmp_path / "sweeps")
    ended = subprocess.run(
        [sys.executable, "-c", OTHERS, study],
        cwd=tmp_path / "sweeps",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


def test_without_the_studies_every_other_command_works(tmp_path: Path) -> None:
    copy_lab(tmp_path, "studies")
    (tmp_path / "sweeps").symlink_to(HOME / "sweeps")
    shutil.copytree(HOME / "results" / "quickstart", tmp_path / "records")
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},{5 - step / 100}\n" for step in range(300)))
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert ended.stderr.count("needs the folder studies/ of a clone of the lab") == 4
    assert (HOME / "results" / "board.txt").read_text() in ended.stdout
    assert (tmp_path / "records" / "figures" / "learning_rate_sensitivity.svg").is_file()
