"""The study of low precision on planted sweeps: its figures show what was planted, and its question has an answer."""

from __future__ import annotations

import pytest

import planted_claims
import planted_low_precision
from drawn_texts import complaints
from lab.analysis import Records, judge, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.sensitivity import study_of
from lab.report.all_figures import FIGURES
from lab.report.replies import answer
from studies.claims.evidence import Evidence
from studies.claims.judgement import yes_or_no
from studies.claims.registry import CLAIMS
from studies.claims.scoreboard import judge_all
from studies.claims.verdicts import judge_claim
from studies.precision.effects import spike_rate


def world(sweep: str, *, good: bool = True) -> Records:
    return planted_claims.records(planted_claims.cards(sweep, dict.fromkeys(range(4), good)))


def test_spikes_are_counted_in_1000_updates() -> None:
    """Planted are 1, 3 and 5 in 400 updates, by loss scale."""
    records = world("loss_scale")
    found = spike_rate(records).groupby(records.runs.set_index("id")["loss_scale.init"]).mean()
    assert found.to_dict() == pytest.approx({2.0**10: 2.5, 1.0: 7.5, 2.0**-9: 12.5})


def test_spikes_are_compared_at_the_two_highest_of_three_learning_rates() -> None:
    """There rounded gains bring three more; at the lowest they bring four fewer."""
    runs = []
    for run, recorded in planted_claims.cards("low_precision", dict.fromkeys(range(3), True)):
        if (lr := run["optimizer.lr"]) >= 0.1:
            at_lowest, gains = lr == 0.1, run["norm_gains"] == "rounded"
            made = planted_low_precision.spikes((0 if gains else 4) if at_lowest else (4 if gains else 1))
            runs.append((run | made.pop(("columns", "")), recorded | made))
    claim = CLAIMS["quantized_gains_raise_the_number_of_spikes"]
    verdict = judge_claim(claim, [Evidence("low_precision", planted_claims.records(runs))])
    assert verdict.effect == pytest.approx(3 / 400 * 1000)


def test_the_figure_of_loss_scales_shows_the_spikes_of_each() -> None:
    records = world("loss_scale")
    figure = FIGURES["spikes_by_loss_scale"](records, judge(points(records.runs)))
    assert not complaints(figure)
    spikes, zeros = figure.axes[:2]
    rows = [label.get_text().replace("\n", " ") for label in spikes.get_yticklabels()]
    assert rows == ["loss scale 2^10", "loss scale 2^0", "loss scale 2^-9"]
    for axes, expected in ((spikes, [2.5, 7.5, 12.5]), (zeros, [0.1, 0.3, 0.5])):
        drawn = [sorted(map(float, line.get_xdata())) for line in axes.get_lines() if len(line.get_xdata()) == 3]
        assert any(each == pytest.approx(expected, rel=0.01) for each in drawn)


@pytest.mark.slow
def test_the_figure_of_faults_shows_what_saturates() -> None:
    records = world("low_precision")
    figure = FIGURES["rounding_faults"](records, judge(points(records.runs)))
    assert not complaints(figure)
    labels = {axes.get_ylabel().replace("\n", " ") for axes in figure.axes}
    assert {"gradients that round to zero", "saturated entries", "gains with one number"} <= labels


@pytest.mark.parametrize("name", ["rounding_faults", "spikes_by_loss_scale"])
def test_records_of_another_sweep_have_nothing_to_draw(name: str) -> None:
    records = world("qk_layernorm")
    with pytest.raises(NothingToDrawError, match="nothing to draw: "):
        FIGURES[name](records, judge(points(records.runs)))


@pytest.mark.parametrize(("good", "word"), [(True, "Yes"), (False, "No")])
def test_the_question_of_loss_scales_is_answered_by_the_number_of_spikes(good: bool, word: str) -> None:
    records = world("loss_scale", good=good)
    rows = judge_all([Evidence("loss_scale", records)])
    said = answer(study_of(records), ["loss_scale"], *yes_or_no(rows, ["loss_scale"]))
    assert said.word == word
    assert said.contrasts[0].measure.name == "Loss spikes in 1000 updates"


def test_the_question_of_formats_is_answered_by_the_instability_part_of_each() -> None:
    records = world("low_precision")
    said = answer(study_of(records), ["low_precision"])
    (one,) = said.contrasts
    assert one.reference == "fp32"
    assert set(one.differences) == {"fp8_current", "fp8_delayed", "mxfp8", "mxfp8, rounded gains"}
    changes = {column: cell.mean for column, cell in one.differences["fp8_current"].items()}
    assert changes["with GELU alone"] > 0.1 > abs(changes["with SwiGLU alone"])


def test_the_question_of_attention_compares_formats() -> None:
    said = answer(study_of(world("attention_products")), ["attention_products"])
    (one,) = said.contrasts
    assert one.reference == "fp32"
    for name in ("fp8_current", "mxfp8", "mxfp4", "nvfp4"):
        kept, rounded = (one.differences[arm]["with GELU alone"] for arm in (name, f"{name}, rounded attention"))
        assert rounded.mean > kept.mean + 0.05
        assert kept.mean > 0.05
