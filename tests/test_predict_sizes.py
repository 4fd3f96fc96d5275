"""Forecasts for runs of a table: power laws in size that were planted are found, scored on the largest and bounded."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.__main__ import main
from lab.analysis import forecast, from_frame
from lab.analysis.forecast import at_size, sizes
from lab.analysis.forecast.forecasts import GRADIENT, LOGIT
from lab.analysis.sensitivity import WINDOW, Window
from lab.core.errors import RequestError
from lab.studies.numbers.limits import read_limits
from sweeping import OutputOf

SIZES = (1_000_000, 4_000_000, 16_000_000, 64_000_000)
LRS = tuple(10.0 ** (exponent / 2) for exponent in range(-9, 2))
HIGHEST = {size: 0.5 * (size / SIZES[0]) ** -0.5 for size in SIZES}  # the learning rate above which runs diverge


def best_lr(size: int) -> float:
    return float(2e-2 * (size / SIZES[0]) ** -0.4)


def table(seeds: int = 3, which: tuple[int, ...] = SIZES, lrs: tuple[float, ...] = LRS) -> pd.DataFrame:
    """Parabolas in log LR, whose vertex and width shift with size by power laws, and a little with the seed."""
    rows = []
    for size in which:
        for seed in range(seeds):
            for lr in lrs:
                x = math.log10(lr / best_lr(size)) - 0.05 * (seed - 1)
                loss = 3 + 0.2 * (size / SIZES[0]) ** 0.1 * x * x
                rows.append({"lr": lr, "loss": math.nan if lr > HIGHEST[size] else loss, "params": size, "seed": seed})
    return pd.DataFrame(rows)


def observed(frame: pd.DataFrame, window: Window = WINDOW) -> pd.DataFrame:
    return sizes.observe(from_frame(frame, initial_loss=9).records, window)


def test_the_best_learning_rate_follows_the_planted_power_law() -> None:
    made = sizes.make_forecast(observed(table()).rename(columns={sizes.LR: "value"}))
    assert made is not None
    assert made.line.slope == pytest.approx(-0.4, abs=0.01)
    middle, low, high = (10 ** float(end) for end in made.line.predict(10 * SIZES[-1]))
    assert low < best_lr(10 * SIZES[-1]) < high
    assert middle == pytest.approx(best_lr(10 * SIZES[-1]), rel=0.05)
    assert made.error == pytest.approx(0, abs=0.02)
    assert made.unchanged == pytest.approx(0.4 * math.log10(4), abs=0.02)
    assert made.inside == 3


def test_the_score_is_that_of_a_line_without_the_largest_size() -> None:
    """Against ``numpy.polyfit`` on the smaller sizes alone; a jump at the largest size is an error of that size."""
    runs = pd.DataFrame({"size": np.repeat(SIZES, 3), "value": np.repeat([1.0, 2.0, 3.0, 30.0], 3)})
    runs["value"] *= np.tile([0.99, 1.0, 1.01], 4)
    made = sizes.make_forecast(runs)
    small = runs[runs["size"] < SIZES[-1]]
    slope, height = np.polyfit(np.log10(small["size"]), np.log10(small["value"]), 1)
    measured = np.log10(runs.loc[runs["size"] == SIZES[-1], "value"]).mean()
    assert made is not None
    assert made.error == pytest.approx(height + slope * math.log10(SIZES[-1]) - measured)
    assert made.inside == 0


def test_eta_div_is_foretold_where_runs_diverged() -> None:
    made = sizes.make_forecast(observed(table()).rename(columns={sizes.ETA_DIV: "value"}))
    assert made is not None
    assert made.line.slope == pytest.approx(-0.5, abs=0.15)  # the grid has two learning rates a decade


def test_an_optimum_at_the_end_of_a_grid_has_no_value() -> None:
    low = observed(table(lrs=tuple(lr for lr in LRS if lr < 0.012)))
    assert low.loc[low["size"] == SIZES[0], sizes.LR].isna().all()
    assert low.loc[low["size"] == SIZES[-1], sizes.LR].notna().all()
    lines = sizes.say(from_frame(table(lrs=tuple(lr for lr in LRS if lr < 0.012))).records, WINDOW, 120)
    assert "Left out, since the best learning rate is the lowest or highest tried: 9 of 12 curves." in lines


def test_unknown_initial_losses_leave_the_optimum_known() -> None:
    frame = table(lrs=tuple(lr for lr in LRS if lr < 0.02))
    known, unknown = (sizes.observe(from_frame(frame, initial_loss=loss).records) for loss in (9, None))
    pd.testing.assert_frame_equal(known, unknown)


def test_lab_predict_says_what_it_foretells_and_how_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    table().to_csv(tmp_path / "runs.csv", index=False)
    out = tmp_path / "out"
    assert main(["import", str(tmp_path / "runs.csv"), f"out={out}", "--initial-loss", "9"]) == 0
    capsys.readouterr()
    text = output_of("predict", out)
    assert "error at 64M" in text
    assert "640M (10x)" in text
    assert "3 of 3" in text
    made = json.loads(output_of("predict", out, "--json"))
    assert made["text"] == text.splitlines()
    assert {fit["quantity"] for fit in made["fits"]} <= {sizes.LR, sizes.SENSITIVITY, sizes.ETA_DIV}
    assert {fit["held_out"]["inside"] for fit in made["fits"] if fit["quantity"] == sizes.LR} == {3}
    assert "LR sensitivity (nats/token), over learning rates from 0.0001 to 0.01" in output_of(
        "predict", out, "--window", "1e-4", "1e-2"
    )
    assert main(["predict", str(out), "--window", "1", "2"]) == 2
    assert not (out / "figures").exists()


def test_the_rate_from_which_public_runs_fail_stands_beside_a_forecast_of_the_same(output_of: OutputOf) -> None:
    results = Path(__file__).parents[1] / "results"
    text, rows = (output_of("predict", results / "logit_growth", "--size", "7B", *more) for more in ([], ["--json"]))
    public = read_limits()["failing_lr"].at({"params": 7e9})
    assert f"{public.middle:.3g} ({public.earliest:.3g} to {public.latest:.3g})" in " ".join(text.split())
    said = {row["quantity"]: row["public_runs_fail_from_lr"]["value"] for row in json.loads(rows)}
    assert said == {LOGIT.name: public.middle, GRADIENT.name: None}  # a gradient below epsilon is another failure


def test_the_same_stands_beside_the_eta_div_of_a_table_and_nowhere_without_one() -> None:
    def lines(frame: pd.DataFrame) -> str:
        found = at_size.forecasts_at(from_frame(frame, initial_loss=9).records, 1e9, None)
        return " ".join(at_size.lines_of(found, 1e9, None, 120, read_limits()["failing_lr"].at({"params": 1e9})))

    assert "Public runs" in lines(table())
    calm = table()
    assert "Public runs" not in lines(calm[calm["loss"].notna()])


def test_one_size_is_refused_in_one_line_and_two_tell_of_transfer_only() -> None:
    with pytest.raises(RequestError, match="no arm has a value at 3 sizes") as refusal:
        forecast.say(from_frame(table(which=SIZES[:1]), initial_loss=9).records)
    assert "\n" not in str(refusal.value)
    text = forecast.say(from_frame(table(which=SIZES[:2]), initial_loss=9).records)
    assert text[0].startswith("No forecast: no arm has a value at 3 sizes")
    assert "Does the best learning rate transfer?" in text


def test_one_seed_has_an_interval_over_sizes_alone() -> None:
    text = "\n".join(forecast.say(from_frame(table(seeds=1), initial_loss=9).records))
    assert "1 of 1" in text
    assert "nan" not in text


@pytest.mark.parametrize("options", [[], ["--size", "7B"], ["--size", "7B", "--lr", "1e-3"]])
def test_a_window_is_for_runs_of_a_table(options: list[str], output_of: OutputOf) -> None:
    quickstart = Path(__file__).parents[1] / "results" / "quickstart"
    assert "--window goes with runs imported from a table" in output_of(
        "predict", quickstart, "--window", "1e-4", "1e-2", *options, code=2
    )
