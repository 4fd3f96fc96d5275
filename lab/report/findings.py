"""Findings in sentences: differences between arms, and cautions about the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from lab.analysis.curves import axis_of, named_axis, significant
from lab.analysis.rendering import html
from lab.analysis.sensitivity import Study, has_sensitivity, untrained, with_scaled_steps
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import LEARNING_RATE, MOST_LISTED, NO_AXIS, arm_phrase, count, few, format_value, listed
from lab.records.imported import PER_BYTE, is_imported

SENTENCES = html.macros("findings.txt")  # a macro for each kind of sentence
PART_SUBJECTS = {"total": LEARNING_RATE.sensitivity, "above": "The instability part"}
CLIFF = 1.0  # nats between neighbours on a curve
MOST_GAPS = 4  # most kinds of gaps that are named one by one


def headline(pairs: pd.DataFrame, subjects: Mapping[str, str] = PART_SUBJECTS) -> list[str]:
    """Two sentences per pair of arms, on sensitivity and on its instability part.

    Args:
        pairs: the differences, as ``all_pairs`` makes them.
        subjects: the subject of the sentences on each column of intervals.
    """
    tables = [table for _, table in pairs.groupby(["first", "second"], sort=False)]
    return [_difference(name, table, part) for table in tables for part, name in subjects.items()]


def _difference(subject: str, table: pd.DataFrame, part: str) -> str:
    intervals = list(table[part])
    first, second = arm_phrase(table["first"].iloc[0]), arm_phrase(table["second"].iloc[0])
    verdict = "open"
    if any(interval.n < FEWEST_SEEDS for interval in intervals):
        verdict = "too few seeds"
    elif all(interval.low > 0 for interval in intervals):
        verdict = "second is lower"
    elif all(interval.high < 0 for interval in intervals):
        verdict, intervals = "first is lower", [-interval for interval in intervals]
    settled = sum(interval.low > 0 or interval.high < 0 for interval in intervals)
    values = [f"{interval} at {count(size)}" for interval, size in zip(intervals, table["size"], strict=True)]
    return str(SENTENCES.difference(subject, first, second, values, verdict, settled))


def notes(study: Study) -> Iterator[str]:
    """Yield cautions about the numbers, a sentence for each kind."""
    runs, failed = study.records.runs, study.failed
    if is_imported(study.records) and runs["data_notes"].eq(PER_BYTE).any():
        yield str(SENTENCES.per_byte(PER_BYTE))
    if len(failed):
        names = failed["reason"] if is_imported(study.records) else failed["id"]
        yield str(SENTENCES.failed(list(names), len(runs)))
    repeated = sorted(set(runs["id"]) - set(failed["id"]) - set(study.points["id"]))
    if repeated:
        yield str(SENTENCES.repeated(repeated))
        yield from _rounded_alike(runs[~runs["id"].isin(failed["id"])], repeated)
    yield from _of_curves(study)
    yield from _gaps(study)


def _rounded_alike(runs: pd.DataFrame, repeated: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on learning rates that are equal in six digits, if runs repeat others because of that."""
    if (key := axis_of(runs)) == "":
        return
    rates = runs[key].astype(float)
    alike = [group for _, group in runs.groupby(significant(rates)) if group[key].nunique() > 1]
    pairs = [listed(map(repr, sorted(set(rates[group.index])))) for group in alike if group["id"].isin(repeated).any()]
    if pairs:
        yield str(SENTENCES.rounded_alike(named_axis(runs), pairs))


def undertrained(study: Study) -> str:
    """The caution that sensitivity is mostly under-training, with the curves concerned; empty without any."""
    below, total = (study.curves[part].map(lambda interval: interval.mean) for part in ("below", "total"))
    slow = study.curves[(below > total / 2) & (study.along == LEARNING_RATE)]
    return str(SENTENCES.undertrained(_curve_names(slow))) if len(slow) else ""


def _gaps(study: Study) -> Iterator[str]:
    """Yield sentences on learning rates missing from whole curves that others have, then from single seeds."""
    axis, points, window = study.along, study.points, study.window
    curves = points.groupby(["arm", "size"], sort=False)
    curves_by_gap: dict[str, list[str]] = {}
    for (arm, size), curve in curves:
        if missing := _missing(points["lr"], curve["lr"]):
            curves_by_gap.setdefault(missing, []).append(_curve_name(arm, size))
    if len(curves_by_gap) > MOST_GAPS:
        yield str(SENTENCES.many_gaps(axis, window))
    else:
        for missing, names in curves_by_gap.items():
            yield str(SENTENCES.gap(axis, missing, window, names))
    lacking = [
        (_curve_name(arm, size), seed, _missing(curve["lr"], ran))
        for (arm, size), curve in curves
        for seed, ran in curve.groupby("seed")["lr"]
        if ran.nunique() < curve["lr"].nunique()
    ]
    for name, seed, missing in lacking[:MOST_LISTED]:
        yield str(SENTENCES.gap_of_seed(axis, name, seed, missing))
    if len(lacking) > MOST_LISTED:
        yield str(SENTENCES.more_gaps(axis, len(lacking) - MOST_LISTED))


