"""The yardstick of small models that fail like large ones: planted models, and the committed numbers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from studies.claims.curve_summaries import steepness
from studies.faithful_toy import screen, yardstick
from studies.faithful_toy.single_changes import single_changes_of
from studies.faithful_toy.yardstick import CHANGE
from studies.real_runs.curves import read_real_runs

RULE = yaml.safe_load((Path(yardstick.__file__).parent / "yardstick.yaml").read_text())


@pytest.fixture(scope="module")
def marin() -> pd.DataFrame:
    return yardstick.changes_of(read_real_runs().changes)


def copied(marin: pd.DataFrame, optimizers: tuple[str, ...] = ()) -> pd.DataFrame:
    """A small model to which each change costs as much as it cost Marin's runs, of all optimizers or of some."""
    chosen = marin[marin["optimizer"].isin(optimizers or marin["optimizer"])]
    share = chosen.groupby(["optimizer", *CHANGE])["broke"].transform("mean")
    return chosen[["optimizer", *CHANGE]].assign(excess=share)


def renamed(toy: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The same changes, each of which costs what another one does."""
    return toy.assign(excess=np.random.default_rng(seed).permutation(toy["excess"]))


def test_a_model_that_fails_as_marins_runs_did_scores_one(marin: pd.DataFrame) -> None:
    score = yardstick.score(marin, copied(marin))
    assert score.concordance == 1
    assert score.factors > 0.8
    assert score.precision > max(RULE["ceiling"], *score.nulls.values())
    own = yardstick.toy_scores(marin, copied(marin))
    assert yardstick.chance_of_concordance(marin, own, 200) < 0.02


def test_a_model_whose_costs_are_shuffled_scores_by_chance(marin: pd.DataFrame) -> None:
    scores = [yardstick.score(marin, renamed(copied(marin), seed)) for seed in range(10)]
    assert np.mean([score.concordance for score in scores]) == pytest.approx(0.5, abs=0.05)
    assert np.mean([score.precision for score in scores]) < scores[0].nulls["key"]
    chances = [
        yardstick.chance_of_concordance(marin, yardstick.toy_scores(marin, renamed(copied(marin), seed)), 50)
        for seed in range(10)
    ]
    assert 0.3 < np.mean(chances) < 0.7


def test_a_model_in_which_the_opposite_breaks_scores_zero(marin: pd.DataFrame) -> None:
    toy = copied(marin)
    assert yardstick.score(marin, toy.assign(excess=-toy["excess"])).concordance == 0


def test_a_model_to_which_nothing_costs_anything_scores_by_chance(marin: pd.DataFrame) -> None:
    score = yardstick.score(marin, copied(marin).assign(excess=0.0))
    assert score.concordance == 0.5
    assert score.precision == pytest.approx(marin["broke"].mean())


def test_a_planted_fault_lowers_the_scores(marin: pd.DataFrame) -> None:
    """Two optimizers that fail in the reverse order, as AdamW and Muon did in a trial."""
    toy = copied(marin)
    swapped = toy.assign(optimizer=toy["optimizer"].replace({"adamw": "muon", "muon": "adamw"}))
    right, wrong = yardstick.score(marin, toy), yardstick.score(marin, swapped)
    assert wrong.concordance < right.concordance
    assert wrong.factors < right.factors


def test_scores_and_nulls_are_of_the_changes_that_were_made(marin: pd.DataFrame) -> None:
    score = yardstick.score(marin, copied(marin, ("adamw", "nadamw", "lion", "muon")))
    assert score.pairs == RULE["pairs"]["of_adamw_nadamw_lion_and_muon"]
    whole = yardstick.score(marin, copied(marin))
    assert whole.pairs == RULE["pairs"]["all"]
    assert whole.nulls == pytest.approx({name: RULE["nulls"][name] for name in whole.nulls}, abs=0.01)


def test_the_committed_table_has_the_frozen_numbers(marin: pd.DataFrame) -> None:
    others = marin[marin["key"] != "learning_rate"].reset_index(drop=True)
    for changes, nulls, ceiling in (
        (marin, "nulls", "ceiling"),
        (others, "nulls_without_learning_rate", "ceiling_without_learning_rate"),
    ):
        for name, by in yardstick.NULLS.items():
            said = yardstick.null_scores(changes, by)
            assert yardstick.average_precision(changes["broke"], said) == pytest.approx(RULE[nulls][name], abs=0.006)
        said = yardstick.ceiling_scores(changes)
        assert yardstick.average_precision(changes["broke"], said) == pytest.approx(RULE[ceiling], abs=0.002)
    assert yardstick.concordance(others, yardstick.ceiling_scores(others))[1] == RULE["pairs"]["without_learning_rate"]


def test_a_multiple_fails_by_its_mean_over_seeds() -> None:
    rows = [("adamw", 2.0, 0.1), ("adamw", 4.0, 0.35), ("adamw", 4.0, 0.2), ("adamw", 8.0, 0.9), ("muon", 2.0, 0.0)]
    toy = pd.DataFrame(rows, columns=["optimizer", "ratio", "excess"]).assign(key="learning_rate")
    assert (10 ** yardstick.factors_to_failure(toy, 0.3)).to_dict() == pytest.approx({"adamw": 8.0, "muon": 4.0})


def test_average_precision_is_the_textbooks() -> None:
    assert yardstick.average_precision([True, False, True], [3, 2, 1]) == pytest.approx((1 + 2 / 3) / 2)
    assert yardstick.average_precision([True, False], [1, 1]) == 0.5
    assert math.isnan(yardstick.average_precision([False, False], [1, 2]))


def test_steepness_is_read_above_the_best_rate() -> None:
    rates = 0.001 * 2.0 ** np.arange(6)
    loss = np.array([9.0, 3.0, 3.1, 3.2, 7.2, 7.3])  # the steep start is under-training
    assert steepness(rates, loss) == pytest.approx(4 * 0.15 / math.log10(2))
    assert steepness(rates[::-1], loss[::-1]) == pytest.approx(4 * 0.15 / math.log10(2))
    assert math.isnan(steepness(rates, loss[::-1].cumsum()[::-1]))


def test_steepness_is_no_steeper_on_a_finer_ladder() -> None:
    """A cliff within half of the 0.15 decades counts as it is, and not twice."""
    rates = 10 ** np.array([-2.0, -1.85, -1.775, -1.7])
    assert steepness(rates, [2.0, 2.1, 2.6, 2.7]) == pytest.approx(0.6)
    assert steepness(rates[[0, 1, 3]], [2.0, 2.1, 2.7]) == pytest.approx(0.6)


@pytest.mark.parametrize("by", ["optimizer", "key"])
def test_what_is_left_out_scores_the_model_chosen_without_it(marin: pd.DataFrame, by: str) -> None:
    toys = {"faithful": copied(marin), "shuffled": renamed(copied(marin), 0)}
    score, chosen = yardstick.left_out(marin, toys, by)
    assert score == 1
    assert set(chosen.values()) == {"faithful"}
    # one that was made to fit by choosing among many has no left-out score to match the fitted one
    drawn = {str(seed): renamed(copied(marin), seed) for seed in range(5)}
    fitted = max(yardstick.score(marin, toy).concordance for toy in drawn.values())
    assert yardstick.left_out(marin, drawn, by)[0] < fitted


RATES = (8e-3, 3.2e-2, 6.4e-2, 0.128, 0.256)


def screened(cliff: str, nats: float, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Run cards of the screen in which the high level of one setting makes the top rate cost so much more."""
    draw, rows = np.random.default_rng(seed), []
    for a, b, c, d in itertools.product((0, 1), repeat=4):
        products = [(b + c + d) % 2, (a + c + d) % 2, (a + b + c) % 2, (a + b + d) % 2]
        levels = dict(zip(screen.FACTORS, [a, b, c, d, *products], strict=True))
        for place, lr in enumerate(RATES):
            loss = 3 + 0.05 * place + (place == len(RATES) - 1) * nats * levels[cliff]
            rows.append(
                {
                    "model.depth": (3, 9)[levels["depth"]],
                    "model.width": (32, 64)[levels["width"]],
                    "steps": (200, 800)[levels["steps"]],
                    "seq_len": (32, 128)[levels["context"]],
                    "data.vocabulary": (256, 2048)[levels["vocabulary"]],
                    "intervention": "rmsnorm" + "+small_init" * levels["initial values"],
                    "schedule.warmup": (0.05, 0.4)[levels["warm-up"]],
                    "precision": ("fp32", "bf16")[levels["precision"]],
                    "optimizer.lr": lr,
                    "final_val_loss": loss + noise * draw.standard_normal(),
                    "loss_at_init": 9.0,
                }
            )
    return pd.DataFrame(rows).sample(frac=1, random_state=0)


def design_rows(runs: pd.DataFrame) -> pd.DataFrame:
    return screen.design_rows(runs, {256: 4.0, 2048: 8.0})


@pytest.mark.parametrize("name", list(screen.FACTORS))
def test_the_screen_finds_the_setting_that_makes_the_cliff(name: str) -> None:
    rows = design_rows(screened(name, 2.0, noise=0.02))
    found = screen.effects(rows, "steepness")
    assert found[name].mean == pytest.approx(2 * 0.15 / math.log10(2), rel=0.1)
    assert found[name].low > 0
    assert all(abs(effect.mean) < 0.05 for other, effect in found.items() if other != name)
    assert screen.effects(rows, "headroom")[name].high < 0


def test_the_screen_finds_nothing_where_nothing_is() -> None:
    found = [
        effect.low > 0 or effect.high < 0
        for seed in range(30)
        for effect in screen.effects(design_rows(screened("width", 0.0, 0.02, seed)), "steepness").values()
    ]
    assert np.mean(found) == pytest.approx(0.05, abs=0.04)  # of 240 intervals at 95 %, each eight of one table


def test_what_two_settings_do_only_together_widens_intervals_and_moves_no_effect() -> None:
    rows = design_rows(screened("width", 2.0, noise=0.02))
    together = rows.assign(steepness=rows["steepness"] + rows["width"] * rows["context"])
    before, after = (screen.effects(table, "steepness") for table in (rows, together))
    for name in screen.FACTORS:
        assert after[name].mean == pytest.approx(before[name].mean)
        assert after[name].high - after[name].low > 5 * (before[name].high - before[name].low)


def test_a_run_that_ends_nowhere_counts_as_untrained() -> None:
    runs = screened("width", 0.0)
    runs["final_val_loss"] = runs["final_val_loss"].mask(runs["optimizer.lr"] == RATES[-1])
    rows = design_rows(runs)
    rise = (9.0 - 3.15) * 0.15 / math.log10(2)
    assert rows["steepness"].tolist() == pytest.approx([rise] * 16)
    assert rows.groupby("vocabulary")["share"].first().tolist() == pytest.approx([rise, rise / 5])
    below, top = np.log10(np.array(RATES[-2:]) / RATES[0])
    assert rows["headroom"].between(below, top).all()


def test_the_committed_arms_are_a_design_of_resolution_four() -> None:
    folder = Path(__file__).parents[2] / "results/faithful_toy/arm"
    arms = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("cliff_*.yaml"))]
    levels = np.array(
        [
            [
                arm["model"]["depth"] > 3,
                arm["model"]["width"] > 32,
                "divide" in arm["steps"].removeprefix("${whole_"),
                "seq_len" in arm,
                "data" in arm,
                "small_init" in arm.get("intervention", {}),
                arm["schedule"]["warmup"] > 0.1,
                arm["precision"] == "bf16",
            ]
            for arm in arms
        ]
    )
    signs = 2 * levels.astype(int) - 1
    assert signs.shape == (16, 8)
    assert (signs.T @ signs == 16 * np.eye(8)).all()
    for first, second in itertools.combinations(range(8), 2):
        assert not (signs[:, first] * signs[:, second] @ signs).any()


