"""The board: how an arm is judged on a failure, what is trained, and what the board says."""

from __future__ import annotations

import io
import json
import math
import re
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import planted
import planted_board
from lab.__main__ import main
from lab.analysis import leaderboard
from lab.analysis.statistics import UNKNOWN, Interval, Spread, spread_prior
from lab.analysis.stress.arms import REFERENCE, arm_cards, board_arms, left_out
from lab.analysis.stress.cures import CURES, HARMS, IN_PART, NO, OPEN, verdict_of
from lab.core.errors import RequestError
from lab.core.registry import INTERVENTIONS
from lab.core.shipped import data_folder
from lab.records import store
from lab.records.plans import Setting
from lab.report import build
from lab.report.build import make_report
from lab.sweeping import bench
from lab.sweeping.bench import reason_of_card
from lab.sweeping.request import read_request
from planted_board import BEST, EASY, FAILURE, LOST, LR, RULE
from studies.board import matrix as board
from studies.board import training as board_training
from studies.board.failures import (
    AT_EASE,
    CELLS,
    CURVE,
    FAMILIES,
    STRESSED,
    Board,
    Cell,
    Failure,
    Family,
    cells_table,
    chosen_arms,
    interventions,
    not_applicable,
    read_cells,
    read_failures,
    read_families,
    settings,
)
from studies.board.matrix import (
    INCOMPLETE,
    LESS,
    MORE,
    NEVER_ENGAGED,
    NOT_TESTED,
    NOT_TRIED,
    Matrix,
    Row,
    matrix_of,
    passes_screening,
    read_matrix,
)
from studies.board.page import answer_of, board_figure, how_made
from studies.board.public_runs import Broken, broken_public_runs
from studies.board.text import alike, as_csv, headline, notes, prices, unconfirmed
from studies.board.training import _composed

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "interventions.py"))


def verdicts(tables: Mapping[Cell, pd.DataFrame]) -> dict[str, str]:
    found, *_ = board.judge_arms(FAILURE, tables, RULE)
    return {arm: cell.verdict for arm, cell in found.items()}


def test_an_arm_is_judged_by_the_share_of_the_damage_that_it_takes_off() -> None:
    assert verdicts(planted_board.tables()) == {
        "sigma_reparam": CURES,
        "peri_ln": IN_PART,
        "rmsnorm": NO,
        "nope": HARMS,
    }


@pytest.mark.parametrize(
    ("share", "half", "verdict"),
    [
        (0.75, 0.05, CURES),
        (0.75, 0.15, IN_PART),  # its interval leaves more than a third
        (0.6, 0.05, IN_PART),
        (0.3, 0.05, IN_PART),
        (0.3, 0.15, OPEN),  # it may remove less than a fifth
        (0.1, 0.05, NO),
        (0.1, 0.15, OPEN),
        (-0.1, 0.05, NO),
        (-0.3, 0.05, HARMS),
        (-0.3, 0.15, OPEN),
    ],
)
def test_a_verdict_is_told_by_the_whole_interval(share: float, half: float, verdict: str) -> None:
    values = share + half * np.array([1, -1, 1, -1, 1, -1]) / (2.5706 * np.sqrt(1 / 5))  # t of five degrees of freedom
    made = planted_board.tables({"peri_ln": 0.5, "rmsnorm": 0.0}, spread=0.0)
    tables = {cell: table for cell, table in made.items() if cell.failure != CURVE}
    at = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    control = tables[at._replace(arm=REFERENCE)]["loss"]
    tables[at].loc[list(RULE.fresh), "loss"] = control[list(RULE.fresh)] - LOST * values
    family = Family(frozenset({"peri_ln"}), Spread())
    cell = board.judge_arms(FAILURE, tables, RULE, family)[0]["peri_ln"]
    assert (cell.improvement.high - cell.improvement.low) / 2 == pytest.approx(half * LOST, rel=1e-3)
    assert cell.verdict == verdict


@pytest.mark.parametrize(
    ("ends", "p", "verdict"),
    [
        ((1.6, 2.0), 0.04, CURES),
        ((1.6, 2.0), 0.05, OPEN),
        ((1.6, 2.0), math.nan, OPEN),
        ((-2.0, -0.6), 0.04, HARMS),
        ((-2.0, -0.3), 0.04, OPEN),
        ((-0.3, 0.3), 0.9, NO),
    ],
)
def test_an_effect_needs_a_small_p_and_none_needs_no_p(ends: tuple[float, float], p: float, verdict: str) -> None:
    interval = Interval(sum(ends) / 2, *ends, 6)
    assert verdict_of(interval, p, damage=2.0, margin=0.2, leaves=1 / 3, alpha=0.05) == verdict


def test_an_arm_that_trains_better_takes_no_damage_away() -> None:
    gains = {"rmsnorm": LOST, "sigma_reparam": LOST, "nope": -LOST}
    assert verdicts(planted_board.tables(gains=gains)) == verdicts(planted_board.tables())
    found, *_ = board.judge_arms(FAILURE, planted_board.tables(gains=gains), RULE)
    assert found["sigma_reparam"].share < 1.1


def test_an_arm_that_does_not_train_at_ease_has_nothing_to_lose() -> None:
    tables = planted_board.tables({"sigma_reparam": 1.0, "peri_ln": 1.0, "rmsnorm": 0.0})
    untrained = Cell(FAILURE.name, "peri_ln", AT_EASE, EASY)
    for cell in (untrained, untrained._replace(place=STRESSED, lr=LR)):
        tables[cell] = tables[cell].assign(loss=planted_board.AT_INIT)
    found, _ = board.judge_arms(FAILURE, tables, RULE)
    assert (found["peri_ln"].verdict, found["sigma_reparam"].verdict) == (OPEN, CURES)
    assert found["peri_ln"].cost_at_ease == pytest.approx(planted_board.AT_INIT - BEST, abs=0.02)
    tables[untrained].loc[list(RULE.fresh[1:]), "loss"] -= 0.01  # one seed that does not train is enough
    assert board.judge_arms(FAILURE, tables, RULE)[0]["peri_ln"].verdict == OPEN


