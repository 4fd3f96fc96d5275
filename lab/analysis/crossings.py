"""The learning rate at which a quantity passes a level: interpolated between rates that were tried, and over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lab.analysis.statistics import FEWEST_SEEDS, Interval, student_t

SLOPE_OVER = 0.15  # decades around a crossing over which its slope is taken: the step of the grids of public runs


class Crossing(NamedTuple):
    """Where a quantity first passes a level.

    Attributes:
        log_at: log10 of the learning rate, interpolated; NaN where it lies outside what was tried.
        low: the last learning rate that was tried on this side of the level; 0 if already the first one lies beyond.
        high: the first that was tried beyond the level; infinite if none lies there.
        slope: what the quantity rises by per decade of learning rate, over ``SLOPE_OVER`` decades around the crossing:
            decades where it was interpolated in log-log, else its own unit; infinite where no finite value lies beyond.
        times: how often it passes the level upwards; more than once if it comes back in between, 0 for never.
    """

    log_at: float = math.nan
    low: float = 0.0
    high: float = math.inf
    slope: float = math.nan
    times: int = 0

    @property
    def at(self) -> float:
        """The learning rate of the crossing; NaN where it lies outside what was tried."""
        return float(10**self.log_at)

    @property
    def is_censored(self) -> bool:
        """Whether only one side of the crossing was tried."""
        return math.isnan(self.log_at)

    @property
    def log_bound(self) -> float:
        """``log_at``; where it is not known, log10 of the nearest learning rate that was tried."""
        return math.log10(self.low or self.high) if self.is_censored else self.log_at

    def log_or_beyond(self, step: float) -> float:
        """``log_bound``, but this many decades above the last learning rate that was tried if none lies beyond."""
        return self.log_bound + (0.0 if self.times else step)

    @property
    def width(self) -> float:
        """The width of the bracket, decades."""
        is_open = not 0 < self.low < self.high < math.inf
        return math.inf if is_open else float(np.log10(self.high) - np.log10(self.low))


def crossing(
    lr: ArrayLike,
    value: ArrayLike,
    level: float,
    *,
    start: float | None = None,
    below: bool = False,
    log: bool = False,
) -> Crossing:
    """Where ``value`` first exceeds ``level`` as the learning rate rises.

    Between two learning rates the value is interpolated linearly in the logarithm of the rate. A value that is not
    finite, such as that of a run that diverged or failed, lies beyond any level. No place between it and its neighbour
    is likelier than another, so the crossing is then the geometric middle of the two.

    Args:
        lr: learning rates, or anything else above zero, in any order.
        value: the quantity at each of them.
        level: in the unit of ``value``.
        start: the learning rate from which to look, such as the best one; by default the lowest.
        below: whether to look towards lower learning rates instead, from ``start`` or the highest.
        log: whether to interpolate the logarithm of the value, as suits one that grows like a power.
    """
    lr_n, value_n = np.asarray(lr, dtype=float), np.asarray(value, dtype=float)
    order = np.argsort(-lr_n if below else lr_n, kind="stable")
    if start is not None:
        order = order[(lr_n[order] <= start) if below else (lr_n[order] >= start)]
    lr_n, value_n = lr_n[order], np.where(np.isfinite(value_n), value_n, math.inf)[order]
    beyond_n = value_n > level
    rises = np.flatnonzero(beyond_n & ~np.r_[False, beyond_n[:-1]])
    if not len(lr_n):
        return Crossing()
    if not len(rises):
        return Crossing(high=float(lr_n[-1])) if below else Crossing(low=float(lr_n[-1]))
    after, times = int(rises[0]), len(rises)
    if not after:
        first = float(lr_n[0])
        return Crossing(low=first, times=times) if below else Crossing(high=first, times=times)
    with np.errstate(divide="ignore", invalid="ignore"):
        x_n, y_n = np.log10(lr_n), np.log10(value_n) if log else value_n
        limit = np.log10(level) if log else level
        share = (limit - y_n[after - 1]) / (y_n[after] - y_n[after - 1])
        share = share if np.isfinite(y_n[[after - 1, after]]).all() else 0.5
        log_at = float(x_n[after - 1] + share * (x_n[after] - x_n[after - 1]))
    low, high = sorted(map(float, lr_n[after - 1 : after + 1]))
    return Crossing(log_at, low, high, _slope(x_n, y_n, log_at, after), times)


def _slope(x_n: np.ndarray, y_n: np.ndarray, at: float, after: int) -> float:
    """The rise of ``y`` per unit of ``x``, over ``SLOPE_OVER`` around a place that lies before point ``after``."""
    if not np.isfinite(y_n[after]):
        return math.inf
    finite_n = np.isfinite(y_n)
    x_n, y_n = x_n[finite_n], y_n[finite_n]
    if x_n[0] > x_n[-1]:
        x_n, y_n = x_n[::-1], y_n[::-1]
    ends = np.clip([at - SLOPE_OVER / 2, at + SLOPE_OVER / 2], x_n[0], x_n[-1])
    return float(np.diff(np.interp(ends, x_n, y_n))[0] / np.diff(ends)[0]) if ends[1] > ends[0] else math.nan


def failing(lr: ArrayLike, loss: ArrayLike, rise: float) -> Crossing:
    """Where the loss, above its best learning rate, first exceeds the best loss by ``rise``; never if none is finite.

    Of equally good learning rates the lowest counts as the best.
    """
    lr_n, loss_n = np.asarray(lr, dtype=float), np.asarray(loss, dtype=float)
    if not np.isfinite(loss_n).any():
        return Crossing(high=float(lr_n.min(initial=math.inf)), times=int(len(lr_n) > 0))
    best = np.lexsort([lr_n, np.where(np.isfinite(loss_n), loss_n, math.inf)])[0]
    return crossing(lr_n, loss_n, float(loss_n[best]) + rise, start=float(lr_n[best]))


def halving_lrs(crossings: Iterable[Crossing], width: float) -> list[float]:
    """The learning rates that halve the brackets of crossings that are wider than this (decades), the widest first.

    They are geometric means, rounded to three digits, so that whoever asks again gets the same ones.
    """
    brackets = {(found.low, found.high): found.width for found in crossings if width < found.width < math.inf}
    ordered = sorted(brackets, key=lambda bracket: (-brackets[bracket], bracket))
    middles = [(low, float(f"{math.sqrt(low * high):.3g}"), high) for low, high in ordered]
    return list(dict.fromkeys(middle for low, middle, high in middles if low < middle < high))


def over_seeds(crossings: Sequence[Crossing]) -> Interval:
    """The learning rate of a crossing over seeds, with its interval.

    From three seeds on it is Student's 95 % interval, of logarithms, with the variance of a place inside the brackets
    added. With fewer, or where some crossing lies outside what was tried, it is what all brackets cover together: from
    0, or to infinity, if one of them is open. The mean is NaN then.
    """
    logs = [found.log_at for found in crossings]
    n = len(crossings)
    if n < FEWEST_SEEDS or any(found.is_censored for found in crossings):
        low = min((found.low for found in crossings), default=0.0)
        high = max((found.high for found in crossings), default=math.inf)
        mean = float(10 ** np.mean(logs)) if n else math.nan
        return Interval(mean, low, high, n, tuple(found.at for found in crossings))
    resolution = math.sqrt(np.mean([found.width**2 for found in crossings]))
    decades = student_t(logs, resolution=resolution)
    mean, low, high = (float(10**number) for number in decades[:3])
    return Interval(mean, low, high, n, tuple(found.at for found in crossings), decades.error)


def rate_text(rate: Interval) -> str:
    """``0.037 [0.031, 0.043]``; ``> 0.3`` or ``< 0.001`` where it lies outside what was tried; of ``over_seeds``."""
    if not math.isnan(rate.mean):
        return f"{rate:[].3g}"
    if rate.low > 0:
        return f"> {rate.low:.3g}" if math.isinf(rate.high) else f"{rate.low:.3g} to {rate.high:.3g}"
    return "not known" if math.isinf(rate.high) else f"< {rate.high:.3g}"
