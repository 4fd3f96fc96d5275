"""The crash test of a recipe: train what its tests need, round after round, and make the card."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lab.analysis.curves import parameters
from lab.analysis.stress.arms import arm_cards
from lab.analysis.stress.battery import (
    CARD_FILE,
    FAILS,
    NOT_JUDGED,
    OPEN,
    WEAK,
    Change,
    Setting,
    StressTest,
    read_battery,
)
from lab.analysis.stress.damage import CURES
from lab.analysis.stress.measures import Outcomes, best_lr, curve, outcomes, wanted
from lab.cli import launch
from lab.cli.compose import Composer, Tree, Word, expand, hydra_configs, parse
from lab.cli.own_code import OwnCode
from lab.cli.recipe import reason_of_card, reason_of_config, tree_value
from lab.cli.request import Request, read_options, read_request
from lab.core import files
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.core.printing import printable, say
from lab.features.board.failures import REFERENCE, board_arms, no_such_arm
from lab.features.stress.card import Card, card_of
from lab.features.stress.cures import (
    Cure,
    Trial,
    as_screened,
    finalists,
    judge,
    not_tried,
    pair_to_try,
    trial_of,
)
from lab.features.stress.lines import STRIP, Line, strips, zone_at
from lab.features.stress.pair import CardPair, card_pair
from lab.features.stress.sizes import settings_of_sizes, size_trend
from lab.records import store
from lab.records.plans import FleetProgress
from lab.records.status import clock
from lab.sweeping.progress import seconds_left, summary

LONGEST_NAME = 60  # of a folder, in characters
# Words that say how a recipe is trained here, and so are no part of its name.
NO_RECIPE = re.compile(r"(out|seed|device|engine)=|hydra\b|recipe=none$")
MOST_CURES = 10
LINE_EVERY = 60.0  # seconds between two lines of progress where there is no terminal
HAS_IT = "the recipe has it already"
USUAL_BEST = 0.03  # learning rate that --dry-run takes for the best one as long as that is not known
UNMEASURED = (
    "no block was found; blocks are the members of the longest nn.ModuleList whose members have parts of their own"
)
COLOURS = {"passes": "green", "weak": "yellow", "fails": "red"}


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
        lr: the user's learning rate, for the size from which it fails; NaN if none was given.
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
    lr: float = math.nan

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
    own = _recipe_words(words) if has_folders else _without_folders(_recipe_words(words))
    seeds = ",".join(map(str, range(read_battery().seeds[minutes])))
    names_of_code = [own_code.name for own_code in code]
    for own_code in code:
        words = own_code.with_settings(words)
    # many models of others draw small initial weights, and are not yet better than a bigram model after 200 steps
    longer = ["steps=400"] if any(own_code.kind == "model" for own_code in code) else []
    given = _last_of_each_key([*read_battery().runs, *longer, f"seed={seeds}", *words])
    request = read_request([*given, *options], command, name=f"stress/{_folder_name([*names_of_code, *own])}")
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

    def is_set(key: str) -> bool:
        tree = content
        for name in key.split("."):
            if not isinstance(tree, Mapping) or name not in tree:
                return False
            tree = tree[name]
        return not isinstance(tree, Mapping)

    battery = set(read_battery().runs)
    kept = [word for word in request.words if word.text not in battery or not (word.key in chosen or is_set(word.key))]
    return replace(request, words=kept)


def _recipe_words(words: Sequence[str]) -> list[str]:
    return [word for word in words if not NO_RECIPE.match(word)]


def _last_of_each_key(words: Iterable[str]) -> list[str]:
    return list({word.partition("=")[0].lstrip("+~"): word for word in words}.values())


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


class _Bench:
    """The runs of a crash test: trains those of more and more settings, and knows which there are."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan, self.progress = plan, progress
        self.composed = launch.compose(plan.request)
        self.ids: dict[Setting, list[str]] = {}
        self.done: Outcomes = {}
        self.parameters = pd.Series(dtype=float)  # without embeddings, by run
        self.started = time.monotonic()

    def train(self, settings: Sequence[Setting]) -> None:
        """Train what is missing of these settings.

        Raises:
            RequestError: a run is invalid, the folder cannot take records, or the user's own code failed.
            SystemExit: with status 1 when a run failed otherwise.
        """
        request = self.plan.request
        trees = compose_settings(request, settings)
        every = [tree for of_setting in trees.values() for tree in of_setting]
        planned = launch.plan(self.composed._replace(trees=every), request, cautions=not self.ids)
        left = iter(planned.ids)
        self.ids |= {setting: list(islice(left, len(of_setting))) for setting, of_setting in trees.items()}
        launch.train_missing(planned, self.composed.launcher, request, screen=self.progress)
        runs = {run for setting in settings for run in self.ids[setting]}
        if failed := launch.failures(self.plan.folder, sorted(runs)):
            context = f"{self.plan.recipe} has no card, since {len(failed)} of {len(runs)} runs failed: "
            launch.refuse_own_code(failed, context)
            say(f"lab: {context}{next(iter(failed.values()))}", error=True)
            raise SystemExit(1)
        records = store.read(self.plan.folder)
        self.done = outcomes(records, self.ids)
        self.parameters = parameters(records.runs.set_index("id"))

    def train_missing(self, settings: Sequence[Setting]) -> None:
        """Train those of these settings that were not trained yet."""
        if missing := [setting for setting in dict.fromkeys(settings) if setting not in self.done]:
            self.train(missing)

    def affordable(self, test: StressTest, best: float, tests: int) -> float:
        """How many changes the budget lets one of so many tests try: half of what is left of it, by its own runs' time.

        The other half is for fresh seeds.
        """
        if math.isinf(self.plan.budget):
            return math.inf
        assert test.stressed
        looked_at = dict.fromkeys([*(place.setting(best) for place in test.places), Setting((), best)])
        mine = [setting for setting in looked_at if setting in self.ids]
        runs = store.read(self.plan.folder).runs.set_index("id")["wall_seconds"]
        slots = len(getattr(self.composed.launcher, "slots", [None]))
        cost = float(runs[[run for setting in mine for run in self.ids[setting]]].sum()) / slots
        left = (self.plan.budget - (time.monotonic() - self.started)) / 2
        return max(int(left / tests / cost), 0) if cost > 0 else math.inf

    def card(self, cures: Sequence[Cure] | None = None) -> Card:
        """The card of the runs so far."""
        plan = self.plan
        card = card_of(plan.recipe, plan.request.command, plan.folder, plan.tests, self.done, read_battery())
        unmeasured = {line.test.title: UNMEASURED for line in card.lines if not line.interval.n}
        lines = [line for line in card.lines if line.interval.n]
        trained = {setting.words: self.parameters[self.ids[setting][0]] for setting in self.done}
        sizes = {words: int(trained[words]) for words in [(), *plan.sizes] if words in trained}
        trend = size_trend(self.done, sizes, plan.lr) if plan.sizes else None
        left_out = {**plan.left_out, **unmeasured}
        return replace(card, lines=lines, cures=cures, left_out=left_out, trend=trend and trend.plain())


