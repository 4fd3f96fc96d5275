"""Two logs of one recipe: until which step they share their batches, and what lies between their losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # its parts are loaded when they are used
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.core.windows import NORMAL, Numbers
from labwatch.events.detectors import Event, Log, column_of

# A loss is de-trended by a parabola through the rows around it (Savitzky and Golay 1964), so many at a time; a parabola
# in the middle of an odd number of rows follows a cubic, too, as early in training.
TREND_ROWS, DEGREE = 9, 2
# De-trended losses are ranked and correlated in blocks of about so many rows. Rows within half a parabola of one that
# is so many scaled median absolute deviations off are left out, since runs on other batches may spike at the same step.
BLOCK, OUTLIER = 32, 6.0
# Logs share batches if the mean correlation of the blocks is at least this, and by Fisher's transform (Fisher 1921) so
# many standard errors above zero.
LEAST_CORRELATION, LEAST_SCORE = 0.25, 4.0
# They share them no longer if that of the remaining blocks is, by so many standard errors, below this share of it, and
# no stretch of the blocks before, of at most half of them, is as low.
LAST_SCORE, LAST_SHARE = 2.0, 0.5
# The most that one row says for or against shared batches, in natural logarithms of the likelihood ratio.
MOST_EVIDENCE = 4.0


class Sharing(NamedTuple):
    """Whether two logs share their batches.

    Attributes:
        rows: number of steps with a finite loss in both logs.
        until: the last step at which they share batches, None if they never do; it is known to a few rows.
        shared_rows: rows up to that step.
        correlation: mean rank correlation of de-trended losses up to that step, or over all rows without one; NaN if
            there are too few rows to tell.
        error: its standard error if the batches are unrelated.
        afterwards: the correlation after that step; NaN without such rows.
    """

    rows: int
    until: int | None
    shared_rows: int
    correlation: float
    error: float
    afterwards: float

    @property
    def is_known(self) -> bool:
        """Whether there were enough rows to tell."""
        return not math.isnan(self.correlation)

    @property
    def is_lasting(self) -> bool:
        """Whether the batches are shared up to the last common step."""
        return self.is_known and self.shared_rows == self.rows


def finite_losses(log: Log) -> tuple[NDArray[np.int64], Numbers]:
    """The steps ``[n]`` at which a log has a finite loss, and these losses ``[n]``."""
    known_n = np.isfinite(log.columns["loss"])
    return log.step_n[known_n], log.columns["loss"][known_n]


def common_losses(a: Log, b: Log) -> tuple[NDArray[np.int64], Numbers, Numbers]:
    """The steps ``[n]`` at which both logs have a finite loss, and both losses ``[n]``."""
    (step_a, a_n), (step_b, b_n) = (finite_losses(log) for log in (a, b))
    step_n, rows_a, rows_b = np.intersect1d(step_a, step_b, return_indices=True)
    return step_n, a_n[rows_a], b_n[rows_b]


def shared_batches(a: Log, b: Log) -> Sharing:
    """Until which step two logs share their batches, by the correlation of their de-trended losses.

    The loss of a batch depends on its text more than on the weights, so twins rise and fall together from row to row,
    and runs on other batches do not.
    """
    step_n, a_n, b_n = common_losses(a, b)
    if len(step_n) < BLOCK:
        return Sharing(len(step_n), None, 0, math.nan, math.nan, math.nan)
    u_n, v_n = detrended(a_n), detrended(b_n)
    edges = np.linspace(0, len(u_n), max(1, round(len(u_n) / BLOCK)) + 1).astype(int)
    blocks = [slice(first, end) for first, end in itertools.pairwise(edges)]
    far_n, rows_k = _far(u_n, blocks) | _far(v_n, blocks), np.diff(edges)
    r_k = np.array([_rank_correlation(u_n[some], v_n[some], far_n[some]) for some in blocks])
    spread = math.sqrt(_variance(u_n, v_n))
    sum_k, count_k = np.cumsum(r_k * rows_k), np.cumsum(rows_k)
    best = int(np.argmax(sum_k / np.sqrt(count_k)))
    correlation, error = _mean(r_k, rows_k, spread, slice(best + 1))
    score = math.atanh(min(correlation, 1 - 1e-12)) * math.sqrt(max(1 / error**2 - 3, 0.0))
    if correlation < LEAST_CORRELATION or score < LEAST_SCORE:
        return Sharing(len(step_n), None, 0, *_mean(r_k, rows_k, spread, slice(None)), math.nan)
    rest, rest_error = _mean(r_k, rows_k, spread, slice(best + 1, None))
    length = max(1, min(len(r_k) - best - 1, (best + 1) // 2))
    lowest = float(sliding_window_view(r_k[: best + 1], length).mean(1).min())
    if not rest + LAST_SCORE * rest_error < LAST_SHARE * correlation < lowest:
        everything = _mean(r_k, rows_k, spread, slice(None))
        return Sharing(len(step_n), int(step_n[-1]), len(step_n), *everything, math.nan)
    near = slice(int(edges[best]), int(edges[min(best + 2, len(blocks))]))
    shared = near.start + _last_shared(u_n[near], v_n[near], correlation) + (TREND_ROWS - 1) // 2
    return Sharing(len(step_n), int(step_n[shared - 1]), shared, correlation, error, rest)


def detrended(loss_n: Numbers) -> Numbers:
    """By how much losses ``[n - 8]`` miss the parabola through the rows around them."""
    weight_w = -scipy.signal.savgol_coeffs(TREND_ROWS, DEGREE)
    weight_w[TREND_ROWS // 2] += 1.0
    missed_n: Numbers = np.convolve(loss_n, weight_w, "valid")
    return missed_n


def _far(missed_n: Numbers, blocks: Sequence[slice]) -> NDArray[np.bool_]:
    """Rows near one that is far off in its block."""
    size_n = np.abs(missed_n)
    far_n = np.concatenate([size_n[some] > OUTLIER * NORMAL * np.median(size_n[some]) for some in blocks])
    near_n: NDArray[np.bool_] = scipy.ndimage.binary_dilation(far_n, iterations=TREND_ROWS // 2)
    return near_n


def _rank_correlation(u_n: Numbers, v_n: Numbers, far_n: NDArray[np.bool_]) -> float:
    """Spearman's rank correlation, without the rows that are far off unless most are; zero where nothing varies."""
    some_n = ~far_n if 2 * far_n.sum() < len(u_n) else np.ones(len(u_n), dtype=bool)
    ranks = [scipy.stats.rankdata(each[some_n]) - (some_n.sum() + 1) / 2 for each in (u_n, v_n)]
    square = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float(ranks[0] @ ranks[1]) / square if square else 0.0


