"""Where the best learning rate of imported runs lies: whether it transfers over size, and its law in size and settings.

A grid hides shifts smaller than its steps, so every shift is given in steps of the grid, beside the smallest one that
the grid and the seeds could have shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.curves import configs, differing, setting_name
from lab.analysis.grouping import arm_labels
from lab.analysis.sensitivity import capped, optima
from lab.analysis.statistics import FEWEST_SEEDS, student_t
from lab.analysis.text import LEARNING_RATE, Axis, count, format_value
from lab.records.store import Records

TRANSFER, LAW = "Does the best {axis.name} transfer?", "Law of the best {axis.name}"
FEWEST_SPARE = 2  # curves beyond the coefficients of a law


def fit_laws(records: Records, points: pd.DataFrame) -> list[str]:
    """The laws of the best learning rate, of arms in which two or more numbers vary, model size among them.

    Each is a power law with the 95 % intervals of its exponents, the number of curves of all seeds that were fitted,
    how many were left out since their best learning rate is at an end of the grid, and the residual standard deviation
    as a factor.

    Args:
        records: imported records.
        points: their points, as of ``judge``.
    """
    cards = records.runs[records.runs["status"] != "failed"]
    curve_of_run, curves = configs(cards)
    values = {key: [curve[key] for curve in curves.values()] for key in differing(list(curves.values()))}
    names = [key for key, of_key in values.items() if all(isinstance(v, float) and v > 0 for v in of_key)]
    # under columns that no point has, since a setting may be called lr or curve
    columns = {f"setting {key}": setting_name(key, names) for key in names}
    table = points.copy()
    for key, column in zip(names, columns, strict=True):
        of_run = dict(zip(cards["id"], (curves[curve][key] for curve in curve_of_run), strict=True))
        table[column] = points["id"].map(of_run).astype(float)
    arms = table.groupby(table["id"].map(arm_labels(records.runs, names)), sort=False)
    laws = {str(arm): _law(runs, {"size": "size", **columns}) for arm, runs in arms}
    return [f"{arm}: {law}" if len(laws) > 1 else law for arm, law in laws.items() if law]


def _law(runs: pd.DataFrame, names: Mapping[str, str]) -> str:
    """The law of one arm in columns by ``names``; empty if fewer than two vary independently, or for want of optima."""
    seeds = runs.groupby(["curve", "seed"], sort=False)
    best = optima(runs)["best_lr_fine"].to_numpy()
    ends = seeds["lr"].agg(["min", "max"]).to_numpy()
    is_inner = (best > ends[:, 0]) & (best < ends[:, 1])
    chosen: list[str] = []
    logs = np.log10(seeds[list(names)].first().to_numpy())[is_inner]
    columns = [np.ones(len(logs))]
    for position, name in enumerate(names.values()):
        if np.linalg.matrix_rank(np.stack([*columns, logs[:, position]], axis=1)) > len(columns):
            columns.append(logs[:, position])
            chosen.append(name)
    spare = len(logs) - len(columns)
    if len(chosen) < 2 or spare < FEWEST_SPARE:
        return ""
    x_nk, y_n = np.stack(columns, axis=1), np.log10(best[is_inner])
    fitted_k = np.linalg.lstsq(x_nk, y_n, rcond=None)[0]
    variance = float(((y_n - x_nk @ fitted_k) ** 2).sum()) / spare
    errors_k = np.sqrt(variance * np.diag(np.linalg.inv(x_nk.T @ x_nk)))
    half_k = float(scipy.special.stdtrit(spare, 0.975)) * errors_k
    powers = [
        f"{name}^{power:.2f} [{power - half:.2f}, {power + half:.2f}]"
        for name, power, half in zip(chosen, fitted_k[1:], half_k[1:], strict=True)
    ]
    left_out = f", {(~is_inner).sum()} left out" if not is_inner.all() else ""
    scatter = 10 ** math.sqrt(variance)
    return f"{' '.join(powers)}, from {len(logs)} curves{left_out}; they scatter by a factor of {scatter:.2f}"


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
                "cost": cost.bare,
                "n": cost.n,
            }
        )
    return pd.DataFrame(rows)


def _cost(curve: pd.DataFrame, log_lr: float) -> float:
    """The loss at a learning rate minus the lowest on the curve of a seed, read between points in log LR."""
    curve = curve.sort_values("lr")
    loss = capped(curve)
    return float(np.interp(log_lr, np.log10(curve["lr"]), loss) - loss.min()) if not math.isnan(log_lr) else math.nan
