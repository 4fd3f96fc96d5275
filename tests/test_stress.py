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
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from scipy import stats

import lab
from lab import analysis, main
from lab.analysis.runaway import COSTLY, HALF
from lab.analysis.statistics import Interval, Spread, power_of, student_t
from lab.analysis.stress import cures as cures_room
from lab.analysis.stress.arms import arm_cards, board_changes
from lab.analysis.stress.battery import FAILS, NOT_JUDGED, OPEN, PASSES, WEAK, StepTime, read_battery
from lab.analysis.stress.cures import (
    CURES,
    HARMS,
    IN_PART,
    NO,
    NOT_TRIED,
    SCREENED,
    Cure,
    as_screened,
    finalists,
    judge_cures,
    not_tried,
    pair_to_try,
    trial_of,
)
from lab.analysis.stress.lines import Line, along, strips, verdict_of
from lab.analysis.stress.measures import (
    best_lr,
    by_run,
    curve,
    extension,
    fitted_best_lrs,
    measure,
    of_difference,
    outcomes,
    pooled_difference,
    pooled_interval,
    spike_rate,
    tolerances,
    wanted,
)
from lab.analysis.stress.rates import finer_settings
from lab.core import machine
from lab.core.errors import RequestError
from lab.features.stress import search
from lab.features.stress.card import Card, card_figure, card_of, read_card
from lab.features.stress.card_bench import CardBench
from lab.features.stress.command import print_card
from lab.features.stress.pair import CardPair, card_pair
from lab.features.stress.plan import read_plan, read_plans
from lab.features.stress.progress import Progress, coloured
from lab.features.stress.reference import beside_published
from lab.features.stress.search import change_words, kept_words
from lab.features.stress.sizes import SCORES, settings_of_sizes, size_trend
from lab.features.stress.training import Stopped, make_card, make_pair, pair_file, possible_plan
from lab.records import store
from lab.records.plans import FleetProgress, Setting
from lab.report.answer import Answer
from lab.sweeping import own_code
from lab.sweeping.bench import Bench, compose_settings
from lab.sweeping.launch import Composed
from lab.sweeping.request import options_and_overrides
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
    test = read_battery().tests["lr_x10"]
    done = planted(valley(rise=0.25, spread=0.4))
    measured = measure(test, done, read_battery())
    assert measured is not None
    np.testing.assert_allclose(measured.seeds, 0.25, rtol=0.02)  # 0.03 lies 2 % off the middle of its neighbours
    assert wanted(read_battery(), [test], done) == []
    high = planted(valley(rise=0.25, best=1.0))
    assert wanted(read_battery(), [test], high) == [Setting((), lr) for lr in (3.0, 10.0)]
    assert measure(test, high, read_battery()) is None


def test_ten_times_the_best_looks_between_the_rates_that_were_trained() -> None:
    """Each seed has a parabola of its own, so that a best rate between two trained ones is no matter of luck."""
    bests = (0.02, 0.03, 0.04)

    def parabola(lr: float) -> list[float]:
        return [2.0 + 0.3 * math.log10(lr / best) ** 2 for best in bests]

    test = read_battery().tests["lr_x10"]
    lrs = [10 ** (place / 64) for place in range(-192, 129)]  # so fine that the interpolation is exact
    fine = measure(test, planted(parabola, lrs), read_battery())
    assert fine is not None
    np.testing.assert_allclose(fine.seeds, 0.3, atol=1e-3)
    assert best_lr(curve(planted(parabola))) == 0.03
    np.testing.assert_allclose(fitted_best_lrs(curve(planted(parabola))), bests)
    coarse = measure(test, planted(parabola), read_battery())
    assert coarse is not None
    np.testing.assert_allclose(coarse.seeds, 0.3, atol=0.025)


def test_ten_times_the_best_reaches_below_the_best_and_beyond_the_farthest_rate() -> None:
    test, lrs = read_battery().tests["lr_x10"], [*read_battery().curve, 3, 10, 30]
    low = planted(valley(rise=0.25, best=0.001))
    assert wanted(read_battery(), [test], low) == [Setting((), lr) for lr in (0.0003, 0.001)]
    high = planted(valley(rise=0.25, best=10.0), lrs)
    assert wanted(read_battery(), [test], high) == [Setting((), lr) for lr in (90.0, 300.0)]
    measured = measure(test, planted(valley(rise=0.25, best=10.0), [*lrs, 90, 300]), read_battery())
    assert measured is not None
    np.testing.assert_allclose(measured.seeds, 0.25, rtol=0.02)


def test_mxfp8_has_the_seeds_that_its_gap_needs_on_cards_of_five_minutes(
    plant: Callable[[Losses], None],
) -> None:
    plant(lambda setting: [2.2 + 0.2 * abs(math.log10(setting.lr / 0.03)) + 0.001 * n for n in range(24)])
    seeds = {}
    for minutes in (1, 5):
        made = make_card(read_plan(TINY, "lab stress", minutes=minutes, cures="none"))
        seeds[minutes] = {line.test.name: line.seeds for line in made.lines}
    assert seeds[1]["mx"] == seeds[5]["lr_x10"] == seeds[5]["lr_tolerance"] == (0, 1, 2)
    assert seeds[5]["mx"] == tuple(range(read_battery().tests["mx"].seeds))


def test_ten_times_the_best_counts_seeds_that_diverge_beside_it() -> None:
    diverging = planted(lambda lr: [AT_INIT if lr >= 0.3 else 2.0 + abs(math.log10(lr / 0.03)), *valley(0.2)(lr)[1:]])
    measured = measure(read_battery().tests["lr_x10"], diverging, read_battery())
    assert measured is not None
    assert (measured.capped, measured.stuck) == (1, 1)


def test_seeds_that_only_some_rates_have_are_no_part_of_the_curve() -> None:
    done = planted(valley(rise=0.25))
    more = pd.concat([done[Setting((), 0.3)], table([5.0] * 4).set_axis(range(10, 14))])
    assert curve(done | {Setting((), 0.3): more}).equals(curve(done))


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (1.6, 0.15, PASSES),
        (1.6, 0.25, OPEN),  # it may be weak
        (1.6, 0.7, OPEN),  # it may fail
        (1.2, 0.15, WEAK),
        (1.2, 0.25, OPEN),  # wider than the gap
        (0.8, 0.15, FAILS),
        (0.8, 0.25, OPEN),  # it may be weak
        (0.8, 0.7, OPEN),  # it may pass
        (1.6, math.nan, OPEN),
    ],
)
def test_a_verdict_is_the_zone_of_the_whole_interval(mean: float, half: float, verdict: str) -> None:
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
        == "Fails: none. Weak: none. Open: ten times the best LR (passes or weak). Passes: learning-rate tolerance."
    )
    assert [line.verdict for line in bad.lines] == [FAILS, FAILS]
    assert list(bad.table["verdict"]) == [FAILS, FAILS]
    strip = bad.lines[1].strip()
    assert strip[-1] == "3"  # all seeds beyond the end of the strip
    assert strip.count("o") == 0
    tests = json.loads(bad.answer.json())["tests"]
    assert [test["verdict"] for test in tests] == [FAILS, FAILS]
    assert tests[1]["seeds"] == pytest.approx([0.8] * SEEDS, rel=0.02)


def test_a_card_tells_the_parameters_that_act_on_a_token_from_all() -> None:
    done = planted(valley(rise=0.12))
    mixture = {setting: found.assign(parameters=72_400, active=35_500) for setting, found in done.items()}
    assert "in a model of 72.4k (35.5k active) parameters." in card(mixture).notes()[-1]
    assert "(35.5k active)" in card(mixture).answer.html()
    sizes = json.loads(card(mixture).answer.json())
    assert (sizes["parameters"], sizes["active_parameters"]) == (72_400, 35_500)
    assert "in a model of 1k parameters." in card(done).notes()[-1]
    assert "in a model of 72.4k (35.5k active) and 1k parameters." in side_by_side(mixture, done).notes()[-1]


def test_a_recipe_that_never_beats_the_bigram_is_not_judged() -> None:
    poor = card(planted(valley(rise=0.1, floor=3.0)))
    assert {line.verdict for line in poor.lines} == {NOT_JUDGED}
    assert "steps=400" in poor.headline()
    assert "2.400" in poor.headline()
    assert json.loads(poor.answer.json())["is_judged"] is False


def test_a_card_of_runs_that_all_diverged_is_a_card() -> None:
    lost = card(planted(lambda lr: [AT_INIT] * SEEDS, [0.0001, 0.0003, 0.001, *read_battery().curve, 3, 10, 30]))
    assert {line.verdict for line in lost.lines} == {NOT_JUDGED}
    assert "Not judged" in lost.answer.html()


def test_the_page_has_a_drawing_and_the_verdicts() -> None:
    page = card(planted(valley(rise=0.8, spread=0.02))).answer.html()
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
    good, little = [2.3, 2.31, 2.32], [2.2, 2.22, 2.21]
    assert verdict_of_depth(stressed_by_depth(good, little)) == PASSES
    assert verdict_of_depth(stressed_by_depth(good, [2.8, 2.82, 2.81])) == FAILS
    assert verdict_of_depth(stressed_by_depth(good, [2.2, 2.22, 3.3])) == FAILS  # 3.3 is three quarters of the way
    assert verdict_of_depth(stressed_by_depth(good, [2.2, 2.22, AT_INIT])) == FAILS  # as of a run that diverged


def test_a_recipe_that_is_slow_without_the_stress_does_not_pass_but_may_fail() -> None:
    slow, little = [2.6, 2.61, 2.62], [2.2, 2.22, 2.21]  # a bigram model has 2.4
    assert verdict_of_depth(stressed_by_depth(slow, little)) == NOT_JUDGED
    assert verdict_of_depth(stressed_by_depth([BIGRAM] * 3, [BIGRAM] * 3)) == NOT_JUDGED  # no better is not better
    assert verdict_of_depth(stressed_by_depth([3.3] * 3, little)) == NOT_JUDGED  # stuck, and no stressed run is
    assert verdict_of_depth(stressed_by_depth(slow, [3.1, 3.12, 3.11])) == FAILS
    assert verdict_of_depth(stressed_by_depth(slow, [2.8, 2.81, 2.82])) == WEAK  # it stands no more than that
    done = planted(valley(rise=0.05)) | stressed_by_depth(slow, little)
    tests = [read_battery().tests[name] for name in ("lr_x10", "depth")]
    made = card_of("planted", "lab stress", Path("runs"), tests, done, read_battery())
    assert made.headline() == "Fails: none. Weak: none. Open: none. Passes: ten times the best LR. Not judged: depth 8."
    assert made.is_judged
    (note,) = [note for note in made.notes() if note.startswith("Depth 8: the runs that it is compared with")]
    assert "2.610, no better than a bigram model (2.400)" in note
    (reason,) = [test["reason"] for test in json.loads(made.answer.json())["tests"] if test["verdict"] == NOT_JUDGED]
    assert reason in note


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


def trials(at_ease: float = 2.25, **losses: Sequence[float]) -> list[Cure]:
    """The cures of ten times the best LR by changes with these losses there and at ease; the recipe has 2.8 and 2.2."""
    test, done = (
        read_battery().tests["lr_x10"],
        planted(lambda lr: [2.2, 2.21, 2.19] if lr == 0.03 else [2.8, 2.8, 2.81]),
    )
    tried = [trial_of(test, name, [f"intervention=[{name}]"], 0.03) for name in losses]
    for trial in tried:
        done |= {
            trial.stressed: table(losses[trial.change]),
            Setting(trial.best.words, 0.03): table([at_ease, at_ease + 0.01, at_ease - 0.01]),
        }
    return judge_cures(test, tried, done, 0.03)


