"""Lines through sizes, their bends and crossings, and the threshold at which runs are lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from lab.analysis.text import count
from lab.core.errors import RequestError


class Threshold(NamedTuple):
    """The limit that best tells unstable runs from the rest.

    ``low`` and ``high`` are the nearest runs on its two sides; ``unstable`` and ``stable`` say how many of each kind
    lie on their own side, of how many.
    """

    value: float
    low: float
    high: float
    unstable: tuple[int, int]
    stable: tuple[int, int]


def calibrate(values: Iterable[float], unstable: Iterable[bool]) -> Threshold | None:
    """The cut, half-way in log between two neighbouring values, with the best mean of the two classes' shares.

    Of equally good cuts the one in the widest gap.  None where one class has no runs, or where no cut does better than
    chance.
    """
    table = pd.DataFrame({"value": [*values], "unstable": [*unstable]}).dropna()
    known = np.unique(table["value"])
    bad, good = (table.loc[table["unstable"] == lost, "value"].to_numpy() for lost in (True, False))
    if not len(bad) or not len(good) or len(known) < 2:
        return None
    best, *_ = sorted(
        (-((bad >= high).mean() + (good <= low).mean()), low / high, low, high) for low, high in pairwise(known)
    )
    low, high = float(best[2]), float(best[3])
    above, below = (int((bad >= high).sum()), len(bad)), (int((good <= low).sum()), len(good))
    return Threshold(math.sqrt(low * high), low, high, above, below) if best[0] < -1 else None


LEVEL = 0.95
# A line is followed to this many times the largest size; beyond it nothing is said.
REACH = 1000
# A bend below this is rounding, where the points lie on the line exactly.
STRAIGHT = 1e-6
FINE = 500


class Prediction(NamedTuple):
    """log10 of the value of one new run, and its interval; the ends are NaN where no freedom is left."""

    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Line(NamedTuple):
    """``log10 value = height + slope * (log10 size - centre)``, by least squares.

    ``scatter`` is the residual standard deviation in log10, NaN with two points; ``spread`` the sum of squared
    distances from the centre.
    """

    centre: float
    height: float
    slope: float
    points: int
    spread: float
    scatter: float

    @property
    def slope_error(self) -> float:
        """Half width of the Student-t interval of the slope; NaN with two points."""
        return _quantile(self.points - 2) * self.scatter / math.sqrt(self.spread)

    def predict(self, size: float | np.ndarray) -> Prediction:
        """One new run at each size (parameters), with its Student-t prediction interval.

        The interval knows the scatter of runs about a straight line, and nothing of a bend (see ``bend``).
        """
        off = np.log10(size) - self.centre
        middle = self.height + self.slope * off
        half = _quantile(self.points - 2) * self.scatter * np.sqrt(1 + 1 / self.points + off**2 / self.spread)
        return Prediction(middle, middle - half, middle + half)


class Crossing(NamedTuple):
    """From where a line, and the sooner and later ends of its interval, stay beyond a limit.

    inf where they do not within reach, NaN where there is no interval.
    """

    middle: float
    earliest: float
    latest: float


class Bend(NamedTuple):
    """Second-order coefficient of log10 value in log10 size, and half its Student-t interval."""

    value: float
    half: float

    @property
    def sign(self) -> int:
        """+1 upward, -1 downward (saturation), 0 where zero lies in the interval."""
        return 0 if abs(self.value) <= max(self.half, STRAIGHT) else int(math.copysign(1, self.value))


def fit(sizes: Iterable[float], values: Iterable[float]) -> Line:
    """The line through the points; one whose value has no logarithm is left out.

    Args:
        sizes: parameters of each run.
        values: what each run shows, positive.

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
    """Refuse fewer than two sizes, through which there is no line."""
    known = sorted({f"{size:.6g}" for size in sizes}, key=float)
    if len(known) < 2:
        have = f"1 size ({count(float(known[0]))} parameters)" if known else "no size with a usable value"
        raise RequestError(
            f"cannot tell how anything grows with size: {have}; needs at least two sizes to fit (three with one seed, "
            "for an interval) and one more to hold out; add them with model=d32,d64,d128"
        )


def bend(sizes: Iterable[float], values: Iterable[float]) -> Bend | None:
    """How far the points bend away from their line, by the quadratic through them; None where it cannot be told.

    It takes three sizes and a fourth point.
    """
    x, y = _logarithms(sizes, values)
    if len(set(x)) < 3 or len(x) < 4:
        return None
    powers = np.vander(x - x.mean(), 3)
    found = np.linalg.lstsq(powers, y, rcond=None)[0]
    freedom = len(x) - 3
    scatter = math.sqrt(float(((y - powers @ found) ** 2).sum()) / freedom)
    error = scatter * math.sqrt(float(np.linalg.inv(powers.T @ powers)[0, 0]))
    return Bend(float(found[0]), _quantile(freedom) * error)


def size_beyond(line: Line, limit: float, sign: int, smallest: float, largest: float) -> Crossing:
    """From which size (parameters) on the line lies beyond ``limit``: above it for ``sign`` 1, below it for -1.

    Looked for between the smallest size, which stands for everywhere, and ``REACH`` times the largest.
    """
    sizes = np.geomspace(smallest, REACH * largest, FINE)
    return _beyond(sizes, line.predict(sizes), limit, sign)


def lr_beyond(lines: Mapping[float, Line], limit: float, sign: int, size: float) -> Crossing:
    """From which learning rate on, at this size, the lines lie beyond ``limit``; between two lines along a power law.

    The smallest learning rate stands for everywhere; beyond the largest nothing is said.
    """
    lrs = np.array(sorted(lines))
    said = [lines[lr].predict(size) for lr in lrs]
    return _beyond(lrs, Prediction(*(np.array(part, dtype=float) for part in zip(*said, strict=True))), limit, sign)


def _beyond(places: np.ndarray, said: Prediction, limit: float, sign: int) -> Crossing:
    level = math.log10(limit) if limit > 0 else -math.inf  # an epsilon of zero is never met
    sooner, later = (said.high, said.low) if sign > 0 else (said.low, said.high)
    return Crossing(*(_from(np.log10(places), sign * (part - level)) for part in (said.middle, sooner, later)))


def _from(places: np.ndarray, excess: np.ndarray) -> float:
    """Where the excess turns positive for good, in between by interpolation."""
    if np.isnan(excess).any():
        return math.nan
    outside = np.flatnonzero(excess < 0)
    if not len(outside):
        return float(10 ** places[0])
    last = outside[-1]
    if last + 1 == len(places):
        return math.inf
    part = excess[last] / (excess[last] - excess[last + 1])
    return float(10 ** (places[last] + part * (places[last + 1] - places[last])))


def _logarithms(sizes: Iterable[float], values: Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        x, y = np.log10(np.array([*sizes], dtype=float)), np.log10(np.array([*values], dtype=float))
    usable = np.isfinite(x) & np.isfinite(y)
    return x[usable], y[usable]


def _quantile(freedom: int) -> float:
    return float(stdtrit(freedom, (1 + LEVEL) / 2)) if freedom > 0 else math.nan
