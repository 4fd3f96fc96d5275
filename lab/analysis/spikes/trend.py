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
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.core.windows import Numbers, finite_median, noise_of, window_statistics

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
# A loss explodes above another if it exceeds it by this factor, and by ``LEAST_BUMP``; it has diverged if it stays
# above the first one for so many rows, up to the end.
EXPLOSION, EXPLODED_ROWS = 1.5, 3
# Among the first ``EARLY_ROWS`` rows there is no trend, or a steep start bends it. So a row at the end of some that
# rise one after another is compared with each before it, too. It rises above one by more than twice the range of the
# losses up to there, or ``LEAST_EARLY`` nats; by ``EARLY_CHANGES`` times the largest rise from row to row up to there;
# by ``REBOUND`` times the fall to it; and by as many deviations as above a trend over the root of the number of rows,
# where the noise is taken from second or third differences, of which there are at least ``EARLY_BENDS``. Also without
# these it rises by ``LEAST_BUMP`` and by ``EARLY_CHANGES`` times the largest change, with few changes by more; if the
# losses before only fell, by as many deviations of the largest second difference; or if it exceeds all of them by this
# many nats and this factor, ``EARLY_EXPLOSION``.
EARLY_RANGES, LEAST_EARLY, EARLY_CHANGES, REBOUND, EARLY_BENDS = 2.0, 0.5, 4.0, 2.0, 3
EARLY_EXPLOSION, EARLY_ROWS, TURNED_ROWS = (3.0, 2.0), 60, 3
# Early in a log the loss bends, so line and tolerance use at most these shares of the rows so far.
YOUNG, YOUNG_PAST = 0.5, 0.5
# Over a gap without rows the line may fall too far; this share of its fall is added to the tolerance. A loss that has
# stayed high comes back late if it falls to the level before, and lower by this share of the fall of the line since.
GAP, RETURN = 0.5, 0.25
# The spacing of steps is the median of this many before.
SPACINGS = 16
# A spike is over when the mean over the rows of its scale is back within ``BACK`` deviations for ``MERGE_STEPS`` steps,
# and at least ``MERGE_ROWS`` rows.
BACK, MERGE_STEPS, MERGE_ROWS = 2.0, 20, 5
# It is stuck after ``PATIENCE_STEPS`` steps, and diverged after ``LOST_STEPS`` above the first loss; but each after as
# many rows at least, of which the end of a log needs fewer, ``EXPLODED_ROWS``.
PATIENCE_STEPS, PATIENCE_ROWS, LOST_STEPS, LOST_ROWS = 300, 30, 100, 20
# A measurement in another unit is scaled to noise of so many nats, but at least to this share of its range.
NOISE, LEAST_NOISE = 0.02, 0.005
# Rows that are judged at once.
BLOCK = 256
PER_STEPS = 1000  # steps to which rates of spikes and of false alarms refer
RUNS = 64  # that are judged at once, few enough for the processor's cache
STEP, LOSS, CALM, LEVEL, SLOPE, SHIFT, MISSES = range(7)  # columns; CALM is the loss, but the usual one in a spike
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


@dataclass
class _Event:
    """A rise under way, or one that ended so recently that a further rise would still belong to it."""

    rise: Rise
    scale: int  # rows of the mean that is judged
    calm: float  # the spike is over when that mean is no larger; plus what a trend that grows has grown since
    slope: float  # of the trend before it
    is_early: bool = False  # whether it rises above rows before, and not above a trend
    above: int = 0  # consecutive rows above the first loss
    rows: list[tuple[int, float]] = field(default_factory=list)  # the last ones, steps and losses

    def back_from_no_number(self, row: int, step: int) -> Rise:
        """What it is once the loss is finite again: isolated, if it consists of a row or two that were not."""
        is_isolated = not self.rows and row - self.rise.first <= ISOLATED
        return self.rise._replace(ending="isolated" if is_isolated else "recovered", end=row, end_step=step)


