"""Remedies for spikes of a run's own: repeated rewinds leave out more, and spikes are counted as training met them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

import planted_claims
import planted_own_spikes
from drawn_texts import complaints
from lab.analysis import Records, judge, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.spikes.trend import loss_spikes
from lab.report.all_figures import FIGURES
from lab.responses.response import Action, Memory, Reading, RewindAndSkip
from lab.training.fleet import Fleet
from lab.training.identity import columns
from lab.training.loop import train
from small import configs
from studies.claims.costs import NONE
from studies.spikes.own_spikes import NO_REMEDY, REMEDY_NAMES, SHRUNK_NAME, remedy_names, remedy_traits, training_losses

SPIKE = 9  # the step whose loss is said to be that of a spike

REMEDIES = [NO_REMEDY, *(REMEDY_NAMES[key] for key in ("same_batches", "skip", "skip_and_lower", "lower", "restart"))]
REMEDIES += [REMEDY_NAMES["restart_newest"], SHRUNK_NAME]


@dataclass(frozen=True)
class Spiking(RewindAndSkip):
    """A response to which the loss of one step is a spike, each time that training meets it."""

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        return super().act(reading._replace(spike_begins=reading.step == SPIKE), memory)


def events(*, only_new: bool, skip: int) -> list[tuple[str, int, int, float]]:
    """What happened in a run that goes back from one step again and again: kind, step, batch and value."""
    settings = ("response=rewind_and_skip", "response.rewind=4", "response.snapshot_every=6", "steps=16")
    made = Fleet(configs("seed=0", shared=(*settings, "schedule.warmup=2", "optimizer.clip=inf")))
    assert made.control
    usual = made.control.responses[0]
    made.control.responses[0] = Spiking(**{**vars(usual), "only_new": only_new, "skip": skip})
    for _ in train(made):
        pass
    return [(kind, step, batch, value) for step, batch, kind, value, _ in made.control.logs[0].events]


@pytest.mark.slow
def test_a_run_that_leaves_out_what_it_met_meets_no_batch_twice() -> None:
    """It goes back from step 10 to step 6, where batch 6 came next at first."""
    rewinds = [event for event in events(only_new=True, skip=5) if event[0] == "skip_batches"]
    assert rewinds[0] == ("skip_batches", 6, 6, 5)  # to batch 11
    # at the second spike batches 11 to 14 have been met
    assert [batch + skip for _, _, batch, skip in rewinds] == [11, 15, 19]


@pytest.mark.slow
def test_a_twin_meets_the_same_batches_from_the_same_snapshot() -> None:
    rewinds = [event for event in events(only_new=False, skip=5) if event[0] == "skip_batches"]
    assert [batch + skip for _, _, batch, skip in rewinds] == [11, 11, 11]
    assert not [event for event in events(only_new=False, skip=0) if event[0] == "skip_batches"]


def test_runs_that_do_not_ask_for_it_keep_their_columns() -> None:
    key = "response.only_new"
    usual, more = configs(f"{key}=false", f"{key}=true", shared=("response=rewind_only",))
    assert key not in columns(usual)
    assert columns(more).items() - columns(usual).items() == {(key, True)}


def planted(good: bool) -> Records:
    return planted_claims.records(planted_claims.cards("own_spike_remedies", {0: good, 1: good}))


@pytest.mark.parametrize("good", [True, False])
def test_spikes_are_counted_as_often_as_training_met_them(good: bool) -> None:
    """Per update that was trained, those that were gone back over included. Of runs that answer none they are found in
    the loss.
    """
    records = planted(good)
    names = remedy_names(records.runs.to_dict("records"))
    traits = remedy_traits(records).assign(name=names).drop_duplicates("name").set_index("name")
    told = planted_own_spikes.GOOD_REMEDIES if good else planted_own_spikes.BAD_REMEDIES
    for name, (spikes, returns, _) in zip(REMEDIES, told, strict=True):
        row = traits.loc[name]
        goes_back = name not in (NO_REMEDY, REMEDY_NAMES["lower"], SHRUNK_NAME)
        trained = planted_own_spikes.STEPS + goes_back * (planted_own_spikes.BEFORE + 1)
        assert row["more"] == spikes - 1, name
        assert row["rate"] == pytest.approx(1000 * (spikes - 1) / (trained - planted_own_spikes.FIRST)), name
        assert row["overall"] == pytest.approx(1000 * spikes / trained), name
        assert (row["answered"], row["returned"]) == (goes_back, goes_back and returns), name


def test_runs_that_answer_none_are_counted_by_the_rule_that_answers() -> None:
    """A rise that is no trigger counts in no arm, though it is a loss spike: no response would have answered it."""
    records = planted(True)
    metrics = records.metrics
    is_late = (metrics["probe"] == "train_loss") & metrics["step"].between(700, 702)
    raised = records._replace(metrics=metrics.assign(value=metrics["value"].where(~is_late, metrics["value"] + 0.09)))
    run = str(metrics.loc[is_late, "id"].iloc[0])
    loss_n = training_losses(raised)[run]
    assert any(span.first == 700 for span in loss_spikes(np.arange(len(loss_n)), loss_n))
    pd.testing.assert_frame_equal(remedy_traits(raised), remedy_traits(records))


def test_a_run_without_a_spike_has_none_to_follow() -> None:
    records = planted(True)
    traits = remedy_traits(records._replace(events=records.events.head(0)))
    answering = records.runs.loc[records.runs["response"] != NONE, "id"]
    assert (traits.loc[answering, ["more", "rate", "overall", "answered"]] == 0).all(axis=None)


def test_runs_with_bad_data_or_unmeasured_ones_do_not_count() -> None:
    records = planted(True)
    shown = records.runs.assign(**{"bad_batches": "rare_tokens"})
    assert remedy_traits(records._replace(runs=shown)).empty
    rare = remedy_traits(records._replace(runs=records.runs.assign(**{"probes.every": 25})))
    assert set(rare.index) == set(records.runs.loc[records.runs["response"] != NONE, "id"])


def test_the_figure_ranks_remedies_below_the_run_without_one() -> None:
    records = planted(True)
    drawn = FIGURES["own_spike_remedies"](records, judge(points(records.runs)))
    assert not complaints(drawn)
    rows = [label.get_text().replace("\n", " ") for label in drawn.axes[0].get_yticklabels()]
    more = next(line for line in drawn.axes[0].get_lines() if line.get_marker() == "o").get_xdata()
    assert rows[0] == NO_REMEDY
    assert sorted(rows) == sorted(REMEDIES)
    told = dict(zip(REMEDIES, planted_own_spikes.GOOD_REMEDIES, strict=True))
    assert dict(zip(rows, map(float, more), strict=True)) == {name: told[name][0] - 1 for name in REMEDIES}


@pytest.mark.slow
def test_planted_spikes_stand_beside_the_models_own() -> None:
    own, bursts = (
        planted_claims.cards(sweep, {0: True, 1: True}) for sweep in ("own_spike_remedies", "spike_responses")
    )
    records = planted_claims.records([*own, *bursts])
    drawn = FIGURES["own_spike_remedies"](records, judge(points(records.runs)))
    assert not complaints(drawn)
    keys = [text.get_text() for text in drawn.key_texts]
    assert {"the model's own", "conflicting labels", "rare tokens"} <= set(keys)
    with pytest.raises(NothingToDrawError):
        FIGURES["own_spike_remedies"](planted_claims.records(bursts), judge(points(records.runs)))
