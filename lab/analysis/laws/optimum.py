"""Where the best learning rate of imported runs lies: whether it transfers over size, and its law in size and settings.

A grid hides shifts smaller than its steps, so every shift is given in steps of the grid, beside the smallest one that
the grid and the seeds could have shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.curves import configs, differing, setting_name
from lab.analysis.grouping import arm_labels
from lab.analysis.laws.brackets import PowerLaw, fit_power_law
from lab.analysis.sensitivity import LOST, capped, optima
from lab.analysis.statistics import FEWEST_SEEDS, student_t
from lab.analysis.text import LEARNING_RATE, Axis, count, format_value, listed
from lab.records.imported import DERIVED, followed
from lab.records.store import Records

TRANSFER, LAW = "Does the best {axis.name} transfer?", "Law of the best {axis.name}"
FAILING_LAW = "Law of the first failing {axis.name}"
FEWEST_SPARE = 2  # curves beyond the coefficients of a law
# A number follows from others if so small a share of its spread, in logarithms, is its own: its exponent would be ten
# times less certain than if it varied by itself. Spreads smaller than ``CONSTANT`` are rounding errors.
LEAST_SHARE, CONSTANT = 0.1, 1e-6
STEPS = "steps"
SAME_RATE = 1e-6  # decades between learning rates that are one


class Law(NamedTuple):
    """The law of the best or the first failing learning rate of an arm.

    Attributes:
        text: the law in words; without exponents it says why there is none.
        power: as numbers, whose centres are geometric means over curves; None without exponents.
        n: how many curves were fitted.
        arm: the label of the arm; empty where there is one alone.
    """

    text: str
    power: PowerLaw | None = None
    n: int = 0
    arm: str = ""


def fit_laws(records: Records, points: pd.DataFrame, *, failing: bool = False) -> list[Law]:
    """The laws of the best learning rate, of arms in which two or more numbers vary, model size among them.

    Each is a power law with the 95 % intervals of its exponents, the number of curves of all seeds that were fitted,
    how many were left out since their best learning rate is at an end of the grid, the residual standard deviation as a
    factor, and the numbers that follow from the others, which have no exponent of their own.

    Args:
        records: imported records.
        points: their points, as of ``judge``.
        failing: fit the first failing learning rate instead, which is known to lie above the highest one that ended
            well, and is not known where none failed.
    """
    cards = records.runs[records.runs["status"] != "failed"]
    curve_of_run, curves = configs(cards)
    values = {key: [curve[key] for curve in curves.values()] for key in differing(list(curves.values()))}
    names = [key for key, of_key in values.items() if all(isinstance(v, float) and v > 0 for v in of_key)]
    names.sort(key=lambda name: name == STEPS)  # they follow from tokens and batch, rather than these from them
    settings = pd.DataFrame([curves[curve] for curve in curve_of_run], cards["id"])[names]
    derived = [name for name in map(str, cards) if name.startswith(f"{DERIVED}.") and (cards[name] > 0).all()]
    numbers = pd.concat([settings, cards.set_index("id")[derived]], axis=1).astype(float).loc[points["id"]]
    every = [*names, *derived]
    numbers = numbers.set_axis([setting_name(key, every) for key in every], axis=1).set_axis(points.index)
    numbers.insert(0, "size", points["size"], allow_duplicates=True)
    known = followed(records)
    arms = points.groupby(points["id"].map(arm_labels(records.runs, names)), sort=False)
    fit = _failing_law if failing else _law
    laws = {str(arm): law for arm, runs in arms if (law := fit(runs, numbers.loc[runs.index], known))}
    return [law._replace(text=f"{arm}: {law.text}", arm=arm) if len(arms) > 1 else law for arm, law in laws.items()]


def _law(runs: pd.DataFrame, numbers: pd.DataFrame, known: Sequence[str]) -> Law | None:
    """The law of one arm; None if only one number varies, or too few curves have an optimum.

    The ``numbers`` of each run have a column each. Those ``known`` follow from others, as the import has said already.
    """
    names = list(map(str, numbers))
    best = optima(runs)["best_lr_fine"].to_numpy()
    ends = runs.groupby(["curve", "seed"], sort=False)["lr"].agg(["min", "max"]).to_numpy()
    is_inner = (best > ends[:, 0]) & (best < ends[:, 1])
    logs = np.log10(numbers[~runs.duplicated(["curve", "seed"])].to_numpy(dtype=float))[is_inner]
    places, follow = independent(logs, names)
    chosen = [names[place] for place in places]
    spare = len(logs) - len(chosen) - 1
    if spare < FEWEST_SPARE or len(chosen) < 2 - bool(follow):
        return None
    left_out = f"no exponent of its own: {listed(follow)}" if (follow := [*follow, *known]) else ""
    if len(chosen) < 2:
        return Law(f"none, since only {listed(chosen)} varies by itself; {left_out}")
    middle_k = logs[:, places].mean(0)
    x_nk = np.column_stack([np.ones(len(logs)), logs[:, places] - middle_k])
    y_n = np.log10(best[is_inner])
    fitted_k = np.linalg.lstsq(x_nk, y_n, rcond=None)[0]
    variance = float(((y_n - x_nk @ fitted_k) ** 2).sum()) / spare
    power = PowerLaw(
        float(fitted_k[0]),
        dict(zip(chosen, fitted_k[1:].tolist(), strict=True)),
        dict(zip(chosen, (10**middle_k).tolist(), strict=True)),
        (variance * np.linalg.inv(x_nk.T @ x_nk)).tolist(),
        math.sqrt(variance),
        spare,
    )
    at_ends = f", {(~is_inner).sum()} left out" if not is_inner.all() else ""
    return Law(_in_words(power, f"from {len(logs)} curves{at_ends}", left_out), power, len(logs))


def _in_words(power: PowerLaw, fitted: str, left_out: str) -> str:
    exponents = [f"{name}^{power.exponent(name):.2f}" for name in power.exponents]
    scatter = f"they scatter by a factor of {10**power.scatter:.2f}"
    return "; ".join(filter(None, [f"{' '.join(exponents)}, {fitted}", scatter, left_out]))


def _failing_law(runs: pd.DataFrame, numbers: pd.DataFrame, known: Sequence[str]) -> Law | None:
    """The law of the first failing learning rate of one arm; None if only one number varies, or too few curves fail."""
    names, seeds = list(map(str, numbers)), [runs["curve"], runs["seed"]]
    high = runs["lr"].where(runs["outcome"] != "", math.inf).groupby(seeds).transform("min")
    low = runs["lr"].where(runs["lr"] < high, 0.0).groupby(seeds).transform("max")
    is_first = ~runs.duplicated(["curve", "seed"])
    brackets = pd.DataFrame({"low": low, "high": high})[is_first].reset_index(drop=True)
    curves = numbers[is_first].to_numpy(dtype=float)
    places, follow = independent(np.log10(curves), names)
    chosen = [names[place] for place in places]
    failed = int(np.isfinite(brackets["high"]).sum())
    if len(chosen) < 2 or failed < len(chosen) + 1 + FEWEST_SPARE:
        return None
    over = [f"number {place}" for place in places]  # since a number may be called as an end of a bracket
    brackets[over] = curves[:, places]
    fitted = fit_power_law(brackets, over, pd.Series(range(len(curves))))
    exponents, centres = (dict(zip(chosen, of.values(), strict=True)) for of in (fitted.exponents, fitted.centres))
    power = fitted._replace(exponents=exponents, centres=centres)
    left_out = f"no exponent of its own: {listed(follow)}" if (follow := [*follow, *known]) else ""
    calm = f", in {len(curves) - failed} of which no rate failed" if failed < len(curves) else ""
    return Law(_in_words(power, f"from {len(curves)} curves{calm}", left_out), power, len(curves))


def independent(logs: np.ndarray, names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Tell columns that vary by themselves from those that follow from earlier ones.

    Args:
        logs: a row per curve, a column per name, in log10.
        names: of the columns; the first of those that vary together varies by itself.

    Returns:
        The places of the former, and the names of the latter with what they follow from: ``steps (from tokens and
        batch)``.
    """
    chosen, follow = list[int](), list[str]()
    centred = logs - logs.mean(axis=0) if len(logs) else logs
    for place, column in enumerate(centred.T):
        before = centred[:, chosen]
        weights = np.linalg.lstsq(before, column, rcond=None)[0]
        if np.abs(column).max(initial=0) < CONSTANT:
            continue
        if np.linalg.norm(column - before @ weights) < LEAST_SHARE * np.linalg.norm(column):
            parts = np.linalg.norm(before * weights, axis=0) / np.linalg.norm(column)
            sources = [names[other] for other, part in zip(chosen, parts, strict=True) if part > LEAST_SHARE]
            follow.append(f"{names[place]} (from {listed(sources)})")
        else:
            chosen.append(place)
    return chosen, follow


