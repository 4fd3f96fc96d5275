"""Statistics over seeds: intervals of a mean, differences between two samples, equivalence tests."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

# Fewer seeds get no interval.
FEWEST_SEEDS = 3
# Confidence level of intervals of a difference; it corresponds to an equivalence test at 5 %.
DIFFERENCE_LEVEL = 0.90
# A change is significant if its p, adjusted for everything that is compared, lies below this.
CHANGE_LEVEL = 0.05


class Interval(NamedTuple):
    """Mean over ``n`` seeds with its interval; ``low`` and ``high`` are NaN below three seeds.

    ``format`` writes it as text: ``0.148 [0.120, 0.176]``, or ``0.148 ± 0.028`` if the spec begins with ``±`` in place
    of ``[]``, which may be left out. The rest of the spec is that of each number, such as ``+.3g``; without it numbers
    have three decimals, or two significant digits if all are too small for that. Zero has no minus.

    Attributes:
        values: one value per seed.
        error: standard error of the mean; NaN if it is not known.
        hits: of the interval of ``share_of_clusters``, in how many of its ``trials``; NaN for Student's.
        minus: what the mean and both ends are a share minus.
    """

    mean: float
    low: float
    high: float
    n: int = 0
    values: tuple[float, ...] = ()
    error: float = math.nan
    hits: float = math.nan
    trials: float = math.nan
    minus: float = 0.0

    @classmethod
    def around(
        cls, mean: float, half: float, n: int = 0, values: tuple[float, ...] = (), error: float = math.nan
    ) -> Self:
        """The interval that reaches half its width to both sides of the mean."""
        return cls(mean, mean - half, mean + half, n, values, error)

    @property
    def sd(self) -> float:
        """Standard deviation over seeds; NaN if the error is not known."""
        return self.error * math.sqrt(self.n)

    @property
    def dz(self) -> float:
        """Mean over standard deviation; NaN below three seeds or without spread.

        For paired differences this is Cohen's d_z.
        """
        return self.mean / self.sd if self.sd else math.nan

    def p_outside(self, low: float, high: float) -> float:
        """Two-sided p that the mean lies outside the open range; an interval at level 1 - p just lies inside it."""
        return min(1.0, 2 * max(self._p_at_most(low), self._p_at_least(high)))

    def p_inside(self, low: float, high: float) -> float:
        """Two-sided p that the mean lies inside the range; an interval at level 1 - p just lies outside it."""
        return min(1.0, 2 * min(self._p_at_least(low), self._p_at_most(high)))

    def _p_at_most(self, bound: float) -> float:
        """One-sided p that the mean is at most this."""
        if math.isnan(self.trials):
            return _tail(bound - self.mean, self.error, self.n - 1)
        return _at_least(self.hits, self.trials, bound + self.minus)

    def _p_at_least(self, bound: float) -> float:
        """One-sided p that the mean is at least this."""
        if math.isnan(self.trials):
            return _tail(self.mean - bound, self.error, self.n - 1)
        return _at_least(self.trials - self.hits, self.trials, 1 - bound - self.minus)

    def __str__(self) -> str:
        return f"{self:±} (n = {self.n})"

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        is_half, spec = spec.startswith("±"), spec.removeprefix("±").removeprefix("[]")
        sign, spec = spec[: spec.startswith("+")], spec.removeprefix("+")
        largest = max((abs(number) for number in (*self[:3], *self.values) if not math.isnan(number)), default=0.0)
        spec = f"z{spec or ('.2g' if 0 < largest < 0.001 else '.3f')}"
        if is_half and not math.isnan(self.low):
            return f"{self.mean:{sign}{spec}} ± {self.high - self.mean:{spec}}"
        return self.spelled(f"{{:{sign}{spec}}}".format)

    def spelled(self, spell: Callable[[float], str]) -> str:
        """``1.2M [700k, 98.6M]``: the mean and the ends, each as ``spell`` writes it.

        Without an interval the values themselves, or the mean if they are unknown; ``undefined`` without either.
        """
        if not math.isnan(self.low):
            return f"{spell(self.mean)} [{spell(self.low)}, {spell(self.high)}]"
        return " and ".join(spell(value) for value in self.values or self[:1] if not math.isnan(value)) or "undefined"

    def __neg__(self) -> Interval:
        values = tuple(-value for value in self.values)
        misses = self.trials - self.hits  # of a share the rest is a share, too
        return Interval(
            -self.mean, -self.high, -self.low, self.n, values, self.error, misses, self.trials, 1 - self.minus
        )


UNKNOWN = Interval(math.nan, math.nan, math.nan, 0)


def zones(interval: Interval | Difference, edges: Sequence[float]) -> tuple[int, int]:
    """The zones between which an interval leaves open where its mean lies: those of its ends, counted from 0.

    Rising ``edges`` part the line: zone 0 lies below the first. An interval inside one zone has twice the same; one
    that touches an edge lies in both zones there, and one without ends in all.
    """
    if math.isnan(interval.low):
        return 0, len(edges)
    return bisect.bisect_left(edges, interval.low), bisect.bisect_right(edges, interval.high)


def t_quantile(freedom: float, level: float = 0.95) -> float:
    """Half the width of a Student-t interval, in standard errors; NaN without a degree of freedom."""
    return float(scipy.special.stdtrit(freedom, (1 + level) / 2))


def student_t(values: Iterable[float], level: float = 0.95, resolution: float = 0.0) -> Interval:
    """Interval of the mean of ``values``, one per seed; NaN are left out.

    Args:
        resolution: step to which the values are known, in their unit. The variance of that rounding is added, so that
            values on a grid have an interval even where all are equal.
    """
    known = np.array([value for value in values if not math.isnan(value)], dtype=float)
    n, shown = len(known), tuple(known.tolist())
    mean = float(known.mean()) if n else math.nan
    if n < FEWEST_SEEDS:
        return Interval(mean, math.nan, math.nan, n, shown)
    spread = math.sqrt(float(known.var(ddof=1)) + resolution**2 / 12)
    error = spread / math.sqrt(n)
    return Interval.around(mean, t_quantile(n - 1, level) * error, n, shown, error)


def geometric_mean(values: Iterable[float]) -> Interval:
    """``student_t`` of logarithms as numbers; values that are not positive are left out."""
    logs = student_t([math.log(value) if value > 0 else math.nan for value in values])
    mean, low, high = (math.exp(number) for number in logs[:3])
    return Interval(mean, low, high, logs.n, tuple(math.exp(value) for value in logs.values), logs.error)


def unpaired(first: Iterable[float], second: Iterable[float], level: float = 0.95) -> Interval:
    """Interval of the mean of a first sample minus that of a second, which share no seeds; NaN are left out.

    Its degrees of freedom are those of the smaller sample, which Welch's exceed, and ``n`` is its size.
    """
    left, right = (student_t(values, level) for values in (first, second))
    n, error = min(left.n, right.n), math.hypot(left.error, right.error)
    return Interval.around(left.mean - right.mean, t_quantile(n - 1, level) * error, n, (), error)


def power_of(seeds: int, distance: float, spread: float, alpha: float, freedom: float = 0) -> float:
    """The probability that the interval of a mean excludes a bound at this distance from it.

    Args:
        seeds: over which the mean is taken.
        distance: from the mean to the bound, in any unit.
        spread: standard deviation over seeds, in the same unit, above zero.
        alpha: one minus the level of the two-sided interval.
        freedom: degrees of freedom of the spread if it is pooled; without them those of the seeds.

    References:
        Cohen 1988, Statistical power analysis for the behavioral sciences, section 2; by the noncentral t.
    """
    freedom = freedom or seeds - 1
    critical = scipy.special.stdtrit(freedom, 1 - alpha / 2)
    return float(1 - scipy.special.nctdtr(freedom, distance / spread * math.sqrt(seeds), critical))


class Spread(NamedTuple):
    """A standard deviation over seeds with its degrees of freedom; without any it is unknown."""

    sd: float = math.nan
    freedom: float = 0

    @property
    def squares(self) -> float:
        """The sum of squares that it stands for."""
        return self.freedom * self.sd**2 if self.freedom else 0.0

    def combine(self, other: Spread) -> Spread:
        """The spread by this one and another, each with the weight of its degrees of freedom."""
        return _spread(self.squares + other.squares, self.freedom + other.freedom)

    def without(self, part: Spread) -> Spread:
        """The spread by the rest of what it was made of."""
        return _spread(self.squares - part.squares, self.freedom - part.freedom)

    def interval(self, values: np.ndarray, level: float = 0.95) -> Interval:
        """Student's interval of the mean of values that have this spread."""
        n, shown = len(values), tuple(values.tolist())
        if not n:
            return UNKNOWN
        error = self.sd / math.sqrt(n)
        return Interval.around(float(values.mean()), t_quantile(self.freedom, level) * error, n, shown, error)

    def p(self, interval: Interval) -> float:
        """Two-sided p of a mean of zero, for an interval with this spread; NaN where nothing spreads."""
        if not interval.error > 0:
            return math.nan
        return float(2 * scipy.special.stdtr(self.freedom, -abs(interval.mean) / interval.error))


