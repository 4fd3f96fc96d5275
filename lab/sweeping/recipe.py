"""Why an arm cannot stand beside a recipe: by its card, or by the config that they make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.analysis.stress.arms import ArmCard
from lab.core.errors import RequestError
from lab.sweeping.compose import Tree

SAME = "same"


def tree_value(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in nested mappings; None where it is absent."""
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, Mapping) else {}
    return None if tree == {} else tree


def reason_of_card(card: ArmCard, own: Tree) -> str:
    """Why an arm cannot stand beside the recipe, by what its card says; empty where nothing on it speaks against it."""
    if card.lr != SAME:
        return "its learning rate means something else, so it takes a sweep of its own"
    if lacks := card.lacks(own["intervention"]):
        return lacks
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