def test_a_change_is_judged_by_the_share_of_the_damage_that_it_takes_off() -> None:
    cures = trials(
        all_of_it=[2.27, 2.28, 2.25],
        half=[2.55, 2.56, 2.55],
        little=[2.79, 2.8, 2.79],  # significant, and less than a fifth
        nothing=[2.85, 2.86, 2.86],
        worse=[3.2, 3.19, 3.2],
    )
    assert {cure.change: cure.verdict for cure in cures} == {
        **{"all_of_it": CURES, "half": IN_PART, "little": NO, "nothing": NO, "worse": HARMS}
    }
    assert [cure.change for cure in cures] == ["all_of_it", "half", "little", "nothing", "worse"]
    assert trials(unsure=[2.6, 2.62, 2.9])[0].verdict == OPEN
    assert cures[1].improvement.mean == pytest.approx(0.3)
    assert cures[1].left == pytest.approx(0.303, abs=1e-3)
    assert (cures[1].damage, cures[1].share) == (pytest.approx(0.603, abs=1e-3), "50 %")
    assert cures[0].cost.mean == pytest.approx(0.05)
    assert cures[0].cost.high - cures[0].cost.mean < 0.01  # all changes cost the same on each seed


def test_a_change_that_trains_better_everywhere_takes_no_damage_away() -> None:
    (better,) = trials(at_ease=1.9, better=[2.5, 2.51, 2.52])
    assert (better.verdict, better.cost.mean) == (NO, pytest.approx(-0.3))
    assert better.improvement.mean == pytest.approx(0.0, abs=0.01)


def test_where_a_test_does_not_look_at_ease_damage_is_what_exceeds_a_pass() -> None:
    test = read_battery().tests["residual_growth"]
    own = Setting(("model.depth=8",), 0.03)
    tried = trial_of(test, "a", ["intervention=[a]"], math.nan)
    done = {own: table([2.4] * 3, log_rms=2.2), tried.stressed: table([2.4] * 3, log_rms=1.3)}
    done[own]["log_rms"] += [0.0, 0.01, 0.02]
    (cure,) = judge_cures(test, [tried], done, math.nan)
    assert (tried.at_ease, cure.verdict) == (None, CURES)
    assert (cure.damage, cure.left) == (pytest.approx(1.01), pytest.approx(0.1))


def test_without_damage_every_change_is_open_and_a_stuck_seed_is_no_cure() -> None:
    test = read_battery().tests["depth"]
    tried = trial_of(test, "a", ["intervention=[a]"], math.nan)
    assert tried.at_ease
    done = stressed_by_depth([2.3] * 3, [3.5, 3.51, 3.5])
    for at_ease, stressed, verdict in ((2.3, 2.31, CURES), (3.2, 3.31, IN_PART)):  # 3.3 is three quarters of the way
        of_change = {tried.at_ease: table([at_ease] * 3), tried.stressed: table([stressed] * 3)}
        (cure,) = judge_cures(test, [tried], done | of_change, math.nan)
        assert (cure.verdict, cure.stuck) == (verdict, 0 if verdict == CURES else 3)
    calm = stressed_by_depth([2.3] * 3, [2.2, 2.4, 2.31]) | {tried.at_ease: table([2.3] * 3)}  # damage of nothing
    (cure,) = judge_cures(test, [tried], calm | {tried.stressed: table([2.0, 2.2, 2.11])}, math.nan)
    assert (cure.verdict, cure.p < 0.05) == (OPEN, True)


def test_a_change_that_does_not_train_at_ease_has_nothing_to_lose() -> None:
    at_init = float(table([2.0])["loss_at_init"].iloc[0])
    (cure,) = trials(at_ease=at_init + 0.02, dead=[at_init - 0.01] * 3)
    assert (cure.verdict, cure.improvement.mean > cure.damage) == (OPEN, True)
    (alive,) = trials(at_ease=2.3, alive=[2.35] * 3)
    assert alive.verdict == CURES


def test_a_change_that_ends_above_the_recipe_under_the_stress_cures_nothing() -> None:
    planted_runs = [(2.75, 2.85, OPEN), (2.75, 2.79, CURES), (2.55, 2.81, OPEN), (2.55, 2.79, IN_PART)]
    for at_ease, stressed, verdict in planted_runs:
        (cure,) = trials(at_ease=at_ease, a=[stressed + 0.01, stressed, stressed + 0.01])
        assert (cure.verdict, cure.p < 0.05, cure.improvement.low > 0) == (verdict, True, True)
    test = read_battery().tests["residual_growth"]  # whose measure is no loss, so that a little may be lost
    tried = trial_of(test, "a", ["intervention=[a]"], math.nan)
    own = table([2.4] * 3, log_rms=2.2)
    own["log_rms"] += [0.0, 0.01, 0.02]
    for loss, verdict in ((2.44, CURES), (2.46, OPEN)):
        done = {Setting(("model.depth=8",), 0.03): own, tried.stressed: table([loss] * 3, log_rms=1.3)}
        (cure,) = judge_cures(test, [tried], done, math.nan)
        assert cure.verdict == verdict


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
    (cure,) = judge_cures(test, [tried], done, 0.03, fresh)
    assert (cure.verdict, cure.is_confirmed) == (NO, True)
    assert cure.improvement.mean == pytest.approx(0.0)
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
    assert alone.p == pytest.approx(2 * stats.t.sf(alone.improvement.mean / alone.improvement.error, 2))
    # three equal groups of two degrees of freedom each are a prior of six, beside the two of the change itself
    assert beside.p == pytest.approx(min(1, 3 * 2 * stats.t.sf(beside.improvement.mean / beside.improvement.error, 8)))
    assert alone.improvement.mean == pytest.approx(beside.improvement.mean)


def test_the_spread_of_a_cure_is_moved_towards_that_of_the_others() -> None:
    noisy, calm = [2.5, 2.9, 2.6], [2.5, 2.53, 2.49]
    alone, others = trials(noisy=noisy)[0], {"a": calm, "b": calm, "c": [2.5, 2.48, 2.53]}
    beside = {cure.change: cure.improvement.error for cure in trials(noisy=noisy, **others)}
    assert beside["a"] < beside["noisy"] < alone.improvement.error


def test_the_fresh_seeds_find_a_change_as_large_as_the_gap_as_often_as_the_page_says() -> None:
    battery = read_battery()
    alpha = 0.05 / battery.confirm.best
    power = {
        test.name: power_of(max(battery.confirm.fresh, test.seeds), test.gap, of_difference(test.spread).sd, alpha)
        for test in battery.tests.values()
        if test.spread.freedom
    }
    assert min(power.values()) >= 0.945


def test_the_seeds_of_mxfp8_call_a_number_in_the_middle_weak_as_often_as_the_page_says() -> None:
    mx, random = read_battery().tests["mx"], np.random.default_rng(0)
    middle = (mx.passes + mx.fails) / 2
    for seeds, probability in ((6, 0.0), (mx.seeds, 0.86)):
        draws = random.normal(middle, mx.spread.sd, (2000, seeds))
        weak = [verdict_of(mx, mx.spread.interval(values)) == WEAK for values in draws]
        assert np.mean(weak) == pytest.approx(probability, abs=0.03)


def test_cures_are_listed_by_number_or_by_name() -> None:
    battery, test = read_battery(), read_battery().tests["mx"]
    assert [change.name for change in battery.cures_of(test, "2")] == list(test.cures[:2])
    assert [change.name for change in battery.cures_of(test, "z_loss,peri_ln,z_loss")] == ["z_loss", "peri_ln"]
    arms = board_changes()
    assert battery.cures_of(test, "muon,fp32", arms) == [arms["muon"], battery.changes["fp32"]]  # arms have names, too
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


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ([], []),
        (["steps=2"], ["steps=2"]),
        (["--optimizer", "own.py:make=1", "seed=0,1"], ["seed=0,1"]),
        (["olmo2", "--json", "~schedule"], ["~schedule"]),
    ],
)
def test_words_are_told_from_the_values_of_options(arguments: list[str], overrides: list[str]) -> None:
    assert options_and_overrides("stress", arguments)[1] == overrides


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
    monkeypatch.setattr("lab.sweeping.launch.print_estimate", lambda plan, request: plans.append(plan))
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
    monkeypatch.setattr("lab.sweeping.launch.print_estimate", lambda plan, request: plans.append(plan))
    assert main(["stress", *TINY, "seed=0", "--dry-run", "--tests", "lr_x10", "out=card"]) == 0
    assert [len(plan.missing) for plan in plans] == [len(read_battery().curve) + 3]  # half a decade is halved thrice
    assert not Path("card").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", few(COMMANDS, 1), ids=" ".join)
