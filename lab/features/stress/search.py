"""Search for changes that cure what a recipe fails: screen them all, and confirm the best on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.analysis.stress.arms import arm_cards, board_changes
from lab.analysis.stress.battery import FAILS, NOT_JUDGED, OPEN, WEAK, Change, StressTest, read_battery
from lab.analysis.stress.cures import (
    CURES,
    Cure,
    Trial,
    as_screened,
    finalists,
    judge_cures,
    not_tried,
    pair_to_try,
    trial_of,
)
from lab.analysis.stress.measures import best_lr, curve
from lab.core.errors import RequestError
from lab.features.stress.card_bench import CardBench
from lab.features.stress.plan import Plan, seed_word
from lab.records.plans import Setting
from lab.sweeping.bench import compose_settings, first_trees, reason_of_card, reason_of_config, tree_value
from lab.sweeping.compose import Tree

HAS_IT = "the recipe has it already"


@dataclass
class Tried:
    """The changes that are tried on a test, stage by stage.

    Attributes:
        test: the test.
        trials: those that are screened.
        refused: those that cannot be tried.
        finals: those that are confirmed, each one change or a pair.
        screened: what the seeds of the card say.
        confirmed: what the fresh seeds say.
    """

    test: StressTest
    trials: list[Trial] = field(default_factory=list)
    refused: list[Cure] = field(default_factory=list)
    finals: list[Sequence[Change]] = field(default_factory=list)
    screened: list[Cure] = field(default_factory=list)
    confirmed: list[Cure] = field(default_factory=list)

    @property
    def cures(self) -> list[Cure]:
        """What is said of each change, by its fresh seeds if it has any."""
        names = {cure.change for cure in self.confirmed}
        return [*self.confirmed, *(as_screened(cure) for cure in self.screened if cure.change not in names)]


def try_cures(bench: CardBench) -> list[Cure]:
    """Screen the changes that may cure the tests which the recipe fails, and confirm the best of each on fresh seeds.

    Where none of these is a cure, the best pair of changes of different parts is tried on the fresh seeds, too.
    """
    tests = _tests_to_cure(bench)
    if bench.plan.names_cures and not tests:
        return _nothing_to_cure(bench)
    search = CureSearch(bench)
    tried = [search.candidates(test, len(tests)) for test in tests]
    search.screen([of_test for of_test in tried if of_test.trials])
    search.confirm([of_test for of_test in tried if of_test.finals])
    search.confirm([of_test for of_test in tried if search.adds_pair(of_test)])
    return [cure for of_test in tried for cure in of_test.cures] + [
        cure for of_test in tried for cure in of_test.refused
    ]


def _tests_to_cure(bench: CardBench) -> list[StressTest]:
    """The tests that the recipe fails or may fail; with changes that were asked for by name, all that it is ill in."""
    by_name = (FAILS, WEAK, OPEN) if bench.plan.names_cures else ()
    ill = [line.test for line in bench.card().lines if line.may_fail or line.verdict in by_name]
    return list({test.name: test for test in map(read_battery().cured, ill)}.values())


def _nothing_to_cure(bench: CardBench) -> list[Cure]:
    """The changes that were asked for by name, and why none is tried."""
    lines = bench.card().lines
    if not lines:
        return []
    reason = "the recipe fails no test, and is weak or open in none"
    if all(line.verdict == NOT_JUDGED for line in lines):
        reason = "no test of the recipe is judged"
    return [not_tried(lines[0].test, change.name, reason) for change in bench.plan.changes_to_try(lines[0].test)]


class CureSearch:
    """Trains the trials of changes on a recipe, and judges them."""

    def __init__(self, bench: CardBench) -> None:
        self.bench, self.stages = bench, read_battery().confirm
        self.best = best_lr(curve(bench.done))
        self.changes = {**board_changes(), **read_battery().changes}
        setting, table = next(iter(bench.done.items()))
        self.own, *_ = compose_settings(bench.plan.request, [setting])[setting]
        seeds = sorted(table.index)
        self.few = (seed_word(seeds[: self.stages.screened]),) if len(seeds) > self.stages.screened else ()
        self.last_seed = max(int(table.index.max()) for table in bench.done.values())

    def candidates(self, test: StressTest, tests: int) -> Tried:
        """The changes that can be screened on a test, one of so many ``tests`` that share the budget."""
        tried = Tried(test)
        affordable = self.bench.affordable(test, self.best, tests) if test.stressed else 0
        for change in self.bench.plan.changes_to_try(test):
            if not test.stressed:
                reason = "its number is that of a whole curve"
            elif len(tried.trials) >= affordable:
                reason = "the budget leaves no time for it"
            else:
                trial = self._trial(test, [change], self.few)
                reason = _reason(self.bench.plan, change, trial, test, self.own)
                if not reason:
                    tried.trials.append(trial)
            if reason:
                tried.refused.append(not_tried(test, change.name, reason))
        return tried

    def screen(self, tried: Sequence[Tried]) -> None:
        """Judge all trials on the seeds of the card, and choose the finals."""
        self.bench.progress.stage = "screening of cures"
        judged = self._judged([(of_test.test, of_test.trials, ()) for of_test in tried])
        for of_test, cures in zip(tried, judged, strict=True):
            of_test.screened = cures
            of_test.finals = [[self.changes[name]] for name in finalists(cures, self.stages.best)]

    def confirm(self, tried: Sequence[Tried]) -> None:
        """Judge the finals on fresh seeds."""
        self.bench.progress.stage = "cures on fresh seeds"
        trials = []
        for of_test in tried:
            first = self.last_seed + 1
            seeds = (seed_word(range(first, first + max(self.stages.fresh, of_test.test.seeds))),)
            trials.append((of_test.test, [self._trial(of_test.test, final, seeds) for final in of_test.finals], seeds))
        for of_test, cures in zip(tried, self._judged(trials), strict=True):
            of_test.confirmed = cures

    def adds_pair(self, tried: Tried) -> bool:
        """Add the best pair to the finals, where none of them is a cure and the two can stand beside one another."""
        pair = pair_to_try(tried.screened, self.changes)
        if not pair or any(cure.verdict == CURES for cure in tried.confirmed):
            return False
        both = self._trial(tried.test, pair, ())
        _, refusals = first_trees(self.bench.plan.request, [both.stressed])
        if refusals:
            tried.refused.append(not_tried(tried.test, both.change, refusals[both.stressed]))
            return False
        tried.finals.append(pair)
        return True

    def _trial(self, test: StressTest, changes: Sequence[Change], seeds: tuple[str, ...]) -> Trial:
        name = " + ".join(change.name for change in changes)
        lr_multiplier = math.prod(change.lr_multiplier for change in changes)
        return trial_of(test, name, change_words(changes, self.own), self.best, seeds, lr_multiplier)

    def _judged(self, tried: Sequence[tuple[StressTest, Sequence[Trial], tuple[str, ...]]]) -> list[list[Cure]]:
        """Judge trials of tests on seeds, all of which are trained together, beside the recipe itself."""
        settings = [place.setting(self.best).beside(seeds) for test, _, seeds in tried for place in test.places]
        if not math.isnan(self.best):
            settings += [Setting(seeds, self.best) for _, _, seeds in tried]
        for _, trials, _ in tried:
            settings += [setting for trial in trials for setting in trial[1:] if setting]
        self.bench.train_missing(settings)
        return [judge_cures(test, trials, self.bench.done, self.best, seeds) for test, trials, seeds in tried]


def change_words(changes: Sequence[Change], own: Tree) -> list[str]:
    """The overrides that add changes to a recipe."""
    names = [change.name for change in changes if change.is_intervention]
    words = [word for change in changes for word in change.words]
    scales = [scale for change in changes for scale in change.scales.items()]
    words += [f"{key}={value * factor:g}" for key, factor in scales if (value := tree_value(own, key))]
    for name in (word.removeprefix("optimizer=") for word in words if word.startswith("optimizer=")):
        words = [*kept_words(name, own["optimizer"]), *words]  # what a change says itself comes last and holds
    return words + [f"intervention=[{','.join(sorted({*own['intervention'], *names}))}]"] * bool(names)


# What a recipe keeps with another optimizer, where that has it.
KEPT = ("weight_decay", "clip")


def kept_words(optimizer: str, own: Tree) -> list[str]:
    """The overrides by which another optimizer keeps the decay and the clip of a recipe, and where they stand.

    Decay before the peak learning rate is coupled to it, and decay after it is not.
    """
    entry = arm_cards()[optimizer].defaults
    words = [f"optimizer.{key}={own[key]}" for key in KEPT if key in entry and key in own]
    chain = list(entry["chain"])
    if {"decay", "peak"} <= {*chain} & {*own["chain"]}:
        is_coupled = own["chain"].index("decay") < own["chain"].index("peak")
        decay, peak = chain.index("decay"), chain.index("peak")
        if is_coupled != (decay < peak):
            chain[decay], chain[peak] = "peak", "decay"
            words.append(f"optimizer.chain=[{','.join(chain)}]")
    return words


def _reason(plan: Plan, change: Change, trial: Trial, test: StressTest, own: Tree) -> str:
    """Why a change cannot act on a recipe under the stress of a test, or not beside what it has; empty where it can."""
    card = arm_cards().get(change.name)
    keys = dict(word.split("=") for word in change.words)
    stress = {word.partition("=")[0] for word in test.stressed.words} if test.stressed else set()
    swaps = "optimizer" in keys and any(key.startswith("optimizer.") for key in stress)
    if change.name not in test.cures and (swaps or stress & {*keys, *change.scales}):
        return f"it takes the stress of {test.title} away"
    if change.is_intervention and change.name in own["intervention"]:
        return HAS_IT
    if keys.get("optimizer") == own["optimizer"]["name"]:
        return HAS_IT
    if keys and all(str(tree_value(own, key)) == value for key, value in keys.items()):
        return HAS_IT
    of_interventions = [key for key in keys if key.startswith("intervention.")]
    if missing := [key for key in (*change.scales, *of_interventions) if not tree_value(own, key)]:
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