def test_an_arm_that_is_worse_at_ease_is_not_named_in_the_first_line() -> None:
    for gain, first in ((-0.1, "No arm takes all damage away; in part"), (-0.03, "Takes damage away: sigma_reparam")):
        told = sentences(matrix(planted_board.tables(gains={"sigma_reparam": gain})))
        assert told[0].startswith(first)
        assert any(re.search(r"sigma_reparam under attention logits \(\+0\.\d+\)", line) for line in told) == (
            gain == -0.1
        )


def test_an_arm_that_ends_above_the_control_under_stress_cures_nothing() -> None:
    for gain, verdict in ((-LOST - 0.1, OPEN), (-LOST + 0.1, CURES)):
        found, _ = board.judge_arms(FAILURE, planted_board.tables(gains={"sigma_reparam": gain}), RULE)
        assert found["sigma_reparam"].verdict == verdict
        assert found["sigma_reparam"].above_control == pytest.approx(-LOST - gain, abs=0.03)
        assert found["nope"].verdict == HARMS


@pytest.mark.parametrize(
    ("arm", "at_best", "verdict"),
    [
        ("sigma_reparam", 0.8, CURES),
        ("sigma_reparam", 0.5, IN_PART),
        ("sigma_reparam", 0.1, OPEN),
        ("peri_ln", 0.9, IN_PART),
        ("peri_ln", 0.1, OPEN),
        ("rmsnorm", 0.1, NO),
        ("rmsnorm", 0.4, OPEN),
        ("nope", 0.0, OPEN),
        ("nope", -0.5, HARMS),
    ],
)
def test_a_verdict_must_hold_for_the_share_at_an_arms_own_best_rate(arm: str, at_best: float, verdict: str) -> None:
    tables = planted_board.tables()
    for cell, table in tables.items():
        if (cell.failure, cell.arm) == (CURVE, arm):
            # the best rate lies below the one at which runs are at ease
            losses = {0.01: BEST - 0.5, LR: BEST - 0.5 + 2 * LOST * (1 - at_best)}
            tables[cell] = table.assign(loss=losses.get(cell.lr, BEST))
    cell = board.judge_arms(FAILURE, tables, RULE)[0][arm]
    assert (cell.verdict, cell.share) == (verdict, pytest.approx(at_best, abs=0.06))


def test_growth_is_no_damage_and_its_cure_opens_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    growth = FAILURE._replace(is_growth=True)
    known = replace_failure(growth)
    for module in ("matrix", "failures", "text"):
        monkeypatch.setattr(f"studies.board.{module}.read_failures", lambda: known)
    made = matrix(planted_board.tables())
    cells = {row.name: row.cells[FAILURE.name].verdict for row in made.arms}
    assert cells == {"sigma_reparam": LESS, "peri_ln": LESS, "rmsnorm": NO, "nope": MORE}
    assert headline(made).startswith("No failure is tested")
    assert any("growth and no damage" in line for line in sentences(made))
    assert re.search(r"^sigma_reparam +less \d+ %", answer_of(made).text(), re.MULTILINE)


def replace_failure(failure: Failure) -> Board:
    known = read_failures()
    return known._replace(failures={**known.failures, failure.name: failure})


def test_residual_growth_is_growth() -> None:
    assert [name for name, failure in read_failures().failures.items() if failure.is_growth] == ["residual_growth"]


def test_what_an_arm_costs_at_ease_stands_beside_its_share() -> None:
    for gain, shown in ((-0.1, True), (-0.03, False)):
        made = matrix(planted_board.tables(gains={"sigma_reparam": gain}))
        cell = next(line for line in answer_of(made).text().splitlines() if line.startswith("sigma_reparam"))
        assert bool(re.search(r"cures \d+ % \+0\.1", cell)) == shown


def test_what_an_arm_costs_at_ease_is_told_by_the_seeds_that_judge_it() -> None:
    tables = planted_board.tables(spread=0.01)
    at = Cell(FAILURE.name, "peri_ln", AT_EASE, EASY)
    tables[at].loc[list(RULE.screened), "loss"] += 1.0
    cell = board.judge_arms(FAILURE, tables, RULE)[0]["peri_ln"]
    assert cell.cost_at_ease == pytest.approx(0.0, abs=0.02)


def test_an_arm_no_better_than_a_bigram_model_is_never_advised() -> None:
    tables = planted_board.tables()
    for (failure, arm, place, lr), table in list(tables.items()):
        if failure == CURVE and lr <= EASY:
            loss = planted_board.BIGRAM + (0.02 if arm == "sigma_reparam" else -0.02)
            tables[Cell(failure, arm, place, lr)] = table.assign(loss=loss)
        elif failure == CURVE:
            tables[Cell(failure, arm, place, lr)] = table.assign(loss=2.5 if arm == "sigma_reparam" else 3.0)
    made = matrix(tables)
    row = next(row for row in made.rows if row.name == "sigma_reparam")
    assert row.best.mean < RULE.loses
    assert (row.cells[FAILURE.name].verdict, made.is_advised(row)) == (CURES, False)
    told = sentences(made)
    assert "sigma_reparam" not in told[0]
    assert "No better than a bigram model at any learning rate, and so never advised: sigma_reparam." in told


def test_an_arm_without_all_seeds_of_the_screening_is_in_no_family() -> None:
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "rmsnorm", STRESSED, LR)
    tables[at] = tables[at].iloc[:2]
    assert board.family_of(FAILURE, tables, RULE).arms == {*planted_board.SHARES} - {"rmsnorm"}


def test_the_order_of_arms_is_that_of_the_records() -> None:
    tables = planted_board.tables()
    added = [f"arm{number}" for number in range(9)]
    for name in added:
        for place, lr in ((STRESSED, LR), (AT_EASE, EASY)):
            tables[Cell(FAILURE.name, name, place, lr)] = tables[Cell(FAILURE.name, "rmsnorm", place, lr)]
    assert list(verdicts(tables)) == [*planted_board.SHARES, *added]


