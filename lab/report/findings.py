"""Findings in sentences: differences between arms, and cautions about the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from lab.analysis.curves import axis_of, significant
from lab.analysis.sensitivity import WINDOW, Study, Window, has_sensitivity, untrained, with_scaled_steps
from lab.analysis.statistics import FEWEST_SEEDS
from lab.analysis.text import LEARNING_RATE, arm_phrase, count, format_value, listed
from lab.records.run_table import PER_BYTE, is_imported

SLOW = (
    "More than half of the sensitivity is under-training, from learning rates below the best one, for {}. "
    "Train longer, or compare instability parts."
)
PART_SUBJECTS = {"total": "LR sensitivity", "above": "The instability part"}
MOST_GAPS = 4  # most kinds of gaps that are named one by one
MOST_NAMES = 8  # most arms that a sentence names


def part_subjects(window: Window) -> dict[str, str]:
    """``PART_SUBJECTS``, with the window of learning rates if it is not the paper's."""
    if window == WINDOW:
        return PART_SUBJECTS
    return {part: f"{subject} from {window}" for part, subject in PART_SUBJECTS.items()}


def headline(pairs: pd.DataFrame, subjects: Mapping[str, str] = PART_SUBJECTS) -> list[str]:
    """Two sentences per pair of arms, on sensitivity and on its instability part.

    Args:
        pairs: the differences, as ``all_pairs`` makes them.
        subjects: the subject of the sentences on each column of intervals.
    """
    tables = [table for _, table in pairs.groupby(["first", "second"], sort=False)]
    return [f"{name} {_difference(table, part)}." for table in tables for part, name in subjects.items()]


def _difference(table: pd.DataFrame, part: str) -> str:
    first, second, intervals = (
        arm_phrase(table["first"].iloc[0]),
        arm_phrase(table["second"].iloc[0]),
        list(table[part]),
    )
    everywhere = "" if len(intervals) == 1 else " at every size"
    if any(interval.n < FEWEST_SEEDS for interval in intervals):
        verdict = f"{first} minus that {second}, with too few seeds for an interval:"
    elif all(interval.low > 0 for interval in intervals):
        verdict = f"is lower {second} than {first}{everywhere}, by"
    elif all(interval.high < 0 for interval in intervals):
        verdict, intervals = f"is lower {first} than {second}{everywhere}, by", [-i for i in intervals]
    else:
        settled = sum(interval.low > 0 or interval.high < 0 for interval in intervals)
        where = f"{settled} of {len(intervals)} sizes" if settled else "no size"
        verdict = f"{first} minus that {second} differs from zero at {where}:"
    at_sizes = [f"{interval} at {count(size)}" for interval, size in zip(intervals, table["size"], strict=True)]
    return f"{verdict} {listed(at_sizes)} parameters"


def notes(study: Study) -> Iterator[str]:
    """Yield cautions about the numbers, a sentence for each kind."""
    runs, failed = study.records.runs, study.failed
    if is_imported(study.records) and runs["data_notes"].eq(PER_BYTE).any():
        yield f"In this table {PER_BYTE}, wherever this page says nats/token."
    if len(failed):
        names = failed["reason"] if is_imported(study.records) else failed["id"]
        yield f"Failed, and left out of the curves: {len(failed)} of {len(runs)} runs ({listed(names)})."
    repeated = sorted(set(runs["id"]) - set(failed["id"]) - set(study.points["id"]))
    if repeated:
        yield f"Left out, since another run is the same point: {len(repeated)} runs ({listed(repeated)})."
        yield from _rounded_alike(runs[~runs["id"].isin(failed["id"])], repeated)
    for curves, sentence in _cautions(study):
        if len(curves):
            yield sentence.format(_curve_names(curves))
    yield from _gaps(study.points, study.window)


