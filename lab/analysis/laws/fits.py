"""Power laws in model size: fits, bends, crossings of a limit; and the threshold above which runs are unstable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.statistics import Interval, t_quantile
from lab.analysis.text import count, finite
from lab.core import shipped
from lab.core.errors import RequestError


class Threshold(NamedTuple):
    """The value that best separates unstable runs from stable ones.

    Attributes:
        value: the threshold, in the unit of the values.
        low: the nearest value of a run below it.
        high: the nearest value of a run above it.
        unstable: how many unstable runs lie above it, and how many unstable runs there are.
        stable: how many stable runs lie below it, and how many stable runs there are.
    """

    value: float
    low: float
    high: float
    unstable: tuple[int, int]
    stable: tuple[int, int]


def calibrate(values: Iterable[float], unstable: Iterable[bool]) -> Threshold | None:
    """Find the threshold with the best balanced accuracy: the mean over both classes of the share on the right side.

    Candidates lie half-way in log between neighbouring values; of equally good ones the widest gap wins.

    Args:
        values: one per run, positive; NaN is left out.
        unstable: whether each run was unstable.

    Returns:
        None if one class has no runs, or if no threshold does better than chance.
    """
    table = pd.DataFrame({"value": [*values], "unstable": [*unstable]}).dropna()
    ordered = np.unique(table["value"])
    bad, good = (table.loc[table["unstable"] == is_bad, "value"].to_numpy() for is_bad in (True, False))
    if not len(bad) or not len(good) or len(ordered) < 2:
        return None
    best, *_ = sorted(
        (-((bad >= high).mean() + (good <= low).mean()), low / high, low, high) for low, high in pairwise(ordered)
    )
    low, high = float(best[2]), float(best[3])
    above, below = (int((bad >= high).sum()), len(bad)), (int((good <= low).sum()), len(good))
    return Threshold(math.sqrt(low * high), low, high, above, below) if best[0] < -1 else None


ABOUT: Mapping[str, str] = shipped.load(Path(__file__).with_name("about.yaml"))  # what tables mean, by their subject
PREDICTION_LEVEL = 0.95
WIDEST = 1e6  # a forecast whose ends are this factor apart tells nothing
# Crossings are searched up to this many times the largest size.
REACH = 1000
SEARCHED_SIZES = 500
FARTHEST = 1e15  # parameters, up to which the size is searched at which a learning rate fails
# Smaller bends are rounding errors of points that lie exactly on the line.
STRAIGHT = 1e-6


class Prediction(NamedTuple):
    """log10 of the value of one new run, with its 95 % interval; NaN if no degree of freedom is left."""

    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Line(NamedTuple):
    """A power law, ``log10 value = height + slope * (log10 size - centre)``, fitted by least squares.

    Attributes:
        centre: mean of log10 size.
        height: mean of log10 value.
        slope: in decades of value per decade of size.
        points: number of points fitted.
        spread: sum of squared distances of log10 size from the centre.
        scatter: residual standard deviation in log10, NaN with two points.
    """

    centre: float
    height: float
    slope: float
    points: int
    spread: float
    scatter: float

    @property
    def slope_error(self) -> float:
        """Half width of the 95 % Student-t interval of the slope; NaN with two points."""
        return t_quantile(self.points - 2) * self.scatter / math.sqrt(self.spread)

    @property
    def slope_interval(self) -> Interval:
        """The slope with its 95 % Student-t interval, which has no ends with two points."""
        return Interval.around(self.slope, self.slope_error)

    @property
    def plain(self) -> dict[str, float | None]:
        """The slope with its 95 % interval, in plain values, and how many points it has; None without an interval."""
        ends = {"slope_low": self.slope - self.slope_error, "slope_high": self.slope + self.slope_error}
        numbers = {"slope": float(self.slope), **{name: finite(float(end)) for name, end in ends.items()}}
        return {**numbers, "n": self.points, "interval_level": PREDICTION_LEVEL}

    def predict(self, size: float | np.ndarray) -> Prediction:
        """Predict one new run at each size (parameters), with its Student-t prediction interval.

        The interval covers the scatter of runs about a straight line, but no bend (see ``bend_sign``).
        """
        distance = np.log10(size) - self.centre
        middle = self.height + self.slope * distance
        half = t_quantile(self.points - 2) * self.scatter * np.sqrt(1 + 1 / self.points + distance**2 / self.spread)
        return Prediction(middle, middle - half, middle + half)


class Crossing(NamedTuple):
    """The point from which a line stays beyond a limit, and the points from which the ends of its interval do.

    A point out of reach is inf; NaN stands for the points of an interval that does not exist.
    """

    middle: float
    earliest: float
    latest: float

    @property
    def plain(self) -> dict[str, float | None]:
        """The point with the ends of its interval in rising order, in plain values; None where one is not finite."""
        low, high = sorted(self[1:])
        return {"value": finite(self.middle), "low": finite(low), "high": finite(high)}


def fit(sizes: Iterable[float], values: Iterable[float]) -> Line:
    """Fit a line; points whose value has no finite logarithm are left out.

    Args:
        sizes: parameters of each run.
        values: one per run, positive.

    Raises:
        RequestError: fewer than two sizes are left.
    """
    x, y = _logarithms(sizes, values)
    check_sizes(10**x)
    centre, height = float(x.mean()), float(y.mean())
    spread = float(((x - centre) ** 2).sum())
    slope = float(((x - centre) * y).sum()) / spread
    rest = float(((y - height - slope * (x - centre)) ** 2).sum())
    scatter = math.sqrt(rest / (len(x) - 2)) if len(x) > 2 else math.nan
    return Line(centre, height, slope, len(x), spread, scatter)


def check_sizes(sizes: Iterable[float]) -> None:
    """Check that there are two sizes or more, since a line cannot be fitted to fewer.

    Raises:
        RequestError: there are fewer.
    """
    distinct = sorted({f"{size:.6g}" for size in sizes}, key=float)
    if len(distinct) < 2:
        have = f"1 size ({count(float(distinct[0]))} parameters)" if distinct else "no size with a usable value"
        raise RequestError(
            f"no trend over size can be fitted: {have}; a fit needs at least two sizes (three with one seed, "
            "for an interval) and one more to hold out; add them with model=d32,d64,d128"
        )


def bend_sign(sizes: Iterable[float], values: Iterable[float]) -> int:
    """Whether points bend away from their line: 1 upward, -1 downward (saturation), 0 if they do so neither certainly.

    It is the sign of the quadratic coefficient of log10 value in log10 size, unless its 95 % Student-t interval holds
    zero, or there are fewer than three sizes or four points.
    """
    x, y = _logarithms(sizes, values)
    if len(set(x)) < 3 or len(x) < 4:
        return 0
    coefficients, covariance = np.polyfit(x - x.mean(), y, 2, cov=True)
    is_straight = abs(coefficients[0]) <= max(t_quantile(len(x) - 3) * math.sqrt(covariance[0, 0]), STRAIGHT)
    return 0 if is_straight else int(math.copysign(1, coefficients[0]))


def size_beyond(line: Line, limit: float, sign: int, smallest: float, largest: float) -> Crossing:
    """The size (parameters) from which the line stays beyond ``limit``: above it for ``sign`` 1, below it for -1.

    The search goes from the smallest size, which is the result if all sizes lie beyond, to ``REACH`` times the largest.
    """
    sizes = np.geomspace(smallest, REACH * largest, SEARCHED_SIZES)
    return beyond(sizes, line.predict(sizes), limit, sign)


def lr_beyond(lines: Mapping[float, Line], limit: float, sign: int, size: float) -> Crossing:
    """The learning rate from which, at this size, the lines stay beyond ``limit``; interpolated in log between lines.

    The search covers the learning rates of the lines; the smallest is the result if all lie beyond.
    """
    lrs = np.array(sorted(lines))
    middle, low, high = np.array([lines[lr].predict(size) for lr in lrs], dtype=float).T
    return beyond(lrs, Prediction(middle, low, high), limit, sign)


def crossing_text(crossing: Crossing, spell: Callable[[float], str], first: float, last: float) -> str:
    """``1.2M [700k, > 98.6M]``: the point where a line crosses its limit, and those where its interval does.

    Args:
        crossing: the points, in the unit of ``first`` and ``last``.
        spell: writes a value as text.
        first: the smallest value searched.
        last: the largest value searched.
    """

    def bounded(value: float) -> str:
        if math.isinf(value):
            return f"> {spell(last)}"
        return f"≤ {spell(first)}" if value <= first * (1 + 1e-9) else spell(value)

    is_beyond_reach = len({*map(bounded, crossing)}) == 1
    return bounded(crossing.middle) if is_beyond_reach else Interval(*crossing).spelled(bounded)


def with_ends(middle: float, low: float, high: float, *, digits: int) -> str:
    """``0.0041 [0.0011, 0.015]``, or ``cannot tell`` where the ends are more than ``WIDEST`` apart."""
    return "cannot tell" if high > WIDEST * low else f"{Interval(middle, low, high):.{digits}g}"


def beyond(x: np.ndarray, prediction: Prediction, limit: float, sign: int) -> Crossing:
    """The point on ``x``, a size or a learning rate, from which predictions stay beyond a limit: above it for +1."""
    level = math.log10(limit) if limit > 0 else -math.inf  # no gradient falls to an epsilon of zero
    earliest, latest = (prediction.high, prediction.low) if sign > 0 else (prediction.low, prediction.high)
    curves = (prediction.middle, earliest, latest)
    return Crossing(*(_last_crossing(np.log10(x), sign * (curve - level)) for curve in curves))


def _last_crossing(log_x: np.ndarray, excess: np.ndarray) -> float:
    """The point where the excess turns positive for the last time, interpolated between points."""
    if np.isnan(excess).any():
        return math.nan
    negative = np.flatnonzero(excess < 0)
    if not len(negative):
        return float(10 ** log_x[0])
    last = negative[-1]
    if last + 1 == len(log_x):
        return math.inf
    part = excess[last] / (excess[last] - excess[last + 1])
    return float(10 ** (log_x[last] + part * (log_x[last + 1] - log_x[last])))


def _logarithms(sizes: Iterable[float], values: Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        x, y = np.log10(np.array([*sizes], dtype=float)), np.log10(np.array([*values], dtype=float))
    usable = np.isfinite(x) & np.isfinite(y)
    return x[usable], y[usable]
