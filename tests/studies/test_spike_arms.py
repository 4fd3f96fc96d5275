"""Arms that met the same loss spikes: what they are called, their figure, the sentence on them, and the controls."""

from __future__ import annotations

from functools import cache

import pandas as pd
import pytest

import planted_claims
from drawn_texts import complaints
from lab.analysis import Records, Study, all_pairs, by_curve, judge, per_seed, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import style
from lab.report.all_figures import FIGURES
from planted_claims import ARM_KEYS, OPTIMIZER_ARMS, SOFTENED
from studies.spikes.planted import RECIPE, arm_costs

SEEDS = dict.fromkeys(range(3), True)
NAMES = (RECIPE, "beta2 0.98", "beta2 ramp", "no clip", "clip 2.5", "clip 0.3", "embedding gradient shrink")


@cache
def planted_records() -> Records:
    """Three seeds of a world in which a short memory, a tight clip and a shrunk embedding gradient soften spikes."""
    return planted_claims.records(planted_claims.cards("optimizer_arms", SEEDS))


def study(records: Records) -> Study:
    ended = points(records.runs)
    return Study(records, judge(ended), seeds := per_seed(ended), by_curve(seeds), all_pairs(ended))


def without_recipe(records: Records) -> Records:
    costs = arm_costs(records)
    is_kept = ~records.runs["id"].isin(costs.loc[costs["name"] == RECIPE, "id"])
    return records._replace(runs=records.runs[is_kept].reset_index(drop=True))


def test_an_arm_has_the_name_of_what_sets_it_apart_and_its_own_costs() -> None:
    costs = arm_costs(planted_records())
    cards = planted_records().runs.set_index("id").loc[costs["id"]]
    arms = [tuple(None if value != value else value for value in row) for row in cards[list(ARM_KEYS)].to_numpy()]
    assert costs["name"].to_list() == [NAMES[OPTIMIZER_ARMS.index(arm)] for arm in arms]
    assert costs["peak"].to_list() == pytest.approx([SOFTENED[NAMES.index(name)][0] for name in costs["name"]], abs=0.1)
    assert len(costs) == 2 * 3 * len(NAMES)


def test_a_missing_intervention_of_the_recipe_is_named() -> None:
    runs = planted_records().runs.copy()
    runs["intervention"] = (
        runs["intervention"]
        .str.replace("embedding_gradient_shrink+", "")
        .where(~runs["intervention"].str.startswith("embedding"), "z_loss")
    )
    assert set(arm_costs(planted_records()._replace(runs=runs))["name"]) == {*NAMES[:-1], "no qk layernorm"}


@pytest.mark.parametrize("answered", [{"response": "lower_lr"}, {"restarts": "quarter_lr"}], ids="-".join)
def test_a_run_that_answers_its_spike_is_no_arm(answered: dict[str, str]) -> None:
    runs = planted_records().runs.assign(**answered)
    assert arm_costs(planted_records()._replace(runs=runs)).empty


@pytest.mark.parametrize(
    "page",
    [style.SCREEN, pytest.param(style.Page(3.25, 8.0), marks=pytest.mark.slow)],
    ids=["screen", "column"],
)
def test_the_figure_ranks_arms_and_shows_changes_from_the_recipe(page: style.Page) -> None:
    with style.drawn_for(page):
        figure = FIGURES["spike_arms"](planted_records())
        assert not complaints(figure)
    peaks, change, _, _ = figure.axes[:4]
    rows = [label.get_text().replace("\n", " ") for label in peaks.get_yticklabels()]
    expected = dict(zip(NAMES, (peak for peak, _ in SOFTENED), strict=True))
    assert [expected[row] for row in rows] == sorted(expected.values())
    (marks,) = [line for line in change.get_lines() if line.get_marker() == "o"]
    shown = [row for row in rows if row != RECIPE]
    assert [float(x) for x in marks.get_xdata()] == pytest.approx([expected[row] - 2 for row in shown], abs=0.1)


def test_an_anatomy_takes_layers() -> None:
    """What moved first is the question, and losses alone do not say it."""
    records = planted_records()
    rows = [(run, 242, 242, "spike", 9.0, "") for run in records.runs["id"]]
    spikes = pd.DataFrame(rows, columns=list(records.events)).astype(records.events.dtypes)
    with pytest.raises(NothingToDrawError, match="no gradients or updates of layers"):
        FIGURES["anatomy_of_a_spike"](records._replace(events=spikes))


def test_without_the_recipe_there_is_nothing_to_change_from() -> None:
    with pytest.raises(NothingToDrawError, match="in runs of the recipe and of another arm"):
        FIGURES["spike_arms"](without_recipe(planted_records()))