def test_the_commands_of_the_page_are_planned(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr("lab.sweeping.launch.print_estimate", lambda plan, request: plans.append(plan))
    monkeypatch.setattr("sys.argv", words)
    assert main([*words[1:], "--dry-run"]) == 0
    assert plans[0].folder.parent == Path("runs/stress")
    assert {point.config.steps for point in plans[0].missing} >= {200}


def said(card: Card | CardPair) -> str:
    """Its text, without the ends of lines."""
    return " ".join(card.answer.text().split())


def side_by_side(first: dict[Setting, pd.DataFrame], second: dict[Setting, pd.DataFrame]) -> CardPair:
    return card_pair(replace(card(first), recipe="a"), replace(card(second), recipe="b"), "lab stress a b")


def test_two_cards_differ_where_seeds_say_so_and_the_first_line_names_the_tests() -> None:
    # the valleys share their seeds' levels, which spread far more than the recipes differ
    pair = side_by_side(planted(valley(rise=0.12, spread=0.9)), planted(valley(rise=0.6, spread=0.9)))
    first, second = (re.escape(found.number) for found in pair.pairs)
    assert re.fullmatch(
        rf"a tolerates more: learning-rate tolerance \({first}\) and ten times the best LR \({second}\)\.",
        pair.headline(),
    )
    assert [found.difference.mean for found in pair.pairs] == pytest.approx([4 / 3, -0.48], rel=0.05)
    turned = side_by_side(planted(valley(rise=0.6, spread=0.9)), planted(valley(rise=0.12, spread=0.9)))
    assert turned.headline().startswith("b tolerates more: ")
    assert [found.p for found in turned.pairs] == pytest.approx([found.p for found in pair.pairs])
    content = json.loads(pair.answer.json())
    assert [test["tolerates_more"] for test in content["tests"]] == ["a", "a"]
    assert [made["recipe"] for made in content["cards"]] == ["a", "b"]
    assert pair.answer.html().count("<figure>") == 1


def test_the_p_of_two_tests_is_adjusted_for_both() -> None:
    first, second = card(planted(valley(rise=0.2))), card(planted(valley(rise=0.3)))
    alone = [
        card_pair(replace(first, lines=[line]), second, "").pairs[0].p for line in first.lines
    ]  # each as if it were the only test
    small, large = sorted(alone)
    assert 0 < small < large < 0.5
    both = sorted(pair.p for pair in card_pair(first, second, "").pairs)
    assert both == pytest.approx([2 * small, max(2 * small, large)])


def test_two_cards_do_not_differ_within_the_spread_of_the_references() -> None:
    pair = side_by_side(planted(valley(rise=0.24)), planted(valley(rise=0.26)))
    assert pair.headline().startswith("No difference found: learning-rate tolerance (")
    assert list(pair.table["tolerates more"]) == ["", ""]
    sd = read_battery().tests["lr_x10"].spread.sd
    assert pair.pairs[1].difference.high - pair.pairs[1].difference.mean > sd  # 2.0 * sqrt(2) * sd / sqrt(3)


def test_two_cards_say_from_which_rates_they_fail() -> None:
    """A valley of 0.6 nats a decade has risen by 0.3 half a decade above its best rate, one of 0.3 a decade above."""
    first, second = planted(valley(rise=0.6, spread=0.9)), planted(valley(rise=0.3, spread=0.9))
    pair = side_by_side(first, second)
    line = pair.failing_line()
    assert line.startswith(
        "a ends 0.3 nats above its best loss from a learning rate of 0.095 on, and b from a learning"
    )
    assert "a difference of -0.50 " in line
    assert "may be none" not in line  # the seeds do not differ
    assert line in pair.answer.html()
    assert line in said(pair)
    assert pair.cards[0].failing_lrs == pytest.approx(dict.fromkeys(range(SEEDS), 0.03 * 10**0.5), rel=0.01)
    some = {0.3: [2.1, 2.2, 2.6], 1.0: [2.9, 2.9, 2.9]}
    unsure = side_by_side(planted(lambda lr: some.get(lr, [2.0] * SEEDS)), planted(valley(rise=0.4)))
    assert "which may be none" in unsure.failing_line()
    flat = planted(lambda lr: [2.0] * SEEDS, [0.0001, 0.0003, 0.001, *read_battery().curve, 3, 10, 30])
    assert (
        side_by_side(flat, second).failing_line().startswith("a ends 0.3 nats above its best loss at no learning rate")
    )
    partly = planted(lambda lr: [2.0 + 0.6 * max(math.log10(lr / 0.03), 0), 2.0, 2.0])
    assert "on (in 1 of 3 seeds), and b" in side_by_side(partly, second).failing_line()
    assert side_by_side(planted(valley(rise=0.6, floor=3.0)), second).failing_line() == ""  # it is not judged


UNIGRAM = 3.2


def cliff(at: float, logit_knee: float = math.nan) -> Callable[[float], pd.DataFrame]:
    """Runs that end at 2.2 up to a rate, 0.1 decades higher a seed, and at the loss of a unigram model beyond."""

    def of_lr(lr: float) -> pd.DataFrame:
        stands = [lr < at * 10 ** (0.1 * seed) for seed in range(SEEDS)]
        ends = [2.2 + 0.01 * abs(math.log10(lr / 0.03)) if stand else UNIGRAM for stand in stands]
        made = table(ends).assign(loss_unigram=UNIGRAM)
        return made if math.isnan(logit_knee) else made.assign(**{LOGIT: 200 * lr / logit_knee})

    return of_lr


LOGIT = "largest.attention_logit_max"


def ladder(runs: Callable[[float], pd.DataFrame]) -> dict[Setting, pd.DataFrame]:
    return {Setting((), lr): runs(lr) for lr in read_battery().curve}


def fine_card(
    runs: Callable[[float], pd.DataFrame], between: dict[Setting, pd.DataFrame], folder: Path = Path("runs")
) -> Card:
    tests = list(read_battery().tests.values())[:2]
    return card_of("planted", "lab stress", folder, tests, ladder(runs), read_battery(), between)


def test_the_rate_at_which_a_recipe_fails_is_found_to_a_twentieth_of_a_decade_and_tests_do_not_read_it() -> None:
    runs, between, rounds = cliff(at=0.13), dict[Setting, pd.DataFrame](), []
    wide = fine_card(runs, {})
    while settings := finer_settings(ladder(runs), between, 0.1):
        rounds.append(len(settings))
        between |= {setting: runs(setting.lr) for setting in settings}
    made = fine_card(runs, between)
    half, coarse = made.passings[HALF], wide.passings[HALF]
    for seed, found in half.seeds.items():
        assert found.log_at == pytest.approx(math.log10(0.13) + 0.1 * seed, abs=0.05)
    assert half.width <= 0.1 < coarse.width
    assert half.headroom.mean == pytest.approx(math.log10(0.13 / 0.03) + 0.1, abs=0.06)
    assert half.rate.low < half.rate.mean < half.rate.high
    assert half.steepness.mean > 2 * coarse.steepness.mean > 0  # between far rates a cliff looks like a slope
    assert [line.number for line in made.lines] == [line.number for line in wide.lines]
    assert rounds == [3, 3]  # the quarters of a bracket of half a decade; then each of three seeds fails in another one
    assert finer_settings(ladder(runs), {}, math.inf) == []


def test_a_card_trains_the_rates_between_beside_its_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, trained = cliff(at=0.13), dict[Setting, pd.DataFrame]()

    def train(bench: Bench, settings: Sequence[Setting], screen: Progress) -> None:
        trained.update({setting: runs(setting.lr) for setting in settings})
        bench.ids |= {setting: ["run"] for setting in settings}

    monkeypatch.setattr(Bench, "train", train)
    monkeypatch.setattr("lab.features.stress.card_bench.outcomes", lambda records, ids: dict(trained))
    monkeypatch.setattr(Bench, "records", store.Records(pd.DataFrame({"id": []}), pd.DataFrame()), raising=False)
    monkeypatch.setattr("lab.features.stress.card_bench.parameters", lambda runs: pd.Series({"run": 1.0}))
    for test, more in (("lr_x10", 6), ("spikes", 0)):  # three seeds fail in three brackets of four: 1 + 2 + 3 rates
        trained.clear()
        plan = read_plan([*TINY, "out=none"], "lab stress", names=[test])
        bench = CardBench(plan, Progress("mine"))
        bench.train_tests()
        assert len(bench.between) == more
        own = sorted(setting.lr for setting in bench.done if not setting.words)
        assert own == list(read_battery().curve) * (more > 0)


def test_a_recipe_that_never_fails_has_a_bound_and_no_more_runs() -> None:
    runs = cliff(at=9.0)
    row = fine_card(runs, {}).passings[HALF].row
    assert (row["learning rate"], row["seeds that pass"]) == ("> 1", "0 of 3")
    assert row["decades above the best"].startswith("> 1.")
    assert finer_settings(ladder(runs), {}, 0.1) == []


def test_a_card_tells_where_recorded_attention_logits_run_away() -> None:
    runs = ladder(cliff(at=0.13, logit_knee=0.2))
    assert card(runs).passings["attention_logits"].rate.mean == pytest.approx(0.2)
    # the last logits of a run that diverged may never have been recorded
    runs[Setting((), 0.3)] = runs[Setting((), 0.3)].assign(**{"loss": AT_INIT, LOGIT: 1.0})
    assert card(runs).passings["attention_logits"].rate.mean == pytest.approx(math.sqrt(0.1 * 0.3))
    unrecorded = {setting: table.assign(**{LOGIT: math.nan}) for setting, table in runs.items()}
    assert "attention_logits" not in card(unrecorded).passings


def test_the_learning_rates_of_a_card_are_read_again_and_stand_in_text_and_page(tmp_path: Path) -> None:
    runs = cliff(at=0.13, logit_knee=0.2)
    made = fine_card(runs, {Setting((), lr): runs(lr) for lr in (0.173, 0.228)}, tmp_path)
    (tmp_path / "card.json").write_text(made.answer.json())
    pd.testing.assert_frame_equal(read_card(tmp_path).rate_table, made.rate_table)
    rate = made.passings[HALF].row["learning rate"]
    assert any("loss half of the way" in line and rate in line for line in made.answer.text().splitlines())
    assert "Learning rates" in made.answer.html()
    assert rate in made.answer.html()
    earlier = json.loads(made.answer.json())
    del earlier["learning_rates"]
    (tmp_path / "card.json").write_text(json.dumps(earlier))
    assert list(read_card(tmp_path).passings) == [COSTLY]


def test_two_cards_say_at_which_rates_they_fail_by_half_of_the_way() -> None:
    pair = side_by_side(ladder(cliff(at=0.04)), ladder(cliff(at=0.13)))
    first, second = (card.passings[HALF].row["learning rate"] for card in pair.cards)
    line = pair.failing_line()
    assert line.startswith(f"a fails, half of the way to a unigram model, at {first}, and b at {second}")
    assert "a ends 0.3 nats above" in line


def test_a_tolerance_that_is_a_lower_bound_never_stands_less() -> None:
    flat = planted(lambda lr: [2.0] * SEEDS, [0.0001, 0.0003, 0.001, *read_battery().curve, 3, 10, 30])
    pair = side_by_side(flat, planted(valley(rise=0.6)))
    assert [found.tolerates_more for found in pair.pairs] == [0, 0]
    turned = side_by_side(planted(valley(rise=0.6)), flat)
    assert turned.pairs[0].tolerates_more == 1
    bound = turned.pairs[0]._replace(p=0.0, first=turned.pairs[0].first._replace(is_bound=True))
    assert bound.tolerates_more == -1


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
    monkeypatch.setattr("lab.analysis.stress.lines.beats_bigram", lambda done: True)
    monkeypatch.setattr("lab.analysis.stress.lines.verdict_of", lambda *args, **named: FAILS)
    monkeypatch.setattr("lab.analysis.stress.measures.extension", lambda test, losses, battery: [])
    made = lab.stress(*TINY, tests=["lr_tolerance"], cures=["rezero", "score_softcap"], out="mine", seed=[0, 1])
    assert [(cure.test.name, cure.change, bool(cure.reason)) for cure in made.cures or ()] == [
        ("lr_x10", "score_softcap", False),
        ("lr_x10", "rezero", True),  # which takes a sweep of its own
    ]
    assert made.cure_line().startswith("Learning-rate tolerance is ")


@pytest.mark.usefixtures("here")
def test_runs_that_two_settings_share_are_trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [Setting((), 0.1), Setting(("precision=fp32",), 0.1)]
    monkeypatch.setattr("lab.features.stress.card_bench.wanted", lambda battery, tests, done: [] if done else shared)
    lab.stress(*TINY, tests=["depth"], out="mine", seed=[0, 1])
    assert len(store.read(Path("mine")).runs) == 2


@pytest.mark.usefixtures("here")
def test_a_test_that_a_recipe_cannot_take_is_left_out_and_named() -> None:
    words = [*TINY, "seed=0", "optimizer=sgd"]
    made = lab.stress(*words, tests=["lr_x10", "spikes"], minutes=30, cures=0, out="mine")
    assert [line.test.name for line in made.lines] == ["lr_x10"]
    assert "optimizer.beta1" in made.left_out["spikes on predictable text"]
    assert "Not run: spikes on predictable text" in made.answer.html()
    with pytest.raises(RequestError, match=r"optimizer\.beta1"):
        lab.stress(*words, tests=["spikes"], minutes=30, out="mine")


@pytest.mark.usefixtures("here")
def test_changes_that_can_act_are_tried_on_failed_tests_and_others_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.analysis.stress.lines.beats_bigram", lambda done: True)
    monkeypatch.setattr("lab.analysis.stress.lines.verdict_of", lambda *args, **named: FAILS)
    cures = ["z_loss", "qk_rmsnorm", "score_softcap"]
    made = lab.stress(*TINY, tests=["lr_x10"], cures=cures, out="mine", seed=[0, 1], intervention=[["z_loss"]])
    verdicts = {cure.change: cure.verdict for cure in made.cures or ()}
    assert set(verdicts) >= set(cures)
    assert verdicts["z_loss"] == NOT_TRIED
    runs = store.read(Path("mine")).runs
    fresh = runs[~runs["seed"].isin([0, 1])]
    assert sorted(set(fresh["seed"])) == list(range(2, 2 + read_battery().confirm.fresh))
    confirmed = [cure for cure in made.cures or () if cure.is_confirmed]
    assert {cure.improvement.n for cure in confirmed} == {read_battery().confirm.fresh}
    assert {cure.improvement.n for cure in made.cures or () if not (cure.is_confirmed or cure.reason)} <= {2}
    assert NOT_TRIED not in (verdicts["qk_rmsnorm"], verdicts["score_softcap"])
    runs = store.read(Path("mine")).runs
    assert set(runs["intervention"]) == {"z_loss", "qk_rmsnorm+z_loss", "score_softcap+z_loss"}
    assert runs["seed"].isin([0, 1]).sum() == 2 * (len(made.losses) + 2 * 2)
    assert "Not tried: z_loss, since the recipe has it already." in made.answer.html()


def test_tests_of_experts_are_for_recipes_with_experts() -> None:
    dense, mixture = (read_plan([*words, "model.depth=1"], "", minutes=5) for words in ([], ["recipe=mixtral_moe"]))
    of_experts = {"experts", "router_logits"}
    assert {test.name for test in possible_plan(dense).tests}.isdisjoint(of_experts)
    assert not possible_plan(dense).left_out
    assert {test.name for test in possible_plan(mixture).tests} >= of_experts
    named = read_plan([], "", names=["experts", "lr_x10"], minutes=5)
    assert possible_plan(named).left_out == {"uneven experts": "the default recipe has no experts"}
    with pytest.raises(RequestError, match="has no experts"):
        possible_plan(read_plan([], "", names=["experts"], minutes=5))


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
    cures = {cure.change: cure for cure in judge_cures(test, tried, done, 0.03)}
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
    single, pair = judge_cures(test, tried, done, 0.03)
    assert single.costs == "+0.010 ± 0.000 nats at the best LR, 2.10 times the time of a step, +0 parameters"
    assert pair.costs == "+0.010 ± 0.000 nats at the best LR, +0 parameters"
    shown = replace(card_of("glm130b", "", Path(), [test], done, read_battery()), cures=[single])
    assert f"sigma_reparam ({single.effect}; costs {single.costs})" in shown.cure_line()
    assert json.loads(shown.answer.json())["cures"][0]["step_time"] == {"ratio": 2.1, "low": 2.0, "high": 2.2}


def test_a_change_in_another_unit_takes_another_learning_rate() -> None:
    for name, lr in (("lr_x10", 0.3), ("depth", 0.03)):
        trial = trial_of(read_battery().tests[name], "lion", ["optimizer=lion"], 0.03, lr_multiplier=0.35)
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
    assert kept_words("lion", coupled) == [*kept, "optimizer.chain=[clip,lion,decay,peak,schedule]"]
    independent = {**coupled, "chain": ["clip", "adam", "peak", "decay", "schedule"]}
    assert kept_words("lion", independent) == kept
    assert kept_words("adamh", coupled) == ["optimizer.clip=0.5"]  # it has no decay


Losses = Callable[[Setting], Sequence[float]]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, here: Path) -> Callable[[Losses], None]:
    """Lets crash tests end with planted losses, as many as a setting has seeds, instead of training."""

    def plant(losses_of: Losses) -> None:
        def train(bench: CardBench, settings: Sequence[Setting]) -> None:
            for setting in settings:
                words = next((word for word in setting.words if word.startswith("seed=")), "seed=0,1,2")
                found = table(np.resize(losses_of(setting), words.count(",") + 1).tolist())
                found["spikes"] = 10.0 * ("data=echo" in setting.words)
                found.index = pd.Index(map(int, words.removeprefix("seed=").split(",")), name="seed")
                bench.done = {**bench.done, setting: found}
                bench.bench.ids[setting] = [f"{setting}-{seed}" for seed in found.index]
            sizes = {"model=d64": 4e3, "model=d128": 16e3}
            bench.parameters = pd.Series(
                {run: sizes.get("".join(of.words), 1e3) for of, runs in bench.bench.ids.items() for run in runs}
            )

        monkeypatch.setattr(CardBench, "train", train)
        monkeypatch.setattr(
            "lab.sweeping.bench.launch.compose", lambda request: Composed([], {}, BasicLauncher(), None)
        )
        monkeypatch.setattr("lab.features.stress.training.store.gather", lambda folder: None)
        monkeypatch.setattr("lab.features.stress.training.files.write_text", lambda path, text: None)
        monkeypatch.setattr(Answer, "html", lambda answer: "")  # which is slow to draw

    return plant


