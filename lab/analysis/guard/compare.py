"""Compare two baselines: match their curves, measure what changed, and judge whether it is a regression."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import pandas as pd

from lab.analysis.curves import GAINS_TOLERANCE, arm_keys
from lab.analysis.guard.baseline import Baseline, whole_seeds
from lab.analysis.sensitivity import HIGH, LOW, capped, per_seed
from lab.analysis.statistics import FEWEST_SEEDS, Difference, difference
from lab.analysis.text import count, spell
from lab.core.errors import RequestError


def where(baseline: Baseline, number: int) -> tuple[str, int]:
    """Arm and size (parameters without embeddings) of the curve with this number."""
    first = runs_of(baseline, number).iloc[0]
    return str(first["arm"]), int(first["size"])


def runs_of(baseline: Baseline, number: int) -> pd.DataFrame:
    """The runs of the curve with this number."""
    return baseline.runs[baseline.runs["curve"] == number]


def _title(baseline: Baseline, number: int) -> str:
    arm, size = where(baseline, number)
    return f"{arm} at {count(size)} parameters"


def match_curves(old: Baseline, new: Baseline) -> tuple[dict[int, int], list[str]]:
    """Match each curve of the baseline with the one new curve of its arm and size.

    Returns:
        Numbers of new curves by number of the old one; and for each unmatched curve the reason: no curve matches, or
        more than one.
    """
    curves, sizes = list(old.curves.values()), [where(old, number)[1] for number in old.curves]
    keys = {"intervention", *arm_keys(curves, sizes)}
    pairs, reasons = {}, []
    for number in old.curves:
        arm, parameters = {key: old.curves[number][key] for key in keys}, _parameters(old, number)
        matches = [
            other
            for other, curve in new.curves.items()
            if _agrees(curve, arm) and 1 / GAINS_TOLERANCE <= _parameters(new, other) / parameters <= GAINS_TOLERANCE
        ]
        if len(matches) == 1:
            pairs[number] = matches[0]
        else:
            matched = f"{len(matches)} curves are" if matches else "no curve is"
            reasons.append(f"{matched} {_title(old, number)} in {new.source}")
    return pairs, reasons


def _parameters(baseline: Baseline, number: int) -> int:
    return int(runs_of(baseline, number)["parameters"].iloc[0])


def _agrees(curve: Mapping[str, Hashable], wanted: Mapping[str, Hashable]) -> bool:
    return all(curve.get(key) == value for key, value in wanted.items())


def reasons_not_to_judge(old: Baseline, new: Baseline, number: int, other: int) -> Iterator[str]:
    """Reasons why two matched curves cannot be compared: other data, another grid, too few seeds."""
    title = _title(old, number)
    data = [str(old.curves[number]["data_fingerprint"]), str(new.curves[other]["data_fingerprint"])]
    if data[0] != data[1]:
        yield f"{title}: other data, fingerprint {data[0]} in the baseline and {data[1]} now"
    grids = [sorted(set(runs_of(old, number)["lr"])), sorted(set(runs_of(new, other)["lr"]))]
    if grids[0] != grids[1]:
        before, now = (", ".join(map(spell, grid)) for grid in grids)
        yield f"{title}: another grid of learning rates, {before} in the baseline and {now} now"
    for baseline, curve in ((old, number), (new, other)):
        runs = whole_seeds(runs_of(baseline, curve))
        seeds = runs["seed"].nunique()
        if seeds < FEWEST_SEEDS:
            yield f"{title}: too few seeds, {seeds} whole in {baseline.source}, an interval takes {FEWEST_SEEDS}"
        if runs["loss_at_init"].isna().any():
            yield f"{title}: a loss at initialization is no number in {baseline.source}"


def remarks(
    old: Baseline, new: Baseline, pairs: Mapping[int, int], sides: tuple[str, str] = ("in the baseline", "now")
) -> Iterator[str]:
    """Differences that do not count: config keys, seeds left out, and curves that only the new runs have."""
    curves_by_change: dict[str, list[str]] = {}
    for number, other in pairs.items():
        before, now = old.curves[number], new.curves[other]
        for key in sorted({*before, *now} - {"data_fingerprint"}):
            if before.get(key) != now.get(key):
                change = f"{key}: {_spelled(before.get(key))} {sides[0]}, {_spelled(now.get(key))} {sides[1]}"
                curves_by_change.setdefault(change, []).append(_title(old, number))
    for change, titles in curves_by_change.items():
        yield change if len(titles) == len(pairs) else f"{change} ({', '.join(titles)})"
    for baseline, numbers in ((old, pairs), (new, pairs.values())):
        for number in numbers:
            runs = runs_of(baseline, number)
            partial = sorted(set(runs["seed"]) - set(whole_seeds(runs)["seed"]))
            if partial:
                seeds = ", ".join(partial)
                yield f"{_title(baseline, number)}: of {baseline.source} seed {seeds} is left out, not whole"
    for number in new.curves:
        if number not in pairs.values():
            yield f"not {sides[0]}: {_title(new, number)}"


def _spelled(value: Hashable) -> str:
    return "absent" if value is None else spell(value)


GROWTH_MARGIN = math.log10(2)  # in decades: attention logits may grow twice as far
GRID_MARGIN = 1.0  # in steps of the learning-rate grid
OK, REGRESSION, CANNOT_JUDGE = "ok", "regression", "cannot judge"
NATS, STEPS, DECADES = "nats/token", "grid steps", "decades"


class GuardedQuantity(NamedTuple):
    """A quantity that is compared: its name, its unit, and the sign of a change for the worse (0: either sign)."""

    name: str
    unit: str
    worse: int


QUANTITIES = {
    "total": GuardedQuantity("LR sensitivity", NATS, +1),
    "below": GuardedQuantity("its under-training part", NATS, +1),
    "above": GuardedQuantity("its instability part", NATS, +1),
    "best": GuardedQuantity("best loss", NATS, +1),
    "best_lr_index": GuardedQuantity("best learning rate, place in the grid", STEPS, 0),
    "unstable_lr_index": GuardedQuantity("smallest unstable one, place in the grid", STEPS, -1),
    "logit_growth": GuardedQuantity("growth of the attention logits", DECADES, +1),
}

# Why a quantity may be missing from a comparison.
MISSING_BECAUSE = {
    "total": f"fewer than two learning rates lie from {LOW:g} to {HIGH:g}",
    "best_lr_index": f"fewer than {FEWEST_SEEDS} seeds have a run that did not diverge on one of the sides",
    "logit_growth": "attention_logit_max was not recorded on both sides",
}


class Change(NamedTuple):
    """Change of a quantity of one arm and size, with its 90 % interval.

    Attributes:
        size: parameters without embeddings.
        margin: the largest change allowed, in ``unit``.
        effect: Cohen's d, for paired seeds d_z; NaN where seeds do not spread.
        equivalence: p of two one-sided t-tests against a change beyond the margin; NaN for an order of two arms.
        verdict: ``regression``, ``better``, ``same`` (the interval lies within the margin, or the order holds) or
            ``unclear``.
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
    verdict: str


