"""Answers of sweeps: each asks of its own quantity, and records that lack it get an answer all the same."""

from __future__ import annotations

import math

import pytest

import planted
import planted_claims
import planted_damage
from lab.analysis import Study, contrasts
from lab.analysis.contrasts import ANY_SWEEP
from lab.analysis.sensitivity import study_of
from lab.core import shipped
from lab.report.replies import MEASURES, answer
from sampling import few
from studies.claims.evidence import Evidence
from studies.claims.judgement import yes_or_no
from studies.claims.scoreboard import judge_all

ASKED = sorted({sweep for measure in MEASURES for sweep in measure.asked_by} - {ANY_SWEEP})
RECORDS = {
    "curves": list(planted.cards()),
    "one run": list(planted.cards(arms=planted.BOTH[:1], widths=(32,), lrs=(1e-2,), seeds=(0,))),
    "one arm and size": list(planted.cards(arms=planted.BOTH[:1], widths=(32,))),
    "one learning rate": list(planted.cards(lrs=(1e-2,))),
    "diverged": [
        card | {"status": "diverged", "diverged_at": 9, "final_val_loss": math.nan} for card in planted.cards()
    ],
}


@pytest.fixture(scope="module")
def studies() -> dict[str, Study]:
    return {name: study_of(planted.records(runs)) for name, runs in RECORDS.items()}


def test_measures_name_sweeps_of_the_lab() -> None:
    assert set(ASKED) <= set(shipped.sweeps())


@pytest.mark.parametrize("sweep", few(["my_sweep", *ASKED], 2))
def test_records_without_what_a_question_asks_of_get_an_answer(sweep: str, studies: dict[str, Study]) -> None:
    for name, study in studies.items():
        said = answer(study, [sweep])
        assert said.text.endswith("."), name
        if said.contrasts:
            shown = contrasts.table(said.contrasts)
            assert len(shown) == len(said.contrasts[0].levels)


def test_a_question_is_answered_with_the_quantity_that_it_names(studies: dict[str, Study]) -> None:
    curves = studies["curves"]
    largest, best, usual = (answer(curves, [name]).contrasts[0] for name in ("qk_layernorm", "mup", "my_sweep"))
    assert largest.measure.name == "Largest stable learning rate"
    assert best.measure.name == "Change of the best learning rate"
    assert usual.measure.name == "LR sensitivity"
    on, off = (largest.levels[arm]["at 98.6k parameters"] for arm in (planted.ON_LABEL, planted.OFF_LABEL))
    # of planted curves at width 64, the loss first exceeds the best one + 0.3 between 3e-2 and 1e-1
    assert 3e-2 < 10**off.mean < 1e-1 < 10**on.mean


def world(sweep: str, *causes: str, good: bool = True) -> Study:
    """A planted sweep in which every claim about it holds, or none does, or what is said to have effects has none."""
    return study_of(planted_claims.records(planted_claims.cards(sweep, dict.fromkeys(range(4), good), causes)))


@pytest.mark.parametrize(
    ("sweep", "word", "otherwise"),
    [
        pytest.param("qk_layernorm", "Yes", "Undecided", marks=pytest.mark.slow),
        ("pointwise_attention", "No", "Yes"),
    ],
)
def test_planted_worlds_get_the_true_answer(sweep: str, word: str, otherwise: str) -> None:
    for good, expected in ((True, word), (False, otherwise)):
        study = world(sweep, good=good)
        rows = judge_all([Evidence(sweep, study.records)])
        said = answer(study, [sweep], *yes_or_no(rows, [sweep]))
        assert said.word == expected
        assert str(said).startswith(f"{expected}: ")
        assert said.contrasts


@pytest.mark.parametrize(
    ("sweep", "arm", "difference"),
    [
        ("ledgers", "restarts opt_175b", -1.8),
        ("learned_positions", "init sinusoidal", -2.0),  # decades
        ("repeated_bursts", "20 bursts", planted_damage.DAMAGED[3] - planted_damage.DAMAGED[0]),
        ("fp16_sums", "gradient sum fp16", math.log10(2048 / 16384)),
        ("optimizer_arms", "clip 0.3", -1.0),
    ],
)
def test_differences_are_those_that_were_planted(sweep: str, arm: str, difference: float) -> None:
    (one,) = answer(world(sweep), [sweep]).contrasts
    assert one.differences[arm][one.columns[-1]].mean == pytest.approx(difference, abs=0.1)
    assert one.reference not in one.differences


@pytest.mark.slow
def test_questions_of_batches_are_answered_with_laws_of_the_batch() -> None:
    (critical,) = answer(world("steps_to_target"), ["steps_to_target"]).contrasts
    assert [round(10 ** critical.levels[name][""].mean) for name in ("SGD", "Adam")] == [33, 132]
    power, loss = answer(world("learning_rate_and_batch"), ["learning_rate_and_batch"]).contrasts
    losses = [loss.levels[budget][""].mean for budget in ("equal examples", "equal steps")]
    assert losses == pytest.approx([0.2, -0.2], abs=0.02)
    assert set(power.levels) == {"equal examples", "equal steps"}
    (noise,) = answer(world("noise_scale"), ["noise_scale"]).contrasts
    assert noise.columns == ["in the first tenth", "in the last tenth"]
    assert all(levels["in the last tenth"].mean > levels["in the first tenth"].mean for levels in noise.levels.values())