class TrendWatch:
    """Follows the loss of one log, in pieces of any length, and finds its spikes, in memory of fixed size."""

    def __init__(self, steepest: float = 0.0) -> None:
        self.steepest = steepest  # the largest slope that a trend may have
        self.history = np.empty((0, WIDTH))
        self.row = -1
        self.at_start = math.inf
        self.first = list[float]()  # the losses of the first rows
        self.event: _Event | None = None
        self.lost = list[_Event]()  # stuck or diverged, and given up
        self.calm = -math.inf  # of the last of them, which is no rise while the trend after it is young
        self.tail = list[tuple[int, float]]()  # steps and losses of the last rows, from which means are taken

    def add(self, step_n: NDArray[np.int64], loss_n: Numbers) -> Iterator[Rise]:
        """Read rows with increasing steps; yields each spike when it begins, and again when it has ended."""
        self.first += [loss for loss in loss_n[:RETRACED].tolist() if math.isfinite(loss)][: RETRACED - len(self.first)]
        at = 0
        while at < len(step_n):
            if self.event and self.event.rise.ending == "diverged" and math.isfinite(loss_n[at]):
                self.event.rise = self.event.back_from_no_number(self.row + 1, int(step_n[at]))
            if (self.event and self.event.rise.ending == "none") or not math.isfinite(loss_n[at]):
                yield from self._add_one(int(step_n[at]), float(loss_n[at]))
                at += 1
            else:
                stop = at + self._rows_until_closed(loss_n[at : at + BLOCK])
                calm, begun = self._judge(step_n[at:stop], loss_n[at:stop])
                at += calm
                yield from begun
        yield from self._returned(step_n, loss_n)

    def _returned(self, step_n: NDArray[np.int64], loss_n: Numbers) -> Iterator[Rise]:
        """Spikes that were given up, and whose loss came back in one of these rows, the last that were read.

        It is back when the mean over the rows of the scale is at the calm level, from which is taken a share of what
        the trend before the spike would have fallen since.
        """
        rows = [*self.tail, *zip(step_n.tolist(), loss_n.tolist(), strict=True)]
        self.tail = rows[1 - max(SCALES) :]
        waiting, self.lost = self.lost, []
        for lost in waiting:
            step_m, loss_m = np.array(rows).T
            mean_n = sliding_window_view(loss_m, min(lost.scale, len(rows))).mean(-1)
            row_n = self.row - np.arange(len(mean_n))[::-1]
            fall_n = lost.slope * (axis(step_m[-len(mean_n) :]) - axis(np.array(lost.rise.step)))
            back = np.flatnonzero((mean_n <= lost.calm + RETURN * fall_n) & (row_n > lost.rise.last))
            if len(back):
                row = int(row_n[back[0]])
                yield lost.rise._replace(ending="recovered", end=row, end_step=rows[row - self.row - 1][0])
            else:
                self.lost.append(lost)

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
        self.lost = [lost for lost in self.lost if lost.rise.step < step]
        self.tail = [each for each in self.tail if each[0] < step]
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
            "lost": [(lost.rise._asdict(), lost.scale, lost.calm, lost.slope) for lost in self.lost],
            "calm": self.calm,
            "tail": self.tail,
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
        watch.lost = [_Event(Rise(**rise), *others) for rise, *others in state["lost"]]
        watch.calm = float(state["calm"])
        watch.tail = [(int(step), float(loss)) for step, loss in state["tail"]]
        return watch

    def finish(self) -> Iterator[Rise]:
        """The spike under way at the end of the log, if any."""
        if self.event:
            rise, losses = self.event.rise, [loss for _, loss in self.event.rows]
            since = min(len(losses) - EXPLODED_ROWS, int(np.argmax([*losses, -math.inf])))  # the peak
            has_exploded = since >= 0 and rise.peak > explosion(self.at_start)
            if rise.ending == "none" and losses:
                step = self.event.rows[-1][0]
                if has_exploded and min(losses[since:]) > self._lost_above(rise.usual):
                    rise = rise._replace(ending="diverged", end=self.row, end_step=step)
                elif step - rise.step >= PATIENCE_STEPS and len(losses) >= EXPLODED_ROWS:
                    rise = rise._replace(ending="stuck", end=self.row, end_step=step)
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
        both = measured(self.history, step_n, loss_n, spacing, unjudged, self.steepest)
        rise_nk, allowed_nk, back_nk = judged(both, len(self.history), spacing, may_grow=self.steepest > 0)
        high_nk = rise_nk > allowed_nk
        if self.event:  # rows no higher than the calm level do not belong to the event
            high_nk &= (loss_n > self.event.calm)[:, None]
        is_young_n = len(self.history) + np.arange(piece) < 2 * MOST_ROWS
        high_nk &= (~is_young_n | (loss_n > self.calm))[:, None]
        rows = np.flatnonzero(high_nk.any(1))
        calm = int(rows[0]) if len(rows) else piece
        self.row += calm
        if not len(rows):
            self.history = both[-KEPT:]
            return piece, self._closed()
        high = np.flatnonzero(high_nk[calm, :-1])
        index = int(high[np.argmax(rise_nk[calm, high] / allowed_nk[calm, high])]) if len(high) else -1
        self.row += 1
        end = len(self.history) + calm + 1
        scale, rise, back = SCALES[index] if len(high) else None, rise_nk[calm, index], back_nk[calm, index]
        return calm + 1, self._begin(both[:end], scale, float(rise), float(back))

    def _begin(self, both: Numbers, scale: int | None, rise: float, back: float) -> list[Rise]:
        """Begin a spike in one of the last ``scale`` rows; rows from there on are no part of the trend.

        Without a scale, early in a log, it begins after the last row that is calm, or has a tenth of the rise.
        """
        is_early = scale is None
        if scale is None:
            scale, slope, usual_s = 1, 0.0, np.full(len(both), both[-1, CALM] - rise)
            rows_in = len(both) - 1 - int(np.flatnonzero(both[:, CALM] <= usual_s + max(back, rise / 10))[-1])
        else:
            line = both[-scale - 1]
            slope = float(line[SLOPE])
            usual_s = line[LEVEL] + line[SHIFT] + slope * axis(both[-scale:, STEP])
            rows_in = scale - int(np.flatnonzero(both[-scale:, LOSS] > usual_s + rise / 2)[0])
        members, usual = both[-rows_in:], float(usual_s[-rows_in])
        self.history = both[:-rows_in][-KEPT:]
        rows = [(int(row[STEP]), float(row[LOSS])) for row in members]
        peak = float(members[:, LOSS].max())
        if self.event:  # the rise belongs to the spike that had just ended
            old = self.event.rise
            again = old._replace(last=self.row, peak=max(peak, old.peak), ending="none", end=None, end_step=None)
            self.event = replace(self.event, rise=again, scale=max(scale, self.event.scale), above=0, rows=rows)
            return []
        begun = Rise(self.row - len(members) + 1, self.row, rows[0][0], usual, peak)
        self.event = _Event(begun, scale, usual + back, slope, is_early, 0, rows)
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
        event.above = event.above + 1 if loss > self._lost_above(event.rise.usual) else 0
        event.rows = [*event.rows, (step, loss)][-MOST_ROWS:]
        recent = [each for _, each in event.rows[-event.scale :]]
        grown = max(event.slope, 0.0) * float(axis(np.array(step)) - axis(np.array(event.rise.step)))
        if sum(recent) / len(recent) <= event.calm + grown:
            event.rise = event.rise._replace(ending="recovered", end=self.row, end_step=step)
            self._count_early_rows()
        elif self._starts_anew(event):
            yield self._settle("anew", step)
        elif event.above >= self._rows(LOST_STEPS, LOST_ROWS):
            yield self._settle("diverged", step)
        elif self.row - event.rise.first >= self._rows(PATIENCE_STEPS, PATIENCE_ROWS) and not event.above:
            yield self._settle("stuck", step)

    def _count_early_rows(self) -> None:
        """Let the rows of a short spike count as usual ones if there is no trend yet, so that it comes no later."""
        assert self.event is not None
        rows, usual = self.event.rows, self.event.rise.usual
        if self.event.is_early and len(rows) <= FEWEST // 2:
            step_n, loss_n = (np.array(column) for column in zip(*rows, strict=True))
            _, unjudged, spacing = _same_spacing(self.history[:, STEP], step_n)
            self.history = measured(self.history, step_n, loss_n, spacing, unjudged, self.steepest)
            self.history[-len(rows) :, CALM] = np.minimum(loss_n, usual)
            self.event.rows = []

    def _lost_above(self, usual: float) -> float:
        """The loss above which nothing that was learned is left: that of the first row, if the loss has fallen since.

        A log may begin late in training, as after a resumption; then a loss that exploded is lost.
        """
        return self.at_start if self._begins_untrained(usual) else explosion(self.at_start)

    def _begins_untrained(self, usual: float) -> bool:
        """Whether the first row looks like the loss at initialization: by a nat, or half of it, above the usual one."""
        return self.at_start - usual >= min(LEAST_BUMP, abs(self.at_start) / 2)

    def _starts_anew(self, event: _Event) -> bool:
        """Whether the losses of the event are those of the first rows again."""
        height = event.rise.peak - event.rise.usual
        if not self._begins_untrained(event.rise.usual) or not len(event.rows) == len(self.first) == RETRACED:
            return False
        losses = [loss for _, loss in event.rows]
        return bool(np.abs(np.subtract(losses, self.first)).max() <= RETRACED_SHARE * height)

    def _diverge(self, step: int, loss: float) -> Iterator[Rise]:
        """Read a loss that is not finite: it makes a spike of its own, or ends the one under way."""
        if self.event is None:
            usual = float(self.history[-1, LOSS]) if len(self.history) else math.nan
            begun = Rise(self.row, self.row, step, usual, loss, "diverged", self.row, step)
            self.event = _Event(begun, 1, usual, 0.0)
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
        self.history = measured(np.empty((0, WIDTH)), step_n, loss_n, self._spacing(), steepest=self.steepest)
        if ending != "anew":
            self.lost.append(_Event(ended, self.event.scale, self.event.calm, self.event.slope))
            self.calm = self.event.calm
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
    history: Numbers,
    step_n: NDArray[np.int64],
    loss_n: Numbers,
    spacing: float,
    unjudged: int = 0,
    steepest: float = 0.0,
) -> Numbers:
    """The history and the rows after it ``[n, WIDTH]``: of each row its line, and by how much means missed the line.

    Means of the ``unjudged`` first rows are taken at all scales, since the spacing to come is unknown. Losses and
    history may have leading axes, of runs with the same steps. No slope is larger than ``steepest``.
    """
    new = np.full((*loss_n.shape, WIDTH), math.nan)
    new[..., STEP], new[..., LOSS], new[..., CALM] = step_n, loss_n, loss_n
    both = np.concatenate([history, new], axis=-2)
    known, rows = history.shape[-2], both.shape[-2]
    loss_and_place = np.stack([both[..., LOSS], axis(both[..., STEP])])
    row_n = np.arange(max(known, FEWEST // 2 - 1), rows)
    rows_of_line = min(max(LEAST_ROWS, round(LINE_STEPS / spacing)), MOST_ROWS)
    through_n = np.clip(np.round(YOUNG * (row_n + 1)), FEWEST // 2, rows_of_line).astype(np.int64)
    both[..., row_n, LEVEL:MISSES] = lines(loss_and_place[1], loss_and_place[0], row_n, through_n, steepest)
    scales = scales_at(spacing)
    for index, scale in enumerate(SCALES):
        begin, end = max(known, scale), rows if index < scales else known + unjudged
        if begin >= end:
            continue
        line = both[..., begin - scale : end - scale, :]
        loss, place = sliding_window_view(loss_and_place[..., begin - scale + 1 : end], scale, axis=-1).mean(-1)
        both[..., begin:end, MISSES + index] = loss - (line[..., LEVEL] + line[..., SHIFT] + line[..., SLOPE] * place)
    return both


def lines(
    place: Numbers, loss: Numbers, row_n: NDArray[np.int64], through_n: NDArray[np.int64], steepest: float = 0.0
) -> Numbers:
    """Level at 0, slope and shift ``[n, 3]`` of lines through the losses; their slopes are at most ``steepest``.

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
    slope_n = np.minimum(_median_of_last(slopes_nw, age_w, through_n - apart_n), steepest)
    rest_nw = loss_nw - slope_n[..., None] * place_nw
    level_n = _median_of_last(rest_nw, age_w, through_n)
    shift_n = np.maximum(_median_of_last(rest_nw, age_w, np.minimum(through_n, RECENT)) - level_n, 0.0)
    return np.stack([level_n, slope_n, shift_n], axis=-1)


def _median_of_last(value_nw: Numbers, age_w: NDArray[np.int64], count_n: NDArray[np.int64]) -> Numbers:
    """The median of the ``count_n`` last values of each row."""
    return finite_median(np.where(age_w < count_n[:, None], value_nw, math.nan), count_n)


def judged(both: Numbers, known: int, spacing: float, *, may_grow: bool = False) -> tuple[Numbers, Numbers, Numbers]:
    """Rise, tolerance and calm level ``[n, k]`` of each row after the ``known`` ones, at each scale; above the line.

    The rise is that of the mean over the rows of the scale. It may reach the tolerance, and below the calm level a
    spike is over. All are infinite where too few rows are known, and where the rise is too small for any tolerance.
    After the scales there are those of ``early_rises``, above one of the rows before; of what ``may_grow``, a rise over
    several rows may reach the tolerance in each of them.
    """
    miss_nk = both[..., MISSES : MISSES + scales_at(spacing)]
    *runs, rows, scales = miss_nk.shape
    shape = (*runs, rows - known, scales + 1)
    rise_nk, allowed_nk, back_nk = (np.full(shape, infinite) for infinite in (-math.inf, math.inf, math.inf))
    for index in range(scales):
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
            young_n = _fall_while_young(both, tuple(run), row_n, scale)
            least_n = np.maximum(times_n * deviation_n, LEAST_RISE)
            if scale == 1:
                least_n = np.minimum(least_n, np.maximum(BUMP / DEVIATIONS[0] * times_n * deviation_n, LEAST_BUMP))
        is_known = np.isfinite(usual_n + least_n)
        *run, row_n = found[is_known].T
        at = (*run, row_n - known, index)
        rise_nk[at] = miss_n[(*run, row_n)]
        allowed_nk[at] = (usual_n + young_n + least_n)[is_known]
        back_nk[at] = (usual_n + BACK * deviation_n)[is_known]
    for place, rise, allowed, rows in early_rises(both[..., CALM], known):
        at = (*place[:-1], place[-1] - known, -1)
        allowed *= rows if may_grow else 1
        rise_nk[at], allowed_nk[at], back_nk[at] = rise, allowed, allowed * BACK / DEVIATIONS[0]
    return rise_nk, allowed_nk, back_nk


def _fall_over_gaps(row_n: Numbers, line_n: Numbers, usual: float) -> Numbers:
    """How far the line falls ``[n]`` over steps without rows, such as those of a spike before."""
    gap_n = row_n[:, STEP] - line_n[:, STEP] - usual
    fall_n = -line_n[:, SLOPE] * np.maximum(gap_n, 0.0) / (row_n[:, STEP] + OFFSET)
    return np.where(np.isfinite(fall_n), fall_n, 0.0)


def _fall_while_young(both: Numbers, run: tuple[Any, ...], row_n: NDArray[np.int64], scale: int) -> Numbers:
    """How far the line of a log that has few rows falls ``[n]`` up to the mean of the rows of a scale.

    Where the loss falls so steeply that this exceeds ``LEAST_RISE``, it counts in full: the loss bends there, and what
    lies above such a line must also lie above the last row of it.
    """
    if row_n.min() >= 2 * LEAST_ROWS:
        return np.zeros(len(row_n))
    line_n = both[(*run, row_n - scale)]
    place_n = np.mean([axis(both[(*run, row_n - age)][:, STEP]) for age in range(scale)], axis=0)
    fall_n = line_n[:, SLOPE] * (axis(line_n[:, STEP]) - place_n)
    return np.where((row_n < 2 * LEAST_ROWS) & (fall_n > LEAST_RISE), fall_n, 0.0)


def explosion(loss: Any) -> Any:
    """The loss above which another one has exploded beside this one, whatever its sign."""
    return loss + np.maximum((EXPLOSION - 1) * np.abs(loss), LEAST_BUMP)


def early_rises(loss: Numbers, known: int) -> Iterator[tuple[tuple[int, ...], float, float, int]]:
    """Rises of the first rows after the ``known`` ones, by the rows before them alone.

    Args:
        loss: losses ``[..., n]``; leading axes are runs.
        known: how many rows were judged before.

    Yields:
        The place of a row, its rise above one before it, the tolerance, and how many rows lie between; the clearest
        where there are several.
    """
    if known >= EARLY_ROWS:
        return
    loss = loss[..., :EARLY_ROWS]
    falls_n = np.diff(loss, axis=-1, prepend=math.inf) <= 0
    low_n = np.maximum.accumulate(np.where(falls_n, np.arange(loss.shape[-1]), 0), axis=-1)
    rise_n = loss - np.take_along_axis(loss, low_n, -1)
    range_n = np.maximum.accumulate(loss, axis=-1) - np.minimum.accumulate(loss, axis=-1)
    is_large_n = rise_n > _least_early(np.take_along_axis(range_n, low_n, -1))
    for *run, row in np.argwhere(is_large_n & (np.arange(loss.shape[-1]) >= known)).tolist():
        loss_n = loss[(*run,)]
        lows = range(low_n[(*run, row)], row)
        rises = [
            (float(loss_n[row] - loss_n[low]), _early_tolerance(loss_n[: low + 1], row - low), row - low)
            for low in lows
        ]
        yield (*run, row), *max(rises, key=lambda each: each[0] / each[1])


def _least_early(range_n: Any) -> Any:
    """The least rise above losses of this range."""
    return np.clip(EARLY_RANGES * range_n, LEAST_RISE, LEAST_EARLY)


def _early_tolerance(before_n: Numbers, rows: int) -> float:
    """How far so many losses may rise above the last one before them."""
    highest, lowest, last = before_n.max(), before_n.min(), before_n[-1]
    nats, factor = EARLY_EXPLOSION
    tolerances = [max(highest + nats, factor * highest) - last if highest > 0 else math.inf]
    change_n = np.diff(before_n)
    if rows >= TURNED_ROWS and len(change_n) >= TURNED_ROWS and last > 0:
        tolerances.append(max(LEAST_BUMP, last, (highest - last) / 2, EARLY_CHANGES * change_n.max()))
    size_n, bend_n = np.abs(change_n), np.abs(np.diff(change_n))
    if len(bend_n):
        times = EARLY_CHANGES * (1 + UNCERTAINTY * EARLY_BENDS / len(change_n))
        tolerances.append(max(LEAST_BUMP, times * size_n.max()))
        if (change_n <= 0).all():
            tolerances.append(max(LEAST_BUMP, min(EARLY_CHANGES * size_n.max(), DEVIATIONS[0] * bend_n.max())))
    if len(bend_n) >= EARLY_BENDS:
        if rows == 1:
            tolerances.append(max(LEAST_EARLY, EARLY_CHANGES * size_n.max()))
        noises = [
            noise_of(before_n, order) * (1 + UNCERTAINTY * EARLY_BENDS / (len(before_n) - order))
            for order in (2, 3)
            if len(before_n) - order >= EARLY_BENDS
        ]
        changes = max(EARLY_CHANGES * change_n.max(), -REBOUND * change_n[-1])
        least = DEVIATIONS[0] / math.sqrt(rows) * min(noises)
        tolerances.append(max(_least_early(highest - lowest), least, changes))
    return float(min(tolerances))


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
    return np.asarray(~(rise_rnk > allowed_rnk).any((1, 2)))


def loss_spikes(step_n: NDArray[np.int64], loss_n: Numbers) -> tuple[Span, ...]:
    """The loss spikes of a whole run, from its losses at increasing steps."""
    return _loss_spikes(step_n.astype(np.int64).tobytes(), loss_n.astype(np.float64).tobytes())


def rises(step_n: NDArray[np.int64], value_n: Numbers, *, may_grow: bool = False) -> list[Span]:
    """The rises of a measurement in any unit above its trend, found as loss spikes are; it is scaled by its noise.

    Args:
        step_n: increasing steps.
        value_n: the measurement; rows where it is NaN do not count.
        may_grow: whether its trend may be a growth.
    """
    return list(_rises(step_n.astype(np.int64).tobytes(), value_n.astype(np.float64).tobytes(), may_grow))


@lru_cache(maxsize=64)  # alarms and remarks ask for those of the same log
def _rises(steps: bytes, values: bytes, may_grow: bool) -> tuple[Span, ...]:
    step_n, value_n = np.frombuffer(steps, np.int64), np.frombuffer(values, np.float64)
    row_n = np.flatnonzero(np.isfinite(value_n))
    known_n = value_n[row_n]
    if len(known_n) < FEWEST_ROWS:
        return ()
    unit = max(noise_of(known_n), LEAST_NOISE * float(np.ptp(known_n))) / NOISE
    return _spans(TrendWatch(math.inf if may_grow else 0.0), step_n, value_n, row_n, unit) if unit else ()


def _spans(
    watch: TrendWatch, step_n: NDArray[np.int64], value_n: Numbers, row_n: NDArray[np.int64], unit: float = 1.0
) -> tuple[Span, ...]:
    """The rises among some rows of a log, whose values are read in this unit; in rows of the log."""
    found = [*watch.add(step_n[row_n], value_n[row_n] / unit), *watch.finish()]
    rows: list[int] = row_n.tolist()
    spans = []
    for rise in {rise.first: rise for rise in found}.values():
        end = None if rise.end is None else rows[rise.end]
        spans.append(Span(rows[rise.first], rows[rise.last], rise.usual * unit, rise.ending, end))
    return tuple(spans)


@lru_cache(maxsize=512)  # several claims and figures read the same runs
def _loss_spikes(steps: bytes, losses: bytes) -> tuple[Span, ...]:
    step_n, loss_n = np.frombuffer(steps, np.int64), np.frombuffer(losses, np.float64)
    return _spans(TrendWatch(), step_n, loss_n, _logged(loss_n))


def _logged(loss_n: Numbers) -> NDArray[np.int64]:
    """The rows that count: if most rows between known losses have none, losses were logged more seldom than others."""
    known = np.flatnonzero(~np.isnan(loss_n))
    if len(known) < 2 or 2 * len(known) > known[-1] + 1:
        return np.arange(len(loss_n))
    gap = int(np.median(np.diff(known)))
    return known if len(loss_n) - known[-1] <= 2 * gap else np.append(known, np.arange(known[-1] + 1, len(loss_n)))
