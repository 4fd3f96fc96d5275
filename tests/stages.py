"""Stages of a loss spike that begins in the embedding, told from its gradients and updates (Molybog et al. 2023)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.core.detectors import Numbers

# RMS of a healthy update, and below which a tensor hardly moves.
LEAST_HEALTHY, MOST_HEALTHY, FROZEN = 0.15, 0.35, 0.05
# The embedding has learned where its gradient, over that of the deep layers, falls to this share of what it once was.
REFERENCE_STEP, LEARNED = 500, 0.1
# The burst: the embedding's gradient grows by so much in so many steps, and so many of its updates are large.
GROWTH, WITHIN, LARGE_SHARE = 10.0, 5, 0.5


class Trace(NamedTuple):
    """Measurements ``[n]`` of a run, one row per training step.

    Attributes:
        step_n: training steps.
        embedding_n: RMS of the embedding's gradient.
        deep_n: RMS of the gradients of the deep layers.
        update_n: RMS of the embedding's update, before the learning rate.
        large_n: share of the embedding's update whose entries are above 0.8.
    """

    step_n: NDArray[np.int64]
    embedding_n: Numbers
    deep_n: Numbers
    update_n: Numbers
    large_n: Numbers


def first_steps(trace: Trace, beta2: float) -> dict[int, int]:
    """The training step at which each stage, 1 to 5, begins; a stage without the one before it does not count.

    1 healthy: the update's RMS is that of independent gradients.  2 learned: the embedding's gradient vanishes beside
    that of the deep layers.  3 frozen: its update stays small for the memory of the second moment, 1 / (1 - beta2).
    4 burst: its gradient returns at once and its updates are large.  5 recovery: the update's RMS is back.

    Without epsilon stage 3 is found too: the update is small until the second moment has followed the gradient.

    Args:
        trace: with a row at ``REFERENCE_STEP`` or later.
        beta2: of Adam.
    """
    first_row, begun = 0, dict[int, int]()
    for stage, holds_n in enumerate(_conditions(trace, beta2), 1):
        rows = np.flatnonzero(holds_n[first_row:])
        if not len(rows):
            break
        first_row += int(rows[0])
        begun[stage] = int(trace.step_n[first_row])
    return begun


def _conditions(trace: Trace, beta2: float) -> list[NDArray[np.bool_]]:
    """Whether each stage's condition holds ``[n]``."""
    update_n, below = trace.update_n, trace.update_n < MOST_HEALTHY
    is_later_n = trace.step_n >= REFERENCE_STEP
    ratio_n = trace.embedding_n / np.where(trace.deep_n > 0, trace.deep_n, math.nan)
    reference = ratio_n[is_later_n][0] if is_later_n.any() else math.nan
    grown_n = np.zeros(len(update_n), dtype=bool)
    for lag in range(1, WITHIN + 1):
        grown_n[lag:] |= trace.embedding_n[lag:] >= GROWTH * trace.embedding_n[:-lag]
    return [
        (update_n > LEAST_HEALTHY) & below,
        is_later_n & (ratio_n <= LEARNED * reference),
        _lasting(update_n < FROZEN, math.ceil(round(1 / (1 - beta2), 6))),
        grown_n & (trace.large_n >= LARGE_SHARE),
        below,
    ]


def _lasting(holds_n: NDArray[np.bool_], rows: int) -> NDArray[np.bool_]:
    """Where a condition has held for so many rows in a row."""
    last_break_n = np.maximum.accumulate(np.where(holds_n, -1, np.arange(len(holds_n))))
    lasting_n: NDArray[np.bool_] = np.arange(len(holds_n)) - last_break_n >= rows
    return lasting_n
