"""The report of a sweep that still trains: when it is drawn, of which runs, and what its page says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planted
from lab.report import build
from lab.sweeping import progress
from lab.sweeping.local_jobs import JobEnd
from lab.sweeping.progress import WORTH_DRAWING, GrowingReport

LONG = 2 * WORTH_DRAWING


def point(seed: int, lr: int, width: int = 32) -> Any:
    model = SimpleNamespace(width=width, depth=2)
    return SimpleNamespace(id=f"{seed} {lr} {width}", config=SimpleNamespace(seed=seed, model=model))


POINTS = [point(seed, lr) for seed in (0, 1, 2) for lr in (0, 1)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, frozenset[str], str]]:
    """What is drawn, at once."""
    calls: list[Any] = []

    def run_jobs(work: Any, arguments: Any, slots: Any, **how: Any) -> list[JobEnd]:
        calls.extend(arguments)
        return [JobEnd(0, False, 0.0, True)]

    monkeypatch.setattr(progress, "run_jobs", run_jobs)
    return calls


def updated(report: GrowingReport, ended: set[int], left: float | None = LONG) -> str:
    """The line of an update, and of the one after it if it began to draw."""
    line = report.update(ended, left)
    if report.drawing:
        report.drawing.join()
        line = report.update(ended, left)
    return line


def test_a_report_is_drawn_once_for_each_complete_seed(drawn: list[Any]) -> None:
    report = GrowingReport(Path("out"), POINTS, [[each] for each in POINTS])
    assert updated(report, {0, 2, 4}) == ""  # a learning rate of each
    assert updated(report, {0, 1, 2, 4}) == "report of 2 of 6 runs: out/report.html"
    assert updated(report, {0, 1, 2, 4}) == ""
    assert updated(report, {0, 1, 2, 4, 5}) == "report of 4 of 6 runs: out/report.html"
    assert updated(report, set(range(6))) == ""
    assert [(set(ids), growth) for _, ids, growth in drawn] == [
        ({"0 0 32", "0 1 32"}, "2 of 6 runs"),
        ({"0 0 32", "0 1 32", "2 0 32", "2 1 32"}, "4 of 6 runs"),
    ]


def test_of_the_first_seed_a_size_is_drawn_before_the_others(drawn: list[Any]) -> None:
    points = [point(seed, lr, width) for seed in (0, 1) for width in (32, 64) for lr in (0, 1)]
    fleets = [points[at : at + 2] for at in range(0, 8, 2)]
    report = GrowingReport(Path("out"), points, fleets)
    assert updated(report, {2}) == ""  # a size of the second seed
    assert updated(report, {0, 2}) == "report of 2 of 8 runs: out/report.html"
    assert updated(report, {0, 1, 2}) == "report of 4 of 8 runs: out/report.html"
    assert [set(ids) for _, ids, _ in drawn] == [{"0 0 32", "0 1 32"}, {each.id for each in points[:4]}]


@pytest.mark.parametrize("left", [None, WORTH_DRAWING / 2])
def test_no_report_is_drawn_of_a_sweep_that_ends_soon(drawn: list[Any], left: float | None) -> None:
    report = GrowingReport(Path("out"), POINTS, [POINTS[:2], POINTS[2:]])
    assert updated(report, {0}, left) == ""
    assert not drawn
    assert updated(report, {0}) != ""


def test_seeds_that_were_there_before_are_counted_and_not_drawn_again(drawn: list[Any]) -> None:
    report = GrowingReport(Path("out"), POINTS, [[POINTS[3]], POINTS[4:]])
    assert updated(report, set()) == ""
    assert updated(report, {0}) == "report of 4 of 6 runs: out/report.html"
    assert [len(ids) for _, ids, _ in drawn] == [4]


def test_a_growing_page_reloads_until_its_last_seed(tmp_path: Path, undrawn: None) -> None:
    cards = list(planted.cards(arms=("none", "z_loss"), widths=(32,), seeds=(0, 1, 2)))
    folder = planted.write(tmp_path / "sweep", cards)
    progress.draw(folder, frozenset(card["id"] for card in cards if card["seed"] == 0), "2 of 6 runs")
    page = (folder / "report.html").read_text()
    assert "So far 2 of 6 runs." in page
    assert page.count('<meta http-equiv="refresh" content="10">') == 1
    assert f"{len(cards) // 3} runs" in page
    build.make_report([folder])
    page = (folder / "report.html").read_text()
    assert "So far" not in page
    assert "refresh" not in page
    assert f"{len(cards)} runs" in page


def test_seeds_whose_runs_all_failed_have_no_report(tmp_path: Path) -> None:
    cards = list(planted.cards(arms=("none",), widths=(32,), seeds=(0, 1)))
    folder = planted.write(tmp_path / "sweep", [card | {"status": "failed"} for card in cards])
    assert not progress.draw(folder, frozenset(card["id"] for card in cards), "1 of 2 runs")
    assert not (folder / "report.html").exists()