def _missing(expected: pd.Series, ran: pd.Series) -> str:
    lrs = sorted(set(expected) - set(ran))
    return listed(few(map(format_value, lrs))) if lrs else ""


def _of_curves(study: Study) -> Iterator[str]:
    """Yield a caution for each kind of curves whose numbers mean less than they seem to."""
    axis, curves, window = study.along, study.curves, study.window
    n = curves["total"].map(lambda interval: interval.n)
    index = pd.MultiIndex.from_frame(curves[["arm", "size"]])

    def names(is_concerned: Any) -> str:
        return _curve_names(curves[is_concerned]) if is_concerned.any() else ""

    if axis != NO_AXIS and (none := names(n == 0)):
        yield str(SENTENCES.no_sensitivity(axis, window, none if has_sensitivity(curves) else ""))
    if few := names((n > 0) & (n < FEWEST_SEEDS)):
        yield str(SENTENCES.few_seeds(FEWEST_SEEDS, few))
    if slow := undertrained(study):
        yield slow
    if worse := names(index.isin(untrained(study.points)) & (n > 0)):
        yield str(SENTENCES.untrained(axis, worse))
    if cliffs := _cliffs(study):
        yield str(SENTENCES.cliffs(axis, CLIFF, cliffs))
    if edge := names(index.isin(_at_the_edge(study)) & (n > 0)):
        yield str(SENTENCES.at_the_edge(axis, window, edge))
    if outside := names(index.isin(_mostly_outside(study))):
        yield str(SENTENCES.mostly_outside(axis, window, outside))
    if scaled := names(index.isin(with_scaled_steps(study))):
        yield str(SENTENCES.scaled_steps(scaled))


def _cliffs(study: Study) -> list[str]:
    """Where the mean loss leaps by more than ``CLIFF`` from one value of the axis above the best one to the next."""
    found = list[str]()
    for (arm, size), runs in study.points.groupby(["arm", "size"], sort=False):
        losses = runs.groupby("lr")["capped"].mean().dropna()
        rising = losses.iloc[int(losses.argmin()) :] if len(losses) else losses
        leaps = (rising.diff() > CLIFF).to_numpy()
        if leaps.any():
            before, after = rising.index[int(leaps.argmax()) - 1 :][:2]
            found.append(f"{_curve_name(arm, size)} from {format_value(before)} to {format_value(after)}")
    return few(found)


def _at_the_edge(study: Study) -> pd.MultiIndex:
    """Arms and sizes with a seed whose best learning rate, of three or more, is the lowest or the highest."""
    lrs = study.points.groupby(["arm", "size", "seed"]).agg(
        best=("best_lr", "first"), low=("lr", "min"), high=("lr", "max"), n=("lr", "nunique")
    )
    at_edge = lrs[(lrs["n"] > 2) & ((lrs["best"] == lrs["low"]) | (lrs["best"] == lrs["high"]))]
    return pd.MultiIndex.from_frame(at_edge.reset_index()[["arm", "size"]])


def _mostly_outside(study: Study) -> pd.MultiIndex:
    """Arms and sizes with three or more learning rates, at least half of which lie outside the window."""
    lrs = study.points.drop_duplicates(["arm", "size", "lr"])
    is_outside = ~lrs["lr"].between(*significant(study.window))
    curves = lrs.assign(outside=is_outside).groupby(["arm", "size"])["outside"].agg(share="mean", lrs="size")
    mostly = curves[(curves["share"] >= 0.5) & (curves["lrs"] > 2)]
    return pd.MultiIndex.from_frame(mostly.reset_index()[["arm", "size"]])


def _curve_names(curves: pd.DataFrame) -> str:
    """``a at 1k and 2k; b at 1k``; with many arms the first ones, and the number of others."""
    sizes = curves.groupby("arm", sort=False)["size"].agg(list)
    names = [f"{arm} at {listed(few(map(count, sizes_of_arm)))}" for arm, sizes_of_arm in sizes.items()]
    return "; ".join(few(names, "more arms"))


def _curve_name(arm: object, size: object) -> str:
    return f"{arm} at {count(float(str(size)))}"
