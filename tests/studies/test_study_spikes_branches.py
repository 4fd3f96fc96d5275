"""Branches from before a loss spike: each makes the one change it names, and the untouched twin spikes again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from torch import Tensor

import planted_claims
import planted_own_spikes
from drawn_texts import complaints
from lab import Fleet
from lab.analysis.curves import points
from lab.analysis.sensitivity import judge
from lab.contrib.responses import Branch
from lab.core import machine
from lab.report.all_figures import FIGURES
from lab.responses.response import Action, Memory, Reading
from lab.sweeping.job import train_resumably
from lab.training.checkpoint import Checkpointer
from lab.training.loop import train
from lab.training.recorder import Recorder, Run
from small import configs, records, untimed
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim
from studies.spikes.own_spikes import CHANGE_NAMES, changes, removable

BRANCH = ("response=branch", "response.rewind=4", "response.snapshot_every=2", "response.beta1=0.5")
# A first moment with so short a memory has no bias left at the spike.
STEPS = ("steps=16", "schedule=constant", "schedule.warmup=2", "probes.every=1", "optimizer.clip=inf")
STEPS += ("optimizer.weight_decay=0", "optimizer.beta1=0.5")
SPIKE = 9  # the step whose loss is said to be that of a spike


@dataclass(frozen=True)
class Spiking(Branch):
    """A branch to which the loss of one step is a spike."""

    start: int = 0

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        return super().act(reading._replace(spike_begins=reading.step == SPIKE), memory)


pytestmark = pytest.mark.usefixtures("as_in_training")


def fleet(*changes: str, seeds: tuple[int, ...] = ()) -> Fleet:
    """A fleet of which each run makes another change where it spikes; none if it is empty."""
    made = Fleet(configs(*(f"seed={seed}" for seed in seeds or [0] * len(changes)), shared=(*BRANCH, *STEPS)))
    assert made.control
    usual = made.control.responses[0]
    assert isinstance(usual, Branch)
    for run, change in enumerate(changes):
        if change:
            spiking = Spiking(**{**vars(usual), "change": change, "start": 0})
            made.control.responses[run] = spiking
    return made


def after(made: Fleet, updates: int) -> list[dict[str, Tensor]]:
    """Copies of the fleet's tensors from the branch on: before its first update, and after each of so many."""
    copies, moments = [], [SPIKE + 1 + number for number in range(updates + 1)]
    for result in train(made):
        if result.done in moments:
            copies.append({name: tensor.clone().double() for name, tensor in made.tensors().items()})
        if result.done == moments[-1]:
            break
    return copies


CHANGES = ("same", "batches", "first_moment", "second_moment", "moments", "lr", "eps")


@pytest.mark.slow
def test_the_twin_goes_on_as_if_nothing_had_happened_and_every_change_tells() -> None:
    without, *runs = records(fleet("", *CHANGES))
    values = {change: run.metrics for change, run in zip(CHANGES, runs, strict=True)}
    assert values["same"] == without.metrics
    assert all(values[change] != without.metrics for change in CHANGES[1:])
    back = 6  # the newest snapshot at least four updates before ten
    for change, run in zip(CHANGES, runs, strict=True):
        assert [row for row in run.metrics if row[0] < back] == [row for row in without.metrics if row[0] < back]
        assert (run.events[0][0], run.events[0][2]) == (back, "rewind"), change


@pytest.fixture(scope="module")
def together() -> list[Run]:
    """A fleet in which each run makes another change."""
    machine.configure_torch()
    return records(fleet(*CHANGES))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["second_moment", "lr"])
def test_a_branch_is_the_same_beside_others_as_alone(change: str, together: list[Run]) -> None:
    assert together[CHANGES.index(change)] == records(fleet(change))[0]


def test_it_branches_once_and_not_before_the_model_has_learned() -> None:
    branch, memory = Branch(start=500), Memory()
    spike = Reading(499, 9.0, 1.0, spike_begins=True)
    assert branch.act(spike, memory) is None
    assert branch.act(spike._replace(step=500), memory) == Action(rewind=20)
    assert branch.act(spike._replace(step=800), memory) is None


@pytest.mark.parametrize("change", ["first_moment", "second_moment", "moments"])
def test_a_moment_that_is_forgotten_has_a_bias_correction_of_its_own(change: str) -> None:
    """The steps are those of Adam by hand, in float64, with moments and ages of their own."""
    made = fleet(change)
    before, *updates = after(made, 3)
    beta1, beta2, eps, lr = 0.5, 0.95, 1e-8, 1e-2
    kept_mean, kept_square = change == "second_moment", change == "first_moment"
    for name in made.state.weights:
        mean, square = (before[f"adam.{kind}.{name}"] for kind in ("mean", "square"))
        assert mean.any() == kept_mean
        assert square.any() == kept_square
        weight = before[f"weight.{name}"]
        for number, now in enumerate(updates, 1):
            gradient = (now[f"adam.mean.{name}"] - beta1 * mean) / (1 - beta1)
            mean = now[f"adam.mean.{name}"]
            square = beta2 * square + (1 - beta2) * gradient**2
            # six updates were made before the branch; the bias of a first moment kept was corrected by then
            unbiased = mean if kept_mean else mean / (1 - beta1**number)
            root = (square / (1 - beta2 ** (number + 6 * kept_square))).sqrt()
            direction = unbiased / (root + eps)
            step = weight - now[f"weight.{name}"]
            weight = now[f"weight.{name}"]
            # a kept mean over the root of one tiny gradient takes a weight so far that rounding it is a part of a step
            allowed = 0.02 * lr * direction.abs() + 1e-6 + 2**-23 * weight.abs()
            clear = gradient.abs() > 1e-5
            assert ((step - lr * direction).abs() <= allowed)[clear].all(), (name, number)