def test_an_arm_says_what_it_takes_the_place_of() -> None:
    def place(arm: str, failure: str = FAILURE.name) -> str:
        row = Row(arm, {}, UNKNOWN, True, math.nan, math.nan, False, 0)
        return row.instead_of(read_failures().failures[failure])

    assert place("lion") == place("muon") == place("schedule_free") == "AdamW"
    assert {place("adamw_qk_clip"), place("stable_adamw")} == {""}  # a clip beside AdamW
    assert (place("reordered_norm"), place("dyt"), place("peri_ln")) == ("norms before branches", "LayerNorm", "")
    assert (place("qk_rmsnorm", "beyond_qk_norm"), place("qk_rmsnorm")) == ("qk_layernorm", "")


@pytest.mark.parametrize(("number", "sd"), [(1000, 0.06), (1, 0.12)])  # where p decides, and where the interval does
def test_power_is_the_share_of_arms_that_are_seen_to_take_off_half(number: int, sd: float) -> None:
    tables = planted_board.tables({"peri_ln": 0.5, "rmsnorm": 0.0})
    made, rng = matrix(tables), np.random.default_rng(3)
    arms, prior = frozenset(f"arm{index}" for index in range(number)), Spread(sd, 3.0)
    made = replace(made, families={FAILURE.name: Family(arms, prior)})
    said = next(float(match[1]) for line in sentences(made) if (match := re.search(r"probability of (0\.\d+)", line)))
    helps = 0
    for _ in range(200):
        own_sd = sd * math.sqrt(3 / rng.chisquare(3))
        damage = made.lost[FAILURE.name].mean
        fresh = damage / 2 + own_sd * rng.standard_normal(6)
        interval, p = board.compared(fresh, prior)
        helps += p * number < 0.05 and interval.low >= 0.2 * damage
    assert said == pytest.approx(helps / 200, abs=0.1)
    assert 0.2 < said < 0.8


def test_an_arm_without_runs_at_ease_is_not_judged() -> None:
    tables = planted_board.tables()
    del tables[Cell(FAILURE.name, "rmsnorm", AT_EASE, EASY)]
    found, *_ = board.judge_arms(FAILURE, tables, RULE)
    assert (found["rmsnorm"].verdict, found["rmsnorm"].reason) == (NOT_TRIED, INCOMPLETE)


def test_an_arm_that_is_added_later_changes_no_verdict() -> None:
    arms = {"sigma_reparam": 1.0, "peri_ln": 0.45, "rmsnorm": 0.1, "nope": -0.3, "sub_ln": 0.3}
    tables = planted_board.tables(arms, spread=0.1)
    fixed = {FAILURE.name: board.family_of(FAILURE, tables, RULE)}
    before = board.judge_arms(FAILURE, tables, RULE, fixed[FAILURE.name])[0]
    rng = np.random.default_rng(5)
    for name in ("dyt", "lion", "muon"):  # whose spread and number would change all others
        for place, lr in ((STRESSED, LR), (AT_EASE, EASY)):
            table = tables[Cell(FAILURE.name, REFERENCE, place, lr)].loc[list(RULE.screened)]
            tables[Cell(FAILURE.name, name, place, lr)] = table.assign(loss=table["loss"] + rng.standard_normal(3))
    after = board.judge_arms(FAILURE, tables, RULE, fixed[FAILURE.name])[0]
    assert {arm: after[arm] for arm in before} == before
    assert {*after} - {*before} == {"dyt", "lion", "muon"}
    anew = board.judge_arms(FAILURE, tables, RULE)[0]
    assert anew["peri_ln"].p != before["peri_ln"].p
    for place, lr in ((STRESSED, LR), (AT_EASE, EASY)):
        tables[Cell(FAILURE.name, "adamh", place, lr)] = tables[Cell(FAILURE.name, "peri_ln", place, lr)]
    last = board.judge_arms(FAILURE, tables, RULE, fixed[FAILURE.name])[0]
    assert {arm: last[arm] for arm in after} == after
    assert last["adamh"].p == pytest.approx(before["peri_ln"].p * 6 / 5)  # it counts itself beside the five


def test_families_of_an_edition_are_kept_in_the_folder(tmp_path: Path) -> None:
    folder, tables = planted_board.write(tmp_path, planted_board.tables()), planted_board.tables()
    made = board.family_of(FAILURE, tables, RULE)
    fixed = {FAILURE.name: made._replace(prior=made.prior._replace(sd=0.5))}
    table = board.families_table(fixed)
    earlier = table.assign(edition=RULE.edition - 1, sd=9.0)
    for tables_of_editions in ([earlier, table], [table, earlier]):
        pd.concat(tables_of_editions).to_csv(folder / FAMILIES, index=False)
        assert read_families(folder) == fixed
    assert read_matrix(folder).families == fixed


def test_no_cure_is_told_where_the_control_loses_nothing() -> None:
    assert set(verdicts(planted_board.tables(lost=0.0)).values()) == {NOT_TESTED}


def test_an_arm_whose_runs_are_the_controls_never_engaged() -> None:
    tables = planted_board.tables()
    control = tables[Cell(FAILURE.name, REFERENCE, STRESSED, LR)]
    tables[Cell(FAILURE.name, "rmsnorm", STRESSED, LR)] = control.loc[list(RULE.screened)]
    assert verdicts(tables)["rmsnorm"] == NEVER_ENGAGED
    nearly = control.loc[list(RULE.screened)].assign(loss=lambda table: np.nextafter(table["loss"], 9))
    assert verdicts(tables | {Cell(FAILURE.name, "rmsnorm", STRESSED, LR): nearly})["rmsnorm"] == NO


def test_bits_are_compared_on_one_machine_only() -> None:
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "rmsnorm", STRESSED, LR)
    control = tables[Cell(FAILURE.name, REFERENCE, STRESSED, LR)].loc[list(RULE.screened)]
    elsewhere = control.assign(versions="there", loss=lambda table: np.nextafter(table["loss"], 9))
    mixed = pd.concat([control.iloc[:2], elsewhere.iloc[2:]])
    assert verdicts(tables | {at: mixed})["rmsnorm"] == NEVER_ENGAGED
    assert verdicts(tables | {at: elsewhere})["rmsnorm"] == NO


