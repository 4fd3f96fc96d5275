"""The committed results: a folder per sweep, whole, and told of in their README."""

from __future__ import annotations

import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from committed import RESULTS, in_one_process, judged
from lab.__main__ import main
from lab.analysis import load
from lab.core import shipped
from lab.records import store
from lab.records.parts import written
from sampling import few, some
from studies.board.training import QUESTION
from studies.claims.scoreboard import OTHER_TEXT, judge_all, read, table

BOARD = "board"  # which no sweep trains, but `lab leaderboard DIR --train`
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/runs.parquet"))
MEGABYTES = 2**20
PRODUCTS = ", fp32 products by "  # of oneDNN on some processors, of MKL on others
ON_OTHER_TEXT = sorted(path.parent for path in (RESULTS / OTHER_TEXT).glob("*/runs.parquet"))


def row(folder: Path) -> str:
    """What the README of the results says of one folder."""
    runs = load(folder).runs
    question = QUESTION
    if folder.name != BOARD:
        question = shipped.sweeps()[folder.name].read_text().splitlines()[0].removeprefix("# ")
    commands = "; ".join(f"`{command}`" for command in store.commands(folder))
    return f"| {folder.name} | {question} | {commands} | {len(runs)} | {runs['wall_seconds'].sum() / 60:.0f} |"


@pytest.mark.slow
def test_the_readme_of_the_results_tells_of_every_folder() -> None:
    _, _, folders = (RESULTS / "README.md").read_text().partition("## What the folders hold")
    table = [line for line in folders.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert table[1:] == [row(folder) for folder in FOLDERS]


def test_every_sweep_of_the_paper_has_results() -> None:
    assert {folder.name for folder in FOLDERS} - {BOARD, "quickstart_fp32"} == set(shipped.sweeps()) - {"smoke"}


def test_sweeps_on_other_text_are_those_that_make_trains() -> None:
    trained = [shlex.split(command)[2:-1] for folder in ON_OTHER_TEXT for command in store.commands(folder)]
    made = (RESULTS.parent / "Makefile").read_text().partition("define OTHER_TEXT\n")[2].partition("\nendef")[0]
    assert sorted(trained) == sorted(map(shlex.split, made.splitlines()))


@pytest.mark.parametrize(
    "folder", few([*FOLDERS, *ON_OTHER_TEXT], 8), ids=lambda folder: f"{folder.relative_to(RESULTS)}"
)
def test_no_run_is_missing_or_failed(folder: Path) -> None:
    runs = load(folder).runs
    assert set(runs["status"]) <= {"finished", "diverged"}
    assert runs["seed"].nunique() >= 3
    if folder.name != BOARD:  # of which some arms have fresh seeds
        assert all(len(of_text) % of_text["seed"].nunique() == 0 for _, of_text in runs.groupby("data_fingerprint"))
    if folder.name != BOARD:  # which two machines trained
        assert runs["versions"].str.partition(PRODUCTS)[0].nunique() == 1
        assert all(pd.read_parquet(part.runs)["versions"].nunique() == 1 for part in written(folder))


def test_seeds_that_were_added_lie_beside_the_earlier_ones() -> None:
    folder = RESULTS / "qk_layernorm"
    earlier, added = (pd.read_parquet(part.runs) for part in written(folder))
    assert set(earlier["seed"]) == {3, 4, 5}
    assert set(added["seed"]) == {6, 7, 8, 9}
    assert len(load(folder).runs) == len(earlier) + len(added)


WHOLE = RESULTS / "quickstart"  # every probe value of it is there
PRUNED = [folder for folder in [*FOLDERS, *ON_OTHER_TEXT] if folder != WHOLE]
SMALL = [RESULTS / name for name in ("epsilon", "noise_scale", "final_gain")]


@pytest.mark.parametrize("folder", some(PRUNED, SMALL), ids=lambda folder: f"{folder.relative_to(RESULTS)}")
def test_no_value_is_committed_that_nobody_reads(folder: Path) -> None:
    records = store.read(folder)
    assert len(runpy.run_path(str(RESULTS / "prune.py"))["pruned"](records)) == len(records.metrics)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the quickstart, whose probe values are all there, pruned."""
    folder = tmp_path_factory.mktemp("results") / "quickstart"
    shutil.copytree(RESULTS / "quickstart", folder)
    subprocess.run([sys.executable, RESULTS / "prune.py", folder], check=True)
    return folder


@pytest.mark.slow
def test_a_pruned_folder_holds_all_runs_and_decides_the_same_claims(pruned: Path) -> None:
    whole, less = store.read(RESULTS / "quickstart"), store.read(pruned)
    pd.testing.assert_frame_equal(less.runs, whole.runs)
    assert len(less.metrics) < len(whole.metrics) / 3
    left_out = {"grad_norm", "attention_entropy", "output_logit_rms"}
    assert set(whole.metrics["probe"]) - set(less.metrics["probe"]) == left_out
    scoreboards = [table(judge_all(read([folder]))) for folder in (RESULTS / "quickstart", pruned)]
    pd.testing.assert_frame_equal(*scoreboards)
    assert (scoreboards[0]["seeds"] != "0").sum() > 10


@pytest.mark.slow
def test_a_pruned_folder_has_the_same_figures(pruned: Path, tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "quickstart", tmp_path / "quickstart")
    for folder in (pruned, tmp_path / "quickstart"):
        assert main(["report", str(folder)]) == 0
    drawn = [
        {path.name: path.read_bytes() for path in (parent / "quickstart/figures").iterdir()}
        for parent in (tmp_path, pruned.parent)
    ]
    assert len(drawn[0]) > 10
    assert drawn[0] == drawn[1]


@pytest.mark.slow
@in_one_process
def test_no_interval_on_the_results_has_zero_width() -> None:
    verdicts = [row.verdict for row in judged() if row.verdict.seeds >= 3]
    assert verdicts
    assert all(verdict.high - verdict.low > 1e-3 * max(abs(verdict.low), abs(verdict.high)) for verdict in verdicts)
    # the exact interval of a share of none or of all ends there
    assert all(verdict.low <= verdict.effect <= verdict.high for verdict in verdicts)


def git(*words: str, said: str = "") -> str:
    """What git prints in this checkout; the test is skipped where it can say nothing."""
    made = subprocess.run(["git", "-C", RESULTS, *words], input=said, capture_output=True, text=True, check=False)
    return made.stdout if made.returncode == 0 else pytest.skip(f"git {words[0]} says nothing here")


def test_the_committed_files_are_small() -> None:
    home = Path(git("rev-parse", "--show-toplevel").strip())
    tracked = (home / name for name in git("ls-files", "-z", "--full-name", str(home)).split("\0") if name)
    assert sum(path.stat().st_size for path in tracked if path.is_file()) < 30 * MEGABYTES


def test_the_last_commit_adds_little_to_the_results() -> None:
    """Each version of a file stays in the history."""
    changed = git("diff-tree", "-r", "--no-renames", "--diff-filter=AM", "HEAD^1", "HEAD", "--", str(RESULTS))
    blobs = [line.split()[3] for line in changed.splitlines()]
    sizes = git("cat-file", "--batch-check=%(objectsize)", said="".join(f"{blob}\n" for blob in blobs))
    assert sum(map(int, sizes.split())) < 5 * MEGABYTES


if __name__ == "__main__":  # the table, to be put there
    print(*map(row, FOLDERS), sep="\n")