def with_changes(rise: float, **left: float) -> Losses:
    """Losses of a recipe that rise by so much a decade; with a change in the words of a run, by its number instead."""
    noise = np.random.default_rng(0).normal(0, 0.005, 100)

    def losses_of(setting: Setting) -> Sequence[float]:
        text = " ".join(setting.words)
        rises = [left[name] for name in left if name in text] or [rise]
        decades = abs(math.log10(setting.lr / 0.03))
        # by seed, runs of a change differ a little from those of the recipe, and stressed ones otherwise than others
        noise_n = noise[np.arange(8) + len(text) % 50 + 40 * (decades > 0.5)]
        return (2.2 + min(rises) * decades + noise_n).tolist()

    return losses_of


def made_with(cures: str | None, *words: str, names: Sequence[str] = ("lr_x10",), **given: Any) -> Card:
    return make_card(read_plan([*TINY, *words], "lab stress", names=names, cures=cures, **given))


def test_changes_that_are_named_are_tried_on_weak_and_open_tests_too(plant: Callable[[Losses], None]) -> None:
    plant(with_changes(0.25, peri_ln=0.02, adopt=0.249))
    weak = made_with("peri_ln,adopt,z_loss,fp32")
    assert [line.verdict for line in weak.lines] == [WEAK]
    assert {cure.change: cure.verdict for cure in weak.cures or ()} == {
        **{"peri_ln": CURES, "adopt": NO},
        **{"z_loss": NOT_TRIED, "fp32": NOT_TRIED},
    }
    assert weak.cure_line().startswith("Ten times the best LR is cured by peri_ln (0.23 ± ")
    assert "Not tried: z_loss and fp32, since the recipe has it already." in said(weak)
    assert made_with(None, minutes=5).cures == []  # ten of them only on tests that it fails
    assert made_with("all", arms=["peri_ln"]).cure_line().startswith("Ten times the best LR is cured by peri_ln")
    plant(lambda setting: [2.2 + 0.01 * abs(math.log10(setting.lr / 0.03)) * (1 + 30 * n) for n in range(8)])
    unsure = made_with("peri_ln")
    assert [line.verdict for line in unsure.lines] == [OPEN]
    assert unsure.cure_line() == "Ten times the best LR stays open with the change tried."


def test_where_nothing_can_be_tried_each_change_has_its_reason(plant: Callable[[Losses], None]) -> None:
    plant(with_changes(0.05))
    well = made_with("peri_ln,muon")
    assert well.cure_line() == "There is no test that it fails or may fail, so there is nothing to cure."
    reason = "the recipe fails no test, and is weak or open in none"
    assert f"Not tried: peri_ln and muon, since {reason}." in said(well)
    plant(lambda setting: [3.0] * 8)
    assert "Not tried: muon, since no test of the recipe is judged." in said(made_with("muon"))
    plant(with_changes(0.5))
    stuck = made_with("z_loss,qk_layernorm")
    assert stuck.cure_line() == "Ten times the best LR: no change could be tried on it."
    assert "none of the 0" not in said(stuck)
    plant(lambda setting: [2.2 + 0.5 * ("loss_scale.init=0.001953125" in setting.words)] * 8)
    bare = made_with("2", names=["underflow"], minutes=30)  # a test that lists no cures
    assert bare.cure_line() == "Gradient underflow: no change is known to try on it."


def test_a_change_does_not_take_the_stress_of_a_test_away(plant: Callable[[Losses], None]) -> None:
    plant(lambda setting: [2.2 + 0.5 * (setting.words[:1] in (("schedule.warmup=0.01",), ("precision=mxfp8",)))] * 8)
    card = made_with("longer_warmup,fp32,tighter_clip", names=["short_warmup", "mx"], minutes=30)
    told = {(cure.test.name, cure.change): cure.reason for cure in card.cures or ()}
    assert told["short_warmup", "longer_warmup"] == "it takes the stress of short warm-up away"
    assert told["mx", "fp32"] == "it takes the stress of MXFP8 at ten times the best LR away"
    assert told["short_warmup", "tighter_clip"] == told["mx", "tighter_clip"] == ""
    spiky = made_with("lion,tighter_clip", names=["spikes"], minutes=30)  # it sets Adam's betas, and lists the clip
    assert [cure.reason for cure in spiky.cures or ()] == ["", "it takes the stress of spikes on predictable text away"]
    assert "Not tried on short warm-up: longer_warmup, since it takes the stress of short warm-up away." in said(card)


OWN_MODEL = """
from torch import nn

class GPT(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU())])

    def forward(self, idx):
        return self.head(self.tokens(idx) + self.blocks[0](self.tokens(idx)))

class Mixture(GPT):
    def __init__(self, vocab_size, width):
        super().__init__(vocab_size, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    def forward(self, idx):
        x = self.tokens(idx)
        return self.head(x + sum(expert(x) for expert in self.experts) + self.blocks[0](x))
"""


@pytest.fixture
def own_model(here: Path) -> Callable[[str], own_code.OwnCode]:
    Path("own.py").write_text(OWN_MODEL)
    return lambda name: own_code.read("model", f"own.py:{name}")


def test_a_model_of_ones_own_gets_the_cures_that_need_no_hooks(
    plant: Callable[[Losses], None], own_model: Callable[[str], own_code.OwnCode]
) -> None:
    plant(with_changes(0.5, **{"schedule.warmup=0.25": 0.1}))
    code = [own_model("GPT")]
    few = made_with("4", code=code)
    tried = {cure.change: cure.verdict for cure in few.cures or () if "+" not in cure.change}
    assert set(tried) == {"longer_warmup", "tighter_clip", "z_loss", "more_decay"}
    assert tried["longer_warmup"] == CURES
    every = made_with(",".join(read_battery().without_hooks), code=code)
    assert {cure.change: cure.reason for cure in every.cures or () if cure.reason} == {
        "fp32": "the recipe has it already"  # and all others can act
    }
    assert [cure.reason for cure in made_with("fp32", "precision=bf16", code=code).cures or ()] == [""]
    named = made_with("peri_ln,balance,small_init,z_loss", code=code)
    no_hooks = "GPT is a model of your own, which has no hooks for it"
    assert {cure.change: cure.reason for cure in named.cures or ()} == {
        **{"peri_ln": no_hooks, "balance": no_hooks},
        **{"small_init": "GPT draws its own initial values", "z_loss": ""},
    }
    assert f"Not tried: peri_ln and balance, since {no_hooks}." in said(named)


def test_experts_of_a_model_of_ones_own_are_said_not_to_be_heard(
    own_model: Callable[[str], own_code.OwnCode],
) -> None:
    def left_out(name: str, **given: Any) -> dict[str, str]:
        return dict(possible_plan(read_plan(TINY, "", code=[own_model(name)], **given)).left_out)

    said = left_out("Mixture", minutes=5)
    assert {said["uneven experts"], said["router logits"]} == {
        "the routers of a model of one's own cannot be probed, and Mixture is one"
    }
    assert "uneven experts" not in left_out("GPT", minutes=5)
    assert "cannot be probed" in left_out("GPT", names=["experts", "lr_x10"], minutes=5)["uneven experts"]


def test_a_change_multiplies_what_the_recipe_has() -> None:
    more = read_battery().changes["more_decay"]
    own = {"optimizer": {"name": "adamw", "weight_decay": 0.02}, "intervention": []}
    assert change_words([more], own) == ["optimizer.weight_decay=0.2"]
    assert change_words([more], {**own, "optimizer": {"name": "sgd"}}) == []


