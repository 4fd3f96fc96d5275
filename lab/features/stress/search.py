"""Search for changes that cure what a recipe fails: screen them all, and confirm the best on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lab.analysis.stress.arms import arm_cards, board_changes
from lab.analysis.stress.battery import FAILS, NOT_JUDGED, OPEN, WEAK, Change, Setting, StressTest, read_battery
from lab.analysis.stress.damage import CURES
from lab.analysis.stress.measures import best_lr, curve
from lab.core.errors import RequestError
from lab.features.stress.bench import CardBench
from lab.features.stress.cures import (
    Cure,
    Trial,
    as_screened,
    finalists,
    judge_cures,
    not_tried,
    pair_to_try,
    trial_of,
)
from lab.features.stress.plan import Plan
from lab.sweeping.bench import compose_settings, first_trees
from lab.sweeping.compose import Tree
from lab.sweeping.recipe import reason_of_card, reason_of_config, tree_value

HAS_IT = "the recipe has it already"


def try_cures(bench: CardBench) -> list[Cure]:
    """Screen the changes that may cure the tests which the recipe fails, and confirm the best of each on fresh seeds.

    Where none of these is a cure, the best pair of changes of different parts is tried on the fresh seeds, too.
    """
    own_runs, request = bench.done, bench.plan.request
    best, stages = best_lr(curve(own_runs)), read_battery().confirm
    own = next(iter(compose_settings(request, [next(iter(own_runs))]).values()))[0]
    seeds = sorted(next(iter(own_runs.values())).index)
    few = (_seeds(seeds[: stages.screened]),) if len(seeds) > stages.screened else ()
    last = max(int(table.index.max()) for table in own_runs.values())

    def fresh(test: StressTest) -> tuple[str, ...]:
        return (_seeds(range(last + 1, last + 1 + max(stages.fresh, test.seeds))),)

    def trial(test: StressTest, changes: Sequence[Change], seeds: tuple[str, ...]) -> Trial:
        name = " + ".join(change.name for change in changes)
        lr_multiplier = math.prod(change.lr_multiplier for change in changes)
        return trial_of(test, name, change_words(changes, own), best, seeds, lr_multiplier)

    lines = bench.card().lines
    by_name = (FAILS, WEAK, OPEN) if bench.plan.names_cures else ()
    ill = [line.test for line in lines if line.may_fail or line.verdict in by_name]
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
    judged = {name: judge_cures(by_test[name], trials, bench.done, best) for name, trials in screened.items()}

    def confirm(changes: Mapping[str, Sequence[Sequence[Change]]]) -> dict[str, list[Cure]]:
        seeds = {name: fresh(by_test[name]) for name in changes}
        trials = {
            name: [trial(by_test[name], tried, seeds[name]) for tried in of_test] for name, of_test in changes.items()
        }
        places = [place.setting(best).beside(seeds[name]) for name in trials for place in by_test[name].places]
        at_best = [] if math.isnan(best) else [Setting(of_test, best) for of_test in seeds.values()]
        bench.train_missing([*places, *at_best, *_settings(trials)])
        return {
            name: judge_cures(by_test[name], of_test, bench.done, best, seeds[name]) for name, of_test in trials.items()
        }

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
        _, refusals = first_trees(request, [both.stressed])
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


def _seeds(seeds: Iterable[int]) -> str:
    return f"seed={','.join(map(str, seeds))}"


def _settings(trials: Mapping[str, Sequence[Trial]]) -> list[Setting]:
    """The settings of trials of several tests."""
    return [setting for of_test in trials.values() for trial in of_test for setting in trial[1:] if setting]


def change_words(changes: Sequence[Change], own: Tree) -> list[str]:
    """The overrides that add changes to a recipe."""
    names = [change.name for change in changes if change.is_intervention]
    words = [word for change in changes for word in change.words]
    scales = [scale for change in changes for scale in change.scales]
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
