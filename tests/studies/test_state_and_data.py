"""What a spike belongs to: interactions of state and data by seed, their control, and the figure of the eight cells."""

from __future__ import annotations

import itertools
from functools import cache

import pandas as pd
import pytest

import planted_claims
from drawn_texts import complaints
from lab.analysis import Records
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import style
from lab.report.all_figures import FIGURES
from studies.claims.costs import spike_costs
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim
from studies.spikes.planted import Cell, cells, factors, factors_by_seed

INTERACTIONS = ("a_spike_takes_its_state", "a_spike_takes_its_weights", "a_spike_takes_its_moments")


@cache
def planted_records() -> Records:
    """Three seeds of a world in which data, weights and moments make a spike together, as `planted_claims` says."""
    return planted_claims.records(planted_claims.cards("state_and_data", dict.fromkeys(range(3), True)))


def test_factors_are_the_interactions_of_the_definition() -> None:
    peaks = {
        Cell(*cell): pd.Series([value, 10.0 * value])
        for cell, value in zip(itertools.product((True, False), repeat=3), (7, 1, 5, 2, 4, 3, 9, 8), strict=True)
    }
    table = factors(peaks)
    # d(s) = 7 - 1; earlier moments 5 - 2, earlier weights 4 - 3, both 9 - 8
    assert table.to_dict("list") == {"data": [6, 60], "weights": [5, 50], "moments": [3, 30], "state": [5, 50]}


def test_factors_by_seed_find_what_was_planted() -> None:
    table = factors_by_seed(planted_records(), "peak")
    assert len(table) == 6  # of two bursts, three seeds
    assert table.mean().to_dict() == pytest.approx({"data": 3, "weights": 2, "moments": 2, "state": 2.8}, abs=0.05)


def test_a_seed_without_one_of_its_cells_is_left_out() -> None:
    records = planted_records()
    first = cells(records).index[0]
    whole = records.runs["id"] != first
    assert len(factors_by_seed(records._replace(runs=records.runs[whole].reset_index(drop=True)), "peak")) == 5


def test_ordinary_batches_have_an_onset_where_the_burst_would_begin() -> None:
    records = planted_records()
    ordinary = records.runs.loc[records.runs["bad_batches.fraction"] == 0, "id"]
    assert (records.events.loc[records.events["id"].isin(ordinary), "kind"] == "rewind_weights").all()
    assert spike_costs(records)["peak"].notna().all()


@pytest.mark.parametrize("name", INTERACTIONS)
def test_no_interaction_is_reproduced_where_the_burst_raises_no_loss(name: str) -> None:
    """The batches lower the loss in every earlier state and leave it as it is in that of the spike."""
    runs = planted_claims.cards("state_and_data", dict.fromkeys(range(3), True))
    for run, recorded in runs:
        is_earlier = run["response.rewind_weights"] + run["response.rewind_moments"] > 0
        peak = -0.5 if run["bad_batches.fraction"] and is_earlier else 0.0
        recorded["val_loss", ""] = (5.6, 2.0, 2.0, 2.0 + peak)
    verdict = judge_claim(CLAIMS[name], [Evidence("state_and_data", planted_claims.records(runs))])
    assert verdict.verdict == "not testable here", verdict
    assert verdict.low > 0.4
    assert "the control shows no effect" in verdict.reason


@pytest.mark.parametrize(
    "page",
    [style.SCREEN, pytest.param(style.Page(3.25, 8.0), marks=pytest.mark.slow)],
    ids=["screen", "column"],
)
def test_the_figure_of_the_eight_cells_can_be_read(page: style.Page) -> None:
    with style.drawn_for(page):
        figure = FIGURES["state_and_data"](planted_records())
        assert not complaints(figure)
    peaks = figure.axes[0]
    marks = [line for line in peaks.get_lines() if line.get_marker() in ("o", "s")]
    burst, ordinary = ([float(x) for x in line.get_xdata()] for line in marks)
    assert burst == pytest.approx([3.0, 1.3, 1.0, 0.5], abs=0.05)
    assert ordinary == pytest.approx([0.0, 0.3, 0.0, 0.3], abs=0.05)
    labels = [label.get_text().replace("\n", " ") for label in peaks.get_yticklabels()]
    state_names = ["weights and moments of the spike", "earlier weights", "earlier moments"]
    assert labels == [*state_names, "earlier weights and moments"]
    assert "Rare tokens add 3.0" in figure.caption


def test_an_ablation_is_no_remedy_on_the_leaderboard() -> None:
    with pytest.raises(NothingToDrawError, match="no burst is in runs with two responses"):
        FIGURES["responses"](planted_records())