def test_another_epsilon_is_that_of_its_own_run_alone() -> None:
    made = fleet("eps", "same")
    for result in train(made):
        if result.done == SPIKE + 2:
            break
    (adam,) = (link for name, link in made.config.optimizer.links.items() if name == "adam")
    assert adam.eps.tolist() == [1e-3, 1e-8]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_kill_after_a_branch_changes_no_record(tmp_path: Path) -> None:
    updates, resumed = list[int](), fleet("eps", "second_moment")
    first, second = Recorder(fleet("eps", "second_moment")), Recorder(resumed)
    checkpointer = Checkpointer(tmp_path, ["one", "two"], resumed.config.checkpoint)
    is_due = lambda: bool(updates) and updates[-1] == 13  # noqa: E731
    note = lambda result: updates.append(result.done)  # noqa: E731
    assert not train_resumably(first, checkpointer, note, print, is_due)
    assert train_resumably(second, checkpointer, note, print, lambda: False)
    assert untimed(second) == records(fleet("eps", "second_moment"))


@pytest.mark.parametrize("good", [True, False])
def test_spikes_are_removed_where_none_comes_again(good: bool) -> None:
    records = planted_claims.records(planted_claims.cards("spike_causes", dict.fromkeys(range(2), good)))
    table = changes(records)
    assert len(table) == 2 * 2 * len(CHANGES)
    assert set(table["step"]) == {planted_own_spikes.SPIKE}
    assert set(table["back"]) == {planted_own_spikes.BACK}
    removed = table.groupby("change")["removed"].mean().to_dict()
    keeps = {"same", "second_moment", *(["first_moment"] if good else set(CHANGES) - {"first_moment"})}
    assert removed == {change: float(change not in keeps) for change in CHANGES}
    assert set(table.loc[table["at_once"] == 1, "change"]) == {"second_moment"}
    # of the twins none spikes again later, in any of the steps that are left
    assert removable(records) == 1


def test_a_seed_counts_by_the_arms_in_which_it_has_a_spike() -> None:
    """Without qk-layernorm seed 0 never spikes; its share is that of the arm with it."""
    records = planted_claims.records(planted_claims.cards("spike_causes", dict.fromkeys(range(4), True)))
    runs = records.runs
    calm = runs.loc[(runs["seed"] == 0) & (runs["intervention"] == "none"), "id"]
    fewer = records._replace(events=records.events[~records.events["id"].isin(calm)])
    verdict = judge_claim(CLAIMS["half_the_rate_removes_a_spike"], [Evidence("spike_causes", fewer)])
    assert (verdict.verdict, verdict.seeds, verdict.effect) == ("reproduced", 4, 0.5)


def test_a_run_without_a_spike_has_no_outcome() -> None:
    records = planted_claims.records(planted_claims.cards("spike_causes", {0: True}))
    assert changes(records._replace(events=records.events[records.events["kind"] == "spike"])).empty


def test_chance_is_that_of_a_window_without_a_spike() -> None:
    """One more spike in each twin, of 400 - 320 steps: a window of 25 + 20 steps holds none with exp(-45 / 80)."""
    records = planted_claims.records(planted_claims.cards("spike_causes", {0: True}))
    twins = changes(records).query("change == 'same'")["id"]
    more = [(run, 350, 350, "spike", 3.0, "") for run in twins]
    events = pd.concat([records.events, pd.DataFrame(more, columns=list(records.events)).astype(records.events.dtypes)])
    assert removable(records._replace(events=events)) == pytest.approx(math.exp(-45 / 80))


def test_the_figure_says_how_many_spikes_each_change_removes() -> None:
    records = planted_claims.records(planted_claims.cards("spike_causes", dict.fromkeys(range(3), True)))
    figure = FIGURES["spike_causes"](records, judge(points(records.runs)))
    assert not complaints(figure)
    shares, _ = figure.axes[:2]
    rows = [label.get_text().replace("\n", " ") for label in shares.get_yticklabels()]
    assert rows[0] == CHANGE_NAMES["same"]
    removed = next(line for line in shares.get_lines() if line.get_marker() == "o").get_xdata()
    by_row = dict(zip(rows, map(float, removed), strict=True))
    assert by_row == {
        CHANGE_NAMES[change]: float(change not in ("same", "first_moment", "second_moment")) for change in CHANGES
    }
