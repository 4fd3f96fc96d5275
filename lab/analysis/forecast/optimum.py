"""Where the best learning rate of imported runs lies: whether it transfers over size, and its law in size and settings.

A grid hides shifts smaller than its steps, so every shift is given in steps of the grid, beside the smallest one that
the grid and the seeds could have shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.curves import configs, differing, setting_name
from lab.analysis.grouping import arm_labels
from lab.analysis.sensitivity import capped, optima
from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t
from lab.analysis.text import count, format_value
from lab.records.store import Records

TRANSFER, LAW = "Does the best learning rate transfer?", "Law of the best learning rate"
ABOUT_TRANSFER = """The best learning rate of the smallest size, used at the largest. A shift is in steps of the grid,
and beside it stands the smallest one that could have been seen: half the width of its 95 % interval, or where there are
fewer than three seeds a whole step, since each optimum is known to half a step only. Its cost is the loss that it adds
at the largest size, read off the curve between learning rates that ran (nats/token)."""
ABOUT_LAW = """A power law in all numbers that vary between curves, fitted to the best learning rates by least squares
in logarithms; brackets hold 95 % Student-t intervals of the exponents. A best learning rate at an end of its grid is
left out."""
FEWEST_SPARE = 2  # curves beyond the coefficients of a law


class Exponent(NamedTuple):
    """The exponent of one number in a law, with the ends of its 95 % interval."""

    name: str
    value: float
    low: float
    high: float


class Law(NamedTuple):
    """The best learning rate as a power law, fitted to the curves of all seeds.

    Attributes:
        arm: the arm without the numbers of the law; empty if there is only one.
        exponents: one for each number.
        curves: the number of curves fitted.
        left_out: the number of curves whose best learning rate is at an end of the grid.
        scatter: the residual standard deviation as a factor.
    """

    arm: str
    exponents: list[Exponent]
    curves: int
    left_out: int
    scatter: float

    def __str__(self) -> str:
        parts = [f"{one.name}^{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in self.exponents]
        left_out = f", {self.left_out} left out" if self.left_out else ""
        arm = f"{self.arm}: " if self.arm else ""
        scatter = f"they scatter by a factor of {self.scatter:.2f}"
        return f"{arm}{' '.join(parts)}, from {self.curves} curves{left_out}; {scatter}"


def fit_laws(records: Records, points: pd.DataFrame) -> list[Law]:
    """The laws of the best learning rate, of arms in which two or more numbers vary, model size among them.

    Args:
        records: imported records.
        points: their points, as of ``judge``.
    """
    cards = records.runs[records.runs["status"] != "failed"]
    curve_of_run, curves = configs(cards)
    names = [key for key in differing(list(curves.values())) if all(_is_positive(c[key]) for c in curves.values())]
    numbers = {
        setting_name(key, names): dict(zip(cards["id"], (curves[curve][key] for curve in curve_of_run), strict=True))
        for key in names
    }
    table = points.assign(**{name: points["id"].map(values).astype(float) for name, values in numbers.items()})
    labels = arm_labels(records.runs, names)
    table["rest"] = table["id"].map(labels)
    laws = [_law(str(rest), runs, ["size", *numbers]) for rest, runs in table.groupby("rest", sort=False)]
    known = [law for law in laws if law]
    return known if table["rest"].nunique() > 1 else [law._replace(arm="") for law in known]


def _is_positive(value: object) -> bool:
    return isinstance(value, float) and value > 0


def _law(arm: str, runs: pd.DataFrame, names: Sequence[str]) -> Law | None:
    """The law of one arm; None if fewer than two numbers vary independently, or too few curves have an optimum."""
    seeds = runs.groupby(["curve", "seed"], sort=False)
    best = optima(runs)["best_lr_fine"].to_numpy()
    ends = seeds["lr"].agg(["min", "max"]).to_numpy()
    is_inner = (best > ends[:, 0]) & (best < ends[:, 1])
    chosen: list[str] = []
    logs = np.log10(seeds[list(names)].first().to_numpy())[is_inner]
    columns = [np.ones(len(logs))]
    for position, name in enumerate(names):
        if np.linalg.matrix_rank(np.stack([*columns, logs[:, position]], axis=1)) > len(columns):
            columns.append(logs[:, position])
            chosen.append(name)
    spare = len(logs) - len(columns)
    if len(chosen) < 2 or spare < FEWEST_SPARE:
        return None
    x_nk, y_n = np.stack(columns, axis=1), np.log10(best[is_inner])
    fitted_k = np.linalg.lstsq(x_nk, y_n, rcond=None)[0]
    variance = float(((y_n - x_nk @ fitted_k) ** 2).sum()) / spare
    errors_k = np.sqrt(variance * np.diag(np.linalg.inv(x_nk.T @ x_nk)))
    half_k = float(scipy.special.stdtrit(spare, 0.975)) * errors_k
    exponents = [
        Exponent(name, float(value), float(value - half), float(value + half))
        for name, value, half in zip(chosen, fitted_k[1:], half_k[1:], strict=True)
    ]
    return Law(arm, exponents, len(logs), int((~is_inner).sum()), 10 ** math.sqrt(variance))


class Transfer(NamedTuple):
    """What happens if the best learning rate of the smallest size of an arm is used at its largest.

    Attributes:
        sizes: the smallest and the largest.
        best: the best learning rate of each, a geometric mean over seeds.
        shift: log10 of the best at the largest over that at the smallest, an interval over seeds.
        step: the median step of the grid, in log10.
        cost: the loss that the transfer adds, nats per token, an interval over seeds.
        at_edge: whether a best learning rate is at an end of its grid, beyond which the optimum may lie.
    """

    arm: str
    sizes: tuple[float, float]
    best: tuple[float, float]
    shift: Interval
    step: float
    cost: Interval
    at_edge: bool

    @property
    def unseen(self) -> float:
        """The smallest shift that could have been seen, in steps."""
        return (self.shift.high - self.shift.mean) / self.step if self.shift.n >= FEWEST_SEEDS else 1.0


def transfers(points: pd.DataFrame) -> Iterator[Transfer]:
    """Yield the transfer of each arm with two sizes or more and three learning rates that both ends ran."""
    best = optima(points).assign(size=points.groupby(["curve", "seed"], sort=False)["size"].first().to_numpy())
    for arm, runs in points.groupby("arm", sort=False):
        small, large = runs["size"].min(), runs["size"].max()
        ends = [runs[runs["size"] == size] for size in (small, large)]
        lrs = [np.sort(end["lr"].unique()) for end in ends]
        if small == large or min(map(len, lrs)) < 3 or min(map(min, lrs)) <= 0:
            continue
        logs = [
            np.log10(best[(best["arm"] == arm) & (best["size"] == size)].set_index("seed")["best_lr_fine"])
            for size in (small, large)
        ]
        if logs[0].isna().all() or logs[1].isna().all():
            continue
        at_edge = any(not lr.min() < 10 ** log.mean() * 1.0000001 < lr.max() for lr, log in zip(lrs, logs, strict=True))
        yield Transfer(
            str(arm),
            (small, large),
            (10 ** logs[0].mean(), 10 ** logs[1].mean()),
            student_t(logs[1] - logs[0]),
            float(np.median(np.diff(np.log10(lrs[1])))),
            student_t([_cost(of_seed, logs[0].get(seed, math.nan)) for seed, of_seed in ends[1].groupby("seed")]),
            at_edge,
        )


def _cost(curve: pd.DataFrame, log_lr: float) -> float:
    """The loss at a learning rate minus the lowest on the curve of a seed, read between points in log LR."""
    curve = curve.sort_values("lr")
    loss = capped(curve)
    return float(np.interp(log_lr, np.log10(curve["lr"]), loss) - loss.min()) if not math.isnan(log_lr) else math.nan


def transfer_table(points: pd.DataFrame) -> pd.DataFrame:
    """``transfers`` for readers, a row per arm."""
    rows = []
    for one in transfers(points):
        sign = "at least " if one.at_edge else ""
        rows.append(
            {
                "arm": one.arm,
                "from": count(one.sizes[0]),
                "to": count(one.sizes[1]),
                "best LR": " to ".join(format_value(float(f"{lr:.2g}")) for lr in one.best),
                "shift in steps": f"{sign}{one.shift.mean / one.step:+.2f}",
                "could have seen": f"{one.unseen:.2f}",
                "cost": one.cost.bare,
                "n": one.cost.n,
            }
        )
    return pd.DataFrame(rows)
