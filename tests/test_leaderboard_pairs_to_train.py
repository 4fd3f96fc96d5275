"""`lab leaderboard DIR --pairs`: which pairs of the best dozen are trained, at what cost, and what they answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

import planted
import planted_board
from lab.__main__ import main
from lab.analysis.statistics import power_of
from lab.cli.recipe import plan_pairs, points_of
from lab.records import store
from lab.records.store import NO_METRICS, Records
from lab.studies.leaderboard.listing import board_of
from lab.studies.leaderboard.pairs_to_train import BEST, PanelPairs, best_pairs, lines, stage_of

pytestmark = pytest.mark.xdist_group("pairs")  # one process composes the pairs

PLAIN = ("z_loss",)
# Effects of arms in rising order: a dozen, then one that ties with the last of them, and one that is worse.
DOZEN = (
    *("peri_ln", "qk_layernorm", "reordered_norm", "qk_rmsnorm", "score_softcap", "layerscale", "dyt"),
    *("attention_gate", "relu2", "swiglu", "gain_lr", "fixed_gains"),
)
EFFECTS = {(name, "z_loss"): -0.3 + 0.02 * place for place, name in enumerate(DOZEN)}
EFFECTS |= {PLAIN: 0.0, ("biases", "z_loss"): -0.075, ("tied_head", "z_loss"): 0.1, ("rezero", "z_loss"): -0.5}


def plant(
    folder: Path, effects: Mapping[tuple[str, ...], float], command: str = "lab sweep leaderboard", **of: object
) -> Path:
    store.note_command(folder, command)
    cards = planted_board.cards(effects, **{"spread": 0.005, "wall_seconds": 3.6, **of})
    store.write_imported(folder, Records(planted.table(cards), NO_METRICS))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("pairs") / "board", EFFECTS)


@pytest.fixture(scope="module")
def pairs(folder: Path) -> PanelPairs:
    (found,) = best_pairs(board_of([folder]))
    return plan_pairs(found, stage_of(folder).words)


def test_the_best_dozen_are_paired_and_ties_are_named(pairs: PanelPairs) -> None:
    assert [row.name for row in pairs.best] == list(DOZEN)  # in rising order, and not rezero, of another unit
    assert [row.name for row in pairs.tied] == ["biases"]
    assert len(pairs.pairs) + len(pairs.left_out) == BEST * (BEST - 1) / 2


def test_pairs_that_planning_refuses_are_left_out(pairs: PanelPairs) -> None:
    assert "exclude each other" in pairs.left_out["peri_ln", "reordered_norm"]
    assert "does nothing" in pairs.left_out["fixed_gains", "gain_lr"]
    assert "panel with qk-layernorm" in pairs.left_out["peri_ln", "qk_layernorm"]
    assert "exclude each other" in pairs.left_out["qk_layernorm", "qk_rmsnorm"]
    assert pairs.left_out["qk_rmsnorm", "score_softcap"] == "it is an arm of the board"
    assert ("peri_ln", "score_softcap") in pairs.pairs


@pytest.mark.slow
def test_the_command_trains_pairs_members_and_reference_on_fresh_seeds(pairs: PanelPairs, folder: Path) -> None:
    shown = list(lines([pairs], stage_of(folder)))
    (command,) = [line.strip() for line in shown if line.strip().startswith("lab sweep")]
    _, _, name, *words = shlex.split(command)
    assert f"out={folder}_pairs" in words
    assert "seed=16,17,18,19,20,21" in words
    one_lr = ["optimizer.lr=1e-3", *(word for word in words if not word.startswith("seed=")), "seed=16"]
    trees = points_of(Path(name), one_lr)
    arms = {frozenset(tree["intervention"]) - {"z_loss"} for tree in trees}
    members = {name for pair in pairs.pairs for name in pair}
    assert arms == {frozenset(), *(frozenset({name}) for name in members), *map(frozenset, pairs.pairs)}
    assert "qk_layernorm" not in members
    assert {(tree["probes"]["every"], *tree["probes"]["names"]) for tree in trees} == {(1, "train_loss")}
    runs = len(trees) * 6 * len(planted.LRS)
    (cost,) = [line for line in shown if line.startswith("Train ")]
    assert f"Train {len(pairs.pairs)} pairs" in cost
    assert f"{runs:,} runs, about {runs * 3.6 / 3600:.2g} core-hours" in cost
    assert any(line.startswith(f"{len(pairs.left_out)} of their 66 pairs are left out") for line in shown)


def test_the_power_is_that_of_simulated_seeds_at_the_strictest_level() -> None:
    draws = np.random.default_rng(0).normal(0.06, 0.02, (20_000, 6))
    found = (ttest_1samp(draws, 0, axis=1).pvalue < 0.05 / 50).mean()
    assert power_of(6, 0.06, 0.02, 0.05 / 50) == pytest.approx(found, abs=0.02)


def test_the_sweep_of_the_board_and_its_settings_are_kept(tmp_path: Path) -> None:
    command = "lab sweep leaderboard data=tiny seed=1,2 'intervention=[z_loss],[]' --dry-run out=somewhere model=d64"
    stage = stage_of(plant(tmp_path / "board", {PLAIN: 0.0}, command))
    assert stage.words == ["leaderboard", "data=tiny", "model=d64"]


def test_without_times_the_command_is_said_to_estimate_them(pairs: PanelPairs, folder: Path) -> None:
    shown = " ".join(lines([pairs._replace(seconds=float("nan"))], stage_of(folder)))
    assert "the command with --dry-run says how many hours they take" in shown


def test_trained_pairs_are_answered_and_missing_ones_asked_for(pairs: PanelPairs, tmp_path: Path, folder: Path) -> None:
    few = pairs._replace(pairs=[("dyt", "peri_ln"), ("dyt", "relu2")])
    stage = stage_of(folder)._replace(board=tmp_path / "board")
    effects = {PLAIN: 0.0, ("dyt", "z_loss"): -0.1, ("peri_ln", "z_loss"): -0.1, ("relu2", "z_loss"): -0.1}
    first = {("dyt", "peri_ln", "z_loss"): -0.25}
    plant(stage.out, {**effects, **first}, seeds=stage.seeds)
    *_, missing = shown = list(lines([few], stage))
    assert missing.strip() == "It lacks seeds of 1 of 2 pairs: dyt+relu2."
    assert stage.command(few) in map(str.strip, shown)
    other = stage._replace(board=tmp_path / "whole")
    plant(other.out, {**effects, **first, ("dyt", "relu2", "z_loss"): -0.1}, seeds=stage.seeds)
    answer, helps = lines([few], other)
    assert "1 of 2 helps beyond the better half" in answer
    assert helps.strip().startswith("dyt+peri_ln: -0.1")
    assert helps.endswith("sum of both reached")


def test_the_command_line_prints_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", str(folder), "--pairs"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"6 seeds show 0\.06 nats beyond the better half with \d+% probability", shown)
    assert "Pairs without qk-layernorm: the 12 best of 14 comparable arms" in shown


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (({}, {"model.width": 64}), "pairs are trained in one setting, and this board has several"),
        (({}, {"optimizer.name": "adamw_zclip"}), "no pair to train"),
    ],
)
def test_a_board_without_pairs_is_refused_in_a_line(
    settings: tuple[dict[str, object], ...], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = [card for changes in settings for card in planted_board.cards({PLAIN: 0.0}, **changes)]
    store.write_imported(tmp_path, Records(planted.table(cards), NO_METRICS))
    assert main(["leaderboard", str(tmp_path), "--pairs"]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    (line,) = shown.err.splitlines()
    assert part in line
