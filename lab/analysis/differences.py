"""Differences between two samples of seeds: an interval, an effect size, a test that they are as good as the same."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

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
        return Difference(float(moved.mean()), spread / math.sqrt(count), count - 1, _over(float(moved.mean()), spread))
    counts, variances = np.array([len(old), len(new)]), np.array([old.var(), new.var()]) + grain**2 / 12
    mean, errors, free = float(new.mean() - old.mean()), variances / counts, counts - 1
    spread = math.sqrt(float((free * variances).sum() / free.sum()))
    freedom = float(errors.sum() ** 2 / (errors**2 / free).sum()) if errors.any() else float(free.sum())
    return Difference(mean, math.sqrt(float(errors.sum())), freedom, _over(mean, spread))


def _over(mean: float, spread: float) -> float:
    return mean / spread if spread > 1e-9 * abs(mean) else math.nan  # of rounding alone there is no effect size
