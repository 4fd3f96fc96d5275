"""What a loss spike is: the rule by which training acts on the loss and analysis counts its spikes in records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

# A spike rises above the median of the measurements before it by so many scaled median absolute deviations, and by so
# many nats.
WINDOW, FEWEST, DEVIATIONS, LEAST_RISE = 100, 20, 7.0, 0.1
# Flagged measurements that are closer than this belong to one event.
MERGE = 20
# A spike has recovered when the loss is back within so many deviations, in so many measurements.
BACK, PATIENCE = 2.0, 300
# Diverged: so many measurements in a row above the loss at the start, where the model guesses uniformly.
LOST_FOR = 100
# Stalled: so many measurements in a row at the floor or without an update; or overflows at the floor, in training.
STALLED_FOR, FLOOR_FOR = 100, 20
NORMAL = 1.4826  # from median absolute deviation to standard deviation, of a normal distribution
# What the events that a log is searched for are called, and the unit of their values.
LABELS = {
    "spike": ("loss spike", "loss, nats/token"),
    "gradient_spike": ("gradient spike", "gradient norm"),
    "norm_not_finite": ("gradient norm not finite", "gradient norm"),
    "norm_drift": ("drift of the gradient norm", "gradient norm"),
    "restart": ("goes back", "loss, nats/token"),
    "logit_growth": ("growth of attention logits", "largest\nattention logit"),
    "update_rms": ("large update", "update RMS"),
    "epsilon_ratio": ("epsilon above the gradients", "epsilon /\ngradient RMS"),
    "loss_scale": ("loss scale at its floor", "loss scale"),
    "curvature": ("curvature above limit", "curvature /\nlimit"),
    "parting": ("the two held-out losses part", "parting of\nheld-out losses,\nnats/token"),
    "logit_rounding": ("rounding of output logits", "cost of rounding,\nnats/token"),
}


class Span(NamedTuple):
    """An event in rows of a log: from ``first`` up to ``last``, with its ending at row ``end``."""

    first: int
    last: int
    usual: float
    ending: str = "none"
    end: int | None = None


def window_statistics(window_nw: Numbers, fewest: int = FEWEST) -> tuple[Numbers, Numbers]:
    """Median and scaled median absolute deviation ``[n]`` of each window; NaN where fewer than ``fewest`` are finite.

    Args:
        window_nw: measurements; those that are not finite do not count.
    """
    finite_nw = np.where(np.isfinite(window_nw), window_nw, math.nan)
    count_n = np.isfinite(finite_nw).sum(1)
    median_n = _finite_median(finite_nw, count_n)
    deviation_n = NORMAL * _finite_median(np.abs(finite_nw - median_n[:, None]), count_n)
    enough_n = count_n >= fewest
    return np.where(enough_n, median_n, math.nan), np.where(enough_n, deviation_n, math.nan)


def _finite_median(number_nw: Numbers, count_n: NDArray[np.int64]) -> Numbers:
    """The median of the ``count_n`` finite numbers of each row; NaN in a row without any."""
    rows, sorted_nw = np.arange(len(number_nw)), np.sort(number_nw, axis=1)  # NaN comes last
    lower_n, upper_n = sorted_nw[rows, np.maximum(count_n - 1, 0) // 2], sorted_nw[rows, count_n // 2]
    middle_n: Numbers = (lower_n + upper_n) / 2
    return middle_n


@dataclass
class SpikeWatch:
    """Follows the loss of one run and says when it spikes and how each spike ends.

    A loss that is not finite is a spike that ends as ``diverged``.

    Attributes:
        row: the last measurement.
        first: row at which the spike under way began; -1 without one.
        last: the last row that belongs to a spike.
        begins: whether a spike began at ``row``.
    """

    row: int = -1
    first: int = -1
    last: int = -MERGE
    begins: bool = False
    at_start: float = math.inf
    median: float = math.nan
    deviation: float = math.nan
    usual: float = math.nan
    calm: float = math.nan
    above: int = 0

    def add(self, loss: float, median: float, deviation: float) -> Span | None:
        """Read a loss, and the median and deviation of those before it; returns the spike that ends here, if any."""
        self.row += 1
        if math.isinf(self.at_start) and math.isfinite(loss):
            self.at_start = loss
        if math.isfinite(median):
            self.median = median
        if math.isfinite(deviation):
            self.deviation = deviation
        self.begins = self.first < 0 and self._is_new(loss, median, deviation)
        if self.begins:
            self.first, self.usual, self.above = self.row, self.median, 0
            self.calm = self.median + max(BACK * self.deviation, 0.0)
        return self._ended(loss) if self.first >= 0 else None

    def forget(self) -> None:
        """Drop the spike under way, and the last one: training went back to before them."""
        self.first, self.last = -1, self.row - MERGE

    def _is_new(self, loss: float, median: float, deviation: float) -> bool:
        """Whether a row outside a spike begins one; a high row soon after the last spike still belongs to it."""
        is_above = loss > median + DEVIATIONS * deviation and loss - median > LEAST_RISE
        is_high = is_above or not math.isfinite(loss)
        if is_high and self.row - self.last < MERGE:
            self.last = self.row
            return False
        return is_high

    def _ended(self, loss: float) -> Span | None:
        self.last = self.row
        self.above = self.above + 1 if loss > self.at_start else 0
        if not math.isfinite(loss) or self.above >= LOST_FOR:
            ending = "diverged"
        elif loss <= self.calm:
            ending = "recovered"
        elif self.row - self.first >= PATIENCE and not self.above:
            ending = "stuck"
        else:
            return None
        span = Span(self.first, self.row, self.usual, ending, self.row)
        self.first = -1
        return span


def before(value_n: Numbers) -> tuple[Numbers, Numbers]:
    """Median and scaled median absolute deviation ``[n]`` of the ``WINDOW`` measurements before each.

    NaN where fewer than ``FEWEST`` of these are finite.
    """
    padded = np.concatenate([np.full(WINDOW, math.nan), value_n])[:-1]
    return window_statistics(sliding_window_view(padded, WINDOW))


def loss_spikes(loss_n: Numbers) -> Iterator[Span]:
    """Spikes of the loss, with their endings; a loss that is not finite, or stays above the first one, diverged."""
    median_n, deviation_n = before(loss_n)
    watch = SpikeWatch()
    for loss, median, deviation in zip(loss_n.tolist(), median_n.tolist(), deviation_n.tolist(), strict=True):
        span = watch.add(loss, median, deviation)
        if span:
            yield span
    if watch.first >= 0:
        yield Span(watch.first, watch.row, watch.usual)
