"""Power laws of a limit that is known to lie between two values that were tried, or beyond all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used
from numpy.typing import NDArray

from lab.analysis.laws.fits import Crossing
from lab.analysis.statistics import Interval, t_quantile

Floats = NDArray[np.float64]
LEAST_SCATTER = 1e-2  # decades, since a law that meets all brackets would have none
MOST_ROUNDS, CONVERGED = 300, 1e-5
FARTHEST = 1e3  # standard deviations, where the density is 0


class PowerLaw(NamedTuple):
    """``log10 limit = height + sum of exponents * log10(x / centre)``.

    Attributes:
        exponents: by the name of what the limit is a power of.
        centres: the value of each at which ``height`` is the limit.
        covariance: of the height and the exponents.
        scatter: standard deviation of one curve about the law, decades.
        freedom: degrees of freedom of all this.
    """

    height: float
    exponents: Mapping[str, float]
    centres: Mapping[str, float]
    covariance: Sequence[Sequence[float]]
    scatter: float
    freedom: int

    def exponent(self, name: str) -> Interval:
        """An exponent with its 95 % Student-t interval."""
        place = 1 + list(self.exponents).index(name)
        error = math.sqrt(self.covariance[place][place])
        return Interval.around(self.exponents[name], t_quantile(self.freedom) * error, self.freedom + 1, (), error)

    def predict(self, values: Mapping[str, float], offset: float = 0.0, error: float = 0.0) -> Crossing:
        """The limit of one new curve, with its 95 % Student-t prediction interval.

        Args:
            values: of what the limit is a power of.
            offset: decades by which another kind of curve lies above those fitted, with its standard ``error``.
        """
        x = np.array([1.0, *(math.log10(values[name] / centre) for name, centre in self.centres.items())])
        middle = self.height + float(x[1:] @ [*self.exponents.values()]) + offset
        variance = float(x @ np.array(self.covariance) @ x) + self.scatter**2 + error**2
        half = t_quantile(self.freedom) * math.sqrt(variance)
        return Crossing(10**middle, 10 ** (middle - half), 10 ** (middle + half))


def fit_power_law(curves: pd.DataFrame, over: Sequence[str], groups: pd.Series, *, equal: bool = False) -> PowerLaw:
    """Fit a power law to brackets, by the likelihood of a normal scatter in log10.

    Errors are those of leaving out one group at a time, since curves of a group are alike (Quenouille's jackknife). A
    value may lie anywhere in its bracket, and the variance of that is added, as ``student_t`` adds a resolution: to the
    scatter, and to the errors as if a group had one curve.

    Args:
        curves: a row each, with the columns that the limit is a power of, and ``low`` and ``high``, between which it
            lies; one of them may be 0 or infinite.
        over: these columns.
        groups: the group of each row.
        equal: whether all groups count equally, however many curves they have.

    Raises:
        ValueError: there are not more groups than exponents, with one for the height.
    """
    centres = {name: float(10 ** np.log10(curves[name]).mean()) for name in over}
    x_nk = np.column_stack([np.ones(len(curves)), *(np.log10(curves[name] / at) for name, at in centres.items())])
    with np.errstate(divide="ignore"):
        low_n, high_n = (np.log10(curves[end].to_numpy(dtype=float)) for end in ("low", "high"))
    share_n = 1 / groups.groupby(groups).transform("size").to_numpy(dtype=float)
    weight_n = share_n if equal else np.ones(len(curves))
    names, freedom = sorted(groups.unique()), groups.nunique() - x_nk.shape[1]
    if freedom < 1:
        raise ValueError(f"{len(names)} groups of curves, and {x_nk.shape[1]} numbers to fit")
    whole_k, scatter = _most_likely(x_nk, low_n, high_n, weight_n)
    parts_gk = np.array(
        [
            _most_likely(x_nk[kept], low_n[kept], high_n[kept], weight_n[kept], whole_k, scatter)[0]
            for kept in ((groups != name).to_numpy() for name in names)
        ]
    )
    away_gk = parts_gk - parts_gk.mean(0)
    width_n = (high_n - low_n)[np.isfinite(high_n - low_n)]
    resolution = float((width_n**2).mean()) / 12 if len(width_n) else 0.0
    covariance = (len(names) - 1) / len(names) * away_gk.T @ away_gk
    covariance += resolution * np.linalg.inv(x_nk.T @ (share_n[:, None] * x_nk))
    return PowerLaw(
        float(whole_k[0]),
        dict(zip(over, whole_k[1:].tolist(), strict=True)),
        centres,
        covariance.tolist(),
        math.sqrt(scatter**2 * len(names) / freedom + resolution),
        freedom,
    )


def _most_likely(
    x_nk: Floats, low_n: Floats, high_n: Floats, weight_n: Floats, start_k: Floats | None = None, scatter: float = 0.1
) -> tuple[Floats, float]:
    """Coefficients and scatter, by expectation and maximization (Dempster, Laird and Rubin 1977)."""
    root_n = np.sqrt(weight_n)
    if start_k is None:
        ends_n2 = np.stack([low_n, high_n], 1)
        middle_n = np.where(np.isfinite(ends_n2), ends_n2, ends_n2[:, ::-1]).mean(1)
        start_k = np.linalg.lstsq(root_n[:, None] * x_nk, root_n * middle_n, rcond=None)[0]
    coefficient_k = np.asarray(start_k, dtype=float)
    for _ in range(MOST_ROUNDS):
        mean_n = x_nk @ coefficient_k
        shift_n, part_n = _between((low_n - mean_n) / scatter, (high_n - mean_n) / scatter)
        expected_n = mean_n + scatter * shift_n
        before_k = coefficient_k
        coefficient_k = np.asarray(np.linalg.lstsq(root_n[:, None] * x_nk, root_n * expected_n, rcond=None)[0])
        squares_n = (expected_n - x_nk @ coefficient_k) ** 2 + scatter**2 * part_n
        before, scatter = scatter, max(math.sqrt((weight_n * squares_n).sum() / weight_n.sum()), LEAST_SCATTER)
        if max(abs(scatter - before), *np.abs(coefficient_k - before_k)) < CONVERGED:
            break
    return coefficient_k, scatter


def _between(low_n: Floats, high_n: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of a standard normal variable between two ends, which may be infinite."""
    low_n, high_n = np.maximum(low_n, -FARTHEST), np.minimum(high_n, FARTHEST)
    flipped = low_n > 0  # the tail in which the logarithm of a probability is exact
    log_first_n = scipy.special.log_ndtr(np.where(flipped, -high_n, low_n))
    log_last_n = scipy.special.log_ndtr(np.where(flipped, -low_n, high_n))
    log_n = log_last_n + np.log1p(-np.exp(np.minimum(log_first_n - log_last_n, -1e-12)))
    density_low_n, density_high_n = (
        np.exp(-(end_n**2) / 2 - log_n) / math.sqrt(2 * math.pi) for end_n in (low_n, high_n)
    )
    mean_n = density_low_n - density_high_n
    return mean_n, np.maximum(1 + low_n * density_low_n - high_n * density_high_n - mean_n**2, 0)