def test_a_wide_spread_leaves_arms_open() -> None:
    assert verdicts(planted_board.tables({"peri_ln": 0.1, "rmsnorm": 0.05, "dyt": 0.0}, spread=0.5)) == {
        "peri_ln": OPEN,
        "rmsnorm": OPEN,
        "dyt": OPEN,
    }


def test_confirmed_arms_are_judged_by_fresh_seeds_alone() -> None:
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    tables[at].loc[list(RULE.fresh), "loss"] = BEST + LOST
    found, *_ = board.judge_arms(FAILURE, tables, RULE)
    assert found["peri_ln"].is_confirmed
    assert abs(found["peri_ln"].improvement.mean) < 0.15 * LOST


def test_p_is_multiplied_by_the_number_of_arms_of_the_failure() -> None:
    tables = planted_board.tables({"peri_ln": 0.3, "sub_ln": 0.05, "nope": -0.1}, spread=0.1)
    prior = board.family_of(FAILURE, tables, RULE).prior
    alone = board.judge_arms(FAILURE, tables, RULE, Family(frozenset({"peri_ln"}), prior))[0]["peri_ln"]
    beside = board.judge_arms(FAILURE, tables, RULE, Family(frozenset({"peri_ln", "sub_ln", "nope"}), prior))[0][
        "peri_ln"
    ]
    assert 0 < alone.p < 1 / 3
    assert beside.p == pytest.approx(3 * alone.p)
    assert beside.improvement == alone.improvement


def test_an_arm_that_takes_off_half_is_open_until_its_fresh_seeds_are_trained() -> None:
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    screened = verdicts(tables | {at: tables[at].loc[list(RULE.screened)]})
    assert (screened["peri_ln"], screened["sigma_reparam"]) == (OPEN, CURES)


def test_no_cure_is_told_where_the_control_may_lose_nothing() -> None:
    tables = planted_board.tables()
    control = tables[Cell(FAILURE.name, REFERENCE, STRESSED, LR)]
    control["loss"] += np.resize([2.0, -2.0, 0.0], len(control))  # it loses enough on average, and nothing for sure
    assert set(verdicts(tables).values()) == {NOT_TESTED}


def test_an_arm_that_equals_the_control_on_one_seed_only_is_judged() -> None:
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "rmsnorm", STRESSED, LR)
    tables[at].loc[RULE.screened[0], "loss"] = tables[at._replace(arm=REFERENCE)].loc[RULE.screened[0], "loss"]
    assert verdicts(tables)["rmsnorm"] == NO


def test_each_arm_is_trained_under_stress_and_at_ease() -> None:
    failure = read_failures().failures["short_warmup"]
    found = settings(board_arms()["peri_ln"], (1,), {}, [failure])
    words = {cell.place: setting.words for cell, setting in found.items() if cell.failure == failure.name}
    assert {place: [word for word in of_place if "warmup" in word] for place, of_place in words.items()} == {
        STRESSED: ["schedule.warmup=0.01"],
        AT_EASE: ["schedule.warmup=0.25"],
    }
    assert all("peri_ln" in " ".join(of_place) for of_place in words.values())


def test_an_arm_with_some_of_its_fresh_seeds_is_not_confirmed() -> None:
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    tables[at] = tables[at].loc[[*RULE.screened, *RULE.fresh[:3]]]
    cell = board.judge_arms(FAILURE, tables, RULE)[0]["peri_ln"]
    assert (cell.verdict, cell.is_confirmed, cell.improvement.n) == (OPEN, False, len(RULE.screened))


def test_the_screening_lets_those_pass_that_take_off_enough() -> None:
    assert passes_screening(FAILURE, planted_board.tables(), RULE) == ["sigma_reparam", "peri_ln"]
    assert not passes_screening(FAILURE, planted_board.tables(lost=0.0), RULE)
    tables = planted_board.tables()
    at = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    tables[at] = tables[at].drop(RULE.screened[1])  # what is screened in part does not pass
    assert passes_screening(FAILURE, tables, RULE) == ["sigma_reparam"]


def test_a_moderated_spread_keeps_its_level_and_finds_more_than_that_of_three_seeds() -> None:
    rng, arms, seeds = np.random.default_rng(1), 40, 3
    wrong = found = alone = 0
    for _ in range(60):
        sd = 0.1 / np.sqrt(rng.chisquare(10, arms) / 10)
        values = sd[:, None] * rng.standard_normal((arms, seeds))
        prior = spread_prior(list(values))
        wrong += sum(board.compared(row, prior).p < 0.05 for row in values)
        found += sum(board.compared(row + 0.3, prior).p < 0.05 for row in values)
        alone += sum(board.compared(row + 0.3, spread_prior([])).p < 0.05 for row in values)
    assert 0.03 < wrong / (60 * arms) < 0.07
    assert found > 1.3 * alone


def matrix(tables: Mapping[Cell, pd.DataFrame]) -> Matrix:
    return matrix_of(Path("nowhere"), tables, {(FAILURE.name, "dyt"): "it was refused"})


def sentences(made: Matrix) -> list[str]:
    """Its headline and its notes."""
    return [headline(made), *notes(made)]


def test_every_row_says_what_the_arm_costs_and_tolerates() -> None:
    by_name = {row.name: row for row in matrix(planted_board.tables()).rows}
    cure, none = by_name["sigma_reparam"], by_name["rmsnorm"]
    assert cure.within_reference > none.within_reference + 0.5
    assert cure.is_bound
    assert abs(none.best.mean) < 0.05
    assert none.trains


def test_an_arm_that_was_not_tried_says_why() -> None:
    tables = planted_board.tables() | {
        Cell(CURVE, "dyt", CURVE, lr): table for lr, table in curve_of(planted_board.tables(), "rmsnorm").items()
    }
    cell = next(row for row in matrix(tables).rows if row.name == "dyt").cells[FAILURE.name]
    assert (cell.verdict, cell.reason) == (NOT_TRIED, "it was refused")


