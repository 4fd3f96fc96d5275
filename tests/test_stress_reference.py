"""Published recipes under the crash test: planted runs, whose numbers, agreement and coverage are known."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab.analysis import Records
from lab.analysis.statistics import Spread
from lab.analysis.stress.battery import FAILS, LARGEST, NOT_JUDGED, OPEN, PASSES, read_battery
from lab.analysis.stress.card_json import CardBaseline, baseline_of
from lab.analysis.stress.measures import Outcomes, measure, of_difference
from lab.features.guard.cards import compare_cards
from lab.features.stress.card import card_of
from lab.features.stress.reference import FILE as REFERENCE
from lab.features.stress.reference import outcomes_by_recipe, published_outcomes, published_verdicts
from lab.records import store
from lab.records.plans import Setting
from lab.records.store import METRIC_COLUMNS
from lab.sweeping.launch import compose_points
from paper_pairs import (
    FAILING,
    FEWER,
    LADDER_SEEDS,
    LADDERS,
    MOST,
    PROBE,
    RATES,
    RUNS,
    UNFIXED,
    WIDTH,
    crossings_of,
    finer,
    linked,
    measured,
    ordered,
    pairs_with_ladders,
    rates_of,
    read_pairs,
    read_runs,
    standard_fixes,
    verdict,
)
from score_crash_test import (
    agreements,
    bounds_scores,
    by_width,
    coverage,
    first_looks,
    first_looks_text,
    order_markdown,
    order_over_size,
    rank_correlation,
    recipes_markdown,
    reference_spreads,
    reference_table,
)

BATTERY = read_battery()
SEEDS = range(10, 16)
RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS.parent / "docs" / "crash_test.md"


def runs_of(recipe: str, excess: float, noise: float = 0.0) -> pd.DataFrame:
    """The curve of a recipe with its best learning rate at 0.03, ``excess`` nats worse from 0.3 on; and MXFP8 there."""
    random = np.random.default_rng(len(recipe))
    curve = {0.003: 0.3, 0.01: 0.2, 0.03: 0.0, 0.1: 0.05, 0.3: excess, 1.0: excess + 0.2}
    rows = [(lr, 2, "fp32", rise) for lr, rise in curve.items()] + [(0.3, 2, "mxfp8", excess + 0.07)]
    return pd.DataFrame(
        [
            {
                "id": f"{recipe}-{lr}-{precision}-{seed}",
                "recipe": recipe,
                "status": "finished",
                "seed": seed,
                "optimizer.lr": lr,
                "model.depth": depth,
                "precision": precision,
                "schedule.warmup": 0.25,
                "final_val_loss": 2.2 + rise + random.normal(0, noise),
                "loss_at_init": 4.0,
                "loss_bigram": 2.4,
                "parameters": 40_000,
                "model_steps_per_second": 300.0,
            }
            for lr, depth, precision, rise in rows
            for seed in SEEDS
        ]
    )


def by_recipe(**noise_and_excess: tuple[float, float]) -> dict[str, Outcomes]:
    runs = pd.concat([runs_of(recipe, excess, noise) for recipe, (excess, noise) in noise_and_excess.items()])
    metrics = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in METRIC_COLUMNS.items()})
    return outcomes_by_recipe(Records(runs.reset_index(drop=True), metrics), BATTERY)


def test_runs_are_told_apart_by_recipe_and_setting() -> None:
    found = by_recipe(llama=(0.5, 0.0), olmo2=(0.02, 0.0))
    assert sorted(found) == ["llama", "olmo2"]
    assert not any(next(iter(done)).words for done in found.values())  # the recipe itself, whose size a card names
    plain = [setting.lr for setting in found["llama"] if not setting.words]
    assert plain == [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    mx = found["llama"][Setting(BATTERY.tests["mx"].places[-1].words, 0.3)]
    assert mx["loss"].to_list() == pytest.approx([2.77] * 6)


def test_the_table_has_the_planted_numbers() -> None:
    table = reference_table(by_recipe(llama=(0.5, 0.001), olmo2=(0.02, 0.001)), BATTERY).set_index("recipe")
    assert table["best_lr"].to_list() == [0.03, 0.03]
    a, b, _ = np.polyfit(np.log10([1 / 3, 1, 10 / 3]), [0.2, 0.0, 0.05], 2)  # the best rate lies above 0.03
    rise = 0.2 * -b / (2 * a) / math.log10(1.0 / 0.3)  # and ten times that above 0.3, where losses rise further
    assert table["lr_x10"].to_list() == pytest.approx([0.5 + rise, 0.02 + rise], abs=0.01)
    assert table["lr_x10_verdict"].to_list() == ["fails", "passes"]
    assert table["mx"].to_list() == pytest.approx([0.07, 0.07], abs=0.01)
    assert "depth" not in table  # no run has eight blocks


def test_a_recipe_that_never_beats_the_bigram_is_not_judged_in_the_table() -> None:
    runs = pd.concat([runs_of("opt", 0.5), runs_of("llama", 0.5)])
    runs["final_val_loss"] += 1.0 * (runs["recipe"] == "opt")
    metrics = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in METRIC_COLUMNS.items()})
    found = outcomes_by_recipe(Records(runs.reset_index(drop=True), metrics), BATTERY)
    table = reference_table(found, BATTERY).set_index("recipe")
    assert table["lr_x10_verdict"].to_dict() == {"opt": "not judged", "llama": "fails"}
    lines = recipes_markdown(table.reset_index(), {}, BATTERY).splitlines()
    assert [line.count("not judged") for line in lines if "`opt`" in line] == [3]


def test_agreement_is_one_where_every_unstable_recipe_is_worse() -> None:
    runs = by_recipe(llama=(0.5, 0.0), opt=(0.4, 0.0), olmo2=(0.02, 0.0), qwen3=(0.1, 0.0), gpt3=(9.0, 0.0))
    table = reference_table(runs, BATTERY)
    published = {"llama": "unstable", "opt": "unstable", "olmo2": "stable", "qwen3": "stable"}
    found = {agreement.rule: agreement for agreement in agreements(table, published, BATTERY)}
    of_test = found["ten times the best LR"]
    assert of_test[1:6] == pytest.approx((1.0, 1 / 3, 1 / 3, 2, 2))
    assert of_test.within[1] == 0  # both stable ones bound their scores, and no unstable one does
    assert found["attention scores are bounded or not"].auc == 1.0
    reverse = {recipe: {"stable": "unstable", "unstable": "stable"}[told] for recipe, told in published.items()}
    assert next(iter(agreements(table, reverse, BATTERY))).auc == 0.0


def test_the_p_of_a_rule_with_ties_is_that_of_all_relabellings_of_judged_recipes() -> None:
    random, names = np.random.default_rng(0), sorted(published_outcomes())
    values = {name: float(random.integers(0, 3)) for name in names}
    rows = [{"recipe": name, "lr_x10": value, "lr_x10_verdict": "fails"} for name, value in values.items()]
    left_out = [row["recipe"] for row in rows[:4:3]]
    rows[0]["lr_x10_verdict"] = rows[3]["lr_x10_verdict"] = NOT_JUDGED
    found = next(iter(agreements(pd.DataFrame(rows), published_outcomes(), BATTERY)))
    ranks = pd.Series(values).drop(left_out).rank()
    unstable = [name for name, outcome in published_outcomes().items() if outcome == "unstable" and name in ranks]
    sums = np.array([ranks[list(names)].sum() for names in itertools.combinations(ranks.index, len(unstable))])
    middle = ranks.mean() * len(unstable)
    assert found.p == pytest.approx(np.mean(abs(sums - middle) >= abs(ranks[unstable].sum() - middle) - 1e-9))
    assert (found.stable + found.unstable, found.unstable) == (len(values) - 2, len(unstable))


def test_outcomes_are_those_on_which_two_passes_agree() -> None:
    passes = pd.read_csv(RESULTS / "stress" / "outcomes.csv", index_col="recipe")
    agreed = passes["first_pass"].where(passes["first_pass"] == passes["second_pass"], "unknown")
    assert (passes["outcome"] == agreed).all()
    assert published_outcomes() == agreed[agreed != "unknown"].to_dict()


def test_a_first_look_is_held_against_the_card_of_twice_the_seeds() -> None:
    runs = by_recipe(llama=(0.5, 0.0), olmo2=(0.0, 0.0))
    looks = first_looks(runs, BATTERY)
    assert set(looks["recipe"]) == {"llama", "olmo2"}
    assert (looks["first"] == looks["second"]).all()  # planted seeds do not spread
    told = pd.DataFrame({"first": [PASSES, OPEN, OPEN, PASSES], "second": [PASSES, FAILS, OPEN, FAILS]})
    said = first_looks_text(told)
    assert said.startswith("in 2 of 4 lines both have the same verdict, in 1 the first is open")
    assert said.endswith("and in 1 one passes and the other fails")


def test_the_order_over_size_is_that_of_the_recipes_judged_at_both() -> None:
    names = ["llama", "olmo2", "qwen3", "palm", "opt"]
    rising, falling = (
        dict(zip(names, [(0.1 * n, 0.0) for n in order], strict=True)) for order in (range(5), (4, 3, 2, 1, 0))
    )
    small = by_recipe(**rising)
    found = order_over_size({32: small, 64: small, 128: by_recipe(**falling)}, BATTERY)
    told = found[found["test"] == "lr_x10"].set_index(["small", "large"])["order"]
    assert told[32, 64].mean == pytest.approx(1.0)
    assert told[32, 64].low > 0.9
    assert told[64, 128].mean == pytest.approx(-1.0)
    assert told[64, 128].high < -0.9
    lost = small | {"opt": {setting: table.assign(loss=4.0) for setting, table in small["opt"].items()}}
    of_four = order_over_size({32: lost, 64: small}, BATTERY).set_index("test")["recipes"]
    assert of_four["lr_x10"] == of_four["lr_tolerance"] == 4
    assert of_four["mx"] == 2  # those that end better than a bigram model at ten times the best rate
    alone = {"llama": small["llama"]}
    few = order_over_size({32: alone, 64: alone}, BATTERY)
    assert few["order"].isna().all()
    assert "| too few of 1 |" in order_markdown(few, BATTERY)


def test_runs_of_two_widths_are_told_apart() -> None:
    both = [runs_of("llama", excess).assign(**{"model.width": width}) for width, excess in ((32, 0.1), (64, 0.4))]
    runs = pd.concat([of_width.assign(id=of_width["id"] + f"-{n}") for n, of_width in enumerate(both)])
    metrics = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in METRIC_COLUMNS.items()})
    found = by_width(Records(runs.reset_index(drop=True), metrics), BATTERY)
    losses = {width: of_width["llama"][Setting((), 0.3)]["loss"].mean() for width, of_width in found.items()}
    assert losses == pytest.approx({32: 2.3, 64: 2.6})


def test_the_interval_of_a_rank_correlation_holds_the_true_one_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(0), list[bool]()
    mixing = np.linalg.cholesky(np.array([[1, 0.7], [0.7, 1]]))
    true = 6 / math.pi * math.asin(0.7 / 2)  # Spearman's of a normal with a correlation of 0.7
    for _ in range(1000):
        order = rank_correlation(pd.DataFrame(random.normal(size=(8, 2)) @ mixing.T))
        held.append(order.low <= true <= order.high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.03)


def test_pairs_of_one_part_are_one_trial_of_the_sign_test() -> None:
    def rows(adds: float = 0.0, **worse: list[float]) -> pd.DataFrame:
        """By how much the unstable side is worse in each pair of each changed part, and what both nulls say of it."""
        return pd.DataFrame(
            [
                {"pair": f"{part}{place}", "source": part, "change": part, "read": part != "d"}
                | {"number": number, "stable": 0.0, "unstable": by}
                for part, of_part in worse.items()
                for place, each in enumerate(of_part)
                for number, by in (("lr_x10", each), (FEWER, adds), (UNFIXED, adds))
            ]
        )

    score = ordered(rows(a=[1.0, 2.0, -1.0], b=[1.0], c=[-1.0], d=[0.0])).set_index("number").loc["lr_x10"]
    assert (score["right"], score["pairs"]) == (2 + 1 + 0 + 0.5, 6)
    assert (score["changes right"], score["changes"]) == (2, 3)
    assert (score["alone"], score["fix alone"], score["alone p"]) == (3, 0, 2 / 2**3)
    assert (score["read right"], score["read"]) == (3, 5)
    many = {f"part{n}": [1.0] for n in range(6)}
    both = pd.concat([rows(**many), rows(adds=1.0, other=[-1.0])])
    scores = ordered(both).set_index("number")
    assert scores["p"].to_list() == pytest.approx([2 * (1 + 7) / 2**7, math.nan, math.nan], nan_ok=True)
    assert scores.loc["lr_x10", ["alone", "fix alone"]].to_list() == [6, 1]
    assert scores.loc["lr_x10", "alone p"] == pytest.approx(2 * (1 + 7) / 2**7)
    assert scores.loc[UNFIXED, ["right", "pairs"]].to_list() == [6 / 2 + 1, 7]


def test_a_number_gets_a_verdict_only_if_it_beats_both_rules_that_train_nothing() -> None:
    def rows(by_fewer: float, by_fix: float) -> pd.DataFrame:
        says = {**dict.fromkeys([FAILING, *RATES.values()], 1.0), FEWER: by_fewer, UNFIXED: by_fix}
        pair = {"read": True, "stable": 0.0}
        return pd.DataFrame(
            [
                {**pair, "pair": part, "source": part, "change": part, "number": number, "unstable": by}
                for part in "abcdefgh"
                for number, by in says.items()
            ]
        )

    for by_fewer, by_fix in ((-1, -1), (0, -1), (1, -1), (-1, 1)):
        scores = ordered(rows(by_fewer, by_fix)).set_index("number")
        is_shown = by_fewer < 1 and by_fix < 1
        assert (scores.loc[[*RATES.values()], "is_shown"] == is_shown).all()
        assert ("none gets a verdict" in verdict(rows(by_fewer, by_fix))) != is_shown


def ladder(fails_at: float, runs_away_at: float, lrs: list[float]) -> Outcomes:
    """The runs of a side: the loss climbs to that of a unigram model around a rate, and logits are its fifth power."""
    found = {}
    for lr in lrs:
        loss = 2.0 + 1.2 / (1 + (fails_at / lr) ** 8)
        logit = 200 * (lr / runs_away_at) ** 5 if runs_away_at else math.nan
        seeds = pd.DataFrame({"loss": loss, "loss_at_init": 6.0, "loss_unigram": 3.2}, index=[20, 21, 22])
        found[Setting(("a",), lr)] = seeds.assign(**{LARGEST + PROBE: logit})
    return found


@pytest.mark.parametrize("runs_away_at", [0.2, 0.02, 5.0, 0.0])
def test_a_ladder_is_refined_where_the_loss_fails_and_where_logits_run_away(runs_away_at: float) -> None:
    lrs = [0.01, 0.03, 0.1, 0.3, 1.0]
    asked = {"a": [Setting(("a",), lr) for lr in lrs]}
    for _ in range(9):
        done = ladder(0.05, runs_away_at, lrs)
        lrs += [setting.lr for setting in finer(asked, done)]
    assert finer(asked, done) == []
    widths = [each.width for passing in crossings_of(done) for each in passing.seeds.values() if each.times]
    assert max(widths) <= WIDTH
    failing, runaway = rates_of(done, BATTERY).values()
    assert failing == pytest.approx(-math.log10(0.05), abs=WIDTH / 4)
    assert runaway == pytest.approx(-math.log10(runs_away_at if 0 < runs_away_at < 1 else 30), abs=WIDTH / 4)
    halvings = math.ceil(math.log2(0.5 / WIDTH))
    assert len(lrs) == 5 + halvings * (1 + (0.01 < runs_away_at < 1))


def test_pairs_hang_together_by_part_or_source() -> None:
    def rows(*pairs: str) -> pd.DataFrame:
        return pd.DataFrame([{"source": source, "change": change} for source, change in pairs])

    assert linked(rows("aq", "bq", "bw", "cz", "dz", "ey")) == 3
    assert linked(rows("aq", "bw", "cz")) == 1


@pytest.mark.parametrize(
    ("stable", "unstable"),
    [
        ("'intervention=[qk_rmsnorm]'", "'intervention=[]'"),
        ("'intervention=[biases]'", "'intervention=[biases,post_layernorm]'"),
        ("'intervention=[deepnorm]'", "'intervention=[post_layernorm]'"),
        ("optimizer.beta2=0.95", "optimizer.beta2=0.999"),
        ("schedule.warmup=0.05", "schedule.warmup=0"),
        ("optimizer=adamw_clip_update", "optimizer=adamw"),
    ],
)
def test_the_side_with_the_standard_fix_has_more_of_them(stable: str, unstable: str) -> None:
    has, lacks = (standard_fixes(*compose_points(shlex.split(side))) for side in (stable, unstable))
    assert has > lacks


@pytest.mark.slow
def test_the_standard_fixes_of_every_side_are_those_of_its_recipe() -> None:
    for side, fixes in pd.read_csv(RUNS).groupby("side")["fixes"].first().items():
        assert standard_fixes(*compose_points(shlex.split(str(side)))) == fixes


@cache
def numbers_of_pairs() -> pd.DataFrame:
    return measured(BATTERY)


def test_every_side_of_a_pair_that_counts_has_a_curve_of_three_seeds() -> None:
    runs, pairs = pd.read_csv(RUNS), read_pairs()
    assert set(runs["side"]) == {*pairs["stable"], *pairs["unstable"]}
    for _, of_side in runs.groupby("side"):
        assert set(of_side["lr"]) >= set(BATTERY.curve)
        assert (of_side.groupby("lr")["seed"].agg(sorted).map(tuple) == (20, 21, 22)).all()
    assert np.isfinite(numbers_of_pairs()[["stable", "unstable"]]).any(axis=1).all()


def test_every_pair_of_which_both_sides_train_has_fine_ladders_of_both() -> None:
    ladders, pairs = pd.read_csv(LADDERS), pairs_with_ladders()
    assert {*ladders["side"]} == {*pairs[["stable", "unstable"]].to_numpy().ravel()}
    assert (ladders.groupby(["side", "lr"])["seed"].agg(sorted).map(tuple) == tuple(LADDER_SEEDS)).all()
    for done in read_runs(ladders).values():
        crossed = [each for passing in crossings_of(done) for each in passing.seeds.values()]
        wide = [each for each in crossed if not each.is_censored and each.width > WIDTH]
        assert not wide or len(done) >= MOST
    numbers = numbers_of_pairs()
    of_rates = numbers[numbers["number"].isin(RATES.values())]
    assert {*of_rates["pair"]} == {*numbers["pair"]}
    assert np.isfinite(of_rates[["stable", "unstable"]]).any(axis=1).all()


def test_a_page_says_how_many_published_recipes_stand_a_test() -> None:
    table = pd.read_csv(REFERENCE)["depth_verdict"]
    assert set(table) == {PASSES, NOT_JUDGED}  # or the page on the crash test says too much of it
    said = published_verdicts("depth")
    assert f"{(table == PASSES).sum()} pass it" in said
    assert said.endswith("so it separates none of them.")
    assert "separates" not in published_verdicts("lr_x10")
    assert published_verdicts("spikes") == ""


@cache
def committed() -> dict[str, Outcomes]:
    return outcomes_by_recipe(store.read(RESULTS / "stress" / "recipes"), BATTERY)


def cards_of(seeds: range) -> dict[str, CardBaseline]:
    """The numbers of the committed cards, of some of their seeds."""
    found = {}
    for recipe, done in committed().items():
        some = {setting: table.loc[list(seeds)] for setting, table in done.items()}
        made = card_of(recipe, "lab stress", Path(recipe), list(BATTERY.tests.values()), some, BATTERY)
        content = json.loads(made.answer.json()) | {"made": {"data": ["the same"]}}
        found[recipe] = baseline_of(Path(recipe), content)
    return found


@pytest.mark.slow
def test_cards_of_other_seeds_are_no_regression_and_those_of_a_worse_recipe_are() -> None:
    old, new = cards_of(range(10, 13)), cards_of(range(13, 16))
    trained = [recipe for recipe, card in old.items() if card.is_judged and new[recipe].is_judged]
    verdicts = [compare_cards(old[recipe], new[recipe], 0.05).verdict for recipe in trained]
    assert len(trained) > 18
    assert verdicts.count("regression") <= 1
    assert verdicts.count("ok") >= 0.85 * len(trained)
    for recipe, worse in (("olmo3", "llama"), ("gemma3", "olmo1"), ("chameleon", "palm"), ("llama", "glm130b")):
        made = new[worse]._replace(recipe=recipe)
        assert compare_cards(old[recipe], made, 0.05).verdict == "regression"
        assert compare_cards(made, old[recipe], 0.05).verdict != "ok"


@pytest.mark.slow
def test_recipes_share_little_of_a_seed() -> None:
    """So the spread of a difference is that of two recipes which share nothing."""
    for test in BATTERY.tests.values():
        found = [measured.seeds for done in committed().values() if (measured := measure(test, done, BATTERY))]
        whole = np.array([seeds - seeds.mean() for seeds in found if len(seeds) == 6])
        if len(whole):
            pairs = [((a - b) ** 2).sum() / 5 for a, b in itertools.combinations(whole, 2)]
            alone = (whole**2).sum(axis=1).mean() / 5
            assert np.sqrt(np.mean(pairs) / alone) == pytest.approx(of_difference(Spread(1.0)).sd, rel=0.15)


def test_every_published_outcome_is_that_of_a_recipe() -> None:
    assert {"opt", "palm"} <= {recipe for recipe, outcome in published_outcomes().items() if outcome == "unstable"}
    assert [bounds_scores(name) for name in ("qwen3", "kimi_k2", "gemma2", "ngpt")] == [True] * 4
    assert [bounds_scores(name) for name in ("llama", "opt", "bloom", "none")] == [False] * 4


@pytest.mark.slow
def test_pooled_intervals_hold_the_mean_even_if_some_recipes_spread_ten_times_as_much() -> None:
    """In 95 % of draws; seeds that spread far more than those of other recipes have an interval of their own."""
    same = by_recipe(**{"a" * n: (0.2, 0.02) for n in range(1, 13)})
    assert reference_spreads(same, BATTERY)["mx"].sd == pytest.approx(0.02 * np.sqrt(2), rel=0.2)
    assert coverage(same, BATTERY, 3)["mx"] == pytest.approx(0.95, abs=0.03)
    mixed = by_recipe(**{"a" * n: (0.2, 0.02 if n > 3 else 0.2) for n in range(1, 13)})
    assert coverage(mixed, BATTERY, 3)["mx"] == pytest.approx(0.95, abs=0.03)


def test_the_lines_of_the_page_compute_the_numbers_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    records = store.read(RESULTS / "stress" / "recipes")
    of_llama = records._replace(runs=records.runs[records.runs["recipe"] == "llama"].copy())
    (block,) = re.findall(r"```python\n(import numpy.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    done = outcomes_by_recipe(of_llama, BATTERY)["llama"]
    monkeypatch.setattr("lab.analysis.load", lambda folder: of_llama)
    made: dict[str, Any] = {}
    exec(block, made)
    for test in BATTERY.chosen([], 1):
        measured = measure(test, done, BATTERY)
        assert measured is not None
        np.testing.assert_allclose(made[test.name].sort_index(), measured.seeds.sort_index(), atol=1e-4)
