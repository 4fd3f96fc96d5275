"""The runs of a crash test, of more and more settings: what is trained of them, and the card so far."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from lab.analysis.curves import parameters
from lab.analysis.stress.battery import StressTest, read_battery
from lab.analysis.stress.cures import Cure
from lab.analysis.stress.measures import Outcomes, best_lr, curve, outcomes, wanted
from lab.analysis.stress.rates import finer_settings
from lab.features.stress.card import Card, card_of
from lab.features.stress.plan import USUAL_BEST, Plan
from lab.features.stress.progress import Progress
from lab.features.stress.sizes import settings_of_sizes, size_trend
from lab.records.plans import Setting
from lab.sweeping.bench import Bench

STOPPED = "a signal stopped it before all runs had ended"
UNMEASURED = (
    "no block was found; blocks are the members of the longest nn.ModuleList whose members have parts of their own"
)


class CardBench:
    """The runs of a crash test: trains those of more and more settings, and knows which there are."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self.plan, self.progress = plan, progress
        self.bench = Bench(plan.request, f"{plan.recipe} has no card,")
        self.done: Outcomes = {}
        self.finer: list[Setting] = []  # the recipe itself at learning rates between those that tests read
        self.between: Outcomes = {}  # their runs
        self.parameters = pd.Series(dtype=float)  # without embeddings, by run
        self.started = time.monotonic()
        self.seeds = next((word.text.count(",") + 1 for word in plan.request.words if word.key == "seed"), 1)

    def train(self, settings: Sequence[Setting]) -> None:
        """Train what is missing of these settings; for what it raises see ``Bench.train``."""
        self.foretell(settings)
        self.bench.train(settings, self.progress)
        self._take()

    def _take(self) -> None:
        trained = outcomes(self.bench.records, self.bench.ids)
        self.between = {setting: table for setting, table in trained.items() if setting in self.finer}
        self.done = {setting: table for setting, table in trained.items() if setting not in self.finer}
        self.parameters = parameters(self.bench.records.runs.set_index("id"))

    def foretell(self, settings: Sequence[Setting]) -> None:
        """Tell the display how much comes after a round with these settings, but for cures, which nobody knows yet."""
        best = best_lr(curve(self.done))
        probable = self.plan.settings(USUAL_BEST if math.isnan(best) else best)
        later = [setting for setting in probable if setting not in self.done and setting not in settings]
        rounds = len({setting.words in self.plan.sizes for setting in later})  # of the tests, and of other sizes
        self.progress.begin(rounds, sum(map(self._work, later)) / sum(map(self._work, settings)))

    def _work(self, setting: Setting) -> float:
        """FLOPs of the runs of a setting; those of the recipe's own where they are not known."""
        seeds = next((word for word in setting.words if word.startswith("seed=")), "")
        words = tuple(word for word in setting.words if word != seeds)
        flops = self.plan.flops
        return flops.get(words, flops.get((), 1.0)) * (seeds.count(",") + 1 if seeds else self.seeds)

    def train_tests(self) -> None:
        """Train what is missing of the tests of the plan, round after round, and show those that have ended.

        As soon as the curve is there, each round also trains learning rates between its own, until the plan's bracket
        of that at which the recipe fails is met.  Tests do not read them: their zones are those of a curve of half
        decades.
        """
        while True:
            finer = finer_settings(self.done, self.between, self.plan.bracket)
            settings = [*wanted(read_battery(), self.plan.tests, self.done), *finer]
            if not settings:
                return
            self.finer += finer
            self.train(settings)
            self.progress.add(self.card().lines)

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
        planned = next((each for each in self.plan.tests if each.name == test.name), test)  # with the seeds that it has
        looked_at = dict.fromkeys([*(place.setting(best) for place in planned.places), Setting((), best)])
        mine = [setting for setting in looked_at if setting in self.bench.ids]
        runs = self.bench.records.runs.set_index("id")["wall_seconds"]
        slots = len(getattr(self.bench.composed.launcher, "slots", [None]))
        cost = float(runs[[run for setting in mine for run in self.bench.ids[setting]]].sum()) / slots
        left = (self.plan.budget - (time.monotonic() - self.started)) / 2
        return max(int(left / tests / cost), 0) if cost > 0 else math.inf

    def take_up(self) -> None:
        """Take up what is recorded of the settings that were planned."""
        self.bench.read()
        self._take()

    def stopped_card(self) -> Card:
        """The card of the tests all of whose runs had ended before a signal; it names the others as missing."""
        self.take_up()
        battery, plan, sizes = read_battery(), self.plan, self.plan.sizes
        ended = [test for test in plan.tests if not wanted(battery, [test], self.done)]
        missing = [test.title for test in plan.tests if test not in ended]
        is_whole = all(Setting((), lr) in self.done for lr in battery.curve)
        if not is_whole:  # part of a curve has no best learning rate
            places = {place.setting(math.nan) for test in ended for place in test.places}
            self.done = {setting: table for setting, table in self.done.items() if setting in places}
        if sizes and not (is_whole and {*settings_of_sizes(self.done, sizes)} <= {*self.done}):
            missing, sizes = [*missing, "the headroom at other sizes"], []
        if plan.cures != "none":
            missing = [*missing, "the search for cures"]
        left_out = {**plan.left_out, **dict.fromkeys(missing, STOPPED)}
        self.plan = replace(plan, tests=ended, sizes=sizes, left_out=left_out)
        counts = f"{len(ended)} of {len(plan.tests)} tests"
        return replace(self.card(), stopped=f"Stopped by a signal after {counts}; the same command goes on.")

    def card(self, cures: Sequence[Cure] | None = None) -> Card:
        """The card of the runs so far."""
        plan = self.plan
        card = card_of(
            plan.recipe, plan.request.command, plan.folder, plan.tests, self.done, read_battery(), self.between
        )
        unmeasured = {line.test.title: UNMEASURED for line in card.lines if not line.interval.n}
        lines = [line for line in card.lines if line.interval.n]
        trained = {setting.words: self.parameters[self.bench.ids[setting][0]] for setting in self.done}
        sizes = {words: int(trained[words]) for words in [(), *plan.sizes] if words in trained}
        trend = size_trend(self.done, sizes, plan.lr) if plan.sizes else None
        left_out = {**plan.left_out, **unmeasured}
        return replace(card, lines=lines, cures=cures, left_out=left_out, trend=trend and trend.plain())
