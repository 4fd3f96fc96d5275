"""Published recipes: what their files say, what a request makes of them, and that all of them train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import planted
from lab import Fleet, RunConfig, run_config
from lab.analysis import points
from lab.cli.listing import read_lists
from lab.core.shipped import data_folder, load
from lab.records import store
from lab.sweeping import launch
from lab.sweeping.request import find_sweep, read_request
from lab.training.identity import columns, run_id
from sampling import few
from small import configs
from sweeping import finished
from test_checkpoint import go_on

NAMES = [path.stem for path in sorted(data_folder("conf").glob("recipe/*.yaml")) if path.stem != "none"]
DATA = "data=synthetic"


def columns_of(*words: str) -> list[Mapping[str, Any]]:
    """The columns of every run of a request."""
    return [columns(run_config(tree)) for tree in launch.compose_points([DATA, *words])]


def id_of(*words: str) -> str:
    (tree,) = launch.compose_points([DATA, *words])
    return run_id(run_config(tree), "the same data")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_where_it_is_from_and_what_differs(name: str) -> None:
    told = load(data_folder("conf") / "recipe" / f"{name}.yaml")["recipe"]
    outcome = told.pop("outcome", "stable")  # none where nothing was published
    assert outcome in ("stable", "unstable")
    assert list(told) == ["name", "size", "source", "published", "missing"]
    assert told["name"] == name
    assert all(isinstance(text, str) and text for text in told.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_run_that_can_be_trained(name: str) -> None:
    """Its interventions and numbers exist, and go together."""
    (tree,) = launch.compose_points([DATA, f"recipe={name}"])
    config = run_config(tree)
    assert columns(config)["recipe"] == name
    Fleet([config])


def test_no_recipe_is_the_default_and_leaves_no_trace() -> None:
    assert id_of("recipe=none") == id_of()
    assert "recipe" not in columns_of()[0]


def test_a_recipe_is_part_of_the_id() -> None:
    """Of two recipes whose settings agree in all that the lab has, each has runs of its own, under its own name."""
    assert id_of("recipe=llama") != id_of("recipe=llama", "recipe.name=another")


@pytest.mark.slow
def test_what_is_given_beside_a_recipe_counts() -> None:
    cases: list[tuple[str, str, object]] = [
        ("optimizer.lr=0.3", "optimizer.lr", 0.3),
        ("intervention.z_loss.coefficient=1e-3", "intervention.z_loss.coefficient", 1e-3),
        ("optimizer=lion", "optimizer.name", "lion"),
        ("model.width=32", "model.width", 32),
    ]
    for word, key, value in cases:
        (row,) = columns_of("recipe=olmo2", word)
        assert (row["recipe"], row[key]) == ("olmo2", value)
    (own,), (more,) = columns_of("recipe=olmo2"), columns_of("recipe=olmo2", "+intervention.sigma_reparam={}")
    assert {*more["intervention"].split("+")} - {*own["intervention"].split("+")} == {"sigma_reparam"}


def test_an_optimizer_beside_a_recipe_comes_with_its_own_numbers() -> None:
    (alone,), (own,), (other,) = (
        columns_of(*words) for words in (["optimizer=sgd"], ["recipe=olmo1"], ["recipe=olmo1", "optimizer=sgd"])
    )
    assert own["optimizer.eps"] == 1e-5
    of_optimizer = [
        {key: value for key, value in row.items() if key.startswith("optimizer.")} for row in (alone, other)
    ]
    assert of_optimizer[0] == of_optimizer[1]


@pytest.mark.parametrize("word", ["intervention=[relu]", "intervention=[]", "arm=fixed_gains"])
def test_interventions_beside_a_recipe_replace_all_of_its_own(word: str) -> None:
    """Its numbers for one of them would switch that one on again."""
    assert load(data_folder("conf") / "recipe" / "olmo2.yaml")["intervention"]["z_loss"]
    (row,) = columns_of("recipe=olmo2", word)
    assert row["intervention"] == {"intervention=[relu]": "relu", "arm=fixed_gains": "fixed_gains"}.get(word, "none")
    assert not [key for key in row if key.startswith("intervention.z_loss")]


@pytest.mark.slow
def test_a_recipe_replaces_the_interventions_that_a_sweep_file_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama,qwen3", "seed=0", "optimizer.lr=1e-3"]
    request = read_request(words, "lab", name="quickstart", sweep=find_sweep("quickstart"))
    configs = [run_config(tree) for tree in launch.compose(request).trees]
    assert [(config.recipe and config.recipe.name, config.model.name) for config in configs] == [
        (name, size) for size in ("d32", "d64") for name in ("llama", "qwen3")
    ]
    assert "intervention" in capsys.readouterr().err
    assert {"qk_rmsnorm" in config.intervention for config in configs if config.recipe} == {True, False}
    assert all("swiglu" in config.intervention and "z_loss" not in config.intervention for config in configs)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\n# Mine.\ndefaults:\n  - override /intervention: [relu, z_loss]\n"
    text += "intervention: {z_loss: {coefficient: 1e-2}}\nrecipe: {name: mine}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    own = ["--config-dir", str(tmp_path), "recipe=mine"]
    (row,) = columns_of(*own)
    assert (row["recipe"], row["intervention"], row["intervention.z_loss.coefficient"]) == ("mine", "relu+z_loss", 1e-2)
    (row,) = columns_of(*own, "intervention=[relu]")
    assert row["intervention"] == "relu"


def test_a_recipe_of_ones_own_keeps_its_numbers_with_the_optimizer_that_it_takes_over(tmp_path: Path) -> None:
    """The default one, or that of the recipe on which it is built; another comes with its own numbers."""
    (tmp_path / "recipe").mkdir()
    for name, defaults in {"plain": "[]", "built": "[olmo1]"}.items():
        text = f"# @package _global_\ndefaults: {defaults}\noptimizer: {{eps: 0.25}}\nrecipe: {{name: {name}}}\n"
        (tmp_path / "recipe" / f"{name}.yaml").write_text(text)
        own = ["--config-dir", str(tmp_path), f"recipe={name}"]
        (row,), (other,), (lion,) = columns_of(*own), columns_of(*own, "optimizer=lion"), columns_of("optimizer=lion")
        assert (row["recipe"], row["optimizer.eps"]) == (name, 0.25)
        assert [other[key] for key in lion if key.startswith("optimizer.")] == [
            lion[key] for key in lion if key.startswith("optimizer.")
        ]
        assert "optimizer.eps" not in other


@pytest.mark.parametrize(
    ("changes", "arms"),
    [
        ([{"recipe": "llama"}], ["llama"]),
        (
            [{"recipe": "llama"}, {"recipe": "qwen3", "intervention": "qk_rmsnorm", "optimizer.eps": 1e-5}],
            ["llama", "qwen3"],
        ),
        (
            [{"recipe": "llama"}, {"recipe": "llama", "intervention": "peri_ln+z_loss"}, {"recipe": "qwen3"}],
            ["llama without peri-ln", "llama with peri-ln", "qwen3"],
        ),
        (
            [{"recipe": "llama"}, {"recipe": "llama", "optimizer.beta2": 0.9}, {"recipe": "qwen3"}],
            ["llama, beta2 0.9", "llama, beta2 0.95", "qwen3"],
        ),
        ([{}, {"recipe": "llama", "intervention": "rmsnorm"}], ["no recipe", "llama"]),
        ([{}, {"optimizer.beta2": 0.9}, {"recipe": "llama"}], ["beta2 0.9", "beta2 0.95", "llama"]),
    ],
)
def test_recipes_name_arms(changes: list[dict[str, object]], arms: list[str]) -> None:
    cards = [card for change in changes for card in planted.cards(("z_loss",), (32,), **change)]
    assert list(points(planted.table(cards))["arm"].unique()) == arms


SIZES = [DATA, "model.width=16", "model.head_width=8", "seq_len=12", "batch_size=16", "schedule.warmup=0"]
EVERY_STEP = ["steps=8", "probes.names=[train_loss]", "probes.every=1"]


def configs_of(name: str, *per_run: str) -> list[RunConfig]:
    return configs(*per_run, shared=(*SIZES, *EVERY_STEP, f"recipe={name}"))


@pytest.mark.parametrize("name", few(NAMES, 3))
def test_every_recipe_trains(name: str) -> None:
    wanted = configs_of(name, "optimizer.lr=1e-2", "optimizer.lr=2e-2 seed=1")
    assert wanted[0].recipe
    assert wanted[0].recipe.name == name
    fleet = Fleet(wanted)
    losses_sr = torch.stack([fleet.step(step)["train_loss", ""] for step in range(8)])
    assert losses_sr.isfinite().all()
    assert (losses_sr[-1] < losses_sr[0] - 0.1).all()


@pytest.mark.parametrize("name", few(["deepseek_v3_moe", "ngpt", "palm"], 1))
def test_a_run_of_a_recipe_is_the_same_bits_alone_and_after_a_cut(name: str, tmp_path: Path) -> None:
    wanted = configs_of(name, "optimizer.lr=1e-2", "optimizer.lr=1e-1 seed=1")
    whole, _, _ = go_on(tmp_path / "whole", wanted, ids=["a", "b"])
    (alone,), _, _ = go_on(tmp_path / "alone", wanted[1:], ids=["b"])
    assert repr(alone) == repr(whole[1])
    go_on(tmp_path / "cut", wanted, ids=["a", "b"], cut_after=6)
    resumed, steps, _ = go_on(tmp_path / "cut", wanted, ids=["a", "b"])
    assert steps[0] > 0
    assert repr(resumed) == repr(whole)


@pytest.mark.parametrize("name", few(["bloom", "glm130b", "llama2", "ngpt", "opt", "vit22b"], 3))
def test_no_token_of_a_recipe_sees_the_future(name: str) -> None:
    fleet = Fleet(configs_of(name, ""))
    for step in range(2):  # what starts at zero no longer is
        fleet.step(step)
    rows_rbt, known = fleet.feed.loader.batch(0), 7
    other_rbt = rows_rbt.clone()
    other_rbt[..., known:] = (other_rbt[..., known:] + 1) % 11
    one_rbtv, other_rbtv = fleet.model(rows_rbt)[0], fleet.model(other_rbt)[0]
    assert torch.equal(one_rbtv[..., :known, :], other_rbtv[..., :known, :])
    assert not torch.equal(one_rbtv[..., known:, :], other_rbtv[..., known:, :])


@pytest.mark.slow
def test_a_recipe_is_a_column_of_the_records(tmp_path: Path) -> None:
    small = [DATA, "validation=short", "model.width=16", "model.depth=1", "steps=1", "hydra/launcher=basic"]
    finished(tmp_path, "train", "-m", "recipe=llama,none", *small)
    runs = store.read(tmp_path).runs
    assert list(runs.sort_values("intervention")["recipe"].fillna("-")) == ["-", "llama"]


def test_recipes_are_listed_with_what_was_published() -> None:
    listed = read_lists(["recipes"])["recipes"]
    assert [*listed] == sorted([*NAMES, "none"])
    assert json.loads(json.dumps(listed))["llama"]["source"].startswith("Touvron")
