"""Fits of steps and of best learning rates against batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy  # its parts are loaded when they are used
from numpy.typing import ArrayLike, NDArray

from lab.analysis.statistics import Interval

LEVEL = 0.95
# Fewest batch sizes of a curve; with fewer its interval means nothing.
FEWEST_BATCHES = 4
# This far outside the batch sizes (natural log) a curve equals its asymptote in double precision.
FAR = -math.log(np.finfo(float).eps)
# A minimum is searched on a grid of ``GRID`` points, and ``ZOOMS`` times between the neighbours of the best point.
GRID, ZOOMS = 101, 8
# The least misfit: rounding errors of logarithms in double precision.
ROUNDING = 1e-12

Numbers = NDArray[np.float64]


class SaturatingCurve(NamedTuple):
    """A law ``floor * (1 + scale / batch)`` or ``ceiling / (1 + scale / batch)`` fitted in log space.

    Attributes:
        limit: the value at infinite batch.
        scale: the batch size at which the value is twice, or half, its limit.
        low: lower end of the 95 % interval of the scale; zero if the batch sizes do not bound it from below.
        high: its upper end; infinite if they do not bound it from above.
        rms_log_error: root mean square of the residuals, natural log.
    """

    limit: float
    scale: float
    low: float
    high: float
    rms_log_error: float

    @property
    def is_bounded(self) -> bool:
        """Whether the batch sizes bound the scale from both sides; otherwise it has no estimate."""
        return self.low > 0 and math.isfinite(self.high)

    @property
    def scale_text(self) -> str:
        """The scale in words: ``30 [20, 50] sequences``, or which side of its interval is unbounded."""
        if self.is_bounded:
            return f"{Interval(self.scale, self.low, self.high):.3g} sequences"
        if self.low > 0:
            return f"above {self.low:.3g} sequences (95 % interval, unbounded above)"
        if math.isfinite(self.high):
            return f"below {self.high:.3g} sequences (95 % interval, unbounded below)"
        return "unknown (95 % interval, unbounded on both sides)"


def steps_curve(batch_sizes: ArrayLike, steps: ArrayLike) -> SaturatingCurve:
    """Fit ``S = S_min (1 + B_crit / B)`` to steps to a target (McCandlish et al. 2018, eq. 2.11).

    The interval comes from the profile likelihood, for log-normal errors (Bates and Watts 1988, Nonlinear Regression
    Analysis and Its Applications, sec. 6.1). It holds every scale whose sum of squares, minimized over the limit, does
    not exceed the least one by more than a Student t allows. It is unbounded if steps still halve at the largest
    batches, or never begin to fall.

    Args:
        batch_sizes: at least ``FEWEST_BATCHES`` batch sizes.
        steps: the steps that each took, with the learning rate tuned.

    Raises:
        ValueError: too few batch sizes, or a number that is not positive.
    """
    return _fit(batch_sizes, steps, lambda log_ratio: np.logaddexp(0.0, log_ratio))


def learning_rate_curve(batch_sizes: ArrayLike, learning_rates: ArrayLike) -> SaturatingCurve:
    """Fit ``lr = lr_max / (1 + B_noise / B)`` to best learning rates (McCandlish et al. 2018, sec. 2.2).

    Arguments and errors are as in ``steps_curve``.
    """
    return _fit(batch_sizes, learning_rates, lambda log_ratio: -np.logaddexp(0.0, log_ratio))


def _fit(batch_sizes: ArrayLike, values: ArrayLike, shape: Callable[[Numbers], Numbers]) -> SaturatingCurve:
    """Fit ``log value = log limit + shape(log scale - log batch)``.

    For a given scale the limit is a mean, so only the scale is searched. The interval holds every scale that a t-test
    does not reject.
    """
    batch_n, value_n = np.asarray(batch_sizes, dtype=float), np.asarray(values, dtype=float)
    if len(batch_n) < FEWEST_BATCHES or batch_n.shape != value_n.shape:
        raise ValueError(f"{len(value_n)} values at {len(batch_n)} batch sizes; a curve takes {FEWEST_BATCHES} of each")
    if not (np.isfinite(value_n).all() and (value_n > 0).all() and (batch_n > 0).all()):
        raise ValueError("batch sizes and values must be positive numbers")
    log_b, log_y = np.log(batch_n), np.log(value_n)

    def log_limits(log_scale_k: Numbers) -> Numbers:
        log_limit_kn: Numbers = log_y - shape(log_scale_k[:, None] - log_b)
        return log_limit_kn

    def misfit(log_scale_k: Numbers) -> Numbers:
        variance_k: Numbers = log_limits(log_scale_k).var(axis=1)
        return variance_k

    ends = float(log_b.min()) - FAR, float(log_b.max()) + FAR
    best = _least(misfit, *ends)
    least, freedom = float(misfit(np.array([best]))[0]), len(batch_n) - 2
    most = max(least, ROUNDING**2) * (1 + float(scipy.special.stdtrit(freedom, (1 + LEVEL) / 2)) ** 2 / freedom)
    low, high = (
        unbounded if misfit(np.array([end]))[0] <= most else _boundary(misfit, most, end, best)
        for end, unbounded in zip(ends, (-math.inf, math.inf), strict=True)
    )
    limit = math.exp(float(log_limits(np.array([best])).mean()))
    return SaturatingCurve(limit, math.exp(best), math.exp(low), math.exp(high), math.sqrt(least))


def _least(misfit: Callable[[Numbers], Numbers], low: float, high: float) -> float:
    """The point with the least misfit, searched on ever finer grids."""
    for _ in range(ZOOMS):
        grid = np.linspace(low, high, GRID)
        best = int(misfit(grid).argmin())
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, GRID - 1)])
    return float(grid[best])


def _boundary(misfit: Callable[[Numbers], Numbers], most: float, outside: float, inside: float) -> float:
    """The number nearest to ``outside`` whose misfit is at most ``most``."""
    for _ in range(ZOOMS):
        grid = np.linspace(outside, inside, GRID)
        first = max(int((misfit(grid) <= most).argmax()), 1)
        outside, inside = float(grid[first - 1]), float(grid[first])
    return inside