def _spread(squares: float, freedom: float) -> Spread:
    return Spread(math.sqrt(max(squares, 0.0) / freedom), freedom) if freedom > 0 else Spread()


def spread_within(groups: Iterable[np.ndarray]) -> Spread:
    """The spread within groups of values that have one, about the mean of each."""
    groups = [group for group in groups if len(group)]
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    return _spread(squares, sum(len(group) - 1 for group in groups))


def spread_prior(groups: Iterable[np.ndarray]) -> Spread:
    """The prior of the variances of several groups of values, by moments of their logarithms.

    Variances of groups are taken as drawn from a scaled inverse chi-square distribution, and that of a few values is
    moved towards the others. It is worth no more degrees of freedom than all groups have. Groups without spread, or of
    one value, say nothing. NaN without two groups that do.

    References:
        Smyth 2004, Linear models and empirical Bayes methods for assessing differential expression,
        https://doi.org/10.2202/1544-6115.1027, section 6.2.
    """
    kept = [group for group in groups if len(group) > 1 and float(np.var(group)) > 0]
    if len(kept) < 2:
        return Spread()
    half_k = np.array([(len(group) - 1) / 2 for group in kept])
    log_k = np.array([math.log(float(np.var(group, ddof=1))) for group in kept])
    scaled_k = log_k - scipy.special.digamma(half_k) + np.log(half_k)
    excess = float(scaled_k.var(ddof=1) - scipy.special.polygamma(1, half_k).mean())
    if excess <= 0:
        return Spread(math.exp(float(scaled_k.mean()) / 2), 2 * float(half_k.sum()))
    half = float(
        scipy.optimize.brentq(lambda log_half: scipy.special.polygamma(1, math.exp(log_half)) - excess, -20, 40)
    )
    half = math.exp(half)
    sd = math.exp(float(scaled_k.mean() + scipy.special.digamma(half) - math.log(half)) / 2)
    return Spread(sd, min(2 * half, 2 * float(half_k.sum())))


