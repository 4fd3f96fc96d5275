"""Loss spikes of a run's own: which count, what moves before them, and which alarms find them, on planted records."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import planted_claims
from drawn_texts import complaints
from lab.analysis import Records, judge, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import style
from lab.analysis.sensitivity import study_of
from lab.records import store
from lab.report.all_figures import FIGURES
from lab.report.replies import answer
from planted_own_spikes import OWN as ONSET
from planted_own_spikes import STEPS
from studies.claims.effects import Qualified
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim
from studies.spikes.own_effects import excess_share_of_spikes
from studies.spikes.own_spikes import (
    APART,
    OWN,
    SIGNALS,
    STAGES,
    alarm_traits,
    find_spikes,
    lead,
    measured,
    score_own,
    spike_traits,
    stages,
)


@cache
def world(sweep: str = "own_spikes", *, good: bool = True) -> Records:
    return planted_claims.records(planted_claims.cards(sweep, dict.fromkeys(range(2), good)))


def changed(records: Records, probe: str, change: float) -> Records:
    """The records with a probe's values at the spike changed by so much."""
    metrics = records.metrics.copy()
    at = (metrics["probe"] == probe) & metrics["step"].between(ONSET, ONSET + 3)
    metrics.loc[at, "value"] += change
    return records._replace(metrics=metrics)


def test_a_spike_is_where_it_was_planted_and_its_control_is_far_from_it() -> None:
    spikes = find_spikes(measured(world()))
    assert len(spikes) == 2 * 2 * 2  # without and with qk-layernorm, two decays of the first moment, two seeds
    for spike in spikes:
        assert (spike.step, spike.end) == (ONSET, ONSET + 4)
        assert spike.size == pytest.approx(0.5, abs=0.02)
        assert spike.held_out == pytest.approx(0.5, abs=0.02)
        assert spike.control >= spike.end + APART


def test_a_spike_of_its_batch_alone_does_not_count() -> None:
    """The loss on fixed held-out rows does not rise with it."""
    assert not find_spikes(measured(changed(world(), "val_loss", -0.5)))
    assert find_spikes(measured(changed(world(), "val_loss", -0.4)))


@pytest.mark.parametrize("column", [{"bad_batches": "rare_tokens"}, {"response": "lower_lr"}, {"probes.every": 2}])
def test_runs_with_planted_data_with_a_response_or_with_gaps_are_left_out(column: dict[str, object]) -> None:
    assert not measured(world()._replace(runs=world().runs.assign(**column)))


def test_signals_lead_by_the_steps_that_were_planted() -> None:
    series = next(iter(measured(world()).values()))
    spiking = max(measured(world()).values(), key=lambda each: float(np.max(each["grad_norm", ""])))
    for name in ("embedding_gradient", "embedding_update", "attention_update"):
        assert lead(spiking[SIGNALS[name]], ONSET) == 6
    assert math.isnan(lead(spiking[SIGNALS["mlp_gradient"]], ONSET))
    assert all(math.isnan(lead(each, STEPS - 50)) for each in spiking.values())
    assert math.isnan(lead(np.full(STEPS, np.nan), ONSET))
    assert len(series["train_loss", ""]) == STEPS


@pytest.mark.parametrize(
    ("stage", "key", "part"),
    [
        ("small_updates", ("update_rms", "embedding"), slice(500, 580)),
        ("vanished_gradient", ("grad_rms", "embedding"), slice(580, 612)),
        ("gradient_returns", ("grad_rms", "embedding"), slice(610, 640)),
        ("two_humps", ("update_bimodality", "embedding"), slice(610, 640)),
    ],
)
def test_each_stage_fails_without_what_it_says(stage: str, key: tuple[str, str], part: slice) -> None:
    spiking = max(measured(world()).values(), key=lambda each: float(np.max(each["grad_norm", ""])))
    assert all(stages(spiking, ONSET, 0.95).values())
    other = {"small_updates": 0.6, "vanished_gradient": 5e-3, "gradient_returns": 1e-4, "two_humps": 0.33}[stage]
    value_n = spiking[key].copy()
    value_n[part] = other
    held = stages({**spiking, key: value_n}, ONSET, 0.95)
    assert not held[stage]
    if stage != "vanished_gradient":
        assert [name for name in STAGES if not held[name]] == [stage]


def test_a_second_moment_that_grows_does_not_follow() -> None:
    spiking = max(measured(world()).values(), key=lambda each: float(np.max(each["grad_norm", ""])))
    growing = np.geomspace(1e-5, 1e-2, STEPS)
    assert not stages({**spiking, ("grad_rms", "embedding"): growing}, ONSET, 0.95)["moments_follow"]


def test_traits_count_spikes_and_like_steps_apart() -> None:
    traits = spike_traits(world()).sum()
    assert traits["spikes"] == traits["controls"] == 8
    assert [traits[stage] for stage in (*STAGES, "all_stages")] == [8] * 6
    assert [traits[f"{stage}_control"] for stage in (*STAGES, "all_stages")] == [0] * 6
    rates = spike_traits(world())["rate"]
    assert sorted(set(rates)) == [0, 25]  # one in the 400 steps from 500 on


def test_alarms_are_scored_on_the_spikes_themselves() -> None:
    scores = score_own(world())
    hits = scores[scores["bad_batches"] == OWN]
    assert set(hits["kind"]) == {"gradient_spike", "update_rms"}
    assert hits["hit"].all()
    assert set(hits["lead"]) == {6}
    assert scores["false_alarms"].sum() == 0
    # from step 500 on without 40 steps before the spike and 20 after its end
    clean = scores.loc[scores["bad_batches"] != OWN, "clean_steps"]
    assert set(clean) == {400 - 40 - 4 - 20}
    rates = world().runs.set_index("id")["optimizer.lr"]
    assert set(rates[scores["id"]]) == {rates.max()}


