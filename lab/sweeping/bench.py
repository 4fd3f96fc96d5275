"""A bench trains settings of a recipe, a few at a time: the words of a request, and more words for each setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.analysis.stress.arms import ArmCard
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.records import store
from lab.records.plans import Setting
from lab.sweeping import launch
from lab.sweeping.compose import Composer, Tree, expand, parse
from lab.sweeping.progress import Screen
from lab.sweeping.request import Request

if TYPE_CHECKING:
    from lab.sweeping.planner import SweepPlan


class Bench:
    """The runs of one request in more and more settings.

    Args:
        request: the words that all settings share, and the folder.
        without: what cannot be had if a run fails, such as ``gpt3 has no card,``.

    Attributes:
        ids: of the runs of each setting that was planned, in the order of its seeds.
        records: of the folder, as they were when they were last read.
    """

    records: store.Records

    def __init__(self, request: Request, without: str = "there is no result,") -> None:
        self.request, self.without, self.composed = request, without, launch.compose(request)
        self.folder = Path(next(str(word.value) for word in request.words if word.key == "out"))
        self.ids: dict[Setting, list[str]] = {}

    def plan(self, trees: Mapping[Setting, Sequence[Tree]], *, cautions: bool) -> SweepPlan:
        """Plan the runs of these settings, of which the trees are the configs; nothing is written.

        Raises:
            RequestError: a run is invalid, or the folder cannot take records.
        """
        every = [tree for of_setting in trees.values() for tree in of_setting]
        planned = launch.plan(self.composed._replace(trees=every), self.request, cautions=cautions)
        left = iter(planned.ids)
        self.ids |= {setting: list(islice(left, len(of_setting))) for setting, of_setting in trees.items()}
        return planned

    def carry_out(self, planned: SweepPlan, screen: Screen) -> None:
        """Train what is missing of a plan, and show the progress on a screen.

        Raises:
            RequestError: the folder cannot take records.
        """
        launch.train_missing(planned, self.composed.launcher, self.request, screen=screen)

    def train(self, settings: Sequence[Setting], screen: Screen) -> None:
        """Train what is missing of these settings, and read the records of the folder.

        Raises:
            RequestError: a run is invalid, the folder cannot take records, or the user's own code failed.
            SystemExit: with status 1 when a run failed otherwise.
        """
        self.carry_out(self.plan(compose_settings(self.request, settings), cautions=not self.ids), screen)
        runs = {run for setting in settings for run in self.ids[setting]}
        if failed := launch.failures(self.folder, sorted(runs)):
            context = f"{self.without} since {len(failed)} of {len(runs)} runs failed: "
            launch.refuse_own_code(failed, context)
            say(f"lab: {context}{next(iter(failed.values()))}", error=True)
            raise SystemExit(1)
        self.read()

    def read(self) -> None:
        """Read the records of the folder."""
        self.records = store.read(self.folder)


def first_trees(request: Request, settings: Iterable[Setting]) -> tuple[dict[Setting, Tree], dict[Setting, str]]:
    """The config tree of the first seed of each setting that can be trained, and why the others cannot."""
    from lab.training.building import check_own_code  # slow to load
    from lab.training.config import run_config
    from lab.training.identity import static_key

    trees, refusals, shapes = dict[Setting, Tree](), dict[Setting, str](), set[str]()
    composer = Composer(request.config_dir, request.files)
    for setting in settings:
        try:
            tree = trees_of_setting(composer, request, setting)[0]
            config = run_config(tree)
            if (shape := static_key(config)) not in shapes:
                check_own_code(config)
                shapes.add(shape)
            trees[setting] = tree
        except RequestError as refusal:
            refusals[setting] = str(refusal)
    return trees, refusals


def compose_settings(request: Request, settings: Sequence[Setting]) -> dict[Setting, list[Tree]]:
    """The config trees of each setting of a recipe, one for each seed.

    Raises:
        RequestError: the words of a setting cannot be composed with those of the recipe.
    """
    composer = Composer(request.config_dir, request.files)
    return {setting: trees_of_setting(composer, request, setting) for setting in settings}


def trees_of_setting(composer: Composer, request: Request, setting: Setting) -> list[Tree]:
    """The config trees of a setting, one for each seed, from the words of a recipe and those of the setting."""
    own = [word for word in request.words if not word.is_setting]
    added = parse([*setting.words, f"optimizer.lr={setting.lr!r}"], composer.config_dir)
    if any(word.key == "optimizer" for word in added):  # the numbers of one optimizer are not those of another
        own = [word for word in own if not word.key.startswith("optimizer.")]
    words = {word.key: word for word in (*own, *added)}
    return [composer.tree(point) for point in expand(list(words.values()), composer.config_dir)]


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
