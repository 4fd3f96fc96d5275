"""Arms of the leaderboard that a recipe or a pair can be trained with: composed, and judged without training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.cli import launch, request
from lab.cli.compose import Tree
from lab.core.errors import RequestError
from lab.studies.leaderboard.arms import ArmCard, arm_cards
from lab.studies.leaderboard.board import SAME
from lab.studies.leaderboard.pairs_to_train import PanelPairs
from lab.studies.leaderboard.recipe import FEWEST_LRS, ArmChoice, Recipe

SWEPT = ("optimizer.lr", "seed")


def read_recipe(file: Path) -> Recipe:
    """Compose a recipe and try every arm on it, without training.

    Raises:
        RequestError: the file is no sweep, has too few learning rates, or sweeps anything but learning rate and seed.
    """
    trees = points_of(file, [])
    lrs, seeds = (sorted({tree_value(tree, key) for tree in trees}) for key in SWEPT)
    if len(lrs) < FEWEST_LRS:
        raise RequestError(
            f"{file} sweeps {len(lrs)} learning rates, and sensitivity takes {FEWEST_LRS} or more, "
            "as in hydra.sweeper.params.optimizer.lr: 3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,3e-1"
        )
    if len(trees) > len(lrs) * len(seeds):
        raise RequestError(f"{file} sweeps more than {' and '.join(SWEPT)}; a recipe is one arm")
    own, names = trees[0], frozenset(map(str, trees[0]["intervention"]))
    optimizer = str(own["optimizer"]["name"])
    choices = [choice for card in arm_cards().values() if (choice := _choice(card, names, optimizer))]
    reasons = {choice.name: reason_of_card(arm_cards()[choice.name], own) for choice in choices}
    left = [choice for choice in choices if not reasons[choice.name]]
    composed = composed_arms(file, left, own)
    reasons |= {choice.name: reason_of_config([choice.name], composed[choice.name]) for choice in left}
    arms = [choice for choice in choices if not reasons[choice.name]]
    refused = {name: reason for name, reason in reasons.items() if reason}
    return Recipe(file, names, optimizer, len(lrs), tuple(map(int, seeds)), arms, refused)


def points_of(file: Path, words: Sequence[str]) -> Sequence[Tree]:
    """The points of a sweep, given by name or by file, with these overrides."""
    sweep = request.find_sweep(str(file))
    return launch.compose(request.read_request(words, "lab leaderboard", name=sweep.stem, sweep=sweep)).trees


def tree_value(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in nested mappings; None where it is absent."""
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, Mapping) else {}
    return None if tree == {} else tree


def _choice(card: ArmCard, names: frozenset[str], optimizer: str) -> ArmChoice | None:
    """The override that makes the arm; None if the recipe has its change already."""
    if card.name in {*names, optimizer}:
        return None
    if card.is_optimizer:
        return ArmChoice(card.name, f"optimizer={card.name}")
    return ArmChoice(card.name, f"intervention=[{','.join(sorted({*names, card.name}))}]")


def composed_arms(file: Path, choices: Sequence[ArmChoice], own: Tree) -> dict[str, Tree]:
    """A point of each arm; those of interventions are cut out of one that has all of them, each below its own key."""
    first = [f"{key}={tree_value(own, key)!r}" for key in SWEPT]
    trees: dict[str, Tree] = {}
    if added := [choice.name for choice in choices if choice.word.startswith("intervention")]:
        (all_of_them,) = points_of(file, [f"intervention=[{','.join(sorted({*own['intervention'], *added}))}]", *first])
        for name in added:
            trees[name] = with_interventions(all_of_them, {name, *own["intervention"]})
    if optimizers := [choice for choice in choices if choice.word.startswith("optimizer")]:
        words = ",".join(choice.name for choice in optimizers)
        points = points_of(file, [f"optimizer={words}", *first])
        trees |= {choice.name: tree for choice, tree in zip(optimizers, points, strict=True)}
    return trees


def with_interventions(tree: Tree, names: Collection[str]) -> Tree:
    """The point of a config with those of its interventions that have these names."""
    kept = {key: value for key, value in tree["intervention"].items() if key in names}
    return {**tree, "intervention": kept}


def reason_of_card(card: ArmCard, own: Tree) -> str:
    """Why an arm cannot stand beside the recipe, by what its card says; empty where nothing on it speaks against it."""
    if card.lr != SAME:
        return "its learning rate means something else, so it takes a sweep of its own"
    for key, value in card.nothing_where.items():
        is_on = key.removeprefix("intervention.") in own["intervention"]
        if is_on if value == "on" else tree_value(own, key) == value:
            return f"it does nothing under {card.nothing_under}"
    return ""


def reason_of_config(names: Sequence[str], tree: Tree) -> str:
    """Why the config with these arms cannot be trained, or one of them does nothing; empty where it can."""
    from lab.sweeping.cautions import find_cautions
    from lab.training.config import run_config

    try:
        config = run_config(tree)
    except RequestError as refusal:
        return str(refusal)
    return next((line for line in find_cautions([config]) if line.startswith(tuple(names))), "")


def plan_pairs(pairs: PanelPairs, words: Sequence[str]) -> PanelPairs:
    """The same without the pairs that planning refuses, or in which one member does nothing.

    Args:
        words: the name of the sweep, and overrides.

    Raises:
        RequestError: the sweep cannot be composed.
    """
    if not pairs.pairs:
        return pairs
    name, *overrides = words
    every = sorted(pairs.recipe.union(*pairs.pairs))
    first = [f"intervention=[{','.join(every)}]", "optimizer.lr=1e-3", "seed=0"]
    tree, *_ = points_of(Path(name), [*(word for word in overrides if word.split("=")[0] != "optimizer.lr"), *first])
    reasons: dict[tuple[str, str], str] = {}
    for pair in pairs.pairs:
        cut = with_interventions(tree, pairs.recipe | set(pair))
        of_cards = (reason_of_card(arm_cards()[member], cut) for member in pair)
        if reason := next(filter(None, of_cards), "") or reason_of_config(pair, cut):
            reasons[pair] = reason
    return pairs.without(reasons)
