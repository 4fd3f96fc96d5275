"""Whether the board predicts published orderings: the rule on planted records, the score, and a user's own table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from scipy.stats import binomtest, spearmanr

import planted
import planted_board
from lab import main
from lab.analysis import Records
from lab.analysis.judging.verdicts import Verdict
from lab.analysis.statistics import Interval
from lab.records import store
from lab.records.store import NO_METRICS
from lab.studies.claims import CLAIMS
from lab.studies.leaderboard import transfer
from lab.studies.leaderboard.arms import arm_cards, meanings
from lab.studies.leaderboard.board import NO_DIFFERENCE, OPEN, Board
from lab.studies.leaderboard.curves import Curve, curves_of
from lab.studies.leaderboard.listing import board_of
from lab.studies.leaderboard.transfer import (
    NOT_ON_BOARD,
    Pair,
    lines,
    measures,
    predict,
    published,
    rank_correlations,
    score,
)

RESULTS = Path(__file__).parents[1] / "results"
PLAIN = ("z_loss",)
Effects = dict[tuple[str, ...], float]


def board(effects: Effects, **changes: Any) -> Board:
    runs = planted.table(planted_board.cards({PLAIN: 0.0, **effects}, **changes))
    return Board(curves_of(Records(runs, NO_METRICS), {}), meanings())


def pair(a: str, b: str, outcome: str = "a", measure: str = "above") -> Pair:
    first, second = (tuple(filter(None, arm.split("+"))) for arm in (a, b))
    return Pair("planted", "", "", first, second, outcome, measure)


def word(of: Board, *about: str) -> str:
    (found,) = predict(of, [pair(*about)], RESULTS)
    return found.word


def test_of_settings_with_equally_many_arms_the_first_counts() -> None:
    cards = [
        card
        for steps in range(100, 900, 100)
        for card in planted_board.cards({PLAIN: 0.0, ("qk_rmsnorm", "z_loss"): -steps / 1000}, steps=steps)
    ]
    made = Board(curves_of(Records(planted.table(cards), NO_METRICS), {}), meanings())
    (found,) = predict(made, [pair("qk_rmsnorm", "")], RESULTS)
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(-0.1, abs=0.05)


@pytest.mark.parametrize(
    ("effect", "spread", "expected"),
    [(-0.1, 0.01, "a"), (0.1, 0.01, "b"), (0.0, 0.01, NO_DIFFERENCE), (0.0, 0.2, OPEN)],
)
def test_a_pair_is_predicted_by_the_rule(effect: float, spread: float, expected: str) -> None:
    assert word(board({("relu", "z_loss"): effect}, spread=spread), "relu", "") == expected


def test_two_arms_are_compared_with_one_another() -> None:
    made = board({("relu", "z_loss"): -0.1, ("peri_ln", "z_loss"): -0.25})
    assert word(made, "peri_ln", "relu") == "a"
    assert word(made, "relu", "peri_ln") == "b"


def test_arms_of_both_panels_are_compared() -> None:
    made = board({("attention_gate", "qk_layernorm", "z_loss"): -0.3, ("qk_layernorm", "z_loss"): -0.1})
    assert word(made, "attention_gate+qk_layernorm", "qk_layernorm") == "a"
    assert word(made, "attention_gate+qk_layernorm", "") == "a"


def test_a_pair_against_the_reference_has_the_p_of_the_board() -> None:
    """One arm alone is certain; among forty others of its panel it is open, there and here."""
    effect: Effects = {("relu", "z_loss"): -0.08}
    crowd: Effects = {arm: 0.0 for arm in planted_board.arms() if arm not in effect}
    alone, crowded = (board({**effect, **others}, spread=0.06) for others in ({}, crowd))
    for made, expected in ((alone, "helps"), (crowded, "open")):
        (row,) = [one for one in made.rows if one.name == "relu" and one.panel == "without qk-layernorm"]
        assert row.verdict == expected
        assert word(made, "relu", "") == {"helps": "a", "open": OPEN}[expected]


def test_the_smallest_unstable_rate_is_better_where_it_is_higher() -> None:
    """In the plant a run is unstable from 0.33 above the best loss on, so that of relu is not."""
    made = board({("relu", "z_loss"): -0.3}, spread=0.001)
    for measure in ("eta_div", "unstable"):
        assert word(made, "relu", "", "a", measure) == "a"
        assert word(made, "", "relu", "a", measure) == "b"


@pytest.mark.parametrize("arm", ["peri_ln", "ngpt", "mu_centering+no z_loss"])
def test_an_arm_without_runs_or_of_another_unit_is_not_on_the_board(arm: str) -> None:
    assert word(board({("ngpt", "z_loss"): -0.5}), arm, "") == NOT_ON_BOARD


def test_an_arm_that_lacks_z_loss_is_found() -> None:
    assert word(board({(): 0.2}), "", "no z_loss") == "a"


def test_the_score_counts_decided_pairs_only() -> None:
    made = board({("relu", "z_loss"): -0.1, ("dyt", "z_loss"): 0.0, ("peri_ln", "z_loss"): 0.1}, spread=0.01)
    pairs = [
        pair("relu", ""),
        pair("dyt", "", "equal"),
        pair("peri_ln", "", "a"),
        pair("relu", "", "equal"),
        pair("nope", ""),
    ]
    found = predict(made, pairs, RESULTS)
    assert [one.agrees for one in found if one.is_decided] == [True, True, False, False]
    counted = score(found)
    assert (counted.decided, counted.agreeing, counted.opposite) == (4, 2, 1)
    exact = binomtest(2, 4).proportion_ci(method="exact")
    assert (counted.share.low, counted.share.high) == pytest.approx(tuple(exact))


def test_pairs_at_the_end_of_the_grid_are_left_out_once() -> None:
    """In the plant both stay stable up to the end of the grid: the same smallest unstable rate means nothing."""
    made = board({("relu", "z_loss"): -0.34, ("dyt", "z_loss"): -0.34, ("peri_ln", "z_loss"): 0.3}, spread=0.001)
    pairs = [pair("relu", "dyt", "a", "eta_div"), pair("relu", "peri_ln", "a", "eta_div")]
    found = predict(made, pairs, RESULTS)
    assert [(one.word, one.is_censored) for one in found] == [(NO_DIFFERENCE, True), ("a", False)]
    shown = "\n".join(lines(found))
    assert "1 of 2 decided pairs agree" in shown
    assert "1 decided pairs compare arms at the end of the scale" in shown
    assert "Without these, 1 of 1 decided pairs agree" in shown
    assert "Where the board names an arm, 1 of 1 agree; where it predicts no difference, 0 of 1." in shown


def test_rank_correlation_is_spearmans() -> None:
    effects = {"relu": -0.3, "peri_ln": -0.2, "dyt": 0.1, "biases": 0.2}
    made = board({(name, "z_loss"): effect for name, effect in effects.items()}, spread=0.001)
    names = ["peri_ln", "relu", "dyt", "biases"]  # as published, the most stable first
    pairs = [pair(a, b) for index, a in enumerate(names) for b in names[index + 1 :]]
    expected = spearmanr([3, 2, 1, 0], [0.2, 0.3, -0.1, -0.2]).statistic
    assert rank_correlations(predict(made, pairs, RESULTS)) == {"planted": pytest.approx(expected)}
    assert not rank_correlations(predict(made, pairs[:2], RESULTS))


def test_published_orderings_name_arms_of_the_board() -> None:
    pairs = published()
    assert {one.ordering for one in pairs} == {f"T{number}" for number in range(1, 13)}
    for one in pairs:
        assert (one.measure in measures()) != (one.claim in CLAIMS)
        assert one.outcome in ("a", "b", "equal")
        names = [name.removeprefix("no ") for arm in (one.a, one.b) for name in arm]
        assert one.why_not or one.claim or set(names) <= {*arm_cards(), "adamw_qk_clip"}


def test_a_trend_is_the_slope_of_the_difference_over_sizes() -> None:
    sizes = [(32, 40_000, -0.1), (64, 400_000, -0.2), (128, 4_000_000, -0.3)]
    runs = []
    for width, parameters, effect in sizes:
        effects, size = {PLAIN: 0.0, ("relu", "z_loss"): effect}, {"model.width": width, "parameters": parameters}
        runs.append(planted.table(planted_board.cards(effects, spread=1e-3, **size)))

    def trend(*tables: pd.DataFrame) -> Interval | None:
        made = Board(curves_of(Records(pd.concat(tables, ignore_index=True), NO_METRICS), {}), meanings())
        (found,) = predict(made, [pair("relu", "")], RESULTS)
        assert found.word == "a"
        return found.trend

    found = trend(*runs)
    assert found is not None
    assert found.mean == pytest.approx(-0.1, abs=2e-3)
    assert found.n == 6
    assert trend(*runs[:2]) is None
    assert trend(*runs[:2], runs[2].assign(**{"data.name": "trigram"})) is None


def test_a_trend_takes_the_seeds_of_one_sweep() -> None:
    """A second sweep has fewer arms of the smallest size, and other seeds."""

    def curves(sweep: str, width: int, effects: Effects, seeds: tuple[int, ...]) -> list[Curve]:
        size = {"model.width": width, "parameters": 10 * width**2}
        runs = planted.table(planted_board.cards({PLAIN: 0.0, **effects}, seeds, spread=1e-3, **size))
        made = curves_of(Records(runs, NO_METRICS), {})
        return [one._replace(setting=(*one.setting, ("sweep", sweep))) for one in made]

    sizes = [
        curve
        for width, effect in ((32, -0.1), (64, -0.2), (128, -0.3))
        for curve in curves("sizes", width, {("relu", "z_loss"): effect, ("dyt", "z_loss"): 0.0}, (30, 31, 32))
    ]
    others = curves("board", 32, {("relu", "z_loss"): 0.1}, (10, 11, 12))
    for some in ([*others, *sizes], [*sizes, *others]):
        (found,) = predict(Board(some, meanings()), [pair("relu", "")], RESULTS)
        assert found.trend is not None
        assert found.trend.n == 3
        assert found.trend.mean == pytest.approx(-0.1 / (2 * math.log10(2)), rel=0.05)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("reproduced", "a"),
        ("contradicted", "b"),
        ("no effect", NO_DIFFERENCE),
        ("inconclusive", OPEN),
        ("in part", OPEN),
    ],
)
def test_a_claim_predicts_by_its_verdict(verdict: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arms that differ by a schedule, a decay or a size are none of the board."""
    of_claims = [one for one in published() if one.claim]
    assert [one.ordering for one in of_claims] == ["T2", "T3", "T4"]
    monkeypatch.setattr(transfer, "judge_claim", lambda *_: Verdict(verdict, 0.2, 0.1, 0.3, 5, "", "", ""))
    for one in predict(board({}), of_claims, RESULTS):
        assert (one.word, one.reason) == (expected, "")
        assert one.difference is not None
        assert one.difference[:4] == (-0.2, -0.3, -0.1, 5)
    (alone, *_) = predict(board({}), of_claims, RESULTS / "none")
    assert (alone.word, alone.reason) == (NOT_ON_BOARD, f"no runs of the sweep warm_up in {RESULTS / 'none'}")


