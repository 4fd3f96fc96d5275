"""Which pairs of the board's arms planning refuses: composed as their sweep composes them, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lab.cli.recipe import points_of, reason_of_card, reason_of_config, with_interventions
from lab.studies.leaderboard.arms import arm_cards
from lab.studies.leaderboard.pairs_to_train import PanelPairs

LR = "optimizer.lr"


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
    one = [f"intervention=[{','.join(every)}]", f"{LR}=1e-3", "seed=0"]
    tree, *_ = points_of(Path(name), [*(word for word in overrides if word.split("=")[0] != LR), *one])
    reasons: dict[tuple[str, str], str] = {}
    for pair in pairs.pairs:
        cut = with_interventions(tree, pairs.recipe | set(pair))
        of_cards = (reason_of_card(arm_cards()[member], cut) for member in pair)
        if reason := next(filter(None, of_cards), "") or reason_of_config(pair, cut):
            reasons[pair] = reason
    return pairs.without(reasons)
