"""Forecasts for runs of a table: power laws in size that were planted are found, scored on the largest and bounded."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.__main__ import main
from lab.analysis import forecast, from_frame
from lab.analysis.laws import optimum
from lab.analysis.laws.fits import with_ends
from lab.analysis.sensitivity import Study
from lab.core.errors import RequestError
from lab.features.predict import at_size, sizes
from lab.features.predict.forecasts import GRADIENT, LOGIT, OUTPUT_LOGIT
from lab.features.predict.limits import read_limits
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


def best_lrs(frame: pd.DataFrame) -> pd.DataFrame:
    return sizes.best_lrs(from_frame(frame, initial_loss=9).records)


def test_the_best_learning_rate_follows_the_planted_power_law() -> None:
    made = sizes.make_forecast(best_lrs(table()))
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


def test_an_optimum_at_the_end_of_a_grid_has_no_value() -> None:
    frame = table(lrs=tuple(lr for lr in LRS if lr < 0.012))
    low = best_lrs(frame)
    assert low.loc[low["size"] == SIZES[0], "value"].isna().all()
    assert low.loc[low["size"] == SIZES[-1], "value"].notna().all()
    of_three = table()
    of_three = of_three[(of_three["params"] > SIZES[0]) | (of_three["lr"] < 0.012)]
    lines = forecast.say(from_frame(of_three, initial_loss=9).records)
    assert "Left out, since the best learning rate is the lowest or highest tried: 3 of 12 curves." in lines


def test_unknown_initial_losses_leave_the_optimum_known() -> None:
    frame = table(lrs=tuple(lr for lr in LRS if lr < 0.02))
    known, unknown = (sizes.best_lrs(from_frame(frame, initial_loss=loss).records) for loss in (9, None))
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
    assert [(fit["quantity"], fit["held_out"]["inside"]) for fit in made["fits"]] == [(sizes.BEST_LR, 3)]
    assert not (out / "figures").exists()


def test_the_rate_from_which_public_runs_fail_stands_beside_a_forecast_of_the_same(output_of: OutputOf) -> None:
    results = Path(__file__).parents[1] / "results"
    text, rows = (output_of("predict", results / "logit_growth", "--size", "7B", *more) for more in ([], ["--json"]))
    public = read_limits()["failing_lr"].at({"params": 7e9})
    assert f"{public.middle:.3g} [{public.earliest:.3g}, {public.latest:.3g}]" in " ".join(text.split())
    said = {row["quantity"]: row["public_runs_fail_from_lr"]["value"] for row in json.loads(rows)}
    other_failures = {GRADIENT.name: None, OUTPUT_LOGIT.name: None}
    assert said == {LOGIT.name: public.middle, **other_failures}


def test_a_limit_that_depends_on_steps_is_not_one_to_act_on(output_of: OutputOf) -> None:
    results = Path(__file__).parents[1] / "results"
    text = " ".join(output_of("predict", results / "logit_growth", "--size", "7B").split())
    assert "not one to act on" in text


def test_the_same_stands_beside_the_failing_rate_of_a_table_and_nowhere_without_one() -> None:
    def lines(study: Study) -> str:
        return at_size.predict_at(study.records, 1e9, None).text()

    assert "Public runs" in lines(planted_cliffs("tokens"))
    assert "Public runs" not in lines(from_frame(table(), initial_loss=9))


def test_one_size_is_refused_in_one_line_and_two_tell_of_transfer_only() -> None:
    with pytest.raises(RequestError, match="no arm has a value at 3 sizes") as refusal:
        forecast.say(from_frame(table(which=SIZES[:1]), initial_loss=9).records)
    assert "\n" not in str(refusal.value)
    text = forecast.say(from_frame(table(which=SIZES[:2]), initial_loss=9).records)
    assert text[0].startswith("No forecast: no arm has a value at 3 sizes")
    assert "Does the best learning rate transfer?" in text


def test_a_table_of_one_size_is_led_to_what_public_runs_do() -> None:
    records = from_frame(table(which=SIZES[:1]), initial_loss=9).records
    with pytest.raises(RequestError, match=r"lab predict --params 7B lr=0.002 qk_norm=no"):
        at_size.forecasts_at(records, 7e9, 2e-3)


def test_a_forecast_that_may_lie_anywhere_is_not_told() -> None:
    assert with_ends(0.0041, 0.0011, 0.015, digits=2) == "0.0041 [0.0011, 0.015]"
    assert with_ends(1.0, 1.1e-3, 1e3, digits=2) == "1 [0.0011, 1e+03]"
    assert with_ends(1.0, 0.9e-3, 1e3, digits=2) == "cannot tell"
    assert with_ends(1.234, math.nan, math.nan, digits=3) == "1.23"


def test_one_seed_has_an_interval_over_sizes_alone() -> None:
    text = "\n".join(forecast.say(from_frame(table(seeds=1), initial_loss=9).records))
    assert "1 of 1" in text
    assert "nan" not in text


def curves(**arms: dict[int, dict[float, float]]) -> pd.DataFrame:
    """A run for each loss, by arm, size and learning rate."""
    rows = [
        {"arm": arm, "params": size, "lr": lr, "loss": loss}
        for arm, sizes_of in arms.items()
        for size, losses in sizes_of.items()
        for lr, loss in losses.items()
    ]
    return pd.DataFrame(rows)


SMALL = {0.0005: 3.52, 0.001: 3.43, 0.002: 3.38, 0.004: 3.4}  # the best lies at 0.0023


@pytest.mark.parametrize(
    ("large", "cost"),
    [
        ({0.00025: 2.83, 0.0005: 2.79, 0.001: 2.81, 0.004: math.nan}, "unknown"),  # beside a run that diverged
        ({0.00025: 2.83, 0.0005: 2.79, 0.001: 2.81, 0.004: 7.3}, "unknown"),  # beside a plateau
        ({0.00025: 2.83, 0.0005: 2.79, 0.001: 2.81}, "unknown"),  # beyond what ran
        ({0.00025: 2.83, 0.0005: 2.79, 0.001: 2.81, 0.004: 2.95}, "0.105"),
        ({0.00025: 2.83, 0.0005: 2.79, 0.001: 2.81, 0.002: 2.85, 0.004: 2.9, 0.008: math.nan}, "0.071"),
    ],
)
def test_a_cost_is_read_between_runs_that_trained(large: dict[float, float], cost: str) -> None:
    frame = curves(a={1_000_000: SMALL, 16_000_000: large})
    (row,) = optimum.transfer_table(from_frame(frame, initial_loss=8).points).to_dict("records")
    assert row["cost"] == cost
    assert row["n"] == (cost != "unknown")


def test_a_learning_rate_that_ran_costs_what_it_did_however_steep_the_curve_is() -> None:
    small = {0.001: 3.5, 0.01: 3.4, 0.1: 3.5}  # a parabola about 0.01
    large = {0.0001: 3.2, 0.001: 3.0, 0.01: 3.9, 0.1: 7.0}
    (row,) = optimum.transfer_table(from_frame(curves(a={10**6: small, 10**7: large})).points).to_dict("records")
    assert row["cost"] == "0.900"


def test_arms_that_differ_in_their_largest_size_share_a_table() -> None:
    parabola = {0.001: 4.0, 0.01: 3.0, 0.1: 4.0}
    frame = curves(
        a=dict.fromkeys((10**6, 2 * 10**6, 4 * 10**6), parabola), b=dict.fromkeys((10**6, 10**7, 10**8), parabola)
    )
    lines = forecast.say(from_frame(frame).records)
    head, first, second = lines[1:4]
    assert head.split()[3:7] == ["largest", "error", "at", "it"]
    assert ("4M" in first, "100M" in second) == (True, True)
    assert len({len(line.split("  ")) for line in (head, first, second)} | {1}) > 1
    assert "nan" not in "\n".join(lines)


ODD: dict[str, pd.DataFrame] = {
    "no learning rate": pd.DataFrame({"arm": [*"abc"], "params": [1, 10, 100], "loss": [3.0, 2.9, 2.8]}),
    "one run": pd.DataFrame({"lr": [0.1], "loss": [3.0]}),
    "equal losses": pd.DataFrame({"lr": [0.1, 0.2, 0.3] * 3, "params": np.repeat([1, 10, 100], 3), "loss": 3.0}),
    "all diverged": pd.DataFrame({"lr": [0.1, 0.2, 0.3] * 3, "params": np.repeat([1, 10, 100], 3), "loss": math.nan}),
    "zero on the axis": pd.DataFrame(
        {"wd": [0, 0.1, 0.2] * 3, "size": np.repeat([1, 10, 100], 3), "loss": [3.1, 3, 3.2] * 3}
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_forecast_of_odd_tables_is_made_or_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ODD[name].to_csv(tmp_path / "a.csv", index=False)
    options = ["--initial-loss", "9", *(["--axis", "wd"] if "axis" in name else [])]
    assert main(["import", str(tmp_path / "a.csv"), f"out={tmp_path / 'out'}", *options]) == 0
    for words in ([], ["--size", "7B"], ["--size", "7B", "--lr", "1e-3"], ["--json"]):
        assert main(["predict", str(tmp_path / "out"), *words]) in (0, 2)
    assert "fault of the lab" not in capsys.readouterr().err


def law(**numbers: tuple[float, ...]) -> str:
    """The law of curves in which these numbers vary together, place by place; the optimum falls with the first."""
    curves_of = pd.DataFrame(numbers).assign(best=lambda runs: -2 - 0.3 * np.log10(runs.iloc[:, 0] / 1e8))
    frame = curves_of.merge(pd.DataFrame({"place": np.arange(-5, 1, 0.5)}), how="cross")
    frame = frame.assign(lr=10 ** frame["place"], loss=3 + (frame["place"] - frame["best"]) ** 2)
    read = from_frame(frame.drop(columns=["place", "best"]))
    found = optimum.fit_laws(read.records, read.points)
    return found[0].text if found else ""


TOKENS = tuple(tokens for tokens in (1e9, 4e9, 16e9) for _ in range(3))
BATCH = (32, 128, 512) * 3


def test_a_number_that_follows_from_others_has_no_exponent_and_is_named() -> None:
    steps = tuple(round(tokens / batch / 2048) for tokens, batch in zip(TOKENS, BATCH, strict=True))
    found = law(tokens=TOKENS, bs=BATCH, steps=steps)
    assert "tokens^-0.30 [-0.30, -0.30]" in found
    assert re.search(r"\bbs\^-?0\.00 ", found)
    assert found.endswith("no exponent of its own: steps (from bs and tokens)")


def test_numbers_that_are_nearly_collinear_are_found_at_a_sensible_tolerance() -> None:
    """Within rounding or a few per cent the last of them is left out; what varies by itself stays."""
    size = (1e8, 2e8, 4e8, 8e8, 16e8, 32e8)
    for noise, is_left_out in ((1e-9, True), (1e-3, True), (0.02, True), (0.6, False)):
        tokens = tuple(20 * n * (1 + noise * (-1) ** k) for k, n in enumerate(size))
        batch = (32, 64, 64, 32, 32, 64)
        found = law(flops=tuple(6 * n for n in size), tokens=tokens, bs=batch)
        assert ("tokens^" not in found) == is_left_out, (noise, found)
        assert ("no exponent of its own: tokens (from flops)" in found) == is_left_out
        assert "bs^" in found


def test_where_one_number_alone_varies_by_itself_there_is_no_law_and_it_is_said() -> None:
    size = tuple(2.0**k * 1e8 for k in range(6))
    found = law(flops=size, tokens=tuple(20 * n * (1 + 0.01 * (-1) ** k) for k, n in enumerate(size)))
    assert found == "none, since only flops varies by itself; no exponent of its own: tokens (from flops)"


def test_a_number_is_called_as_its_column_whatever_that_is() -> None:
    """A column that is called as one of the curves is not taken for it."""
    found = law(capped=(1e8, 2e8, 4e8, 8e8) * 2, curve=(1, 1, 1, 1, 10, 10, 10, 10))
    assert re.search(r"capped\^-0\.30 .*curve\^-?0\.00 ", found)


def planted_cliffs(name: str, highest: float = 1.0) -> Study:
    """Each size with its own tokens, so that no arm has three sizes; a cliff at a planted power of size and a number.

    Optima follow the power of size alone, a decade below the cliff of the smallest curve.
    """
    rows = []
    for size, ratio in ((1e8, 10), (1e8, 40), (2e8, 5), (2e8, 30), (4e8, 15), (4e8, 60), (8e8, 8), (8e8, 25)):
        cliff = cliff_of(size, ratio * size)
        for lr in 10 ** np.arange(-4, math.log10(highest), 0.1):
            x = math.log10(lr) - math.log10(cliff_of(size, 1e9)) + 1
            loss = 3 + 0.05 * x * x + 4 * (lr >= cliff)
            rows.append({"params": size, name: ratio * size, "lr": lr, "loss": loss})
    return from_frame(pd.DataFrame(rows), size="params", arm=[name])


def cliff_of(size: float, tokens: float) -> float:
    return float(0.03 * (size / 1e8) ** -0.4 * (tokens / 1e9) ** 0.2)


@pytest.mark.parametrize("name", ["tokens", "low"])  # a number may be called as an end of a bracket
@pytest.mark.parametrize("highest", [1.0, 0.033])  # above which no curve was tried, so that some do not fail
def test_the_first_failing_rate_follows_the_planted_law(name: str, highest: float) -> None:
    study = planted_cliffs(name, highest)
    law = optimum.fit_laws(study.records, study.points, failing=True)[0]
    assert law.power is not None
    for number, exponent in (("size", -0.4), (name, 0.2)):
        found = law.power.exponent(number)
        assert found.low < exponent < found.high
        assert found.high - found.low < 0.5
    assert ("no rate failed" in law.text) == (highest < 1)
    found = law.power.predict({"size": 3e9, name: 1e10})
    assert found.earliest < cliff_of(3e9, 1e10) < found.latest


def test_a_table_without_three_sizes_of_an_arm_is_foretold_by_its_laws() -> None:
    found = {row.quantity: row for row in at_size.forecasts_at(planted_cliffs("tokens").records, 3e9, None)}
    tokens = float(re.findall(r"at tokens (\d+)", found[sizes.FAILING_LR].arm)[0])
    assert found[sizes.FAILING_LR].value.earliest < cliff_of(3e9, tokens) < found[sizes.FAILING_LR].value.latest
    assert found[sizes.BEST_LR].value.middle == pytest.approx(cliff_of(3e9, 1e9) / 10, rel=0.1)
    assert found[sizes.BEST_LR].n == 8


def test_long_lists_of_arms_are_cut() -> None:
    parabola = {0.001: 3.1, 0.01: 3.0, 0.1: 3.1}
    arms = {f"an arm with a long name, {number}": {10**6: parabola, 10**7: parabola} for number in range(40)}
    frame = pd.concat([curves(**arms), curves(z=dict.fromkeys((1, 10, 100), parabola))])
    lines = [line for part in sizes.forecasts_of(from_frame(frame).records)[0] for line in getattr(part, "parts", [])]
    cut = [line for line in lines if isinstance(line, str) and line.startswith("No forecast, since")]
    assert [line.rpartition(" and ")[2] for line in cut] == ["32 more."]
    assert max(map(len, cut)) < 500


def test_a_cost_beside_a_diverged_run_is_unknown_however_low_the_initial_loss() -> None:
    """The small model's best rate lies between one that costs 0.05 and one that diverged."""
    rows = [(1, 0.1, 3.3), (1, 0.2, 3.0), (1, 0.4, 3.05), (9, 0.1, 3.0), (9, 0.2, 3.05), (9, 0.4, math.nan)]
    frame = pd.DataFrame(rows, columns=["params", "lr", "loss"])
    assert optimum.transfer_table(from_frame(frame, initial_loss=3.2).points)["cost"].tolist() == ["unknown"]
    known = from_frame(frame.fillna({"loss": 3.2}), initial_loss=9).points
    assert 0.05 < float(optimum.transfer_table(known)["cost"].iloc[0]) < 0.2
