"""Loss spikes in the log of any program: rises of one row, or of the mean of several, above the recent trend.

The loss of a language model falls steeply at first and slowly later, and its noise differs from log to log. So the
usual loss is not a level but a line through the calm rows before, drawn over the logarithm of the step, in which power
laws of training are nearly straight. Its slope is the median of slopes between pairs of rows (Theil 1950, Sen 1968),
all a quarter of the window apart, so that neither outliers nor a sudden fall turn it. The tolerance is what this line
missed so far in the same log. A rise too small for one row shows in the mean of several.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.core.windows import Numbers, finite_median, window_statistics

# Rows before the first row that is judged; and rows whose misses (loss minus the line) make the tolerance, by scale.
FEWEST, PASTS = 20, (128, 128, 128, 160, 256, 256, 256)
FEWEST_ROWS = FEWEST // 2 + FEWEST + 1  # rows for a first line, rows for misses, and a row to judge
OFFSET = 100.0  # steps; without it the logarithm would stretch the first ones
# The line is drawn through the rows of the last ``LINE_STEPS`` steps, but at least ``LEAST_ROWS`` and at most
# ``MOST_ROWS`` rows. It is moved up to the last ``RECENT`` rows if these lie above it.
LINE_STEPS, LEAST_ROWS, MOST_ROWS, RECENT = 400, 48, 96, 16
# Means over this many rows are judged, if they span no more than ``LONGEST`` steps; the first ``ALWAYS`` in any case.
SCALES, LONGEST, ALWAYS = (1, 2, 4, 8, 16, 32, 64), 256, 2
# A rise exceeds this many scaled median absolute deviations of earlier misses, by scale. The number grows by the share
# ``UNCERTAINTY`` over the number of misses. A rise is at least ``LEAST_RISE`` nats.
DEVIATIONS, UNCERTAINTY, LEAST_RISE = (8.0, 6.5, 6.0, 5.5, 5.5, 5.5, 5.5), 3.0, 0.05
# In one row, a rise of at least ``LEAST_BUMP`` nats takes fewer deviations, since noise seldom has that size.
BUMP, LEAST_BUMP = 6.0, 1.0
# So few rows in a row that are not finite, between finite ones, are no divergence.
ISOLATED = 2
# Training starts anew if, after a rise of at least ``LEAST_BUMP``, so many losses are those of the first rows, within
# this share of the rise.
RETRACED, RETRACED_SHARE = 5, 0.1
# A loss that ends above the first one by this factor, in so many rows, has exploded.
EXPLOSION, EXPLODED_ROWS = 1.5, 3
# Before there are enough rows for a trend, a row rises if it exceeds the one before by so many of the largest changes
# so far, and so many nats; the first rows are not judged so.
FEW_ROWS, FEW_CHANGES, LEAST_EARLY = 5, 4.0, 0.5
# Early in a log the loss bends, so line and tolerance use at most these shares of the rows so far.
YOUNG, YOUNG_PAST = 0.5, 0.5
# Over a gap without rows the line may fall too far; this share of its fall is added to the tolerance.
GAP = 0.5
# The spacing of steps is the median of this many before.
SPACINGS = 16
# A spike is over when the mean over the rows of its scale is back within ``BACK`` deviations for ``MERGE_STEPS`` steps,
# and at least ``MERGE_ROWS`` rows.
BACK, MERGE_STEPS, MERGE_ROWS = 2.0, 20, 5
# It is stuck after ``PATIENCE_STEPS`` steps, and diverged after ``LOST_STEPS`` above the first loss; but each after as
# many rows at least.
PATIENCE_STEPS, PATIENCE_ROWS, LOST_STEPS, LOST_ROWS = 300, 30, 100, 20
# Rows that are judged at once.
BLOCK = 256
RUNS = 64  # that are judged at once, few enough for the processor's cache
STEP, LOSS, LEVEL, SLOPE, SHIFT, MISSES = 0, 1, 2, 3, 4, 5
WIDTH = MISSES + len(SCALES)
KEPT = 2 * max(PASTS) + max(SCALES)


class Span(NamedTuple):
    """An event in rows of a log: from ``first`` up to ``last``, with its ending at row ``end``."""

    first: int
    last: int
    usual: float
    ending: str = "none"
    end: int | None = None


class Rise(NamedTuple):
    """A loss spike.

    Attributes:
        first, last: numbers of its rows, counted from the start of the log.
        step: training step at which it begins.
        usual: the loss of the trend there, nats/token.
        peak: the largest loss during it.
        ending: ``recovered``, ``stuck``, ``diverged``, ``isolated`` (the loss was not finite in a row or two), ``anew``
            (the losses are those of the first steps again), or ``none`` while it is under way.
        end: row of the ending; None without one.
        end_step: its step.
    """

    first: int
    last: int
    step: int
    usual: float
    peak: float
    ending: str = "none"
    end: int | None = None
    end_step: int | None = None

    @property
    def span(self) -> Span:
        return Span(self.first, self.last, self.usual, self.ending, self.end)


@dataclass
class _Event:
    """A rise under way, or one that ended so recently that a further rise would still belong to it."""

    rise: Rise
    scale: int  # rows of the mean that is judged
    calm: float  # the spike is over when that mean is no larger
    above: int = 0  # consecutive rows above the first loss
    rows: list[tuple[int, float]] = field(default_factory=list)  # the last ones, steps and losses

    def is_isolated(self, row: int) -> bool:
        """Whether it consists of a row or two, up to this one, that are not finite."""
        return self.rise.ending == "diverged" and not self.rows and row - self.rise.first < ISOLATED


class TrendWatch:
    """Follows the loss of one log, in pieces of any length, and finds its spikes, in memory of fixed size."""

    def __init__(self) -> None:
        self.history = np.empty((0, WIDTH))
        self.row = -1
        self.at_start = math.inf
        self.first = list[float]()  # the losses of the first rows
        self.event: _Event | None = None

    def add(self, step_n: NDArray[np.int64], loss_n: Numbers) -> Iterator[Rise]:
        """Read rows with increasing steps; yields each spike when it begins, and again when it has ended."""
        self.first += [loss for loss in loss_n[:RETRACED].tolist() if math.isfinite(loss)][: RETRACED - len(self.first)]
        at = 0
        while at < len(step_n):
            if self.event and self.event.is_isolated(self.row) and math.isfinite(loss_n[at]):
                self.event.rise = self.event.rise._replace(
                    ending="isolated", end=self.row + 1, end_step=int(step_n[at])
                )
            if (self.event and self.event.rise.ending == "none") or not math.isfinite(loss_n[at]):
                yield from self._add_one(int(step_n[at]), float(loss_n[at]))
                at += 1
            else:
                stop = at + self._rows_until_closed(loss_n[at : at + BLOCK])
                calm, begun = self._judge(step_n[at:stop], loss_n[at:stop])
                at += calm
                yield from begun

    def rewind(self, step: int) -> None:
        """Drop the rows from a step on, which are about to be written again."""
        event = self.event
        if event and event.rise.step >= step:
            self.row -= len(event.rows)
            self.event = None
        elif event:
            kept = [each for each in event.rows if each[0] < step]
            self.row -= len(event.rows) - len(kept)
            event.rows = kept
            if event.rise.end_step is not None and event.rise.end_step >= step:
                event.rise = event.rise._replace(ending="none", end=None, end_step=None)
            event.rise = event.rise._replace(last=min(event.rise.last, self.row))
        kept_n = self.history[:, STEP] < step
        self.row -= int(np.sum(~kept_n))
        self.history = self.history[kept_n]

    def state(self) -> dict[str, Any]:
        """The state, as values for JSON."""
        event = asdict(self.event) | {"rise": self.event.rise._asdict()} if self.event else None
        return {
            "history": self.history.tolist(),
            "row": self.row,
            "at_start": self.at_start,
            "first": self.first,
            "event": event,
        }

    @classmethod
    def resume(cls, state: dict[str, Any]) -> TrendWatch:
        """Make the one that had this state."""
        watch = cls()
        watch.history = np.array(state["history"], dtype=float).reshape(-1, WIDTH)
        watch.row, watch.at_start, watch.first = int(state["row"]), float(state["at_start"]), list(state["first"])
        if event := state["event"]:
            rows = [(int(step), float(loss)) for step, loss in event["rows"]]
            watch.event = _Event(**event | {"rise": Rise(**event["rise"]), "rows": rows})
        return watch

    def finish(self) -> Iterator[Rise]:
        """The spike under way at the end of the log, if any."""
        if self.event:
            rise = self.event.rise
            if rise.ending == "none" and exploded([loss for _, loss in self.event.rows], self.at_start):
                rise = rise._replace(ending="diverged", end=self.row, end_step=self.event.rows[-1][0])
            yield rise

    def _spacing(self) -> float:
        step_n = self.history[-SPACINGS - 1 :, STEP]
        return max(float(np.median(np.diff(step_n))), 1.0) if len(step_n) > 1 else 1.0

    def _rows(self, steps: int, least: int) -> int:
        return max(least, round(steps / self._spacing()))

    def _rows_until_closed(self, loss_n: Numbers) -> int:
        """How many rows are judged together: finite ones, up to the row at which an ended event is closed."""
        odd = np.flatnonzero(~np.isfinite(loss_n))
        finite = int(odd[0]) if len(odd) else len(loss_n)
        if self.event is None:
            return finite
        return max(1, min(finite, self.event.rise.last + self._rows(MERGE_STEPS, MERGE_ROWS) - self.row))

    def _judge(self, step_n: NDArray[np.int64], loss_n: Numbers) -> tuple[int, list[Rise]]:
        """Read rows up to the first that rises; returns how many were read, and spikes that begin or end there."""
        piece, unjudged, spacing = _same_spacing(self.history[:, STEP], step_n)
        step_n, loss_n = step_n[:piece], loss_n[:piece]
        if math.isinf(self.at_start):
            self.at_start = float(loss_n[0])
        both = measured(self.history, step_n, loss_n, spacing, unjudged)
        rise_nk, allowed_nk, back_nk = judged(both, len(self.history), spacing)
        high_nk = rise_nk > allowed_nk
        if self.event:  # rows no higher than the calm level do not belong to the event
            high_nk &= (loss_n > self.event.calm)[:, None]
        rows = np.flatnonzero(high_nk.any(1))
        calm = int(rows[0]) if len(rows) else piece
        self.row += calm
        if not len(rows):
            self.history = both[-KEPT:]
            return piece, self._closed()
        high = np.flatnonzero(high_nk[calm])
        scale = int(high[np.argmax(rise_nk[calm, high] / allowed_nk[calm, high])])
        self.row += 1
        end = len(self.history) + calm + 1
        begun = self._begin(both[:end], SCALES[scale], float(rise_nk[calm, scale]), float(back_nk[calm, scale]))
        return calm + 1, begun

    def _begin(self, both: Numbers, scale: int, rise: float, back: float) -> list[Rise]:
        """Begin a spike in one of the last ``scale`` rows; rows from there on are no part of the trend."""
        line = both[-scale - 1]
        usual_s = line[LEVEL] + line[SHIFT] + line[SLOPE] * axis(both[-scale:, STEP])
        loss_s = both[-scale:, LOSS]
        first = int(np.flatnonzero(loss_s > usual_s + rise / 2)[0])
        members = both[len(both) - scale + first :]
        self.history = both[: len(both) - len(members)][-KEPT:]
        rows = [(int(row[STEP]), float(row[LOSS])) for row in members]
        usual = float(usual_s[first])
        peak = float(members[:, LOSS].max())
        if self.event:  # the rise belongs to the spike that had just ended
            old = self.event.rise
            again = old._replace(last=self.row, peak=max(peak, old.peak), ending="none", end=None, end_step=None)
            self.event = _Event(again, max(scale, self.event.scale), self.event.calm, 0, rows)
            return []
        begun = Rise(self.row - len(members) + 1, self.row, rows[0][0], usual, peak)
        self.event = _Event(begun, scale, usual + back, 0, rows)
        return [begun]

    def _add_one(self, step: int, loss: float) -> Iterator[Rise]:
        """Read a row of a spike, or one that is not finite."""
        self.row += 1
        if not math.isfinite(loss):
            yield from self._diverge(step, loss)
            return
        assert self.event is not None
        event = self.event
        event.rise = event.rise._replace(last=self.row, peak=max(loss, event.rise.peak))
        event.above = event.above + 1 if loss > self.at_start else 0
        event.rows = [*event.rows, (step, loss)][-MOST_ROWS:]
        recent = [each for _, each in event.rows[-event.scale :]]
        if sum(recent) / len(recent) <= event.calm:
            event.rise = event.rise._replace(ending="recovered", end=self.row, end_step=step)
        elif self._starts_anew(event):
            yield self._settle("anew", step)
        elif event.above >= self._rows(LOST_STEPS, LOST_ROWS):
            yield self._settle("diverged", step)
        elif self.row - event.rise.first >= self._rows(PATIENCE_STEPS, PATIENCE_ROWS) and not event.above:
            yield self._settle("stuck", step)

    def _starts_anew(self, event: _Event) -> bool:
        """Whether the losses of the event are those of the first rows again."""
        height = event.rise.peak - event.rise.usual
        if height < LEAST_BUMP or not len(event.rows) == len(self.first) == RETRACED:
            return False
        losses = [loss for _, loss in event.rows]
        return bool(np.abs(np.subtract(losses, self.first)).max() <= RETRACED_SHARE * height)

    def _diverge(self, step: int, loss: float) -> Iterator[Rise]:
        """Read a loss that is not finite: it makes a spike of its own, or ends the one under way."""
        if self.event is None:
            usual = float(self.history[-1, LOSS]) if len(self.history) else math.nan
            self.event = _Event(Rise(self.row, self.row, step, usual, loss, "diverged", self.row, step), 1, usual)
            yield self.event.rise
            return
        rise = self.event.rise._replace(last=self.row)
        is_known = rise.ending == "diverged"
        self.event.rise = rise if is_known else rise._replace(ending="diverged", end=self.row, end_step=step)

    def _settle(self, ending: str, step: int) -> Rise:
        """End a spike whose loss stays high; the trend begins anew there."""
        assert self.event is not None
        ended = self.event.rise._replace(ending=ending, end=self.row, end_step=step)
        step_n, loss_n = (np.array(column) for column in zip(*self.event.rows, strict=True))
        self.history = measured(np.empty((0, WIDTH)), step_n, loss_n, self._spacing())
        self.event = None
        return ended

    def _closed(self) -> list[Rise]:
        """The spike that was over, once enough calm rows followed that no later rise belongs to it."""
        if self.event and self.row - self.event.rise.last >= self._rows(MERGE_STEPS, MERGE_ROWS):
            ended, self.event = self.event.rise, None
            return [ended]
        return []


def _same_spacing(known_n: Numbers, step_n: NDArray[np.int64]) -> tuple[int, int, float]:
    """How many rows may be judged with the spacing of those before them: up to the first where it has changed.

    And how many of these are the first of a log, which are not judged and need no spacing; and the spacing.
    """
    wide_n = np.concatenate([known_n[-SPACINGS - 1 :], step_n])
    unjudged = max(0, SPACINGS + 1 - len(wide_n) + len(step_n))
    if unjudged >= len(step_n):
        return len(step_n), len(step_n), 1.0
    spacing_n = np.median(sliding_window_view(np.diff(wide_n), SPACINGS), axis=1)
    changed = np.flatnonzero(spacing_n[: len(step_n) - unjudged] != spacing_n[0])
    piece = unjudged + int(changed[0]) if len(changed) else len(step_n)
    return piece, unjudged, max(float(spacing_n[0]), 1.0)


def scales_at(spacing: float) -> int:
    """Over how many of ``SCALES`` means are judged, by the spacing of the steps."""
    return max(ALWAYS, sum(scale <= LONGEST / spacing for scale in SCALES))


def axis(step_n: Numbers) -> Numbers:
    """The axis ``[n]`` over which the trend is a line: the logarithm of the step plus ``OFFSET``."""
    return np.log(step_n + OFFSET)


def measured(
    history: Numbers, step_n: NDArray[np.int64], loss_n: Numbers, spacing: float, unjudged: int = 0
) -> Numbers:
    """The history and the rows after it ``[n, WIDTH]``: of each row its line, and by how much means missed the line.

    Means of the ``unjudged`` first rows are taken at all scales, since the spacing to come is unknown. Losses and
    history may have leading axes, of runs with the same steps.
    """
    new = np.full((*loss_n.shape, WIDTH), math.nan)
    new[..., STEP], new[..., LOSS] = step_n, loss_n
    both = np.concatenate([history, new], axis=-2)
    known, rows = history.shape[-2], both.shape[-2]
    loss_and_place = np.stack([both[..., LOSS], axis(both[..., STEP])])
    row_n = np.arange(max(known, FEWEST // 2 - 1), rows)
    rows_of_line = min(max(LEAST_ROWS, round(LINE_STEPS / spacing)), MOST_ROWS)
    through_n = np.clip(np.round(YOUNG * (row_n + 1)), FEWEST // 2, rows_of_line).astype(np.int64)
    both[..., row_n, LEVEL:MISSES] = lines(loss_and_place[1], loss_and_place[0], row_n, through_n)
    scales = scales_at(spacing)
    for index, scale in enumerate(SCALES):
        begin, end = max(known, scale), rows if index < scales else known + unjudged
        if begin >= end:
            continue
        line = both[..., begin - scale : end - scale, :]
        loss, place = sliding_window_view(loss_and_place[..., begin - scale + 1 : end], scale, axis=-1).mean(-1)
        both[..., begin:end, MISSES + index] = loss - (line[..., LEVEL] + line[..., SHIFT] + line[..., SLOPE] * place)
    return both


def lines(place: Numbers, loss: Numbers, row_n: NDArray[np.int64], through_n: NDArray[np.int64]) -> Numbers:
    """Level at 0, slope and shift ``[n, 3]`` of lines through the losses; their slopes are never positive.

    The shift moves a line up to the last rows if these lie above it; otherwise, after a sudden fall of the loss, the
    line would lie far too low.

    Args:
        place: where the losses stand on the axis.
        loss: the losses.
        row_n: the last row through which each line is drawn.
        through_n: how many rows up to there each line is drawn through.
    """
    age_w = np.arange(through_n.max(initial=1))[::-1]
    row_nw = np.maximum(row_n[:, None] - age_w, 0)
    place_nw, loss_nw = place[..., row_nw], loss[..., row_nw]
    apart_n = np.maximum(1, through_n // 4)
    earlier_nw = np.maximum(row_nw - apart_n[:, None], 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes_nw = (loss_nw - loss[..., earlier_nw]) / (place_nw - place[..., earlier_nw])
    slope_n = np.minimum(_median_of_last(slopes_nw, age_w, through_n - apart_n), 0.0)
    rest_nw = loss_nw - slope_n[..., None] * place_nw
    level_n = _median_of_last(rest_nw, age_w, through_n)
    shift_n = np.maximum(_median_of_last(rest_nw, age_w, np.minimum(through_n, RECENT)) - level_n, 0.0)
    return np.stack([level_n, slope_n, shift_n], axis=-1)


def _median_of_last(value_nw: Numbers, age_w: NDArray[np.int64], count_n: NDArray[np.int64]) -> Numbers:
    """The median of the ``count_n`` last values of each row."""
    return finite_median(np.where(age_w < count_n[:, None], value_nw, math.nan), count_n)


def judged(both: Numbers, known: int, spacing: float) -> tuple[Numbers, Numbers, Numbers]:
    """Rise, tolerance and calm level ``[n, k]`` of each row after the ``known`` ones, at each scale; above the line.

    The rise is that of the mean over the rows of the scale. It may reach the tolerance, and below the calm level a
    spike is over. All are infinite where too few rows are known, and where the rise is too small for any tolerance.
    """
    miss_nk = both[..., MISSES : MISSES + scales_at(spacing)]
    shape = miss_nk[..., known:, :].shape
    rise_nk, allowed_nk, back_nk = (np.full(shape, infinite) for infinite in (-math.inf, math.inf, math.inf))
    for index in range(shape[-1]):
        scale, miss_n = SCALES[index], miss_nk[..., index]
        found = np.argwhere(miss_n > LEAST_RISE)  # no tolerance is smaller
        found = found[found[:, -1] >= max(known, FEWEST_ROWS + scale - 2)]  # before, too few rows have misses
        if not len(found):
            continue
        *run, row_n = found.T
        past = min(PASTS[index], miss_n.shape[-1])
        padded = np.concatenate([np.full((*miss_n.shape[:-1], past + scale - 1), math.nan), miss_n], axis=-1)
        past_nw = sliding_window_view(padded, past, axis=-1)[(*run, row_n)]
        oldest_n = np.maximum(YOUNG_PAST * row_n, FEWEST + scale)
        if oldest_n.min() < past:
            past_nw = np.where(np.arange(past, 0, -1) <= oldest_n[:, None], past_nw, math.nan)
        median_n, deviation_n = window_statistics(past_nw, FEWEST)
        count_n = np.isfinite(past_nw).sum(1) / scale
        with np.errstate(divide="ignore", invalid="ignore"):
            times_n = DEVIATIONS[index] * (1 + UNCERTAINTY / count_n)
            fall_n = _fall_over_gaps(both[(*run, row_n)], both[(*run, row_n - scale)], scale * spacing)
            usual_n = np.maximum(median_n, 0.0) + GAP * fall_n
            least_n = np.maximum(times_n * deviation_n, LEAST_RISE)
            if scale == 1:
                least_n = np.minimum(least_n, np.maximum(BUMP / DEVIATIONS[0] * times_n * deviation_n, LEAST_BUMP))
        is_known = np.isfinite(usual_n + least_n)
        *run, row_n = found[is_known].T
        at = (*run, row_n - known, index)
        rise_nk[at] = miss_n[(*run, row_n)]
        allowed_nk[at] = (usual_n + least_n)[is_known]
        back_nk[at] = (usual_n + BACK * deviation_n)[is_known]
    return rise_nk, allowed_nk, back_nk


def _fall_over_gaps(row_n: Numbers, line_n: Numbers, usual: float) -> Numbers:
    """How far the line falls ``[n]`` over steps without rows, such as those of a spike before."""
    gap_n = row_n[:, STEP] - line_n[:, STEP] - usual
    fall_n = -line_n[:, SLOPE] * np.maximum(gap_n, 0.0) / (row_n[:, STEP] + OFFSET)
    return np.where(np.isfinite(fall_n), fall_n, 0.0)


def exploded(losses: Sequence[float], at_start: float) -> bool:
    """Whether the last losses lie far above the first one."""
    last = losses[-EXPLODED_ROWS:]
    return len(last) == EXPLODED_ROWS and min(last) > EXPLOSION * at_start


def rises_early(loss_n: Numbers) -> NDArray[np.bool_]:
    """Which of the rows after the first ``FEW_ROWS``, too early for a trend, rise by far more than any did before."""
    with np.errstate(invalid="ignore"):
        change_n = np.diff(loss_n[..., :FEWEST_ROWS])
        most_n = np.maximum.accumulate(np.abs(change_n), axis=-1)
        rises_n: NDArray[np.bool_] = change_n[..., FEW_ROWS - 1 :] > np.fmax(
            LEAST_EARLY, FEW_CHANGES * most_n[..., FEW_ROWS - 2 : -1]
        )
    return rises_n


def early_spikes(step_n: NDArray[np.int64], loss_n: Numbers) -> Iterator[Rise]:
    """The first spike that begins before there are enough rows for a trend."""
    stops_n = rises_early(loss_n) | ~np.isfinite(loss_n[FEW_ROWS:FEWEST_ROWS])
    row = FEW_ROWS + int(np.argmax(stops_n)) if stops_n.any() else 0
    if not row or not math.isfinite(loss_n[row]):
        return
    usual, change = float(loss_n[row - 1]), float(np.abs(np.diff(loss_n[:row])).max())
    below = np.flatnonzero(loss_n[row:] <= usual + max(LEAST_RISE, change))
    last = row + int(below[0]) if len(below) else len(loss_n) - 1
    ending, end = ("recovered", last) if len(below) else ("none", None)
    if not len(below) and exploded(loss_n[row:].tolist(), float(loss_n[0])):
        ending, end = "diverged", last
    peak = float(loss_n[row : last + 1].max())
    yield Rise(row, last, int(step_n[row]), usual, peak, ending, end, None if end is None else int(step_n[end]))


def spikes_of_runs(runs: Sequence[tuple[NDArray[np.int64], Numbers]]) -> list[tuple[Span, ...]]:
    """The ``loss_spikes`` of each run; of short runs with the same steps, those without any are found all at once."""
    alike = defaultdict[bytes, list[int]](list)
    for number, (step_n, loss_n) in enumerate(runs):
        if len(step_n) <= BLOCK and np.isfinite(loss_n).all():
            alike[step_n.tobytes()].append(number)
    calm = set[int]()
    for numbers in alike.values():
        for first in range(0, len(numbers), RUNS):
            some = numbers[first : first + RUNS]
            is_calm_r = _are_calm(runs[some[0]][0], np.stack([runs[number][1] for number in some]))
            calm.update(np.array(some)[is_calm_r].tolist())
    return [() if number in calm else loss_spikes(*run) for number, run in enumerate(runs)]


def _are_calm(step_n: NDArray[np.int64], loss_rn: Numbers) -> NDArray[np.bool_]:
    """Which runs ``[r]`` have no loss spike, if their spacing never changes; their losses are finite."""
    piece, unjudged, spacing = _same_spacing(np.empty(0), step_n)
    if piece < len(step_n):
        return np.zeros(len(loss_rn), dtype=bool)
    both = measured(np.empty((len(loss_rn), 0, WIDTH)), step_n, loss_rn, spacing, unjudged)
    rise_rnk, allowed_rnk, _ = judged(both, 0, spacing)
    return np.asarray(~((rise_rnk > allowed_rnk).any((1, 2)) | rises_early(loss_rn).any(1)))


def loss_spikes(step_n: NDArray[np.int64], loss_n: Numbers) -> tuple[Span, ...]:
    """The loss spikes of a whole run, from its losses at increasing steps."""
    return _loss_spikes(step_n.astype(np.int64).tobytes(), loss_n.astype(np.float64).tobytes())


@lru_cache(maxsize=512)  # several claims and figures read the same runs
def _loss_spikes(steps: bytes, losses: bytes) -> tuple[Span, ...]:
    step_n, loss_n, watch = np.frombuffer(steps, np.int64), np.frombuffer(losses, np.float64), TrendWatch()
    found = {rise.first: rise for rise in [*watch.add(step_n, loss_n), *watch.finish()]}
    early = [] if any(first < FEWEST_ROWS for first in found) else early_spikes(step_n, loss_n)
    return tuple(rise.span for rise in [*early, *found.values()])