def _tail(excess: float, error: float, freedom: float) -> float:
    """The one-sided probability of a mean that exceeds a bound by this much."""
    if not error:
        return 0.0 if excess < 0 else 1.0
    return float(scipy.special.stdtr(freedom, excess / error))


def _at_least(hits: float, trials: float, share: float) -> float:
    """The probability of at least so many hits in independent trials with this share of hits."""
    if not hits:
        return float(share >= 0)
    return float(scipy.special.betainc(hits, trials - hits + 1, min(max(share, 0.0), 1.0)))


class Difference(NamedTuple):
    """Mean of a second sample minus the mean of a first.

    Attributes:
        mean: the difference.
        error: its standard error.
        freedom: degrees of freedom.
        effect: Cohen's d, NaN where nothing spreads.
    """

    mean: float
    error: float
    freedom: float
    effect: float

    @property
    def low(self) -> float:
        """Lower end of the 90 % Student-t interval."""
        return self.mean - self._half

    @property
    def high(self) -> float:
        """Upper end of the 90 % Student-t interval."""
        return self.mean + self._half

    @property
    def _half(self) -> float:
        return t_quantile(self.freedom, DIFFERENCE_LEVEL) * self.error if self.error else 0.0

    def equivalence(self, margin: float) -> float:
        """Test whether the difference lies within ``margin`` of zero.

        Returns:
            The larger p of two one-sided t-tests, against a change of ``margin`` up and down (Schuirmann 1987).
        """
        return _tail(abs(self.mean) - margin, self.error, self.freedom)

    def p(self, negligible: float = 0.0) -> float:
        """Two-sided p of a t-test that the difference is at most ``negligible`` in size."""
        return min(1.0, 2 * _tail(negligible - abs(self.mean), self.error, self.freedom))


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust the p of several tests, so that those below a level falsely reject any with at most that probability.

    NaN is no test: it stays NaN, and the others are adjusted as if it were not there.

    References:
        Holm 1979, A simple sequentially rejective multiple test procedure, https://www.jstor.org/stable/4615733.
    """
    tests = pd.Series(list(ps), dtype=float).dropna().sort_values()
    adjusted = (tests * np.arange(len(tests), 0, -1)).clip(upper=1.0).cummax()
    return list(adjusted.reindex(range(len(ps))).tolist())


def difference(old: pd.Series, new: pd.Series, resolution: float = 0.0) -> Difference:
    """Difference of two samples: paired where both have the same seeds, else Welch's.

    Args:
        old: first sample, one value per seed, indexed by seed.
        new: second sample, likewise.
        resolution: step to which the values are known, in their unit. The variance of that rounding is added, so that
            values on a grid have an interval even where all are equal.
    """
    if set(old.index) == set(new.index):
        changes = (new - old).to_numpy(dtype=float)
        mean, count = float(changes.mean()), len(changes)
        deviation = math.sqrt(float(changes.var(ddof=1)) + resolution**2 / 6)
        return Difference(mean, deviation / math.sqrt(count), count - 1, _effect_size(mean, deviation))
    counts, variances = np.array([len(old), len(new)]), np.array([old.var(), new.var()]) + resolution**2 / 12
    mean, errors, freedoms = float(new.mean() - old.mean()), variances / counts, counts - 1
    pooled = math.sqrt(float((freedoms * variances).sum() / freedoms.sum()))
    freedom = float(errors.sum() ** 2 / (errors**2 / freedoms).sum()) if errors.any() else float(freedoms.sum())
    return Difference(mean, math.sqrt(float(errors.sum())), freedom, _effect_size(mean, pooled))


def _effect_size(mean: float, deviation: float) -> float:
    """Cohen's d; NaN if values spread by rounding only."""
    return mean / deviation if deviation > 1e-9 * abs(mean) else math.nan
