"""Match the curves of two baselines, and find the reasons why a pair cannot be compared, and other differences."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from lab.analysis.curves import GAINS_TOLERANCE, arm_keys, interventions, name_arms, same_sizes
from lab.analysis.guard.baseline import Baseline, whole_seeds
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import count, format_value


def where(baseline: Baseline, number: int) -> tuple[str, int]:
    """Arm and size (parameters without embeddings) of the curve with this number."""
    first = runs_of(baseline, number).iloc[0]
    return str(first["arm"]), int(first["size"])


def runs_of(baseline: Baseline, number: int) -> pd.DataFrame:
    """The runs of the curve with this number."""
    return baseline.runs[baseline.runs["curve"] == number]


def grid_of(baseline: Baseline, number: int) -> list[float]:
    """The learning rates of the curve with this number, in rising order."""
    return sorted(set(runs_of(baseline, number)["lr"]))


def title(baseline: Baseline, number: int) -> str:
    """Arm and size of the curve with this number, as messages name it."""
    arm, size = where(baseline, number)
    return f"{arm} at {count(size)} parameters"


class Match(NamedTuple):
    """Curves of a baseline and the new curves to compare them with.

    Attributes:
        pairs: number of the new curve, by number of the old one.
        removed: interventions that the new curve lacks, by number of the old one; only if some are missing.
        reasons: the reason for each unmatched curve: no curve matches, or more than one.
    """

    pairs: dict[int, int]
    removed: dict[int, list[str]]
    reasons: list[str]


def match_curves(old: Baseline, new: Baseline) -> Match:
    """Match each curve of the baseline with the one new curve of its arm and size.

    If no curve has its interventions, it is matched with the one that agrees in all other keys and lacks the fewest.
    """
    curves, sizes = list(old.curves.values()), [where(old, number)[1] for number in old.curves]
    keys = {"intervention", *arm_keys(curves, sizes)}
    match = Match({}, {}, [])
    for number in old.curves:
        matches = _of_arm(old, new, number, keys) or _lacking_interventions(old, new, number, keys)
        if len(matches) == 1:
            match.pairs[number] = matches[0]
            if removed := sorted(_interventions(old, number) - _interventions(new, matches[0])):
                match.removed[number] = removed
        else:
            curves_are = f"{len(matches)} curves are" if matches else "no curve is"
            match.reasons.append(f"{curves_are} {title(old, number)} in {new.source}")
    return match


def named_alike(a: Baseline, b: Baseline) -> tuple[Baseline, Baseline]:
    """Both baselines with their arms named together, so that an arm has the same name in both.

    Keys in which matched curves differ must not distinguish arms, so the second baseline takes the values of the first.
    """
    match = match_curves(a, b)
    pairs = {number: other for number, other in match.pairs.items() if number not in match.removed}
    known = {(key, b.curves[other].get(key)): a.curves[n].get(key) for n, other in pairs.items() for key in a.curves[n]}
    others = [number for number in b.curves if number not in pairs.values()]
    keys = sorted({key for side in (a, b) for curve in side.curves.values() for key in curve})
    curves = [{key: curve.get(key) for key in keys} for curve in a.curves.values()]
    curves += [{key: known.get((key, b.curves[n].get(key)), b.curves[n].get(key)) for key in keys} for n in others]
    counts = [*(_parameters(a, number) for number in a.curves), *(_parameters(b, number) for number in others)]
    labels = [arm.label for arm in name_arms(curves, [same_sizes(counts)[each] for each in counts])]
    of_a, of_others = dict(zip(a.curves, labels, strict=False)), dict(zip(others, labels[len(a.curves) :], strict=True))
    of_b = {**of_others, **{other: of_a[number] for number, other in pairs.items()}}
    return _named(a, of_a), _named(b, of_b)


def _named(baseline: Baseline, labels: Mapping[int, str]) -> Baseline:
    return baseline._replace(runs=baseline.runs.assign(arm=baseline.runs["curve"].map(labels).astype("string")))


def _of_arm(old: Baseline, new: Baseline, number: int, keys: set[str]) -> list[int]:
    """Numbers of new curves that agree in these keys and in size."""
    arm, parameters = {key: old.curves[number].get(key) for key in keys}, _parameters(old, number)
    return [
        other
        for other, curve in new.curves.items()
        if all(curve.get(key) == value for key, value in arm.items())
        and 1 / GAINS_TOLERANCE <= _parameters(new, other) / parameters <= GAINS_TOLERANCE
    ]


def _lacking_interventions(old: Baseline, new: Baseline, number: int, keys: set[str]) -> list[int]:
    """Numbers of new curves that differ from an arm only by missing interventions, and lack the fewest."""
    present = _interventions(old, number)
    rest = {key for key in keys if not key.startswith("intervention")}
    subsets = [other for other in _of_arm(old, new, number, rest) if _interventions(new, other) < present]
    most = max((len(_interventions(new, other)) for other in subsets), default=0)
    return [other for other in subsets if len(_interventions(new, other)) == most]


def _interventions(baseline: Baseline, number: int) -> set[str]:
    return set(interventions(baseline.curves[number]))


def _parameters(baseline: Baseline, number: int) -> int:
    return int(runs_of(baseline, number)["parameters"].iloc[0])


def reasons_not_to_judge(old: Baseline, new: Baseline, number: int, other: int) -> Iterator[str]:
    """Yield reasons why two matched curves cannot be compared: other data, another grid, too few or identical seeds."""
    name = title(old, number)
    data = [str(old.curves[number]["data_fingerprint"]), str(new.curves[other]["data_fingerprint"])]
    if data[0] != data[1]:
        yield f"{name}: other data, fingerprint {data[0]} in the baseline and {data[1]} now"
    grids = [grid_of(old, number), grid_of(new, other)]
    if grids[0] != grids[1]:
        before, now = (", ".join(map(format_value, grid)) for grid in grids)
        yield f"{name}: another grid of learning rates, {before} in the baseline and {now} now"
    for baseline, curve in ((old, number), (new, other)):
        runs = whole_seeds(runs_of(baseline, curve))
        seeds = runs["seed"].nunique()
        if seeds < FEWEST_SEEDS:
            yield f"{name}: too few seeds, {seeds} whole in {baseline.source}, an interval takes {FEWEST_SEEDS}"
        elif runs["loss"].notna().all() and runs.groupby("lr")["loss"].nunique().eq(1).all():
            yield f"{name}: all seeds of {baseline.source} ended on the same losses, so their spread is unknown"
        unknown = runs["loss_at_init"].isna()
        # a table of finished runs need not have it
        if unknown.any() and not (unknown.all() and runs["loss"].notna().all()):
            yield f"{name}: a loss at initialization is no number in {baseline.source}"


def remarks(
    old: Baseline, new: Baseline, pairs: Mapping[int, int], sides: tuple[str, str] = ("in the baseline", "now")
) -> Iterator[str]:
    """Yield differences that do not affect the verdict: config keys, seeds left out, and curves without a match."""
    curves_by_change: dict[str, list[str]] = {}
    for number, other in pairs.items():
        before, now = old.curves[number], new.curves[other]
        for key in sorted({*before, *now} - {"data_fingerprint"}):
            if before.get(key) != now.get(key):
                change = f"{key}: {_spelled(before.get(key))} {sides[0]}, {_spelled(now.get(key))} {sides[1]}"
                curves_by_change.setdefault(change, []).append(title(old, number))
    for change, titles in curves_by_change.items():
        yield change if len(titles) == len(pairs) else f"{change} ({', '.join(titles)})"
    for baseline, numbers in ((old, pairs), (new, pairs.values())):
        for number in numbers:
            runs = runs_of(baseline, number)
            partial = sorted(set(runs["seed"]) - set(whole_seeds(runs)["seed"]))
            if partial:
                seeds = ", ".join(partial)
                yield f"{title(baseline, number)}: of {baseline.source} seed {seeds} is left out, not whole"
    for number in new.curves:
        if number not in pairs.values():
            yield f"not {sides[0]}: {title(new, number)}"


def _spelled(value: Hashable) -> str:
    return "absent" if value is None else format_value(value)
