"""Learning-rate sensitivity: a number per seed, its two parts, the optimum, and intervals between arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.curves import load, points, significant
from lab.analysis.statistics import student_t
from lab.core.errors import RequestError
from lab.records.store import Records

LOW, HIGH = 3e-4, 3e-1
PARTS = ("total", "below", "above")


class Sensitivity(NamedTuple):
    """LR sensitivity in nats per token; ``total = below + above``.

    ``below`` comes from learning rates below the best one (too slow for the steps given: under-training), ``above``
    from those above it (instability).
    """

    total: float
    below: float
    above: float


def lr_sensitivity(curve: pd.DataFrame, low: float = LOW, high: float = HIGH) -> float:
    """Mean regret over the learning rates inside ``[low, high]`` (Wortsman et al. 2023, sec. 2.2), nats per token.

    Args:
        curve: columns ``lr``, ``loss``, ``loss_at_init``; one row per learning rate, in any order.

    Returns:
        NaN with fewer than two learning rates inside.

    Raises:
        ValueError: a second row for a learning rate.
    """
    return split(curve, low, high).total


def split(curve: pd.DataFrame, low: float = LOW, high: float = HIGH) -> Sensitivity:
    """``lr_sensitivity`` and its two parts; among equally good learning rates the smallest is the best."""
    return regret(significant(curve["lr"]), capped(curve), low, high)


def regret(lr: np.ndarray, loss: np.ndarray, low: float = LOW, high: float = HIGH) -> Sensitivity:
    """``split`` of learning rates, as ``significant`` has them, and their losses, as ``capped`` has them."""
    if len(set(lr)) < len(lr):
        raise ValueError(f"a learning rate has more than one row in {sorted(lr)}")
    floor, ceiling = significant([low, high])
    inside = np.flatnonzero((lr >= floor) & (lr <= ceiling))
    if len(inside) < 2:
        return Sensitivity(math.nan, math.nan, math.nan)
    loss = loss[inside[np.argsort(lr[inside])]]
    each, best = (loss - loss.min()) / len(loss), int(loss.argmin())
    below, above = float(each[:best].sum()), float(each[best:].sum())
    return Sensitivity(below + above, below, above)


def capped(runs: pd.DataFrame) -> np.ndarray:
    """Final loss, at most the loss at initialization; a loss that is no number counts as that (sec. 2.2)."""
    loss, at_init = runs["loss"].to_numpy(dtype=float), runs["loss_at_init"].to_numpy(dtype=float)
    return np.where(np.isfinite(loss), np.fmin(loss, at_init), at_init)


def judge(points: pd.DataFrame) -> pd.DataFrame:
    """``points`` with ``capped`` (loss) and ``fate``: ``diverged``, ``unstable`` or nothing.

    A run is unstable when its learning rate is above the best of its seed's curve and it ended worse than a bigram
    model of the text: on the small scale divergence is a plateau, seldom a NaN.
    """
    frame = points.assign(capped=capped(points))
    frame["best_lr"] = frame.sort_values(["capped", "lr"]).groupby(["curve", "seed"])["lr"].transform("first")
    unstable = (frame["lr"] > frame["best_lr"]) & (frame["loss"] > frame["loss_bigram"])
    diverged = (frame["status"] == "diverged").to_numpy(dtype=bool) | ~np.isfinite(frame["loss"])
    return frame.assign(fate=np.select([diverged, unstable], ["diverged", "unstable"], ""))


def per_seed(points: pd.DataFrame, low: float = LOW, high: float = HIGH) -> pd.DataFrame:
    """One row per curve and seed: ``total``, ``below``, ``above``, ``best_lr``, ``eta_div`` and ``lrs``.

    ``eta_div`` is the smallest learning rate that diverged or was unstable, NaN when none was; ``lrs`` says how many
    learning rates lie inside the window.
    """
    floor, ceiling = significant([low, high])
    frame = judge(points)
    same = [frame[column].tolist() for column in ("arm", "size", "parameters", "curve", "seed", "best_lr")]
    lr, loss, lost = significant(frame["lr"]), frame["capped"].to_numpy(), (frame["fate"] != "").to_numpy()
    rows = []
    for at in frame.groupby(["curve", "seed"], sort=False).indices.values():
        here = lr[at]
        arm, size, parameters, curve, seed, best = (column[at[0]] for column in same)
        known = {"arm": arm, "size": size, "parameters": parameters, "curve": curve, "seed": seed}
        found = {"best_lr": best, "eta_div": min(here[lost[at]], default=math.nan)}
        lrs = int(((here >= floor) & (here <= ceiling)).sum())
        rows.append({**known, **regret(here, loss[at], low, high)._asdict(), **found, "lrs": lrs})
    return pd.DataFrame(rows)


def by_curve(seeds: pd.DataFrame) -> pd.DataFrame:
    """One row per arm and size: an ``Interval`` for each part, and the seeds' ``best_lr`` and ``eta_div`` as lists."""
    rows = []
    for _, some in seeds.groupby("curve", sort=False):
        known = {column: some[column].iloc[0] for column in ("arm", "size", "parameters")}
        parts = {part: student_t(some[part]) for part in PARTS}
        rows.append({**known, **parts, "best_lr": some["best_lr"].tolist(), "eta_div": some["eta_div"].tolist()})
    return pd.DataFrame(rows)