def transfer_table(points: pd.DataFrame, axis: Axis = LEARNING_RATE) -> pd.DataFrame:
    """What happens if the best learning rate of the smallest size of an arm is used at its largest.

    A row for each arm with two sizes or more and three learning rates that both ends ran. A shift is that of log10 of
    the best learning rate, a mean over seeds, in median steps of the grid.
    """
    best, rows = optima(points), []
    best = best.assign(size=points.groupby(["curve", "seed"], sort=False)["size"].first().to_numpy())
    for arm, runs in points.groupby("arm", sort=False):
        sizes = runs["size"].min(), runs["size"].max()
        ends = [runs[runs["size"] == size] for size in sizes]
        lrs = [np.sort(end["lr"].unique()) for end in ends]
        if sizes[0] == sizes[1] or min(map(len, lrs)) < 3 or min(map(min, lrs)) <= 0:
            continue
        logs = [
            np.log10(best[(best["arm"] == arm) & (best["size"] == size)].set_index("seed")["best_lr_fine"])
            for size in sizes
        ]
        if logs[0].isna().all() or logs[1].isna().all():
            continue
        at_edge = any(not lr.min() < 10 ** log.mean() * 1.0000001 < lr.max() for lr, log in zip(lrs, logs, strict=True))
        step, shift = float(np.median(np.diff(np.log10(lrs[1])))), student_t(logs[1] - logs[0])
        unseen = (shift.high - shift.mean) / step if shift.n >= FEWEST_SEEDS else 1.0
        cost = student_t([_cost(of_seed, logs[0].get(seed, math.nan)) for seed, of_seed in ends[1].groupby("seed")])
        rows.append(
            {
                "arm": str(arm),
                "from": count(sizes[0]),
                "to": count(sizes[1]),
                f"best {axis.short}": " to ".join(format_value(float(f"{10 ** log.mean():.2g}")) for log in logs),
                "shift in steps": f"{'at least ' if at_edge else ''}{shift.mean / step:+.2f}",
                "could have seen": f"{unseen:.2f}",
                "cost": f"{cost:±}" if cost.n else "unknown",
                "n": cost.n,
            }
        )
    return pd.DataFrame(rows)


def _cost(curve: pd.DataFrame, log_lr: float) -> float:
    """The loss at a learning rate minus the lowest on the curve of a seed, read between points in log LR.

    NaN where nothing tells it: beyond the learning rates that ran, beside one that diverged, and where the loss rises
    by more than ``LOST`` from one learning rate to the next, since it may do so anywhere between them.
    """
    curve = curve.sort_values("lr")
    log_lrs, loss, outcomes = np.log10(curve["lr"].to_numpy()), capped(curve), curve["outcome"].tolist()
    right = int(np.searchsorted(log_lrs, log_lr - SAME_RATE))  # the first that is as high, NaN being the highest
    if right == len(loss):
        return math.nan
    left = right if log_lrs[right] <= log_lr + SAME_RATE else right - 1
    beside = slice(left, right + 1)
    if left < 0 or "diverged" in outcomes[beside] or np.ptp(loss[beside]) > LOST:
        return math.nan
    return float(np.interp(log_lr, log_lrs, loss) - loss.min())