def card(name: str, seed: int = 0, loss: float = 2.0, **changed: float) -> dict[str, object]:
    """A run card of a base at a learning rate of .01, with what is changed."""
    values = {"lr": 0.01, "beta1": 0.9, "weight_decay": 0.1, "clip": 1.0, **changed}
    own = {f"optimizer.{key}": value for key, value in values.items() if key != "warmup"}
    card = {"optimizer.name": name, "seed": seed, "final_val_loss": loss, "loss_at_init": 9.0, **own}
    return {**card, "schedule.warmup": values.get("warmup", 0.4)}


def test_single_changes_are_told_from_the_base_of_their_seed() -> None:
    cards = [
        *[card("adamw_coupled", seed, 2.0 + seed) for seed in (0, 1)],
        *[card("adamw_coupled", seed, 2.5 + seed, lr=lr) for seed in (0, 1) for lr in (0.005, 0.02)],
        card("adamw_coupled", 0, 3.0, warmup=0.1),
        card("adamw_coupled", 1, 4.0, warmup=0.1),
        card("adamw_coupled", 0, 1.0, warmup=0.1, beta1=0.98),  # two changes
        card("adamw_coupled", 0, math.nan, clip=0.0),
        card("lion", 0, 2.0, lr=0.001),
        card("lion", 0, 2.2, lr=0.004),
        card("lion", 0, 2.3, lr=0.001, beta1=0.95),
        card("lion", 0, 2.4, lr=0.001, beta1=0.98),
    ]
    told = single_changes_of(pd.DataFrame(cards)).set_index(["optimizer", *CHANGE])["excess"].sort_index()
    more = [card("adamw_coupled", 2, 9.0), card("adamw_coupled", 2, 9.0, lr=0.02)]  # of a seed without the whole ladder
    assert len(single_changes_of(pd.DataFrame([*cards, *more]))) == 11
    assert told.loc["adamw", "warmup", "down", 0.25].tolist() == [1.0, 1.0]
    assert told.loc["adamw", "learning_rate", "up", 2.0].tolist() == [0.5, 0.5]
    assert told.loc["adamw", "learning_rate", "down", 0.5].tolist() == [0.5, 0.5]
    assert told.loc["adamw", "max_grad_norm", "off", 0.0] == pytest.approx(7.0)
    assert told.loc["lion", "learning_rate", "up", 4.0] == pytest.approx(0.2)
    assert told.loc["lion", "beta1", "up"].tolist() == pytest.approx([0.3, 0.4])
    assert len(told) == 10


