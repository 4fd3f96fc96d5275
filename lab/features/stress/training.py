"""Train what the tests of a recipe need, round after round, and make the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab.analysis.stress.battery import CARD_FILE, Place, StressTest
from lab.core import files, machine
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.features.stress.card import Card
from lab.features.stress.card_bench import CardBench
from lab.features.stress.pair import CardPair, card_pair
from lab.features.stress.plan import USUAL_BEST, Plan, seed_word
from lab.features.stress.progress import Progress
from lab.features.stress.search import try_cures
from lab.features.stress.sizes import settings_of_sizes
from lab.records import store
from lab.records.plans import Setting
from lab.sweeping.bench import compose_settings, first_trees
from lab.sweeping.compose import Tree


class Stopped(SystemExit):
    """A signal stopped a crash test before all tests had ended; with the card of those that had."""

    def __init__(self, card: Card) -> None:
        super().__init__(machine.EXIT_PREEMPTED)
        self.card = card


def make_card(plan: Plan) -> Card:
    """Train what is missing and make the card, with its page and its JSON beside the records.

    Raises:
        RequestError: a run is invalid, the folder cannot take records, or the user's own code failed.
        Stopped: a signal asked to stop; the card of the tests that had ended is written.
        SystemExit: with status 1 when a run failed otherwise.
    """
    with machine.catching_sigterm():
        return _card_of_possible_tests(possible_plan(plan))


def _card_of_possible_tests(plan: Plan) -> Card:
    progress = Progress(plan.recipe)
    bench = CardBench(plan, progress)
    try:
        bench.train_tests()
        if plan.sizes:
            progress.stage = "other sizes"
            bench.train_missing(settings_of_sizes(bench.done, plan.sizes))
        card = bench.card(None if plan.cures == "none" else try_cures(bench))
    except SystemExit as end:
        if end.code != machine.EXIT_PREEMPTED or not store.find(plan.folder):
            raise
        card = bench.stopped_card()
    finally:
        progress.end()
    store.gather(plan.folder)
    files.write_text(plan.folder / "card.html", card.answer.html())
    files.write_text(plan.folder / CARD_FILE, card.answer.json() + "\n")
    if card.stopped:
        raise Stopped(card)
    return card


def make_pair(plans: Sequence[Plan]) -> CardPair:
    """Make the cards of two plans and put them side by side, with a page and JSON in the folder that holds both.

    Raises:
        RequestError, SystemExit: as ``make_card``.
    """
    with machine.catching_sigterm():
        first, second = map(possible_plan, plans)  # before one of them is trained
        pair = card_pair(_card_of_possible_tests(first), _card_of_possible_tests(second), first.request.command)
    files.write_text(pair_file(plans, ".html"), pair.answer.html())
    files.write_text(pair_file(plans, ".json"), pair.answer.json() + "\n")
    return pair


def pair_file(plans: Sequence[Plan], suffix: str) -> Path:
    """The file of two cards side by side: ``runs/stress/olmo2-and-llama.html``."""
    first, second = plans
    return first.folder.parent / f"{first.folder.name}-and-{second.folder.name}{suffix}"


def try_own_code(plan: Plan) -> str:
    """Try the user's own model and optimizer in a few steps that leave nothing; returns a line on what works.

    Raises:
        RequestError: they cannot be trained in a fleet, or the recipe is invalid.
    """
    from lab.training.building import build_model, count_parameters  # slow to load
    from lab.training.config import run_config

    usual = Setting((), USUAL_BEST)
    trees, refusals = first_trees(plan.request, [usual])
    if usual in refusals:
        raise RequestError(refusals[usual])
    _say_what_is_probed(trees[usual])
    parameters, _ = count_parameters(build_model(run_config(trees[usual]), 1))
    return f"{plan.recipe} works: it trains in fleets, with {parameters:,} parameters. Nothing was recorded."


def possible_plan(plan: Plan) -> Plan:
    """The plan without tests whose settings do not go with the recipe, the others with as many seeds as they need.

    Raises:
        RequestError: the recipe itself is invalid, or no test is left.
    """
    from lab.sweeping.planner import training_flops  # slow to load
    from lab.training.config import run_config

    usual = Setting((), USUAL_BEST)
    places = {test: [place.setting(USUAL_BEST) for place in test.places] for test in plan.tests}
    settings = [usual, *(setting for of_test in places.values() for setting in of_test)]
    trees, refusals = first_trees(plan.request, settings)
    if usual in refusals:
        raise RequestError(refusals[usual])
    has = trees[usual]["intervention"]
    lacking = [test for test in plan.tests if test.needs and test.needs not in has]
    reason = ""
    if plan.own_model and (plan.is_named or _has_experts(trees[usual])):
        reason = f"the routers of a model of one's own cannot be probed, and {plan.own_model} is one"
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
    _say_what_is_probed(trees[usual])
    seeds = [tree["seed"] for tree in compose_settings(plan.request, [usual])[usual]]
    flops = {setting.words: training_flops(run_config(tree)) for setting, tree in trees.items()}
    tests = [_with_seeds(test, seeds) for test in left]
    return replace(plan, tests=tests, left_out=reasons, flops=flops)


def _with_seeds(test: StressTest, seeds: Sequence[int]) -> StressTest:
    """A test whose runs have the seeds of the card, and after them as many further ones as it needs."""
    if test.seeds <= len(seeds):
        return test
    more = range(max(seeds) + 1, max(seeds) + 1 + test.seeds - len(seeds))
    word = seed_word([*seeds, *more])

    def with_seeds(place: Place | None) -> Place | None:
        return place._replace(words=(*place.words, word)) if place else None

    return replace(test, reference=with_seeds(test.reference), stressed=with_seeds(test.stressed))


def _has_experts(tree: Tree) -> bool:
    """Whether a model of the user's own has parts that are called experts."""
    from lab.training.building import build_model  # slow to load
    from lab.training.config import run_config

    names = [f"{name} {type(part).__name__}" for name, part in build_model(run_config(tree), 1).named_modules()]
    return any(word in name.lower() for name in names for word in ("expert", "moe"))


def _say_what_is_probed(tree: Tree) -> None:
    """Say in which modules of a model of the user's own attention and blocks are probed."""
    from lab.training.building import probed_modules  # slow to load
    from lab.training.config import run_config

    if probed := probed_modules(run_config(tree)):
        attention, stream = (
            f"{word} {names}" if names else f"nowhere; --probe {kind}=NAMES names modules"
            for word, (kind, names) in zip(("in", "after"), probed._asdict().items(), strict=True)
        )
        say(f"lab: attention logits are probed {attention}; the residual stream {stream}", error=True)
