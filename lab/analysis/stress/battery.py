"""The tests of the crash test as data: what each trains and measures, its zones, and which of them fit into minutes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.statistics import Interval, Spread
from lab.analysis.text import capitalized, listed
from lab.core import shipped
from lab.core.errors import RequestError, nearest, similar_names
from lab.core.registry import load_plugins
from lab.core.schema import bounded, build
from lab.records.plans import Setting

FILE = Path(__file__).with_name("battery.yaml")
# Written by ``make results-readme``.
SPREADS = Path(__file__).with_name("spreads.yaml")
# Written by ``benchmarks/step_times.py``.
STEP_TIMES = Path(__file__).with_name("step_times.csv")

CARD_FILE = "card.json"  # of a card, in the folder of its records
FAILS, WEAK, OPEN, PASSES, NOT_JUDGED = "fails", "weak", "open", "passes", "not judged"  # verdicts on a test


OF_CURVE = "tolerance"  # the metric that is measured on the curve, and needs no runs under stress
METRICS = (OF_CURVE, "loss", "log_rms", "spikes", "load_cv", "router_logit")
LARGEST = "largest."  # of a probe's values over a run


class StepTime(NamedTuple):
    """What a change costs in time: a step over that of the recipe without it, a median with its 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{Interval(*self):.2f}"


class Place(NamedTuple):
    """Where a test looks: overrides, and a learning rate that is absolute or a multiple of the recipe's best one."""

    words: tuple[str, ...] = ()
    lr: float = math.nan
    times_best: float = math.nan

    def setting(self, best: float) -> Setting:
        """The setting for a recipe with this best learning rate."""
        lr = self.lr if math.isnan(self.times_best) else best * self.times_best
        return Setting(self.words, float(f"{lr:.6g}"))


@dataclass(frozen=True, kw_only=True)
class StressTest:
    """One test of a recipe.

    Attributes:
        name: as ``--tests`` takes it.
        title: its name for readers.
        failure: what fails at scale.
        source: where that was published.
        fails_with: overrides of the default recipe with which it fails, the control; None where none is known.
        metric: ``tolerance`` of the curve, or the column of runs that is measured, see ``measures.by_run``.
        unit: of the measure.
        passes: from this value on, on the side away from ``fails``, a recipe passes.
        fails: from this value on a recipe fails.
        stressed: the runs under stress; None where the measure reads the whole curve.
        reference: the runs that they are compared with; None without a comparison.
        seconds: core-seconds a seed that it adds to the tests before it.
        means: what its number is.
        cures: names of the changes that may cure a failure, the most promising first.
        spread: of the measure over seeds; without degrees of freedom where there are no reference records yet.
        counts_stuck: whether a stressed seed that is stuck or diverged fails the test.
        minutes: of the shortest card that has it without being asked for; infinite if none has.
        needs: the intervention without which a recipe cannot take it; empty for none.
        seeds: the fewest that it takes on cards of five minutes or more; 0 for those of the card.
        cured_as: the name of the test on whose runs its cures are tried; empty for its own.
    """

    name: str
    title: str
    failure: str
    source: str
    fails_with: tuple[str, ...] | None = None
    metric: str
    unit: str
    passes: float
    fails: float
    stressed: Place | None = None
    reference: Place | None = None
    seconds: float
    means: str
    cures: tuple[str, ...] = ()
    spread: Spread
    counts_stuck: bool = False
    minutes: float = bounded(1, infinite=True)
    needs: str = ""
    seeds: int = 0
    cured_as: str = ""

    def __post_init__(self) -> None:
        """Check what a test looks at.

        Raises:
            ValueError: it has no runs under stress, or an unknown metric.
        """
        if self.metric not in METRICS and not self.metric.startswith(LARGEST):
            raise ValueError(f"unknown metric {self.metric!r}; {nearest(self.metric, METRICS)}, or {LARGEST}PROBE")
        if self.metric != OF_CURVE and not self.stressed:
            raise ValueError(f"a test of {self.metric!r} needs 'stressed'")

    @property
    def explained(self) -> str:
        """What its number is, in a sentence."""
        return f"{capitalized(self.title)}: {self.means}."

    @property
    def gap(self) -> float:
        """Distance between the zones in which recipes pass and fail."""
        return abs(self.passes - self.fails)

    def share(self, value: float) -> float:
        """Where a value lies between the zones: 0 where passing begins, 1 where failing begins; beyond them outside."""
        return (value - self.passes) / (self.fails - self.passes)

    @property
    def places(self) -> list[Place]:
        """Where it looks besides the curve."""
        return [place for place in (self.reference, self.stressed) if place]

    @property
    def is_on_curve(self) -> bool:
        """Whether it holds the recipe's own curve at a multiple of the best learning rate against the best loss."""
        at_best, above = self.reference, self.stressed
        if self.metric != "loss" or at_best is None or above is None or at_best.words or above.words:
            return False
        return at_best.times_best == 1 and not math.isnan(above.times_best)

    @property
    def reads_curve(self) -> bool:
        """Whether its number is read off the recipe's own curve, so that it trains no runs besides."""
        return self.is_on_curve or not self.places

    @property
    def needs_best(self) -> bool:
        """Whether it can only be laid out once the best learning rate is known."""
        return any(not math.isnan(place.times_best) for place in self.places)


