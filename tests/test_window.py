"""Sensitivity over another window of learning rates: named wherever shown, kept by a baseline, refused if wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from lab.__main__ import main
from lab.analysis import from_frame, show, study
from lab.analysis.guard import baseline as baselines
from lab.core.errors import RequestError
from lab.report.all_figures import FIGURES
from lab.report.replies import answer
from sweeping import OutputOf

LRS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
WINDOW = ("--window", "1e-6", "1e-3")
NAMED = "1e-6 to 0.001"


def lion() -> pd.DataFrame:
    """Two arms with the best learning rate at 1e-5, so 3e-4 to 3e-1 holds what they do far above it alone."""
    return pd.DataFrame(
        {"lr": lr, "loss": 2 + slope * abs(math.log10(lr / 1e-5)) + 0.01 * seed * (1 + lr), "params": 1000}
        | {"seed": seed, "clip": clip}
        for clip, slope in (("off", 0.4), ("on", 0.1))
        for lr in LRS
        for seed in range(3)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lion().to_csv(tmp_path / "lion.csv", index=False)
    assert main(["import", str(tmp_path / "lion.csv"), f"out={tmp_path / 'runs'}"]) == 0
    return tmp_path / "runs"


def test_sensitivity_is_the_mean_regret_inside(folder: Path) -> None:
    """Decades from the best one are 1, 0, 1 and 2, so S is the slope."""
    for made in (from_frame(lion(), window=(1e-6, 1e-3)), study(folder, (1e-6, 1e-3))):
        means = dict(zip(made.curves["arm"], made.curves["total"].map(lambda interval: interval.mean), strict=True))
        assert means == pytest.approx({"clip off": 0.4, "clip on": 0.1}, abs=1e-4)
        assert made.pairs["total"].iloc[0].mean == pytest.approx(0.3, abs=1e-4)
        assert set(made.seeds["lrs"]) == {4}


@pytest.mark.slow
def test_a_report_names_its_window_on_page_in_table_and_figure(
    folder: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = "learning_rate_sensitivity"
    monkeypatch.setattr("lab.report.build.FIGURES", {only: FIGURES[only]})
    assert main(["report", str(folder)]) == 0
    usual = (folder / "report.html").read_bytes()
    assert "lie outside 0.0003 to 0.3" in capsys.readouterr().out
    assert f"Sensitivity over the learning rates from {NAMED}." in output_of("report", folder, *WINDOW)
    page = (folder / "report.html").read_text()
    said = answer(study(folder, (1e-6, 1e-3))).text
    assert said.startswith(f"LR sensitivity from {NAMED} at ")
    assert " is lowest for clip on: 0.1" in said
    assert f"over the learning rates from {NAMED}: final loss" in page
    assert NAMED in (folder / "figures" / "learning_rate_sensitivity.svg").read_text()
    for name in ("sensitivity", "sensitivity_by_seed", "differences"):
        table = pd.read_csv(folder / "tables" / f"{name}.csv")
        assert set(zip(table["window_low"], table["window_high"], strict=True)) == {(1e-6, 1e-3)}
    assert not (folder / "report.json").exists(), "a sweep would take it for the usual report"
    assert main(["report", str(folder), "--window", "3e-4", "3e-1"]) == 0
    assert (folder / "report.html").read_bytes() == usual
    usual_png, windowed_png = (
        show(study(folder).records, "learning_rate_sensitivity", window).png for window in (None, (1e-6, 1e-3))
    )
    assert usual_png != windowed_png


def test_compare_says_over_which_window(folder: Path, output_of: OutputOf) -> None:
    text = " ".join(output_of("compare", folder, folder, *WINDOW).split())
    assert f"Sensitivity is over the learning rates from {NAMED}." in text
    assert "0.400" in text
    assert json.loads(output_of("compare", folder, folder, *WINDOW, "--json"))["window"] == [1e-6, 1e-3]
    assert "window" not in json.loads(output_of("compare", folder, folder, "--json"))


@pytest.mark.slow
def test_a_baseline_keeps_its_window(folder: Path, tmp_path: Path, output_of: OutputOf) -> None:
    file = tmp_path / "baseline.json"
    assert main(["check", str(folder), "--save", str(file), *WINDOW]) == 0
    assert baselines.read(file).window == (1e-6, 1e-3)
    assert NAMED in output_of("check", "--show", file)
    checked = " ".join(output_of("check", folder, "--baseline", file).split())
    assert f"sensitivity over learning rates from {NAMED}" in checked
    assert json.loads(output_of("check", folder, "--baseline", file, *WINDOW, "--json"))["window"] == [
        1e-6,
        1e-3,
    ]
    refusal = output_of("check", folder, "--baseline", file, "--window", "1e-5", "1e-2", code=2)
    assert f"{file} has sensitivity over learning rates from {NAMED}, {folder} from 1e-5 to 0.01" in refusal
    assert refusal.count("\n") == 1
    usual = str(tmp_path / "usual.json")
    assert main(["check", str(folder), "--save", usual]) == 0
    assert main(["check", usual, "--baseline", str(file)]) == 2
    assert f"{NAMED} -> 0.0003 to 0.3" in output_of("check", folder, "--save", file)
    assert "window" not in json.loads(file.read_text())


def test_a_window_is_two_numbers_in_python() -> None:
    with pytest.raises(RequestError, match="two learning rates"):
        from_frame(lion(), window=(1e-6,))
    with pytest.raises(RequestError, match="holds 0 learning rates"):
        from_frame(lion(), window=(1.0, 2.0))
