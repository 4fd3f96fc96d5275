"""Comparing: which curves are matched, what moved how far, and whether that is a regression."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import pandas as pd

from lab.analysis.curves import SAME_SIZE, telling
from lab.analysis.guard.baseline import Baseline, whole
from lab.analysis.sensitivity import HIGH, LOW, capped, per_seed
from lab.analysis.statistics import FEWEST_SEEDS, Difference, difference
from lab.analysis.text import count, spell
from lab.core.errors import RequestError


def where(baseline: Baseline, number: int) -> tuple[str, int]:
    """Arm and size (parameters without embeddings) of a curve."""
    first = runs_of(baseline, number).iloc[0]
    return str(first["arm"]), int(first["size"])


def runs_of(baseline: Baseline, number: int) -> pd.DataFrame:
    """The runs of a curve."""
    return baseline.runs[baseline.runs["curve"] == number]


def _place(baseline: Baseline, number: int) -> str:
    arm, size = where(baseline, number)
    return f"{arm} at {count(size)} parameters"


def match_curves(old: Baseline, new: Baseline) -> tuple[dict[int, int], list[str]]:
    """To each curve of the baseline its like; for the others a reason why there is none, or more than one."""
    curves, sizes = list(old.curves.values()), [where(old, number)[1] for number in old.curves]
    keys = {"intervention", *telling(curves, sizes)}
    pairs, reasons = {}, []
    for number in old.curves:
        wanted, count = {key: old.curves[number][key] for key in keys}, _parameters(old, number)
        like = [other for other, curve in new.curves.items() if _agrees(curve, wanted)]
        like = [other for other in like if 1 / SAME_SIZE <= _parameters(new, other) / count <= SAME_SIZE]
        if len(like) == 1:
            pairs[number] = like[0]
        else:
            found = f"{len(like)} curves are" if like else "no curve is"
            reasons.append(f"{found} {_place(old, number)} in {new.source}")
    return pairs, reasons


def _parameters(baseline: Baseline, number: int) -> int:
    return int(runs_of(baseline, number)["parameters"].iloc[0])


def _agrees(curve: Mapping[str, Hashable], wanted: Mapping[str, Hashable]) -> bool:
    return all(curve.get(key) == value for key, value in wanted.items())


def reasons_not_to_judge(old: Baseline, new: Baseline, number: int, other: int) -> Iterator[str]:
    """Why two curves cannot be held against each other: other data, another grid, too few seeds."""
    place = _place(old, number)
    data = [str(old.curves[number]["data_fingerprint"]), str(new.curves[other]["data_fingerprint"])]
    if data[0] != data[1]:
        yield f"{place}: other data, fingerprint {data[0]} in the baseline and {data[1]} now"
    grids = [sorted(set(runs_of(old, number)["lr"])), sorted(set(runs_of(new, other)["lr"]))]
    if grids[0] != grids[1]:
        said = [", ".join(map(spell, grid)) for grid in grids]
        yield f"{place}: another grid of learning rates, {said[0]} in the baseline and {said[1]} now"
    for baseline, curve in ((old, number), (new, other)):
        counted = whole(runs_of(baseline, curve))
        seeds = counted["seed"].nunique()
        if seeds < FEWEST_SEEDS:
            yield f"{place}: too few seeds, {seeds} whole in {baseline.source}, an interval takes {FEWEST_SEEDS}"
        if counted["loss_at_init"].isna().any():
            yield f"{place}: a loss at initialization is no number in {baseline.source}"


def remarks(old: Baseline, new: Baseline, pairs: Mapping[int, int]) -> Iterator[str]:
    """What else differs: keys of the config, seeds that do not count, and arms that only the folder has."""
    told: dict[str, list[str]] = {}
    for number, other in pairs.items():
        before, now = old.curves[number], new.curves[other]
        for key in sorted({*before, *now} - {"data_fingerprint"}):
            if before.get(key) != now.get(key):
                said = f"{key}: {_spelled(before.get(key))} in the baseline, {_spelled(now.get(key))} now"
                told.setdefault(said, []).append(_place(old, number))
    for said, places in told.items():
        yield said if len(places) == len(pairs) else f"{said} ({', '.join(places)})"
    for baseline, numbers in ((old, pairs), (new, pairs.values())):
        for number in numbers:
            runs = runs_of(baseline, number)
            lame = sorted(set(runs["seed"]) - set(whole(runs)["seed"]))
            if lame:
                yield f"{_place(baseline, number)}: of {baseline.source} seed {', '.join(lame)} is left out, not whole"
    for number in new.curves:
        if number not in pairs.values():
            yield f"not in the baseline: {_place(new, number)}"


def _spelled(value: Hashable) -> str:
    return "absent" if value is None else spell(value)


GROWTH_MARGIN = math.log10(2)  # decades: logits may grow twice as far
GRID_MARGIN = 1.0  # steps of the grid of learning rates
OK, REGRESSION, CANNOT_JUDGE = "ok", "regression", "cannot judge"
NATS, STEPS, DECADES = "nats/token", "grid steps", "decades"


class GuardedQuantity(NamedTuple):
    """What is held against its margin: its name and unit, and which way it gets worse (+1, -1; 0 is either)."""

    name: str
    unit: str
    worse: int


QUANTITIES = {
    "total": GuardedQuantity("LR sensitivity", NATS, +1),
    "below": GuardedQuantity("its under-training part", NATS, +1),
    "above": GuardedQuantity("its instability part", NATS, +1),
    "best": GuardedQuantity("best loss", NATS, +1),
    "best_place": GuardedQuantity("best learning rate, place in the grid", STEPS, 0),
    "lost_place": GuardedQuantity("smallest unstable one, place in the grid", STEPS, -1),
    "logit_growth": GuardedQuantity("growth of the attention logits", DECADES, +1),
}


UNHEARD = {
    "total": f"fewer than two learning rates lie from {LOW:g} to {HIGH:g}",
    "logit_growth": "attention_logit_max was not recorded on both sides",
}


class Change(NamedTuple):
    """How far a quantity of one arm and size has moved, with its 90 % interval.

    Attributes:
        size: parameters without embeddings.
        margin: what it may move by, in ``unit``.
        effect: Cohen's d, of paired seeds d_z; NaN where seeds do not spread.
        equivalence: p of two one-sided t-tests against a move beyond the margin; NaN of an order of arms.
        verdict: ``regression``, ``better``, ``same`` (the interval lies within the margin; an order stands) or
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
    """A baseline held against a results folder.

    ``reasons`` say why it cannot be judged; ``remarks`` what else differs, which is nothing against it.
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
    """Hold curves against a baseline: each of its arms and sizes, matched by intervention, size and what varies in it.

    It is a regression when the 90 % interval of a change lies wholly outside its margin, on the worse side.  Losses
    and sensitivities, all in nats per token, may rise by ``margin`` times the baseline's best loss; the growth of
    attention logits by a factor of two; the best and the smallest unstable learning rate may move by a step of the
    grid.  Two arms that are further apart in the baseline than the margin must not certainly turn about, unless it is
    the more sensitive one that got better.
    """
    pairs, reasons = match_curves(old, new)
    reasons += [reason for pair in pairs.items() for reason in reasons_not_to_judge(old, new, *pair)]
    changes: list[Change] = []
    if not reasons:
        before, others = measured(old), measured(new)
        now = {number: others[other] for number, other in pairs.items()}
        places = {number: where(old, number) for number in pairs}
        for number, place in places.items():
            changes += _changes(place, before[number], now[number], margin)
        changes += _orders(places, before, now, margin)
    return Comparison(old.source, new.source, margin, changes, reasons, [*remarks(old, new, pairs), *_unheard(changes)])


def _unheard(changes: Sequence[Change]) -> Iterator[str]:
    """Quantities that could not be compared, and why."""
    for arm, size in dict.fromkeys((change.arm, change.size) for change in changes):
        there = {change.quantity for change in changes if (change.arm, change.size) == (arm, size)}
        for column, why in UNHEARD.items():
            if QUANTITIES[column].name not in there:
                yield f"{arm} at {count(size)} parameters: {QUANTITIES[column].name} was not compared, {why}"


def measured(baseline: Baseline) -> dict[int, pd.DataFrame]:
    """Of each curve a row per whole seed and a column per quantity.

    Raises:
        RequestError: no seed is whole.
    """
    runs = whole(baseline.runs).assign(capped=capped)
    if runs.empty:
        raise RequestError(f"no seed of {baseline.source} ran at every learning rate")
    found = per_seed(runs).set_index(["curve", "seed"])
    seeds = runs.groupby(["curve", "seed"])
    found["best"], found["logit_growth"] = seeds["capped"].min(), seeds["logit_growth"].mean()
    tables = {}
    for number, table in found.groupby("curve"):
        grid = sorted(set(runs.loc[runs["curve"] == number, "lr"]))
        places = {lr: float(place) for place, lr in enumerate(grid, 1)}
        table["best_place"] = table["best_lr"].map(places)
        table["lost_place"] = table["eta_div"].map(places).fillna(len(grid) + 1.0)
        tables[int(str(number))] = table.droplevel("curve")[list(QUANTITIES)]
    return tables


def _changes(place: tuple[str, int], before: pd.DataFrame, now: pd.DataFrame, margin: float) -> Iterator[Change]:
    margins = {NATS: margin * float(before["best"].mean()), STEPS: GRID_MARGIN, DECADES: GROWTH_MARGIN}
    for column, quantity in QUANTITIES.items():
        old, new, limit = before[column].dropna(), now[column].dropna(), margins[quantity.unit]
        if min(len(old), len(new)) >= FEWEST_SEEDS:
            moved = difference(old, new, grain=GRID_MARGIN if quantity.unit == STEPS else 0.0)
            interval = (float(old.mean()), float(new.mean()), moved.mean, moved.low, moved.high, limit)
            tests = (moved.effect, moved.equivalence(limit))
            verdict = _verdict(moved, limit, quantity.worse)
            yield Change(quantity.name, quantity.unit, *place, *interval, *tests, verdict)


def _verdict(moved: Difference, margin: float, worse: int) -> str:
    if moved.low > margin:
        return REGRESSION if worse >= 0 else "better"
    if moved.high < -margin:
        return REGRESSION if worse <= 0 else "better"
    return "same" if -margin < moved.low and moved.high < margin else "unclear"


def _orders(
    places: dict[int, tuple[str, int]], before: dict[int, pd.DataFrame], now: dict[int, pd.DataFrame], margin: float
) -> Iterator[Change]:
    """Pairs of arms of one size of which the first was the less sensitive, by more than the margin."""
    for first, second in permutations(places, 2):
        (arm, size), (other, other_size) = places[first], places[second]
        gaps = [(table[second]["total"] - table[first]["total"]).dropna() for table in (before, now)]
        limit = margin * float(before[first]["best"].mean())
        if size != other_size or min(map(len, gaps)) < FEWEST_SEEDS or _apart(gaps[0]).low <= limit:
            continue
        moved, still = difference(gaps[0], gaps[1]), _apart(gaps[1])
        verdict = "same" if still.low > 0 else "unclear"
        if still.high < 0 and moved.high < -limit:
            worse = difference(before[first]["total"], now[first]["total"]).low > 0  # not the other one better
            verdict = REGRESSION if worse else "better"
        numbers = (float(gaps[0].mean()), float(gaps[1].mean()), moved.mean, moved.low, moved.high, limit)
        yield Change(f"sensitivity of {other} above it", NATS, arm, size, *numbers, moved.effect, math.nan, verdict)


def _apart(gap: pd.Series) -> Difference:
    """Of one sample, from nothing."""
    return difference(gap * 0.0, gap)
