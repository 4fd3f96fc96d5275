"""Compare two results folders arm by arm, without a verdict: best loss, LR sensitivity, eta_div, and differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lab.analysis.guard.baseline import Baseline, from_folder, whole_seeds
from lab.analysis.guard.matching import grid_of, match_curves, named_alike, remarks, title, where
from lab.analysis.guard.quantities import NATS, STEPS, measured
from lab.analysis.sensitivity import WINDOW, Window, check_window
from lab.analysis.statistics import FEWEST_SEEDS, Interval, difference
from lab.analysis.text import count, format_value, listed, span
from lab.core.errors import RequestError
from lab.report.answer import Answer

# Name and unit of what is compared, by column of ``measured``.
COMPARED = {"best": ("best loss", NATS), "total": ("LR sensitivity", NATS), "unstable_lr_index": ("eta_div", STEPS)}
RULE = "Differences are B minus A with their 90 % interval; for eta_div they are in steps of the learning-rate grid."


class ComparedQuantity(NamedTuple):
    """One quantity of one arm and size in both folders; means are over the same seeds as the difference.

    Attributes:
        size: parameters without embeddings.
        a: its mean in the first folder; for eta_div the learning rates of the seeds, as text.
        b: likewise in the second.
        difference: second minus first, in ``unit``.
        low: lower end of its 90 % interval; NaN with fewer than three seeds.
        high: upper end.
        seeds: ``3, paired``, or the numbers of both sides.
    """

    arm: str
    size: int
    quantity: str
    unit: str
    a: float | str
    b: float | str
    difference: float
    low: float
    high: float
    seeds: str


class SideBySide(NamedTuple):
    """Two results folders, the quantities that were compared, and notes on other differences."""

    a: str
    b: str
    quantities: list[ComparedQuantity]
    notes: list[str]
    window: Window = WINDOW


def answer_of(compared: SideBySide) -> Answer:
    """The comparison, with a row for each quantity."""
    data = compared._asdict() | {"window": [*compared.window]}
    rule = f"{RULE} Sensitivity is over the learning rates from {compared.window}."
    if compared.window == WINDOW:
        rule = RULE
        del data["window"]
    table = pd.DataFrame(map(_cells, compared.quantities))
    return Answer(f"A: {compared.a}", [f"B: {compared.b}", table, rule, compared.notes], data=data)


def _cells(row: ComparedQuantity) -> dict[str, str]:
    a, b = (_shown(value) for value in (row.a, row.b))
    change = "" if math.isnan(row.difference) else f"{Interval(row.difference, row.low, row.high):+.3f}"
    cells = {"arm": row.arm, "parameters": count(row.size), "quantity": row.quantity, "A": a, "B": b}
    return {**cells, "B - A [90 % interval]": change, "unit": row.unit, "seeds": row.seeds}


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "undefined" if math.isnan(value) else f"{value:.3f}"


def compare_folders(first: Path, second: Path, window: Window = WINDOW) -> SideBySide:
    """Compare two results folders over the learning rates that both ran; sensitivity over those inside ``window``.

    Seeds are paired if at least three are in both folders.

    Raises:
        RequestError: a folder cannot be read, no arm of one is in the other, or too few learning rates are in both.
    """
    both = named_alike(from_folder(first, window), from_folder(second, window))
    match = match_curves(*both)
    pairs = {number: other for number, other in match.pairs.items() if number not in match.removed}
    reasons = [*match.reasons, *(f"no curve is {title(both[0], number)} in {second}" for number in match.removed)]
    if not pairs:
        raise RequestError(f"nothing to compare: {'; '.join(reasons)}")
    grids = {number: (grid_of(both[0], number), grid_of(both[1], other)) for number, other in pairs.items()}
    shared = {number: sorted(set(a) & set(b)) for number, (a, b) in grids.items()}
    a = _restricted(both[0], shared)
    b = _restricted(both[1], {other: shared[number] for number, other in pairs.items()})
    check_window(a.runs, window)
    tables = [measured(side) if len(whole_seeds(side.runs)) else {} for side in (a, b)]
    quantities: list[ComparedQuantity] = []
    for number, other in pairs.items():
        if number in tables[0] and other in tables[1]:
            arm_and_size = where(both[0], number)
            quantities += _compare(arm_and_size, tables[0][number], tables[1][other], shared[number])
        else:
            reasons.append(f"{title(both[0], number)}: no seed ran at every learning rate that both folders have")
    notes = [*reasons, *_grid_notes(both[0], grids, shared), *_data_notes(*both, pairs)]
    return SideBySide(str(first), str(second), quantities, [*notes, *remarks(a, b, pairs, ("in A", "in B"))], window)


def _restricted(baseline: Baseline, lrs: Mapping[int, list[float]]) -> Baseline:
    """The baseline with runs of all its curves, but of those in ``lrs`` at these learning rates only."""
    runs = baseline.runs
    kept = [lr in lrs.get(curve, [lr]) for curve, lr in zip(runs["curve"], runs["lr"], strict=True)]
    return baseline._replace(runs=runs[kept])


def _compare(
    arm_and_size: tuple[str, int], a: pd.DataFrame, b: pd.DataFrame, grid: list[float]
) -> Iterator[ComparedQuantity]:
    for column, (name, unit) in COMPARED.items():
        first, second = a[column].dropna(), b[column].dropna()
        paired = first.index.intersection(second.index)
        seeds = f"{len(first)} and {len(second)}"
        if len(paired) >= min(FEWEST_SEEDS, len(first), len(second)) > 0:
            first, second, seeds = first[paired], second[paired], f"{len(paired)}, paired"
        shown_a, shown_b = (_lr_span(side, grid) if unit == STEPS else float(side.mean()) for side in (first, second))
        change = _change(first, second, resolution=1.0 if unit == STEPS else 0.0)
        if shown_a == shown_b == "none":  # both lie beyond the grid, at an unknown distance
            change = (math.nan, math.nan, math.nan)
        yield ComparedQuantity(*arm_and_size, name, unit, shown_a, shown_b, *change, seeds)


def _change(a: pd.Series, b: pd.Series, resolution: float) -> tuple[float, float, float]:
    """Mean difference and its interval, NaN with too few seeds for one."""
    if min(len(a), len(b)) < FEWEST_SEEDS:
        return float(b.mean() - a.mean()), math.nan, math.nan
    found = difference(a, b, resolution)
    return found.mean, found.low, found.high


def _lr_span(indices: pd.Series, grid: list[float]) -> str:
    """The learning rates at these positions of a grid, counted from 1; ``none`` beyond its end."""
    return span([grid[int(index) - 1] if index <= len(grid) else math.nan for index in indices])


def _grid_notes(
    a: Baseline, grids: Mapping[int, tuple[list[float], list[float]]], shared: Mapping[int, list[float]]
) -> Iterator[str]:
    for number, (of_a, of_b) in grids.items():
        if of_a != of_b:
            lrs = listed(map(format_value, shared[number])) if shared[number] else "none"
            yield f"{title(a, number)}: compared at the learning rates that both folders have, {lrs}"


def _data_notes(a: Baseline, b: Baseline, pairs: Mapping[int, int]) -> Iterator[str]:
    differing = {
        (str(a.curves[number]["data_fingerprint"]), str(b.curves[other]["data_fingerprint"]))
        for number, other in pairs.items()
    }
    for of_a, of_b in sorted(differing):
        if of_a != of_b:
            yield f"the data differ, so losses are on different text: fingerprint {of_a} in A, {of_b} in B"