def _variance(u_n: Numbers, v_n: Numbers) -> float:
    """The variance of the correlation of unrelated series times their length (Bartlett 1935); one for white noise."""
    ranks = [scipy.stats.rankdata(each) - (len(each) + 1) / 2 for each in (u_n, v_n)]
    auto = [np.array([rank[lag:] @ rank[: len(rank) - lag] for lag in range(TREND_ROWS)]) for rank in ranks]
    both = [each / each[0] if each[0] else np.zeros(TREND_ROWS) for each in auto]
    return max(1.0, 1.0 + 2 * float(both[0][1:] @ both[1][1:]))


def _mean(r_k: Numbers, rows_k: NDArray[np.int64], spread: float, some: slice) -> tuple[float, float]:
    """The mean correlation of some blocks and its standard error; NaN without blocks."""
    rows = int(rows_k[some].sum())
    if not rows:
        return math.nan, math.nan
    return float(r_k[some] @ rows_k[some]) / rows, spread / math.sqrt(rows)


def _last_shared(u_n: Numbers, v_n: Numbers, correlation: float) -> int:
    """Of rows of which the first are shared and the last are not, how many are, by the largest likelihood."""
    u_n, v_n = (each / (NORMAL * float(np.median(np.abs(each))) or 1.0) for each in (u_n, v_n))
    r = min(max(correlation, LEAST_CORRELATION), 0.99)
    square = 1 - r * r
    ratio_n = -0.5 * math.log(square) - (r * r * (u_n**2 + v_n**2) - 2 * r * u_n * v_n) / (2 * square)
    evidence = np.concatenate([[0.0], np.cumsum(np.clip(ratio_n, -MOST_EVIDENCE, MOST_EVIDENCE))])
    return int(np.argmax(evidence))