class Comparison(NamedTuple):
    """A comparison of a results folder with a baseline.

    Attributes:
        baseline: where the old curves come from.
        folder: where the new curves come from.
        margin: part of the best loss by which losses may rise.
        changes: one per quantity, arm and size, and one per order of two arms; none where it cannot be judged.
        reasons: why it cannot be judged; none where it can.
        remarks: what else differs, without effect on the verdict.
    """

    baseline: str
    folder: str
    margin: float
    changes: list[Change]
    reasons: list[str]
    remarks: list[str]

    @property
    def verdict(self) -> str:
        """``ok``, ``regression`` or ``cannot judge``."""
        if self.reasons:
            return CANNOT_JUDGE
        return REGRESSION if any(change.verdict == REGRESSION for change in self.changes) else OK


def compare_baselines(old: Baseline, new: Baseline, margin: float) -> Comparison:
    """Compare new curves with a baseline, each matched by intervention, size and the keys that vary in the baseline.

    A change is a regression when its whole 90 % interval lies outside the margin, on the worse side. Losses and
    sensitivities (nats per token) may rise by ``margin`` times the baseline's best loss, the growth of attention
    logits by a factor of two; the best and the smallest unstable learning rate may move by one step of the grid.
    Where two arms differ in sensitivity by more than the margin, their order must not reverse, unless it reverses
    because the more sensitive arm improved.
    """
    pairs, reasons = match_curves(old, new)
    reasons += [reason for pair in pairs.items() for reason in reasons_not_to_judge(old, new, *pair)]
    changes: list[Change] = []
    if not reasons:
        before, measured_new = measured(old), measured(new)
        now = {number: measured_new[other] for number, other in pairs.items()}
        arms = {number: where(old, number) for number in pairs}
        for number, arm_and_size in arms.items():
            changes += _changes(arm_and_size, before[number], now[number], margin)
        changes += _orders(arms, before, now, margin)
    return Comparison(old.source, new.source, margin, changes, reasons, [*remarks(old, new, pairs), *_missing(changes)])