def folder_with(tmp_path: Path, effects: Effects) -> str:
    folder = tmp_path / "board"
    folder.mkdir()
    store.write_imported(folder, Records(planted.table(planted_board.cards({PLAIN: 0.0, **effects})), NO_METRICS))
    return str(folder)


def test_a_table_of_ones_own_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, {("relu", "z_loss"): -0.1})
    table = tmp_path / "mine.csv"
    table.write_text("a,b,outcome,measure\nrelu,reference,a,\nrelu,,b,above\n")
    assert main(["leaderboard", folder, "--transfer", str(table)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 decided pairs agree: 50 %, 95 % interval" in shown
    assert "In 1 pairs the board predicts the arm that was published as the less stable." in shown
    assert main(["leaderboard", folder, "--transfer", str(table), "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert (scored["decided"], scored["agreeing"], scored["opposite"], scored["share"]["mean"]) == (2, 1, 1, 0.5)
    assert [(one["a"], one["b"], one["predicted"], one["published"], one["agrees"]) for one in scored["pairs"]] == [
        ("relu", "reference", "a", "a", True),
        ("relu", "reference", "a", "b", False),
    ]
    assert scored["pairs"][0]["difference"]["mean"] == pytest.approx(-0.1, abs=0.02)


def test_a_pair_is_looked_up_in_the_sweep_that_has_both_arms(tmp_path: Path) -> None:
    folders = []
    sweeps: dict[str, Effects] = {
        "large": {("relu", "z_loss"): 0.0, ("dyt", "z_loss"): 0.0},
        "small": {("nope", "z_loss"): -0.1},
    }
    for name, arms in sweeps.items():
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        cards = planted_board.cards({PLAIN: 0.0, **arms})
        store.write_imported(folders[-1], Records(planted.table(cards), NO_METRICS))
    made = board_of(folders)
    assert word(made, "relu", "") == NO_DIFFERENCE
    assert word(made, "nope", "") == "a"
    (apart,) = predict(made, [pair("nope", "relu")], RESULTS)
    assert (apart.word, apart.reason) == (NOT_ON_BOARD, "no runs of nope and relu together")
