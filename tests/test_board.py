"""The board: how an arm is judged on a failure, what is trained, and what the board says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.analysis.statistics import spread_prior
from lab.cli.board import _composed
from lab.cli.request import read_request
from lab.core.errors import RequestError
from lab.studies.leaderboard import matrix as board
from lab.studies.leaderboard.failures import (
    AT_EASE,
    CELLS,
    CURVE,
    REFERENCE,
    STRESSED,
    Cell,
    board_arms,
    cells_table,
    chosen_arms,
    interventions,
    read_cells,
    read_failures,
    settings,
)
from lab.studies.leaderboard.matrix import (
    CURES,
    HARMS,
    IN_PART,
    NEVER_ENGAGED,
    NO,
    NOT_TESTED,
    NOT_TRIED,
    OPEN,
    Matrix,
    matrix_of,
    passes_screening,
)
from lab.studies.leaderboard.text import headline, lines

FAILURE, RULE = read_failures().failures["attention_logits"], read_failures().rule
LR, EASY = FAILURE.stressed.lr, 0.03
AT_INIT, BIGRAM, BEST = 4.5, 2.43, 2.4
LOST = 0.5
SPREAD = 0.02
# arms with distinct true shares of the loss that they take off; the names are those of arms of the board
SHARES = {"sigma_reparam": 1.0, "peri_ln": 0.5, "rmsnorm": 0.0, "nope": -0.6}


def planted(
    shares: Mapping[str, float] = SHARES, lost: float = LOST, spread: float = SPREAD
) -> dict[Cell, pd.DataFrame]:
    """A board of one failure, whose arms take off these shares of what its control loses."""
    rng, tables = np.random.default_rng(0), dict[Cell, pd.DataFrame]()

    def add(cell: Cell, loss: float, seeds: tuple[int, ...], seconds: float = 2.0) -> None:
        table = pd.DataFrame({"loss": loss + spread * rng.standard_normal(len(seeds))}, index=list(seeds))
        numbers = {"loss_at_init": AT_INIT, "loss_bigram": BIGRAM, "parameters": 1000, "seconds": seconds}
        tables[cell] = table.assign(**numbers)

    every = (*RULE.screened, *RULE.fresh)
    add(Cell(FAILURE.name, REFERENCE, STRESSED, LR), BEST + lost, every)
    add(Cell(FAILURE.name, REFERENCE, AT_EASE, EASY), BEST, every)
    for arm, share in shares.items():
        is_confirmed = share >= RULE.passes_screening
        add(Cell(FAILURE.name, arm, STRESSED, LR), BEST + lost * (1 - share), every if is_confirmed else RULE.screened)
    for arm in (REFERENCE, *shares):
        for lr in read_failures().grid:
            loss = BEST - 0.1 + (lost if arm == REFERENCE or shares[arm] < 1 else 0.0) * (lr > EASY) * 2
            add(Cell(CURVE, arm, CURVE, lr), loss, RULE.screened, 2.0 if arm == REFERENCE else 3.0)
    return tables


def verdicts(tables: Mapping[Cell, pd.DataFrame]) -> dict[str, str]:
    found, *_ = board.judge(FAILURE, tables, RULE)
    return {arm: cell.verdict for arm, cell in found.items()}


def test_an_arm_is_judged_by_the_share_of_the_loss_that_it_takes_off() -> None:
    assert verdicts(planted()) == {"sigma_reparam": CURES, "peri_ln": IN_PART, "rmsnorm": NO, "nope": HARMS}


def test_no_cure_is_told_where_the_control_loses_nothing() -> None:
    assert set(verdicts(planted(lost=0.0)).values()) == {NOT_TESTED}


def test_an_arm_whose_runs_are_the_controls_never_engaged() -> None:
    tables = planted()
    control = tables[Cell(FAILURE.name, REFERENCE, STRESSED, LR)]
    tables[Cell(FAILURE.name, "rmsnorm", STRESSED, LR)] = control.loc[list(RULE.screened)]
    assert verdicts(tables)["rmsnorm"] == NEVER_ENGAGED
    nearly = control.loc[list(RULE.screened)].assign(loss=lambda table: np.nextafter(table["loss"], 9))
    assert verdicts(tables | {Cell(FAILURE.name, "rmsnorm", STRESSED, LR): nearly})["rmsnorm"] == NO


def test_a_wide_spread_leaves_arms_open() -> None:
    assert verdicts(planted({"peri_ln": 0.1, "rmsnorm": 0.05, "dyt": 0.0}, spread=0.5)) == {
        "peri_ln": OPEN,
        "rmsnorm": OPEN,
        "dyt": OPEN,
    }


def test_confirmed_arms_are_judged_by_fresh_seeds_alone() -> None:
    tables = planted()
    at = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    tables[at].loc[list(RULE.fresh), "loss"] = BEST + LOST
    found, *_ = board.judge(FAILURE, tables, RULE)
    assert found["peri_ln"].is_confirmed
    assert abs(found["peri_ln"].share) < 0.15


def test_the_screening_lets_those_pass_that_take_off_enough() -> None:
    assert passes_screening(FAILURE, planted(), RULE) == ["sigma_reparam", "peri_ln"]
    assert not passes_screening(FAILURE, planted(lost=0.0), RULE)


def test_a_moderated_spread_keeps_its_level_and_finds_more_than_that_of_three_seeds() -> None:
    rng, arms, seeds = np.random.default_rng(1), 40, 3
    wrong = found = alone = 0
    for _ in range(60):
        sd = 0.1 / np.sqrt(rng.chisquare(10, arms) / 10)
        values = sd[:, None] * rng.standard_normal((arms, seeds))
        prior = spread_prior(list(values))
        wrong += sum(board._test(row, prior).p < 0.05 for row in values)
        found += sum(board._test(row + 0.3, prior).p < 0.05 for row in values)
        alone += sum(board._test(row + 0.3, spread_prior([])).p < 0.05 for row in values)
    assert 0.03 < wrong / (60 * arms) < 0.07
    assert found > 1.3 * alone


def matrix(tables: Mapping[Cell, pd.DataFrame]) -> Matrix:
    return matrix_of(Path("nowhere"), tables, {(FAILURE.name, "dyt"): "it was refused"})


def test_every_row_says_what_the_arm_costs_and_tolerates() -> None:
    by_name = {row.name: row for row in matrix(planted()).rows}
    cure, none = by_name["sigma_reparam"], by_name["rmsnorm"]
    assert cure.time == pytest.approx(1.5)
    assert cure.within_reference > none.within_reference + 0.5
    assert cure.is_bound
    assert abs(none.best.mean) < 0.05
    assert none.trains


def test_an_arm_that_was_not_tried_says_why() -> None:
    tables = planted() | {Cell(CURVE, "dyt", CURVE, lr): table for lr, table in curve_of(planted(), "rmsnorm").items()}
    cell = next(row for row in matrix(tables).rows if row.name == "dyt").cells[FAILURE.name]
    assert (cell.verdict, cell.reason) == (NOT_TRIED, "it was refused")


def curve_of(tables: Mapping[Cell, pd.DataFrame], arm: str) -> dict[float, pd.DataFrame]:
    return {cell.lr: table for cell, table in tables.items() if cell.arm == arm and cell.failure == CURVE}


def test_the_first_line_names_what_to_add_and_what_it_costs() -> None:
    assert headline(matrix(planted())).startswith(
        "Add sigma_reparam against attention logits (1.50 times the time, best"
    )
    without = planted({"peri_ln": 0.5, "rmsnorm": 0.0})
    assert "No arm cures" in headline(matrix(without))
    assert "attention logits (peri_ln: " in headline(matrix(without))


def test_an_arm_whose_best_loss_is_much_worse_is_not_advised() -> None:
    tables = planted()
    for cell in [cell for cell in tables if cell.arm == "sigma_reparam" and cell.failure == CURVE]:
        tables[cell] = tables[cell].assign(loss=tables[cell]["loss"] + 0.08)
    told = list(lines(matrix(tables)))
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
    assert lrs == [pytest.approx(lr * arm.times) for lr in read_failures().grid]
    assert arm.times < 1


def test_the_keys_of_a_failure_that_an_optimizer_lacks_are_left_out() -> None:
    failure = read_failures().failures["own_spikes"]
    for name, has_clip in (("stable_spam", False), ("adamw_zclip", True), (REFERENCE, True)):
        cell = Cell(failure.name, name, STRESSED, failure.stressed.lr)
        words = settings(board_arms()[name], [0], {}, [failure])[cell].words
        assert ("optimizer.clip=inf" in words) == has_clip


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


def test_a_board_keeps_what_it_trained_and_why_not(tmp_path: Path) -> None:
    cell = Cell(FAILURE.name, "peri_ln", STRESSED, LR)
    runs, reasons = {cell: {300: "a-1", 301: "b-2"}}, {(FAILURE.name, "dyt"): "no, since"}
    (tmp_path / CELLS).write_text(cells_table(runs, reasons).to_csv(index=False))
    assert read_cells(tmp_path) == (runs, reasons)
    with pytest.raises(RequestError, match="--train"):
        read_cells(tmp_path / "elsewhere")
