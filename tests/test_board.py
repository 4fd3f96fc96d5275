"""The board: how an arm is judged on a failure, what is trained, and what the board says."""

from __future__ import annotations

import io
import json
import runpy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import planted
import planted_board
from lab.__main__ import main
from lab.analysis import leaderboard, transfer
from lab.analysis.statistics import spread_prior
from lab.cli.board import _composed
from lab.cli.recipe import reason_of_card
from lab.cli.request import read_request
from lab.core.errors import RequestError
from lab.core.registry import INTERVENTIONS
from lab.core.shipped import data_folder
from lab.records import store
from lab.report import build
from lab.report.build import make_report
from lab.studies.leaderboard import matrix as board
from lab.studies.leaderboard.arms import arm_cards, left_out
from lab.studies.leaderboard.failures import (
    CELLS,
    CURVE,
    REFERENCE,
    STRESSED,
    Cell,
    board_arms,
    cells_table,
    chosen_arms,
    interventions,
    not_applicable,
    read_cells,
    read_failures,
    settings,
)
from lab.studies.leaderboard.matrix import (
    CURES,
    HARMS,
    IN_PART,
    INCOMPLETE,
    NEVER_ENGAGED,
    NO,
    NOT_TESTED,
    NOT_TRIED,
    OPEN,
    Matrix,
    matrix_of,
    passes_screening,
    read_matrix,
)
from lab.studies.leaderboard.page import board_page
from lab.studies.leaderboard.text import as_csv, headline, lines
from planted_board import BEST, FAILURE, LOST, LR, RULE, SPREAD

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "interventions.py"))


def verdicts(tables: Mapping[Cell, pd.DataFrame]) -> dict[str, str]:
    found, *_ = board.judge(FAILURE, tables, RULE)
    return {arm: cell.verdict for arm, cell in found.items()}


def test_an_arm_is_judged_by_the_share_of_the_loss_that_it_takes_off() -> None:
    assert verdicts(planted_board.tables()) == {
        "sigma_reparam": CURES,
        "peri_ln": IN_PART,
        "rmsnorm": NO,
        "nope": HARMS,
    }


@pytest.mark.parametrize(("share", "verdict"), [(0.72, IN_PART), (0.88, CURES)])
def test_a_cure_leaves_no_more_than_the_margin(share: float, verdict: str) -> None:
    assert verdicts(planted_board.tables({"peri_ln": share}))["peri_ln"] == verdict


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
    found, *_ = board.judge(FAILURE, tables, RULE)
    assert found["peri_ln"].is_confirmed
    assert abs(found["peri_ln"].share) < 0.15


def planted_effects(spread: float = SPREAD, **shares: float) -> dict[Cell, pd.DataFrame]:
    """Arms whose paired effects over seeds have these shares as means, and this spread exactly."""
    tables, wave = planted_board.tables(shares), np.array([1.0, -1.0, 0.0])
    at = Cell(FAILURE.name, REFERENCE, STRESSED, LR)
    for arm, share in shares.items():
        table = tables[at._replace(arm=arm)].copy()
        stage = [seeds for seeds in (RULE.screened, RULE.fresh) if {*seeds} <= {*table.index}]
        for seeds in stage:
            moved = share * LOST + spread * np.resize(wave, len(seeds))
            table.loc[list(seeds), "loss"] = tables[at].loc[list(seeds), "loss"] - moved
        tables[at._replace(arm=arm)] = table
    return tables


def test_p_is_adjusted_for_the_arms_that_were_tried_on_the_same_seeds() -> None:
    arms = [name for name in board_arms() if name != REFERENCE][:8]
    found, *_ = board.judge(FAILURE, planted_effects(0.2 * LOST, **{arms[0]: -0.35}), RULE)
    alone = found[arms[0]]
    found, *_ = board.judge(FAILURE, planted_effects(0.2 * LOST, **dict.fromkeys(arms, -0.35)), RULE)
    beside = found[arms[0]]
    assert beside.takes_off.mean == pytest.approx(alone.takes_off.mean)
    assert beside.p > 2 * _unadjusted(beside)
    assert all(cell.p == pytest.approx(len(arms) * _unadjusted(cell)) or cell.p == 1 for cell in found.values())


def _unadjusted(cell: board.Judged) -> float:
    prior = spread_prior([np.array(cell.takes_off.values)] * 8)
    return board.compared(np.array(cell.takes_off.values), prior).p


def test_no_effect_needs_the_whole_interval_within_the_margin() -> None:
    values = np.array([-0.1, 0.0, 0.1, 0.05, -0.05, 0.0])
    test = board.compared(values, spread_prior([]))
    half = 2.015 * values.std(ddof=1) / np.sqrt(6)  # of a 90 % interval with five degrees of freedom
    assert test.is_within(half * 1.01)
    assert not test.is_within(half * 0.99)
    moved = board.compared(values + 0.02, spread_prior([]))
    assert moved.is_within(half * 1.01 + 0.02)
    assert not moved.is_within(half * 1.01)


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


def test_a_failure_is_trained_at_ease_without_the_part_that_fails() -> None:
    failure = read_failures().failures["depth"]
    found = settings(board_arms()[REFERENCE], (1,), {}, [failure])
    words = {cell.place: " ".join(setting.words) for cell, setting in found.items() if cell.failure == "depth"}
    assert "post_layernorm" in words[STRESSED]
    assert "post_layernorm" not in words["at ease"]


def test_the_screening_lets_those_pass_that_take_off_enough() -> None:
    assert passes_screening(FAILURE, planted_board.tables(), RULE) == ["sigma_reparam", "peri_ln"]
    assert not passes_screening(FAILURE, planted_board.tables(lost=0.0), RULE)


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
    assert first.startswith("Ends lower under stress: sigma_reparam under attention logits (best loss ")
    assert "not damage taken away" in first
    without = planted_board.tables({"peri_ln": 0.5, "rmsnorm": 0.0})
    assert "No arm ends much lower" in headline(matrix(without))
    assert "attention logits (peri_ln: " in headline(matrix(without))


def test_an_arm_whose_best_loss_is_much_worse_is_not_advised() -> None:
    tables = planted_board.tables()
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
        table = pd.DataFrame({**numbers, "parameters": 9000, "versions": "here"}, index=seeds)
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
    found, *_ = board.judge(failure, planted_board.tables(), RULE)
    assert "rmsnorm" not in found
    assert "rmsnorm" in board.judge(FAILURE, planted_board.tables(), RULE)[0]
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
    assert shown.index("Ends lower under stress: sigma_reparam") < shown.index("<svg") < shown.index("<table")
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
    made = board_page(read_matrix(folder))
    assert "<script>alert" not in made
    assert "&lt;script&gt;alert(1)" in made


def test_notebooks_get_the_board_as_a_table(tmp_path: Path) -> None:
    folder = planted_board.write(tmp_path, planted_board.tables())
    table = leaderboard(folder)
    assert table.index[0] == "sigma_reparam"
    assert table.loc["sigma_reparam", "attention logits"].startswith("cures 9")
    assert set(transfer(folder)["predicted"]) <= {"a", "b", "equal", "open", "not testable"}


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