def _rounded_alike(runs: pd.DataFrame, repeated: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on learning rates that are equal in six digits, if runs repeat others because of that."""
    if (axis := axis_of(runs)) == "":
        return
    rates = runs[axis].astype(float)
    alike = [group for _, group in runs.groupby(significant(rates)) if group[axis].nunique() > 1]
    pairs = [listed(map(repr, sorted(set(rates[group.index])))) for group in alike if group["id"].isin(repeated).any()]
    if pairs:
        yield f"Learning rates that agree in six digits are one, and one of their runs is shown: {'; '.join(pairs)}."


def undertrained(study: Study) -> str:
    """The caution that sensitivity is mostly under-training, with the curves concerned; empty without any."""
    slow = study.curves[_below_half(study.curves) & (study.axis == LEARNING_RATE)]
    return SLOW.format(_curve_names(slow)) if len(slow) else ""


def _below_half(curves: pd.DataFrame) -> pd.Series:
    return curves["below"].map(lambda interval: interval.mean) > curves["total"].map(lambda interval: interval.mean) / 2


def _gaps(points: pd.DataFrame, window: Window) -> Iterator[str]:
    """Yield sentences on learning rates missing from whole curves that others have, then from single seeds."""
    curves = points.groupby(["arm", "size"], sort=False)
    curves_by_gap: dict[str, list[str]] = {}
    for (arm, size), curve in curves:
        if missing := _missing(points["lr"], curve["lr"]):
            curves_by_gap.setdefault(missing, []).append(_curve_name(arm, size))
    if len(curves_by_gap) > MOST_GAPS:
        yield f"Curves ran different learning rates; sensitivity is a mean over those from {window} that a curve ran."
        curves_by_gap = {}
    for missing, names in curves_by_gap.items():
        yield (
            f"No seed has a run at learning rate {missing}, where other curves have one; sensitivity is a mean over "
            f"the learning rates from {window} that a curve ran: {listed(names)}."
        )
    for (arm, size), curve in curves:
        rates = curve.groupby("seed")["lr"].nunique()
        for seed in rates.index[rates < curve["lr"].nunique()]:
            if missing := _missing(curve["lr"], curve["lr"][curve["seed"] == seed]):
                yield (
                    f"{_curve_name(arm, size)}: seed {seed} has no run at learning rate {missing}; the mean "
                    "sensitivity takes each seed over the learning rates that it ran."
                )


def _missing(expected: pd.Series, ran: pd.Series) -> str:
    lrs = sorted(set(expected) - set(ran))
    return listed(map(format_value, lrs)) if lrs else ""


def _cautions(study: Study) -> Iterator[tuple[pd.DataFrame, str]]:
    """Yield groups of curves, each with the sentence that warns about them."""
    curves = study.curves
    n = curves["total"].map(lambda interval: interval.n)
    worse = untrained(study.points)
    index = pd.MultiIndex.from_frame(curves[["arm", "size"]])
    few = f"Fewer than {FEWEST_SEEDS} seeds, so each seed's value is shown instead of an interval: {{}}."
    idle = "No run ended better than the bigram model, so all above the best learning rate count as unstable"
    edge = "The best learning rate is the lowest or highest tried, so the optimum may lie beyond: {}. Train beyond it"
    outside = f"; where that is outside {study.window}, give lab report --window LOW HIGH"
    beyond = (
        f"At least half of the learning rates tried lie outside {study.window}, and sensitivity leaves them out: {{}}; "
        "lab report --window LOW HIGH counts those from LOW to HIGH."
    )
    other = "Learning rate means something else here, so compare these with other arms by their losses: {}."
    without = f"No sensitivity, which takes two learning rates from {study.window}"
    if study.axis:
        yield curves[n == 0], f"{without}: {{}}." if has_sensitivity(curves) else f"{without}."
    yield curves[(n > 0) & (n < FEWEST_SEEDS)], few
    yield curves[_below_half(curves) & (study.axis == LEARNING_RATE)], SLOW
    yield curves[index.isin(worse) & (n > 0)], f"{idle}, and a low sensitivity means nothing: {{}}."
    yield curves[index.isin(_at_the_edge(study)) & (n > 0)], f"{edge}{outside}."
    yield curves[index.isin(_mostly_outside(study))], beyond
    yield curves[index.isin(with_scaled_steps(study))], other


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
    names = [f"{arm} at {listed(map(count, sizes_of_arm))}" for arm, sizes_of_arm in sizes.items()]
    more = [f"{len(names) - MOST_NAMES} more arms"] if len(names) > MOST_NAMES + 1 else []
    return "; ".join([*(names[:MOST_NAMES] if more else names), *more])


def _curve_name(arm: object, size: object) -> str:
    return f"{arm} at {count(float(str(size)))}"
