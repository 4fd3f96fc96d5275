"""Compare two baselines, or a folder and a baseline: measure what changed, and judge whether it is a regression."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import lab.analysis.guard.baseline as baselines
from lab.analysis.crossings import Crossing
from lab.analysis.guard.baseline import PROBES, Baseline, whole_seeds
from lab.analysis.guard.matching import match_curves, reasons_not_to_judge, remarks, runs_of, title, where
from lab.analysis.guard.quantities import (
    DECADES,
    HEADROOM,
    HEADROOM_MARGIN,
    LOG_HEADROOM,
    MISSING_BECAUSE,
    NATS,
    QUANTITIES,
    RECIPE_LR,
    STEP_OF_GRID,
    STEPS,
    TENFOLD,
    margins,
    measured,
)
from lab.analysis.runaway import HALF, of_curve
from lab.analysis.sensitivity import WINDOW, Window, capped, check_window
from lab.analysis.statistics import CHANGE_LEVEL, FEWEST_SEEDS, Difference, Interval, difference, holm, zones
from lab.analysis.text import format_value, listed
from lab.core.errors import RequestError

OK, DRIFT, UNCLEAR, REGRESSION, CANNOT_JUDGE = "ok", "drift", "unclear", "regression", "cannot judge"
BETTER = "better"
# A change below this share of its margin does not count, since processors and libraries differ in rounding.
NEGLIGIBLE = 0.01
FINAL_LOSS = "final loss"
LOGITS = "attention_logits"  # of ``runaway.read_runaways``
CROSSES = {HALF: "fails", LOGITS: "attention logits run away"}


class Change(NamedTuple):
    """Change of a quantity of one arm and size, with its 90 % interval.

    Attributes:
        size: parameters without embeddings.
        before: the mean of the baseline. The quantities that change in grid steps are learning rates, and their mean is
            geometric, as is the mean headroom; infinite if no learning rate of some seed was unstable.
        now: likewise of the new curves.
        margin: the largest change allowed, in ``unit``.
        effect: Cohen's d, for paired seeds d_z; NaN if seeds do not spread.
        equivalence: p of two one-sided t-tests against a change beyond the margin; NaN for an order of two arms.
        freedom: degrees of freedom of the spread over seeds, with paired seeds one less than their number.
        p: p of no change, adjusted for all changes that were compared (Holm 1979); NaN for a headroom that changes as
            the smallest unstable learning rate does, which has been compared.
        verdict: ``regression``; ``better`` (beyond the margin); ``drift`` (a significant change); ``same`` (the
            interval lies within the margin, or the order holds); or ``unclear``.
    """

    quantity: str
    unit: str
    arm: str
    size: int
    before: float
    now: float
    change: float
    low: float
    high: float
    margin: float
    effect: float
    equivalence: float
    freedom: float
    p: float
    verdict: str

    @property
    def interval(self) -> Interval:
        """The change with its interval."""
        return Interval(self.change, self.low, self.high)

    @property
    def is_certain(self) -> bool:
        """Whether the change is significant, adjusted for all changes of the comparison."""
        return self.p < CHANGE_LEVEL

    @property
    def is_undecided(self) -> bool:
        """Whether the seeds leave open that the change lies beyond its margin; so may a drift, unlike one of order."""
        is_within = math.isnan(self.equivalence) or -self.margin < self.low <= self.high < self.margin
        return self.verdict == UNCLEAR or (self.verdict == DRIFT and not is_within)


class Move(NamedTuple):
    """Change of one number at one learning rate of an arm and size, with its 90 % interval.

    Attributes:
        size: parameters without embeddings.
        p: p of no change, adjusted for the learning rates of this arm and number (Holm 1979).
    """

    arm: str
    size: int
    number: str
    unit: str
    lr: float
    change: float
    low: float
    high: float
    p: float

    @property
    def is_certain(self) -> bool:
        """Whether the move is significant, adjusted for all learning rates."""
        return self.p < CHANGE_LEVEL


class Comparison(NamedTuple):
    """A comparison of a results folder with a baseline.

    Attributes:
        baseline: the source of the old curves.
        folder: the source of the new curves.
        margin: share of the best loss by which losses may rise.
        strict: whether a drift fails, too.
        changes: one per quantity, arm and size, and per order of two arms; none if the comparison cannot be judged.
        moves: the learning rates and numbers at which changed arms have moved.
        removed: a line for each arm and size that lacks interventions; each is a regression.
        reasons: the reasons why it cannot be judged; none if it can.
        remarks: other differences, which do not affect the verdict.
        window: the learning rates over which sensitivity is a mean.
        of_cards: whether cards of the crash test were compared, instead of curves.
        fails_on_unclear: whether a change fails, too, of which the seeds cannot show that it lies within its margin.
    """

    baseline: str
    folder: str
    margin: float
    strict: bool
    changes: list[Change]
    moves: list[Move]
    removed: list[str]
    reasons: list[str]
    remarks: list[str]
    window: Window = WINDOW
    of_cards: bool = False
    fails_on_unclear: bool = False

    @property
    def verdict(self) -> str:
        """``ok``, ``drift``, ``regression`` or ``cannot judge``; ``unclear`` only where that fails."""
        if self.reasons:
            return CANNOT_JUDGE
        if self.removed or any(change.verdict == REGRESSION for change in self.changes):
            return REGRESSION
        if self.fails_on_unclear and any(change.is_undecided for change in self.changes):
            return UNCLEAR
        return DRIFT if any(change.is_certain for change in self.changes) else OK

    @property
    def exit_code(self) -> int:
        """0 if the curves are no worse, 1 if something is that fails, 2 if they cannot be compared."""
        return {OK: 0, DRIFT: int(self.strict), UNCLEAR: 1, REGRESSION: 1, CANNOT_JUDGE: 2}[self.verdict]


def compare_baselines(old: Baseline, new: Baseline, margin: float, strict: bool = False) -> Comparison:
    """Compare new curves with a baseline, each matched by intervention, size and the keys that vary in the baseline.

    A change is a regression if its whole 90 % interval lies outside the margin, on the worse side. The margins:

    - losses and sensitivities (nats per token) may rise by ``margin`` times the baseline's best loss;
    - values of probes may rise by a factor of two;
    - the best and the smallest unstable learning rate may move by one step of the grid;
    - the headroom, the smallest unstable learning rate over the recipe's own, may halve; while the recipe's own is the
      same, it moves as the smallest unstable one does;
    - if two arms differ in sensitivity by more than the margin, their order must not reverse, unless it reverses
      because the more sensitive arm improved.

    A missing intervention is a regression, whatever the curves are.

    A change is a drift if it is significant and no regression. Of comparisons in which nothing changed, at most one in
    twenty calls any change a drift (Holm 1979, https://www.jstor.org/stable/4615733).

    Raises:
        RequestError: the two have different windows of learning rates, or one has no complete seed.
    """
    if old.window != new.window:
        raise RequestError(
            f"{old.source} has sensitivity over learning rates from {old.window}, {new.source} from {new.window}"
        )
    match = match_curves(old, new)
    reasons = [*match.reasons]
    reasons += [reason for pair in match.pairs.items() for reason in reasons_not_to_judge(old, new, *pair)]
    notes = list(remarks(old, new, match.pairs))
    comparison = Comparison(old.source, new.source, margin, strict, [], [], [], reasons, notes, old.window)
    if reasons:
        return comparison
    before, measured_new = measured(old), measured(new)
    now = {number: measured_new[other] for number, other in match.pairs.items()}
    arms = {number: where(old, number) for number in match.pairs}
    changes = compare_tables(arms, before, now, margin)
    moving = {
        (change.arm, change.size)
        for change in changes
        if (change.verdict == REGRESSION or change.is_certain) and change.unit != TENFOLD  # a headroom has no runs
    } | {arms[number] for number in match.removed}
    moves: list[Move] = []
    for number, other in match.pairs.items():
        if arms[number] in moving:
            negligible = {unit: NEGLIGIBLE * limit for unit, limit in margins(before[number], margin).items()}
            moves += find_moves(arms[number], runs_of(old, number), runs_of(new, other), negligible)
    notes += [line for number in arms for line in _recipe_lrs(old, number, before[number], now[number])]
    notes += [line for number in arms for line in _missing(old, number, before[number], now[number])]
    for number, other in match.pairs.items():
        notes += _rates(title(old, number), runs_of(old, number), runs_of(new, other))
    removed = [
        f"{title(old, number)}: {listed(names)} {'is' if len(names) == 1 else 'are'} missing"
        for number, names in match.removed.items()
    ]
    return comparison._replace(changes=changes, moves=moves, removed=removed)


def compare_tables(
    arms: Mapping[int, tuple[str, int]],
    before: Mapping[int, pd.DataFrame],
    now: Mapping[int, pd.DataFrame],
    margin: float,
) -> list[Change]:
    """Changes of quantities and of the order of arms, judged together.

    Args:
        arms: arm and size by number of the curve.
        before: tables of the baseline, as ``measured`` makes them, by number of the curve.
        now: new tables, by number of the old curve.
        margin: share of the best loss by which losses may rise.
    """
    limits = {number: margins(before[number], margin) for number in arms}
    changes = [
        change
        for number, arm_and_size in arms.items()
        for change in _changes(arm_and_size, before[number], now[number], limits[number])
    ]
    changes += _orders(arms, before, now, limits)
    return judged_together(changes)


def judged_together(changes: Sequence[Change]) -> list[Change]:
    """Changes with p adjusted for all of them (Holm); significant ones that are no regression are drifts."""
    adjusted = [change._replace(p=p) for change, p in zip(changes, holm([change.p for change in changes]), strict=True)]
    return [
        change._replace(verdict=DRIFT) if change.is_certain and change.verdict in ("same", UNCLEAR) else change
        for change in adjusted
    ]


def _missing(old: Baseline, number: int, before: pd.DataFrame, now: pd.DataFrame) -> Iterator[str]:
    """Yield lines about quantities of a curve that were not compared; of probes only if one side recorded them."""
    for column, why in MISSING_BECAUSE.items():
        enough = [table[column].count() >= FEWEST_SEEDS for table in (before, now)]
        if not all(enough) and (any(enough) or column not in PROBES):
            reason = why.format(window=old.window)
            yield f"{title(old, number)}: {QUANTITIES[column].name} was not compared, {reason}"


def _recipe_lrs(old: Baseline, number: int, before: pd.DataFrame, now: pd.DataFrame) -> Iterator[str]:
    """Yield a line if the recipe's own learning rate has changed, or one if it is on record on one side only."""
    rates = [float(table[RECIPE_LR].iloc[0]) for table in (before, now)]
    if math.isnan(rates[0]) != math.isnan(rates[1]):
        why = "the recipe's own learning rate is on record on one side only; save the baseline anew"
        yield f"{title(old, number)}: {HEADROOM.name} was not compared, {why}"
    elif rates[0] < rates[1] or rates[0] > rates[1]:
        was, is_now = map(format_value, rates)
        yield f"{title(old, number)}: the recipe's own learning rate is {was} in the baseline, {is_now} now"


def _rates(name: str, before: pd.DataFrame, now: pd.DataFrame) -> Iterator[str]:
    """Yield a line for each level that every seed of both curves crosses, if it is certain that the rate has changed.

    It says by how many decades, with a 90 % interval that holds the width of the brackets.
    """
    passed: list[dict[str, dict[str, Crossing]]] = []
    for runs in (before, now):
        seeds = whole_seeds(runs[runs["lr"] > 0]).assign(capped=capped).groupby("seed")
        passed.append({str(seed): dict(of_curve(curve, [LOGITS])) for seed, curve in seeds})
    for level, does in CROSSES.items():
        found = [pd.Series({seed: of_seed.get(level, Crossing()) for seed, of_seed in side.items()}) for side in passed]
        if any(len(side) < FEWEST_SEEDS or any(each.is_censored for each in side) for side in found):
            continue
        first, second = (side.map(lambda each: each.log_at) for side in found)
        change = difference(first, second, max(each.width for side in found for each in side))
        if change.low > 0 or change.high < 0:
            decades = Interval(change.mean, change.low, change.high)
            was, is_now = (format_value(float(f"{10 ** side.mean():.2g}")) for side in (first, second))
            yield f"{name}: {does} from {is_now} instead of {was}, {decades:+.2f} decades"


def _changes(
    arm_and_size: tuple[str, int], before: pd.DataFrame, now: pd.DataFrame, limits: Mapping[str, float]
) -> Iterator[Change]:
    """Yield the change of each quantity that three seeds have on both sides.

    The recipe's own learning rate is exact. While it is the same, the headroom is known as well as the smallest
    unstable learning rate, to a step of the grid, and may move by as much; it has no test of its own then.
    """
    is_moved = before[RECIPE_LR].iloc[0] != now[RECIPE_LR].iloc[0]
    for column, quantity in {**QUANTITIES, LOG_HEADROOM: HEADROOM}.items():
        limit, resolution = limits.get(quantity.unit, math.nan), 1.0 if quantity.unit == STEPS else 0.0
        if quantity is HEADROOM:
            step = float(before[STEP_OF_GRID].iloc[0])
            limit, resolution = (HEADROOM_MARGIN, 0.0) if is_moved else (step, step)
        sides = [table[column].dropna() for table in (before, now)]
        if min(map(len, sides)) >= FEWEST_SEEDS:
            change = change_of(
                quantity.name,
                quantity.unit,
                arm_and_size,
                difference(sides[0], sides[1], resolution),
                means=[
                    quantity.mean(table.loc[side.index], column)
                    for table, side in zip((before, now), sides, strict=True)
                ],
                limit=limit,
                worse=quantity.worse,
            )
            yield change._replace(p=math.nan) if quantity is HEADROOM and not is_moved else change


def change_of(
    name: str,
    unit: str,
    arm_and_size: tuple[str, int],
    found: Difference,
    *,
    means: Sequence[float],
    limit: float,
    worse: int,
) -> Change:
    """The change of a quantity; its p is not adjusted yet, see ``judged_together``.

    Args:
        name: of the quantity.
        unit: of the change.
        arm_and_size: what changed.
        found: the change over seeds.
        means: before and now.
        limit: the largest change allowed.
        worse: the sign of a change that is worse; 0 if either is.
    """
    return Change(
        quantity=name,
        unit=unit,
        arm=arm_and_size[0],
        size=arm_and_size[1],
        before=means[0],
        now=means[1],
        change=found.mean,
        low=found.low,
        high=found.high,
        margin=limit,
        effect=found.effect,
        equivalence=found.equivalence(limit),
        freedom=found.freedom,
        p=found.p(NEGLIGIBLE * limit),
        verdict=_verdict(found, limit, worse),
    )


def _verdict(change: Difference, margin: float, worse: int) -> str:
    fall, rise = (BETTER if worse == sign else REGRESSION for sign in (1, -1))
    words = {(0, 0): fall, (1, 1): "same", (2, 2): rise}
    return words.get(zones(change, (-margin, margin)), UNCLEAR)


def _orders(
    arms: Mapping[int, tuple[str, int]],
    before: Mapping[int, pd.DataFrame],
    now: Mapping[int, pd.DataFrame],
    limits: Mapping[int, Mapping[str, float]],
) -> Iterator[Change]:
    """Changes of order, for pairs of arms of one size whose first was less sensitive by more than the margin."""
    for first, second in permutations(arms, 2):
        (arm, size), (other_arm, other_size) = arms[first], arms[second]
        old_gap, new_gap = ((table[second]["total"] - table[first]["total"]).dropna() for table in (before, now))
        limit = limits[first][NATS]
        enough_seeds = min(len(old_gap), len(new_gap)) >= FEWEST_SEEDS
        if size != other_size or not enough_seeds or _from_zero(old_gap).low <= limit:
            continue
        gap_now, verdict = _from_zero(new_gap), UNCLEAR
        if gap_now.low > 0:
            verdict = "same"
        elif gap_now.high < 0:
            first_got_worse = difference(before[first]["total"], now[first]["total"]).low > 0
            verdict = REGRESSION if first_got_worse else BETTER
        change = change_of(
            f"sensitivity of {other_arm} above it",
            NATS,
            (arm, size),
            difference(old_gap, new_gap),
            means=[float(old_gap.mean()), float(new_gap.mean())],
            limit=limit,
            worse=0,
        )
        yield change._replace(equivalence=math.nan, verdict=verdict)


def _from_zero(sample: pd.Series) -> Difference:
    """Difference of one sample from zero."""
    return difference(sample * 0.0, sample)


def find_moves(
    arm_and_size: tuple[str, int], before: pd.DataFrame, now: pd.DataFrame, negligible: Mapping[str, float]
) -> list[Move]:
    """The significant moves of single numbers; if there are none, the largest change of final loss.

    Args:
        arm_and_size: the label of the arm, and the size (parameters).
        before: the runs of the old curve.
        now: the runs of the new curve, at the same learning rates.
        negligible: the largest change that does not count, by unit.
    """
    sides = [whole_seeds(runs).assign(**{FINAL_LOSS: capped}).set_index(["lr", "seed"]) for runs in (before, now)]
    moves = []
    for column in (FINAL_LOSS, *PROBES):
        number, unit = (column, NATS) if column == FINAL_LOSS else (QUANTITIES[column].name, DECADES)
        differences = {}
        for lr in sides[0].index.unique("lr"):
            old, new = (side.loc[lr, column].dropna() for side in sides)
            if min(len(old), len(new)) >= FEWEST_SEEDS:
                differences[lr] = difference(old, new)
        ps = holm([change.p(negligible[unit]) for change in differences.values()])
        for (lr, change), p in zip(differences.items(), ps, strict=True):
            moves.append(Move(*arm_and_size, number, unit, lr, change.mean, change.low, change.high, p))
    losses = [move for move in moves if move.number == FINAL_LOSS]
    largest = sorted(losses, key=lambda move: -abs(move.change))[:1]
    return [move for move in moves if move.is_certain] or largest


MARGIN = 0.05


def margin_of(text: str) -> float:
    """Read ``5%`` or ``0.05`` as a fraction.

    Raises:
        RequestError: the text has neither form.
    """
    try:
        fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise RequestError(f"--margin must be a part of the best loss, as in 5% or 0.05, not {text!r}")
    return fraction


def check_folder(
    folder: Path, baseline: Path, margin: float = MARGIN, strict: bool = False, window: Window | None = None
) -> Comparison:
    """Compare a results folder with a baseline.

    Args:
        folder: the results folder to check, or the file of a newer baseline.
        baseline: a baseline file or another results folder.
        margin: share of the best loss by which losses may rise.
        strict: whether a drift fails, too.
        window: the learning rates over which sensitivity is a mean; by default the baseline's.

    Returns:
        The comparison (see ``compare_baselines``). A folder or file that cannot be read is not an error: the verdict
        is ``cannot judge``, and its reason says what is wrong.

    Raises:
        RequestError: the two are of different windows, or too few learning rates lie in it.
    """
    try:
        old = baselines.read(baseline, window)
        new = baselines.read(folder, window or old.window)
    except RequestError as refusal:
        return Comparison(str(baseline), str(folder), margin, strict, [], [], [], [str(refusal)], [])
    check_window(new.runs, new.window)
    return compare_baselines(old, new, margin, strict)