def curve_of(tables: Mapping[Cell, pd.DataFrame], arm: str) -> dict[float, pd.DataFrame]:
    return {cell.lr: table for cell, table in tables.items() if cell.arm == arm and cell.failure == CURVE}


def test_what_is_trained_in_part_is_not_judged() -> None:
    tables = planted_board.tables()
    at, control = (Cell(FAILURE.name, arm, STRESSED, LR) for arm in ("rmsnorm", REFERENCE))
    part = matrix(tables | {at: tables[at].iloc[:2]})
    cell = next(row for row in part.rows if row.name == "rmsnorm").cells[FAILURE.name]
    assert (cell.verdict, cell.reason) == (NOT_TRIED, INCOMPLETE)
    assert not matrix(tables | {control: tables[control].iloc[1:]}).failures
    for curve in [cell for cell in tables if cell.arm == "rmsnorm" and cell.failure == CURVE]:
        tables[curve] = tables[curve].iloc[1:]
    assert next(row for row in matrix(tables).rows if row.name == "rmsnorm").best.n == 0


def test_the_first_line_names_what_to_add_and_what_it_costs() -> None:
    first = headline(matrix(planted_board.tables()))
    assert first.startswith("Takes damage away: sigma_reparam under attention logits (best loss ")
    assert first.endswith("Trains better at its best learning rate: none.")
    without = planted_board.tables({"peri_ln": 0.5, "rmsnorm": 0.0})
    assert "No arm takes all damage away" in headline(matrix(without))
    assert "attention logits (peri_ln: " in headline(matrix(without))
    both = planted_board.tables({"sub_ln": 0.35, "peri_ln": 0.5, "normformer": 0.3, "rmsnorm": 0.0})
    assert "attention logits (peri_ln: " in headline(matrix(both))


def test_the_first_line_says_apart_which_arms_train_better() -> None:
    tables = planted_board.tables()
    for cell in [cell for cell in tables if cell.failure == CURVE and cell.arm == "rmsnorm"]:
        tables[cell] = tables[cell].assign(loss=tables[cell]["loss"] - 0.3)
    assert re.search(r"Trains better at its best learning rate: rmsnorm \(-0\.[23]\d\d ± ", headline(matrix(tables)))


def test_the_first_line_counts_all_cells_of_the_board() -> None:
    tables = planted_board.tables({"sigma_reparam": 1.0, "rmsnorm": 0.0}, spread=0.14)
    made = matrix(tables)
    cell = next(row for row in made.rows if row.name == "sigma_reparam").cells[FAILURE.name]
    other = Family(frozenset(f"arm{number}" for number in range(1000)), made.families[FAILURE.name].prior)
    many = replace(made, families={**made.families, "mx": other})
    assert made.holds_over_the_board(FAILURE, cell)
    assert not many.holds_over_the_board(FAILURE, cell._replace(p=0.01))
    unsure = [
        replace(row, cells={FAILURE.name: cell._replace(verdict=CURES, p=0.01, cost_at_ease=0.0)})
        if row.name == "sigma_reparam"
        else row
        for row in made.rows
    ]
    assert "away: sigma_reparam under" in headline(replace(made, rows=unsure))
    assert "No arm takes all damage away" in headline(replace(many, rows=unsure))


def test_a_cell_that_passed_and_was_not_confirmed_has_its_price() -> None:
    tables = planted_board.tables()
    for place, lr in ((STRESSED, LR), (AT_EASE, EASY)):
        at = Cell(FAILURE.name, "peri_ln", place, lr)
        tables[at] = tables[at].loc[list(RULE.screened)]
    made = matrix(tables)
    assert unconfirmed(made) == [(FAILURE.name, "peri_ln")]
    assert any(
        "1 cells passed and were not confirmed, which would cost 12 core-minutes" in line for line in sentences(made)
    )


def test_failures_that_rank_arms_alike_are_named() -> None:
    shares = {name: 0.08 * number for number, name in enumerate(list(board_arms())[1:10])}
    tables = planted_board.tables(shares)
    other = read_failures().failures["short_warmup"]
    turned = read_failures().failures["large_batch"]
    for failure, sign in ((other, 1), (turned, -1)):
        for (_, arm, place, _), table in [item for item in tables.items() if item[0].failure == FAILURE.name]:
            lr = failure.places[place].lr
            moved = table["loss"] if sign > 0 or arm == REFERENCE else table["loss"] + 2 * LOST * shares[arm]
            tables[Cell(failure.name, arm, place, lr)] = table.assign(
                loss=moved if place == STRESSED else table["loss"]
            )
    made = matrix(tables)
    (found,) = alike(made)
    assert (found.a, found.b, found.is_certain, found.correlation.n) == ("attention logits", "short warm-up", True, 9)
    assert any("so they are hardly two failures" in line for line in sentences(made))
    swapped = dict(tables)
    for low, high in (("qk_layernorm", "qk_rmsnorm"), ("qkv_norm", "score_softcap")):
        for place in (STRESSED, AT_EASE):
            a, b = (Cell(other.name, arm, place, other.places[place].lr) for arm in (low, high))
            swapped |= {a: tables[b], b: tables[a]}
    (found,) = alike(matrix(swapped))
    assert 0.8 < found.correlation.mean < 1
    assert found.correlation.low < 0.7
    assert any("rank 9 arms alike" in line and "too few to tell" in line for line in sentences(matrix(swapped)))
    fewer = {name: family._replace(arms=frozenset([*family.arms][:7])) for name, family in made.families.items()}
    assert not alike(replace(made, families=fewer))  # arms that were added later do not count


def test_an_arm_whose_best_loss_is_much_worse_is_not_advised() -> None:
    tables = planted_board.tables()
    for cell in [cell for cell in tables if cell.arm == "sigma_reparam" and cell.failure == CURVE]:
        tables[cell] = tables[cell].assign(loss=tables[cell]["loss"] + 0.08)
    told = sentences(matrix(tables))
    assert "sigma_reparam" not in told[0]
    assert "Not advised, since the best loss is over 0.05 nats worse: sigma_reparam." in told


