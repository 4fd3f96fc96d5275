"""Sensitivity of planted curves, worked out by hand."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import planted
from lab.analysis import findings, points, sensitivity, tables
from lab.analysis.sensitivity import split
from lab.analysis.statistics import Interval, Spread, spread_within, student_t, zones
from lab.analysis.text import count
from lab.core.errors import RequestError
from studies.claims.curve_summaries import summarize_curves


def curve(losses, lrs=planted.LRS, at_init=5.0):
    return pd.DataFrame({"lr": lrs[: len(losses)], "loss": losses, "loss_at_init": at_init})


def study(cards):
    return points(planted.table(cards))


def test_sensitivity_is_the_mean_regret():
    # regrets 1.0 0.5 0 0.25 3.0 (capped), 3.0 (NaN), 3.0 (inf)
    parts = split(curve([3.0, 2.5, 2.0, 2.25, 9.0, math.nan, math.inf]))
    assert parts.total == pytest.approx((1.0 + 0.5 + 0.25 + 3 * 3.0) / 7)
    assert parts.below == pytest.approx(1.5 / 7)
    assert parts.above == pytest.approx(9.25 / 7)


def test_rows_may_come_in_any_order():
    table = curve([3.0, 2.5, 2.0, 2.25, 2.3, 2.4, 2.9])
    assert split(table.sample(frac=1, random_state=0)) == split(table)
    assert split(table).below != split(table).above


def test_a_curve_that_never_trained_has_no_regret():
    assert split(curve([math.nan] * 7)) == (0, 0, 0)


def test_no_learning_rate_is_best_where_all_diverged(tmp_path):
    lost = {"final_val_loss": math.nan, "status": "diverged", "diverged_at": 3, "loss_at_init": 5.0}
    cards = [
        *planted.cards(arms=["none"], widths=[32], lrs=planted.LRS[:3], **lost),
        *planted.cards(arms=["z_loss"], widths=[32], lrs=planted.LRS[:3]),
    ]
    made = sensitivity.study([planted.write(tmp_path, cards)])
    of_arm = made.seeds.set_index("arm")["best_lr"]
    assert of_arm["without z-loss"].isna().all()
    assert set(of_arm["with z-loss"]) == {planted.LRS[2]}
    assert list(tables.sensitivities_as_text(made).set_index("arm")["best LR"]) == ["none", "0.003"]
    assert tables.files(made)["optima_by_seed"].set_index("arm")["best_lr_fine"].loc["without z-loss"].isna().all()
    notes = [note for note in findings.notes(made) if note.startswith("The best learning rate is the lowest")]
    assert not [note for note in notes if "without z-loss at" in note]


def test_a_cell_of_losses_has_the_mark_of_its_worst_seed(tmp_path):
    cards = list(planted.cards(["none"], [32], lrs=[1e-2, 1e-1, 3e-1]))  # those at 0.3 are unstable
    cards[3] |= {"final_val_loss": planted.BIGRAM + 0.1}
    cards[7] |= {"status": "diverged", "diverged_at": 3, "final_val_loss": math.nan}
    (row,) = tables.losses_as_text(sensitivity.study([planted.write(tmp_path, cards)])).to_dict("records")
    assert [row[lr].partition(" ")[2] for lr in ("0.01", "0.1", "0.3")] == ["", "*", "†"]
    others = [card["final_val_loss"] for card in cards if card["optimizer.lr"] == 0.3 and card is not cards[7]]
    counted = (sum(others) + cards[7]["loss_at_init"]) / 3  # a diverged seed with its loss at initialization
    assert row["0.3"].startswith(f"{counted:.3f} ")


def test_a_study_shows_a_notebook_its_arms(tmp_path):
    cards = list(planted.cards(["none", "z_loss"], [32], lrs=[1e-3, 1e-2, 1e-1]))
    lost = {"status": "diverged", "diverged_at": 3, "final_val_loss": math.nan}
    for card in [*cards[6:9], cards[3]]:  # all seeds of the first arm at 0.1, one at 0.01
        card |= lost
    made = sensitivity.study([planted.write(tmp_path, cards)])
    assert repr(made) == "<Study: 18 runs, 4 diverged, 2 arms, 1 size, 3 seeds, learning rate 0.001 to 0.1>"
    heads, cells = (re.findall(rf"<{tag}>(.*?)</{tag}>", made._repr_html_()) for tag in ("th", "td"))
    shown = pd.DataFrame(np.reshape(cells, (2, len(heads))), columns=heads).set_index("arm")
    assert shown["unstable LRs"].to_dict() == {
        "without z-loss": "0.01 (1 of 3 seeds), 0.1",
        "with z-loss": "0.1 (1 of 3 seeds)",
    }
    for arm, row in made.curves.set_index("arm").iterrows():
        assert shown.loc[arm, "sensitivity"] == f"{row['total']:±}"
        assert shown.loc[arm, "instability part"] == f"{row['above']:±}"
    best = made.points.groupby(["arm", "seed"])["loss"].min().groupby("arm").mean()
    assert shown["best loss"].str.partition(" ")[0].astype(float).to_dict() == pytest.approx(best.to_dict(), abs=6e-4)


def test_tables_are_numbers(tmp_path):
    """What a table for readers says in words, it says in columns of numbers."""
    cards = [
        card
        for card in planted.cards(widths=[32], seeds=(0, 1, 2, 3))
        if card["seed"] < 3 or card["optimizer.lr"] < 1e-1
    ]
    made = sensitivity.study([planted.write(tmp_path, cards)])
    numbers, text = tables.sensitivities(made).set_index("arm"), tables.sensitivities_as_text(made).set_index("arm")
    assert not [name for name in numbers if numbers[name].dtype.kind not in "if"]
    for arm, curve in made.curves.set_index("arm").iterrows():
        assert tuple(numbers.loc[arm, ["sensitivity", "sensitivity_low", "sensitivity_high"]]) == curve["total"][:3]
        assert numbers.loc[arm, "eta_div_seeds"] == sum(not math.isnan(lr) for lr in curve["eta_div"])
    lost = numbers[numbers["eta_div_seeds"] > 0]
    assert (lost["eta_div_least"] <= lost["eta_div_greatest"]).all()
    assert numbers["eta_div_least"].isna().equals(text["eta_div"] == "none")
    (difference,) = tables.differences(made).to_dict("records")
    assert difference["instability_low"] == made.pairs["above"][0].low
    losses = tables.losses(made).set_index("arm")
    means = made.points.groupby(["arm", "lr"])["capped"].mean()
    assert {(arm, lr): losses.loc[arm, lr] for arm, lr in means.index} == pytest.approx(means.to_dict())


def test_below_two_learning_rates_nothing_is_defined():
    assert math.isnan(split(curve([2.0])).total)
    assert math.isnan(split(curve([2.0, 3.0], lrs=(1e-2, 1.0))).total)
    assert split(curve([2.0, 3.0])).total == 0.5


def test_two_losses_at_one_learning_rate_are_refused():
    with pytest.raises(ValueError, match="more than one row"):
        split(curve([2.0, 2.1, 2.2], lrs=(1e-3, 1e-2, 1e-2)))


def test_among_equals_the_smallest_learning_rate_is_the_best():
    parts = split(curve([3.0, 2.0, 2.5, 2.0]))  # what lies between two bests counts as instability
    assert (parts.below, parts.above) == (0.25, 0.125)
    runs = study(planted.cards(arms=["none"], widths=[32], seeds=[0], final_val_loss=2.0))
    assert set(sensitivity.per_seed(runs)["best_lr"]) == {3e-4}


@pytest.mark.parametrize("edge", [float(np.float32(3e-4)), 0.1 * 3e-3, float(np.float32(0.3)), 0.1 + 0.2])
def test_the_window_holds_its_edges_however_they_were_rounded(edge):
    assert split(curve([2.0, 3.0], lrs=(1e-2, edge))).total == 0.5
    assert split(curve([2.0, 3.0], lrs=(1e-2, float(f"{edge:.1g}"))), min(edge, 1e-2), max(edge, 1e-2)).total == 0.5


def test_outside_the_window_nothing_counts_not_even_as_the_best():
    table = curve([1.0, 2.0, 2.5, 1.0], lrs=(1e-4, 1e-2, 1e-1, 1.0))
    assert split(table).total == 0.25
    assert split(table, low=1e-4, high=1.0).total == pytest.approx(2.5 / 4)


losses = st.floats(-30, 30) | st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=100, deadline=None)
@given(st.lists(losses, min_size=2, max_size=7), st.floats(0.1, 20), st.randoms())
def test_the_parts_add_up_and_no_regret_is_negative(losses, at_init, order):
    table = curve(losses, at_init=at_init)
    parts = split(table.iloc[order.sample(range(len(losses)), len(losses))])
    counted = [min(loss, at_init) if math.isfinite(loss) else at_init for loss in losses]
    assert parts.total == parts.below + parts.above
    assert parts.total == pytest.approx(sum(counted) / len(losses) - min(counted), rel=1e-6, abs=1e-9)
    assert min(parts) >= 0


@given(
    st.lists(losses, min_size=2, max_size=7), st.floats(0.1, 20), st.floats(0.1, 10), st.floats(-50, 50), st.randoms()
)
def test_sensitivity_is_of_differences_alone(losses, at_init, factor, shift, order):
    table = curve(losses, at_init=at_init)
    moved = table.assign(loss=factor * table["loss"] + shift, loss_at_init=factor * at_init + shift)
    plain, found = split(table), split(moved.iloc[order.sample(range(len(losses)), len(losses))])
    assert found.total == pytest.approx(factor * plain.total, rel=1e-9, abs=1e-9)
    # which of two bests that rounding tells apart is the first is not for a shift to keep
    finite = sorted(min(loss, at_init) if math.isfinite(loss) else at_init for loss in losses)
    lone = {"curve": 0, "seed": "0", "arm": "", "parameters": 1}
    best, best_moved = (sensitivity.optima(runs.assign(**lone)).iloc[0] for runs in (table, moved))
    if finite[1] - finite[0] > 1e-9:
        assert found == pytest.approx([factor * part for part in plain], rel=1e-9, abs=1e-9)
        assert best_moved["best_lr_fine"] == pytest.approx(best["best_lr_fine"], rel=1e-3, nan_ok=True)
    assert best_moved["spread"] == pytest.approx(factor * best["spread"], rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-3, 3) | st.just(math.nan), min_size=28, max_size=28), st.randoms())
def test_runs_and_seeds_may_come_in_any_order(changes, order):
    cards = list(planted.cards(arms=["none"], widths=[32], seeds=range(4)))
    for card, change in zip(cards, changes, strict=True):
        card["final_val_loss"] += change
    runs = study(cards)
    tables = [runs, study(order.sample(cards, len(cards))), runs.sample(frac=1, random_state=order.randrange(99))]
    one, other, backwards = (sensitivity.by_curve(sensitivity.per_seed(table)) for table in tables)
    for part in sensitivity.PARTS:
        assert list(one[part]) == list(other[part])
        ours, theirs = one[part].iloc[0], backwards[part].iloc[0]  # the seeds in another order
        assert theirs[:4] == pytest.approx(ours[:4])
        assert sorted(theirs.values) == sorted(ours.values)
    assert one[["best_lr", "eta_div"]].map(str).equals(other[["best_lr", "eta_div"]].map(str))


def test_intervals_are_student_t():
    values = [0.148, 0.161, 0.200, 0.172]
    low, high = stats.t.interval(0.95, df=3, loc=np.mean(values), scale=stats.sem(values))
    interval = student_t([*values, math.nan])
    assert interval[:4] == pytest.approx((np.mean(values), low, high, 4))
    assert str(interval) == "0.170 ± 0.035 (n = 4)"


def test_below_three_seeds_there_are_values_and_no_interval():
    interval = student_t([0.1, 0.2])
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)
    assert str(interval) == "0.100 and 0.200 (n = 2)"
    assert not math.isnan(student_t([0.1, 0.2, 0.3]).low)


def test_arms_are_compared_seed_by_seed():
    shift = {0: 0.0, 1: 1.0, 2: 2.5}  # a seed effect far larger than that of the arm
    cards = [
        {**card, "final_val_loss": 1 + (card["optimizer.lr"] > 0.2) * (shift[card["seed"]] + 0.7 * (arm == "none"))}
        for arm in ("none", "z_loss")
        for card in planted.cards(arms=[arm], widths=[32])
    ]
    runs = study(cards)
    paired = sensitivity.paired(runs, "without z-loss", "with z-loss").iloc[0]
    assert paired["total"].mean == pytest.approx(0.1)
    assert paired["total"].high - paired["total"].low < 1e-9
    unpaired = sensitivity.by_curve(sensitivity.per_seed(runs))["total"].iloc[0]
    assert unpaired.high - unpaired.low > 0.5
    assert sensitivity.paired(runs, "with z-loss", "without z-loss").iloc[0]["above"].mean == pytest.approx(-0.1)


def test_an_arm_that_is_not_there_is_refused():
    runs = study(list(planted.cards(arms=["none", "z_loss"], widths=[32])))
    with pytest.raises(RequestError, match=r"no arm 'z_loss'; .*with z-loss"):
        sensitivity.paired(runs, "without z-loss", "z_loss")


def test_pairs_share_seeds_and_learning_rates():
    cards = list(planted.cards(widths=[32], seeds=range(4)))
    complete = sensitivity.all_pairs(study(cards)).iloc[0]["total"]
    # one arm's last seed is absent, and another of its seeds lacks the learning rate that tells the arms apart
    normed = [card for card in cards if card["intervention"] != "z_loss"]
    missing = [card for card in normed if card["seed"] == 3 or (card["seed"] == 2 and card["optimizer.lr"] == 0.3)]
    partial = sensitivity.all_pairs(study(card for card in cards if card not in missing)).iloc[0]["total"]
    assert (complete.n, partial.n) == (4, 3)
    assert partial.values[:2] == complete.values[:2]
    assert partial.values[2] < 0.6 * complete.values[2]


def test_unstable_is_worse_than_bigrams_above_the_best_learning_rate():
    losses = dict(zip(planted.LRS, (3.0, 2.2, 2.0, 2.1, 2.2, 2.5, 2.2), strict=True))
    cards = [{**c, "final_val_loss": losses[c["optimizer.lr"]]} for c in planted.cards(["none"], [32], seeds=[0])]
    judged = sensitivity.judge(study(cards)).set_index("lr")["outcome"]
    assert judged[judged != ""].to_dict() == {0.1: "unstable"}  # not 3e-4: that one is under-trained
    assert sensitivity.per_seed(study(cards))["eta_div"].item() == 0.1


def test_of_several_lost_learning_rates_the_smallest_is_eta_div():
    cards = list(planted.cards(["qk_layernorm+z_loss"], [32], seeds=[0]))
    for lost in (5, 4, 6):
        cards[lost] |= {"status": "diverged", "diverged_at": 7, "final_val_loss": math.nan}
    runs = study(cards).sample(frac=1, random_state=0)
    assert sensitivity.per_seed(runs)["eta_div"].item() == 0.03
    assert math.log10(0.01) < summarize_curves(sensitivity.judge(runs))[0].values["log_lost"] < math.log10(0.03)


def test_a_diverged_run_sets_eta_div_and_a_stable_curve_has_none():
    cards = list(planted.cards(["qk_layernorm+z_loss"], [32], seeds=[0]))
    assert math.isnan(sensitivity.per_seed(study(cards))["eta_div"].item())
    cards[4] |= {"status": "diverged", "diverged_at": 7, "final_val_loss": math.nan}
    assert sensitivity.per_seed(study(cards))["eta_div"].item() == 0.03


def test_numbers_too_small_for_three_decimals_keep_two_digits():
    assert str(student_t([1.0, 1.0, 1.0])) == "1.000 ± 0.000 (n = 3)"
    assert f"{student_t([0.0, 0.0, 0.0]):±}" == "0.000 ± 0.000"
    assert f"{student_t([-1e-5, 1e-5, 0.1 - 0.1]):±}" == "0 ± 2.5e-05"
    assert f"{student_t([2e-5, 2.2e-5, 2.4e-5]):±}" == "2.2e-05 ± 5e-06"
    assert f"{student_t([0.2, 0.3, -0.4999]):±}".startswith("0.000 ± 1.0")
    assert f"{student_t([3e-5]):±}" == "3e-05"


@pytest.mark.parametrize(
    ("interval", "spec", "text"),
    [
        (Interval(0.148, 0.12, 0.176), "[]", "0.148 [0.120, 0.176]"),
        (Interval(0.148, 0.12, 0.176), "+.2f", "+0.15 [+0.12, +0.18]"),
        (Interval(0.148, -0.0001, 0.176), ".3f", "0.148 [0.000, 0.176]"),
        (Interval(1234.5, 1000, 1500), ".3g", "1.23e+03 [1e+03, 1.5e+03]"),
        (Interval(0.148, 0.12, 0.176, 5), "", "0.148 ± 0.028 (n = 5)"),
        (Interval.around(-0.0001, 0.021), "±.2f", "0.00 ± 0.02"),
        (Interval.around(0.106, 0.021, 9, (0.1, 0.112)), "±+.3f", "+0.106 ± 0.021"),
        (Interval(0.5, math.nan, math.nan), "±+.1f", "+0.5"),
        (Interval(0.5, math.nan, math.nan, 2, (0.4, 0.6)), ".1f", "0.4 and 0.6"),
        (Interval(math.nan, math.nan, math.nan), ".3g", "undefined"),
    ],
)
def test_an_interval_is_written_in_one_way(interval: Interval, spec: str, text: str) -> None:
    assert f"{interval:{spec}}" == text


def test_an_interval_is_spelled_in_the_words_of_its_unit() -> None:
    assert Interval(1.2e6, 7e5, 98.6e6).spelled(count) == "1.2M [700k, 98.6M]"


def test_a_study_takes_a_path_a_text_or_several(tmp_path: Path) -> None:
    folder = planted.write(tmp_path / "one", list(planted.cards(arms=("z_loss",), widths=(32,), seeds=(0,))))
    for one in (folder, str(folder), [folder], (str(folder),)):
        assert len(sensitivity.study(one).points) == len(planted.LRS)


def test_the_best_learning_rate_is_never_unstable():
    cards = [
        {**card, "final_val_loss": 3.0 + card["optimizer.lr"]} for card in planted.cards(["none"], [32], seeds=[0])
    ]
    judged = sensitivity.judge(study(cards)).set_index("lr")["outcome"]
    assert judged.to_dict() == {lr: "unstable" if lr > min(planted.LRS) else "" for lr in planted.LRS}


@pytest.mark.parametrize(
    ("losses", "at_init", "outcomes"),
    [
        ([3.1, 3.0, 3.2, 7.5, 7.8], math.nan, ["", "", "", "unstable", "unstable"]),
        ([7.8, 3.1, 3.0, 3.29, 3.31], math.nan, ["", "", "", "", "unstable"]),  # only above the best one, and by 0.3
        ([3.0, 3.1, 3.2, 3.15, 3.2], 3.12, ["", "", "unstable", "unstable", "unstable"]),
        ([3.0, 3.1, math.nan, 3.6, 3.2], 9.0, ["", "", "diverged", "unstable", ""]),
        ([7.7, 7.8, 7.75, 7.9, 7.6], math.nan, ["", "", "", "", ""]),
    ],
)
def test_without_a_bigram_model_a_costly_run_is_unstable(losses, at_init, outcomes):
    """Plateaus of a table: above the best learning rate, and 0.3 above its loss or above that at initialization."""
    cards = list(planted.cards(arms=["none"], widths=[32], lrs=planted.LRS[:5], seeds=(0,)))
    unknown = {"loss_bigram": math.nan, "loss_at_init": at_init}
    runs = study([{**card, **unknown, "final_val_loss": loss} for card, loss in zip(cards, losses, strict=True)])
    assert sensitivity.judge(runs)["outcome"].tolist() == outcomes
    first = [lr for lr, outcome in zip(planted.LRS, outcomes, strict=False) if outcome]
    assert sensitivity.per_seed(runs)["eta_div"].tolist() == pytest.approx(first[:1] or [math.nan], nan_ok=True)


def test_where_the_loss_of_a_bigram_model_is_known_it_alone_decides():
    cards = list(planted.cards(arms=["none"], widths=[32], lrs=planted.LRS[:4], seeds=(0,)))
    losses = [2.0, 2.1, 2.5, 2.7]  # 2.5 is costly, and better than a bigram model
    runs = study(
        [{**card, "loss_bigram": 2.6, "final_val_loss": loss} for card, loss in zip(cards, losses, strict=True)]
    )
    assert sensitivity.judge(runs)["outcome"].tolist() == ["", "", "", "unstable"]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (-3, -2, (0, 0)),
        (-0.5, 0.5, (1, 1)),
        (2, 3, (2, 2)),
        (-2, 0, (0, 1)),
        (0, 2, (1, 2)),
        (-2, 2, (0, 2)),
        (-1, 0, (0, 1)),  # an edge belongs to both of its zones
        (1, 2, (1, 2)),
        (math.nan, math.nan, (0, 2)),
    ],
)
def test_an_interval_tells_in_which_zones_its_mean_may_lie(low: float, high: float, found: tuple[int, int]) -> None:
    assert zones(Interval(low, low, high), (-1.0, 1.0)) == found


def test_spreads_of_groups_are_pooled_and_taken_apart() -> None:
    draw = np.random.default_rng(0)
    few, many = draw.normal(size=4), draw.normal(3, 2, size=9)
    one, other = spread_within([few]), spread_within([many])
    both = one.combine(other)
    assert one == pytest.approx((few.std(ddof=1), 3))
    assert both == pytest.approx(spread_within([few, many]))
    assert both == pytest.approx((math.sqrt((3 * few.var(ddof=1) + 8 * many.var(ddof=1)) / 11), 11))
    assert both.without(other) == pytest.approx(one)
    assert math.isnan(one.without(one).sd)
    assert one.combine(Spread()) == pytest.approx(one)
    assert one.interval(few)[:4] == pytest.approx(student_t(few)[:4])
    assert one.p(one.interval(few)) == pytest.approx(stats.ttest_1samp(few, 0).pvalue)
    assert math.isnan(Spread().interval(few).low)
