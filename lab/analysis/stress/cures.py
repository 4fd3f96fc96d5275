"""Which single changes take away the damage that a test does to a recipe, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.statistics import CHANGE_LEVEL, UNKNOWN, Interval, Spread, holm, spread_prior, spread_within, zones
from lab.analysis.stress.battery import Change, Place, StepTime, StressTest, read_step_times
from lab.analysis.stress.measures import Outcomes, is_capped, is_stuck, pooled_interval
from lab.records.plans import Setting

CURES, IN_PART, NO, OPEN, HARMS = "cures", "in part", "no", "open", "harms"
NOT_TRIED = "not tried"
LOSES = 0.05  # nats at the best learning rate, above which a change is not advised
MARGIN, LEAVES = 0.2, 1 / 3  # of the damage: what counts as no effect, and what a cure may leave; as on the board
SCREENED = "screened"  # what may cure by the seeds of the card, and was not among the best that were confirmed


class Trial(NamedTuple):
    """A change that is tried on a test.

    Attributes:
        change: its name.
        stressed: its runs under stress, beside those of the recipe itself.
        at_ease: its runs where the test looks without stress; None where it does not look there.
        best: its runs at the recipe's own best learning rate; None where that was not looked for.
    """

    change: str
    stressed: Setting
    at_ease: Setting | None
    best: Setting | None


class Cure(NamedTuple):
    """What a change does about a failure.

    Attributes:
        test: the test that the recipe fails.
        change: the name of the change.
        verdict: ``cures``, ``in part``, ``no``, ``harms``, ``open``, ``screened`` or ``not tried``.
        improvement: by how much it lowers the damage, paired by seed, with its 95 % interval, whose spread is moderated
            by that of all changes that were tried on the test.
        p: of no effect, adjusted for these changes.
        damage: of the recipe itself, in the mean over seeds: what the test measures under stress minus what it measures
            at ease, or minus the value up to which a recipe passes where the test does not look at ease.
        left: of the damage with the change, in the mean over seeds.
        stuck: of how many seeds training is still stuck.
        cost: by how much it raises the loss at the recipe's best learning rate, nats, with its 95 % interval.
        parameters: that it adds.
        reason: why it was not tried.
        is_confirmed: whether its numbers are of fresh seeds, by which it was not chosen.
        capped: of how many seeds the stressed run counts with its loss at initialization.
        is_advised: whether the recipe loses no more than ``LOSES`` by it at its best learning rate, and still ends
            better than a bigram model there, if it did.
    """

    test: StressTest
    change: str
    verdict: str
    improvement: Interval
    p: float
    damage: float
    left: float
    stuck: int
    cost: Interval
    parameters: int
    reason: str = ""
    is_confirmed: bool = False
    capped: int = 0
    is_advised: bool = True

    @property
    def effect(self) -> str:
        """What it removes, with interval and unit: ``0.44 ± 0.16 nats``."""
        return f"{self.improvement:±.2f} {self.test.unit}"

    @property
    def share(self) -> str:
        """What it removes as a share of the damage: ``73 %``; empty where there is no damage."""
        return f"{100 * self.improvement.mean / self.damage:.0f} %" if self.damage > 0 else ""

    @property
    def what_is_left(self) -> str:
        """What is left of the damage, and how many seeds are stuck or capped: ``0.31, 1 seed stuck``."""
        counts = {"stuck": self.stuck, "capped": self.capped}
        seeds = [f"{number} seed{'s' * (number > 1)} {word}" for word, number in counts.items() if number]
        return ", ".join([f"{round(self.left, 2) + 0.0:.2f}", *seeds])

    @property
    def step_time(self) -> StepTime | None:
        """What it costs in time; None for a change that was not timed, such as a pair."""
        return read_step_times().get(self.change)

    @property
    def cost_at_best(self) -> str:
        """What it costs at the best learning rate: ``+0.012 ± 0.020 nats``; empty where that is not known."""
        return "" if math.isnan(self.cost.mean) else f"{self.cost:±+.3f} nats"

    @property
    def costs(self) -> str:
        """All that it costs: ``+0.012 ± 0.020 nats at the best LR, 1.34 times the time of a step, +12 parameters``."""
        at_best = f"{self.cost_at_best} at the best LR" if self.cost_at_best else ""
        slower = f"{self.step_time.ratio:.2f} times the time of a step" if self.step_time else ""
        return ", ".join(filter(None, [at_best, slower, f"{self.parameters:+,} parameters"]))


def not_tried(test: StressTest, change: str, reason: str) -> Cure:
    """A change that cannot act on a recipe, or not beside what it has."""
    return Cure(test, change, NOT_TRIED, UNKNOWN, math.nan, math.nan, math.nan, 0, UNKNOWN, 0, reason)


def judge_cures(
    test: StressTest, trials: Sequence[Trial], done: Outcomes, best: float, fresh: tuple[str, ...] = ()
) -> list[Cure]:
    """Judge the changes that were tried on a test which a recipe fails; the strongest comes first.

    The rules are ``verdict_of`` and ``against_control``, and the control is the recipe itself. A change
    with a stuck seed cures in part at most. Each is open where the damage of the recipe itself is not certain.

    Args:
        test: the test.
        trials: the changes, all of whose runs are among ``done``.
        done: the runs of the recipe itself and of the changes.
        best: the recipe's best learning rate; NaN if it was not looked for.
        fresh: the words of the fresh seeds, if these confirm the changes.
    """
    assert test.stressed
    at_ease = test.reference.setting(best).beside(fresh) if test.reference else None
    own, at_best = test.stressed.setting(best).beside(fresh), Setting((), best).beside(fresh)
    of_recipe = _damage(test, done, own, at_ease)
    damage, is_damaged = float(of_recipe.mean()), pooled_interval(list(of_recipe.dropna()), test.spread).low > 0
    damages = [_damage(test, done, trial.stressed, trial.at_ease) for trial in trials]
    effects = _compared([of_recipe - values for values in damages])
    nothing: pd.Series[float] = pd.Series(dtype=float)
    costs = _compared([done[trial.best]["loss"] - done[at_best]["loss"] if trial.best else nothing for trial in trials])
    ps = holm([effect.p for effect in effects])
    cures = []
    for trial, left, effect, p, cost in zip(trials, damages, effects, ps, costs, strict=True):
        table, verdict = done[trial.stressed], OPEN
        stuck = int(is_stuck(table).sum()) if test.counts_stuck else 0
        if is_damaged:
            verdict = verdict_of(effect.interval, p, damage, margin=MARGIN, leaves=LEAVES, alpha=CHANGE_LEVEL)
            verdict = IN_PART if verdict == CURES and stuck else verdict
            above = float((table["loss"] - done[own]["loss"]).mean())
            trains = not (trial.at_ease and test.metric == "loss" and is_capped(done[trial.at_ease]).any())
            at_most = 0.0 if test.metric == "loss" else LOSES
            verdict = against_control(verdict, above=above, at_most=at_most, trains=trains)
        is_lost = bool(trial.best and _trains(done[at_best]) and not _trains(done[trial.best]))
        cures.append(
            Cure(
                test=test,
                change=trial.change,
                verdict=verdict,
                improvement=effect.interval,
                p=p,
                damage=damage,
                left=float(left.mean()),
                stuck=stuck,
                cost=cost.interval,
                parameters=int(table["parameters"].iloc[0] - done[own]["parameters"].iloc[0]),
                is_confirmed=bool(fresh),
                capped=int(is_capped(table).sum()) if test.metric == "loss" else 0,
                is_advised=not is_lost and not cost.interval.mean > LOSES,
            )
        )
    return sorted(cures, key=lambda cure: -cure.improvement.mean)


def _damage(test: StressTest, done: Outcomes, stressed: Setting, at_ease: Setting | None) -> pd.Series[float]:
    """By seed what a test measures under stress beyond what it measures at ease, or beyond where recipes pass."""
    return done[stressed][test.metric] - (done[at_ease][test.metric] if at_ease else test.passes)


def _trains(table: pd.DataFrame) -> bool:
    """Whether runs end better than a bigram model, in the mean over seeds."""
    return bool(table["loss"].mean() < table["loss_bigram"].mean())


def finalists(screened: Sequence[Cure], most: int) -> list[str]:
    """The changes that are confirmed: those of a test that remove most, as many as are allowed."""
    return [cure.change for cure in screened if cure.improvement.mean > 0 and cure.is_advised][:most]


def pair_to_try(screened: Sequence[Cure], changes: Mapping[str, Change]) -> tuple[Change, Change] | None:
    """The best change, and the best one that acts on another part of training; None where there are no two."""
    helpful = [changes[name] for name in finalists(screened, len(screened))]
    others = [change for change in helpful if change.acts_on != helpful[0].acts_on]
    return (helpful[0], others[0]) if others else None


def as_screened(cure: Cure) -> Cure:
    """A change that was not among those confirmed: it may cure, or does not."""
    return cure._replace(verdict=SCREENED) if cure.verdict in (CURES, IN_PART) else cure


def _compared(differences: Sequence[pd.Series[float]]) -> list[Compared]:
    """The mean of paired differences of each change, whose spread is moderated by that of all."""
    values = [of_change.dropna().to_numpy(dtype=float) for of_change in differences]
    prior = spread_prior(values)
    return [compared(of_change, prior) for of_change in values]


def trial_of(
    test: StressTest,
    change: str,
    words: Sequence[str],
    best: float,
    seeds: tuple[str, ...] = (),
    lr_multiplier: float = 1.0,
) -> Trial:
    """The runs of a change, made by these words, that are compared with those of the recipe itself.

    ``seeds`` are the words of the seeds, where these are not those of the card, and ``lr_multiplier`` is the learning
    rate of the change relative to the recipe's.
    """
    assert test.stressed

    def setting(place: Place) -> Setting:
        at = place.setting(best)
        return at._replace(lr=float(f"{at.lr * lr_multiplier:.6g}")).beside((*words, *seeds))

    at_ease = setting(test.reference) if test.reference else None
    at_best = None if math.isnan(best) else setting(Place(times_best=1))
    return Trial(change, setting(test.stressed), at_ease, at_best)


def verdict_of(improvement: Interval, p: float, damage: float, *, margin: float, leaves: float, alpha: float) -> str:
    """Judge a change by the share of the damage that it takes away.

    Damage is what is measured under stress minus what is measured at ease, within a recipe and a seed. So a change that
    lowers the loss in both alike takes no damage away.

    Args:
        improvement: the damage without the change minus that with it, paired by seed, with its 95 % interval.
        p: of no improvement, adjusted for all changes that were tried.
        damage: without the change, in the mean over seeds; positive.
        margin: the share of the damage that counts as no effect.
        leaves: the share that a cure may leave.
        alpha: the level of p.

    Returns:
        ``no`` if the whole interval lies within the margin. With p below alpha, ``cures`` if the whole interval leaves
        at most ``leaves``, ``in part`` if it removes the margin or more, and ``harms`` if it adds as much. Else
        ``open``.
    """
    zone = zones(improvement, [damage * share for share in (-margin, margin, 1 - leaves)])
    word = {(0, 0): HARMS, (1, 1): NO, (2, 2): IN_PART, (2, 3): IN_PART, (3, 3): CURES}.get(zone, OPEN)
    return word if word == NO or p < alpha else OPEN


def against_control(verdict: str, *, above: float, at_most: float, trains: bool) -> str:
    """A verdict, which is open where a change would help and is no better a run than the control.

    Args:
        verdict: of ``verdict_of``.
        above: the loss under stress minus that of the control there, in the mean over seeds, nats.
        at_most: how far above the control's it may lie.
        trains: whether the change trains at ease; else it has nothing to lose under stress.
    """
    return OPEN if verdict in (CURES, IN_PART) and (above > at_most or not trains) else verdict


class Compared(NamedTuple):
    """The mean of paired differences, with its 95 % interval, and p of no difference."""

    interval: Interval
    p: float


def compared(values: np.ndarray, prior: Spread) -> Compared:
    """The mean of paired differences, with a spread that is moderated by the prior if there is one.

    ``spread_prior`` makes the prior of all changes that were tried beside one another.
    """
    spread = prior.combine(spread_within([values]))
    interval = spread.interval(values)
    return Compared(interval, spread.p(interval))
