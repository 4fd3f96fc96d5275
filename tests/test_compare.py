"""Two folders side by side, and the status of one, on records made by hand."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

import planted
from lab.__main__ import main
from lab.analysis import load, per_seed, points
from lab.analysis.statistics import student_t
from lab.features.guard.side_by_side import SideBySide, answer_of, compare_folders
from lab.records import plans, store
from lab.records.status import read_status
from sweeping import OutputOf

WITHOUT, WITH = "without qk-layernorm", "with qk-layernorm"
LRS = (3e-3, 1e-2, 3e-2, 1e-1)


def folder(place: Path, better: float = 0.0, seeds: tuple[int, ...] = (0, 1, 2), **changes: object) -> Path:
    cards = list(planted.cards(lrs=LRS, seeds=seeds, widths=(32,)) if not changes else planted.cards(**changes))
    for card in cards:
        card["final_val_loss"] -= better
    return planted.write(place, [planted.card(**{**card, "id": None}) for card in cards])


def quantity(compared: SideBySide, arm: str, name: str) -> tuple[float, ...]:
    [row] = [row for row in compared.quantities if (row.arm, row.quantity) == (arm, name)]
    return (row.a, row.b, row.difference, row.low, row.high, row.seeds)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("two")
    return folder(place / "a"), folder(place / "b", better=0.1)


def test_differences_are_paired_by_seed(two: tuple[Path, Path]) -> None:
    compared = compare_folders(*two)
    assert [(row.arm, row.quantity) for row in compared.quantities] == [
        (arm, name) for arm in (WITHOUT, WITH) for name in ("best loss", "LR sensitivity", "eta_div")
    ]
    a, b, change, low, high, seeds = quantity(compared, WITHOUT, "best loss")
    assert (b - a, change, seeds) == (pytest.approx(-0.1, abs=1e-5), pytest.approx(-0.1, abs=1e-5), "3, paired")
    assert high - low < 1e-4  # unpaired, the seeds would spread more than that
    expected = per_seed(points(load(two[0]).runs))
    of_arm = expected.loc[expected["arm"] == WITHOUT, "total"]
    a, _, change, *_ = quantity(compared, WITHOUT, "LR sensitivity")
    assert a == pytest.approx(student_t(of_arm).mean, abs=1e-5)
    assert change == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
def test_other_seeds_are_not_paired_and_too_few_have_no_interval(two: tuple[Path, Path], tmp_path: Path) -> None:
    others = compare_folders(two[0], folder(tmp_path / "others", seeds=(3, 4, 5)))
    _, _, _, low, high, seeds = quantity(others, WITHOUT, "best loss")
    assert (seeds, high - low > 1e-3) == ("3 and 3", True)
    few = compare_folders(two[0], folder(tmp_path / "few", 0.2, seeds=(0, 7)))
    _, _, change, low, high, seeds = quantity(few, WITHOUT, "best loss")
    assert seeds == "3 and 2"
    assert math.isnan(low)
    assert math.isnan(high)
    assert change < 0


def test_arms_are_compared_where_both_have_runs_and_the_rest_is_said(two: tuple[Path, Path], tmp_path: Path) -> None:
    wider = folder(tmp_path / "c", arms=("z_loss",), widths=(32, 64), lrs=LRS[1:], data_fingerprint="other", steps=800)
    compared = compare_folders(two[0], wider)
    assert {row.arm for row in compared.quantities} == {WITHOUT}
    runs = points(load(two[0]).runs)
    of_shared = per_seed(runs[(runs["arm"] == WITHOUT) & (runs["lr"] > LRS[0])])
    assert quantity(compared, WITHOUT, "LR sensitivity")[0] == pytest.approx(of_shared["total"].mean(), abs=1e-5)
    notes = "\n".join(compared.notes)
    for note in (
        f"no curve is {WITH} at 24.7k parameters in",
        f"{WITHOUT} at 24.7k parameters: compared at the learning rates that both folders have, 0.01, 0.03 and 0.1",
        "the data differ, so losses are on different text: fingerprint a1b2c3d4e5f60718 in A, other in B",
        "steps: 400 in A, 800 in B",
        f"not in A: {WITHOUT} at 98.6k parameters",
    ):
        assert note in notes
    assert "baseline" not in notes


def test_the_command_prints_a_table_or_json_and_judges_nothing(
    two: tuple[Path, Path], tmp_path: Path, output_of: OutputOf
) -> None:
    lines = output_of("compare", *two).splitlines()
    assert lines[:2] == [f"A: {two[0]}", f"B: {two[1]}"]
    assert lines[3].split()[:3] == ["arm", "parameters", "quantity"]
    assert "-0.100 [-0.100, -0.100]" in lines[4]
    rows = json.loads(output_of("compare", *two, "--json"))["quantities"]
    assert rows[0]["difference"] == pytest.approx(-0.1, abs=1e-5)
    assert [row["low"] for row in rows if row["a"] == row["b"] == "none"] == [None]
    apart = folder(tmp_path / "apart", arms=("none",), widths=(64,))
    assert output_of("compare", two[0], apart, code=2).startswith(
        "lab: nothing to compare: no curve is with z-loss at 24.7k"
    )


def test_a_quantity_that_neither_side_has_is_called_undefined(tmp_path: Path) -> None:
    """One learning rate has no sensitivity."""
    a, b = (planted.write(tmp_path / name, list(planted.cards(widths=(32,), lrs=LRS[:1]))) for name in "ab")
    rows = [line for line in answer_of(compare_folders(a, b)).text().splitlines() if "LR sensitivity" in line]
    assert [row.split().count("undefined") for row in rows] == [2, 2]
    assert not [row for row in rows if "nan" in row]


def under_way(place: Path) -> tuple[Path, list[str]]:
    """A folder with a plan of three fleets of two runs: one recorded, one running, one waiting."""
    cards = list(planted.cards(arms=("z_loss",), widths=(32,), lrs=LRS[:3], seeds=(0, 1)))
    cards[0] |= {"status": "failed", "reason": "out of memory: 9 GB", "final_val_loss": None}
    store.open_folder(place, "eager")
    names = [card["id"] for card in cards]
    plan = plans.freeze(place, [[{"id": name, "tree": {}} for name in names[i : i + 2]] for i in (0, 2, 4)])
    for card in cards[:2]:
        store.write_run(place, card, [])
    progress = plans.FleetProgress(100, 400, seconds=30.0, rate=5.0, evaluation=15.0, losses=[], notes=[], verdict=None)
    plans.write_progress(place, plan, 0, progress._replace(step=400, verdict="1 failed"))
    plans.write_progress(place, plan, 1, progress)
    return place, [plan, *names]


def test_a_status_tells_what_is_there_failed_running_and_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    place, (plan, *names) = under_way(tmp_path)
    assert main(["status", str(place)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{place}: 1 finished, 0 diverged, 1 failed, 2 running, 2 missing",
        "trained for 0:01, one fleet after another",
        "failed: 1 runs, out of memory: 9 GB",
        "2 runs of fleet 1: step 100 of 400 after 0:30, about 1:15 left",
    ]
    status = json.loads(output_of("status", place, "--json"))
    assert (status["finished"], status["running"], status["missing"], status["seconds"]) == (1, 2, 2, 1.0)
    assert status["fleets"][0]["runs"] == names[2:4]
    silent = place / "plans" / f"{plan}.progress" / "1"
    os.utime(silent, (time.time() - 3600, time.time() - 3600))
    output = output_of("status", place)
    assert "0 running, 4 missing" in output
    assert "step 100 of 400, and no sign for 1:00:00: killed, or cut off from this folder" in output


@pytest.mark.parametrize(
    ("verdict", "silence", "running", "missing"), [(None, 0, 2, 2), (None, 61, 0, 4), ("done", 0, 0, 4)]
)
def test_a_fleet_runs_from_its_first_sign_to_its_end_unless_it_falls_silent(
    verdict: str | None, silence: float, running: int, missing: int, tmp_path: Path
) -> None:
    place, (plan, *names) = under_way(tmp_path)
    plans.write_progress(place, plan, 1, plans.read_progress(place, plan)[1]._replace(verdict=verdict))
    path = place / "plans" / f"{plan}.progress" / "1"
    os.utime(path, (time.time() - silence, time.time() - silence))
    status = read_status(place)
    assert (status.finished, status.failed, status.running, status.missing) == (1, 1, running, missing)
    assert [fleet.runs for fleet in status.fleets] == [] if verdict else [names[2:4]]


def test_a_failed_run_that_trains_again_is_running(tmp_path: Path) -> None:
    place, (plan, *_) = under_way(tmp_path)
    plans.write_progress(place, plan, 0, plans.read_progress(place, plan)[1])
    status = read_status(place)
    assert (status.finished, status.failed, status.running, status.missing) == (1, 0, 3, 2)
    assert status.reasons == {}


def test_a_fleet_that_ended_or_fell_silent_is_not_running_whatever_it_left(tmp_path: Path) -> None:
    place, (plan, *names) = under_way(tmp_path)
    at_work = plans.read_progress(place, plan)[1]
    plans.write_progress(place, plan, 1, at_work._replace(verdict="2 diverged"))
    status = read_status(place)
    assert (status.finished, status.failed, status.running, status.missing) == (1, 1, 0, 4)
    assert status.fleets == []
    assert sum(status.reasons.values()) == 1
    plans.write_progress(place, plan, 0, at_work)
    killed = place / "plans" / f"{plan}.progress" / "0"
    for silent, running in ((59, 1), (61, 0), (3600, 0)):
        os.utime(killed, (time.time() - silent, time.time() - silent))
        status = read_status(place)
        assert (status.running, status.failed, status.missing) == (running, 1 - running, 4)
        assert [fleet.runs for fleet in status.fleets] == [names[:1]]


def test_a_status_counts_the_runs_of_a_folder(tmp_path: Path, output_of: OutputOf) -> None:
    assert output_of("status", tmp_path, code=2) == f"lab: no runs and no plans in {tmp_path}\n"
    folder = planted.write(tmp_path / "done", list(planted.cards(arms=("z_loss",), widths=(32,), seeds=(0,))))
    assert output_of("status", folder).startswith(f"{folder}: 7 finished, 0 diverged, 0 failed, 0 running, 0 missing\n")