class Change(NamedTuple):
    """A single change of a recipe.

    Attributes:
        name: as ``--cures`` takes it; of an intervention its own.
        acts_on: the part of training that it changes.
        words: the overrides that make it; empty for an intervention.
        lr_multiplier: its learning rate relative to the recipe's.
        scales: keys whose value in the recipe it multiplies, each with the factor.
    """

    name: str
    acts_on: str
    words: tuple[str, ...] = ()
    lr_multiplier: float = 1.0
    scales: Mapping[str, float] = MappingProxyType({})

    @property
    def is_intervention(self) -> bool:
        """Whether it is the intervention of its name."""
        return not (self.words or self.scales)


class Stages(NamedTuple):
    """How changes are tried: ``screened`` seeds of the card for all, then ``fresh`` ones for the ``best`` of a test."""

    screened: int
    best: int
    fresh: int


class Battery(NamedTuple):
    """Everything that the file of the crash test says.

    Attributes:
        runs: overrides of all runs, before those of the recipe.
        curve: learning rates of the curve.
        farthest: the learning rates up to which the curve is extended.
        seeds: how many seeds a card of so many minutes has.
        sizes: overrides of further sizes at which a card of so many minutes trains the curve.
        bracket: decades to which a card finds the learning rate from which a recipe fails.
        confirm: how changes are tried.
        changes: single changes of a recipe by name.
        without_hooks: names of the changes that a model of the user's own can take, the most promising first.
        tests: the tests by name, in their order.
    """

    runs: tuple[str, ...]
    curve: tuple[float, ...]
    farthest: tuple[float, float]
    seeds: Mapping[int, int]
    sizes: Mapping[int, Sequence[str]]
    bracket: float
    confirm: Stages
    changes: Mapping[str, Change]
    without_hooks: tuple[str, ...]
    tests: Mapping[str, StressTest]

    @property
    def on_cards(self) -> list[StressTest]:
        """The tests that some card has without being asked for by name."""
        return [test for test in self.tests.values() if math.isfinite(test.minutes)]

    def chosen(self, names: Sequence[str], minutes: int) -> list[StressTest]:
        """The tests of these names, or without names all that fit into so many minutes of two cores.

        Raises:
            RequestError: a name or the number of minutes is unknown, or a named test does not fit.
        """
        if minutes not in self.seeds:
            raise RequestError(f"--minutes takes {listed(map(str, self.seeds), 'or')}, not {minutes}")
        if unknown := [name for name in names if name not in self.tests]:
            raise RequestError(f"unknown test {unknown[0]!r}; {nearest(unknown[0], self.tests)}")
        usual = [test for test in self.tests.values() if test.minutes <= minutes]
        fitting = self._fitting([self.tests[name] for name in names] or usual, minutes)
        if missing := [name for name in names if name not in {test.name for test in fitting}]:
            named = [self.tests[name] for name in names]
            enough = [more for more in self.seeds if len(self._fitting(named, more)) == len(named)]
            advice = f"--minutes {enough[0]} is enough" if enough else "take fewer tests"
            fits = f"{listed(test.name for test in fitting)} would" if fitting else "none of them would"
            raise RequestError(f"{missing[0]} does not fit into {minutes} min; {fits}; {advice}")
        return fitting

    def cured(self, test: StressTest) -> StressTest:
        """The test on whose runs the cures of a failed test are tried: itself, or one of the same failure."""
        return self.tests[test.cured_as or test.name]

    def cures_of(
        self,
        test: StressTest,
        asked: str,
        others: Mapping[str, Change] = MappingProxyType({}),
        *,
        has_hooks: bool = True,
    ) -> list[Change]:
        """The changes that are tried on a test.

        Args:
            test: the test.
            asked: ``none``, how many of its cures, ``all``, or names of changes separated by commas.
            others: changes that ``all`` tries after those of the test, and that may be named, too.
            has_hooks: whether the model has the lab's hooks; else the cures are those that need none.

        Raises:
            RequestError: it is none of these, or a name is unknown.
        """
        known = {**others, **self.changes}
        cures = list(test.cures)
        if not has_hooks:
            cures = sorted(self.without_hooks, key=lambda name: name not in test.cures)
        if asked == "none":
            names = []
        elif asked == "all":
            names = [*cures, *others]
        elif asked.isdecimal():
            names = cures[: int(asked)]
        else:
            names = asked.split(",")
        if unknown := [name for name in names if name not in known]:
            similar = similar_names(unknown[0], sorted(known))
            hint = f"nearest: {', '.join(similar)}" if similar else "lab list interventions and optimizers name them"
            raise RequestError(f"unknown cure {unknown[0]!r}; {hint}; or a number of cures, all, or none")
        return [known[name] for name in dict.fromkeys(names)]

    def _fitting(self, tests: Iterable[StressTest], minutes: int) -> list[StressTest]:
        """The tests that fit; in the shortest card, a first look, none needs seeds of its own."""
        left, fitting = 60.0 * minutes, []
        if minutes == min(self.seeds):
            tests = [replace(test, seeds=0) for test in tests]
        for test in tests:
            cost = test.seconds * max(test.seeds, self.seeds[minutes])
            if cost <= left:
                left -= cost
                fitting.append(test)
        return fitting