def test_single_changes_of_a_small_model_meet_marins(marin: pd.DataFrame) -> None:
    made = single_changes_of(pd.DataFrame([card("adamw_coupled"), card("adamw_coupled", lr=0.02, loss=2.1)]))
    own = yardstick.toy_scores(marin, made)
    met = marin[own.notna()]
    assert len(met)
    assert set(zip(met["optimizer"], met["key"], met["ratio"], strict=True)) == {("adamw", "learning_rate", 2.0)}
    assert own.dropna().tolist() == pytest.approx([0.1] * len(met))


def test_the_readme_has_the_numbers_of_the_committed_runs(marin: pd.DataFrame) -> None:
    folder = Path(__file__).parents[2] / "results/faithful_toy"
    readme = " ".join((Path(yardstick.__file__).parent / "README.md").read_text().split())
    rows = screen.design_rows(pd.read_csv(folder / "screen.csv"), {256: 3.2436, 2048: 6.3304})
    assert f"rises by at most {rows['steepness'].max():.2f} nats" in readme
    moved = screen.effects(rows, "headroom")["vocabulary"]
    assert f"by {-moved.mean:.2f} +- {moved.high - moved.mean:.2f} decades" in readme
    made = single_changes_of(pd.read_csv(folder / "changes.csv"))
    first = made[made["optimizer"].isin(["adamw", "nadamw", "lion", "muon"])]
    others = marin[marin["key"] != "learning_rate"].reset_index(drop=True)
    for toy in (first, made):
        score, apart = yardstick.score(marin, toy), yardstick.score(others, toy)
        chance = yardstick.chance_of_concordance(marin, yardstick.toy_scores(marin, toy))
        assert f"| {score.concordance:.2f} of {score.pairs} pairs (p {chance:.2f})" in readme
        assert f"| {apart.concordance:.2f} of {apart.pairs} pairs" in readme
        for each in (score, apart):
            nulls = ", ".join(f"{null:.2f}" for null in each.nulls.values())
            assert f"| {each.precision:.2f} ({nulls})" in readme
        assert f"| {score.factors:.2f} of {toy['optimizer'].nunique()} optimizers" in readme
