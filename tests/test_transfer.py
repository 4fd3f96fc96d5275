"""Whether the board predicts large models: published orderings, and the score beside trivial answers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import planted_board
from lab.analysis.stress.arms import REFERENCE, board_arms
from planted_board import FAILURE
from studies.board.failures import read_failures
from studies.claims.registry import CLAIMS
from transfer import (
    EASE,
    EQUAL,
    NOT_TESTABLE,
    NULLS,
    OPEN,
    Pair,
    Prediction,
    distinct,
    headline,
    one_bit,
    predict,
    published,
)


def pair(a: str, b: str, outcome: str = "a", source: str = "S", **changes: str) -> Pair:
    return Pair(source, "", a, b, outcome, **{"failure": FAILURE.name, **changes})


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gains = {"nope": 1.0, "peri_ln": -0.3}  # how well an arm trains at ease predicts nothing
    return planted_board.write(tmp_path_factory.mktemp("board"), planted_board.tables(gains=gains))


def test_the_arm_with_less_damage_is_predicted_whichever_is_called_a(board: Path) -> None:
    arms = ("sigma_reparam", "peri_ln", "rmsnorm", "nope")
    for better, worse in pairwise(arms):
        first, second = predict(board, [pair(better, worse), pair(worse, better)])
        assert (first.word, second.word) == ("a", "b")


def test_arms_that_differ_by_less_than_the_margin_are_equal(board: Path) -> None:
    found = predict(board, [pair("rmsnorm", REFERENCE), pair(REFERENCE, "rmsnorm"), pair("sigma_reparam", EASE)])
    assert [prediction.word for prediction in found] == [EQUAL] * 3


def test_a_difference_within_noise_is_open(tmp_path: Path) -> None:
    shares = {"peri_ln": 0.3, "rmsnorm": 0.1, "dyt": 0.0}
    folder = planted_board.write(tmp_path, planted_board.tables(shares, spread=0.25))
    assert predict(folder, [pair("peri_ln", "rmsnorm")])[0].word == OPEN


def test_what_cannot_be_asked_is_not_testable(board: Path, tmp_path: Path) -> None:
    calm = planted_board.write(tmp_path, planted_board.tables(lost=0.0))
    asked = [
        pair("dyt", REFERENCE),
        pair("x", "y", why_not="nothing has it"),
        pair("rmsnorm", REFERENCE, failure="depth"),
    ]
    found = [*predict(board, asked), *predict(calm, [pair("sigma_reparam", REFERENCE)])]
    assert [prediction.word for prediction in found] == [NOT_TESTABLE] * 4


def test_an_arm_of_the_control_is_the_reference(board: Path) -> None:
    assert [one.word for one in predict(board, [pair("nope", "z_loss"), pair("nope", REFERENCE)])] == ["b", "b"]


def test_a_claim_predicts_by_its_committed_verdict(board: Path) -> None:
    claims = [one for one in published() if one.claim]
    assert {one.claim for one in claims} <= set(CLAIMS)
    words = {one.pair.claim: one.word for one in predict(board, claims)}
    assert words["instability_rises_without"] == "size-dependent"  # reproduced


def test_the_headline_names_the_best_answer_that_takes_no_run() -> None:
    found = [Prediction(pair("peri_ln", REFERENCE, "a"), "b"), Prediction(pair("peri_ln", REFERENCE, "a"), "a")]
    assert headline(found).startswith("1 of 2 decided orderings agree")
    assert "no better than with the answer 'always the newer arm', with which 2 do" in headline(found)


def test_an_ordering_that_two_sources_report_is_one_comparison() -> None:
    twice = [Prediction(pair("peri_ln", REFERENCE, source=source), "a") for source in "ST"]
    turned = Prediction(pair(REFERENCE, "peri_ln", "b"), "b")
    others = [Prediction(pair("peri_ln", REFERENCE, failure="mx"), "a"), Prediction(pair("rmsnorm", EASE), "b")]
    undecided = Prediction(pair("dyt", REFERENCE), OPEN)
    assert distinct([undecided, *twice, turned, *others]) == [twice[0], others[0]]


def test_a_rule_is_better_than_trivial_only_where_the_difference_is_significant() -> None:
    def found(wins: int) -> str:
        won = [Prediction(pair("dyt", f"arm{i}", "b", newer="a"), "b") for i in range(wins)]
        return headline([*won, *(Prediction(pair("peri_ln", REFERENCE), "a"),) * 3])

    assert "no better than" in found(5)  # 2 ** -5 on either side
    assert "more than" in found(6)
    worse = [Prediction(pair("dyt", f"arm{i}", "a", newer="a"), "b") for i in range(9)]
    assert headline(worse).startswith("0 of 9 decided orderings agree, no better than")


def test_the_rule_of_one_bit_knows_what_the_control_has() -> None:
    assert one_bit(pair("qk_layernorm", REFERENCE)) == "a"
    assert one_bit(pair(REFERENCE, "score_softcap")) == "b"
    assert one_bit(pair("peri_ln", "dyt")) == EQUAL
    assert one_bit(pair("qk_rmsnorm", REFERENCE, failure="beyond_qk_norm")) == EQUAL


def test_published_orderings_name_arms_and_failures_of_the_board() -> None:
    assert len(published()) >= 45
    assert {"equal", "size-dependent"} < {pair.outcome for pair in published()}
    for found in published():
        if not found.claim and not found.why_not:
            assert found.failure in {*read_failures().failures, "depth"}  # of the first edition
            assert {found.a, found.b} <= {*board_arms(), EASE}
    assert all(isinstance(answer(published()[0]), str) for answer in NULLS.values())
