"""Pairs of the board's arms: the better half, the sum of both effects, and which pairs are trained."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import planted
import planted_board
from lab.__main__ import main
from lab.records import store
from lab.records.store import NO_METRICS, Records
from lab.studies.leaderboard.arms import meanings
from lab.studies.leaderboard.board import HARMS, HELPS, NO_DIFFERENCE, OPEN, Board, Row
from lab.studies.leaderboard.curves import PART, curves_of
from lab.studies.leaderboard.page import board_page
from lab.studies.leaderboard.pairs import NOT_REACHED, REACHED, pair_panels, sum_word

PLAIN = ("z_loss",)
FRESH = (16, 17, 18, 19, 20, 21)
RELU, PERI = ("relu", "z_loss"), ("peri_ln", "z_loss")
BOTH = ("peri_ln", "relu", "z_loss")


def records(pair: float, relu: float = -0.1, peri: float = -0.05, **changes: Any) -> Records:
    """Two arms and their pair; effects are on the instability part."""
    effects = {PLAIN: 0.0, RELU: relu, PERI: peri, BOTH: pair}
    return Records(planted.table(planted_board.cards(effects, **{"seeds": FRESH, **changes})), NO_METRICS)


def board(*args: float, **changes: Any) -> Board:
    return Board(curves_of(records(*args, **changes), {}), meanings())


def only_pair(of: Board) -> Row:
    (panel,) = pair_panels(of)
    (row,) = panel.rows
    return row


@pytest.mark.parametrize(
    ("pair", "word", "total"),
    [
        (-0.25, HELPS, REACHED),  # as much as both, -0.15, and more
        (-0.15, NO_DIFFERENCE, REACHED),  # below the better half by less than the margin
        (0.02, HARMS, NOT_REACHED),
        (-0.01, HARMS, NOT_REACHED),
    ],
)
def test_a_pair_is_compared_with_its_better_half_and_with_the_sum(pair: float, word: str, total: str) -> None:
    row = only_pair(board(pair, spread=0.005))
    assert row.name == "peri_ln+relu"
    assert row.pair is not None
    assert row.pair.better == "relu"
    assert row.verdict == word
    assert row.differences[PART].mean == pytest.approx(pair + 0.1, abs=0.01)
    assert row.pair.interaction.mean == pytest.approx(pair + 0.15, abs=0.01)
    assert sum_word(row.pair.interaction) == total


def test_the_better_half_is_the_better_on_these_seeds() -> None:
    row = only_pair(board(-0.2, -0.02, -0.12, spread=0.001))
    assert row.pair is not None
    assert row.pair.better == "peri_ln"


def test_a_noisy_pair_is_open_in_both_respects() -> None:
    row = only_pair(board(-0.12, spread=0.4))
    assert row.verdict == OPEN
    assert row.pair is not None
    assert sum_word(row.pair.interaction) == OPEN


def test_the_interaction_is_paired_by_seed() -> None:
    made = board(-0.2)
    row = only_pair(made)
    parts = {frozenset(one.interventions) - {"z_loss"}: one.seeds[PART] for one in made.curves}
    pair, relu, peri, base = (parts[frozenset(names)] for names in (BOTH[:2], RELU[:1], PERI[:1], ()))
    by_hand = pair - base - ((relu - base) + (peri - base))
    assert row.pair is not None
    assert row.pair.interaction.values == pytest.approx(by_hand.to_list())


def test_holm_counts_the_pairs_alone_and_pairs_are_no_arms() -> None:
    names = ("dyt", "peri_ln", "relu")
    effects = {(name, "z_loss"): -0.1 for name in names}
    pairs = {(a, b, "z_loss"): -0.13 for a, b in (("dyt", "peri_ln"), ("dyt", "relu"), ("peri_ln", "relu"))}
    runs = planted_board.cards({PLAIN: 0.0, **effects, **pairs}, seeds=FRESH)
    made = Board(curves_of(Records(planted.table(runs), NO_METRICS), {}), meanings())
    assert {row.name for row in made.rows} == set(names)
    (panel,) = pair_panels(made)
    assert len(panel.rows) == 3
    assert min(row.p_adjusted for row in panel.rows) == pytest.approx(3 * min(row.p for row in panel.rows))


def test_a_published_combination_stays_an_arm() -> None:
    names = ("qk_rmsnorm", "score_softcap")
    effects = {PLAIN: 0.0, **{(name, "z_loss"): -0.1 for name in names}, (*names, "z_loss"): -0.1}
    made = Board(curves_of(Records(planted.table(planted_board.cards(effects)), NO_METRICS), {}), meanings())
    assert "qk_rmsnorm+score_softcap" in {row.name for row in made.rows}
    assert not pair_panels(made)


def test_pairs_with_and_without_qk_layernorm_are_panels_of_their_own() -> None:
    effects = {PLAIN: 0.0, RELU: -0.1, PERI: -0.05, BOTH: -0.2}
    effects |= {("qk_layernorm", *names): effect / 2 for names, effect in effects.items()}
    made = Board(curves_of(Records(planted.table(planted_board.cards(effects)), NO_METRICS), {}), meanings())
    assert [panel.title for panel in pair_panels(made)] == [
        "pairs without qk-layernorm",
        "pairs with qk-layernorm",
    ]
    assert {row.name for row in made.rows} == {"relu", "peri_ln", "qk_layernorm"}


def test_a_pair_without_one_of_its_members_stays_an_arm() -> None:
    effects = {PLAIN: 0.0, RELU: -0.1, BOTH: -0.2}
    made = Board(curves_of(Records(planted.table(planted_board.cards(effects)), NO_METRICS), {}), meanings())
    assert {row.name for row in made.rows} == {"relu", "peri_ln+relu"}
    assert not pair_panels(made)


def test_every_format_shows_the_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pairs"
    store.write_imported(folder, records(-0.25, spread=0.005))
    assert main(["leaderboard", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "pairs without qk-layernorm:" in shown
    (line,) = [line for line in shown.splitlines() if "peri_ln+relu" in line]
    assert line.split()[:3] == ["peri_ln+relu", "helps", "relu"]
    assert main(["leaderboard", str(folder), "--json"]) == 0
    (found,) = [row for row in json.loads(capsys.readouterr().out) if row["better_half"]]
    assert (found["verdict"], found["sum_of_both"]) == (HELPS, REACHED)
    assert found["interaction"]["low"] < found["interaction"]["difference"] < found["interaction"]["high"] < 0
    assert main(["leaderboard", str(folder), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert {row["arm"]: row["better_half"] for row in rows} == {"relu": "", "peri_ln": "", "peri_ln+relu": "relu"}
    file = tmp_path / "board.html"
    assert main(["leaderboard", str(folder), "--html", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    assert 'id="peri-ln-relu-pairs-without-qk-layernorm"' in text
    assert re.search(r"1 of 1 pairs? helps? beyond its better half: peri_ln\+relu", text)


def test_a_page_of_pairs_none_of_which_helps_says_so() -> None:
    text = board_page(board(-0.1, spread=0.005))
    assert "Pairs without qk-layernorm, none of 1 pairs is shown to help beyond its better half; " in text
    assert "A pair of arms is compared with its better half." in text