# The gap bumps where the mean of so many rows misses the median of the rows around it by so many scaled median absolute
# deviations, and by so many nats; the bump is over when it is back within ``BUMP_OVER`` of them.
BUMP_ROWS, BUMP_WINDOW, BUMP_DEVIATIONS, LEAST_BUMP, BUMP_OVER = (1, 4, 16), 65, 7.0, 0.005, 2.0
# Bumps in this first share of the steps are not counted, since the loss falls so steeply there that the gap follows it.
STEEP = 0.1
# Rows by which the same event may begin earlier or later in another run of the same batches.
APART = 3
# The gap is judged over the last so many of the rows that count, since early in training it changes with the loss.
JUDGED = 0.5
FEWEST_ROWS = 16  # judged; fewer have no interval
FEWEST_OF_ONE_SIGN = 6  # rows of a gap; of fewer, chance makes all of one sign too often
LEVEL, POWER = 0.95, 0.80  # of intervals, and with which the smallest gap is seen
# Losses are equal if they differ by less than this share of the loss: what DeepSeek-V3 (arXiv 2412.19437, section 3.3)
# kept between fp8 and bf16.
EQUAL = 0.0025
# Shapes of misses from which the variance is taken: at most ``MOST_SHAPES`` n^(2/3) (Lazarus et al. 2018), and fewer
# the longer misses last. A gap of fewer than ``LEAST_TURNS`` times the rows over which misses last has no verdict.
MOST_SHAPES, LEAST_SHAPES, SLOW, LEAST_TURNS = 0.4, 4, 0.16, 10
# A correlation of misses counts beyond so many standard errors. A fitted line lowers it by this over their number.
CERTAIN, LINE_BIAS = 2.5, 4.0


class Bump(NamedTuple):
    """A departure of the gap that passes; only the noise of a paired gap is small enough to show it.

    Attributes:
        first: its first step.
        last: its last step.
        size: the largest gap during it minus the median around it, nats per token.
    """

    first: int
    last: int
    size: float


class Gap(NamedTuple):
    """By how much the loss of a second log lies above that of a first: a straight line over the judged steps.

    Attributes:
        is_paired: whether losses of the same batches are subtracted.
        first: first step judged.
        last: last step judged.
        rows: rows judged.
        left_out: rows in loss spikes of a log or in bumps of the gap, which are not judged.
        mean: the mean gap, nats per token, which is the gap in the middle.
        error: its standard error; NaN with fewer than ``FEWEST_ROWS`` rows.
        change: by how much the gap grows from the first to the last step.
        change_error: its standard error.
        freedom: degrees of freedom of Student's t.
        lasting: rows over which a miss of the line lasts; 1 for white noise.
        margin: the losses are equal if they differ by less.
        is_of_one_sign: whether all judged rows of the gap have the same sign.
    """

    is_paired: bool
    first: int
    last: int
    rows: int
    left_out: int
    mean: float
    error: float
    change: float
    change_error: float
    freedom: int
    lasting: float
    margin: float
    is_of_one_sign: bool = False

    def half_width(self, level: float = LEVEL) -> float:
        """Half the width of the interval of the mean."""
        return _quantile(self.freedom, (1 + level) / 2) * self.error

    def change_half_width(self, level: float = LEVEL) -> float:
        """Half the width of the interval of the change."""
        return _quantile(self.freedom, (1 + level) / 2) * self.change_error

    @property
    def per_thousand(self) -> float:
        """Factor from the change to the slope per 1000 steps."""
        return 1000.0 / (self.last - self.first)

    @property
    def equal_within(self) -> float:
        """The smallest margin within which the line lies throughout, by two one-sided tests at 5 % at either end."""
        half = _quantile(self.freedom, LEVEL) * math.hypot(self.error, self.change_error / 2)
        return max(abs(self.mean - self.change / 2), abs(self.mean + self.change / 2)) + half

    @property
    def smallest_gap(self) -> float:
        """The constant gap that would have been told from none with probability ``POWER``."""
        return self._sensitivity * self.error

    @property
    def smallest_change(self) -> float:
        """The change that would have been told from none with probability ``POWER``."""
        return self._sensitivity * self.change_error

    @property
    def _sensitivity(self) -> float:
        return _quantile(self.freedom, (1 + LEVEL) / 2) + _quantile(self.freedom, POWER)

    @property
    def wanders(self) -> bool:
        """Whether misses of the line last so long that its interval is too narrow."""
        return self.rows < LEAST_TURNS * self.lasting

    @property
    def verdict(self) -> str:
        """``equal``, ``growing gap``, ``shrinking gap``, ``constant gap``, ``gap of one sign`` or ``open``.

        A gap is constant if it is told from none, and its change is, by two one-sided tests at 5 %, less than half of
        it or than the margin. One without an interval is decided if it has the same sign in all judged rows.
        """
        if math.isnan(self.error) or self.wanders:
            is_decided = self.is_of_one_sign and self.rows >= FEWEST_OF_ONE_SIGN and abs(self.mean) > self.margin
            return "gap of one sign" if is_decided else "open"
        if self.equal_within < self.margin:
            return "equal"
        if abs(self.change) > self.change_half_width():
            return "growing gap" if self.mean * self.change > 0 else "shrinking gap"
        steady = abs(self.change) + self.change_half_width(2 * LEVEL - 1) < max(self.margin, abs(self.mean) / 2)
        return "constant gap" if abs(self.mean) > self.half_width() and steady else "open"