def make_card(plan: Plan) -> Card:
    """Train what is missing and make the card, with its page and its JSON beside the records.

    Raises:
        RequestError: a run is invalid, the folder cannot take records, or the user's own code failed.
        SystemExit: with status 1 when a run failed otherwise.
    """
    return _card_of_possible_tests(_without_impossible_tests(plan))


def _card_of_possible_tests(plan: Plan) -> Card:
    progress = Progress(plan.recipe)
    try:
        bench = _Bench(plan, progress)
        while settings := wanted(read_battery(), plan.tests, bench.done):
            bench.train(settings)
            progress.add(bench.card().lines)
        if plan.sizes:
            progress.stage = "other sizes"
            bench.train_missing(settings_of_sizes(bench.done, plan.sizes))
        card = bench.card(None if plan.cures == "none" else _try_cures(bench))
    finally:
        progress.end()
    store.gather(plan.folder)
    files.write_text(plan.folder / "card.html", card.page())
    files.write_text(plan.folder / CARD_FILE, card.as_json() + "\n")
    return card


def make_pair(plans: Sequence[Plan]) -> CardPair:
    """Make the cards of two plans and put them side by side, with a page and JSON in the folder that holds both.

    Raises:
        RequestError, SystemExit: as ``make_card``.
    """
    first, second = map(_without_impossible_tests, plans)  # before one of them is trained
    pair = card_pair(_card_of_possible_tests(first), _card_of_possible_tests(second), first.request.command)
    files.write_text(pair_file(plans, ".html"), pair.page())
    files.write_text(pair_file(plans, ".json"), pair.as_json() + "\n")
    return pair


