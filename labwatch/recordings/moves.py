"""Where a measurement leaves its own trend: by how much, against its own noise, and for how long."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lab.core.windows import MERGE, NORMAL, Numbers

# What is usual is the median of so many measurements before. A measurement has moved if its logarithm differs from that
# by so many scaled median absolute deviations of the ``PAST`` differences before it, by so many times the largest of
# these, and by this factor at least. Rows of earlier moves do not count, unless there were several.
USUAL, PAST = 5, 50
TINY = 1e-30  # what zero counts as
DEVIATIONS, TIMES_LARGEST, LEAST_FACTOR = 8.0, 2.0, 1.25
# Of few differences the largest says little, so it counts as if it were this much larger over their number.
UNCERTAINTY = 3.0


class Move(NamedTuple):
    """A measurement that left its trend.

    Attributes:
        quantity: its name in the recording.
        place: the part of the model; empty for the whole.
        row: at which it was first seen away, and ``end`` after the last row of it.
        end: see ``row``.
        value: the farthest one of its first ``USUAL`` rows.
        usual: the one that its trend had.
        deviations: its first distance from that, in scaled median absolute deviations of its own noise.
    """

    quantity: str
    place: str
    row: int
    end: int
    value: float
    usual: float
    deviations: float

    @property
    def change(self) -> float:
        """The logarithm of the factor by which it changed; infinite if it was zero or negative, or is not known."""
        if self.usual > 0 and self.value >= 0:
            return math.log(max(self.value, TINY) / self.usual)
        return -math.inf if self.value < self.usual else math.inf


def moves_of(quantity: str, place: str, value_m: Numbers, settled: int = 0) -> Iterator[Move]:
    """The moves of one measurement in the order of their rows; rows count in which it is positive and finite.

    And those in which it is zero after it was positive ``USUAL`` times. What it did up to the row ``settled`` is no
    noise, where ``USUAL`` rows or more came since.
    """
    is_positive_m = value_m > 0
    row_n = np.flatnonzero(
        np.isfinite(value_m) & (is_positive_m | ((value_m == 0) & (is_positive_m.cumsum() >= USUAL)))
    )
    log_n = np.log(np.maximum(value_m[row_n], TINY))
    if len(log_n) < 3:
        return
    usual_n = usual(log_n)
    size_n = np.abs(log_n - usual_n)
    calm_n = np.isfinite(size_n)
    least, at, earlier = math.log(LEAST_FACTOR), 0, list[int]()
    settled_n = int(np.searchsorted(row_n, settled, side="right"))
    for n in np.flatnonzero(size_n > least).tolist():
        if n < at:
            continue
        begin = max(settled_n if n - settled_n >= USUAL else 0, n - PAST)
        past = size_n[begin:n][calm_n[begin:n]]
        if not len(past):
            continue
        noise = NORMAL * float(np.median(past))
        largest = float(past.max())
        recent = [size_n[m] for m in earlier if n - m <= PAST]
        if len(recent) > 1:  # what moves again and again is noise
            largest = max(largest, min(recent))
        tolerance = max(DEVIATIONS * noise, TIMES_LARGEST * (1 + UNCERTAINTY / len(past)) * largest, least)
        if size_n[n] <= tolerance:
            continue
        sign = np.sign(log_n[n] - usual_n[n])
        away_n = sign * (log_n[n:] - usual_n[n]) > max(DEVIATIONS * noise, least)
        near_n = np.flatnonzero(~away_n[:-1] & ~away_n[1:])  # a single row may be near between two that are away
        end = n + (int(near_n[0]) if len(near_n) else len(away_n) - (not away_n[-1]))
        farthest = float(sign * np.max(sign * log_n[n : min(end, n + USUAL)]))
        last = int(row_n[end - 1]) + 1
        value = 0.0 if farthest <= math.log(TINY) else math.exp(farthest)
        deviations = float(size_n[n]) / noise if noise else math.inf
        yield Move(quantity, place, int(row_n[n]), last, value, math.exp(usual_n[n]), deviations)
        earlier.append(n)
        at = end + (USUAL // 2 + 1) * (end - n > USUAL // 2)  # the median is that of the move until then
        at = min(at, n + MERGE)  # what lasts longer has become usual
        calm_n[n:at] = False


def usual(log_n: Numbers) -> Numbers:
    """The median of the ``USUAL`` numbers before each, of fewer where there are fewer; NaN for the first."""
    padded_n = np.concatenate([np.full(USUAL, math.nan), log_n])[:-1]
    usual_n: Numbers = np.full(len(log_n), math.nan)
    usual_n[USUAL:] = np.median(sliding_window_view(padded_n, USUAL)[USUAL:], axis=1)
    usual_n[1:USUAL] = [np.median(log_n[:n]) for n in range(1, min(USUAL, len(log_n)))]
    return usual_n