def gaps(a: Log, b: Log, sharing: Sharing, events: Sequence[Event] = (), margin: float | None = None) -> list[Gap]:
    """The gap from the first log to the second: paired where they share batches, and unpaired where they do not.

    Args:
        a, b: the first and the second log.
        sharing: of both, by ``shared_batches``.
        events: of both; loss spikes are left out.
        margin: nats per token within which losses are equal; None is ``EQUAL`` times the loss of the first log.
    """
    step_n, a_n, b_n = compared_losses(a, b)
    found = list[Gap]()
    for is_paired, some in ((True, slice(sharing.shared_rows)), (False, slice(sharing.shared_rows, None))):
        if len(step_n[some]):
            equal = EQUAL * float(np.median(a_n[some])) if margin is None else margin
            found.append(line_of(step_n[some], b_n[some] - a_n[some], is_paired, equal, events))
    return found


def bumps(a: Log, b: Log, sharing: Sharing) -> list[Bump]:
    """Departures of the paired gap that pass, such as a spike of one twin, in the order of their steps.

    Those that begin in the first tenth of the steps are left out.
    """
    step_n, a_n, b_n = common_losses(a, b)
    gap_n = (b_n - a_n)[: sharing.shared_rows]
    if len(gap_n) < BUMP_WINDOW:
        return []
    miss_n = _around_median(gap_n)
    scale = NORMAL * float(np.median(np.abs(miss_n)))
    labels_n, found = scipy.ndimage.label(bumping(gap_n))
    rows_k = [
        np.flatnonzero((labels_n == label) & (np.abs(miss_n) > BUMP_OVER * scale)) for label in range(1, found + 1)
    ]
    steep = step_n[0] + STEEP * (step_n[-1] - step_n[0])
    return [
        Bump(int(step_n[rows[0]]), int(step_n[rows[-1]]), float(max(miss_n[rows], key=abs)))
        for rows in rows_k
        if len(rows) and step_n[rows[0]] >= steep
    ]


def _around_median(gap_n: Numbers) -> Numbers:
    """By how much the gap misses the median of the rows around each."""
    missed_n: Numbers = gap_n - scipy.ndimage.median_filter(gap_n, BUMP_WINDOW, mode="nearest")
    return missed_n


def bumping(gap_n: Numbers) -> NDArray[np.bool_]:
    """Whether a row of a gap ``[n]`` belongs to a bump; not told in fewer than ``BUMP_WINDOW`` rows.

    What lasts half the window or longer is no bump, but how the gap is from then on.
    """
    is_bumping_n: NDArray[np.bool_] = np.zeros(len(gap_n), dtype=bool)
    if len(gap_n) < BUMP_WINDOW:
        return is_bumping_n
    miss_n = _around_median(gap_n)
    for rows in BUMP_ROWS:
        mean_n = np.abs(scipy.ndimage.uniform_filter1d(miss_n, rows, mode="nearest"))
        scale = NORMAL * float(np.median(mean_n))
        high_n = (mean_n > BUMP_DEVIATIONS * scale) & (mean_n > LEAST_BUMP)
        is_bumping_n |= scipy.ndimage.binary_propagation(high_n, mask=mean_n > BUMP_OVER * scale)
    labels_n, _ = scipy.ndimage.label(is_bumping_n)
    does_pass_n: NDArray[np.bool_] = np.bincount(labels_n)[labels_n] <= BUMP_WINDOW // 2
    return is_bumping_n & does_pass_n


