"""What the scores of a recorder's quantities are held against: chance, and intervals of few spikes and alarms."""

from __future__ import annotations

import pandas as pd
import pytest
import scipy.stats

import score_recorder


def row(**numbers: float) -> pd.Series:
    return pd.Series({"led": 0.6, "of": 60, "found": 0.8, "false": 30.0, "calm_steps": 10_000, **numbers})


def test_alarms_lead_by_chance_as_often_as_one_falls_into_the_steps_before_a_spike() -> None:
    assert score_recorder.chance_of_leading(0.0) == 0
    each_step = score_recorder.chance_of_leading(score_recorder.PER_STEPS)  # an alarm at nearly every step
    assert each_step == pytest.approx(1)
    rare = score_recorder.chance_of_leading(1.0)
    assert rare == pytest.approx(score_recorder.WARNING / score_recorder.PER_STEPS, rel=0.01)


def test_the_interval_of_false_alarms_narrows_with_more_steps_and_holds_the_counts_that_may_be() -> None:
    low, high = score_recorder.false_alarms(row())
    assert scipy.stats.poisson.sf(29, low) == pytest.approx(0.025)  # 30 or more
    assert scipy.stats.poisson.cdf(30, high) == pytest.approx(0.025)
    longer = score_recorder.false_alarms(row(calm_steps=1_000_000))
    assert low < longer[0] < 30 < longer[1] < high
    assert score_recorder.false_alarms(row(false=0.0))[0] == 0


def test_a_quantity_may_earn_an_alarm_while_its_intervals_reach_both_limits() -> None:
    assert score_recorder.earns(row(false=20.0))
    assert not score_recorder.earns(row(false=24.0))
    assert score_recorder.may_earn(row(false=24.0))
    assert not score_recorder.may_earn(row(false=24.0, calm_steps=1_000_000))
    assert score_recorder.may_earn(row(led=0.4, false=1.0))
    assert not score_recorder.may_earn(row(led=0.2, false=1.0))


def test_the_page_has_the_table_of_the_committed_scores() -> None:
    page = score_recorder.HOME / "docs" / "record_your_run.md"
    text = page.read_text(encoding="utf-8")
    assert score_recorder.quote(text) == text
    open_for = text.partition("The intervals leave it open for: ")[2].partition(".")[0]
    assert {"`update_ratio`", "`grad_norm`"} == set(open_for.split(", "))