def test_a_change_beside_another_optimizer_holds_against_what_the_recipe_keeps() -> None:
    own = {"optimizer": {"name": "adamw", "chain": ["clip", "adam", "peak", "decay"], "clip": 1.0}, "intervention": []}
    words = change_words([board_changes()["lion"], read_battery().changes["tighter_clip"]], own)
    values = dict(word.split("=") for word in words)
    assert (values["optimizer"], values["optimizer.clip"]) == ("lion", "0.1")


def test_another_optimizer_takes_none_of_the_numbers_of_the_first(here: Path) -> None:
    nadam = own_code.read("optimizer", "NAdam")
    first, _ = read_plans([], TINY, "lab stress", code=[nadam])
    beta = read_plan([*TINY, "optimizer.beta1=0.8"], "lab stress")
    for plan in (first, beta):
        setting = Setting(("optimizer=lion", "optimizer.weight_decay=0.5"), 0.1)
        optimizer = compose_settings(plan.request, [setting])[setting][0]["optimizer"]
        assert optimizer == arm_cards()["lion"].defaults | {"name": "lion", "weight_decay": 0.5, "lr": 0.1}
        plain = compose_settings(plan.request, [Setting(("optimizer.weight_decay=0.5",), 0.1)])
        assert next(iter(plain.values()))[0]["optimizer"]["name"] == ("NAdam" if plan is first else "adamw")


def test_an_optimizer_that_a_recipe_has_is_not_tried(plant: Callable[[Losses], None]) -> None:
    plant(with_changes(0.5))
    made = made_with("lion,adopt", "optimizer=lion")
    assert {cure.change: cure.reason for cure in made.cures or ()} == {"lion": "the recipe has it already", "adopt": ""}
    without = made_with("more_decay", "optimizer.weight_decay=0")
    assert [cure.reason for cure in without.cures or ()] == ["the recipe has no optimizer.weight_decay"]


def test_without_a_terminal_there_is_a_line_of_progress_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 30.0, 61.0, 62.0, 120.0, 130.0, 4000.0])  # of the start, then of readings
    monkeypatch.setattr("lab.features.stress.progress.time.monotonic", lambda: next(clock))
    progress = Progress("llama")
    progress.begin(rounds=1, later=0.5)
    for _ in range(2):
        progress.show({}, 0.25, 20.0)
    progress.stage = "cures"
    progress.begin(rounds=0, later=0.0)
    for _ in range(4):  # of another round, whose time begins anew
        progress.show({0: FleetProgress(1, 9, 1.0, 1.0, 0.0, [], [], None, cpu=0.04)}, 0.0, 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "lab: llama: tests, round 1 of 2, 1:01 elapsed, 1:40 left",
        "lab: llama: cures, round 2 of 2, 2:10 elapsed, busy machine: 4 % of a core",
        "lab: llama: cures, round 2 of 2, 1:06:40 elapsed, busy machine: 4 % of a core",
    ]


def test_time_left_is_that_of_all_rounds_at_the_pace_of_the_last_minute() -> None:
    progress = Progress("llama")
    progress.begin(rounds=2, later=3.0)
    left = [progress.left(second / 1000, float(second)) for second in range(0, 201, 10)]  # a thousand seconds a round
    assert left[0] is None
    assert left[-1] == pytest.approx(800 + 3000)
    slower = [progress.left(0.2 + second / 4000, 200.0 + second) for second in range(10, 101, 10)]
    assert slower[-1] == pytest.approx((1 - 0.225 + 3) * 4000)  # what came before the last minute does not count
    progress.begin(rounds=1, later=1.0)
    assert progress.left(0.0, 1.0) is None
    assert progress.left(0.5, 100.0) == pytest.approx((100 - 1) / 0.5 * 1.5)


def test_a_round_is_followed_by_those_of_other_tests_and_sizes(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[Losses], None]
) -> None:
    plant(with_changes(0.5))
    told, train = list[tuple[int, float]](), CardBench.train
    monkeypatch.setattr(Progress, "begin", lambda progress, rounds, later: told.append((rounds, later)))
    monkeypatch.setattr(
        CardBench, "train", lambda bench, settings: (bench.foretell(settings), train(bench, settings))[1]
    )
    make_card(read_plan(TINY, "lab stress", names=["lr_x10", "depth"], cures="none"))
    assert [rounds for rounds, _ in told] == [1, 0]
    assert 0.5 < told[0][1] < 8  # deeper runs at one rate take longer than those of the curve do at one
    assert told[1][1] == 0


def test_two_sizes_of_a_recipe_are_put_side_by_side(here: Path) -> None:
    plans = read_plans(["llama"], ["model=d32,d64", "steps=8"], "lab stress", names=["lr_x10"])
    assert [plan.recipe for plan in plans] == ["llama with model=d32 steps=8", "llama with model=d64 steps=8"]
    assert [plan.folder.name for plan in plans] == ["llama_model=d32_steps=8", "llama_model=d64_steps=8"]
    widths = [compose_settings(plan.request, [Setting((), 0.1)]) for plan in plans]
    assert [trees[Setting((), 0.1)][0]["model"]["width"] for trees in widths] == [32, 64]
    plans = read_plans([], ["model.width=32,48", "out=both"], "lab stress", names=["lr_x10"])
    assert [str(plan.folder) for plan in plans] == ["both/model.width=32", "both/model.width=48"]
    assert len(read_plans([], ["model=d64"], "lab stress")) == 1
    pair = card_pair(*(replace(card(planted(valley(0.2))), recipe=plan.recipe) for plan in plans), "lab stress")
    assert pair.names == ("the default recipe with model.width=32", "the default recipe with model.width=48")
    assert pair.title.startswith("Crash test of the default recipe with model.width=32 and the default recipe with")


def test_recipes_of_files_of_one_name_are_told_apart_by_their_folders(here: Path) -> None:
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "mine.yaml").write_text("intervention: [rmsnorm]\n")
    plans = read_plans(["a/mine.yaml", "b/mine.yaml"], TINY, "lab stress")
    assert [plan.recipe.partition(" with ")[0] for plan in plans] == ["a/mine.yaml", "b/mine.yaml"]
    assert len({plan.folder for plan in plans}) == 2
    other = read_plans(["a/mine.yaml", "llama"], ["out=both"], "lab stress")
    assert [str(plan.folder) for plan in other] == ["both/mine.yaml", "both/llama"]


def test_a_card_is_read_again_from_its_folder(tmp_path: Path) -> None:
    tried = trials(half=[2.5, 2.51, 2.5], z_loss=[2.8, 2.81, 2.82])
    cures = [*tried, not_tried(tried[0].test, "muon", "there is none")]
    trend = size_trend(at_sizes(lambda size: 0.03 * (size / 1e4) ** -0.5), SIZES, 3e-5)
    assert trend is not None
    made = card(planted(valley(rise=0.3, spread=0.02)))
    made = replace(made, folder=tmp_path, cures=cures, trend=trend.plain(), left_out={"depth 8": "why not"})
    (tmp_path / "card.json").write_text(made.answer.json())
    again = analysis.card(tmp_path)
    assert again.answer.json() == made.answer.json()
    assert again.answer.text() == made.answer.text()
    assert again.answer.html() == made.answer.html()
    poor = replace(card(planted(valley(rise=0.1, floor=3.0))), folder=tmp_path)
    (tmp_path / "card.json").write_text(poor.answer.json())
    assert analysis.card(tmp_path).answer.text() == poor.answer.text()


KEYS = {  # of the JSON of a card: whoever reads cards of earlier labs relies on them
    "card": "active_parameters best_loss best_lr command cures curve failing_lrs fitted_best_lrs folder headline "
    "is_judged learning_rates left_out loss_bigram losses_at_best_lr not_tested parameters recipe sizes stopped tests",
    "test": "between capped_seeds caveat fails failure high interval_level is_lower_bound low means n name passes "
    "power reason seed_numbers seeds source stuck_seeds title unit value verdict",
    "cure": "capped_seeds change cost_at_best_lr cost_high cost_low damage high interval_level is_advised "
    "is_confirmed left low n p parameters_added reason seeds step_time stuck_seeds takes_off test unit verdict",
}


def test_keys_of_a_card_stay_and_what_an_earlier_one_lacks_is_nothing(tmp_path: Path) -> None:
    made = replace(card(planted(valley(rise=0.3, spread=0.02))), folder=tmp_path, cures=trials(half=[2.5, 2.51, 2.5]))
    content = json.loads(made.answer.json())
    found = {"card": content, "test": content["tests"][0], "cure": content["cures"][0]}
    assert {part: " ".join(sorted(keys)) for part, keys in found.items()} == KEYS
    for test in content["tests"]:
        del test["caveat"], test["capped_seeds"]
    del content["stopped"]
    (tmp_path / "card.json").write_text(json.dumps(content))
    assert analysis.card(tmp_path).answer.json() == made.answer.json()


def test_a_card_that_cannot_be_read_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no card .*card\.json"):
        analysis.card(tmp_path)
    content = json.loads(card(planted(valley(rise=0.3))).answer.json())
    (tmp_path / "card.json").write_text(json.dumps({**content, "tests": [{**content["tests"][0], "name": "lr_x1O"}]}))
    with pytest.raises(RequestError, match="nearest: lr_x10"):
        analysis.card(tmp_path)
    for damaged in ("{", "{}", json.dumps({**content, "tests": [{"name": "lr_x10"}]})):
        (tmp_path / "card.json").write_text(damaged)
        with pytest.raises(RequestError, match="damaged"):
            analysis.card(tmp_path)
    older = {key: value for key, value in content.items() if key != "curve"}  # before cards had their curve
    (tmp_path / "card.json").write_text(json.dumps(older))
    assert analysis.card(tmp_path).best_loss == pytest.approx(content["best_loss"])


def of_depth(stressed: Sequence[float], *, own: Sequence[float] = (5.9, 6.0, 5.9), best: float = 2.3) -> Cure:
    """The cure of the test of depth by a change with these losses at eight blocks."""
    test, eight = read_battery().tests["depth"], ("model.depth=8",)
    done = {Setting(eight, 0.003): table([2.3, 2.31, 2.29]), Setting(eight, 0.03): table(own)}
    trial = trial_of(test, "a", ["intervention=[a]"], 0.1)
    assert trial.best is not None
    assert trial.at_ease is not None
    done |= {Setting((), 0.1): table([2.35] * 3), trial.stressed: table(stressed), trial.best: table([best] * 3)}
    done[trial.at_ease] = table([2.3, 2.31, 2.29])
    return judge_cures(test, [trial], done, 0.1)[0]


def test_a_change_under_which_a_seed_is_stuck_is_no_full_cure() -> None:
    assert of_depth([2.3, 2.31, 2.3]).verdict == CURES
    assert of_depth([2.9, 2.9, 2.93]).verdict == CURES
    lucky = of_depth([2.9, 2.9, 3.0])  # which leaves a sixth, and 3.0 is less than 85 % of the way
    assert (lucky.verdict, lucky.stuck) == (IN_PART, 1)
    assert lucky.what_is_left == "0.63, 1 seed stuck"
    assert of_depth([2.3, 2.31, AT_INIT]).capped == 1
    assert of_depth([AT_INIT] * 3).what_is_left == "3.70, 3 seeds stuck, 3 seeds capped"


