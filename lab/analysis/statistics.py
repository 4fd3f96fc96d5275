"""Statistics over seeds: intervals of a mean, differences of two samples, equivalence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

FEWEST_SEEDS = 3


class Interval(NamedTuple):
    """Mean over ``n`` seeds with its Student-t interval; ``low`` and ``high`` are NaN below three seeds."""

    mean: float
    low: float
    high: float
    n: int
    values: tuple[float, ...] = ()

    @property
    def bare(self) -> str:
        """Mean and half width, or the values themselves below three seeds; to stand beside a column ``n``."""
        if self.n < FEWEST_SEEDS:
            return ", ".join(f"{value:.3f}" for value in self.values) or "undefined"
        return f"{self.mean:.3f} ± {self.high - self.mean:.3f}"

    @property
    def dz(self) -> float:
        """Mean over standard deviation, of paired differences Cohen's d_z; NaN below three seeds or without spread."""
        spread = float(np.std(self.values, ddof=1)) if self.n >= FEWEST_SEEDS else 0.0
        return self.mean / spread if spread else math.nan

    def __str__(self) -> str:
        return f"{self.bare} (n = {self.n})"

    def __neg__(self) -> Interval:
        return Interval(-self.mean, -self.high, -self.low, self.n, tuple(-value for value in self.values))


def student_t(values: Iterable[float], level: float = 0.95, grain: float = 0.0) -> Interval:
    """Interval of the mean of ``values``, one per seed; NaN is no value.

    Args:
        grain: step to which the values are known, in their unit. The variance of that rounding is added, so values on
            a grid have an interval even where all are equal.
    """
    known = np.array([value for value in values if not math.isnan(value)], dtype=float)
    n, shown = len(known), tuple(known.tolist())
    mean = float(known.mean()) if n else math.nan
    if n < FEWEST_SEEDS:
        return Interval(mean, math.nan, math.nan, n, shown)
    spread = math.sqrt(float(known.var(ddof=1)) + grain**2 / 12)
    half = float(stdtrit(n - 1, (1 + level) / 2)) * spread / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, shown)


LEVEL = 0.90


class Difference(NamedTuple):
    """Mean of a second sample minus that of a first: its standard error, degrees of freedom, Cohen's d."""

    mean: float
    error: float
    freedom: float
    effect: float

    @property
    def low(self) -> float:
        """Lower end of the 90 % interval."""
        return self.mean - self._half

    @property
    def high(self) -> float:
        """Upper end of the 90 % interval."""
        return self.mean + self._half

    @property
    def _half(self) -> float:
        return float(stdtrit(self.freedom, (1 + LEVEL) / 2)) * self.error if self.error else 0.0

    def equivalence(self, margin: float) -> float:
        """The larger p of two one-sided t-tests against a change of ``margin`` up or down (Schuirmann 1987)."""
        if not self.error:
            return 0.0 if abs(self.mean) < margin else 1.0
        return float(stdtr(self.freedom, (abs(self.mean) - margin) / self.error))


def difference(old: pd.Series, new: pd.Series, grain: float = 0.0) -> Difference:
    """Paired by seed where both have the same ones; else Welch's.

    Values that are known to steps of ``grain`` only spread by as much as that leaves open, even where all are equal.
    """
    if set(old.index) == set(new.index):
        moved = (new - old).to_numpy(dtype=float)
        spread, count = math.sqrt(float(moved.var(ddof=1)) + grain**2 / 6), len(moved)
        return Difference(
            float(moved.mean()), spread / math.sqrt(count), count - 1, _ratio(float(moved.mean()), spread)
        )
    counts, variances = np.array([len(old), len(new)]), np.array([old.var(), new.var()]) + grain**2 / 12
    mean, errors, free = float(new.mean() - old.mean()), variances / counts, counts - 1
    spread = math.sqrt(float((free * variances).sum() / free.sum()))
    freedom = float(errors.sum() ** 2 / (errors**2 / free).sum()) if errors.any() else float(free.sum())
    return Difference(mean, math.sqrt(float(errors.sum())), freedom, _ratio(mean, spread))


def _ratio(mean: float, spread: float) -> float:
    return mean / spread if spread > 1e-9 * abs(mean) else math.nan  # of rounding alone there is no effect size
