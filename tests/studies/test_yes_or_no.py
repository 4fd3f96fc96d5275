"""The word with which a page answers the question of its sweep."""

from __future__ import annotations

import math

import pytest

from studies.claims.judgement import yes_or_no
from studies.claims.registry import CLAIMS
from studies.claims.scoreboard import ScoreboardRow
from studies.claims.verdicts import Verdict

CLAIM = CLAIMS["qk_layernorm_lowers_sensitivity"]


def row(verdict: str, *, denies: bool = False, folder: str = "runs") -> ScoreboardRow:
    sides = {"affirms": (), "denies": ("smoke",)} if denies else {"affirms": ("smoke",), "denies": ()}
    judged = Verdict(verdict, 0.2, 0.1, 0.3, 5, "so for 1k, not for 2k; tried: all", folder, "smoke")
    return ScoreboardRow(CLAIM._replace(**sides), judged)


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [
        (["reproduced"], "Yes"),
        (["contradicted"], "No"),
        (["no effect"], "No"),
        (["in part"], "In part"),
        (["inconclusive"], "Undecided"),
        (["not testable here"], "Undecided"),
        (["reproduced", "contradicted"], "In part"),
        (["reproduced", "inconclusive"], "In part"),
        (["contradicted", "inconclusive"], "Undecided"),
        (["contradicted", "contradicted"], "No"),
    ],
)
def test_verdicts_of_the_claims_that_affirm_make_the_word(verdicts: list[str], word: str) -> None:
    assert yes_or_no([row(verdict) for verdict in verdicts], ["smoke"])[0] == word


def test_a_claim_that_denies_turns_the_word_around() -> None:
    assert yes_or_no([row("reproduced", denies=True)], ["smoke"])[0] == "No"
    word, text = yes_or_no([row("contradicted", denies=True)], ["smoke"])
    assert (word, text[:27]) == ("Yes", "It is not the case that LR ")


def test_each_claim_is_told_with_its_effect_and_seeds() -> None:
    _, sentence = yes_or_no([row("in part")], ["smoke"])
    assert "(0.2 [0.1, 0.3] nats/token, 5 seeds): so for 1k, not for 2k." in sentence
    few = ScoreboardRow(CLAIM, row("inconclusive").verdict._replace(effect=math.nan, seeds=1))
    assert "(1 seed)" in yes_or_no([few], ["smoke"])[1]


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((0.1333, 0.0903, 0.1765), "0.133 [0.0903, 0.176] nats/token"),
        ((-0.0002, -0.019, 0.0186), "-0.0002 [-0.019, 0.0186] nats/token"),
        ((0.0, 0.0, 0.0), "0 [0, 0] nats/token"),
        ((0.5, math.nan, math.nan), "0.5 nats/token"),
    ],
)
def test_an_answer_has_its_numbers_as_the_scoreboard_has_them(numbers: tuple[float, float, float], shown: str) -> None:
    effect, low, high = numbers
    judged = row("reproduced")
    verdict = judged.verdict._replace(effect=effect, low=low, high=high)
    told = judged._replace(verdict=verdict)
    assert told.effect == shown
    assert f"({shown}, 5 seeds)" in yes_or_no([told], ["smoke"])[1]


def test_without_a_claim_that_answers_there_is_no_word() -> None:
    assert yes_or_no([row("reproduced")], ["my_sweep"]) == ("", "")
    assert yes_or_no([row("not run", folder="")], ["smoke"]) == ("", "")
