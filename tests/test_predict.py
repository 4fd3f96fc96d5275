"""Forecasts: planted power laws are recovered, and growth that is no power law is reported as such."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planted
from lab import main
from lab.analysis.laws import fits
from lab.analysis.laws.fits import bend_sign, calibrate, fit, lr_beyond, size_beyond
from lab.analysis.rendering import layout
from lab.analysis.runaway import read_runaways
from lab.analysis.text import count
from lab.core.errors import RequestError
from lab.features.predict import at_size, sizes
from lab.features.predict.answer import _table, say
from lab.features.predict.figures import gradient_forecast, logit_forecast
from lab.features.predict.forecasts import GRADIENT, LOGIT, OUTPUT_LOGIT, make_forecasts
from lab.records import store
from labwatch.tables import run_table
from labwatch.tables.columns import Columns

WIDTHS = {16: 10_000, 32: 30_000, 64: 100_000, 128: 400_000}
LRS = (1e-3, 1e-2, 1e-1)
UNSTABLE_FROM = 100.0
SEED_NOISE = 0.05


def logit(size, lr):
    return 20 * (size / 1e4) ** 0.8 * (lr / 1e-2) ** 1.2


def gradient(size, lr):
    return 1e-4 * (size / 1e4) ** -0.9 * (lr / 1e-2) ** -0.7


def runs_of(widths=tuple(WIDTHS), lrs=LRS, seeds=(0, 1, 2), arm="z_loss", logit=logit, noise=SEED_NOISE, **changes):
    """A card and its rows for each width, learning rate and seed; unstable where the logit law says so."""
    for width, lr, seed in itertools.product(widths, lrs, seeds):
        size = WIDTHS[width]
        draw = np.random.default_rng([width, round(1e4 * lr), seed, len(arm)])
        peak = logit(size, lr) * 10 ** draw.normal(0, noise)
        run = planted.card(
            **{
                "intervention": arm,
                "optimizer.lr": lr,
                "seed": seed,
                "model.width": width,
                "parameters_without_embeddings": size,
                "final_val_loss": 2.8 if logit(size, lr) > UNSTABLE_FROM else 2.0 + lr,
                **changes,
            }
        )
        late = gradient(size, lr) * 10 ** draw.normal(0, noise)
        # after and before the look the values are others, so that a wrong step is seen
        rows = [(0, LOGIT.probe, LOGIT.where, 1.0), (40, LOGIT.probe, LOGIT.where, peak)]
        rows += [(399, LOGIT.probe, LOGIT.where, 1e6), (200, GRADIENT.probe, GRADIENT.where, 1.0)]
        rows += [(step, GRADIENT.probe, GRADIENT.where, late) for step in (370, 399)]
        yield run, rows


def gathered(*runs):
    rows = [(run["id"], *row) for run, probe_rows in runs for row in probe_rows]
    return planted.records_of([run for run, _ in runs], rows)


def written(folder, *runs):
    """A results folder as one is left behind when a sweep is gathered."""
    store.open_folder(folder, "eager")
    for name, table in gathered(*runs)._asdict().items():
        table.to_parquet(folder / f"{name}.parquet", index=False)
    return folder


def changed(runs, selected, **changes):
    """The runs, with the card of those ``selected`` holds for changed."""
    return [({**run, **changes}, rows) if selected(run) else (run, rows) for run, rows in runs]


# Lines.


@given(st.floats(-2, 2), st.floats(1e-6, 1e6), st.floats(1.2, 100))
def test_known_exponents_are_found_and_followed(exponent, factor, step):
    sizes = np.array([1e4, 1e4 * step, 1e4 * step**2])
    line = fit(sizes, factor * sizes**exponent)
    assert line.slope == pytest.approx(exponent, abs=1e-6)
    prediction = line.predict(1e8)
    assert prediction.middle == pytest.approx(math.log10(factor) + 8 * exponent, abs=1e-4)
    assert prediction.high - prediction.low == pytest.approx(0, abs=1e-3)


def test_the_line_is_that_of_the_textbook():
    x, y = np.array([4.0, 4.5, 5.0, 5.0]), np.array([1.0, 1.2, 1.9, 1.7])
    line = fit(10**x, 10**y)
    slope, height = np.polyfit(x, y, 1)
    design = np.column_stack([np.ones(4), x])
    scatter = math.sqrt(((y - height - slope * x) ** 2).sum() / 2)
    point = np.array([1.0, 6.0])
    t = 4.302653  # two degrees of freedom, 97.5 %
    half = t * scatter * math.sqrt(1 + point @ np.linalg.inv(design.T @ design) @ point)
    prediction = line.predict(1e6)
    assert prediction.middle == pytest.approx(height + 6 * slope)
    assert prediction.high - prediction.middle == pytest.approx(half, rel=1e-6)
    assert prediction.middle - prediction.low == pytest.approx(half, rel=1e-6)


def test_two_points_make_a_line_without_an_interval():
    line = fit([1e4, 1e5], [1, 10])
    assert line.slope == pytest.approx(1)
    assert math.isnan(line.slope_error)
    assert math.isnan(float(line.predict(1e6).low))
    assert math.isnan(size_beyond(line, 100, 1, 1e4, 1e5).earliest)


def test_a_single_size_is_refused():
    with pytest.raises(RequestError, match=r"1 size \(10k parameters\); a fit needs at least two sizes"):
        fit([1e4, 1e4, 1e4], [1, 2, 3])
    with pytest.raises(RequestError, match="no size with a usable value"):
        fit([1e4, 1e5], [math.nan, -1])


def test_points_without_a_logarithm_are_no_points():
    bad = [math.nan, math.inf, -math.inf, 0.0, -3.0]
    assert fit([1e4, 1e5, 1e6, *[3e4] * 5], [2, 5, 9, *bad]) == fit([1e4, 1e5, 1e6], [2, 5, 9])


def test_saturation_is_seen_and_a_power_law_is_not_taken_for_it():
    sizes = np.repeat([1e4, 3e4, 1e5, 4e5], 3)
    noise = 10 ** np.random.default_rng(1).normal(0, 0.03, len(sizes))
    law = sizes / 1e4
    assert bend_sign(sizes, noise * law / (1 + law / 5)) == -1
    assert bend_sign(sizes, noise * (5 + law**1.5)) == 1
    assert bend_sign(sizes, noise * law) == 0
    # no scatter at all but that of rounding
    assert {bend_sign(sizes, 3 * sizes**exponent) for exponent in np.linspace(-2, 2, 200)} == {0}
    assert bend_sign(sizes[:6], 5 + law[:6] ** 1.5) == 0
    assert bend_sign(sizes[::3][:3], 5 + law[::3][:3] ** 1.5) == 0


def test_a_straight_line_is_seldom_called_bent():
    draw, sizes = np.random.default_rng(3), np.repeat([1e4, 3e4, 1e5], 3)
    bent = [bend_sign(sizes, sizes * 10 ** draw.normal(0, 0.1, len(sizes))) for _ in range(1000)]
    assert np.mean(np.array(bent) != 0) == pytest.approx(1 - fits.PREDICTION_LEVEL, abs=0.021)  # three standard errors


# Where a limit is met.


@pytest.mark.parametrize(("slope", "sign", "limit"), [(0.8, 1, 300), (-0.8, -1, 0.01)])
def test_a_limit_is_met_where_the_law_says(slope, sign, limit):
    line = fit([1e4, 3e4, 1e5], [1, 3**slope, 10**slope])
    crossing = size_beyond(line, limit, sign, 1e4, 1e5)
    assert crossing == pytest.approx([1e4 * limit ** (1 / slope)] * 3, rel=1e-6)


def test_the_interval_meets_a_limit_earlier_and_later():
    sizes = np.repeat([1e4, 3e4, 1e5], 3)
    line = fit(sizes, sizes**0.8 * 10 ** np.random.default_rng(0).normal(0, 0.1, 9))
    crossing = size_beyond(line, 1e6**0.8, 1, 1e4, 1e5)
    assert crossing.earliest < crossing.middle < crossing.latest
    assert float(line.predict(crossing.earliest).high) == pytest.approx(math.log10(1e6**0.8), abs=1e-4)
    assert float(line.predict(crossing.latest).low) == pytest.approx(math.log10(1e6**0.8), abs=1e-4)


def test_limits_that_are_never_or_always_met():
    falling = fit([1e4, 3e4, 9e4], [9, 3, 1])
    assert size_beyond(falling, 100, 1, 1e4, 1e5) == (math.inf,) * 3
    assert size_beyond(falling, 5, 1, 1e4, 1e5) == (math.inf,) * 3  # above it only where small
    assert size_beyond(falling, 0, -1, 1e4, 1e5) == (math.inf,) * 3  # an epsilon of zero
    assert size_beyond(falling, 10, -1, 1e4, 1e5) == pytest.approx([1e4] * 3)
    far = 1e5 * fits.REACH
    assert size_beyond(falling, 9e4 / (1.01 * far), -1, 1e4, 1e5).middle == math.inf
    assert size_beyond(falling, 9e4 / (0.99 * far), -1, 1e4, 1e5).middle == pytest.approx(0.99 * far)


def test_between_learning_rates_a_limit_is_met_by_a_power_law():
    sizes = np.array([1e4, 3e4, 1e5])
    lines = {lr: fit(sizes, logit(sizes, lr)) for lr in LRS}
    expected = 1e-2 * (UNSTABLE_FROM / logit(1e6, 1e-2)) ** (1 / 1.2)
    assert LRS[0] < expected < LRS[-1]
    assert lr_beyond(lines, UNSTABLE_FROM, 1, 1e6) == pytest.approx([expected] * 3)
    assert lr_beyond(lines, 1e9, 1, 1e6) == (math.inf,) * 3
    assert lr_beyond(lines, 1e-3, 1, 1e6) == pytest.approx([LRS[0]] * 3)


# The threshold.


def test_the_threshold_is_half_way_between_the_classes():
    threshold = calibrate([1, 10, 30, 300, 1000], [False, False, False, True, True])
    assert threshold == (pytest.approx(math.sqrt(30 * 300)), 30, 300, (2, 2), (3, 3))
    assert calibrate([math.nan, 30, 300], [True, False, True]).unstable == (1, 1)


@pytest.mark.parametrize(
    ("values", "unstable"),
    [([1, 2, 3], [False] * 3), ([1, 2, 3], [True] * 3), ([5, 5], [True, False]), ([1, 2], [True, False]), ([], [])],
)
def test_no_threshold_where_there_is_nothing_to_tell_apart(values, unstable):
    assert calibrate(values, unstable) is None


# Whole sweeps.


def test_both_laws_are_found_in_records_and_told_ahead():
    records = gathered(*runs_of())
    for quantity, law, exponent in ((LOGIT, logit, 0.8), (GRADIENT, gradient, -0.9)):
        (made,) = make_forecasts(records, quantity)
        assert list(made.lines) == list(LRS)
        for lr, line in made.lines.items():
            assert abs(line.slope - exponent) < 2 * line.slope_error
            assert line.slope_error < 0.1
            assert float(line.predict(4e7).middle) == pytest.approx(math.log10(law(4e7, lr)), abs=0.25)
        assert made.score.size == 400_000
        assert made.score.table["error"].abs().max() < 0.15
        assert made.score.table[["inside", "runs"]].sum().tolist() == [9, 9]
    (made,) = make_forecasts(records, LOGIT)
    stable, unstable = (made.runs.loc[(made.runs["outcome"] != "") == lost, "value"] for lost in (False, True))
    assert stable.max() < made.limit < unstable.min()


def test_what_is_held_out_is_not_looked_at():
    runs = list(runs_of())
    largest = [(run, [(step, p, w, 0.2 * value) for step, p, w, value in rows]) for run, rows in runs_of(widths=[128])]
    (original,), (moved,) = (
        make_forecasts(gathered(*runs_of_arm), LOGIT)
        for runs_of_arm in (runs, [*runs_of(widths=[16, 32, 64]), *largest])
    )
    assert original.score.lines == moved.score.lines
    assert original.score.limit == moved.score.limit
    assert original.lines != moved.lines
    assert moved.limit < moved.score.limit  # unstable runs with low logits were added
    shift = moved.score.table["error"] - original.score.table["error"]
    assert shift.tolist() == pytest.approx([math.log10(5)] * 3)
    assert moved.score.table["inside"].sum() == 0


def test_the_class_is_scored_run_by_run():
    (made,) = make_forecasts(gathered(*runs_of()), LOGIT)
    assert made.score.table["right"].tolist() == made.score.table["judged"].tolist() == [3, 3, 3]
    stable = changed(
        runs_of(),
        lambda run: run["model.width"] == 128 and run["optimizer.lr"] == 0.1 and run["seed"],
        final_val_loss=2.2,  # above its best, below the bigram model
    )
    (made,) = make_forecasts(gathered(*stable), LOGIT)
    assert made.score.table["right"].tolist() == [3, 3, 1]


def test_epsilon_is_met_where_the_law_says():
    eps = gradient(4e6, 1e-2)
    (made,) = make_forecasts(gathered(*runs_of(noise=0, **{"optimizer.eps": eps})), GRADIENT)
    assert made.limit == eps
    assert size_beyond(made.lines[1e-2], eps, -1, *made.sizes[::3]).middle == pytest.approx(4e6, rel=1e-3)
    assert not made.runs["beyond"].any()
    eps = gradient(2.5e5, 1e-1)
    (made,) = make_forecasts(gathered(*runs_of(noise=0, **{"optimizer.eps": eps})), GRADIENT)
    assert made.runs.loc[made.runs["beyond"], ["size", "lr"]].drop_duplicates().to_numpy().tolist() == [[4e5, 1e-1]]
    assert made.score.table["right"].tolist() == [3, 3, 3]
    (made,) = make_forecasts(gathered(*runs_of(noise=0, **{"optimizer.eps": 0.0})), GRADIENT)
    assert not made.runs["beyond"].any()


def test_diverged_runs_are_left_out_and_said_so():
    def early(run):
        return run["optimizer.lr"] == 0.1 and run["model.width"] == 64

    lost = {"status": "diverged", "final_val_loss": math.nan}
    runs, diverged = list(runs_of()), changed(runs_of(), early, **lost, diverged_at=20)
    (made,) = make_forecasts(gathered(*diverged), LOGIT)
    (without,) = make_forecasts(gathered(*[run for run in runs if not early(run[0])]), LOGIT)
    assert made.runs["value"].isna().sum() == 3
    assert made.lines == without.lines
    (later,) = make_forecasts(gathered(*changed(runs, early, **lost, diverged_at=300)), LOGIT)
    assert later.runs["value"].notna().all()  # the logit was seen before
    (gradients,) = make_forecasts(gathered(*changed(runs, early, **lost, diverged_at=300)), GRADIENT)
    assert gradients.runs["value"].isna().sum() == 3
    text = " ".join(say(gathered(*diverged)))
    assert "Left out of the fits, as already diverged or without a positive value: 3 of 36 runs" in text
    assert "(3 at 0.1 and 100k parameters)" in text


def test_held_out_diverged_runs_count_for_the_class():
    lost = changed(
        runs_of(), lambda run: run["model.width"] == 128, status="diverged", diverged_at=1, final_val_loss=math.nan
    )
    (made,) = make_forecasts(gathered(*lost), LOGIT)
    assert made.score.table["error"].isna().all()
    assert made.score.table["runs"].tolist() == [0, 0, 0]
    assert made.score.table["right"].tolist() == [0, 3, 3]
    (gradients,) = make_forecasts(gathered(*lost), GRADIENT)  # no value tells on which side of epsilon they were
    assert gradients.score.table["judged"].tolist() == [0, 0, 0]
    assert "nan" not in " ".join(say(gathered(*lost)))


def test_nothing_but_lost_runs_is_refused():
    diverged = {"status": "diverged", "diverged_at": 1, "final_val_loss": math.nan}
    with pytest.raises(RequestError, match="no positive number in any run"):
        say(gathered(*changed(runs_of(), lambda run: True, **diverged)))


def test_logits_that_tell_nothing_are_said_to():
    """The runs with low logits are the unstable ones."""
    upside_down = changed(runs_of(lrs=[1e-2, 1e-1]), lambda run: run["optimizer.lr"] < 0.1, status="diverged")
    upside_down = changed(upside_down, lambda run: run["optimizer.lr"] == 0.1, final_val_loss=2.0)
    text = " ".join(say(gathered(*upside_down)))
    assert "No threshold can be calibrated: logits do not separate unstable runs from stable ones." in text


def test_saturation_is_said():
    def saturating(size, lr):
        return logit(size, lr) / (1 + logit(size, lr) / 2e3)

    text = " ".join(say(gathered(*runs_of(logit=saturating))))
    assert (
        "growth bends downward (saturation) at learning rate 0.1; beyond the largest size its line predicts too much"
        in text
    )
    assert "bends" not in " ".join(say(gathered(*runs_of(noise=0.001))))


def test_arms_are_told_apart_and_a_calm_one_borrows_the_threshold():
    records = gathered(*runs_of(), *runs_of(arm=planted.BOTH[1], logit=lambda size, lr: 5 * (size / 1e4) ** 0.01))
    growing, flat = make_forecasts(records, LOGIT)
    assert (growing.arm, growing.borrowed, flat.arm, flat.borrowed) == (
        planted.OFF_LABEL,
        False,
        planted.ON_LABEL,
        True,
    )
    assert flat.limit == pytest.approx(growing.limit)
    assert size_beyond(flat.lines[0.1], flat.limit, 1, *flat.sizes[::3]).middle == math.inf
    assert growing.lines[0.1].slope == pytest.approx(0.8, abs=0.1)
    assert flat.score.table["right"].tolist() == [3, 3, 3]


@pytest.mark.parametrize(("always", "reason"), [(5.0, "all 36 runs are stable"), (None, "all 12 runs are unstable")])
def test_without_both_classes_there_is_no_threshold(always, reason):
    runs = list(runs_of(logit=lambda size, lr: 5 * size / 1e4 * lr)) if always else None
    runs = runs or changed(runs_of(lrs=[1e-2]), lambda run: True, status="diverged")
    text = " ".join(say(gathered(*runs)))
    assert f"No threshold can be calibrated: {reason}." in text
    assert "nan" not in text


NO_THIRD_SIZE = "of two sizes (30k and 100k parameters) none can be held out to score it; train a third size"


def test_two_sizes_are_followed_but_no_forecast_is_quoted():
    text = " ".join(say(gathered(*runs_of(widths=[32, 64]))))
    assert f"No forecast: {NO_THIRD_SIZE}." in text
    assert "slope in size" in text
    for quoted in ("unstable at", "Unstable from", "meets epsilon at", "Meets epsilon from", "nan"):
        assert quoted not in text


def test_the_command_draws_nothing_that_it_cannot_score(tmp_path, capsys):
    assert main(["predict", str(written(tmp_path, *runs_of(widths=[32, 64])))]) == 2
    assert capsys.readouterr() == ("", f"lab: no forecast: {NO_THIRD_SIZE}\n")
    assert not list(tmp_path.rglob("*.svg"))


def test_learning_rates_that_were_not_held_out_are_not_quoted():
    largest_without_lowest = [
        run for run in runs_of() if (run[0]["model.width"], run[0]["optimizer.lr"]) != (128, 1e-2)
    ]
    (made,) = make_forecasts(gathered(*largest_without_lowest), LOGIT)
    assert 1e-2 in made.lines
    assert 1e-2 not in made.scored
    table = _table(made).set_index("learning rate")
    assert [bool(cell) for cell in table["unstable at"]] == [lr in made.scored for lr in made.lines]


def test_what_was_not_recorded_is_said():
    runs = [(run, [row for row in rows if row[1] != GRADIENT.probe]) for run, rows in runs_of()]
    text = " ".join(say(gathered(*runs)))
    assert "nothing to fit: no run recorded grad_rms of block0.mlp_up" in text
    assert "Held out 400k" in text
    with pytest.raises(RequestError, match="no run recorded attention_logit_max of block0"):
        say(gathered(*[(run, [(0, "train_loss", "", 2.0)]) for run, _ in runs]))


def test_figures_show_lines_limit_and_what_was_held_out():
    records = gathered(*runs_of())
    for draw, quantity in ((logit_forecast, LOGIT), (gradient_forecast, GRADIENT)):
        (made,) = make_forecasts(records, quantity)
        (axes,) = draw(records).axes
        shown = [(line.get_marker(), np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in axes.lines]
        dots = sorted(y for mark, _, ys in shown if mark in ("o", "x") for y in ys)
        assert set(made.runs["value"]) == set(dots)
        assert [ys[0] for mark, xs, ys in shown if mark == "None" and list(xs) == [0, 1]] == [made.limit]
        follow = [(xs, ys) for mark, xs, ys in shown if mark == "None" and xs[-1] == 10 * 400_000]
        ends = [10 ** float(line.predict(4e6).middle) for line in made.score.lines.values()]
        assert sorted(ys[-1] for _, ys in follow) == pytest.approx(sorted(ends))
        assert {xs[0] for xs, _ in follow} == {100_000}


def test_the_command_says_it_and_draws_it_the_same_each_time(tmp_path, output_of):
    folder = written(tmp_path, *runs_of())
    output = output_of("predict", folder)
    assert "9 of 9 runs inside the 95 % interval and 9 of 9 runs of the predicted class" in " ".join(output.split())
    assert {path.name for path in (folder / "figures").iterdir()} == {"logit_forecast.svg", "gradient_forecast.svg"}
    again = layout.svg(logit_forecast(store.read(folder)), "logit_forecast")
    assert (folder / "figures" / "logit_forecast.svg").read_text() == again
    made = json.loads(output_of("predict", folder, "--json"))
    assert made["text"] == output.splitlines()
    forecasts = [one for quantity in (LOGIT, GRADIENT) for one in make_forecasts(store.read(folder), quantity)]
    assert [fit["slope"] for fit in made["fits"]] == [line.slope for one in forecasts for line in one.lines.values()]
    assert all(fit["slope_low"] < fit["slope"] < fit["slope_high"] for fit in made["fits"])
    assert sum(fit["held_out"]["inside"] for fit in made["fits"] if fit["quantity"] == LOGIT.name) == 9


@pytest.mark.slow
def test_sizes_of_a_mixture_are_said_to_count_all_experts(tmp_path, output_of):
    of_experts = {"intervention.experts.number": 8, "intervention.experts.top_k": 2, "intervention.experts.hidden": 1}
    folder = written(tmp_path, *runs_of(**of_experts))
    told = f"Sizes count all experts: of the largest, {count(largest := max(WIDTHS.values()))}, "
    told += f"{count(largest - 2 * 6 * 2 * max(WIDTHS) ** 2)} act on a token."
    for words in ([], ["--size", "7B"]):
        assert output_of("predict", folder, *words).count(told) == 1
    assert "experts" not in output_of("predict", written(tmp_path / "dense", *runs_of()))


# Output logits.


def with_output_logits(widths=tuple(WIDTHS)):
    """The runs, with output logits of 10 at 400k parameters and 0.01, which rise to that and fall afterwards."""
    for run, rows in runs_of(widths, noise=0.001):
        size, lr = run["parameters_without_embeddings"], run["optimizer.lr"]
        draw = np.random.default_rng([size, round(1e4 * lr), run["seed"]])
        highest = 10 * (size / 4e5) ** 0.5 * (lr / 1e-2) ** 0.9 * 10 ** draw.normal(0, 0.01)
        levels = [(step, "log_z_square", "", (highest * part) ** 2) for step, part in ((0, 0.1), (250, 1), (399, 0.5))]
        yield run, [*rows, *levels]


def test_output_logits_are_foretold_up_to_the_level_at_which_they_run_away():
    """Of 0.01 the level is 10 at 400k, so it is 64 at 6.4^2 times that; of 0.1 it is above 64 from 265k on."""
    (made,) = make_forecasts(gathered(*with_output_logits()), OUTPUT_LOGIT)
    assert made.limit == read_runaways()["output_logits"].level == 64
    assert made.lines[1e-2].slope == pytest.approx(0.5, abs=0.02)
    assert size_beyond(made.lines[1e-2], 64, 1, *made.sizes[::3]).middle == pytest.approx(4e5 * 6.4**2, rel=0.1)
    beyond = made.runs.loc[made.runs["beyond"], ["size", "lr"]].drop_duplicates()
    assert beyond.to_numpy().tolist() == [[4e5, 0.1]]  # though runs of 0.1 are unstable from 30k on
    assert made.score.table["right"].tolist() == [3, 3, 3]


def test_output_logits_stand_in_text_at_a_size_and_nowhere_where_none_were_recorded(tmp_path, output_of):
    folder = written(tmp_path / "with", *with_output_logits())
    assert "64: by the law of rounding" in " ".join(output_of("predict", folder).split())
    rows = json.loads(output_of("predict", folder, "--size", "16.4M", "--lr", "1e-2", "--json"))
    (row,) = [row for row in rows if row["quantity"] == OUTPUT_LOGIT.name]
    assert row["value"] == pytest.approx(64, rel=0.1)
    assert row["decades_left"]["value"] == pytest.approx(0, abs=0.05)
    assert "output logit" not in output_of("predict", written(tmp_path / "without", *runs_of()))


# At one size and learning rate.


def test_at_a_size_the_value_the_limits_and_the_decades_left_are_those_of_the_law():
    records, size, lr = gathered(*runs_of(noise=0.001)), 4e8, 3e-3
    found = {row.quantity: row for row in at_size.forecasts_at(records, size, lr)}
    peak, late = found[LOGIT.name], found[GRADIENT.name]
    assert peak.value.middle == pytest.approx(logit(size, lr), rel=0.05)
    assert late.value.middle == pytest.approx(gradient(size, lr), rel=0.05)
    assert peak.value.earliest < peak.value.middle < peak.value.latest
    assert peak.decades_left.middle == pytest.approx(math.log10(peak.limit / logit(size, lr)), abs=0.05)
    assert late.decades_left.middle == pytest.approx(math.log10(gradient(size, lr) / late.limit), abs=0.05)
    assert logit(peak.fails_from_size.middle, lr) == pytest.approx(peak.limit, rel=0.05)
    near = {row.quantity: row for row in at_size.forecasts_at(records, 1e5, lr)}[LOGIT.name]
    assert logit(1e5, near.fails_from_lr.middle) == pytest.approx(near.limit, rel=0.1)
    width = near.value.latest / near.value.earliest
    assert peak.value.latest / peak.value.earliest > width  # further away, the interval is wider


def test_a_learning_rate_beyond_the_runs_gets_no_value_and_is_said_to(tmp_path, output_of):
    folder = written(tmp_path / "made", *runs_of())
    said = output_of("predict", folder, "--size", "400M", "--lr", "1e-4")
    assert "beyond those that ran, 0.001 to 0.1" in said
    rows = json.loads(output_of("predict", folder, "--size", "400M", "--lr", "1e-4", "--json"))
    assert [row["value"] for row in rows] == [None, None]
    assert all(row["decades_beyond_largest"] == pytest.approx(3) for row in rows)


def test_an_imported_table_gives_its_best_learning_rate_at_a_size():
    law = {size: 3e-3 * (size / 1e6) ** -0.25 for size in (1e6, 4e6, 16e6)}
    rows = [
        {"lr": lr, "loss": 3 + math.log10(lr / best) ** 2, "size": size, "seed": seed}
        for size, best in law.items()
        for seed in (0, 1)
        for lr in best * np.array([0.1, 0.3, 1, 3, 10])
    ]
    records = run_table.records_of(pd.DataFrame(rows), Columns(), "theirs").records
    (row,) = [row for row in at_size.forecasts_at(records, 1e9, 1e-3) if row.quantity == sizes.BEST_LR]
    assert row.value.middle == pytest.approx(3e-3 * 1000**-0.25, rel=0.1)