def paired(points: pd.DataFrame, first: str, second: str, low: float = LOW, high: float = HIGH) -> pd.DataFrame:
    """Sensitivity of arm ``first`` minus that of arm ``second``, one row per size both have.

    Differences are taken per seed (same data order, same shared initial weights) over the learning rates both ran.

    Returns:
        Columns ``first``, ``second``, ``size``, and an ``Interval`` over seeds for ``total``, ``below``, ``above``.
    """
    arms = [points[points["arm"] == arm] for arm in (first, second)]
    where = [list(zip(some["size"], some["seed"], some["lr"], strict=True)) for some in arms]
    shared = set(where[0]) & set(where[1])
    rows = []
    if shared:
        left, right = (
            per_seed(some[[key in shared for key in keys]], low, high) for some, keys in zip(arms, where, strict=True)
        )
        both = left.merge(right, on=["size", "seed"], suffixes=("", "_other"))
        for size, some in both.groupby("size"):
            parts = {part: student_t(some[part] - some[f"{part}_other"]) for part in PARTS}
            rows.append({"first": first, "second": second, "size": size, **parts})
    return pd.DataFrame(rows, columns=["first", "second", "size", *PARTS])


def all_pairs(points: pd.DataFrame, low: float = LOW, high: float = HIGH) -> pd.DataFrame:
    """``paired`` for every two arms, in the order of the arms."""
    arms = points["arm"].unique()
    tables = [paired(points, first, second, low, high) for first, second in combinations(arms, 2)]
    return pd.concat(tables, ignore_index=True) if tables else paired(points, "", "", low, high)


def best_lr_fine(curve: pd.DataFrame) -> float:
    """Vertex of the parabola through the best learning rate and its two neighbours, over log LR.

    At the edge of the grid it is the best learning rate itself; ``curve`` as in ``sensitivity.lr_sensitivity``.
    """
    order = np.argsort(curve["lr"].to_numpy())
    return vertex(significant(curve["lr"])[order], capped(curve)[order])


def vertex(lr: np.ndarray, loss: np.ndarray) -> float:
    """``best_lr_fine`` of rising learning rates and their losses."""
    best = int(loss.argmin())
    if not 0 < best < len(lr) - 1:
        return float(lr[best])
    x, y = np.log(lr[best - 1 : best + 2] / lr[best]), loss[best - 1 : best + 2] - loss[best]
    # y = a x^2 + b x through the middle, which is the origin
    a = (y[0] / x[0] - y[2] / x[2]) / (x[0] - x[2])
    b = y[2] / x[2] - a * x[2]
    return float(lr[best] * math.exp(-b / (2 * a))) if a > 0 else float(lr[best])


def spread(curve: pd.DataFrame) -> float:
    """Worst minus best final loss over the learning rates, nats per token; a lost run counts as untrained."""
    return float(np.ptp(capped(curve)))


def shifted(best_lr: float, low: float = LOW, high: float = HIGH) -> tuple[float, float]:
    """A window as wide as ``[low, high]`` with the optimum in its (geometric) middle (Wortsman et al. 2023, app. B)."""
    move = best_lr / math.sqrt(low * high)
    return low * move, high * move


def optima(points: pd.DataFrame) -> pd.DataFrame:
    """One row per curve and seed.

    Returns:
        ``arm``, ``parameters``, ``seed``, ``best_lr_fine``, ``spread``, and ``window_low``, ``window_high`` and
        ``sensitivity`` of the window shifted with the optimum, over those of its learning rates that ran.
    """
    rows = []
    for _, runs in points.groupby(["curve", "seed"], sort=False):
        where = {column: runs[column].iloc[0] for column in ("arm", "parameters", "seed")}
        fine = best_lr_fine(runs)
        low, high = shifted(fine)
        found = {"window_low": low, "window_high": high, "sensitivity": split(runs, low, high).total}
        rows.append({**where, "best_lr_fine": fine, "spread": spread(runs), **found})
    return pd.DataFrame(rows)


class Study(NamedTuple):
    """Tables as made by ``judge(points)``, ``per_seed``, ``by_curve`` and ``all_pairs``."""

    records: Records
    points: pd.DataFrame
    seeds: pd.DataFrame
    curves: pd.DataFrame
    pairs: pd.DataFrame

    @property
    def failed(self) -> pd.DataFrame:
        """Runs without a result."""
        return self.records.runs[self.records.runs["status"] == "failed"]


def study(folders: Sequence[str | Path]) -> Study:
    """Read the folders and reckon.

    Raises:
        RequestError: a folder cannot be read, or none of its runs ended.
    """
    records = load(*folders)
    where = points(records.runs)
    if where.empty:
        raise RequestError(f"all {len(records.runs)} runs failed, the first with: {records.runs['reason'].iloc[0]}")
    seeds = per_seed(where)
    return Study(records, judge(where), seeds, by_curve(seeds), all_pairs(where))