def pair_file(plans: Sequence[Plan], suffix: str) -> Path:
    """The file of two cards side by side: ``runs/stress/olmo2-and-llama.html``."""
    first, second = plans
    return first.folder.parent / f"{first.folder.name}-and-{second.folder.name}{suffix}"


def _without_impossible_tests(plan: Plan) -> Plan:
    """The plan without tests whose settings do not go with the recipe.

    Raises:
        RequestError: the recipe itself is invalid, or no test is left.
    """
    usual = Setting((), USUAL_BEST)
    places = {test: [place.setting(USUAL_BEST) for place in test.places] for test in plan.tests}
    settings = [usual, *(setting for of_test in places.values() for setting in of_test)]
    trees, refusals = _first_trees(plan.request, settings)
    if usual in refusals:
        raise RequestError(refusals[usual])
    has = trees[usual]["intervention"]
    lacking = [test for test in plan.tests if test.needs and test.needs not in has]
    reason = ""
    if plan.own_model and (plan.is_named or _has_experts(trees[usual])):
        reason = f"the routers of a model of one's own are not heard, and {plan.own_model} is one"
    elif plan.is_named:
        reason = f"{plan.recipe} has no experts"
    reasons = {test.title: reason for test in lacking if reason}
    for test, of_test in places.items():
        for setting in of_test:
            keys = [word.partition("=")[0] for word in setting.words]
            if unchanged := [key for key in keys if key in plan.fixed]:
                reasons[test.title] = f"{unchanged[0]} changes nothing in {plan.recipe}"
            elif setting in refusals:
                reasons[test.title] = refusals[setting]
    left = [test for test in plan.tests if test not in lacking and test.title not in reasons]
    if not left:
        raise RequestError(next(iter(reasons.values())))
    _say_what_is_heard(trees[usual])
    return replace(plan, tests=left, left_out=reasons)


def _has_experts(tree: Tree) -> bool:
    """Whether a model of the user's own has parts that are called experts."""
    from lab.training.building import build_model  # slow to load
    from lab.training.config import run_config

    names = [f"{name} {type(part).__name__}" for name, part in build_model(run_config(tree), 1).named_modules()]
    return any(word in name.lower() for name in names for word in ("expert", "moe"))


def _say_what_is_heard(tree: Tree) -> None:
    """Say in which modules of a model of the user's own probes hear attention and blocks."""
    from lab.training.building import heard_in  # slow to load
    from lab.training.config import run_config

    if heard := heard_in(run_config(tree)):
        attention, stream = (
            f"{word} {names}" if names else f"nowhere; --probe {kind}=NAMES names modules"
            for word, (kind, names) in zip(("in", "after"), heard._asdict().items(), strict=True)
        )
        say(f"lab: attention logits are heard {attention}; the residual stream {stream}", error=True)


def _first_trees(request: Request, settings: Iterable[Setting]) -> tuple[dict[Setting, Tree], dict[Setting, str]]:
    """The config tree of the first seed of each setting that can be trained, and why the others cannot."""
    from lab.training.building import check_own_code  # slow to load
    from lab.training.config import run_config
    from lab.training.identity import static_key

    own = [word for word in request.words if not word.is_setting]
    trees, refusals, shapes = dict[Setting, Tree](), dict[Setting, str](), set[str]()
    with hydra_configs(request.files):
        composer = Composer(request.config_dir)
        for setting in settings:
            try:
                tree = trees_of_setting(composer, own, setting, request.config_dir)[0]
                config = run_config(tree)
                if (shape := static_key(config)) not in shapes:
                    check_own_code(config)
                    shapes.add(shape)
                trees[setting] = tree
            except RequestError as refusal:
                refusals[setting] = str(refusal)
    return trees, refusals


