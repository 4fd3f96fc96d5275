"""Published recipes: what their files say, what a request makes of them, and that all of them train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import planted
from lab import run_config
from lab.analysis.curves import points
from lab.cli import launch
from lab.cli.listing import read_lists
from lab.cli.request import find_sweep, read_request
from lab.core.shipped import data_folder, load
from lab.records import store
from lab.training.identity import columns, run_id
from sweeping import finished

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
    assert list(told) == ["name", "size", "source", "published", "missing"]
    assert told["name"] == name
    assert all(isinstance(text, str) and text for text in told.values())
    (row,) = columns_of(f"recipe={name}")
    assert row["recipe"] == name


def test_no_recipe_is_the_default_and_leaves_no_trace() -> None:
    assert id_of("recipe=none") == id_of()
    assert "recipe" not in columns_of()[0]


def test_a_recipe_is_part_of_the_id() -> None:
    """Of two recipes whose settings agree in all that the lab has, each has runs of its own, under its own name."""
    assert id_of("recipe=llama") != id_of("recipe=llama", "recipe.name=another")


def test_what_is_given_beside_a_recipe_counts() -> None:
    cases: list[tuple[str, str, object]] = [
        ("optimizer.lr=0.3", "optimizer.lr", 0.3),
        ("intervention.z_loss.coefficient=1e-3", "intervention.z_loss.coefficient", 1e-3),
        ("optimizer=lion", "optimizer.name", "lion"),
        ("model.width=32", "model.width", 32),
        (
            "+intervention.sigma_reparam={}",
            "intervention",
            "qk_rmsnorm+reordered_norm+rmsnorm+sigma_reparam+swiglu+z_loss",
        ),
    ]
    for word, key, value in cases:
        (row,) = columns_of("recipe=olmo2", word)
        assert (row["recipe"], row[key]) == ("olmo2", value)


@pytest.mark.parametrize("word", ["intervention=[relu]", "intervention=[]", "arm=fixed_gains"])
def test_interventions_beside_a_recipe_replace_all_of_its_own(word: str) -> None:
    """Its numbers for one of them would switch that one on again."""
    assert load(data_folder("conf") / "recipe" / "olmo2.yaml")["intervention"]["z_loss"]
    (row,) = columns_of("recipe=olmo2", word)
    assert row["intervention"] == {"intervention=[relu]": "relu", "arm=fixed_gains": "fixed_gains"}.get(word, "none")
    assert not [key for key in row if key.startswith("intervention.z_loss")]


def test_a_recipe_replaces_the_interventions_that_a_sweep_file_sweeps() -> None:
    words = ["recipe=llama,qwen3", "seed=0", "optimizer.lr=1e-3"]
    request = read_request(words, "lab", name="quickstart", sweep=find_sweep("quickstart"))
    configs = [run_config(tree) for tree in launch.compose(request).trees]
    assert [(config.recipe and config.recipe.name, config.model.name) for config in configs] == [
        (name, size) for size in ("d32", "d64") for name in ("llama", "qwen3")
    ]
    assert {tuple(sorted(config.intervention)) for config in configs} == {
        ("rmsnorm", "swiglu"),
        ("qk_rmsnorm", "rmsnorm", "swiglu"),
    }


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


def test_a_recipe_is_a_column_of_the_records(tmp_path: Path) -> None:
    small = [DATA, "validation=short", "model.width=16", "model.depth=1", "steps=4", "hydra/launcher=basic"]
    finished(tmp_path, "train", "-m", "recipe=llama,none", *small)
    runs = store.read(tmp_path).runs
    assert list(runs.sort_values("intervention")["recipe"].fillna("-")) == ["-", "llama"]


def test_recipes_are_listed_with_what_was_published() -> None:
    listed = read_lists(["recipes"])["recipes"]
    assert [*listed] == sorted([*NAMES, "none"])
    assert json.loads(json.dumps(listed))["llama"]["source"].startswith("Touvron")
