"""What analysis makes of restarts by hand: curves, texts, measures, the figure and the answer."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import planted
import planted_claims
from drawn_texts import complaints
from lab.analysis import Records, points
from lab.analysis.rendering import style
from lab.analysis.rendering.scales import spread
from lab.report.all_figures import FIGURES
from small import configs
from studies.claims.costs import named_costs
from studies.spikes import restart_effects as claims
from studies.spikes.restart_effects import restarts_of

OPT = "20: optimizer.lr={:g}+80: optimizer.weight_decay=2e-4 optimizer.beta2=0.95+320: optimizer.clip=0.3"


@cache
def restarted() -> Records:
    """Planted runs of which those with the restart schedule ``opt_175b`` say what it changed."""
    runs = planted_claims.cards("ledgers", dict.fromkeys(range(3), True))
    for run, _ in runs:
        entries = OPT.format(0.5 * run["optimizer.lr"]) if run["restarts"] == "opt_175b" else "160: optimizer.lr=1e-2"
        run |= {"optimizer.weight_decay": 1e-4, "restarts.entries": None if run["restarts"] == "none" else entries}
    kept = [(run, recorded) for run, recorded in runs if run["restarts"] in ("none", "opt_175b")]
    return planted_claims.records(kept)


def test_learning_rates_of_a_restart_schedule_are_multiples_on_a_curve() -> None:
    table = points(restarted().runs)
    assert table.groupby("arm")["curve"].nunique().to_dict() == {"restarts none": 1, "restarts opt_175b": 1}
    assert table.groupby("curve")["lr"].nunique().tolist() == [3, 3]
    changed = restarted().runs["restarts.entries"].str.replace("20: optimizer.lr=0.15", "20: optimizer.lr=0.2")
    assert points(restarted().runs.assign(**{"restarts.entries": changed}))["curve"].nunique() == 3


def test_a_restart_says_what_changed_and_by_how_much() -> None:
    card: dict[Any, Any] = {"optimizer.lr": 0.3, "optimizer.weight_decay": 1e-4}
    told = restarts_of({**card, "restarts.entries": OPT.format(0.15) + "+340: loss_scale=fresh"})
    assert [restart.step for restart in told] == [20, 80, 320, 340]
    assert [restart.changes.replace("\N{MULTIPLICATION SIGN}", "x") for restart in told] == [
        *("LR x0.5", "decay x2, beta2 0.95", "clip 0.3", "loss scale fresh")
    ]
    card["optimizer.chain"] = "clip+adam+peak+decay+schedule"
    chains = ["clip,sgd,peak,decay,schedule", "clip,adam,peak,schedule", "clip,adam,peak,decay,schedule"]
    swaps = [f"optimizer.chain={chain}" for chain in chains] + ["intervention.relu=on schedule.floor=0"]
    entries = "+".join(f"{step}: {swap}" for step, swap in enumerate(swaps, 1))
    assert [restart.changes for restart in restarts_of({**card, "restarts.entries": entries})] == [
        *("sgd for adam", "without decay", "same links", "relu on, floor 0")
    ]
    thousandfold = {**card, "restarts.entries": "9: optimizer.lr=300"}
    assert restarts_of(thousandfold)[0].changes.endswith("1000")
    from_none = {**card, "optimizer.weight_decay": 0.0, "restarts.entries": "9: optimizer.weight_decay=0.1"}
    assert restarts_of(from_none) == [(9, "decay 0.1")]
    assert restarts_of(card) == []


def test_places_move_apart_as_little_as_they_must() -> None:
    assert spread([0, 10, 20], 5) == [0, 10, 20]
    assert spread([10, 10, 10, 30], 4) == [6, 10, 14, 30]
    assert spread([10, 11, 12, 15], 4) == pytest.approx([6, 10, 14, 18])


def recorded(values: list[float]) -> Records:
    cards = [planted.card(steps=len(values), final_val_loss=2.0)]
    rows = [(cards[0]["id"], step, "train_loss", "", value) for step, value in enumerate(values)]
    return planted.records_of(cards, rows)


def test_a_rise_is_measured_from_the_lowest_mean_before() -> None:
    explodes = recorded([4.0] * 20 + [2.0] * 19 + [1.0] + [3.0] * 60)
    assert claims.rise(explodes, "train_loss", "", part=0.6).item() == pytest.approx(3 - 1.95)
    assert claims.rise(explodes, "train_loss", "", part=0.4).item() == pytest.approx(0.0)


def test_a_late_excess_is_the_largest_value_above_the_median() -> None:
    spikes = recorded([9.0] * 50 + [1.0] * 10 + [2.0] * 39 + [2.7])
    assert claims.late_excess(spikes, "train_loss", "", part=0.5).item() == pytest.approx(0.7)
    assert claims.late_excess(spikes, "train_loss", "", part=0.4).item() == pytest.approx(7.0)


def test_spikes_before_a_restart_do_not_count() -> None:
    loss_n = np.full(100, 2.0) + 1e-3 * (np.arange(100) % 2)
    loss_n[[40, 80]] = 4.0
    counts = [claims.spikes_after(recorded(loss_n.tolist()), "", "", part).item() for part in (0.0, 0.5, 0.9)]
    assert counts == [2, 1, 0]


def test_the_shares_of_the_claims_are_those_of_the_schedules() -> None:
    def shipped(name: str) -> list[tuple[float, float]]:
        schedule = configs(f"restarts={name}", shared=("optimizer.lr=1", "steps=100"))[0].restarts
        assert schedule is not None
        return [(restart.step / 100, restart.groups["optimizer"].lr) for restart in schedule.restarts]

    assert shipped("quarter_lr") == [(claims.QUARTERED, claims.QUARTER)]
    assert shipped("glm_130b") == [(claims.HALVED, 0.5)]
    assert min(lr for _, lr in shipped("opt_175b")) == claims.LOWEST


@pytest.mark.parametrize("page", [style.SCREEN, style.Page(3.25, 8.0)], ids=["screen", "column"])
def test_the_figure_marks_every_restart_and_can_be_read(page: style.Page) -> None:
    with style.drawn_for(page):
        figure = FIGURES["restarts"](restarted())
        assert complaints(figure) == []
    (axes,) = figure.axes
    uprights = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert [line.get_xdata()[0] for line in uprights] == [20, 80, 320]
    assert len(axes.texts) == 3
    others = [line for line in axes.lines if line not in uprights]
    solid, dashed = (
        [line for line in others if (line.get_linestyle() == "-") == is_solid] for is_solid in (True, False)
    )
    ends = [[line.get_ydata()[-1] for line in lines] for lines in (solid, dashed)]
    assert ends == [pytest.approx([2.0, 2.2, 2.2], rel=0.01), pytest.approx([2.0, 2.2, 4.0], rel=0.01)]


def test_costs_of_runs_without_a_response_are_named_by_their_restart_schedule() -> None:
    runs = planted_claims.cards("new_data", dict.fromkeys(range(3), True))
    assert set(named_costs(planted_claims.records(runs))["name"]) == {"none", "new warm up"}


def test_a_restart_schedule_without_entries_is_drawn_without_restarts() -> None:
    records = restarted()
    bare = records._replace(runs=records.runs.assign(**{"restarts.entries": None}))
    figure = FIGURES["restarts"](bare)
    assert not complaints(figure)
    assert [axes.get_title() for axes in figure.axes] == ["opt 175b"]
