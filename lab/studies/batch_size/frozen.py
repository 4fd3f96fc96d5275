"""Best single steps from a frozen checkpoint: the step that lowers the loss most, and how it grows with the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

FEWEST_BATCHES = 3


class BestStep(NamedTuple):
    """The best single step along gradients of one batch size.

    Attributes:
        size: the step size, as a learning rate of plain gradient descent.
        gain: the fall of the loss, nats per token.
    """

    size: float
    gain: float


class FrozenLaw(NamedTuple):
    """``limit / (1 + scale / batch)``, fitted as a straight line through the reciprocals.

    Attributes:
        limit: the value at infinite batch.
        scale: B_noise, in units of the batch sizes.
        r_squared: share of the variance of the reciprocals that the line explains.
    """

    limit: float
    scale: float
    r_squared: float


def best_step(sizes: ArrayLike, losses: ArrayLike, start: float) -> BestStep:
    """Fit ``start - a e + b e**2 / 2`` to the loss after steps ``e`` (McCandlish et al. 2018, sec. 2.2).

    Args:
        sizes: at least two step sizes.
        losses: the losses after these steps, means over batches.
        start: the loss before the step.

    Returns:
        ``a / b`` and ``a**2 / (2 b)``; NaN unless the loss falls at first and bends upwards.
    """
    size_n, loss_n = np.asarray(sizes, dtype=float), np.asarray(losses, dtype=float)
    terms = np.stack([-size_n, size_n**2 / 2], axis=1)
    fall, bend = np.linalg.lstsq(terms / size_n.max(), (loss_n - start) / size_n.max(), rcond=None)[0]
    if not (fall > 0 and bend > 0):
        return BestStep(math.nan, math.nan)
    return BestStep(float(fall / bend), float(fall**2 / bend / 2))


def frozen_law(values: Mapping[float, float]) -> FrozenLaw:
    """Fit a straight line of ``1 / value`` over ``1 / batch`` (McCandlish et al. 2018, sec. 2.2).

    Weights make relative errors of the values count equally. NaN values are left out.

    Args:
        values: best steps or gains, by batch size.

    Raises:
        ValueError: fewer than ``FEWEST_BATCHES`` batch sizes have a value.
    """
    finite = {batch: value for batch, value in values.items() if math.isfinite(value)}
    if len(finite) < FEWEST_BATCHES:
        raise ValueError(f"{len(finite)} batch sizes have a best step, a law takes {FEWEST_BATCHES}")
    x, y = 1 / np.array(list(finite), dtype=float), 1 / np.array(list(finite.values()), dtype=float)
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    weights = 1 / y**2
    mean = np.average(y, weights=weights)
    spread = float((weights * (y - mean) ** 2).sum())
    missed = float((weights * (y - intercept - slope * x) ** 2).sum())
    limit, scale = (1 / intercept, slope / intercept) if intercept > 0 else (math.inf, math.inf)
    return FrozenLaw(float(limit), float(scale), 1 - missed / spread if spread > 0 else math.nan)