def test_an_arm_takes_the_place_of_what_cannot_stand_beside_it() -> None:
    arms = board_arms()
    control = ("qk_layernorm", "z_loss")
    assert (
        interventions(control, arms["qk_rmsnorm"], {"qk_rmsnorm": ["qk_layernorm"]})
        == "intervention=[qk_rmsnorm,z_loss]"
    )
    assert interventions(control, arms["muon"], {}) == "intervention=[qk_layernorm,z_loss]"


def test_an_arm_with_another_unit_takes_other_learning_rates() -> None:
    arm = board_arms()["lion"]
    lrs = [setting.lr for cell, setting in settings(arm, [0], {}, []).items() if cell.failure == CURVE]
    assert lrs == [pytest.approx(lr * arm.lr_multiplier) for lr in read_failures().grid]
    assert arm.lr_multiplier < 1


def test_the_keys_of_a_failure_that_an_optimizer_lacks_are_left_out() -> None:
    failure = read_failures().failures["own_spikes"]
    for name, has_clip in (("stable_spam", False), ("adamw_zclip", True), (REFERENCE, True)):
        cell = Cell(failure.name, name, STRESSED, failure.stressed.lr)
        words = settings(board_arms()[name], [0], {}, [failure])[cell].words
        assert ("optimizer.clip=inf" in words) == has_clip


def test_an_arm_that_acts_on_the_stress_alone_is_the_control_at_ease() -> None:
    failures = read_failures().failures
    arms = {name: board_arms()[name] for name in (REFERENCE, "bf16_ends", "hadamard_weight_gradients", "tighter_clip")}
    wanted = {
        cell: setting for arm in arms.values() for cell, setting in settings(arm, [0], {}, [failures["mx"]]).items()
    }
    request = read_request([*read_failures().runs, "out=nowhere"], "lab leaderboard nowhere --train", name="board")
    trees, reasons = _composed(request, arms, {cell: wanted[cell] for cell in wanted if cell.failure == "mx"})
    assert not reasons
    at_ease, stressed = (
        {cell.arm: tree for cell, (tree,) in trees.items() if cell.place == place} for place in (AT_EASE, STRESSED)
    )
    assert at_ease["bf16_ends"] == at_ease["hadamard_weight_gradients"] == at_ease[REFERENCE] != at_ease["tighter_clip"]
    assert len({str(tree) for tree in stressed.values()}) == 4


def test_an_unknown_arm_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'perry_ln'; nearest: peri_ln"):
        chosen_arms(["perry_ln"])


def test_an_arm_that_needs_no_runs_says_why() -> None:
    failures = [read_failures().failures[name] for name in ("beyond_qk_norm", "short_warmup")]
    arms = {name: board_arms()[name] for name in ("qk_layernorm", "longer_warmup", "adamw_qk_clip")}
    wanted = {cell: setting for arm in arms.values() for cell, setting in settings(arm, [0], {}, failures).items()}
    stressed = {cell: setting for cell, setting in wanted.items() if cell.place == STRESSED}
    request = read_request([*read_failures().runs, "out=nowhere"], "lab leaderboard nowhere --train", name="board")
    trees, reasons = _composed(request, arms, stressed)
    assert [cell[:2] for cell in trees] == [("beyond_qk_norm", "longer_warmup")]
    assert reasons["short_warmup", "longer_warmup"] == "it takes the stress away"
    assert reasons["beyond_qk_norm", "qk_layernorm"] == "the control has it"
    assert "'qk_clip' scales queries and keys" in reasons["beyond_qk_norm", "adamw_qk_clip"]


def test_an_arm_that_acts_on_experts_is_not_tried_where_there_are_none() -> None:
    failures = [read_failures().failures[name] for name in ("attention_logits", "experts", "router_logits")]
    arms = {name: board_arms()[name] for name in ("balance", "router_bias", "router_z")}
    wanted = {cell: setting for arm in arms.values() for cell, setting in settings(arm, [0], {}, failures).items()}
    request = read_request([*read_failures().runs, "out=nowhere"], "lab leaderboard nowhere --train", name="board")
    trees, reasons = _composed(request, arms, wanted)
    assert {cell[:2] for cell in trees} == {(failure.name, arm) for failure in failures[1:] for arm in arms}
    assert set(reasons) == {(name, arm) for name in (CURVE, "attention_logits") for arm in arms}
    assert set(reasons.values()) == {"it acts on experts, which this recipe has none of"}


def test_a_cure_that_acts_on_experts_is_not_tried_on_a_dense_recipe() -> None:
    dense, mixture = ({"intervention": dict.fromkeys(names)} for names in (["z_loss"], ["experts", "z_loss"]))
    assert reason_of_card(arm_cards()["balance"], dense) == "it acts on experts, which this recipe has none of"
    assert not reason_of_card(arm_cards()["balance"], mixture)


def test_an_arm_that_acts_on_experts_is_judged_on_their_failures_alone() -> None:
    failure = read_failures().failures["experts"]
    loads = {REFERENCE: 1.0, "balance": 0.1, "router_bias": 0.6, "muon": 1.0, "router_z": 1.02}
    rng, tables = np.random.default_rng(0), planted_board.tables()
    for arm, load in loads.items():
        seeds = [*RULE.screened, *RULE.fresh]
        numbers = {"load_cv": load + 0.02 * rng.standard_normal(9), "loss": 2 + 0.02 * rng.standard_normal(9)}
        table = pd.DataFrame({**numbers, "parameters": 9000, "versions": "here", "seconds": 60.0}, index=seeds)
        tables[Cell(failure.name, arm, STRESSED, failure.stressed.lr)] = table
    by_name = {row.name: row for row in matrix(tables).rows}
    found = {arm: by_name[arm].cells[failure.name].verdict for arm in loads if arm != REFERENCE}
    assert found == {"balance": CURES, "router_bias": IN_PART, "muon": NO, "router_z": NO}
    elsewhere = by_name["balance"].cells[FAILURE.name]
    assert (elsewhere.verdict, elsewhere.reason) == (NOT_TRIED, "it acts on experts, which this recipe has none of")
    assert by_name["balance"].best.n == 0
    assert "balance under uneven experts" in headline(matrix(tables))


