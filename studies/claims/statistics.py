"""Statistics of claims: shares of what is alike within a seed, effects of levels, and how many claims may be false."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used
from numpy.typing import ArrayLike

from lab.analysis.statistics import FEWEST_SEEDS, Interval
from labwatch.events.scores import share_interval


def share_of_clusters(hits: Sequence[float], trials: Sequence[float], minus: float = 0.0) -> Interval:
    """Exact 95 % interval of the share of hits in all trials, which are alike within a cluster, such as a seed.

    The share counts as one in fewer trials: these have, drawn independently, the variance that it has between clusters.

    Args:
        hits: one number per cluster.
        trials: likewise; clusters without a trial count in ``n`` alone.
        minus: what is subtracted from the share and from the ends of its interval.

    References:
        Korn and Graubard 1998, Confidence intervals for proportions with small expected number of positive counts
        estimated from survey data, Survey Methodology 24, 193-201: Clopper and Pearson's on the effective trials.
    """
    hits_s, trials_s, n = np.asarray(hits, dtype=float), np.asarray(trials, dtype=float), len(hits)
    every = float(trials_s.sum())
    if not every:
        return Interval(math.nan, math.nan, math.nan, n)
    share = float(hits_s.sum()) / every
    values = tuple((hits_s / np.where(trials_s > 0, trials_s, math.nan) - minus).tolist())
    if n < FEWEST_SEEDS:
        return Interval(share - minus, math.nan, math.nan, n, values)
    alone = share * (1 - share) / every
    between = float(((hits_s - share * trials_s) ** 2).sum()) * n / (n - 1) / every**2
    effective = every * min(1.0, alone / between) if between else every
    _, low, high, _ = share_interval(share * effective, effective)[:4]
    error = math.sqrt(max(alone, between))
    return Interval(share - minus, low - minus, high - minus, n, values, error, share * effective, effective, minus)


def effects_of_levels(levels: Mapping[str, ArrayLike], response: ArrayLike) -> dict[str, Interval]:
    """By how much the high level of each setting moves a response, by least squares, with 95 % Student-t intervals.

    What the settings leave unexplained tells the error; the intervals are infinite if no degree of freedom is left.

    Args:
        levels: -1 or 1 in each row of the design, by setting.
        response: in each row.

    Returns:
        The effects, whose ``n`` is one more than the degrees of freedom of their error.
    """
    value = np.asarray(response, dtype=float)
    design = np.column_stack([np.ones(len(value)), *levels.values()])
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ value
    freedom = len(value) - int(np.linalg.matrix_rank(design))
    variance = float(np.sum((value - design @ fitted) ** 2)) / freedom if freedom else math.inf
    quantile = float(scipy.special.stdtrit(max(freedom, 1), 0.975))
    errors = 2 * np.sqrt(variance * np.diag(inverse))
    return {
        name: Interval.around(2 * fitted[place], quantile * errors[place], freedom + 1, (), errors[place])
        for place, name in enumerate(levels, 1)
    }


def benjamini_hochberg(ps: Sequence[float]) -> list[float]:
    """The q values of several tests: of those below a level, at most that share is expected to be false rejections.

    NaN is no test: it stays NaN, and the others are adjusted as if it were not there.

    References:
        Benjamini and Hochberg 1995, Controlling the false discovery rate,
        https://doi.org/10.1111/j.2517-6161.1995.tb02031.x.
    """
    tests = pd.Series(list(ps), dtype=float).dropna().sort_values(ascending=False)
    adjusted = (tests * len(tests) / np.arange(len(tests), 0, -1)).clip(upper=1.0).cummin()
    return list(adjusted.reindex(range(len(ps))).tolist())
