"""Matching: which curve of a results folder is held against which of a baseline, and what keeps them apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import pandas as pd

from lab.analysis.baseline import Baseline, whole
from lab.analysis.curves import SAME_SIZE, telling
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import count, spell


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


def matched(old: Baseline, new: Baseline) -> tuple[dict[int, int], list[str]]:
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


def lacking(old: Baseline, new: Baseline, number: int, other: int) -> Iterator[str]:
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
                said = f"{key}: {_said(before.get(key))} in the baseline, {_said(now.get(key))} now"
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


def _said(value: Hashable) -> str:
    return "absent" if value is None else spell(value)
