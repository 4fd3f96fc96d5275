"""What to add to a recipe of one's own: two stages, fresh seeds, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import planted
import planted_board
from lab.__main__ import main
from lab.cli.launch import compose_points
from lab.cli.recipe import composed_arms, read_recipe
from lab.core.errors import RequestError
from lab.records import store
from lab.records.store import NO_METRICS, Records
from lab.studies.leaderboard.arms import arm_cards
from lab.studies.leaderboard.recipe import FRESH_SEEDS, SURVIVORS, ArmChoice, Recipe, lines

pytestmark = pytest.mark.xdist_group("recipe")  # one process composes every arm

OWN = ("qk_layernorm", "z_loss")  # of the default recipe
SWEEP = """\
defaults:
  - override /data: stdlib
hydra:
  sweeper:
    params:
      optimizer.lr: {lrs}
      seed: 0,1,2
"""
FRESH = tuple(range(3, 3 + FRESH_SEEDS))
GRID = "3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,3e-1"


def sweep_file(folder: Path, more: str = "", lrs: str = GRID) -> Path:
    file = folder / "mine.yaml"
    file.write_text(SWEEP.format(lrs=lrs) + more)
    return file


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return read_recipe(sweep_file(tmp_path_factory.mktemp("recipe")))


@pytest.fixture(scope="module")
def short(recipe: Recipe) -> Recipe:
    """The recipe with a few more arms than survive."""
    first = [arm.name for arm in recipe.arms[: SURVIVORS + 5]]
    return recipe._replace(arms=[arm for arm in recipe.arms if arm.name in {*first, "relu", "peri_ln"}])


def with_own(name: str) -> tuple[str, ...]:
    return tuple(sorted((*OWN, name)))


def plant(folder: Path, names: Sequence[str], effects: Mapping[str, float], seeds: Sequence[int]) -> None:
    """Records of the recipe and these arms; those without an effect of their own are as the recipe is."""
    folder.mkdir(parents=True)
    arms = {OWN: 0.0, **{with_own(name): effects.get(name, 0.1) for name in names}}
    cards = planted_board.cards(arms, seeds=seeds, spread=0.01)
    store.write_imported(folder, Records(planted.table(cards), NO_METRICS))


def test_every_arm_is_planned_or_refused_with_its_reason(recipe: Recipe) -> None:
    assert {"peri_ln", "relu", "attention_gate"} <= {arm.name for arm in recipe.arms}
    assert "exclude each other" in recipe.refused["qk_rmsnorm"]
    assert "learning rate means something else" in recipe.refused["ngpt"]
    assert not set(recipe.refused) & {arm.name for arm in recipe.arms}
    assert not {*OWN} & {*recipe.refused, *(arm.name for arm in recipe.arms)}


def test_the_first_stage_is_a_command_that_the_lab_takes(recipe: Recipe, tmp_path: Path) -> None:
    shown = list(lines(recipe, tmp_path))
    (command,) = [line.strip() for line in shown if line.strip().startswith("lab sweep") and "intervention" in line]
    assert command.count("[") == len([arm for arm in recipe.arms if arm.word.startswith("intervention")]) + 1
    assert "[qk_layernorm,z_loss],[qk_layernorm,score_softcap,z_loss]" in command
    assert command.endswith(f"seed=0,1,2 out={tmp_path}/stage_1")
    assert f"{(len(recipe.arms) + 1) * 21:,} runs" in shown[0]


def test_an_arm_that_does_nothing_in_this_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {name: arm_cards()[name] for name in ("ln_scaling", "relu")}
    monkeypatch.setattr("lab.cli.recipe.arm_cards", lambda: cards)
    shallow = read_recipe(sweep_file(tmp_path, "model: {depth: 1}\n"))
    assert shallow.refused == {"ln_scaling": "it does nothing under a model of one block"}
    assert [arm.name for arm in shallow.arms] == ["relu"]


def test_the_config_of_an_arm_is_what_its_word_composes(tmp_path: Path) -> None:
    words = ("intervention=[qk_layernorm,score_softcap,z_loss]", "intervention=[peri_ln,qk_layernorm,z_loss]")
    choices = [ArmChoice(name, word) for name, word in zip(("score_softcap", "peri_ln"), words, strict=True)]
    choices.append(ArmChoice("lion", "optimizer=lion"))
    shared = ("out=runs/mine", "seed=0", "optimizer.lr=3e-4")
    (own,) = compose_points([*shared, "data=stdlib"])
    found = composed_arms(sweep_file(tmp_path), choices, own)
    for choice in choices:
        (wanted,) = compose_points([choice.word, *shared, "data=stdlib"])
        assert dict(found[choice.name]) == dict(wanted)


def test_the_second_stage_takes_the_best_arms_on_fresh_seeds(short: Recipe, tmp_path: Path) -> None:
    names = [arm.name for arm in short.arms]
    best = names[3 : 3 + SURVIVORS + 2]
    effects = {name: -0.2 + 0.01 * place for place, name in enumerate(best)}
    plant(tmp_path / "stage_1", names, effects, (0, 1, 2))
    shown = list(lines(short, tmp_path))
    assert shown[0].startswith(f"Stage 1 chose {SURVIVORS} of {len(names)} arms")
    assert [line.split(":")[0].strip() for line in shown[1 : 1 + SURVIVORS]][:3] == best[:3]
    assert f"seed=3,4,5,6,7,8 out={tmp_path}/stage_2" in shown[-1]


def test_an_unfinished_stage_is_gone_on_with(short: Recipe, tmp_path: Path) -> None:
    names = [arm.name for arm in short.arms]
    plant(tmp_path / "stage_1", names[:-1], {}, (0, 1, 2))
    shown = list(lines(short, tmp_path))
    assert shown[0].startswith("Stage 1 of 2 ")
    assert shown[1] == f"It lacks seeds of {names[-1]}."
    assert shown[2].strip().startswith("lab sweep ")


def test_the_answer_is_what_helps_on_fresh_seeds_its_price_and_the_correction(short: Recipe, tmp_path: Path) -> None:
    names = [arm.name for arm in short.arms]
    plant(tmp_path / "stage_1", names, {"relu": -0.15, "peri_ln": -0.15}, (0, 1, 2))
    plant(tmp_path / "stage_2", ["relu", "peri_ln"], {"relu": -0.15, "peri_ln": 0.0}, FRESH)
    answer = list(lines(short, tmp_path))[-1]
    assert answer.startswith("Add relu (-0.1")
    assert "+64 parameters" in answer
    assert f"Chosen among {len(names)} arms on other seeds, judged on 6 fresh seeds alone" in answer
    assert "Holm's correction over 2" in answer
    assert "peri_ln" not in answer


@pytest.mark.parametrize("effects", [{}, {"relu": -0.15}])
def test_nothing_is_added_where_nothing_helps(short: Recipe, tmp_path: Path, effects: dict[str, float]) -> None:
    """No arm is better in the first stage, or it is not on fresh seeds."""
    plant(tmp_path / "stage_1", [arm.name for arm in short.arms], effects, (0, 1, 2))
    if effects:
        plant(tmp_path / "stage_2", ["relu"], {"relu": 0.0}, FRESH)
    assert list(lines(short, tmp_path))[-1].startswith("Add none of them:")


@pytest.mark.parametrize(
    ("more", "lrs", "part"),
    [
        ("", "1e-3,1e-2", "sweeps 2 learning rates"),
        ("      model: d32,d64\n", GRID, "sweeps more than optimizer.lr and seed"),
    ],
)
def test_what_is_no_recipe_is_refused_in_a_line(
    more: str, lrs: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leaderboard", "--recipe", str(sweep_file(tmp_path, more, lrs))]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert part in shown.err.splitlines()[-1]


def test_a_recipe_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no sweep file absent\.yaml"):
        read_recipe(Path("absent.yaml"))
