"""Where a curve has its optimum, finer than the grid, and what is measured around it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lab.analysis.curves import significant
from lab.analysis.sensitivity import HIGH, LOW, capped, split


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
