"""Events of rows that are flagged: those close together are one, or medians of many rows must stay beyond a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.analysis.spikes.trend import Span
from lab.core.windows import MERGE, Numbers

# What drifts is judged by medians over so many rows.
DRIFT_ROWS = 50


def runs(flagged_n: NDArray[np.bool_], usual_n: Numbers | float) -> Iterator[Span]:
    """Events of flagged rows, those closer than ``MERGE`` together, and what is usual at the first row of each."""
    row, usual_n = 0, np.broadcast_to(usual_n, flagged_n.shape)
    while len(ahead := np.flatnonzero(flagged_n[row:])):
        first = last = row + int(ahead[0])
        while len(near := np.flatnonzero(flagged_n[last + 1 : last + MERGE])):
            last += 1 + int(near[-1])
        yield Span(first, last, float(usual_n[first]))
        row = last + 1


def lasting_medians(
    value_n: Numbers, beyond: Callable[[Numbers], tuple[NDArray[np.bool_], Numbers]], rows: int = DRIFT_ROWS
) -> Iterator[Span]:
    """Where medians over so many finite rows stay beyond the usual one for as many rows again.

    ``beyond`` says of the medians which of them are, and what is usual at each.
    """
    known_n = np.flatnonzero(np.isfinite(value_n))
    if len(known_n) < 2 * rows:
        return
    median_n = np.median(sliding_window_view(value_n[known_n], rows), axis=1)
    for span in runs(*beyond(median_n)):
        if span.last - span.first >= rows:
            first, last = (int(known_n[row + rows - 1]) for row in (span.first, span.last))
            yield Span(first, last, span.usual)
