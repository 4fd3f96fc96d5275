"""Which single changes cure a test that a recipe fails: their effects on its stressed runs, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.statistics import CHANGE_LEVEL, Interval, holm
from lab.studies.stress.battery import Setting, Spread, StressTest
from lab.studies.stress.measures import Outcomes, is_stuck, pooled_interval

FULL, PART, NO_EFFECT, HARMS, NOT_TRIED = "full cure", "part", "none", "harms", "not tried"


class Trial(NamedTuple):
    """A change that is tried on a test.

    Attributes:
        change: its name.
        stressed: its runs under stress, beside those of the recipe itself.
        best: its runs at the recipe's own best learning rate; None where that was not looked for.
    """

    change: str
    stressed: Setting
    best: Setting | None


class Cure(NamedTuple):
    """What a change does about a failure.

    Attributes:
        test: the test that the recipe fails.
        change: the name of the change.
        verdict: ``full cure``, ``part``, ``none``, ``harms`` or ``not tried``.
        takes_off: by how much it lowers what the test measures of stressed runs, paired by seed, with its 95 %
            interval, whose spread is pooled over the changes that were tried on the test.
        p: of no effect, adjusted for these changes.
        left: the measure of the test that is left, in the mean over seeds.
        stuck: of how many seeds training is still stuck.
        cost: by how much it raises the loss at the recipe's best learning rate, nats.
        parameters: that it adds.
        reason: why it was not tried.
    """

    test: StressTest
    change: str
    verdict: str
    takes_off: Interval
    p: float
    left: float
    stuck: int
    cost: float
    parameters: int
    reason: str = ""

    @property
    def effect(self) -> str:
        """Its effect with interval and unit: ``0.44 ± 0.16 nats``."""
        half = self.takes_off.high - self.takes_off.mean
        around = f" ± {half:.2f}" if math.isfinite(half) else ""
        return f"{self.takes_off.mean + 0.0:.2f}{around} {self.test.unit}"


def not_tried(test: StressTest, change: str, reason: str) -> Cure:
    """A change that cannot act on a recipe, or not beside what it has."""
    nothing = Interval(math.nan, math.nan, math.nan, 0)
    return Cure(test, change, NOT_TRIED, nothing, math.nan, math.nan, 0, math.nan, 0, reason)


def judge(test: StressTest, trials: Sequence[Trial], done: Outcomes, best: float) -> list[Cure]:
    """Judge the changes that were tried on a test which a recipe fails; the strongest comes first.

    A change is a full cure if its effect is significant and what is left passes the test, with no seed stuck.

    Args:
        test: the test.
        trials: the changes, all of whose runs are among ``done``.
        done: the runs of the recipe itself and of the changes.
        best: the recipe's best learning rate; NaN if it was not looked for.
    """
    assert test.stressed
    own, reference = done[test.stressed.setting(best)], done[test.reference.setting(best)] if test.reference else None
    measured = {trial.change: done[trial.stressed][test.metric] for trial in trials}
    effects = {change: (own[test.metric] - values).dropna() for change, values in measured.items()}
    spread = _pooled(effects)
    intervals = {change: pooled_interval(list(values), _others(spread, values)) for change, values in effects.items()}
    ps = holm([_p(intervals[trial.change], spread.freedom) for trial in trials])
    cures = []
    for trial, p in zip(trials, ps, strict=True):
        table, interval = done[trial.stressed], intervals[trial.change]
        left = measured[trial.change] - (reference[test.metric] if reference is not None else 0.0)
        stuck = int(is_stuck(table).sum()) if test.counts_stuck else 0
        cost = float((done[trial.best]["loss"] - done[Setting((), best)]["loss"]).mean()) if trial.best else math.nan
        verdict = NO_EFFECT
        if p < CHANGE_LEVEL:
            passes = test.share(float(left.mean())) <= 0 and not stuck
            verdict = HARMS if interval.mean < 0 else FULL if passes else PART
        added = int(table["parameters"].iloc[0] - own["parameters"].iloc[0])
        cures.append(Cure(test, trial.change, verdict, interval, p, float(left.mean()), stuck, cost, added))
    return sorted(cures, key=lambda cure: -cure.takes_off.mean)


def _pooled(effects: Mapping[str, pd.Series[float]]) -> Spread:
    """The standard deviation over seeds of paired differences, pooled over changes."""
    groups = [values.to_numpy(dtype=float) for values in effects.values() if len(values)]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread()


def _others(spread: Spread, values: pd.Series[float]) -> Spread:
    """The pooled spread without the group of these values, to which their interval adds them again."""
    freedom = spread.freedom - (len(values) - 1)
    if freedom <= 0:
        return Spread()
    squares = spread.freedom * spread.sd**2 - float(((values - values.mean()) ** 2).sum())
    return Spread(math.sqrt(max(squares, 0.0) / freedom), freedom)


def _p(interval: Interval, freedom: int) -> float:
    if not interval.error or math.isnan(interval.error):
        return math.nan
    return float(2 * scipy.special.stdtr(freedom, -abs(interval.mean) / interval.error))


def trial_of(test: StressTest, change: str, words: Sequence[str], best: float) -> Trial:
    """The runs of a change, made by these words, that are compared with those of the recipe itself."""
    assert test.stressed
    stressed = test.stressed.setting(best)
    at_best = None if math.isnan(best) else Setting(tuple(words), best)
    return Trial(change, Setting((*stressed.words, *words), stressed.lr), at_best)