def spiking(events: Sequence[Event], step_n: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether there is a loss spike at a step ``[n]``."""
    spikes = [event for event in events if event.kind == "spike"]
    spans = [(step_n >= spike.step) & (step_n <= (step_n[-1] if spike.end is None else spike.end)) for spike in spikes]
    is_spiking_n: NDArray[np.bool_] = np.logical_or.reduce([np.zeros(len(step_n), dtype=bool), *spans])
    return is_spiking_n


def compared_losses(a: Log, b: Log) -> tuple[NDArray[np.int64], Numbers, Numbers]:
    """Steps ``[n]`` at which two logs are compared, and both losses ``[n]``.

    Those in common; where these are few, those of the log with fewer rows where both run, with interpolated losses.
    """
    common = common_losses(a, b)
    (step_a, a_n), (step_b, b_n) = (finite_losses(log) for log in (a, b))
    if len(common[0]) >= FEWEST_ROWS or not len(step_a) or not len(step_b):
        return common
    wide = step_a if len(step_a) <= len(step_b) else step_b
    step_n = wide[(wide >= max(step_a[0], step_b[0])) & (wide <= min(step_a[-1], step_b[-1]))]
    return step_n, np.interp(step_n, step_a, a_n), np.interp(step_n, step_b, b_n)


def line_of(
    step_n: NDArray[np.int64], gap_n: Numbers, is_paired: bool, margin: float, events: Sequence[Event] = ()
) -> Gap:
    """The least-squares line through the last half of a gap, with standard errors that hold for correlated misses.

    The variance is that of the misses along slow shapes, cosines made orthogonal to the line, so that Student's t is
    exact for white noise (orthonormal series: Sun 2013, https://doi.org/10.1111/j.1368-423X.2012.00390.x; Lazarus,
    Lewis, Stock and Watson 2018, https://doi.org/10.1080/07350015.2018.1506926).

    Loss spikes among the events are left out. Gap and margin are in nats per token.
    """
    begin = int(np.searchsorted(step_n, step_n[0] + (1 - JUDGED) * (step_n[-1] - step_n[0])))
    first, last = int(step_n[begin]), int(step_n[-1])
    calm_n = ~spiking(events, step_n[begin:]) & ~bumping(gap_n)[begin:]
    step_n, gap_n = step_n[begin:][calm_n], gap_n[begin:][calm_n]
    rows, left_out = len(step_n), int((~calm_n).sum())
    one_sign = rows > 0 and bool((gap_n > 0).all() or (gap_n < 0).all())
    if rows < FEWEST_ROWS:
        mean, none = float(gap_n.mean()) if rows else math.nan, math.nan
        return Gap(is_paired, first, last, rows, left_out, mean, none, none, none, LEAST_SHAPES, none, margin, one_sign)
    mean = float(gap_n.mean())
    x_n = step_n - step_n.mean()
    slope = float(x_n @ gap_n / (x_n @ x_n))
    miss_n = gap_n - mean - slope * x_n
    lasting = _lasting(miss_n)
    shapes = max(LEAST_SHAPES, int(min(MOST_SHAPES * rows ** (2 / 3), SLOW * rows / lasting)))
    cosine_nj = np.cos(np.pi * np.outer((np.arange(rows) + 0.5) / rows, np.arange(1, shapes + 1)))
    shape_nj = np.linalg.qr(np.column_stack([np.ones(rows), x_n, cosine_nj]))[0][:, 2:]
    deviation = math.sqrt(float(((miss_n @ shape_nj) ** 2).mean()))
    error, slope_error = deviation / math.sqrt(rows), deviation / math.sqrt(float(x_n @ x_n))
    span = last - first
    change, change_error = slope * span, slope_error * span
    found = (mean, error, change, change_error, shapes, lasting, margin, one_sign)
    return Gap(is_paired, first, last, rows, left_out, *found)


def _lasting(miss_n: Numbers) -> float:
    """Rows over which a miss lasts: 1 / (1 - r) of an autoregressive one, by means of the scale where it lasts longest.

    Noise of single rows hides how long the rest lasts, and means do not.
    """
    longest, scale = 1.0, 1
    while (means := len(miss_n) // scale) >= FEWEST_ROWS:
        mean_k = miss_n[: means * scale].reshape(means, scale).mean(1)
        square = float(mean_k @ mean_k)
        r = float(mean_k[1:] @ mean_k[:-1]) / square + LINE_BIAS / means if square else 0.0
        if r > CERTAIN / math.sqrt(means):
            longest = max(longest, scale / (1 - min(r, 0.99)))
        scale *= 2
    return longest


def _quantile(freedom: int, level: float) -> float:
    """The quantile of Student's t."""
    return float(scipy.special.stdtrit(freedom, level))


def shares_event(event: Event, log: Log, twin: Log, events: Sequence[Event]) -> bool | None:
    """Whether a twin, whose ``events`` are given, has an event of the log at about the same step; None if unknown."""
    column = column_of(event.kind)
    if column not in twin.columns or not twin.step_n[0] <= event.step <= twin.step_n[-1]:
        return None
    apart = APART * int(np.median(np.diff(log.step_n)))
    until = (event.step if event.end is None else event.end) + apart
    return any(
        other.kind == event.kind
        and other.step <= until
        and (other.step if other.end is None else other.end) >= event.step - apart
        for other in events
    )
