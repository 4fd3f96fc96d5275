"""Bursts that come several times: their costs, the figure and the answer; and the figure of distances from init."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import cache

import numpy as np
import pytest

import planted
import planted_claims
import planted_damage
from drawn_texts import complaints
from lab.analysis import Records
from lab.analysis.drawing.registry import NothingToDrawError
from lab.report.all_figures import FIGURES
from studies.claims.costs import spike_costs
from studies.spikes.planted import repeated_costs

SEEDS = dict.fromkeys(range(3), True)
ONSETS = (200, 250, 300)


@cache
def planted_records() -> Records:
    """Three seeds of a world in which the final loss rises with the number of bursts."""
    return planted_claims.records(planted_claims.cards("repeated_bursts", SEEDS))


def costs(repeats: float, onsets: tuple[int, ...], loss_n: np.ndarray, steps: int = 400) -> tuple[float, float]:
    """Peak and recovery of a run whose held-out loss was measured at every second step."""
    row = all_costs(repeats, onsets, loss_n, steps)
    return row["peak"], row["recovery"]


def all_costs(
    repeats: float, onsets: tuple[int, ...], loss_n: np.ndarray, steps: int = 400, spikes: tuple[int, ...] = ()
) -> dict[Hashable, float]:
    """All costs of a run with bursts and spikes that begin at these steps."""
    watched = {"spikes": len(spikes), "rewound_steps": 0, "skipped_batches": 0}
    card = planted.card(bad_batches="shift", steps=steps, **{"bad_batches.repeats": repeats}) | watched
    rows = [(card["id"], 2 * step, "val_loss", "", value) for step, value in enumerate(loss_n)]
    begun = sorted([*((step, "burst") for step in onsets), *((step, "spike") for step in spikes)])
    met = [(card["id"], step, step, kind, 1.0, "") for step, kind in begun]
    (row,) = spike_costs(planted.records_of([card], rows, met)).to_dict("records")
    return row


def spiking(*spans: tuple[int, int, float]) -> np.ndarray:
    """Losses of 2.0 but for those from one step to before another."""
    loss_n = np.full(200, 2.0)
    for start, stop, value in spans:
        loss_n[start // 2 : stop // 2] = value
    return loss_n


def test_of_several_bursts_the_largest_peak_counts_and_recoveries_add_up() -> None:
    both = spiking((202, 210, 2.5), (302, 340, 3.0))
    assert costs(3.0, ONSETS, both) == pytest.approx((1.0, 10 + 0 + 40))
    assert costs(math.nan, ONSETS[:1], both) == pytest.approx((1.0, 140))  # of one, until the loss is back for good
    # back neither before the second burst nor after it; the second raises the loss no more above the usual one
    lasting = spiking((202, 300, 2.5))
    assert costs(3.0, ONSETS, lasting) == pytest.approx((0.5, 50 + 50 + 0))
    assert costs(3.0, ONSETS, spiking((302, 400, 3.0))) == pytest.approx((1.0, 100))


def test_a_spike_before_the_burst_is_a_false_alarm_and_none_of_the_bursts() -> None:
    row = all_costs(1.0, (200,), spiking((202, 210, 2.5)), spikes=(50, 120, 200, 260))
    assert (row["false_alarms"], row["spikes"], row["clean_steps"]) == (2, 2, 200)
    without = all_costs(1.0, (), spiking(), spikes=(50, 120, 200, 260))
    assert (without["false_alarms"], without["spikes"], without["clean_steps"]) == (4, 0, 400)


def test_the_last_held_out_loss_is_of_other_text_and_no_peak() -> None:
    assert costs(1.0, ONSETS[:1], spiking((202, 210, 2.5), (398, 400, 9.0)), steps=399) == pytest.approx((0.5, 10))


def test_a_burst_that_is_met_again_is_no_other_burst() -> None:
    both = spiking((202, 210, 2.5), (302, 340, 3.0))
    assert costs(3.0, (*ONSETS[:2], ONSETS[1], ONSETS[2]), both) == costs(3.0, ONSETS, both)
    assert costs(math.nan, (ONSETS[0], ONSETS[0]), both) == costs(math.nan, ONSETS[:1], both)


def test_runs_are_named_by_their_bursts_and_by_what_they_lack() -> None:
    table = repeated_costs(planted_records())
    names = {"no burst": 0, "1 burst": 1, "5 bursts": 5, "20 bursts": 20, "1 burst from step 764": 1}
    assert dict(zip(table["name"], table["number"], strict=True)) == {**names, "no burst and 160 batches fewer": 0}
    assert repeated_costs(planted_claims.records(planted_claims.cards("optimizer_arms", SEEDS))).empty


def test_the_figure_shows_final_losses_above_those_without_a_burst() -> None:
    figure = FIGURES["repeated_bursts"](planted_records())
    assert not complaints(figure)
    axes = figure.axes[0]
    rows = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert rows == ["no burst and 160 batches fewer", "1 burst", "1 burst from step 764", "5 bursts", "20 bursts"]
    clean, once, five, twenty, last, shorter = planted_damage.DAMAGED
    for marks in (line for line in axes.get_lines() if line.get_marker() == "o"):
        shown = [float(x) for x in marks.get_xdata()]
        assert shown == pytest.approx([each - clean for each in (shorter, once, last, five, twenty)], abs=0.01)
    with pytest.raises(NothingToDrawError, match="no burst comes several times"):
        FIGURES["repeated_bursts"](planted_claims.records(planted_claims.cards("optimizer_arms", SEEDS)))


def test_the_figure_of_distances_has_a_panel_for_each_table_and_beginning() -> None:
    records = planted_claims.records(planted_claims.cards("learned_positions", SEEDS))
    figure = FIGURES["distance_from_init"](records)
    assert not complaints(figure)
    gaussian, sinusoidal = figure.axes
    assert [float(np.median(axes.get_lines()[0].get_ydata())) for axes in (gaussian, sinusoidal)] == pytest.approx(
        [5, 0.05], rel=0.01
    )
