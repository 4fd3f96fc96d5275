"""Loss spikes on the board: the learning rate and the steps in which they count, and those that were planted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import planted
import planted_board
from lab.__main__ import main
from lab.records import store
from lab.records.store import NO_METRICS, Records
from lab.studies.claims import CLAIMS
from lab.studies.leaderboard.board import Board
from lab.studies.leaderboard.curves import UNJUDGED, counted_at, curves_of, spike_rate
from lab.studies.leaderboard.listing import lines, table
from lab.studies.leaderboard.planted_spikes import CLAIM, planted_durations

PLAIN, RELU = ("z_loss",), ("relu", "z_loss")
RESULTS = Path(__file__).parents[1] / "results"
ONE = 1000 / 370  # the rate of one spike in a run of 400 steps


def unstable_from(lr: float, cards: Any) -> list[dict[str, Any]]:
    """The cards, with runs at this learning rate and above ending worse than a bigram model."""
    return [{**one, "final_val_loss": 3.0} if one["optimizer.lr"] >= lr else one for one in cards]


def runs(first_unstable: Mapping[tuple[str, ...], float]) -> list[dict[str, Any]]:
    made = []
    for names, lr in first_unstable.items():
        made += unstable_from(lr, planted_board.cards({names: -0.3}, spread=0))
    return made


def spikes_at(lrs: Mapping[str, float], count: int) -> Any:
    """So many spikes in the runs of an arm at its learning rate, and ten in all others."""
    return lambda run: count if run["optimizer.lr"] == lrs[run["intervention"]] else 10


def test_spikes_are_counted_at_half_the_smallest_unstable_rate() -> None:
    cards = runs({PLAIN: 1e-1, RELU: 3e-1})
    at = {"z_loss": 3e-2, "relu+z_loss": 1e-1}
    made = Board(
        curves_of(
            planted_board.with_spikes(cards, lambda run: spikes_at(at, 1 + 2 * ("relu" in run["intervention"]))(run)),
            {},
        ),
        {},
    )
    (row,) = made.rows
    assert (row.reference.spikes.lr, row.curve.spikes.lr) == (3e-2, 1e-1)
    assert row.reference.seeds["spikes"].to_list() == pytest.approx([ONE] * 6)
    assert row.curve.seeds["spikes"].to_list() == pytest.approx([3 * ONE] * 6)
    difference = row.differences["spikes"]
    assert difference.mean == pytest.approx(2 * ONE)
    assert difference.low < difference.mean < difference.high  # counts are known to one spike only
    shown = table(made.panels[0]).set_index("arm")["spikes / 1,000 steps"]
    assert shown["(reference)"] == "2.703 at 0.03"
    assert shown["relu"].startswith("5.405 [")
    assert shown["relu"].endswith("] at 0.1")


def test_an_arm_without_an_unstable_rate_is_marked() -> None:
    cards = runs({PLAIN: 1e-1, RELU: math.inf})
    made = Board(curves_of(planted_board.with_spikes(cards, lambda run: 0), {}), {})
    (row,) = made.rows
    assert (row.curve.spikes.lr, row.curve.spikes.is_top, row.reference.spikes.is_top) == (3e-1, True, False)
    assert table(made.panels[0])["spikes / 1,000 steps"][1].endswith("at 0.3 (top)")
    assert any("marked (top)" in line for line in lines(made))


def test_one_unstable_seed_lowers_the_rate_of_its_arm() -> None:
    seeds = pd.DataFrame({"eta_div": [-1.0, -2.0], "censored": [False, False]})
    lrs = (1e-3, 3e-3, 5e-3, 1e-2, 1e-1)
    assert counted_at(lrs, seeds, 400).lr == 5e-3
    assert counted_at(lrs, seeds.iloc[:1], 400).lr == 1e-2
    assert math.isnan(counted_at((1e-2, 1e-1), seeds, 400).lr)


@pytest.mark.parametrize(("step", "seen"), [(UNJUDGED - 1, 0), (UNJUDGED, 1)])
def test_spikes_are_seen_from_the_step_at_which_exposure_begins(step: int, seen: int) -> None:
    loss_n = np.full(400, 2.0) + np.random.default_rng(0).normal(0, 0.01, 400)
    loss_n[step] = 5
    assert spike_rate(loss_n) == pytest.approx(seen * ONE)


def test_runs_measured_now_and_then_have_no_column_and_the_board_says_so() -> None:
    cards = list(planted_board.cards({PLAIN: 0.0, RELU: -0.1}))
    made = Board(curves_of(Records(planted.table(cards), NO_METRICS), {}), {})
    assert "spikes / 1,000 steps" not in table(made.panels[0])
    assert any("Spikes are not counted" in line for line in lines(made))


@pytest.mark.slow
def test_a_pruned_board_counts_the_same_spikes(tmp_path: Path) -> None:
    names = [names for names in planted_board.arms() if "z_loss" in names][:42]
    effects = dict.fromkeys([PLAIN, *names], -0.3)
    cards = planted_board.cards(effects, seeds=(10,), lrs=(1e-3, 1e-2, 1e-1))
    store.write_imported(tmp_path, planted_board.with_spikes(cards, lambda run: run["seed"] % 3))
    before = store.read(tmp_path)
    subprocess.run([sys.executable, RESULTS / "prune.py", tmp_path], check=True)
    after = store.read(tmp_path)
    assert 0 < len(after.metrics) < len(before.metrics) / 2
    rates = [[one.seeds["spikes"].to_list() for one in curves_of(each, {})] for each in (before, after)]
    assert rates[0] == rates[1]
    assert rates[0][0] == [pytest.approx(ONE)]


def test_the_planted_spike_is_the_effect_of_the_study() -> None:
    """Durations of committed runs, read by hand: those of the arm minus those of the recipe, by burst and seed."""
    from lab.studies.spikes.planted import arm_costs

    found = planted_durations(RESULTS)
    assert set(found) == {"adamw_clip_relative", "adamw_beta2_ramp", "embedding_gradient_shrink"}
    records = store.find(RESULTS / CLAIMS[CLAIM].sweep)
    assert records is not None
    costs = arm_costs(records).merge(records.runs[["id", "seed"]], on="id")
    wide = costs.pivot_table(index=["burst", "seed"], columns="name", values="recovery")
    for burst in ("rare_tokens", "conflicting_labels"):
        by_seed = (wide["clip relative"] - wide["recipe"]).loc[burst]
        assert found["adamw_clip_relative"][burst.replace("_", " ")].mean == pytest.approx(by_seed.mean())
        assert found["adamw_clip_relative"][burst.replace("_", " ")].n == len(by_seed)


def test_the_planted_spike_stands_beside_the_recipe_in_which_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = [
        card
        for names in (PLAIN, ("qk_layernorm", "z_loss"))
        for changes in ({}, {"optimizer.name": "adamw_clip_relative"}, {"optimizer.name": "adamw_zclip"})
        for card in planted_board.cards({names: 0.0}, **changes)
    ]
    store.write_imported(tmp_path, Records(planted.table(cards), NO_METRICS))
    monkeypatch.chdir(RESULTS.parent)
    assert main(["leaderboard", str(tmp_path), "--json"]) == 0
    rows = {(row["arm"], row["panel"]): row["planted_spike"] for row in json.loads(capsys.readouterr().out)}
    shown = rows["adamw_clip_relative", "with qk-layernorm"]
    assert shown["rare tokens"]["difference"] == planted_durations(RESULTS)["adamw_clip_relative"]["rare tokens"].mean
    assert rows["adamw_clip_relative", "without qk-layernorm"] is None
    assert rows["adamw_zclip", "with qk-layernorm"] is None
    assert main(["leaderboard", str(tmp_path)]) == 0
    assert "rare tokens +17.8 [+12.2, +23.3]" in capsys.readouterr().out