@cache
def read_spreads() -> dict[str, Spread]:
    """The spread of each measure over seeds, pooled over the reference records."""
    return {name: Spread(**entry) for name, entry in shipped.load(SPREADS).items()}


@cache
def read_step_times() -> dict[str, StepTime]:
    """What changes cost in time, by name."""
    table = pd.read_csv(STEP_TIMES, index_col="change")
    return {str(name): StepTime(*row) for name, row in zip(table.index, table.to_numpy(dtype=float), strict=True)}


_ADDED: dict[str, StressTest] = {}


def add_stress_tests(path: str | Path) -> None:
    """Add the tests of a YAML file to the crash test, as a package does in a module that ``lab.plugins`` names.

    The file has a mapping ``tests``, whose entries are written like those of ``lab/analysis/stress/battery.yaml``.

    Raises:
        RequestError: the file cannot be read, or a test has a taken name, an unknown key or cure, or lacks a key.
    """
    known = shipped.load(FILE)
    for name, entry in shipped.load(Path(path))["tests"].items():
        if name in known["tests"] or name in _ADDED:
            raise RequestError(f"{path}: {name}: the crash test has one of this name")
        test = _test(name, entry, f"{path}: {name}")
        if unknown := [cure for cure in test.cures if cure not in known["changes"]]:
            raise RequestError(f"{path}: {name}: unknown cure {unknown[0]!r}; {nearest(unknown[0], known['changes'])}")
        _ADDED[name] = test
    read_battery.cache_clear()


@cache
def read_battery() -> Battery:
    """The crash test that comes with the lab, with the tests that installed packages add."""
    load_plugins()
    tree = shipped.load(FILE)
    changes = {name: build(Change, {**entry, "name": name}, name) for name, entry in tree["changes"].items()}
    tests = {name: _test(name, entry, name) for name, entry in tree["tests"].items()} | _ADDED
    return build(Battery, {**tree, "changes": changes, "tests": tests}, FILE.name)


def _test(name: str, entry: Mapping[str, Any], where: str) -> StressTest:
    return build(StressTest, {**entry, "name": name, "spread": read_spreads().get(name, Spread())}, where)
