"""Remedies for spikes of a run's own: repeated rewinds leave out more, and spikes are counted as training met them."""

from __future__ import annotations

import pytest

import planted_claims
import planted_own_spikes
from drawn_texts import complaints
from lab.analysis.curves import points
from lab.analysis.events.costs import NONE
from lab.analysis.sensitivity import judge
from lab.records.store import Records
from lab.responses.between_steps import RewindAndSkip
from lab.responses.response import Memory, Reading
from lab.studies.figures import FIGURES
from lab.studies.spikes.remedies import NAMES, NO_REMEDY, SHRUNK_NAME, remedy_names, remedy_traits
from lab.training.identity import columns
from small import configs

REMEDIES = [NO_REMEDY, *(NAMES[key] for key in ("same_batches", "skip", "skip_and_lower", "lower", "restart"))]
REMEDIES += [NAMES["restart_newest"], SHRUNK_NAME]


def skipped(response: RewindAndSkip, *steps: int) -> list[int]:
    """Batches that each of these spikes leaves out; calm updates between them do not count."""
    memory, found = Memory(), list[int]()
    for step in steps:
        assert response.act(Reading(step - 1, 2.0, 1.0, False), memory) is None
        action = response.act(Reading(step, 3.0, 1.0, True), memory)
        found.append(action.skip if action else 0)
    return found


def test_a_spike_soon_after_the_last_leaves_out_more() -> None:
    response = RewindAndSkip(skip=75, skip_more_within=50, most=6)
    assert skipped(response, 300, 310, 295, 344, 394, 443, 500) == [75, 150, 225, 300, 75, 150, 0]
    assert skipped(RewindAndSkip(skip=75, most=3), 300, 310, 320) == [75, 75, 75]


def test_runs_that_do_not_ask_for_it_keep_their_columns() -> None:
    key = "response.skip_more_within"
    usual, more = configs(f"{key}=0", f"{key}=50", shared=("response=rewind_only",))
    assert key not in columns(usual)
    assert columns(more).items() - columns(usual).items() == {(key, 50)}


def planted(good: bool) -> Records:
    return planted_claims.records(planted_claims.cards("own_spike_remedies", {0: good, 1: good}))


@pytest.mark.parametrize("good", [True, False])
def test_spikes_are_counted_as_often_as_training_met_them(good: bool) -> None:
    """Of runs that answer none they are found in the loss."""
    records = planted(good)
    names = remedy_names(records.runs.to_dict("records"))
    traits = remedy_traits(records).assign(name=names).drop_duplicates("name").set_index("name")
    told = planted_own_spikes.GOOD_REMEDIES if good else planted_own_spikes.BAD_REMEDIES
    after = planted_own_spikes.STEPS - planted_own_spikes.FIRST
    for name, (spikes, returns, _) in zip(REMEDIES, told, strict=True):
        row = traits.loc[name]
        assert row["more"] == spikes - 1, name
        assert row["rate"] == pytest.approx(1000 * (spikes - 1) / after), name
        assert row["overall"] == pytest.approx(1000 * spikes / planted_own_spikes.STEPS), name
        goes_back = name not in (NO_REMEDY, NAMES["lower"], SHRUNK_NAME)
        assert (row["answered"], row["returned"]) == (goes_back, goes_back and returns), name


def test_a_run_without_a_spike_has_none_to_follow() -> None:
    records = planted(True)
    traits = remedy_traits(records._replace(events=records.events.head(0)))
    answering = records.runs.loc[records.runs["response"] != NONE, "id"]
    assert (traits.loc[answering, ["more", "rate", "overall", "answered"]] == 0).all(axis=None)


def test_runs_with_bad_data_or_unmeasured_ones_do_not_count() -> None:
    records = planted(True)
    shown = records.runs.assign(**{"burst": "rare_tokens"})
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
