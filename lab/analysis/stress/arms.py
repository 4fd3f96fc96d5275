"""The arms of the board, as ``arms.yaml`` describes them, and as changes of a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lab.analysis.stress.battery import Change
from lab.core.errors import similar_names
from lab.core.schema import build
from lab.core.shipped import data_folder, load

FILE = Path(__file__).with_name("arms.yaml")
REFERENCE = "reference"  # the arm that changes nothing


class ArmCard(NamedTuple):
    """The description of an arm; see the head of ``arms.yaml``.

    Attributes:
        nothing_where: values of a recipe's config under which it does nothing, by dotted key.
        not_beside: interventions of the reference that exclude it.
        instead_of: the part of a pre-norm recipe that it takes the place of; empty where it is added.
        needs: the intervention that it acts on; empty where every recipe has what it acts on.
        words: overrides that scale its numbers to the runs of the board.
        lr_multiplier: its learning rate relative to AdamW's.
    """

    name: str
    title: str
    formula: str
    source: str
    at: tuple[str, ...]
    lr: str
    arxiv: str = ""
    url: str = ""
    nothing_under: str = ""
    nothing_where: Mapping[str, Any] = MappingProxyType({})
    not_beside: tuple[str, ...] = ()
    instead_of: str = ""
    needs: str = ""
    words: tuple[str, ...] = ()
    lr_multiplier: float = 1.0

    @property
    def link(self) -> str:
        """The address of its paper or code."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else self.url

    @property
    def is_optimizer(self) -> bool:
        """Whether it is a choice of ``conf/optimizer``, and not an intervention."""
        return self.at == ("optimizer",)

    def lacks(self, interventions: Collection[str]) -> str:
        """Why it has nothing to act on in a recipe with these interventions; empty where it has."""
        if not self.needs or self.needs in interventions:
            return ""
        return f"it acts on {self.needs}, which this recipe has none of"

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Its numbers by key, as in its file in ``conf/``."""
        group = "optimizer" if self.is_optimizer else "intervention"
        content: dict[str, Any] = load(data_folder("conf") / group / f"{self.name}.yaml")
        if not self.is_optimizer:
            return dict(content[self.name])
        return {key: value for key, value in content.items() if key != "name"}


@cache
def arm_cards() -> Mapping[str, ArmCard]:
    """Every arm by name, in the order of the file."""
    return {name: build(ArmCard, {**entry, "name": name}, name) for name, entry in load(FILE)["arms"].items()}


@cache
def left_out() -> Mapping[str, str]:
    """Interventions and optimizers that the leaderboard leaves out, each with the reason."""
    entries: dict[str, str] = load(FILE)["left_out"]
    return entries


class Arm(NamedTuple):
    """A change of a recipe as the board trains it.

    Attributes:
        name: of an intervention, an optimizer, several interventions joined by ``+``, or a change of settings.
        adds: its interventions.
        optimizer: the overrides that choose an optimizer and scale its numbers, before those of a failure.
        words: the overrides that make a change of settings, after those of a failure.
        lr_multiplier: its learning rate relative to AdamW's.
    """

    name: str
    adds: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    lr_multiplier: float = 1.0


@cache
def board_arms() -> Mapping[str, Arm]:
    """Every arm of the board by name, the reference first."""
    tree = load(FILE)
    arms = [Arm(REFERENCE)]
    for name, card in arm_cards().items():
        adds, chosen = ((), (f"optimizer={name}",)) if card.is_optimizer else ((name,), ())
        arms.append(Arm(name, adds, (*chosen, *card.words), lr_multiplier=card.lr_multiplier))
    arms += [Arm(name, tuple(name.split("+"))) for name in tree["combinations"]]
    arms += [Arm(name, words=tuple(words)) for name, words in tree["changes"].items()]
    return {arm.name: arm for arm in arms if arm.name not in tree["twins"]}


def no_such_arm(name: str) -> str:
    """What to say of a name that is no arm of the board: why it was left out, or the nearest names."""
    if name in left_out():
        return f"arm {name!r} is not on the board: {left_out()[name]}"
    if name in arm_cards() and name not in board_arms():
        return f"arm {name!r} is not on the board: it does the same as another one, or is another model"
    similar = similar_names(name, sorted(board_arms()))
    hint = f"nearest: {', '.join(similar)}" if similar else "lab list interventions and optimizers name them"
    return f"unknown arm {name!r}; {hint}"


@cache
def board_changes() -> Mapping[str, Change]:
    """Every arm of the board as a change of a recipe.

    An optimizer keeps what the recipe says of decay, clip and schedule.
    """
    changes = {}
    for name, arm in board_arms().items():
        if name != REFERENCE and "+" not in name:
            acts_on = "+".join(arm_cards()[name].at) if name in arm_cards() else "settings"
            words = (*(word for word in arm.optimizer if not word.startswith("schedule")), *arm.words)
            changes[name] = Change(name, acts_on, words, arm.lr_multiplier)
    return changes