def test_a_change_that_ends_no_better_than_a_bigram_model_is_not_advised_whatever_it_costs() -> None:
    assert of_depth([2.3] * 3, best=2.39).is_advised
    lost = of_depth([2.3, 2.31, 2.3], best=BIGRAM)
    assert lost.cost.mean == pytest.approx(0.05)
    assert not lost.is_advised
    dear = of_depth([2.3, 2.31, 2.3], best=2.36)
    assert dear.is_advised


def test_what_was_only_screened_has_no_verdict_of_a_cure() -> None:
    full, part = of_depth([2.3, 2.31, 2.3]), of_depth([2.0, 2.0, 3.0])
    assert [as_screened(cure).verdict for cure in (full, part)] == [SCREENED, SCREENED]
    for verdict in (NO, HARMS):
        assert as_screened(full._replace(verdict=verdict)).verdict == verdict


LONG = [0.0001, 0.0003, 0.001, *read_battery().curve, 3, 10, 30]


def test_a_tolerance_is_a_bound_if_one_seed_is_still_open_at_an_end() -> None:
    test, closed = read_battery().tests["lr_tolerance"], valley(rise=0.3)
    for low, high in ((0.03, 100), (0, 0.03)):  # one seed stands all rates above its best one, or all below

        def losses_of(lr: float, low: float = low, high: float = high) -> list[float]:
            return [2.2 if low <= lr <= high else closed(lr)[0], *closed(lr)[1:]]

        measured = measure(test, planted(losses_of, LONG), read_battery())
        assert measured is not None
        assert measured.is_bound
    whole = measure(test, planted(closed, LONG), read_battery())
    assert whole is not None
    assert not whole.is_bound


def test_the_best_learning_rate_is_that_of_the_mean_over_seeds() -> None:
    lucky = planted(lambda lr: [1.9 if lr == 0.3 else valley(0.5)(lr)[0], *valley(0.5)(lr)[1:]])
    assert best_lr(curve(lucky)) == 0.03
    assert best_lr(curve({})) != best_lr(curve({}))  # NaN


def test_a_curve_that_never_rises_is_extended_to_the_farthest_rates() -> None:
    done: dict[Setting, pd.DataFrame] = {}
    while settings := wanted(read_battery(), [read_battery().tests["lr_tolerance"]], done):
        done |= {setting: table([2.0] * SEEDS) for setting in settings}
    lrs = sorted(setting.lr for setting in done)
    assert (lrs[0], lrs[-1]) == read_battery().farthest == (0.0001, 30)
    only_below = planted(lambda lr: [2.0 + 0.5 * max(math.log10(lr / 0.03), 0)] * SEEDS)
    tolerance = read_battery().tests["lr_tolerance"]
    assert extension(tolerance, curve(only_below), read_battery()) == [0.0003, 0.001]
    only_above = planted(lambda lr: [2.0 + 0.5 * max(math.log10(0.03 / lr), 0)] * SEEDS)
    assert extension(tolerance, curve(only_above), read_battery()) == [3, 10]


def test_spikes_are_counted_from_the_step_on_from_which_they_can_be_seen() -> None:
    calm = 2.0 + np.random.default_rng(0).normal(0, 0.01, 400)
    early, late = calm.copy(), calm.copy()
    early[5:8] += 3
    late[200:203] += 3
    assert spike_rate(calm) == 0
    assert spike_rate(early) == 0
    assert spike_rate(late) == pytest.approx(1000 / 370)
    assert math.isnan(spike_rate(calm[:30]))
    assert not math.isnan(spike_rate(calm[:31]))


def test_a_difference_of_unlike_seeds_has_the_error_of_both_means() -> None:
    few, many = pd.Series([1.0, 2.0, 3.0]), pd.Series([4.0, 5.0, 6.0] * 2, index=range(3, 9))
    sd = math.sqrt((few.var() * 2 + many.var() * 5) / 7)
    found = pooled_difference(few, many, Spread())
    assert (found.mean, found.error) == pytest.approx((3.0, sd * math.sqrt(1 / 3 + 1 / 6)))
    assert (found.freedom, found.effect) == pytest.approx((7, 3 / sd))
    paired = pooled_difference(few, pd.Series([2.0, 2.5, 4.5]), Spread())
    assert paired.error == pytest.approx(np.std([1.0, 0.5, 1.5], ddof=1) / math.sqrt(3))
    known = pooled_difference(few, pd.Series([2.0, 2.5, 4.5]), Spread(0.5, 12))  # of one recipe; that of two is more
    assert known.error == pytest.approx(math.sqrt((2 * 0.25 + 12 * 2 * 0.25) / 14 / 3))


def test_a_strip_shows_its_zones_in_their_places() -> None:
    test = read_battery().tests["lr_x10"]  # passes under .15, fails over .35
    line = Line(test, OPEN, pooled_interval([], Spread()), False, 0)
    assert line.strip() == "." * 12 + ":" * 8 + "#" * 12

    def marks(*values: float) -> str:
        return line._replace(interval=line.interval._replace(values=values, n=len(values))).strip()

    assert marks(0.151).index("o") == 12
    assert marks(0.349).index("o") == 19
    assert marks(0.149).index("o") == 11
    assert marks(-9.0).index("o") == 0
    assert marks(9.0).index("o") == 31
    assert marks(0.25, 0.25, 0.1).count("2") == 1
    assert marks(*[0.25] * 10).count("*") == 1
    assert "o" not in line._replace(verdict=NOT_JUDGED, interval=line.interval._replace(values=(0.2,), n=1)).strip()


def test_two_cards_are_not_compared_where_the_second_is_not_judged() -> None:
    judged, poor = planted(valley(rise=0.6)), planted(valley(rise=0.12, floor=3.0))
    for pair in (side_by_side(judged, poor), side_by_side(poor, judged)):
        assert all(math.isnan(found.p) for found in pair.pairs)
        assert {found.tolerates_more for found in pair.pairs} == {-1}
        assert list(pair.table["difference"]) == ["", ""]
        assert sorted(pair.table.iloc[0][["a", "b"]])[1] == "not judged"


def test_recipes_are_not_compared_where_one_of_them_is_slow_without_the_stress() -> None:
    tests = [read_battery().tests["depth"]]

    def of(reference: float, stressed: float) -> Card:
        done = stressed_by_depth([reference] * 3, [stressed] * 3)
        return card_of(f"{reference}", "", Path(), tests, done, read_battery())

    well, slow, worse = of(2.2, 2.3), of(2.6, 2.3), of(2.2, 3.0)
    assert card_pair(well, worse, "").headline().startswith("2.2 tolerates more: depth 8 (")
    for pair in (card_pair(slow, worse, ""), card_pair(worse, slow, "")):
        assert "tolerates more" not in pair.headline()
        assert pair.headline() == "Not compared: depth 8."
        (note,) = [note for note in pair.notes() if note.startswith("Not compared")]
        assert "Of 2.6, the runs that it is compared with end at 2.600" in note
        assert json.loads(pair.answer.json())["tests"][0]["reasons"] == [f"2.6: {slow.lines[0].caveat}"]


def test_the_interval_of_a_pair_agrees_with_its_p() -> None:
    first, second = card(planted(valley(rise=0.2, spread=0.02))), card(planted(valley(rise=0.3, spread=0.02)))
    (pair,) = card_pair(replace(first, lines=first.lines[1:]), second, "").pairs
    freedom = 2 + pair.first.test.spread.freedom
    assert pair.p == pytest.approx(2 * stats.t.sf(abs(pair.difference.mean) / pair.difference.error, freedom))
    assert (pair.difference.high < 0) == (pair.p < 0.05)


def test_sizes_of_equal_parameters_are_one_size_and_one_within_is_no_extrapolation() -> None:
    done = at_sizes(lambda size: 0.03 * (size / 1e4) ** -0.5)
    twins = {words: min(size, 100_000) for words, size in SIZES.items()}
    assert size_trend(done, twins, 3e-5) is None
    within = size_trend(done, SIZES, 0.03 * 10**0.3 / 10**0.75)  # that of 10^5.5 parameters
    assert within is not None
    assert SIZES[()] < within.fails_from.middle < max(SIZES.values())
    assert not within.plain()["is_extrapolated"]
    assert "an extrapolation" not in " ".join(within.sentences())
    assert list(within.sizes) == sorted(SIZES.values())