def _missing(changes: Sequence[Change]) -> Iterator[str]:
    """Quantities that could not be compared, and why."""
    for arm, size in dict.fromkeys((change.arm, change.size) for change in changes):
        compared = {change.quantity for change in changes if (change.arm, change.size) == (arm, size)}
        for column, why in MISSING_BECAUSE.items():
            if QUANTITIES[column].name not in compared:
                yield f"{arm} at {count(size)} parameters: {QUANTITIES[column].name} was not compared, {why}"


def measured(baseline: Baseline) -> dict[int, pd.DataFrame]:
    """Tables by number of the curve, with a row per whole seed and a column per key of ``QUANTITIES``.

    Raises:
        RequestError: no seed is whole.
    """
    runs = whole_seeds(baseline.runs).assign(capped=capped)
    if runs.empty:
        raise RequestError(f"no seed of {baseline.source} ran at every learning rate")
    seeds = per_seed(runs).set_index(["curve", "seed"])
    runs_by_seed = runs.groupby(["curve", "seed"])
    seeds["best"], seeds["logit_growth"] = runs_by_seed["capped"].min(), runs_by_seed["logit_growth"].mean()
    tables = {}
    for number, table in seeds.groupby("curve"):
        grid = sorted(set(runs.loc[runs["curve"] == number, "lr"]))
        index = {lr: float(n) for n, lr in enumerate(grid, 1)}
        table["best_lr_index"] = table["best_lr"].map(index)
        table["unstable_lr_index"] = table["eta_div"].map(index).fillna(len(grid) + 1.0)
        tables[int(str(number))] = table.droplevel("curve")[list(QUANTITIES)]
    return tables


def _changes(arm_and_size: tuple[str, int], before: pd.DataFrame, now: pd.DataFrame, margin: float) -> Iterator[Change]:
    margins = {NATS: margin * float(before["best"].mean()), STEPS: GRID_MARGIN, DECADES: GROWTH_MARGIN}
    for column, quantity in QUANTITIES.items():
        old, new, limit = before[column].dropna(), now[column].dropna(), margins[quantity.unit]
        if min(len(old), len(new)) >= FEWEST_SEEDS:
            change = difference(old, new, grain=1.0 if quantity.unit == STEPS else 0.0)
            interval = (float(old.mean()), float(new.mean()), change.mean, change.low, change.high, limit)
            tests = (change.effect, change.equivalence(limit))
            verdict = _verdict(change, limit, quantity.worse)
            yield Change(quantity.name, quantity.unit, *arm_and_size, *interval, *tests, verdict)


def _verdict(change: Difference, margin: float, worse: int) -> str:
    if change.low > margin:
        return REGRESSION if worse >= 0 else "better"
    if change.high < -margin:
        return REGRESSION if worse <= 0 else "better"
    return "same" if -margin < change.low and change.high < margin else "unclear"


def _orders(
    arms: dict[int, tuple[str, int]], before: dict[int, pd.DataFrame], now: dict[int, pd.DataFrame], margin: float
) -> Iterator[Change]:
    """Changes of order: for pairs of arms of one size, the first less sensitive in the baseline by over the margin."""
    for first, second in permutations(arms, 2):
        (arm, size), (other_arm, other_size) = arms[first], arms[second]
        old_gap, new_gap = ((table[second]["total"] - table[first]["total"]).dropna() for table in (before, now))
        limit = margin * float(before[first]["best"].mean())
        enough_seeds = min(len(old_gap), len(new_gap)) >= FEWEST_SEEDS
        if size != other_size or not enough_seeds or _from_zero(old_gap).low <= limit:
            continue
        change, gap_now = difference(old_gap, new_gap), _from_zero(new_gap)
        verdict = "same" if gap_now.low > 0 else "unclear"
        if gap_now.high < 0 and change.high < -limit:
            first_got_worse = difference(before[first]["total"], now[first]["total"]).low > 0
            verdict = REGRESSION if first_got_worse else "better"
        numbers = (float(old_gap.mean()), float(new_gap.mean()), change.mean, change.low, change.high, limit)
        name = f"sensitivity of {other_arm} above it"
        yield Change(name, NATS, arm, size, *numbers, change.effect, math.nan, verdict)


def _from_zero(sample: pd.Series) -> Difference:
    """Difference of one sample from zero."""
    return difference(sample * 0.0, sample)
