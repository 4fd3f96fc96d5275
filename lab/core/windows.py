"""Medians and deviations of moving windows of measurements."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# Flagged measurements that are closer than this belong to one event.
MERGE = 20
# Measurements before another that say what is usual, and the fewest finite ones among them that do.
WINDOW, FEWEST = 100, 20
NORMAL = 1.4826  # from median absolute deviation to standard deviation, of a normal distribution


def window_statistics(window_nw: Numbers, fewest: int = FEWEST) -> tuple[Numbers, Numbers]:
    """Median and scaled median absolute deviation ``[n]`` of each window; NaN where fewer than ``fewest`` are finite.

    Args:
        window_nw: measurements; those that are not finite do not count.
    """
    finite_nw = np.where(np.isfinite(window_nw), window_nw, math.nan)
    count_n = np.isfinite(finite_nw).sum(1)
    median_n = finite_median(finite_nw, count_n)
    deviation_n = NORMAL * finite_median(np.abs(finite_nw - median_n[:, None]), count_n)
    enough_n = count_n >= fewest
    return np.where(enough_n, median_n, math.nan), np.where(enough_n, deviation_n, math.nan)


def finite_median(number_nw: Numbers, count_n: NDArray[np.int64]) -> Numbers:
    """The median of the ``count_n`` finite numbers of each row; NaN in a row without any.

    Before the rows there may be other axes, over which the counts are the same.
    """
    sorted_nw = np.sort(number_nw, axis=-1)  # NaN comes last
    rows = np.arange(len(count_n))
    lower_n, upper_n = sorted_nw[..., rows, np.maximum(count_n - 1, 0) // 2], sorted_nw[..., rows, count_n // 2]
    middle_n: Numbers = (lower_n + upper_n) / 2
    return middle_n


def before(value_n: Numbers) -> tuple[Numbers, Numbers]:
    """Median and scaled median absolute deviation ``[n]`` of the ``WINDOW`` measurements before each.

    NaN where fewer than ``FEWEST`` of these are finite.
    """
    padded = np.concatenate([np.full(WINDOW, math.nan), value_n])[:-1]
    return window_statistics(sliding_window_view(padded, WINDOW))


def noise_of(value_n: Numbers, order: int = 2) -> float:
    """The standard deviation of measurements about a smooth course, by their differences of this order."""
    growth = math.sqrt(math.comb(2 * order, order))  # these hold so many times the noise of a measurement
    return NORMAL * float(np.median(np.abs(np.diff(value_n[np.isfinite(value_n)], order)))) / growth


def has_risen(before_n: Numbers, after_n: Numbers, rows: int = 10) -> bool:
    """Whether the median of the last ``rows`` of some measurements exceeds that of the last ones before them.

    By three standard errors, of the noise from row to row. What is not finite does not count.
    """
    before_n, after_n = (each_n[np.isfinite(each_n)] for each_n in (before_n, after_n))
    if not len(before_n) or not len(after_n):
        return False
    change_n = np.diff(np.concatenate([before_n, after_n]))
    noise = NORMAL * float(np.median(np.abs(change_n - np.median(change_n)))) / math.sqrt(2)
    before_n, after_n = before_n[-rows:], after_n[-rows:]
    error = noise * math.sqrt(math.pi / 2 * (1 / len(before_n) + 1 / len(after_n)))
    return bool(np.median(after_n) - np.median(before_n) > 3 * error)