def test_false_alarms_are_those_far_from_any_spike() -> None:
    traits = alarm_traits(world("own_spike_curvature", good=False))
    assert traits[["gradient_spike.hits", "curvature.hits", "curvature.first"]].to_numpy().max() == 0
    assert set(traits["gradient_spike.false"]) == set(traits["curvature.false"]) == {1}
    good = alarm_traits(world("own_spike_curvature"))
    assert set(good["curvature.first"]) == set(good["spikes"]) == {1}
    assert set(good["curvature.lead"]) == {8}


def test_shares_of_spikes_and_of_like_steps_are_of_their_own_counts() -> None:
    """Two arms have 8 spikes together, and only 4 like steps without one."""
    counts = {"spikes": 4.0, "controls": 2.0, "rate": 20.0}
    counts |= dict.fromkeys(STAGES, 3.0) | {f"{stage}_control": 1.0 for stage in STAGES}
    arm: Any = SimpleNamespace(top=0.1, lrs=(0.1,), column=lambda lr, traits, column: pd.DataFrame([[counts[column]]]))
    effect = excess_share_of_spikes(arm, arm, traits=STAGES)
    assert isinstance(effect, Qualified)
    assert effect.table.to_numpy().tolist() == [[6 / 8 - 2 / 4] * len(STAGES)]


@pytest.mark.slow
def test_claims_on_what_no_run_recorded_are_open() -> None:
    folder = [Evidence("own_spikes", world())]
    for name in ("own_spikes_pass_the_limit_of_stability", "curvature_warns_before_updates_of_own_spikes"):
        verdict = judge_claim(CLAIMS[name], folder)
        assert verdict.verdict in ("not run", "inconclusive"), name
        assert verdict.seeds == 0
    metrics = world().metrics
    bare = world()._replace(metrics=metrics[metrics["where"] != "embedding"])
    of_stages = ("five_stages_go_before", "the_gradient_of_the_embedding_returns")
    for name in ("first_layers_move_first", *of_stages):
        assert judge_claim(CLAIMS[name], [Evidence("own_spikes", bare)]).seeds == 0, name


def test_spikes_at_one_learning_rate_say_nothing_of_a_lower_one() -> None:
    records = world()
    high = records.runs[records.runs["optimizer.lr"] == records.runs["optimizer.lr"].max()]
    verdict = judge_claim(CLAIMS["spikes_grow_rarer_at_a_lower_rate"], [Evidence("own_spikes", records.of(high["id"]))])
    assert verdict.seeds == 0


@pytest.mark.parametrize("page", [style.SCREEN])
@pytest.mark.parametrize("name", ["own_spikes", "alarms_on_own_spikes"])
def test_figures_of_own_spikes_can_be_read(name: str, page: style.Page) -> None:
    with style.drawn_for(page):
        assert not complaints(FIGURES[name](world(), judge(points(world().runs))))


@pytest.mark.slow
def test_a_pruned_folder_has_the_same_traits_scores_and_figures(tmp_path: Path) -> None:
    cards = planted_claims.cards("own_spikes", {0: True})
    rows = planted_claims.records(cards).metrics
    other = rows[rows["where"] == "block0.mlp_up"].assign(where="block0.attention.value", probe="update_rms")
    rows = pd.concat([rows, other])
    store.open_folder(tmp_path / "own", "eager")
    for card, _ in cards:
        values = rows.loc[rows["id"] == card["id"], ["step", "probe", "where", "value"]].itertuples(index=False)
        store.write_run(tmp_path / "own", card, [tuple(value) for value in values])
    store.gather(tmp_path / "own")
    whole = store.read(tmp_path / "own")
    subprocess.run([sys.executable, Path(__file__).parents[2] / "results/prune.py", tmp_path / "own"], check=True)
    less = store.read(tmp_path / "own")
    assert len(less.metrics) < 0.8 * len(whole.metrics)
    high = whole.runs.loc[whole.runs["optimizer.lr"] == whole.runs["optimizer.lr"].max(), "id"]
    counts = ["rate", "spikes", "controls", "size", "held_out"]
    traits, usual = spike_traits(less), spike_traits(whole)
    pd.testing.assert_frame_equal(traits.loc[high, usual.columns], usual.loc[high])
    pd.testing.assert_frame_equal(traits[counts], usual[counts])
    low = less.metrics[~less.metrics["id"].isin(high)]
    assert set(low["probe"]) == {"train_loss", "val_loss"}
    pd.testing.assert_frame_equal(score_own(less), score_own(whole))
    runs = judge(points(whole.runs))
    drawn = [
        [
            np.asarray(line.get_ydata()).tolist()
            for axes in FIGURES["own_spikes"](each, runs).axes
            for line in axes.lines
        ]
        for each in (whole, less)
    ]
    assert drawn[0] == drawn[1]


def test_without_spikes_there_is_nothing_to_draw() -> None:
    calm = changed(world(), "val_loss", -0.5)
    with pytest.raises(NothingToDrawError, match="no run without bad data had a spike"):
        FIGURES["own_spikes"](calm, judge(points(calm.runs)))


def test_the_question_is_answered_by_the_rate_of_spikes() -> None:
    study = study_of(world())
    assert Evidence("own_spikes", study.records).summaries
    (said,) = answer(study, ["own_spikes"]).contrasts
    assert said.measure.name == "Loss spikes in 10,000 steps"
    levels = next(iter(said.levels.values()))
    assert [round(level.mean) for level in levels.values()] == [0, 25]