def _try_cures(bench: _Bench) -> list[Cure]:
    """Screen the changes that may cure the tests which the recipe fails, and confirm the best of each on fresh seeds.

    Where none of these is a cure, the best pair of changes of different parts is tried on the fresh seeds, too.
    """
    own_runs, request = bench.done, bench.plan.request
    best, stages = best_lr(curve(own_runs)), read_battery().confirm
    own = next(iter(compose_settings(request, [next(iter(own_runs))]).values()))[0]
    seeds = sorted(next(iter(own_runs.values())).index)
    few = (_seeds(seeds[: stages.screened]),) if len(seeds) > stages.screened else ()
    fresh = (_seeds(range(seeds[-1] + 1, seeds[-1] + 1 + stages.fresh)),)

    def trial(test: StressTest, changes: Sequence[Change], seeds: tuple[str, ...]) -> Trial:
        name, times = " + ".join(change.name for change in changes), math.prod(change.times for change in changes)
        return trial_of(test, name, _words(changes, own), best, seeds, times)

    lines = bench.card().lines
    curable = (FAILS, WEAK, OPEN) if bench.plan.names_cures else (FAILS,)
    ill = [line.test for line in lines if line.verdict in curable]
    cures, screened, by_test = list[Cure](), dict[str, list[Trial]](), dict[str, StressTest]()
    tests = list({test.name: test for test in map(read_battery().cured, ill)}.values())
    for test in tests:
        by_test[test.name], trials = test, list[Trial]()
        affordable = bench.affordable(test, best, len(tests)) if test.stressed else 0
        for change in bench.plan.changes_to_try(test):
            if not test.stressed:
                cures.append(not_tried(test, change.name, "its number is that of a whole curve"))
            elif len(trials) >= affordable:
                cures.append(not_tried(test, change.name, "the budget leaves no time for it"))
            else:
                single = trial(test, [change], few)
                if reason := _reason(bench.plan, change, single, test, own):
                    cures.append(not_tried(test, change.name, reason))
                else:
                    trials.append(single)
        if trials:
            screened[test.name] = trials
    if bench.plan.names_cures and lines and not tests:
        well = "the recipe fails no test, and is weak or open in none"
        unjudged = "no test of the recipe is judged"
        reason = unjudged if all(line.verdict == NOT_JUDGED for line in lines) else well
        cures = [not_tried(lines[0].test, change.name, reason) for change in bench.plan.changes_to_try(lines[0].test)]
    places = [place.setting(best) for name in screened for place in by_test[name].places]
    bench.progress.stage = "screening of cures"
    bench.train_missing([*places, *_settings(screened)])
    bench.progress.stage = "cures on fresh seeds"
    judged = {name: judge(by_test[name], trials, bench.done, best) for name, trials in screened.items()}

    def confirm(changes: Mapping[str, Sequence[Sequence[Change]]]) -> dict[str, list[Cure]]:
        trials = {name: [trial(by_test[name], tried, fresh) for tried in of_test] for name, of_test in changes.items()}
        places = [place.setting(best).beside(fresh) for name in trials for place in by_test[name].places]
        at_best = [] if math.isnan(best) else [Setting(fresh, best)]
        bench.train_missing([*places, *at_best, *_settings(trials)])
        return {name: judge(by_test[name], of_test, bench.done, best, fresh) for name, of_test in trials.items()}

    changes = {**board_changes(), **read_battery().changes}
    finals = {
        name: [[changes[change]] for change in found]
        for name, of_test in judged.items()
        if (found := finalists(of_test, stages.best))
    }
    confirmed = confirm(finals) if finals else {}
    with_pairs = {}
    for name, of_test in confirmed.items():
        pair = pair_to_try(judged[name], changes)
        if not pair or any(cure.verdict == CURES for cure in of_test):
            continue
        both = trial(by_test[name], pair, ())
        _, refusals = _first_trees(request, [both.stressed])
        if refusals:
            cures.append(not_tried(by_test[name], both.change, refusals[both.stressed]))
        else:
            with_pairs[name] = [*finals[name], pair]
    confirmed |= confirm(with_pairs) if with_pairs else {}
    for name, of_test in judged.items():
        done = {cure.change for cure in confirmed.get(name, ())}
        others = [as_screened(cure) for cure in of_test if cure.change not in done]
        cures = [*confirmed.get(name, ()), *others, *cures]
    return cures


def board_changes() -> dict[str, Change]:
    """Every arm of the board as a change of a recipe.

    An optimizer keeps what the recipe says of decay, clip and schedule, see ``_words``.
    """
    changes = {}
    for name, arm in board_arms().items():
        if name != REFERENCE and "+" not in name:
            acts_on = "+".join(arm_cards()[name].at) if name in arm_cards() else "settings"
            words = (*(word for word in arm.optimizer if not word.startswith("schedule")), *arm.words)
            changes[name] = Change(name, acts_on, words, arm.times)
    return changes