def test_a_budget_counts_the_time_that_the_card_took(
    plant: Callable[[Losses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(with_changes(0.5))
    now = [0.0]
    train = CardBench.train

    runs = pd.DataFrame({"id": [f"{Setting((), lr)}-{seed}" for lr in (0.03, 0.3) for seed in range(3)]})

    def take_time(bench: CardBench, settings: Sequence[Setting]) -> None:
        now[0] += 40
        train(bench, settings)
        bench.bench.records = store.Records(runs.assign(wall_seconds=1.0), pd.DataFrame())

    monkeypatch.setattr(CardBench, "train", take_time)
    monkeypatch.setattr("lab.features.stress.card_bench.time.monotonic", lambda: now[0])
    arms = ["peri_ln", "adopt", "sub_ln"]

    def tried(budget: float) -> int:
        now[0] = 0.0
        made = make_card(read_plan(TINY, "lab stress", names=["lr_x10"], arms=arms, budget=budget))
        reasons = [cure.reason for cure in made.cures or () if "+" not in cure.change]
        assert set(reasons) <= {"", "the budget leaves no time for it"}
        return reasons.count("")

    # a change takes 6 s, as the runs of the recipe at both rates do; half of the time that is left is for the screening
    assert tried(64) == (64 - 40) / 2 // 6
    assert tried(40) == 0
    assert tried(1e6) == len(arms)


def at(low: float, mean: float, high: float) -> Interval:
    return pooled_interval([], Spread())._replace(mean=mean, low=low, high=high, n=3)


def test_an_open_line_says_between_which_zones() -> None:
    test = replace(read_battery().tests["lr_x10"], passes=0.25, fails=0.5)  # numbers without rounding

    def between(*interval: float) -> tuple[str, ...]:
        found = at(*interval)
        return Line(test, verdict_of(test, found), found, False, 0).between

    assert verdict_of(test, at(0.125, 0.2, 0.24)) == PASSES
    assert verdict_of(test, at(0.26, 0.375, 0.49)) == WEAK
    assert verdict_of(test, at(0.51, 0.6, 0.7)) == FAILS
    assert between(0.125, 0.2, 0.24) == ()
    assert between(0.2, 0.24, 0.3) == (PASSES, WEAK)
    assert between(0.3, 0.6, 0.9) == (WEAK, FAILS)
    assert between(0.2, 0.4, 0.6) == (PASSES, WEAK, FAILS)
    assert [Line(test, OPEN, at(*ends), False, 0).may_fail for ends in ((0.3, 0.6, 0.9), (0.2, 0.4, 0.6))] == [
        True,
        False,
    ]
    assert verdict_of(test, at(0.26, 0.375, 0.49), is_bound=True) == OPEN
    assert verdict_of(test, at(0.0, 0.1, 0.2), stuck=3) == PASSES  # only where stuck seeds count
    assert verdict_of(replace(test, counts_stuck=True), at(0.0, 0.1, 0.2), stuck=1) == FAILS
    assert [test.share(value) for value in (0.25, 0.5, 0.75, 0.0)] == [0, 1, 2, -1]
    assert test.gap == 0.25


def test_a_cure_is_told_by_what_is_left_of_what_was_to_be_taken_off() -> None:
    """The recipe loses 1.25, of which a cure leaves a third, and a part removes a fifth."""
    test = read_battery().tests["lr_x10"]
    at_best, own = [2.0, 2.0, 2.0], [3.25, 3.25, 3.25]
    noise = np.array([-1, 0, 1]) / 1024

    def verdict(loss: float) -> str:
        done = {Setting((), 0.03): table(at_best), Setting((), 0.3): table(own)}
        trial = trial_of(test, "a", ["intervention=[a]"], 0.03)
        assert trial.best is not None
        done |= {trial.stressed: table(loss + noise), trial.best: table(at_best)}
        (cure,) = judge_cures(test, [trial], done, 0.03)
        assert cure.left == pytest.approx(loss - 2.0)
        assert cure.improvement.mean == pytest.approx(3.25 - loss)
        return cure.verdict

    assert [verdict(loss) for loss in (2.0, 2.41, 2.43, 2.99, 3.01, 3.49, 3.51)] == [
        *(CURES, CURES, IN_PART, IN_PART, NO, NO, HARMS)
    ]


def test_a_loss_that_counts_as_that_at_initialization_is_said_to() -> None:
    lost = card(planted(lambda lr: [AT_INIT, AT_INIT, 2.4] if lr == 0.3 else valley(rise=0.2)(lr)))
    number = lost.lines[1].number
    assert number.endswith("nats, 2 of 3 seeds capped, passes, weak or fails")
    assert number in lost.answer.text()
    assert any(note.startswith("Capped: a run of this seed diverged or ended above") for note in lost.notes())
    assert [test["capped_seeds"] for test in json.loads(lost.answer.json())["tests"]] == [0, 2]
    fine = card(planted(valley(rise=0.2)))
    assert not any("apped" in text for text in [fine.answer.text(), *side_by_side_notes(fine, fine)])
    assert any(note.startswith("Capped") for note in side_by_side_notes(fine, lost))
    grown = card_of(
        "", "", Path(), [read_battery().tests["residual_growth"]], stressed_by_depth([2.3], [AT_INIT]), read_battery()
    )
    assert "capped" not in grown.lines[0].number  # which is not about the loss


def side_by_side_notes(first: Card, second: Card) -> list[str]:
    return card_pair(first, second, "").notes()


def test_what_is_not_judged_shows_no_number() -> None:
    poor = card(planted(valley(rise=0.2, floor=3.0)))
    told = poor.answer.text()
    assert not re.search(r"\d ± ", told)
    assert "o" not in told.split("[")[1].split("]")[0]
    assert list(poor.table["value"]) == ["", ""]
    assert "±" not in poor.answer.html().partition("Beside published recipes")[0]
    assert [test["value"] for test in json.loads(poor.answer.json())["tests"]] != [None, None]
    beside = beside_published("mine", poor.lines)
    assert list(beside[beside["recipe"] == "▶ mine"].iloc[0])[2:] == ["not judged"] * 2
    assert beside["recipe"].tolist().index("▶ mine") > 20  # behind those with a number
    well = beside_published("mine", card(planted(valley(rise=0.12))).lines)
    assert well["recipe"].tolist().index("▶ mine") < 5
    assert well.iloc[:, 2].str.startswith("not judged").sum() == well.iloc[-4:, 2].eq("not judged").sum() == 4


def test_a_figure_has_a_dot_per_seed_and_a_bar_where_there_is_an_interval() -> None:
    made = card(planted(valley(rise=0.25, spread=0.02)))
    dots, bars = [], []
    for line in made.lines:
        for drawn in card_figure([line]).axes[0].lines:
            (dots if drawn.get_marker() == "o" else bars).append(list(drawn.get_xdata()))
    expected = [[along(line.test, value) for value in line.interval.values] for line in made.lines]
    assert dots == expected
    assert bars == [[along(line.test, end) for end in line.interval[1:3]] for line in made.lines]
    one = made.lines[0]._replace(interval=made.lines[0].interval._replace(low=math.nan, high=math.nan))
    unjudged = made.lines[0]._replace(verdict=NOT_JUDGED)
    drawn = [card_figure([line]).axes[0].lines for line in (one, unjudged)]
    assert [[len(artist.get_xdata()) for artist in lines] for lines in drawn] == [[SEEDS], [0]]
    labels = [text.get_text() for text in card_figure(made.lines).axes[0].get_xticklabels()]
    assert labels == ["passes", "weak", "fails"]


def test_a_card_that_is_not_judged_names_the_rates_that_it_tried() -> None:
    headline = card(planted(valley(rise=0.2, floor=3.0))).headline()
    assert "from 0.003 to 1 " in headline
    assert "at 0.03 it ends at 3.00" in headline


def test_sizes_count_all_experts_where_there_are_idle_ones() -> None:
    made = card(planted(valley(rise=0.2)))
    trend = size_trend(at_sizes(lambda size: 0.03), SIZES, math.nan)
    assert trend is not None
    sentence = "Sizes count the parameters of all experts."
    assert sentence not in replace(made, trend=trend.plain()).notes()
    assert sentence in replace(made, trend=trend.plain(), active=10).notes()
    assert sentence not in replace(made, active=10).notes()  # it says nothing of sizes


def test_of_words_of_one_key_the_last_holds() -> None:
    plan = read_plan(["steps=8", "batch_size=8", "steps=9", "++optimizer.clip=2", "optimizer.clip=3"], "lab stress")
    words = {word.key: word.value for word in plan.request.words}
    assert {key: words[key] for key in ("steps", "batch_size", "optimizer.clip")} == {
        **{"steps": 9, "batch_size": 8, "optimizer.clip": 3}
    }
    assert len(plan.request.words) == len(words)


def test_the_zones_of_a_strip_have_their_colours_in_a_terminal() -> None:
    made = card(planted(valley(rise=0.2)))
    for names in ([], ["mine with intervention=[z_loss]", "b"]):
        for text, plain in zip(coloured(made.lines, names), strips(made.lines, names), strict=True):
            assert text.plain == plain
            colours = [str(span.style) for span in sorted(text.spans)]
            assert colours == ["green"] * 12 + ["yellow"] * 8 + ["red"] * 12
            assert text.spans[0].start == plain.rindex("[") + 1


def test_spikes_are_those_of_the_training_loss_in_the_order_of_its_steps() -> None:
    runs = pd.DataFrame(planted_cards(seeds=(0,), lrs=(0.1,), widths=(32,), arms=("z_loss",)))
    run, noise = runs["id"].iloc[0], np.random.default_rng(0).normal(0, 0.01, 400)
    rows = [(run, step, "train_loss", "", 2.0 + noise[step] + 3 * (200 <= step < 203)) for step in range(400)]
    rows += [(run, step, "val_loss", "", 9.0 * (step % 100 == 0)) for step in range(400)]
    np.random.default_rng(1).shuffle(rows)
    metrics = pd.DataFrame(rows, columns=list(store.METRIC_COLUMNS)).astype(store.METRIC_COLUMNS)
    table = by_run(store.Records(store.declared(runs), metrics, None))
    assert table["spikes"].item() == pytest.approx(1000 / 370)
    assert table["largest.val_loss"].item() == 9


def test_keys_of_an_optimizer_of_ones_own_are_not_those_of_the_one_beside_it(here: Path) -> None:
    nadam = own_code.read("optimizer", "NAdam")
    words = ["optimizer.momentum_decay=0.01", "steps=8", "optimizer.lr=1e-3"]
    own, other = read_plans([], words, "lab stress", code=[nadam])
    texts = [{word.text for word in plan.request.words} for plan in (own, other)]
    assert ["++optimizer.momentum_decay=0.01" in of_plan for of_plan in texts] == [True, False]
    assert not any("momentum_decay" in text for text in texts[1])
    assert all("steps=8" in of_plan for of_plan in texts)
    assert [plan.recipe.partition(" with ")[0] for plan in (own, other)] == [
        *("the default recipe trained by NAdam", "the default recipe")
    ]
    assert [plan.folder.name.startswith("NAdam") for plan in (own, other)] == [True, False]
    assert [plan.lr for plan in (own, other)] == [1e-3, 1e-3]


def test_a_long_card_trains_its_curve_at_three_sizes(plant: Callable[[Losses], None]) -> None:
    def losses_of(setting: Setting) -> Sequence[float]:
        best = {"model=d64": 0.01, "model=d128": 0.003}.get("".join(setting.words), 0.03)
        return [2.0 + 0.8 * abs(math.log10(setting.lr / best)) + 0.01 * n for n in range(8)]

    plant(losses_of)
    words = [word for word in TINY if not word.startswith("model.")]
    made = make_card(read_plan([*words, "optimizer.lr=3e-4"], "lab stress", minutes=30, cures="none"))
    assert made.trend is not None
    assert made.trend["parameters"] == [1000, 4000, 16000]
    assert made.trend["lr"] == 3e-4
    assert "Headroom with size" in made.answer.text()
    assert "Headroom with size" not in replace(made, is_judged=False).answer.text()
    assert made.cures is None
    settings = settings_of_sizes({Setting((), 0.1): table([2]), Setting(("a",), 3.0): table([2])}, [("model=d64",), ()])
    assert settings == [Setting(("model=d64",), 0.1)]


def test_a_pair_of_changes_is_tried_where_none_is_a_full_cure(
    plant: Callable[[Losses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses_of(setting: Setting) -> Sequence[float]:
        text = " ".join(setting.words)
        rise = 0.5 - 0.22 * ("peri_ln" in text) - 0.21 * ("optimizer=adopt" in text)
        decades = abs(math.log10(setting.lr / 0.03))
        return [2.2 + rise * decades + 0.002 * (n % 3) * len(text) / 40 * (1 + (decades > 0.5)) for n in range(8)]

    plant(losses_of)
    made = made_with("peri_ln,adopt,layerscale")
    cures = {cure.change: cure for cure in made.cures or ()}
    assert list(cures) == ["peri_ln + adopt", "peri_ln", "adopt", "layerscale"]
    assert [cure.verdict for cure in cures.values()] == [CURES, IN_PART, IN_PART, NO]
    assert [cure.is_confirmed for cure in cures.values()] == [True, True, True, False]
    assert {cure.improvement.n for cure in cures.values() if cure.is_confirmed} == {read_battery().confirm.fresh}
    first_trees = search.first_trees

    def refuse_pairs(request: Any, settings: Any) -> Any:
        trees, refusals = first_trees(request, settings)
        return trees, refusals | {of: "they exclude each other" for of in settings if "optimizer=adopt" in of.words}

    monkeypatch.setattr(search, "first_trees", refuse_pairs)
    refused = {cure.change: cure.reason for cure in made_with("peri_ln,adopt").cures or ()}
    assert refused == {"peri_ln": "", "adopt": "", "peri_ln + adopt": "they exclude each other"}


def test_a_change_that_cannot_stand_beside_a_recipe_has_the_reason_of_the_config(
    plant: Callable[[Losses], None],
) -> None:
    plant(with_changes(0.5))
    told = {cure.change: cure.reason for cure in made_with("rezero,qk_rmsnorm,balance").cures or ()}
    assert told["rezero"].startswith("its learning rate means something else")
    assert "exclude each other" in told["qk_rmsnorm"]
    assert told["balance"] == "it acts on experts, which this recipe has none of"
    (unknown,) = made_with("tighter_clip", "optimizer=stable_spam").cures or ()
    assert "optimizer.clip" in unknown.reason
    plan = read_plan(TINY, "lab stress", names=["lr_tolerance"], cures="peri_ln")
    whole = make_card(replace(plan, tests=[replace(plan.tests[0], cured_as="")]))  # as a test of a package may be
    assert [cure.reason for cure in whole.cures or ()] == ["its number is that of a whole curve"]


def test_a_clamp_of_swiglu_is_tried_where_the_recipe_has_swiglu(plant: Callable[[Losses], None]) -> None:
    plant(with_changes(0.5))
    reasons = {
        words: [cure.reason for cure in made_with("swiglu_clamp", *words).cures or ()]
        for words in (("intervention=[swiglu]",), ("intervention=[swiglu]", "intervention.swiglu.limit=10"), ())
    }
    assert [*reasons.values()] == [
        [""],
        ["the recipe has it already"],
        ["the recipe has no intervention.swiglu.limit"],
    ]


def test_a_cure_that_is_not_advised_is_left_out_and_named() -> None:
    full = of_depth([2.3, 2.31, 2.3])
    dear, lost = of_depth([2.3, 2.31, 2.3], best=2.41), of_depth([2.0, 2.0, 3.0], best=2.5)
    test = card_of("", "", Path(), [full.test], stressed_by_depth([2.3] * 3, [5.9] * 3), read_battery())
    line = replace(test, cures=[full._replace(change="cheap"), dear._replace(change="dear"), lost]).cure_line()
    assert line.startswith("Depth 8 is cured by cheap (3.63 ± ")
    assert (
        f"Left out are dear ({dear.cost_at_best}) and a ({lost.cost_at_best}), since at the best LR they lose" in line
    )
    none = [full._replace(change="cheap", verdict=NO), full._replace(verdict=OPEN)]
    assert (
        replace(test, cures=none).cure_line() == "Depth 8 is cured by none of the 2 changes tried, of which 1 is open."
    )
    assert replace(test, cures=none[:1]).cure_line() == "Depth 8 is not cured by the change tried."
    harmed = replace(test, cures=[full._replace(change="bad", verdict=HARMS)]).cure_line()
    assert harmed.startswith("Depth 8 is made worse by bad (")
    assert "costs" not in harmed
    assert replace(test, cures=None).cure_line().startswith("No cure was tried; --cures 10")


def test_two_cards_are_made_and_printed(
    plant: Callable[[Losses], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(lambda setting: [2.2 + 0.3 * abs(math.log10(setting.lr / 0.03)) + 0.01 * n for n in range(8)])
    written = []
    monkeypatch.setattr("lab.features.stress.training.files.write_text", lambda path, text: written.append(path))
    plans = read_plans(["llama", "olmo2"], [*TINY, "out=both"], "lab stress", names=["lr_x10"])
    pair = make_pair(plans)
    assert pair.names == ("llama", "olmo2")
    assert pair.shared == [word for word in TINY if not word.startswith("hydra")]
    assert {Path("both/llama-and-olmo2.html"), Path("both/llama-and-olmo2.json")} <= set(written)
    assert pair_file(plans, ".html") == Path("both/llama-and-olmo2.html")
    capsys.readouterr()
    print_card(pair, Path("both/page.html"))
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*pair.answer.text().splitlines(), "page: both/page.html"]
    assert pair.title in said(pair)
    strips_of_both = [line for line in printed if "[" in line and "]  " in line and "ten times" in line]
    assert [line.split("  [")[0] for line in strips_of_both] == [
        *("ten times the best LR  llama", "ten times the best LR  olmo2")
    ]
    assert "test difference p (Holm) tolerates more" in said(pair)
    assert "<svg" in pair._repr_html_()


def test_a_tolerance_within_a_better_loss_than_that_of_the_curve_is_none() -> None:
    losses = curve(planted(valley(rise=0.2)))
    assert tolerances(losses, dict.fromkeys(range(SEEDS), 2.0)) == dict.fromkeys(range(SEEDS), (0.0, True, True))
    wide, closed, _ = tolerances(losses, dict.fromkeys(range(SEEDS), 2.15))[0]
    assert (wide, closed) == (pytest.approx(2 * 0.05 / 0.2, rel=0.05), True)
    assert measure(read_battery().tests["lr_x10"], {}, read_battery()) is None  # before there is a curve


def test_a_number_without_a_value_says_so() -> None:
    test = read_battery().tests["lr_x10"]
    line = Line(test, OPEN, pooled_interval([], Spread()), False, 0)
    assert line.number == "no value"
    assert line.outcome == "no value, open"
    bound = Line(test, PASSES, at(0.5, 1.0, 1.5), True, 2)
    assert bound.number == "at least 1.00 ± 0.50 nats"
    deep = Line(read_battery().tests["depth"], FAILS, at(0.5, 1.0, 1.5), False, 2)
    assert deep.number == "1.00 ± 0.50 nats, 2 of 3 seeds stuck"


def test_a_recipe_of_a_file_is_called_by_the_name_of_the_file(here: Path) -> None:
    Path("a").mkdir()
    Path("a/mine.yaml").write_text("intervention: [rmsnorm]\n")
    plan = read_plan(["recipe=a/mine.yaml", "steps=8"], "lab stress")
    assert (plan.recipe, str(plan.folder)) == ("mine.yaml with steps=8", "runs/stress/mine.yaml_steps=8")
    assert read_plan(["intervention=[]"], "lab stress").recipe == "the default recipe with intervention=[]"
    assert read_plan([], "lab stress").folder.name == "default"
    long = read_plan([f"optimizer.beta1=0.{'1' * 60}"], "lab stress").folder.name
    assert len(long) == 67  # sixty characters, and a digest


def test_a_model_of_ones_own_has_more_steps_whatever_trains_it(own_model: Callable[[str], own_code.OwnCode]) -> None:
    def steps(*words: str, code: Sequence[own_code.OwnCode]) -> object:
        return next(word.value for word in read_plan(words, "", code=code).request.words if word.key == "steps")

    model, optimizer = own_model("GPT"), own_code.read("optimizer", "NAdam")
    assert [steps(code=[model]), steps(code=[model, optimizer]), steps(code=[optimizer]), steps(code=[])] == [
        *(400, 400, 200, 200)
    ]
    assert steps("steps=8", code=[model]) == 8


def test_a_caveat_is_told_of_every_number_but_one_that_fails() -> None:
    slow, tests = [2.6, 2.61, 2.62], [read_battery().tests["depth"]]

    def told(stressed: Sequence[float]) -> list[str]:
        made = card_of("", "", Path(), tests, stressed_by_depth(slow, stressed), read_battery())
        return [f"{made.lines[0].verdict}: {note}" for note in made.notes() if "says nothing" in note]

    assert [told(losses)[0].split(":")[0] for losses in ([2.2] * 3, [2.8, 2.81, 2.82], [2.2, 2.6, 2.9])] == [
        *(NOT_JUDGED, WEAK, NOT_JUDGED)  # the last may pass
    ]
    assert told([3.2, 3.21, 3.22]) == []


def test_a_note_says_what_a_change_takes_off_where_one_was_tried() -> None:
    made, tried = card(planted(valley(rise=0.4))), of_depth([2.3] * 3)
    untried = not_tried(tried.test, "b", "there is none")
    shown = [
        any(note.startswith("What a change removes") for note in replace(made, cures=cures).notes())
        for cures in (None, [], [untried], [tried], [tried, untried])
    ]
    assert shown == [False, False, False, True, True]


def test_a_change_is_lost_by_its_mean_over_seeds() -> None:
    test = read_battery().tests["lr_x10"]

    def advised(own: Sequence[float], with_it: Sequence[float]) -> bool:
        done = planted(lambda lr: list(own) if lr == 0.03 else [2.8, 2.8, 2.81])
        trial = trial_of(test, "a", ["intervention=[a]"], 0.03)
        assert trial.best is not None
        done |= {trial.stressed: table([2.4, 2.4, 2.41]), trial.best: table(with_it)}
        return judge_cures(test, [trial], done, 0.03)[0].is_advised

    assert advised([2.3, 2.3, 2.4], [2.31, 2.31, 2.45])  # one seed ends above 2.4, the mean does not
    assert not advised([2.38] * 3, [2.35, 2.41, 2.45])  # and here it does
    assert advised([2.41] * 3, [2.42] * 3)  # the recipe was lost before


def test_a_test_has_no_line_before_its_runs_are_there() -> None:
    tolerance, tests = read_battery().tests["lr_tolerance"], read_battery().tests
    assert measure(tolerance, {}, read_battery()) is None
    flat = planted(lambda lr: [2.0] * SEEDS)
    assert measure(tolerance, flat, read_battery()) is None  # its ends are missing
    assert measure(tests["depth"], flat, read_battery()) is None
    some = card_of("", "", Path(), list(tests.values()), planted(valley(rise=0.3)), read_battery())
    assert [line.test.name for line in some.lines] == ["lr_tolerance", "lr_x10"]


def test_a_trend_names_its_sizes_and_asks_for_a_learning_rate() -> None:
    done = at_sizes(lambda size: 0.03 * (size / 1e4) ** -0.5)
    trend = size_trend(done, SIZES, math.nan)
    assert trend is not None
    first, second, *_ = trend.sentences()
    assert first.startswith("Headroom with size, 10k to 1M parameters: per decade of size, the tolerance changes by ")
    assert second == "With optimizer.lr=LR, the card says at which size that learning rate would fail."


def test_without_a_terminal_each_test_is_told_once_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    made, progress = card(planted(valley(rise=0.2))), Progress("llama")
    first, second = strips(made.lines[:1]), strips(made.lines[1:])
    progress.add(made.lines[:1])
    progress.add(made.lines[:1])
    assert capsys.readouterr().err.splitlines() == list(first)
    progress.add(made.lines)
    progress.add(made.lines)
    assert capsys.readouterr().err.splitlines() == list(second)
    progress.end()
    assert list(progress.lines) == ["lr_tolerance", "lr_x10"]


@pytest.mark.parametrize(
    ("at", "ended", "missing"),
    [
        ("", [], ["ten times the best LR", "learning-rate tolerance", "MXFP8 at ten times the best LR"]),
        ("precision=", ["lr_x10", "lr_tolerance"], ["MXFP8 at ten times the best LR"]),
        ("intervention=", ["lr_x10", "lr_tolerance", "mx"], []),
    ],
)
def test_a_signal_leaves_a_card_of_what_has_ended(
    at: str, ended: list[str], missing: list[str], plant: Callable[[Losses], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as the runs of the curve, of a test or of a cure are trained."""
    plant(with_changes(0.5))
    train, written = CardBench.train, dict[str, str]()

    def stopped(bench: CardBench, settings: Sequence[Setting]) -> None:
        if stopping := any(at in " ".join(setting.words) for setting in settings):
            settings = [setting for setting in settings if not at or at not in " ".join(setting.words)][:2]
        train(bench, settings)
        if stopping:
            raise SystemExit(machine.EXIT_PREEMPTED)

    monkeypatch.setattr(CardBench, "train", stopped)
    monkeypatch.setattr(CardBench, "take_up", lambda bench: None)
    monkeypatch.setattr("lab.features.stress.training.store.find", lambda folder: True)
    monkeypatch.setattr(
        "lab.features.stress.training.files.write_text", lambda path, text: written.update({path.name: text})
    )
    names = ["lr_x10", "lr_tolerance", "mx"]
    with pytest.raises(Stopped) as end:
        make_card(read_plan(TINY, "lab stress", names=names, cures="peri_ln"))
    card, told = end.value.card, json.loads(written["card.json"])
    assert end.value.code == 75
    assert {line.test.name for line in card.lines} == {*ended} == {test["name"] for test in told["tests"]}
    assert [*card.left_out] == [*missing, "the search for cures"] == [*told["left_out"]]
    assert f"Stopped by a signal after {len(ended)} of 3 tests" in card.headline()
    for title in missing:
        assert f"- Not run: {title}" in said(card)
    (Path(told["folder"]) / "card.json").parent.mkdir(parents=True, exist_ok=True)
    (Path(told["folder"]) / "card.json").write_text(written["card.json"])
    assert read_card(Path(told["folder"])).headline() == card.headline()
    assert "nan" not in card.answer.text()
