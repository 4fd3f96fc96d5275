"""What held-out losses show: that one has turned, since the run learns its text by heart, or that two of them part.

They part where the loss of the corpus as it is falls, and that of clean text does not. A corpus may have an artefact
that a model can predict, such as escape characters (Zhang et al. 2022, chronicles). Then its loss falls, and so does
the loss on held-out text of the same corpus, but the model learns nothing that holds elsewhere. Only held-out text
without the artefact shows it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view

from lab.core.windows import has_risen, noise_of

# Evaluations of a line through each of the two losses; and how many in a row must find them parted.
WINDOW, HELD = 20, 5
# The corpus's own loss falls by at least so many nats over the window, and by so many standard errors of the line. The
# clean one does not if, by as many standard errors, its fall is below this share of that.
LEAST_FALL, ERRORS, SHARE = 0.05, 4.0, 0.25
# A held-out loss has turned if it rises from its lowest value by this share of it, and by so many times its noise. Of a
# few evaluations, at least two after the lowest, each must be higher than the one before, and by more.
LEAST_TURN, TURN_NOISE, FEW, LEAST_OF_FEW = 0.01, 6.0, 8, 0.03


def parting(own: pd.Series, clean: pd.Series) -> pd.Series:
    """How much further apart the losses are than a window before, where they part; 0 where they do not.

    Args:
        own: held-out loss of the corpus as it is, nats/token, by step.
        clean: held-out loss of clean text, nats/token, by step.

    Returns:
        Nats/token by step, at the steps with both; each from this evaluation and earlier ones alone.
    """
    both = pd.concat({"own": own, "clean": clean}, axis=1).replace([np.inf, -np.inf], np.nan).dropna()
    if len(both) < WINDOW:
        return pd.Series(0.0, both.index)
    own_fall, own_error, own_gain = _falls(both["own"])
    clean_fall, clean_error, clean_gain = _falls(both["clean"])
    falls = (own_fall - ERRORS * own_error > LEAST_FALL) & (own_gain > LEAST_FALL)
    parts = falls & (clean_fall + ERRORS * clean_error < SHARE * own_fall) & (clean_gain < SHARE * own_gain)
    return (own_fall - clean_fall).where(parts.rolling(HELD).sum() == HELD, 0.0)


def _falls(losses: pd.Series) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Of the window that ends at each evaluation the fall of the least-squares line and its standard error.

    And the gain: by how much the lowest mean of ``HELD`` losses so far is below that of a window before. A loss that
    drifts to and fro falls at times, but gains little.
    """
    window_nw = sliding_window_view(losses.to_numpy(), WINDOW)
    place_w = np.arange(WINDOW) - (WINDOW - 1) / 2
    square = float(place_w @ place_w)
    slope_n = window_nw @ place_w / square
    miss_nw = window_nw - window_nw.mean(axis=1, keepdims=True) - slope_n[:, None] * place_w
    error_n = np.sqrt((miss_nw**2).sum(axis=1) / (WINDOW - 2) / square)
    rows = losses.index[WINDOW - 1 :]
    fall, error = (pd.Series((WINDOW - 1) * each, rows).reindex(losses.index) for each in (-slope_n, error_n))
    lowest = losses.rolling(HELD).mean().cummin()
    return fall, error, lowest.shift(WINDOW) - lowest


class Turn(NamedTuple):
    """The step of the lowest held-out loss, that loss, and the one at the end."""

    step: int
    lowest: float
    last: float


def turn(held_out: pd.Series, training: pd.Series) -> Turn | None:
    """Where a held-out loss has turned while the training loss falls; None if it has not. Both are indexed by step."""
    known = held_out[np.isfinite(held_out)]
    row = int(known.to_numpy().argmin()) if len(known) else 0
    step, lowest, later_n = int(known.index[row]) if len(known) else 0, float(known.min()), known.to_numpy()[row + 1 :]
    if len(later_n) < 2:
        return None
    if len(known) < FEW:
        has_turned = bool((np.diff(later_n) > 0).all()) and later_n[-1] - lowest > LEAST_OF_FEW * abs(lowest)
    else:
        earlier, last = (float(np.median(half_n)) for half_n in np.array_split(later_n, 2))
        least = max(LEAST_TURN * abs(lowest), TURN_NOISE * noise_of(known.to_numpy()))
        has_turned = len(later_n) > 2 and earlier < last and float(np.median(later_n[-3:])) - lowest > least
    before, after = training[training.index <= step], training[training.index > step]
    falls = has_risen(-before.to_numpy(), -after.to_numpy(), rows=max(1, min(10, len(after) // 3)))
    return Turn(step, lowest, float(later_n[-1])) if has_turned and falls else None