def _seeds(seeds: Iterable[int]) -> str:
    return f"seed={','.join(map(str, seeds))}"


def _settings(trials: Mapping[str, Sequence[Trial]]) -> list[Setting]:
    """The settings of trials of several tests."""
    return [setting for of_test in trials.values() for trial in of_test for setting in trial[1:] if setting]


def _words(changes: Sequence[Change], own: Tree) -> list[str]:
    """The overrides that add changes to a recipe."""
    names = [change.name for change in changes if change.is_intervention]
    words = [word for change in changes for word in change.words]
    scales = [scale for change in changes for scale in change.scales]
    words += [f"{key}={value * factor:g}" for key, factor in scales if (value := tree_value(own, key))]
    for name in (word.removeprefix("optimizer=") for word in words if word.startswith("optimizer=")):
        words = [*_kept(name, own["optimizer"]), *words]  # what a change says itself comes last and holds
    return words + [f"intervention=[{','.join(sorted({*own['intervention'], *names}))}]"] * bool(names)


# What a recipe keeps with another optimizer, where that has it.
KEPT = ("weight_decay", "clip")


def _kept(optimizer: str, own: Tree) -> list[str]:
    """The overrides by which another optimizer keeps the decay and the clip of a recipe, and where they stand.

    Decay before the peak learning rate is coupled to it, and decay after it is not.
    """
    entry = arm_cards()[optimizer].defaults
    words = [f"optimizer.{key}={own[key]}" for key in KEPT if key in entry and key in own]
    chain = list(entry["chain"])
    if {"decay", "peak"} <= {*chain} & {*own["chain"]}:
        is_coupled = own["chain"].index("decay") < own["chain"].index("peak")
        if is_coupled != (chain.index("decay") < chain.index("peak")):
            first, last = sorted((chain.index("decay"), chain.index("peak")))
            chain[first], chain[last] = chain[last], chain[first]
            words.append(f"optimizer.chain=[{','.join(chain)}]")
    return words


def _reason(plan: Plan, change: Change, trial: Trial, test: StressTest, own: Tree) -> str:
    """Why a change cannot act on a recipe under the stress of a test, or not beside what it has; empty where it can."""
    card = arm_cards().get(change.name)
    keys = dict(word.split("=") for word in change.words)
    stress = {word.partition("=")[0] for word in test.stressed.words} if test.stressed else set()
    swaps = "optimizer" in keys and any(key.startswith("optimizer.") for key in stress)
    if change.name not in test.cures and (swaps or stress & {*keys, *dict(change.scales)}):
        return f"it takes the stress of {test.title} away"
    if change.is_intervention and change.name in own["intervention"]:
        return HAS_IT
    if keys.get("optimizer") == own["optimizer"]["name"]:
        return HAS_IT
    if keys and all(str(tree_value(own, key)) == value for key, value in keys.items()):
        return HAS_IT
    of_interventions = [key for key in keys if key.startswith("intervention.")]
    if missing := [key for key in (*dict(change.scales), *of_interventions) if not tree_value(own, key)]:
        return f"the recipe has no {missing[0]}"
    if plan.own_model and card and "initial values" in card.at:
        return f"{plan.own_model} draws its own initial values"
    if change.is_intervention and card and not plan.own_model and (reason := reason_of_card(card, own)):
        return reason
    try:
        tree, *_ = compose_settings(plan.request, [trial.stressed])[trial.stressed]
    except RequestError as refusal:
        return str(refusal)
    reason = reason_of_config([change.name], tree)
    if reason and plan.own_model and change.is_intervention:
        return f"{plan.own_model} is a model of your own, which has no hooks for it"
    return reason


