"""What a crash test was asked for: its recipe, tests, folder, and the changes that may cure what fails."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from lab.analysis.crossings import Crossing, halving_lrs
from lab.analysis.stress.arms import board_changes, no_such_arm
from lab.analysis.stress.battery import Change, StressTest, read_battery
from lab.analysis.stress.measures import wanted
from lab.core import files
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.records.plans import Setting
from lab.sweeping.compose import expand, parse
from lab.sweeping.own_code import OwnCode
from lab.sweeping.request import Request, read_options, read_request

USUAL_BEST = 0.03  # learning rate that is taken for the best one as long as that is not known
LONGEST_NAME = 60  # of a folder, in characters


# Words that say how a recipe is trained here, and so are no part of its name.
NO_RECIPE = re.compile(r"(out|seed|device|engine)=|hydra\b|recipe=none$")


MOST_CURES = 10


@dataclass(frozen=True)
class Plan:
    """A crash test that was asked for.

    Attributes:
        request: the words of the recipe, with those of the battery before them.
        recipe: the name of the recipe for readers.
        tests: the tests, in their order.
        folder: of the records.
        cures: which changes are tried on failed tests, as ``--cures`` takes it.
        arms: the changes to which ``--cures all`` is limited; none for all.
        budget: seconds that all of it may take.
        left_out: by title of a test why the recipe cannot take it.
        fixed: keys that change nothing in the user's own model.
        own_model: the name of a model of the user's own; empty without one.
        is_named: whether the tests were asked for by name; else those that the recipe lacks the parts for are left out
            without a word.
        sizes: overrides of further sizes at which the curve is trained.
        bracket: decades to which the learning rate is found from which the recipe fails; infinite if none is tried
            besides those of the curve.
        lr: the user's learning rate, for the size from which it fails; NaN if none was given.
        flops: FLOPs of a run by its overrides, of those that the tests need.
    """

    request: Request
    recipe: str
    tests: Sequence[StressTest]
    folder: Path
    cures: str
    arms: Sequence[str] = ()
    budget: float = math.inf
    left_out: Mapping[str, str] = field(default_factory=dict)
    fixed: Sequence[str] = ()
    own_model: str = ""
    is_named: bool = False
    sizes: Sequence[tuple[str, ...]] = ()
    bracket: float = math.inf
    lr: float = math.nan
    flops: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def settings(self, best: float = USUAL_BEST) -> list[Setting]:
        """What is trained without cures if this learning rate is the best one, and no curve has to be extended."""
        settings = wanted(read_battery(), self.tests, {})
        settings += [place.setting(best) for test in self.tests for place in test.places]
        settings += [Setting(words, lr) for words in self.sizes for lr in read_battery().curve]
        return list(dict.fromkeys(settings))

    def finer_settings(self) -> list[Setting]:
        """The learning rates that are tried besides if the recipe fails between the last two of the curve."""
        (low, high), lrs = read_battery().curve[-2:], list[float]()
        while middle := halving_lrs([Crossing(low=low, high=high)], self.bracket):
            lrs += middle
            high = middle[0]
        return [Setting((), lr) for lr in lrs]

    @property
    def names_cures(self) -> bool:
        """Whether changes were asked for by name, which are tried on weak and open tests, too."""
        return bool(self.arms) or not (self.cures in ("none", "all") or self.cures.isdecimal())

    def changes_to_try(self, test: StressTest) -> list[Change]:
        """The changes that it tries on a test, the most promising first.

        Raises:
            RequestError: a cure is unknown.
        """
        has_hooks = not self.own_model
        changes = read_battery().cures_of(test, self.cures, board_changes(), has_hooks=has_hooks)
        return [change for change in changes if not self.arms or change.name in self.arms]


def seed_word(seeds: Iterable[int]) -> str:
    """The override that trains a run of each of these seeds."""
    return f"seed={','.join(map(str, seeds))}"


def read_plan(
    words: Sequence[str],
    command: str,
    *,
    names: Sequence[str] = (),
    minutes: int = 1,
    cures: str | None = None,
    arms: Sequence[str] = (),
    budget: float = math.inf,
    options: Sequence[str] = (),
    code: Sequence[OwnCode] = (),
    has_folders: bool = False,
) -> Plan:
    """Read the words of a crash test.

    Args:
        words: overrides of the recipe.
        command: the command line as the user can type it again.
        names: of the tests; none means all that fit.
        minutes: the minutes on two cores.
        cures: what to try on failed tests: ``none``, a number or ``all``; or names of changes, to try on weak and open
            ones, too; by default ``none`` in one minute, or ``all`` if there are ``arms``.
        arms: the changes to which ``all`` is limited.
        budget: seconds that cards and cures may take together.
        options: ``--config-dir`` with its folder.
        code: a model and an optimizer of the user's own.
        has_folders: whether a recipe of a file is called by its whole path.

    Raises:
        RequestError: a word, a test, a cure or the number of minutes is unknown, or more than the seed is swept.
    """
    tests = read_battery().chosen(names, minutes)
    cures = cures or ("all" if arms else "none" if minutes == 1 else str(MOST_CURES))
    known = board_changes()
    if unknown := [name for name in arms if name not in known]:
        raise RequestError(no_such_arm(unknown[0]))
    own = [word for word in words if not NO_RECIPE.match(word)]
    own = own if has_folders else _without_folders(own)
    names_of_code = [own_code.name for own_code in code]
    for own_code in code:
        words = own_code.with_settings(words)
    # many models of others draw small initial weights, and are not yet better than a bigram model after 200 steps
    longer = ["steps=400"] if any(own_code.kind == "model" for own_code in code) else []
    every = [*read_battery().runs, *longer, seed_word(range(read_battery().seeds[minutes])), *words]
    given = {word.partition("=")[0].lstrip("+~"): word for word in every}  # the last of each key
    request = read_request([*given.values(), *options], command, name=f"stress/{_folder_name([*names_of_code, *own])}")
    request = _as_the_file_says(request).with_code(code)
    if swept := [word.key for word in request.words if word.is_swept and word.key != "seed"]:
        raise RequestError(f"lab stress tests one recipe, and {swept[0]} has several values; only seed and a size may")
    out = next(word.value for word in request.words if word.key == "out")
    fixed = [key for own_code in code for key in own_code.fixed]
    shape = {"model.width", "model.heads", "model.head_width"}
    has_sizes = not names and not shape & {*fixed, *(word.key for word in request.words)}
    sizes = [(word,) for word in read_battery().sizes.get(minutes, ())] if has_sizes else []
    rates = [float(str(word.value)) for word in request.words if word.key == "optimizer.lr"]
    plan = Plan(
        request,
        _recipe_name(own, code),
        tests,
        Path(str(out)),
        cures,
        arms,
        budget,
        fixed=fixed,
        own_model=next((own_code.name for own_code in code if own_code.kind == "model"), ""),
        is_named=bool(names),
        sizes=sizes,
        bracket=read_battery().bracket if any(test.reads_curve for test in tests) else math.inf,
        lr=rates[-1] if rates else math.nan,
    )
    for test in tests:
        plan.changes_to_try(test)  # refuses unknown ones
    return plan


def read_plans(
    recipes: Sequence[str], words: Sequence[str], command: str, *, code: Sequence[OwnCode] = (), **given: Any
) -> list[Plan]:
    """Read the words of a crash test of named recipes: of none, as the words say, of one, or of two side by side.

    An optimizer of the user's own stands beside that of the recipe, unless there are two recipes. One recipe may also
    have two sizes, ``model=d32,d64``, which are put side by side.

    Args:
        recipes: names or files.
        words: overrides of each.
        command: as ``read_plan`` takes it.
        code: a model and an optimizer of the user's own, for each recipe.
        given: the other arguments of ``read_plan``.

    Raises:
        RequestError: there are more than two, or a recipe is given twice; or as ``read_plan``.
    """
    sizes = _by_size(words, read_options(given.get("options", ())).config_dir)
    if len(sizes) > 1 and (len(recipes) > 1 or any(own_code.kind == "optimizer" for own_code in code)):
        raise RequestError("two sizes are put side by side of one recipe, trained by one optimizer")
    if len(sizes) > 2:
        raise RequestError(f"lab stress puts two sizes side by side, not {len(sizes)}; --minutes 30 takes three")
    if len(recipes) > 2:
        raise RequestError(f"lab stress takes a recipe, or two to put side by side, not {len(recipes)}")
    if recipes and (again := next((word for word in words if re.match(r"\+?recipe=", word)), "")):
        raise RequestError(f"{again}: the recipe is {recipes[0]!r} already")
    if len(recipes) == 2 and len(set(recipes)) == 1:
        raise RequestError(f"two recipes are put side by side, and both are {recipes[0]!r}")
    named = [f"recipe={name}" for name in recipes]
    without = [own_code for own_code in code if own_code.kind != "optimizer"]
    has_folders = len({*_without_folders(named)}) < len(named)
    if len(recipes) == 2:
        variants = [([name], words, code) for name in named]
    elif len(sizes) == 2:
        variants = [(named, of_size, code) for of_size in sizes]
    elif len(without) < len(code):
        own_keys = {key for own_code in code if own_code not in without for key in own_code.settings}
        others = [word for word in words if word.partition("=")[0] not in own_keys]
        variants = [(named, words, code), (named, others, without)]
    else:
        return [read_plan([*named, *words], command, code=code, **given)]
    parents = [str(word.value) for word in parse([word for word in words if word.startswith("out=")])]
    plans = []
    for recipe, changes, own in variants:
        kept = [word for word in changes if not word.startswith("out=")]
        called = recipe if has_folders else _without_folders(recipe)
        sized = [word for word in changes if word not in words]
        folder = _folder_name([*(own_code.name for own_code in own), *called, *sized])
        out = [f"out={quoted(Path(parents[-1], folder))}"] if parents else []
        plans.append(read_plan([*recipe, *kept, *out], command, code=own, has_folders=has_folders, **given))
    return plans


def _by_size(words: Sequence[str], config_dir: Path | None) -> list[list[str]]:
    """The words of each size that they ask for: ``model=d32,d64`` makes two lists; the words themselves otherwise.

    Raises:
        RequestError: two keys of the size have several values.
    """
    of_model = [word for word in words if re.match(r"\+*model(\.\w+)?=", word)]
    swept = [word for word in of_model if parse([word], config_dir)[0].is_swept]
    if len(swept) > 1:
        raise RequestError(f"{swept[0]} and {swept[1]} both have several values; only one key of the size may")
    if not swept:
        return [list(words)]
    return [[size.text if word == swept[0] else word for word in words] for (size,) in expand(parse(swept, config_dir))]


def _as_the_file_says(request: Request) -> Request:
    """A request without the words of the battery where the recipe is a file that says otherwise."""
    content: Any = OmegaConf.to_container(request.files["recipe"]) if "recipe" in request.files else {}
    chosen = {key.removeprefix("override /") for entry in content.get("defaults", ()) for key in entry}
    dotted = set(pd.json_normalize(content, sep="."))  # the keys of its values
    battery = set(read_battery().runs)
    kept = [word for word in request.words if word.text not in battery or word.key not in chosen | dotted]
    return replace(request, words=kept)


def _folder_name(words: Sequence[str]) -> str:
    text = "+".join(words).removeprefix("recipe=")
    text = re.sub(r"[^\w.,=-]+", "_", text).strip("_.") or "default"
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}-{files.text_digest(text)[:6]}"


def _without_folders(words: Sequence[str]) -> list[str]:
    """Words in which a recipe of a file has the name of the file."""
    return [re.sub(r"^recipe=.*[/\\]", "recipe=", word) for word in words]


def _recipe_name(words: Sequence[str], code: Sequence[OwnCode] = ()) -> str:
    named = [word.removeprefix("recipe=") for word in words if word.startswith("recipe=")]
    changes = [word for word in words if not word.startswith("recipe=")]
    of_kind = {own_code.kind: own_code.name for own_code in code}
    name = of_kind.get("model") or (named[0] if named else "the default recipe")
    name += f" trained by {of_kind['optimizer']}" if "optimizer" in of_kind else ""
    return f"{name} with {' '.join(changes)}" if changes else name
