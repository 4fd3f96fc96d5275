"""The committed results: a folder per sweep, whole, and told of in their README."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.analysis import load
from lab.analysis.claims.scoreboard import MARKS, judge_all, read
from lab.cli import launch
from lab.records import store

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/runs.parquet"))


def row(folder: Path) -> str:
    """What the README of the results says of one folder."""
    runs = load(folder).runs
    question = launch.sweeps()[folder.name].read_text().splitlines()[0].removeprefix("# ")
    commands = "; ".join(f"`{command}`" for command in store.commands(folder))
    return f"| {folder.name} | {question} | {commands} | {len(runs)} | {runs['wall_seconds'].sum() / 60:.0f} |"


def test_the_readme_of_the_results_tells_of_every_folder() -> None:
    folders, _, _ = (RESULTS / "README.md").read_text().partition(MARKS[0])
    table = [line for line in folders.splitlines() if line.startswith("| ")]
    assert table[1:] == [row(folder) for folder in FOLDERS]


def test_every_sweep_of_the_paper_has_results() -> None:
    assert {folder.name for folder in FOLDERS} == set(launch.sweeps()) - {"smoke"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_run_is_missing_or_failed(folder: Path) -> None:
    runs = load(folder).runs
    assert set(runs["status"]) <= {"finished", "diverged"}
    assert runs["seed"].nunique() == 3
    assert len(runs) % 3 == 0
    assert runs["versions"].nunique() == 1


def test_no_interval_on_the_results_has_zero_width() -> None:
    judged = [row.verdict for row in judge_all(read([RESULTS])) if row.verdict.seeds >= 3]
    assert judged
    assert all(verdict.high - verdict.low > 1e-6 for verdict in judged)
    assert all(verdict.low < verdict.effect < verdict.high for verdict in judged)


if __name__ == "__main__":  # the table, to be put there
    print(*map(row, FOLDERS), sep="\n")