def dry_run(plan: Plan) -> None:
    """Print what the crash test would cost, if the best learning rate is the usual one."""
    plan = _without_impossible_tests(plan)
    settings = wanted(read_battery(), plan.tests, {})
    settings += [place.setting(USUAL_BEST) for test in plan.tests for place in test.places]
    settings += [Setting(words, lr) for words in plan.sizes for lr in read_battery().curve]
    composed, trees = launch.compose(plan.request), compose_settings(plan.request, list(dict.fromkeys(settings)))
    every = [tree for of_setting in trees.values() for tree in of_setting]
    planned = launch.plan(composed._replace(trees=every), plan.request, cautions=False)
    best = f"for a best learning rate of {USUAL_BEST:g}, without learning rates by which the curve is extended"
    say(f"{plan.recipe}, {best}:")
    launch.print_estimate(planned, plan.request)


def compose_settings(request: Request, settings: Sequence[Setting]) -> dict[Setting, list[Tree]]:
    """The config trees of each setting of a recipe, one for each seed.

    Raises:
        RequestError: the words of a setting cannot be composed with those of the recipe.
    """
    own = [word for word in request.words if not word.is_setting]
    with hydra_configs(request.files):
        composer = Composer(request.config_dir)
        return {setting: trees_of_setting(composer, own, setting, request.config_dir) for setting in settings}


def trees_of_setting(composer: Composer, own: Sequence[Word], setting: Setting, config_dir: Path | None) -> list[Tree]:
    """The config trees of a setting, one for each seed, from the words of a recipe and those of the setting."""
    added = parse([*setting.words, f"optimizer.lr={setting.lr!r}"], config_dir)
    if any(word.key == "optimizer" for word in added):  # the numbers of one optimizer are not those of another
        own = [word for word in own if not word.key.startswith("optimizer.")]
    words = {word.key: word for word in (*own, *added)}
    return [composer.tree(point) for point in expand(list(words.values()), config_dir)]


class Progress:
    """Shows the strips of the tests that have ended: on a terminal above a line of progress, elsewhere as they end.

    Elsewhere it also prints a line of progress about once a minute.

    Args:
        recipe: its name for readers.
    """

    def __init__(self, recipe: str) -> None:
        self.recipe, self.stage = recipe, "tests"
        self.lines: dict[str, Line] = {}
        self.started = time.monotonic()
        self.due = self.started + LINE_EVERY
        self.live = (
            Live(console=Console(stderr=True), transient=True, auto_refresh=False) if sys.stderr.isatty() else None
        )
        if self.live:
            self.live.start()

    def add(self, lines: Sequence[Line]) -> None:
        """Show the tests that have ended since."""
        new = [line for line in lines if line.test.name not in self.lines]
        self.lines |= {line.test.name: line for line in new}
        if not self.live:
            for text in strips(new):
                say(text, error=True)

    def show(self, fleets: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Redraw: progress of each fleet that has started, the share of work done, and the seconds elapsed.

        The last two are those of a round of training, of which a card has several.
        """
        if self.live:
            head = Text(summary(fleets, len(fleets), done, elapsed), no_wrap=True, overflow="crop")
            self.live.update(Group(*coloured(list(self.lines.values())), head), refresh=True)
        elif (now := time.monotonic()) >= self.due:
            self.due = now + LINE_EVERY
            left = seconds_left(done, elapsed)
            more = "" if left is None else f", {clock(left)} left of this round"
            say(f"lab: {self.recipe}: {self.stage}, {clock(now - self.started)} elapsed{more}", error=True)

    def close(self) -> None:
        """Leave the strips on the screen until the next round."""

    def end(self) -> None:
        """Clear the screen for the card."""
        if self.live:
            self.live.stop()


def coloured(lines: Sequence[Line], names: Sequence[str] = ()) -> list[Text]:
    """The strips of a card with zones in colour."""
    texts = []
    for plain in strips(lines, names):
        text = Text(printable(plain), no_wrap=True, overflow="crop")
        start = plain.rindex("[") + 1  # a name may have brackets, too
        for place in range(STRIP):
            text.stylize(COLOURS[zone_at((place + 0.5) / STRIP)], start + place, start + place + 1)
        texts.append(text)
    return texts


def print_card(card: Card | CardPair, page: Path) -> None:
    """Print a card or two, their strips in colour on a terminal, and the place of the page."""
    shown = card.strips() if isinstance(card, CardPair) else (card.lines, [])
    pretty = dict(zip(strips(*shown), coloured(*shown), strict=True)) if sys.stdout.isatty() else {}
    console = Console()
    for line in card.text():
        if line in pretty:
            console.print(pretty[line])
        else:
            say(line)
    say(f"page: {page}")
