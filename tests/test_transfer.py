"""Whether the board predicts large models: predictions of published orderings, their score, and tables of one's own."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import planted_board
from committed import RESULTS
from lab.analysis.judging.verdicts import Verdict
from lab.studies.leaderboard import transfer
from lab.studies.leaderboard.failures import REFERENCE, STRESSED, Cell, board_arms, read_failures
from lab.studies.leaderboard.transfer import (
    EASE,
    EQUAL,
    NOT_TESTABLE,
    NULLS,
    OPEN,
    OPPOSITE,
    Pair,
    Prediction,
    distinct,
    headline,
    one_bit,
    predict,
    published,
    score,
)
from planted_board import FAILURE, LR
from sweeping import OutputOf


def pair(a: str, b: str, outcome: str = "a", source: str = "S", **changes: str) -> Pair:
    return Pair(source, "", "", "", a, b, outcome, **{"failure": FAILURE.name, **changes})


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_board.write(tmp_path_factory.mktemp("board"), planted_board.tables())


def test_the_arm_that_stands_the_failure_better_is_predicted_whichever_is_called_a(board: Path) -> None:
    arms = ("sigma_reparam", "peri_ln", "rmsnorm", "nope")
    for better, worse in pairwise(arms):
        first, second = predict(board, [pair(better, worse), pair(worse, better)])
        assert (first.word, second.word) == ("a", "b")
        assert first.difference is not None
        assert second.difference is not None
        assert first.difference.mean == pytest.approx(-second.difference.mean)


def test_arms_that_differ_by_less_than_the_margin_are_equal(board: Path) -> None:
    found = predict(board, [pair("rmsnorm", REFERENCE), pair(REFERENCE, "rmsnorm"), pair("sigma_reparam", EASE)])
    assert [prediction.word for prediction in found] == [EQUAL] * 3


def test_a_difference_within_noise_is_open(tmp_path: Path) -> None:
    shares = {"peri_ln": 0.3, "rmsnorm": 0.1, "dyt": 0.0}
    folder = planted_board.write(tmp_path, planted_board.tables(shares, spread=0.25))
    assert predict(folder, [pair("peri_ln", "rmsnorm")])[0].word == OPEN


def test_what_cannot_be_asked_is_not_testable(board: Path, tmp_path: Path) -> None:
    calm = planted_board.write(tmp_path, planted_board.tables(lost=0.0))
    found = [
        *predict(board, [pair("dyt", REFERENCE), pair("x", "y", why_not="nothing has it")]),
        *predict(calm, [pair("sigma_reparam", REFERENCE)]),
    ]
    assert [prediction.word for prediction in found] == [NOT_TESTABLE] * 3
    assert [prediction.reason for prediction in found] == [
        "dyt has no runs under attention logits",
        "nothing has it",
        "the control does not fail under attention logits",
    ]


def test_an_arm_of_the_control_is_the_reference(board: Path) -> None:
    with_z_loss, plain = predict(board, [pair("peri_ln", "z_loss"), pair("peri_ln", REFERENCE)])
    assert with_z_loss.difference == plain.difference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "expected"),
    [("reproduced", None), ("contradicted", "opposite"), ("no effect", EQUAL), ("inconclusive", OPEN)],
)
def test_a_claim_predicts_by_its_verdict(verdict: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    of_claims = [pair for pair in published() if pair.claim]
    monkeypatch.setattr(transfer, "judge_claim", lambda *_: Verdict(verdict, 0.2, 0.1, 0.3, 5, "", "", ""))
    monkeypatch.setattr(transfer, "read_cells", lambda folder: ({}, {}))
    monkeypatch.setattr(transfer, "tables_of", lambda folder, runs: {})
    for prediction in predict(RESULTS / "board", of_claims):
        outcome = prediction.pair.outcome
        assert prediction.word == {None: outcome, "opposite": OPPOSITE[outcome]}.get(expected, expected)
        assert prediction.difference is not None
        assert prediction.difference[:4] == (0.2, 0.1, 0.3, 5)


def test_the_score_counts_decided_pairs_and_its_interval_clusters_by_source() -> None:
    alone = [Prediction(pair("x", "y", source=f"S{number}"), "a" if number % 2 else "b") for number in range(40)]
    undecided = [Prediction(pair("x", "y"), OPEN), Prediction(pair("x", "y"), NOT_TESTABLE)]
    apart = score([*alone, *undecided])
    assert (apart.decided, apart.agreeing) == (40, 20)
    together = score(
        [one._replace(pair=one.pair._replace(source=f"S{number // 8}")) for number, one in enumerate(alone)]
    )
    # sources that are all right or all wrong tell less than as many pairs of sources of their own
    clustered = [one._replace(word="a" if number < 20 else "b") for number, one in enumerate(alone)]
    five = score(
        [one._replace(pair=one.pair._replace(source=f"S{number // 10}")) for number, one in enumerate(clustered)]
    )
    assert five.high - five.low > 2 * (apart.high - apart.low)
    assert together.agreeing == apart.agreeing


def test_the_headline_names_the_best_answer_that_takes_no_run() -> None:
    found = [Prediction(pair("peri_ln", REFERENCE, "a"), "b"), Prediction(pair("peri_ln", REFERENCE, "a"), "a")]
    assert headline(found).startswith("1 of 2 (50%")
    assert "no better than with the answer 'always the newer arm', with which 2 do" in headline(found)


def test_an_ordering_that_two_sources_report_is_one_comparison() -> None:
    twice = [Prediction(pair("peri_ln", REFERENCE, source=source), "a") for source in "ST"]
    turned = Prediction(pair(REFERENCE, "peri_ln", "b"), "b")
    others = [Prediction(pair("peri_ln", REFERENCE, failure="depth"), "a"), Prediction(pair("rmsnorm", EASE), "b")]
    undecided = Prediction(pair("dyt", REFERENCE), OPEN)
    assert distinct([undecided, *twice, turned, *others]) == [twice[0], others[0]]


def test_a_rule_is_better_than_trivial_only_where_the_difference_is_significant() -> None:
    def found(wins: int) -> str:
        won = [Prediction(pair("dyt", f"arm{i}", "b", newer="a"), "b") for i in range(wins)]
        return headline([*won, *(Prediction(pair("peri_ln", REFERENCE), "a"),) * 3])

    assert "no better than" in found(5)  # 2 ** -5 on either side
    assert "more than" in found(6)


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
            assert found.failure in read_failures().failures
            assert {found.a, found.b} <= {*board_arms(), EASE}
    assert set(NULLS) == {name for name in NULLS if isinstance(NULLS[name](published()[0]), str)}


def test_a_table_of_ones_own_is_scored(board: Path, tmp_path: Path, output_of: OutputOf) -> None:
    table = tmp_path / "mine.csv"
    rows = [f"peri_ln,reference,a,{FAILURE.name}", f"peri_ln,reference,b,{FAILURE.name}"]
    table.write_text("\n".join(["a,b,outcome,failure", *rows, ""]))
    assert "1 of 2 (50%, 95 % interval" in output_of("leaderboard", board, "--transfer", table)
    scored = json.loads(output_of("leaderboard", board, "--transfer", table, "--json"))
    assert [(one["a"], one["predicted"], one["outcome"], one["agrees"]) for one in scored["pairs"]] == [
        ("peri_ln", "a", "a", True),
        ("peri_ln", "a", "b", False),
    ]


def test_a_failure_whose_control_was_not_trained_is_not_testable(board: Path) -> None:
    (found,) = predict(board, [pair("peri_ln", REFERENCE, failure="mx")])
    assert (found.word, found.reason) == (NOT_TESTABLE, "the control of MXFP8 was not trained")


def test_both_arms_need_seeds_in_common(tmp_path: Path) -> None:
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "rmsnorm", STRESSED, LR)
    tables[at] = tables[at].set_axis([900, 901, 902])
    folder = planted_board.write(tmp_path, tables)
    assert predict(folder, [pair("rmsnorm", REFERENCE)])[0].word == OPEN
