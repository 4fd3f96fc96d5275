"""Alarms of reinforcement learning: what falls or rises far away from its trend, or drifts for long.

The reward, the entropy, the KL divergences and the gradient norm depart suddenly. The share of groups without variance,
the length of responses, the share of them that the limit cuts, and the share of ratios that are clipped may also drift,
but of these only a move that lasts counts. While the reward rises, all but the gradient norm may move, since a policy
that learns leaves its reference, answers with more confidence and in other lengths, and solves whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import scipy  # its parts are loaded when they are used
from numpy.typing import NDArray

from lab.analysis.spikes.trend import FEWEST_ROWS, Span, rises
from lab.core.windows import NORMAL, WINDOW, Numbers, has_risen, noise_of
from labwatch.events.flagged import lasting_medians

# A reward falls slowly where a median over many rows has lost half of the largest one, and so many times its noise.
SLOW_NOISE = 3.0
# A move of samples lasts at least so many rows; and medians that drift are those of so many.
LASTING_ROWS, SLOW_ROWS, SMOOTH_ROWS = 10, 20, 5
# A reward of a few rows falls if its last rows lie below so many before, by so many times the noise. It begins to fall
# in the first of rows that each fall by so many.
LAST_ROWS, USUAL_ROWS, SHORT_NOISE, ONSET_NOISE = 3, 5, 6.0, 3.0
# What falls is small at this share of its usual value.
SMALL = 0.05
# Most of a departure is done between these shares of it. It may come before the reward that it brings, which is looked
# for in so many times the rows.
BEGUN, DONE, LATER = 0.1, 0.9, 3


class Departure(NamedTuple):
    """A kind of alarm of reinforcement learning.

    Attributes:
        column: what departs.
        falls: whether it falls, or else rises.
        share: the least change, as a share of the usual value.
        least: and in the unit of the column.
        lasts: whether only what lasts counts, also if it is too slow for a trend.
        may_learn: whether it is no alarm while the reward rises.
    """

    column: str
    falls: bool
    share: float
    least: float = 0.0
    lasts: bool = False
    may_learn: bool = False


DEPARTURES = {
    "reward_fall": Departure("reward", True, 0.2),
    "entropy_fall": Departure("entropy", True, 0.5, may_learn=True),
    "kl_growth": Departure("kl", False, 1.0, may_learn=True),
    "update_kl_growth": Departure("update_kl", False, 1.0, may_learn=True),
    "gradient_spike": Departure("grad_norm", False, 1.0),
    "zero_variance_growth": Departure("zero_variance", False, 0.5, 0.5, lasts=True, may_learn=True),
    "length_growth": Departure("response_length", False, 1.0, lasts=True, may_learn=True),
    "length_fall": Departure("response_length", True, 0.5, lasts=True, may_learn=True),
    "truncation_growth": Departure("truncated", False, 0.5, 0.2, lasts=True, may_learn=True),
    "clipping_growth": Departure("clip_fraction", False, 1.0, 0.1, lasts=True, may_learn=True),
}


def departures(
    step_n: NDArray[np.int64], columns: Mapping[str, Numbers]
) -> Iterator[tuple[str, list[Span], list[Span]]]:
    """Of each kind whose column is known the departures that are large: alarms, and those that learning explains."""
    reward_n = columns.get("reward", np.full(len(step_n), math.nan))
    for kind, each in DEPARTURES.items():
        if each.column not in columns:
            continue
        value_n = columns[each.column]
        found = [span for span in _sudden(step_n, value_n, each) if _is_large(value_n, span, each)]
        if each.column == "reward":
            found = found or list(_slow_fall(value_n)) or list(_short_fall(value_n))
            found = [_from_onset(value_n, span) for span in found]
        elif each.lasts:
            found = found or list(_slow(value_n, each))
        learned = [span for span in found if each.may_learn and _reward_rises(reward_n, value_n, span)]
        yield kind, [span for span in found if span not in learned], learned


def _sudden(step_n: NDArray[np.int64], value_n: Numbers, each: Departure) -> Iterator[Span]:
    """Departures from the trend.

    The trend of a reward and of a share is its own. What else rises or falls may vary by orders of magnitude, so its
    trend is that of a logarithm, of what is small of the value: of what falls, smaller than the usual value.
    """
    sign, size = -1 if each.falls else 1, float(np.nanmedian(np.abs(value_n))) or 1.0
    if each.column == "reward" or each.least:
        found = rises(step_n, sign * value_n, may_grow=each.column != "reward")
        found = [span._replace(usual=sign * span.usual) for span in found]
    else:
        size *= SMALL if each.falls else 1
        found = rises(step_n, sign * np.arcsinh(value_n / size), may_grow=True)
        found = [span._replace(usual=size * math.sinh(sign * span.usual)) for span in found]
    yield from map(_without_loss, found)


def _is_large(value_n: Numbers, span: Span, each: Departure) -> bool:
    """Whether a change is large, at its farthest, or of what must last in its median row."""
    during_n = value_n[span.first : span.last + 1]
    if each.lasts and np.isfinite(during_n).sum() < LASTING_ROWS:
        return False
    farthest = np.nanmedian if each.lasts else np.nanmin if each.falls else np.nanmax
    change = (farthest(during_n) - span.usual) * (-1 if each.falls else 1)
    return bool(change >= max(each.share * abs(span.usual), each.least))


def _slow(value_n: Numbers, each: Departure) -> Iterator[Span]:
    """What drifts too slowly for its trend, by medians beside the smallest or the largest one before.

    It begins after the last row in which a tenth of it is done.
    """

    def beyond(median_n: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
        usual_n = (np.maximum if each.falls else np.minimum).accumulate(median_n)
        change_n = usual_n - median_n if each.falls else median_n - usual_n
        return change_n > np.maximum(each.share * np.abs(usual_n), each.least), usual_n

    known_n = np.flatnonzero(np.isfinite(value_n))
    rows = min(max(len(known_n) // 5, LASTING_ROWS), SLOW_ROWS)
    smooth_n = value_n.copy()  # since shares of a few groups have few values, and so have their medians
    smooth_n[known_n] = scipy.ndimage.uniform_filter(value_n[known_n], SMOOTH_ROWS, mode="nearest")
    for span in _ended(value_n, lasting_medians(smooth_n, beyond, rows)):
        during_n = known_n[known_n <= span.first]
        share_n = (_smooth(value_n[during_n]) - span.usual) / (
            np.nanmedian(value_n[span.first : span.last + 1]) - span.usual
        )
        begun = np.flatnonzero(share_n <= BEGUN)
        yield span._replace(first=int(during_n[begun[-1] + 1 if len(begun) and begun[-1] + 1 < len(during_n) else 0]))


def _slow_fall(reward_n: Numbers) -> Iterator[Span]:
    """A reward that falls too slowly for its trend: medians stay below half of the largest."""
    known_n = np.flatnonzero(np.isfinite(reward_n))

    def below(median_n: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
        best_n = np.maximum.accumulate(median_n)
        noise = NORMAL * float(np.median(np.abs(np.diff(reward_n[known_n]))))
        return median_n < best_n - np.maximum(np.abs(best_n) / 2, SLOW_NOISE * noise), best_n

    yield from _ended(reward_n, lasting_medians(reward_n, below))


def _short_fall(reward_n: Numbers) -> Iterator[Span]:
    """The fall of a reward to the end of a log too short for a trend.

    The last rows are all below all of those before the fall, and their median by a fifth of the usual value, by half of
    the range of the rows before, and by many times the noise.
    """
    known_n = np.flatnonzero(np.isfinite(reward_n))
    value_n = reward_n[known_n]
    if not 2 * USUAL_ROWS <= len(value_n) < FEWEST_ROWS:
        return
    for first in range(USUAL_ROWS, len(value_n) - LAST_ROWS + 1):
        before_n, last = value_n[:first], float(np.median(value_n[-LAST_ROWS:]))
        usual = float(np.median(before_n[-USUAL_ROWS:]))
        least = max(0.2 * abs(usual), float(np.ptp(before_n)) / 2, SHORT_NOISE * noise_of(value_n))
        if value_n[first:].max() < before_n[-USUAL_ROWS:].min() and usual - last >= least:
            yield Span(int(known_n[first]), int(known_n[-1]), usual, "stuck", int(known_n[-1]))
            return


def _from_onset(reward_n: Numbers, span: Span) -> Span:
    """A fall from the first of the rows before it that each fall by more than noise."""
    known_n = np.flatnonzero(np.isfinite(reward_n))
    fall_n, row = -np.diff(reward_n[known_n]), int(np.searchsorted(known_n, span.first))
    # of rows before the fall, so that its first row stays what it is while a log grows
    noise = noise_of(reward_n[known_n[max(row - WINDOW, 0) : row]])
    while row > 1 and fall_n[row - 2] > ONSET_NOISE * noise:
        row -= 1
    return span._replace(first=int(known_n[row]))


def _ended(value_n: Numbers, spans: Iterator[Span]) -> Iterator[Span]:
    """Spans that ended, or last to the last known row."""
    last = np.flatnonzero(np.isfinite(value_n))[-1:]
    for span in spans:
        yield span._replace(ending="stuck" if span.last in last else "recovered", end=span.last)


def _without_loss(span: Span) -> Span:
    """A span whose ending says nothing of a loss at initialization."""
    return span._replace(ending="stuck") if span.ending in ("diverged", "anew") else span


def _reward_rises(reward_n: Numbers, value_n: Numbers, span: Span) -> bool:
    """Whether the reward rises over the rows in which most of a departure is done, or soon after."""
    known_n = np.flatnonzero(np.isfinite(value_n[: span.last + 1]))
    gone_n, during_n = _smooth(value_n[known_n]) - span.usual, known_n >= span.first
    whole = float(np.median(gone_n[during_n]))
    done = int(np.argmax((gone_n / whole >= DONE) & during_n)) if whole else int(np.argmax(during_n))
    begun = np.flatnonzero(np.abs(gone_n[:done]) <= BEGUN * abs(whole))
    first = int(known_n[begun[-1] + 1]) if len(begun) else span.first
    until = max(int(known_n[done]), first + LASTING_ROWS // 2 - 1)
    return has_risen(reward_n[:first], reward_n[first : first + LATER * (until + 1 - first)])


def _smooth(value_n: Numbers) -> Numbers:
    return np.asarray(scipy.ndimage.median_filter(value_n, SMOOTH_ROWS, mode="nearest"))
