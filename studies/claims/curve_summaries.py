"""Numbers that summarize the runs of one curve and seed: its best loss, sensitivity, and where it becomes unstable."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from lab.analysis.crossings import SLOPE_OVER, failing
from lab.analysis.sensitivity import LOST, PARTS, regret, vertex

# Undefined for a curve on which no learning rate beat the bigram model (Wortsman et al. 2023, app. B).
CURVE_QUANTITIES = (*PARTS, "coupled", "coupled_above", "log_best", "log_lost")
COUPLED_WINDOWS = ((1e-4, 1e-1), (3e-4, 3e-1))


class RunSummary(NamedTuple):
    """A run: its id, and its final loss, at most that at initialization."""

    id: str
    loss: float


class CurveSummary(NamedTuple):
    """The runs of one curve and seed, and numbers that summarize them.

    Attributes:
        runs: the runs by learning rate, in rising order.
        alive: whether some final loss is a number.
        learned: whether some run beat the bigram model.
        values: numbers by name, NaN if undefined:

            - ``best``: the lowest final loss, nats/token.
            - ``total``, ``below``, ``above``: sensitivity S and its two parts, as in ``sensitivity.split``.
            - ``coupled``: the smaller S of the two windows that the paper uses for coupled decay (sec. 3.2.2);
              ``coupled_above``: its instability part.
            - ``log_best``: log10 of eta*, the vertex of a parabola.
            - ``log_lost``: log10 of eta_div, the learning rate above the best one at which the loss first crosses the
              best one + ``LOST``, interpolated straight between its neighbours; one step above the grid if it does not.

        resolutions: the step of the grid of learning rates, in decades, of each value that was read off it.
    """

    curve: int
    size: int
    seed: str
    runs: dict[float, RunSummary]
    alive: bool
    learned: bool
    values: dict[str, float]
    resolutions: dict[str, float]


def summarize_curves(runs: pd.DataFrame) -> list[CurveSummary]:
    """Summarize each curve and seed of ``runs``, a table as made by ``sensitivity.judge``."""
    rows: dict[tuple[int, str], list[Any]] = {}
    for row in runs.sort_values("lr").itertuples():
        rows.setdefault((row.curve, row.seed), []).append(row)  # type: ignore[arg-type]
    return [_summarize(curve) for curve in rows.values()]


def _summarize(rows: list[Any]) -> CurveSummary:
    lr, loss = np.array([row.lr for row in rows]), np.array([row.capped for row in rows])
    runs = {row.lr: RunSummary(row.id, row.capped) for row in rows}
    alive = any(math.isfinite(row.loss) for row in rows)
    learned = bool(loss.min() < np.fmin(rows[0].loss_at_init, rows[0].loss_bigram))
    values = {"best": float(loss.min()) if alive else math.nan, **dict.fromkeys(CURVE_QUANTITIES, math.nan)}
    resolutions: dict[str, float] = {}
    if alive and learned:
        values |= regret(lr, loss)._asdict()
        coupled = min((regret(lr, loss, *window) for window in COUPLED_WINDOWS), key=lambda parts: parts.total)
        values |= {"coupled": coupled.total, "coupled_above": coupled.above}
    if alive and learned and lr[0] > 0:  # a table may have no learning rates, or another axis with zero on it
        values["log_best"] = math.log10(vertex(lr, loss))
        lost, step = failing(lr, loss, LOST), _grid_step(lr)
        values["log_lost"] = lost.log_or_beyond(step)
        # a parabola has no grid; the best learning rate has one only if it ends it
        ends_grid = loss.argmin() in (0, len(lr) - 1)
        resolutions = {"log_lost": step if lost.is_censored else lost.width, "log_best": step if ends_grid else 0.0}
    return CurveSummary(rows[0].curve, rows[0].size, rows[0].seed, runs, alive, learned, values, resolutions)


def _grid_step(lr: np.ndarray) -> float:
    """Smallest step of the grid, decades."""
    return float(np.diff(np.log10(lr)).min()) if len(lr) > 1 else 0.5


def steepness(lr: ArrayLike, loss: ArrayLike) -> float:
    """The largest rise of the loss within ``SLOPE_OVER`` decades of learning rate from the best one on, nats.

    The loss is interpolated linearly in the log of the rate, so of a rise between rates that lie farther apart a part
    counts. A loss that is not finite must have been given a number, such as the loss at initialization. NaN with no
    rate above the best one.
    """
    order = np.argsort(lr)
    log_n, loss_n = np.log10(np.asarray(lr, dtype=float))[order], np.asarray(loss, dtype=float)[order]
    best = int(np.argmin(loss_n))
    log_n, loss_n = log_n[best:], loss_n[best:]
    start_n = np.concatenate([log_n, log_n - SLOPE_OVER])  # the largest rise begins or ends at a rate that was tried
    rise_n = np.interp(start_n + SLOPE_OVER, log_n, loss_n) - np.interp(start_n, log_n, loss_n)
    return float(rise_n.max()) if len(log_n) > 1 else math.nan