def test_an_optimizer_of_blocks_is_not_judged_where_there_are_none() -> None:
    failure = FAILURE._replace(leaves_out=("rmsnorm",))
    found, *_ = board.judge_arms(failure, planted_board.tables(), RULE)
    assert "rmsnorm" not in found
    assert "rmsnorm" in board.judge_arms(FAILURE, planted_board.tables(), RULE)[0]
    rounding = read_failures().failures["logit_rounding"]
    assert not_applicable(board_arms()["muon"], rounding).startswith("it acts on the matrices of blocks")
    assert not not_applicable(board_arms()["lion"], rounding)


def test_a_board_keeps_what_it_trained_and_why_not(tmp_path: Path) -> None:
    cell = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    runs, reasons = {cell: {300: "a-1", 301: "b-2"}}, {(FAILURE.name, "dyt"): "no, since"}
    (tmp_path / CELLS).write_text(cells_table(runs, reasons).to_csv(index=False))
    assert read_cells(tmp_path) == (runs, reasons)
    with pytest.raises(RequestError, match="--train"):
        read_cells(tmp_path / "elsewhere")


def test_the_board_is_a_page_a_text_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = planted_board.write(tmp_path / "board", planted_board.tables()), tmp_path / "page.html"
    assert main(["leaderboard", str(folder), "--html", str(page)]) == 0
    shown = page.read_text()
    assert 'class="cures" title="sigma_reparam, attention logits: cures' in shown
    assert shown.index("Takes damage away: sigma_reparam") < shown.index("<svg") < shown.index("<table")
    capsys.readouterr()
    assert main(["leaderboard", str(folder), "--json"]) == 0
    cells = {cell["arm"]: cell for cell in json.loads(capsys.readouterr().out)["cells"]}
    assert (cells["peri_ln"]["verdict"], cells["peri_ln"]["direction"], cells["peri_ln"]["seeds"]) == (
        IN_PART,
        "better",
        6,
    )
    assert main(["leaderboard", str(folder), "--csv"]) == 0
    table = pd.read_csv(io.StringIO(capsys.readouterr().out)).set_index("arm")
    assert dict(table["verdict"]) == {arm: cells[arm]["verdict"] for arm in cells}
    assert main(["leaderboard", str(folder)]) == 0
    assert "cures " in capsys.readouterr().out


def test_a_page_names_the_arms_that_help_and_says_why_others_were_not_tried(tmp_path: Path) -> None:
    tables = planted_board.tables()
    curve = {Cell(CURVE, "dyt", CURVE, lr): table for lr, table in curve_of(tables, "rmsnorm").items()}
    made = matrix(tables | curve)
    shown = answer_of(made).html()
    assert 'title="it was refused"' in shown
    assert "3 arms that are not shown to take any away" in shown  # an open one may
    named = {text.get_text() for axes in board_figure(made).figure.axes for text in axes.texts}
    assert named & {*planted_board.SHARES} == {"sigma_reparam", "peri_ln"}


def test_a_board_trains_fresh_seeds_of_what_passes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = planted_board.write(tmp_path / "board", planted_board.tables()), list[set[Cell]]()
    monkeypatch.setattr(board_training, "_train", lambda request, folder, arms, wanted: asked.append({*wanted}))
    monkeypatch.setattr(store, "gather", lambda folder: None)
    board_training.train_board(folder, "lab leaderboard --train", failures=[FAILURE.name])
    first, fresh = asked
    assert {cell.arm for cell in first} == {REFERENCE, *planted_board.SHARES}
    assert {cell[:2] for cell in fresh} == {(FAILURE.name, arm) for arm in (REFERENCE, "sigma_reparam", "peri_ln")}
    assert {cell.place for cell in fresh} == {STRESSED, AT_EASE}
    fixed = read_families(folder)
    assert fixed[FAILURE.name].arms == {*planted_board.SHARES}
    board_training.train_board(folder, "lab leaderboard --train", arms=["dyt"], failures=[FAILURE.name])
    assert {cell.arm for cell in asked[2]} == {REFERENCE, "dyt"}
    assert read_families(folder) == fixed
    with pytest.raises(RequestError, match="'larg_batch'"):
        board_training.train_board(folder, "", failures=["larg_batch"])


def test_a_board_asks_again_for_what_it_has_tried_and_trains_no_control_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, asked = planted_board.tables({"rmsnorm": 0.0, "nope": -0.6}), list[set[str]]()
    for cell in [cell for cell in tables if cell.arm == "nope"]:
        tables[cell] = tables[cell].iloc[:2]
        if cell.failure == CURVE:
            del tables[cell]
    folder = planted_board.write(tmp_path, tables)
    monkeypatch.setattr(
        board_training,
        "_train",
        lambda request, folder, arms, wanted: asked.append({cell.arm for cell in wanted if cell.failure != CURVE}),
    )
    monkeypatch.setattr(store, "gather", lambda folder: None)
    board_training.train_board(folder, "lab leaderboard --train", failures=[FAILURE.name])
    assert asked == [{REFERENCE, "rmsnorm"}]  # two seeds are no try, and nothing passed


def test_fresh_seeds_stand_beside_those_that_a_cell_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planted_board.write(tmp_path, planted_board.tables())
    at = Cell(FAILURE.name, "rmsnorm", STRESSED, LR)
    before, _ = read_cells(folder)
    plan = SimpleNamespace(ids=["fresh"], engine="cpu", fleets=[])
    monkeypatch.setattr(board_training, "_composed", lambda *of_cells: ({at: [{"seed": 303}]}, {}))
    monkeypatch.setattr(bench.launch, "compose", lambda request: composed)
    monkeypatch.setattr(bench.launch, "plan", lambda *trees, cautions: plan)
    monkeypatch.setattr(bench.launch, "train_missing", lambda *planned, screen: None)
    monkeypatch.setattr(store, "open_folder", lambda *of_folder: None)
    composed = SimpleNamespace(_replace=lambda trees: None, launcher=None)
    request = read_request([*read_failures().runs, "out=nowhere"], "lab leaderboard nowhere --train", name="board")
    board_training._train(request, folder, [board_arms()["rmsnorm"]], {at: Setting((), LR)})
    after, _ = read_cells(folder)
    assert after[at] == before[at] | {303: "fresh"}
    assert {cell: runs for cell, runs in after.items() if cell != at} == {
        cell: runs for cell, runs in before.items() if cell != at
    }


