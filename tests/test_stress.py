"""The crash test: measures and verdicts on planted runs whose answer is known, and the command with tiny runs."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import lab
from lab import main
from lab.analysis.statistics import power_of, student_t
from lab.cli.stress import _kept, _without_impossible_tests, board_changes, make_card, read_plan
from lab.core.errors import RequestError
from lab.records import store
from lab.studies.stress import cures as cures_room
from lab.studies.stress.battery import Setting, Spread, StepTime, read_battery
from lab.studies.stress.card import Card, card_of
from lab.studies.stress.cures import (
    FULL,
    HARMS,
    NO_EFFECT,
    NOT_TRIED,
    PART,
    Cure,
    finalists,
    judge,
    pair_to_try,
    trial_of,
)
from lab.studies.stress.lines import FAILS, NOT_JUDGED, OPEN, PASSES, WEAK, Line, verdict_of
from lab.studies.stress.measures import by_run, measure, of_difference, outcomes, pooled_interval, wanted
from lab.studies.stress.pair import CardPair, card_pair
from lab.studies.stress.sizes import SCORES, size_trend
from planted import cards as planted_cards
from sampling import few
from score_crash_test import score_records

AT_INIT, BIGRAM = 6.0, 2.4
SEEDS = 3
TINY = ["data=synthetic", "model.width=16", "model.head_width=8", "model.depth=1", "batch_size=2", "seq_len=8"]
TINY += ["steps=4", "hydra/launcher=basic"]
PAGE = (Path(__file__).parents[1] / "docs" / "crash_test.md").read_text(encoding="utf-8")
ON_PAGE = [shlex.split(line, comments=True) for line in re.findall(r"^lab stress.*", PAGE, re.MULTILINE)]
COMMANDS = [words for words in ON_PAGE if not any({*words} < {*more} for more in ON_PAGE)]  # a longer one holds it


def table(losses: Sequence[float], log_rms: float = 1.0) -> pd.DataFrame:
    """Runs of a setting with these losses, a row per seed."""
    sizes = {"parameters": 1000, "active": 1000}
    columns = {"loss_at_init": AT_INIT, "loss_bigram": BIGRAM, **sizes, "log_rms": log_rms, "spikes": 0.0}
    return pd.DataFrame({"loss": losses, **columns}, index=pd.Index(range(len(losses)), name="seed"))


def valley(rise: float, best: float = 0.03, floor: float = 2.2, spread: float = 0.0) -> Callable[[float], list[float]]:
    """Losses of seeds that rise by so much with every decade away from the best learning rate."""
    return lambda lr: [
        min(floor + rise * abs(math.log10(lr / best)) + spread * (seed - 1), AT_INIT) for seed in range(SEEDS)
    ]


def planted(
    loss_at: Callable[[float], list[float]], lrs: Sequence[float] = read_battery().curve
) -> dict[Setting, pd.DataFrame]:
    return {Setting((), lr): table(loss_at(lr)) for lr in lrs}


def card(done: dict[Setting, pd.DataFrame]) -> Card:
    return card_of("planted", "lab stress", Path("runs"), list(read_battery().tests.values())[:2], done, read_battery())


def test_tolerance_is_the_width_of_the_valley_a_tenth_of_a_nat_above_its_bottom() -> None:
    measured = measure(read_battery().tests["lr_tolerance"], planted(valley(rise=0.2)), read_battery())
    assert measured is not None
    # the logarithm of .03 lies between the points of the grid that surround it, which are exact here
    np.testing.assert_allclose(measured.seeds, 2 * 0.1 / 0.2, rtol=0.02)
    assert not measured.is_bound


SIZES = {(): 10_000, ("model=d64",): 100_000, ("model=d128",): 1_000_000}


def at_sizes(best_at: Callable[[float], float], rise: float = 1.0) -> dict[Setting, pd.DataFrame]:
    """Valleys of three sizes, whose best learning rates follow from their parameters, and differ a little by seed."""
    return {
        Setting(words, lr): table(
            [valley(rise, best=best_at(size) * 10 ** (0.04 * seed))(lr)[0] for seed in range(SEEDS)]
        )
        for words, size in SIZES.items()
        for lr in 10 ** np.arange(-5, 1.1, 0.25)
    }


def test_the_size_at_which_a_rate_fails_follows_from_the_trend_over_sizes() -> None:
    # the loss is 0.3 nats up 0.3 decades above a best rate of 0.03 that falls by half a decade per decade of size
    trend = size_trend(at_sizes(lambda size: 0.03 * (size / 1e4) ** -0.5), SIZES, 3e-5)
    assert trend is not None
    assert trend.failing is not None
    assert trend.failing.slope == pytest.approx(-0.5, abs=0.05)
    expected = 1e4 * (10**0.3 * 0.03 / 3e-5) ** 2
    assert trend.fails_from.middle == pytest.approx(expected, rel=0.5)
    assert trend.fails_from.earliest < expected < trend.fails_from.latest
    assert trend.plain()["is_extrapolated"]
    text = " ".join(trend.sentences())
    assert "3e-5 would fail from" in text
    assert "an extrapolation over" in text
    assert "On committed sweeps" in text


def test_a_recipe_that_stands_every_rate_has_no_trend_and_two_sizes_have_none() -> None:
    flat = size_trend(at_sizes(lambda size: 0.03, rise=0.01), SIZES, 3e-4)
    assert flat is not None
    assert flat.failing is None
    assert math.isnan(flat.fails_from.middle)
    assert "No trend of the smallest failing learning rate" in " ".join(flat.sentences())
    assert size_trend(at_sizes(lambda size: 0.03), dict(list(SIZES.items())[:2]), 3e-4) is None


def test_the_shipped_scores_of_trends_are_those_of_the_committed_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("score_crash_test.SCORED", ("logit_growth",))
    found = score_records(Path(__file__).parents[1] / "results")
    shipped = pd.read_csv(SCORES)
    shipped = shipped[shipped["sweep"] == "logit_growth"].reset_index(drop=True)
    pd.testing.assert_frame_equal(found, shipped, rtol=1e-3, check_dtype=False)


def test_only_a_long_card_of_a_recipe_without_a_width_has_sizes() -> None:
    assert [words for (words,) in read_plan([], "lab stress", minutes=30).sizes] == ["model=d64", "model=d128"]
    assert read_plan(["optimizer.lr=3e-4"], "lab stress", minutes=30).lr == 3e-4
    for words, options in (([], {}), (["model.width=48"], {"minutes": 30}), ([], {"minutes": 30, "names": ["depth"]})):
        assert not read_plan(words, "lab stress", **options).sizes  # type: ignore[arg-type]


def test_a_curve_is_extended_at_its_open_end_until_the_loss_has_risen_or_no_further() -> None:
    tests, loss_at = [read_battery().tests["lr_tolerance"]], valley(rise=0.06)
    done: dict[Setting, pd.DataFrame] = {}
    rounds = []
    while settings := wanted(read_battery(), tests, done):
        assert not set(settings) & set(done)
        rounds.append([setting.lr for setting in settings])
        done |= {setting: table(loss_at(setting.lr)) for setting in settings}
    assert rounds[0] == list(read_battery().curve)
    assert rounds[1] == [0.0003, 0.001, 3, 10]
    measured = measure(tests[0], done, read_battery())
    assert measured is not None
    assert not measured.is_bound
    flat = planted(lambda lr: [2.0] * SEEDS, [0.0001, 0.0003, 0.001, *read_battery().curve, 3, 10, 30])
    assert not wanted(read_battery(), tests, flat)
    bound = measure(tests[0], flat, read_battery())
    assert bound is not None
    assert bound.is_bound
    assert bound.seeds.tolist() == pytest.approx([math.log10(30 / 0.0001)] * SEEDS)


def test_ten_times_the_best_is_compared_with_the_best_seed_by_seed() -> None:
    done = planted(valley(rise=0.25, spread=0.4))
    measured = measure(read_battery().tests["lr_x10"], done, read_battery())
    assert measured is not None
    np.testing.assert_allclose(measured.seeds, 0.25)
    assert wanted(read_battery(), [read_battery().tests["lr_x10"]], done) == []
    high = planted(valley(rise=0.25, best=1.0))
    assert wanted(read_battery(), [read_battery().tests["lr_x10"]], high) == [Setting((), 10.0)]
    assert measure(read_battery().tests["lr_x10"], high, read_battery()) is None


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (1.6, 0.2, PASSES),
        (1.6, 0.7, OPEN),  # it may fail
        (1.2, 0.15, WEAK),
        (1.2, 0.25, OPEN),  # wider than the gap
        (0.8, 0.2, FAILS),
        (0.8, 0.7, OPEN),  # it may pass
        (1.6, math.nan, OPEN),
    ],
)
def test_a_verdict_excludes_the_opposite_one(mean: float, half: float, verdict: str) -> None:
    test = read_battery().tests["lr_tolerance"]  # passes over 1.4, fails under 1.0
    interval = pooled_interval([], Spread())._replace(mean=mean, low=mean - half, high=mean + half, n=3)
    assert verdict_of(test, interval) == verdict
    mirrored = read_battery().tests["lr_x10"]  # passes under .15, fails over .35
    share = (mean - test.passes) / (test.fails - test.passes)
    at, width = mirrored.passes + share * (mirrored.fails - mirrored.passes), half / test.gap * mirrored.gap
    interval = interval._replace(mean=at, low=at - width, high=at + width)
    assert verdict_of(mirrored, interval) == verdict


def test_a_lower_bound_can_pass_but_not_fail() -> None:
    test, interval = read_battery().tests["lr_tolerance"], pooled_interval([0.5, 0.51, 0.52], Spread())
    assert verdict_of(test, interval) == FAILS
    assert verdict_of(test, interval, is_bound=True) == OPEN
    assert verdict_of(test, pooled_interval([2.0, 2.01, 2.02], Spread()), is_bound=True) == PASSES


def test_the_pooled_interval_covers_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0)
    covered = []
    for _ in range(2000):
        reference = draws.normal(size=(4, 6))
        spread = Spread(float(np.sqrt(reference.var(axis=1, ddof=1).mean())), 20)
        interval = pooled_interval(list(draws.normal(size=2)), spread)
        covered.append(interval.low <= 0 <= interval.high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_seeds_that_spread_far_more_than_those_of_the_references_count_alone() -> None:
    spread, values = Spread(0.05, 20), [2.0, 3.0, 2.5]
    assert pooled_interval(values, spread).high == pytest.approx(student_t(values).high)
    calm = [2.0, 2.05, 2.1]
    assert pooled_interval(calm, spread).high < student_t(calm).high


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    interval = pooled_interval([-0.004, -0.003, -0.004], Spread())
    line = Line(read_battery().tests["mx"], PASSES, interval, is_bound=False, stuck=0)
    assert line.number.startswith("0.00 ")


def test_the_pooled_interval_without_references_is_students() -> None:
    interval, values = pooled_interval([1.0, 2.0, 4.0], Spread()), student_t([1.0, 2.0, 4.0])
    assert (interval.low, interval.high) == pytest.approx((values.low, values.high))
    assert math.isnan(pooled_interval([1.0], Spread()).low)
    assert pooled_interval([1.0], Spread(0.5, 20)).high == pytest.approx(1 + 2.086 * 0.5, abs=1e-3)


def test_a_card_says_what_fails_and_what_passes() -> None:
    good, bad = card(planted(valley(rise=0.12, spread=0.001))), card(planted(valley(rise=0.8, spread=0.001)))
    assert (
        good.headline()
        == "Fails: none. Weak: none. Open: none. Passes: learning-rate tolerance and ten times the best LR."
    )
    assert [line.verdict for line in bad.lines] == [FAILS, FAILS]
    assert list(bad.table["verdict"]) == [FAILS, FAILS]
    strip = bad.lines[1].strip()
    assert strip[-1] == "3"  # all seeds beyond the end of the strip
    assert strip.count("o") == 0
    tests = json.loads(bad.as_json())["tests"]
    assert [test["verdict"] for test in tests] == [FAILS, FAILS]
    assert tests[1]["seeds"] == pytest.approx([0.8] * SEEDS)


def test_a_card_tells_the_parameters_that_act_on_a_token_from_all() -> None:
    done = planted(valley(rise=0.12))
    mixture = {setting: found.assign(parameters=72_400, active=35_500) for setting, found in done.items()}
    assert "in a model of 72.4k (35.5k active) parameters." in card(mixture).notes()[-1]
    assert "(35.5k active)" in card(mixture).page()
    sizes = json.loads(card(mixture).as_json())
    assert (sizes["parameters"], sizes["active_parameters"]) == (72_400, 35_500)
    assert "in a model of 1k parameters." in card(done).notes()[-1]
    assert "in a model of 72.4k (35.5k active) and 1k parameters." in side_by_side(mixture, done).notes()[-1]


def test_a_recipe_that_never_beats_the_bigram_is_not_judged() -> None:
    poor = card(planted(valley(rise=0.1, floor=3.0)))
    assert {line.verdict for line in poor.lines} == {NOT_JUDGED}
    assert "steps=400" in poor.headline()
    assert "2.400" in poor.headline()
    assert json.loads(poor.as_json())["is_judged"] is False


def test_a_card_of_runs_that_all_diverged_is_a_card() -> None:
    lost = card(planted(lambda lr: [AT_INIT] * SEEDS, [0.0001, 0.0003, 0.001, *read_battery().curve, 3, 10, 30]))
    assert {line.verdict for line in lost.lines} == {NOT_JUDGED}
    assert "Not judged" in lost.page()


def test_the_page_has_a_drawing_and_the_verdicts() -> None:
    page = card(planted(valley(rise=0.8, spread=0.02))).page()
    assert page.count("<figure>") == 1
    assert page.count("<td>fails</td>") == 2
    assert "will spike" in page  # what it does not say


def test_runs_that_failed_or_are_missing_leave_their_setting_out() -> None:
    cards = [("a", "finished", 2.0), ("b", "diverged", math.nan), ("c", "failed", 1.0)]
    runs = store.declared(
        pd.DataFrame(
            {
                "id": name,
                "seed": seed,
                "status": status,
                "final_val_loss": loss,
                "loss_at_init": AT_INIT,
                "loss_bigram": BIGRAM,
                "parameters": 10,
                "model_steps_per_second": 1.0,
            }
            for seed, (name, status, loss) in enumerate(cards)
        )
    )
    metrics = pd.DataFrame(
        [("a", step, "block_rms", f"block{block}", float(step + block)) for step in (0, 9) for block in (2, 10)],
        columns=list(store.METRIC_COLUMNS),
    )
    ids = {Setting((), 0.1): ["a", "b"], Setting((), 1.0): ["a", "c"], Setting((), 3.0): ["a", "d"]}
    done = outcomes(store.Records(runs, metrics), ids)
    assert list(done) == [Setting((), 0.1)]
    assert done[Setting((), 0.1)]["loss"].tolist() == [2.0, AT_INIT]
    assert done[Setting((), 0.1)]["log_rms"].tolist()[:1] == [math.log10(19)]
    assert math.isnan(done[Setting((), 0.1)]["log_rms"][1])


def stressed_by_depth(
    reference: Sequence[float], stressed: Sequence[float], log_rms: float = 1.0
) -> dict[Setting, pd.DataFrame]:
    words = ("model.depth=8",)
    return {Setting(words, 0.003): table(reference), Setting(words, 0.03): table(stressed, log_rms)}


def verdict_of_depth(done: dict[Setting, pd.DataFrame], name: str = "depth") -> str:
    made = card_of("planted", "lab stress", Path("runs"), [read_battery().tests[name]], done, read_battery())
    return made.lines[0].verdict


def test_depth_compares_two_learning_rates_and_one_stuck_seed_fails_it() -> None:
    good, little = [2.5, 2.51, 2.52], [2.4, 2.42, 2.41]
    assert verdict_of_depth(stressed_by_depth(good, little)) == PASSES
    assert verdict_of_depth(stressed_by_depth(good, [3.0, 3.02, 3.01])) == FAILS
    assert verdict_of_depth(stressed_by_depth(good, [2.4, 2.42, 3.3])) == FAILS  # 3.3 is three quarters of the way
    assert verdict_of_depth(stressed_by_depth(good, [2.4, 2.42, AT_INIT])) == FAILS  # as of a run that diverged
    assert verdict_of_depth(stressed_by_depth([3.3, 3.3, 3.3], little)) == PASSES  # only stressed runs count


def test_residual_growth_is_the_logarithm_of_the_last_rms() -> None:
    losses = [2.4, 2.42, 2.41]
    done = stressed_by_depth(losses, losses, log_rms=2.0)
    measured = measure(read_battery().tests["residual_growth"], done, read_battery())
    assert measured is not None
    assert measured.seeds.tolist() == pytest.approx([2.0] * SEEDS)
    done[Setting(("model.depth=8",), 0.03)].loc[1, "log_rms"] = math.nan  # diverged
    lost = measure(read_battery().tests["residual_growth"], done, read_battery())
    assert lost is not None
    assert len(lost.seeds) == SEEDS - 1


def trials(**losses: Sequence[float]) -> list[Cure]:
    """The cures of ten times the best LR by changes with these losses there, where the recipe has 2.2 and .6 more."""
    test, done = (
        read_battery().tests["lr_x10"],
        planted(lambda lr: [2.2, 2.21, 2.19] if lr == 0.03 else [2.8, 2.8, 2.81]),
    )
    tried = [trial_of(test, name, [f"intervention=[{name}]"], 0.03) for name in losses]
    for trial in tried:
        done |= {
            trial.stressed: table(losses[trial.change]),
            Setting(trial.best.words, 0.03): table([2.25, 2.26, 2.24]),
        }
    return judge(test, tried, done, 0.03)


def test_a_cure_is_full_or_part_or_none_or_harms() -> None:
    cures = trials(
        all_of_it=[2.22, 2.23, 2.2],
        half=[2.5, 2.51, 2.5],
        little=[2.74, 2.75, 2.74],  # significant, and less than a fifth of what must be taken off
        nothing=[2.8, 2.81, 2.81],
        worse=[3.2, 3.19, 3.2],
    )
    assert {cure.change: cure.verdict for cure in cures} == {
        "all_of_it": FULL,
        "half": PART,
        "little": NO_EFFECT,
        "nothing": NO_EFFECT,
        "worse": HARMS,
    }
    assert [cure.change for cure in cures] == ["all_of_it", "half", "little", "nothing", "worse"]
    assert cures[2].p < 0.01
    assert cures[1].takes_off.mean == pytest.approx(0.3)
    assert cures[1].left == pytest.approx(0.303, abs=1e-3)
    assert cures[0].cost.mean == pytest.approx(0.05)
    assert cures[0].cost.high - cures[0].cost.mean < 0.01  # all changes cost the same on each seed


def test_fresh_seeds_judge_a_change_apart_from_those_that_chose_it() -> None:
    test, fresh = read_battery().tests["lr_x10"], ("seed=3,4,5",)
    done = planted(lambda lr: [2.2, 2.21, 2.19] if lr == 0.03 else [2.8, 2.8, 2.81])
    tried = trial_of(test, "a", ["intervention=[a]"], 0.03, fresh)
    assert tried.stressed == Setting(("intervention=[a]", "seed=3,4,5"), 0.3)
    done |= {
        tried.stressed: table([2.79, 2.8, 2.81]),
        tried.best: table([2.2, 2.2, 2.2]),
        Setting(fresh, 0.3): table([2.8, 2.79, 2.81]),
        Setting(fresh, 0.03): table([2.2, 2.2, 2.2]),
    }
    (cure,) = judge(test, [tried], done, 0.03, fresh)
    assert (cure.verdict, cure.is_confirmed) == (NO_EFFECT, True)
    assert cure.takes_off.mean == pytest.approx(0.0)
    assert cure.left == pytest.approx(0.6)


def test_the_best_changes_are_confirmed_and_a_pair_acts_on_two_parts() -> None:
    changes = read_battery().changes
    names = ["peri_ln", "reordered_norm", "qk_rmsnorm", "z_loss"]
    losses = {"peri_ln": [2.3] * 3, "reordered_norm": [2.4] * 3, "qk_rmsnorm": [2.5] * 3, "z_loss": [2.9] * 3}
    screened = trials(**losses)
    assert [cure.change for cure in screened] == names
    assert finalists(screened, 2) == names[:2]
    assert finalists(screened, 9) == names[:3]  # what harms is not confirmed
    assert pair_to_try(screened, changes) == (changes["peri_ln"], changes["qk_rmsnorm"])
    assert pair_to_try(trials(peri_ln=[2.3] * 3, reordered_norm=[2.4] * 3), changes) is None


def test_the_p_of_a_cure_is_adjusted_for_all_changes_that_were_tried() -> None:
    noisy = [2.5, 2.9, 2.6]
    alone = trials(half=noisy)[0]
    beside = trials(half=noisy, a=noisy, b=noisy)[0]
    assert beside.p == pytest.approx(min(1, 3 * 2 * stats.t.sf(beside.takes_off.mean / beside.takes_off.error, 6)))
    assert alone.takes_off.mean == pytest.approx(beside.takes_off.mean)
    # with equal groups the pooled spread is that of one group, on three times the degrees of freedom
    assert alone.takes_off.error == pytest.approx(beside.takes_off.error)
    assert beside.takes_off.high < alone.takes_off.high


def test_the_fresh_seeds_find_a_change_as_large_as_the_gap_as_often_as_the_page_says() -> None:
    battery = read_battery()
    seeds, alpha = battery.confirm.fresh, 0.05 / battery.confirm.best
    power = {
        test.name: power_of(seeds, test.gap, of_difference(test.spread).sd, alpha)
        for test in battery.tests.values()
        if test.spread.freedom
    }
    assert power.pop("mx") == pytest.approx(0.31, abs=0.01)
    assert min(power.values()) >= 0.945


def test_cures_are_listed_by_number_or_by_name() -> None:
    battery, test = read_battery(), read_battery().tests["mx"]
    assert [change.name for change in battery.cures_of(test, "2")] == list(test.cures[:2])
    assert [change.name for change in battery.cures_of(test, "z_loss,peri_ln")] == ["peri_ln"]
    assert battery.cures_of(test, "none") == []
    with pytest.raises(RequestError, match="nearest: peri_ln"):
        battery.cures_of(test, "peri_nl")
    assert all(set(test.cures) <= set(battery.changes) for test in battery.tests.values())


def test_tests_that_do_not_fit_into_the_minutes_are_refused() -> None:
    costly = read_battery()._replace(seeds={1: 1000, 5: 6})
    with pytest.raises(RequestError, match="--minutes 5 is enough"):
        costly.chosen(["lr_tolerance"], 1)
    with pytest.raises(RequestError, match=r"spikes and mx would; --minutes 5 is enough"):
        read_battery().chosen(["spikes", "depth", "mx"], 1)
    few, more = read_battery().chosen([], 1), read_battery().chosen([], 30)
    assert [test.name for test in few] == [test.name for test in more][: len(few)]
    assert "spikes" in [test.name for test in more]
    assert "spikes" not in [test.name for test in few]
    assert [test.name for test in read_battery().chosen(["spikes"], 1)] == ["spikes"]  # asked for, and it fits


@pytest.mark.usefixtures("here")
def test_the_command_trains_what_is_missing_and_leaves_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["lab", "stress", *words])
            assert main(["stress", *words]) == 0
        return capsys.readouterr().out

    words = ("intervention=[]", *TINY, "seed=0,1", "--tests", "lr_x10", "out=card")
    out = run(*words)
    assert "Crash test of the default recipe with intervention=[]" in out
    assert "ten times the best LR" in out
    runs = store.read(Path("card")).runs
    assert set(runs["seed"]) == {0, 1}
    assert set(runs["optimizer.lr"]) >= set(read_battery().curve)
    assert Path("card/card.html").exists()
    before = {path: path.stat().st_mtime_ns for path in Path("card/runs").glob("*/run.json")}
    content = json.loads(run(*words, "--json"))
    assert content["tests"][0]["name"] == "lr_x10"
    assert {path: path.stat().st_mtime_ns for path in Path("card/runs").glob("*/run.json")} == before
    assert store.commands(Path("card"))[0].startswith("lab stress ")


@pytest.mark.usefixtures("here")
def test_python_returns_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    made = lab.stress(*TINY, tests=["lr_x10"], out="mine", seed=[0, 1], intervention=[[]])
    assert made.folder == Path("mine")
    assert list(made.table["test"]) == ["ten times the best LR"]
    assert "<svg" in made._repr_html_()
    assert capsys.readouterr().out == ""  # a card belongs to the caller


@pytest.mark.usefixtures("here")
def test_two_recipes_are_put_side_by_side_and_each_keeps_its_own_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("intervention: [rmsnorm]\nmodel: {depth: 2}\nsteps: 5\n")
    words = [word for word in TINY if "depth" not in word and "steps" not in word]
    pair = lab.stress(["llama", "mine.yaml"], *words, "steps=4", tests=["lr_x10"], out="both", seed=[0, 1])
    assert pair.names == ("llama", "mine.yaml")
    assert list(pair.table["test"]) == ["ten times the best LR"]
    assert "<svg" in pair._repr_html_()
    assert {path.name for path in Path("both").iterdir()} == {
        *("llama", "mine.yaml"),
        *("llama-and-mine.yaml.html", "llama-and-mine.yaml.json"),
    }
    runs = store.read(Path("both/mine.yaml")).runs
    assert set(runs["recipe"]) == {"mine"}
    assert set(runs["model.depth"]) == {2}
    assert capsys.readouterr().out == ""
    before = {path: path.stat().st_mtime_ns for path in Path("both").glob("*/runs/*/run.json")}
    assert main(["stress", "llama", "mine.yaml", *words, "steps=4", "--tests=lr_x10", "out=both", "seed=0,1"]) == 0
    assert "llama" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path("both").glob("*/runs/*/run.json")} == before


@pytest.mark.usefixtures("here")
def test_a_recipe_of_a_file_sets_what_the_battery_sets_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr("lab.cli.launch.print_estimate", lambda plan, request: plans.append(plan))
    Path("mine.yaml").write_text("defaults: [override /model: d64]\nsteps: 300\nbatch_size: 8\n")
    assert main(["stress", "mine.yaml", "--dry-run", "--tests", "lr_x10"]) == 0
    config = plans[0].missing[0].config
    assert (config.model.width, config.steps, config.batch_size) == (64, 300, 8)
    assert plans[0].folder == Path("runs/stress/mine.yaml")
    assert main(["stress", "mine.yaml", "steps=20", "--dry-run", "--tests", "lr_x10"]) == 0
    assert plans[1].missing[0].config.steps == 20


@pytest.mark.usefixtures("here")
def test_a_dry_run_estimates_the_runs_of_all_tests_and_trains_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr("lab.cli.launch.print_estimate", lambda plan, request: plans.append(plan))
    assert main(["stress", *TINY, "seed=0", "--dry-run", "--tests", "lr_x10", "out=card"]) == 0
    assert [len(plan.missing) for plan in plans] == [len(read_battery().curve)]
    assert not Path("card").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", few(COMMANDS, 1), ids=" ".join)
def test_the_commands_of_the_page_are_planned(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr("lab.cli.launch.print_estimate", lambda plan, request: plans.append(plan))
    monkeypatch.setattr("sys.argv", words)
    assert main([*words[1:], "--dry-run"]) == 0
    assert plans[0].folder.parent == Path("runs/stress")
    assert {point.config.steps for point in plans[0].missing} >= {200}


def side_by_side(first: dict[Setting, pd.DataFrame], second: dict[Setting, pd.DataFrame]) -> CardPair:
    return card_pair(replace(card(first), recipe="a"), replace(card(second), recipe="b"), "lab stress a b")


def test_two_cards_differ_where_seeds_say_so_and_the_first_line_names_the_tests() -> None:
    # the valleys share their seeds' levels, which spread far more than the recipes differ
    pair = side_by_side(planted(valley(rise=0.12, spread=0.9)), planted(valley(rise=0.6, spread=0.9)))
    first, second = (re.escape(found.number) for found in pair.pairs)
    assert re.fullmatch(
        rf"a stands more: learning-rate tolerance \({first}\) and ten times the best LR \({second}\)\.", pair.headline()
    )
    assert [found.difference.mean for found in pair.pairs] == pytest.approx([4 / 3, -0.48], rel=0.05)
    turned = side_by_side(planted(valley(rise=0.6, spread=0.9)), planted(valley(rise=0.12, spread=0.9)))
    assert turned.headline().startswith("b stands more: ")
    assert [found.p for found in turned.pairs] == pytest.approx([found.p for found in pair.pairs])
    content = json.loads(pair.as_json())
    assert [test["stands_more"] for test in content["tests"]] == ["a", "a"]
    assert [made["recipe"] for made in content["cards"]] == ["a", "b"]
    assert pair.page().count("<figure>") == 1


def test_two_cards_do_not_differ_within_the_spread_of_the_references() -> None:
    pair = side_by_side(planted(valley(rise=0.24)), planted(valley(rise=0.26)))
    assert pair.headline().startswith("No difference found: learning-rate tolerance (")
    assert list(pair.table["stands more"]) == ["", ""]
    sd = read_battery().tests["lr_x10"].spread.sd
    assert pair.pairs[1].difference.high - pair.pairs[1].difference.mean > sd  # 2.0 * sqrt(2) * sd / sqrt(3)


def test_a_tolerance_that_is_a_lower_bound_never_stands_less() -> None:
    flat = planted(lambda lr: [2.0] * SEEDS, [0.0001, 0.0003, 0.001, *read_battery().curve, 3, 10, 30])
    pair = side_by_side(flat, planted(valley(rise=0.6)))
    assert [found.stands_more for found in pair.pairs] == [0, 0]
    turned = side_by_side(planted(lambda lr: [2.0] * SEEDS, [0.01, 0.03, 0.1, 30]), flat)
    bound = turned.pairs[0]._replace(p=0.0, first=turned.pairs[0].first._replace(is_bound=True))
    assert bound.stands_more == -1


def test_a_recipe_that_is_not_judged_is_named_and_its_tests_are_not_compared() -> None:
    pair = side_by_side(planted(valley(rise=0.12, floor=3.0)), planted(valley(rise=0.6)))
    assert "a is no better than a bigram" in pair.headline()
    assert all(math.isnan(found.p) for found in pair.pairs)


def test_only_tests_that_both_recipes_have_are_put_side_by_side() -> None:
    first, second = card(planted(valley(rise=0.12))), card(planted(valley(rise=0.6)))
    pair = card_pair(first, replace(second, lines=second.lines[1:]), "")
    assert [found.first.test.name for found in pair.pairs] == ["lr_x10"]


def test_the_page_has_the_zones_of_every_test() -> None:
    table = PAGE.split("| test | number |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))
    assert list(rows) == list(read_battery().tests)
    for name, test in read_battery().tests.items():
        above, below = ("over", "under") if test.passes > test.fails else ("under", "over")
        assert rows[name].split(" | ")[1:] == [f"{above} {test.passes:.4g}", f"{below} {test.fails:.4g}"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_cures_of_the_tolerance_are_tried_at_ten_times_the_best_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.studies.stress.lines.beats_bigram", lambda done: True)
    monkeypatch.setattr("lab.studies.stress.lines.verdict_of", lambda *args, **named: FAILS)
    monkeypatch.setattr("lab.studies.stress.measures.extension", lambda losses, battery: [])
    made = lab.stress(*TINY, tests=["lr_tolerance"], cures=["rezero", "score_softcap"], out="mine", seed=[0, 1])
    assert [(cure.test.name, cure.change) for cure in made.cures or ()] == [("lr_x10", "score_softcap")]
    assert made.cure_line().startswith("Learning-rate tolerance is ")


@pytest.mark.usefixtures("here")
def test_runs_that_two_settings_share_are_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [Setting((), 0.1), Setting(("precision=fp32",), 0.1)]
    monkeypatch.setattr("lab.cli.stress.wanted", lambda battery, tests, done: [] if done else shared)
    lab.stress(*TINY, tests=["depth"], out="mine", seed=[0, 1])
    assert len(store.read(Path("mine")).runs) == 2


@pytest.mark.usefixtures("here")
def test_a_test_that_a_recipe_cannot_take_is_left_out_and_named() -> None:
    words = [*TINY, "seed=0", "optimizer=sgd"]
    made = lab.stress(*words, tests=["lr_x10", "spikes"], minutes=30, cures=0, out="mine")
    assert [line.test.name for line in made.lines] == ["lr_x10"]
    assert "optimizer.beta1" in made.left_out["spikes on predictable text"]
    assert "Not run: spikes on predictable text" in made.page()
    with pytest.raises(RequestError, match=r"optimizer\.beta1"):
        lab.stress(*words, tests=["spikes"], minutes=30, out="mine")


@pytest.mark.usefixtures("here")
def test_changes_that_can_act_are_tried_on_failed_tests_and_others_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.studies.stress.lines.beats_bigram", lambda done: True)
    monkeypatch.setattr("lab.studies.stress.lines.verdict_of", lambda *args, **named: FAILS)
    cures = ["z_loss", "qk_rmsnorm", "score_softcap"]
    made = lab.stress(*TINY, tests=["lr_x10"], cures=cures, out="mine", seed=[0, 1], intervention=[["z_loss"]])
    verdicts = {cure.change: cure.verdict for cure in made.cures or ()}
    assert set(verdicts) >= set(cures)
    assert verdicts["z_loss"] == NOT_TRIED
    runs = store.read(Path("mine")).runs
    fresh = runs[~runs["seed"].isin([0, 1])]
    assert sorted(set(fresh["seed"])) == list(range(2, 2 + read_battery().confirm.fresh))
    confirmed = [cure for cure in made.cures or () if cure.is_confirmed]
    assert {cure.takes_off.n for cure in confirmed} == {read_battery().confirm.fresh}
    assert {cure.takes_off.n for cure in made.cures or () if not (cure.is_confirmed or cure.reason)} <= {2}
    assert NOT_TRIED not in (verdicts["qk_rmsnorm"], verdicts["score_softcap"])
    runs = store.read(Path("mine")).runs
    assert set(runs["intervention"]) == {"z_loss", "qk_rmsnorm+z_loss", "score_softcap+z_loss"}
    assert runs["seed"].isin([0, 1]).sum() == 2 * (len(read_battery().curve) + 2 * 2)
    assert "Not tried: z_loss, since the recipe has it already." in made.page()


def test_tests_of_experts_are_for_recipes_with_experts() -> None:
    dense, mixture = (read_plan([*words, "model.depth=1"], "", minutes=5) for words in ([], ["recipe=mixtral_moe"]))
    of_experts = {"experts", "router_logits"}
    assert {test.name for test in _without_impossible_tests(dense).tests}.isdisjoint(of_experts)
    assert not _without_impossible_tests(dense).left_out
    assert {test.name for test in _without_impossible_tests(mixture).tests} >= of_experts
    named = read_plan([], "", names=["experts", "lr_x10"], minutes=5)
    assert _without_impossible_tests(named).left_out == {"uneven experts": "the default recipe has no experts"}
    with pytest.raises(RequestError, match="has no experts"):
        _without_impossible_tests(read_plan([], "", names=["experts"], minutes=5))


def test_loads_of_experts_are_those_at_the_end() -> None:
    runs = pd.DataFrame(planted_cards(seeds=(0,), lrs=(0.1,), widths=(32,), arms=("experts",)))
    run = runs["id"].iloc[0]
    rows = [(run, step, "expert_load_cv", f"block{n}", step / 399 + n) for n in (0, 1) for step in (0, 399)]
    rows += [(run, step, "router_logit_max", "block0", logit) for step, logit in ((0, 3.0), (200, 100.0), (399, 50.0))]
    metrics = pd.DataFrame(rows, columns=list(store.METRIC_COLUMNS)).astype(store.METRIC_COLUMNS)
    table = by_run(store.Records(store.declared(runs), metrics, None))
    assert table["load_cv"].item() == 1.5
    assert table["router_logit"].item() == pytest.approx(2)


def test_parameters_that_act_on_a_token_are_those_of_the_experts_that_it_passes() -> None:
    of_experts = {"intervention.experts.number": 8, "intervention.experts.top_k": 2, "intervention.experts.hidden": 1}
    runs = pd.DataFrame(planted_cards(seeds=(0,), lrs=(0.1,), widths=(32,), arms=("experts",), **of_experts))
    metrics = pd.DataFrame([], columns=list(store.METRIC_COLUMNS)).astype(store.METRIC_COLUMNS)
    table = by_run(store.Records(store.declared(runs), metrics, None))
    assert (table["parameters"] - table["active"]).item() == 2 * 6 * 2 * 32 * 32  # blocks, idle experts, matrices


def test_a_change_that_costs_much_at_the_best_rate_is_neither_confirmed_nor_advised() -> None:
    test = read_battery().tests["lr_x10"]
    done = planted(lambda lr: [2.2, 2.21, 2.19] if lr == 0.03 else [2.8, 2.8, 2.81])
    at_best = {"cheap": 2.23, "dear": 2.27, "dead": 2.9}
    tried = [trial_of(test, name, [f"intervention=[{name}]"], 0.03) for name in at_best]
    for trial in tried:
        done |= {trial.stressed: table([2.22, 2.23, 2.2]), trial.best: table([at_best[trial.change]] * 3)}
    cures = {cure.change: cure for cure in judge(test, tried, done, 0.03)}
    assert {name: cure.is_advised for name, cure in cures.items()} == {"cheap": True, "dear": False, "dead": False}
    assert finalists(list(cures.values()), 3) == ["cheap"]


def test_a_cure_says_what_it_costs_in_loss_time_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cures_room, "read_step_times", lambda: {"sigma_reparam": StepTime(2.1, 2.0, 2.2)})
    test = read_battery().tests["lr_x10"]
    done = planted(lambda lr: [2.2, 2.21, 2.19] if lr == 0.03 else [2.8, 2.8, 2.81])
    tried = [
        trial_of(test, name, [f"intervention=[{name}]"], 0.03) for name in ("sigma_reparam", "sigma_reparam+z_loss")
    ]
    for trial in tried:
        done |= {trial.stressed: table([2.22, 2.23, 2.2]), trial.best: table([2.21, 2.22, 2.2])}
    single, pair = judge(test, tried, done, 0.03)
    assert single.costs == "+0.010 ± 0.000 nats at the best LR, 2.10 times the time of a step, +0 parameters"
    assert pair.costs == "+0.010 ± 0.000 nats at the best LR, +0 parameters"
    shown = replace(card_of("glm130b", "", Path(), [test], done, read_battery()), cures=[single])
    assert f"sigma_reparam ({single.effect}; costs {single.costs})" in shown.cure_line()
    assert json.loads(shown.as_json())["cures"][0]["step_time"] == {"ratio": 2.1, "low": 2.0, "high": 2.2}


def test_a_change_in_another_unit_takes_another_learning_rate() -> None:
    for name, lr in (("lr_x10", 0.3), ("depth", 0.03)):
        trial = trial_of(read_battery().tests[name], "lion", ["optimizer=lion"], 0.03, times=0.35)
        assert trial.stressed.lr == pytest.approx(lr * 0.35)
        assert trial.best is not None
        assert trial.best.lr == pytest.approx(0.03 * 0.35)


def test_all_arms_of_the_board_are_tried_after_those_of_a_test() -> None:
    battery, arms = read_battery(), board_changes()
    for test in battery.tests.values():
        names = [change.name for change in battery.cures_of(test, "all", arms)]
        assert names[: len(test.cures)] == list(test.cures)
        assert {*names} == {*test.cures, *arms}
    assert {"muon", "tighter_clip", "dyt"} < {*arms}


def test_an_optimizer_keeps_the_decay_and_the_clip_of_a_recipe() -> None:
    coupled = {"chain": ["clip", "adam", "decay", "peak", "schedule"], "weight_decay": 0.1, "clip": 0.5}
    kept = ["optimizer.weight_decay=0.1", "optimizer.clip=0.5"]
    assert _kept("lion", coupled) == [*kept, "optimizer.chain=[clip,lion,decay,peak,schedule]"]
    independent = {**coupled, "chain": ["clip", "adam", "peak", "decay", "schedule"]}
    assert _kept("lion", independent) == kept
    assert _kept("adamh", coupled) == ["optimizer.clip=0.5"]  # it has no decay


@pytest.mark.usefixtures("here")
def test_a_budget_leaves_out_what_it_has_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.studies.stress.lines.beats_bigram", lambda done: True)
    monkeypatch.setattr("lab.studies.stress.lines.verdict_of", lambda *args, **named: FAILS)
    words = [*TINY, "seed=0,1", "out=mine"]
    plan = read_plan(words, "lab stress", names=["lr_x10"], arms=["peri_ln", "qk_rmsnorm"], budget=1e-3)
    made = make_card(plan)
    assert {cure.change: cure.reason for cure in made.cures or ()} == dict.fromkeys(
        ["peri_ln", "qk_rmsnorm"], "the budget leaves no time for it"
    )