def test_families_that_are_fixed_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planted_board.write(tmp_path, planted_board.tables())
    earlier = {FAILURE.name: Family(frozenset({"nope"}), Spread(0.5, 3.0))}
    (folder / FAMILIES).write_text(board.families_table(earlier).to_csv(index=False))
    monkeypatch.setattr(board_training, "_train", lambda *of_train: None)
    monkeypatch.setattr(store, "gather", lambda folder: None)
    board_training.train_board(folder, "lab leaderboard --train", failures=[FAILURE.name])
    assert read_families(folder) == earlier


def test_no_cell_of_the_board_as_csv_is_a_formula() -> None:
    made = matrix(planted_board.tables())
    rows = [replace(row, name=f"={row.name}") if row.name == "peri_ln" else row for row in made.rows]
    arms = pd.read_csv(io.StringIO(as_csv(replace(made, rows=rows))))["arm"]
    assert {"'=peri_ln", "sigma_reparam"} < set(arms)
    assert not arms.str.startswith("=").any()


def test_a_page_tells_of_every_arm_that_is_described() -> None:
    pages = SCRIPT["markdown_pages"](matrix(planted_board.tables()), {})
    assert {f"{name}.md" for name in arm_cards()} | {"index.md"} == {*pages}
    assert "| attention logits | cures |" in pages["sigma_reparam.md"]
    assert "lab leaderboard DIR --train --arms muon" in pages["muon.md"]
    assert "| takes the place of | norms before branches |" in pages["reordered_norm.md"]
    assert "takes the place of" not in pages["peri_ln.md"]
    assert max(len(line) for text in pages.values() for line in text.splitlines()) < 1000


@pytest.mark.slow
def test_pages_of_arms_are_up_to_date() -> None:
    """`python docs/interventions.py` writes them."""
    found = {path.name: path.read_text(encoding="utf-8") for path in SCRIPT["FOLDER"].iterdir()}
    assert found == SCRIPT["pages"]()


def test_every_intervention_and_optimizer_is_on_the_board_or_left_out() -> None:
    described = {name: card.is_optimizer for name, card in arm_cards().items()}
    own = {name for name in INTERVENTIONS if INTERVENTIONS[name].__module__.startswith("lab.")}
    files = {path.stem for path in (data_folder("conf") / "optimizer").glob("*.yaml")}
    assert own == {name for name in described if not described[name]} | (set(left_out()) & own)
    assert files == {name for name in described if described[name]} | (set(left_out()) - set(INTERVENTIONS))
    assert not set(described) & set(left_out())
    assert {path.stem for path in SCRIPT["FOLDER"].glob("*.md")} - {"index"} == {*described}


@pytest.mark.parametrize("name", arm_cards())
def test_an_arm_says_what_it_is(name: str) -> None:
    card = arm_cards()[name]
    assert all((card.title, card.formula, card.source))
    assert card.lr in ("same", "shifted", "other")
    assert isinstance(card.defaults, Mapping)
    if card.is_optimizer:
        return
    entry = INTERVENTIONS[name]
    places = set(getattr(entry, "hook_points", ()))
    assert {place for place in card.at if place not in ("loss", "update", "initial values")} == places
    assert ("update" in card.at) == hasattr(entry, "lr_factor")
    assert ("loss" in card.at) == hasattr(entry, "uses")
    assert (card.needs,) == (getattr(entry, "requires", ()) or ("",))


def test_a_page_shows_a_hostile_command_as_text(tmp_path: Path) -> None:
    folder = planted_board.write(tmp_path, planted_board.tables())
    store.note_command(folder, "lab leaderboard '<script>alert(1)</script>' --train")
    found = read_matrix(folder)
    made = answer_of(found, [*how_made(found)]).html()
    assert "<script>alert" not in made
    assert "&lt;script&gt;alert(1)" in made


def test_notebooks_get_the_board_as_a_table(tmp_path: Path) -> None:
    folder = planted_board.write(tmp_path, planted_board.tables())
    table = leaderboard(folder)
    assert table.index[0] == "sigma_reparam"
    assert table.loc["sigma_reparam", "attention logits"].startswith("cures 9")


@pytest.mark.slow
def test_a_report_of_many_arms_draws_one_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ["z_loss", *(f"{name}+z_loss" for name in ("dyt", "peri_ln", "relu", "rmsnorm"))]
    folder = planted.write(tmp_path / "runs", list(planted.cards(arms, lrs=planted.LRS[::3], seeds=(10,))))
    monkeypatch.setattr(build, "MOST_ARMS", 4)
    monkeypatch.setattr(build, "MOST_PAIRS", 9)
    make_report([folder])
    assert len(list((folder / "figures").glob("*.svg"))) == 1
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "With 5 arms only one figure is drawn" in text
    assert "20 differences are more than a page shows" in text


def test_an_arm_has_the_public_runs_that_broke_with_it() -> None:
    found = broken_public_runs()
    assert [str(broken) for broken in found["muon"]] == ["3 of 128 at 130M", "2 of 38 at 300M"]
    assert found["longer_warmup"] == [Broken("130M", 0, 27), Broken("300M", 0, 16)]
    assert {*found} <= {*board_arms()}
    for arm, shown in (("lion", "12 of 93 at 130M, 4 of 34 at 300M"), ("rmsnorm", "")):
        row = Row(arm, {}, UNKNOWN, True, math.nan, math.nan, False, 0)
        assert prices(row)["broke in public runs"] == shown
