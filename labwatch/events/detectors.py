"""Detectors of alarms: spikes of the loss and of gradients, drifts of other measurements; and how a spike ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.analysis.spikes.trend import FEWEST_ROWS, LEAST_RISE, Span, loss_spikes
from lab.core import shipped
from lab.core.spike_trigger import STALLED_FOR
from lab.core.windows import FEWEST, MERGE, Numbers, before, has_risen
from labwatch.events.flagged import lasting_medians, runs
from labwatch.events.levels import LEVEL, Level
from labwatch.events.log_names import of_rewards
from labwatch.events.logit_rounding import BF16, COSTLY
from labwatch.events.reinforcement import DEPARTURES, departures

# A gradient spike exceeds the running mean by this factor. The mean decays by ``MEMORY``, and is frozen during a spike.
# Among the first rows it exceeds the largest so far by as much; the very first, so many, are not judged.
GRADIENT_RISE, MEMORY, FIRST_NORMS = 5.0, 0.99, 5
# A gradient norm that is not finite in so many rows in a row is no skipped step, if it was logged in earlier rows.
LASTING = 3
# A gradient norm drifts if the median of many rows stays above the smallest such median before it by this factor.
DRIFT = 4.0
# An update or a logit has grown if it exceeds the median of the measurements before it by this factor.
UPDATE_RISE, LOGIT_RISE = 2.0, 4.0
# Above one, epsilon exceeds the gradient, or the curvature along the update exceeds the limit of stability.
LIMIT = 1.0
# A loss scale at its floor is no larger than this; trainers raise a larger one again after a while.
HIGHEST_FLOOR = 1.0
# Rounding of output logits raises an alarm if it is costly in this many measurements in a row.
HELD = 5
# Experts collapse if the most loaded one takes this many times its share, or if the balancing loss exceeds its smallest
# median over ``HELD`` rows by this factor, in so many measurements in a row.
COLLAPSED_LOAD, BALANCE_RISE = 3.0, 1.5
# An alarm counts as a warning of a loss spike if it begins at most this many measurements before it; and so does a
# gradient norm that stays above the median before it by this factor up to the spike, with single rows below.
LEAD, NORM_LEAD = 100, 2.5
# Fewer rows in which nothing changes do not say that nothing is learned.
IDLE_ROWS = 20
# A rise of the last rows of a short log takes so many nats.
LEAST_LAST = 0.3
SPIKE, LAST_WORDS = "spike", "last_words"
UNRECOVERED = ("stuck", "diverged")  # endings of a loss that did not come back

# Of each kind of alarm its ``name``, the ``axis`` of its values, and what to look at ``next``.
LABELS: dict[str, dict[str, str]] = shipped.load(Path(__file__).with_name("kinds.yaml"))


class WentBack(NamedTuple):
    """Training went back from the last step of an attempt to an earlier one, at learning rates of that earlier step."""

    last: int
    step: int
    lr_before: float = math.nan
    lr: float = math.nan


class Log(NamedTuple):
    """The measurements of a run, one row per step, in the order of the steps.

    Attributes:
        name: the id of a run, or the name of a file.
        step_n: training steps.
        columns: measurements ``[n]`` by name, NaN where one is missing: ``loss``, and if logged ``grad_norm``, ``lr``,
            ``loss_scale``, ``attention_logit_max``, ``update_rms``, ``eps_ratio``, ``update_curvature``. Two follow
            from measurements of output logits: their level ``output_logit``, and ``logit_rounding``, the loss that
            rounding them adds, nats per token. ``parting`` follows from two held-out losses, ``val_loss`` and
            ``clean_val_loss``, of which each holds up to the next; see ``held_out_losses.parting``.  Of experts there
            are ``expert_load_max``, ``router_balance``, and ``router_logit_max``, which may follow from the z-loss.
        note: where losses count as NaN though the log does not say so, and why; empty if nowhere.
        mantissa_bits: stored mantissa bits of the format that rounds output logits.
        went_back: of an attempt that goes on from a checkpoint; None for others.
        last_words: with which the program says after the last row that it stops; see ``says_the_end``.
        held_out: held-out losses by column, at steps of their own.
    """

    name: str
    step_n: NDArray[np.int64]
    columns: Mapping[str, Numbers]
    note: str = ""
    mantissa_bits: float = BF16
    went_back: WentBack | None = None
    last_words: str = ""
    held_out: Mapping[str, pd.Series] = MappingProxyType({})

    @property
    def has_loss(self) -> bool:
        """Whether its loss is one, and not the reward of reinforcement learning in its place."""
        return not np.array_equal(self.columns["loss"], self.columns.get("reward", np.empty(0)), equal_nan=True)

    @property
    def is_of_rewards(self) -> bool:
        """Whether it is of reinforcement learning, where the loss says little and is in no unit."""
        return of_rewards(self.columns)


class Event(NamedTuple):
    """An alarm.

    Attributes:
        run: name of the log.
        step: training step at which it begins.
        kind: a key of ``LABELS``, such as ``spike``, or ``level_COLUMN`` beyond a level, which is then the ``usual``
            value; ``restart`` where training went back, with the learning rates that the first and the second
            attempt have at this step as ``usual`` and ``value``.
        ending: ``recovered``, ``stuck``, ``diverged``, ``isolated``, ``anew``, ``stalled``, or ``none`` while there is
            none; see ``Rise``.
        end: the step of the ending; None without one.
        value: the largest value during the event.
        usual: the usual value before it.
        lead: of a loss spike, the steps since the earliest other alarm that warned of it; None without one.
    """

    run: str
    step: int
    kind: str
    ending: str
    end: int | None
    value: float
    usual: float
    lead: int | None = None


def detect(
    log: Log, spikes: Iterable[Span] | None = None, levels: Mapping[str, Level] = MappingProxyType({})
) -> list[Event]:
    """All alarms of a log, in the order of their steps; that of a loss spike has the lead of other alarms.

    Args:
        log: the measurements of the run.
        spikes: its loss spikes, if they were found already; by default those of ``loss_spikes``.
        levels: of columns, beyond which an alarm is wanted as well.
    """
    losses = list(loss_spikes(log.step_n, log.columns["loss"]) if spikes is None else spikes)
    losses = losses or list(last_rise(log))
    if log.is_of_rewards:  # the loss is a means of a gradient, and tells nothing as long as it is a number
        losses = [span for span in losses if not math.isfinite(log.columns["loss"][span.first])]
    spans = {
        kind: list(_in_known_rows(find, log.columns[column]) if find else losses)
        for kind, (column, find) in (KINDS | WATCHED).items()
        if column in log.columns and (find or kind == SPIKE)
    }
    spans |= {
        f"{LEVEL}{column}": list(runs(level.passed(log.columns[column]), level.value))
        for column, level in levels.items()
        if column in log.columns
    }
    spans |= {kind: found for kind, found, _ in departures(log.step_n, log.columns)} if log.is_of_rewards else {}
    spans["nothing_learned"] = list(nothing_learned(log))
    lost_n, last = ~np.isfinite(log.columns["loss"]), len(log.step_n) - 1
    if log.last_words:
        spans[LAST_WORDS] = [Span(last, last, float(log.columns["loss"][last]), "diverged", last)]
    overflows = spans.get("norm_not_finite", [])
    spans["norm_not_finite"] = [span for span in overflows if not lost_n[: span.first + 1].any()]
    rows = {row for span in overflows for row in range(span.first, span.last + 1)}
    spans["gradient_spike"] = [span for span in spans.get("gradient_spike", []) if span.first not in rows]
    warnings = [span.first for kind, found in spans.items() if kind != "spike" for span in found]
    events = [
        (span.first, _event(log, kind, span, [*warnings, *norm_leads(log, span.first)] if kind == "spike" else []))
        for kind, found in spans.items()
        for span in found
    ]
    if log.went_back:
        _, step, lr_before, lr = log.went_back
        events = [pair for pair in events if pair[1].step >= step]  # the others are the earlier attempt's
        events.append(
            (int(np.searchsorted(log.step_n, step)), Event(log.name, step, "restart", "none", None, lr, lr_before))
        )
    return [event for _, event in sorted(events, key=lambda pair: (pair[0], pair[1].kind))]


def last_rise(log: Log) -> Iterator[Span]:
    """The rise of the last rows of a log too short for a trend, if the gradient norm explodes with the loss.

    The loss rises in each of them, by ``LEAST_LAST`` and a fourth of what it had fallen, and by more than ever before;
    the norm exceeds ``GRADIENT_RISE`` times the median of the rows before.
    """
    loss_n, norm_n = log.columns["loss"], log.columns.get("grad_norm", np.empty(0))
    if not FIRST_NORMS <= len(loss_n) < FEWEST_ROWS or not len(norm_n) or not np.isfinite(loss_n).all():
        return
    change_n = np.diff(loss_n)
    falls = np.flatnonzero(change_n <= 0)
    low = int(falls[-1]) + 1 if len(falls) else 0
    rise, fall = float(loss_n[-1] - loss_n[low]), float(loss_n[: low + 1].max() - loss_n[low])
    before = float(np.nanmedian(norm_n[max(0, low - FIRST_NORMS) : low + 1])) if np.isfinite(norm_n[low]) else math.nan
    is_large = rise > max(LEAST_LAST, fall / 4, 2 * float(change_n[:low].max(initial=0.0)))
    if (
        low >= LASTING
        and low + 1 < len(loss_n) - 1
        and is_large
        and np.nanmax(norm_n[low + 1 :]) > GRADIENT_RISE * before
    ):
        yield Span(low + 1, len(loss_n) - 1, float(loss_n[low]))


def nothing_learned(log: Log) -> Iterator[Span]:
    """Where the loss never changes, or does not fall and the gradient or the rate is 0: in the whole of a log, or in
    the last rows of one of reinforcement learning.
    """
    loss_n, first = log.columns["loss"], _first_idle(log)
    if len(loss_n) - first >= IDLE_ROWS and np.isfinite(loss_n).all() and constants(log, first):
        yield Span(first, len(loss_n) - 1, float(loss_n[first]))


def _first_idle(log: Log) -> int:
    """The first of the last rows in which what is learned from is 0, in reinforcement learning; or that of the log."""
    idle_n = [log.columns[name] == 0 for name in ("advantage", "grad_norm") if name in log.columns]
    if not log.is_of_rewards or not idle_n:
        return 0
    busy = np.flatnonzero(~np.logical_or.reduce(idle_n))
    return int(busy[-1]) + 1 if len(busy) and len(log.step_n) - busy[-1] > IDLE_ROWS else 0


def constants(log: Log, first: int = 0) -> dict[str, float]:
    """What shows from a row on, by never changing, that nothing is learned.

    A norm or rate of 0 may be rounded if the loss falls; in reinforcement learning it need not. But there the loss is 0
    by design where each sample is used once, so it shows nothing beside a gradient, or if the reward rises.
    """
    loss_n = log.columns["loss"][first:]
    earlier, later = np.array_split(loss_n, 2)[0], np.array_split(loss_n, 2)[-1]
    falls = float(np.median(earlier) - np.median(later)) > LEAST_RISE and not log.is_of_rewards
    found = {"loss" if log.has_loss else "reward": float(loss_n[0])} if (loss_n == loss_n[0]).all() else {}
    if log.is_of_rewards and log.has_loss and _has_gradient(log, first):
        found = {}
    for name in () if falls else ("grad_norm", "lr", "advantage"):
        known_n = log.columns[name][first:] if name in log.columns else np.ones(1)
        known_n = known_n[~np.isnan(known_n)]
        found |= {name: 0.0} if len(known_n) and not known_n.any() else {}
    return found


def _has_gradient(log: Log, first: int) -> bool:
    """Whether something is learned from a row on, by the gradient norm, or without one by the reward."""
    if "grad_norm" in log.columns:
        return bool((np.nan_to_num(log.columns["grad_norm"][first:]) != 0).any())
    halves = np.array_split(log.columns["reward"][first:], 2) if "reward" in log.columns else [np.empty(0)] * 2
    return has_risen(*halves)


def label_of(kind: str) -> str:
    """What an alarm of this kind is called."""
    return f"level of {kind.removeprefix(LEVEL)}" if kind.startswith(LEVEL) else LABELS[kind]["name"]


def column_of(kind: str) -> str:
    """The column in which alarms of this kind are found; empty for a restart."""
    return kind.removeprefix(LEVEL) if kind.startswith(LEVEL) else (KINDS | WATCHED).get(kind, ("", None))[0]


def _event(log: Log, kind: str, span: Span, warnings: list[int]) -> Event:
    values = log.columns[column_of(kind)][span.first : span.last + 1]
    falls = DEPARTURES[kind].falls if kind in DEPARTURES else kind.startswith(LEVEL)
    is_below = falls and not np.nanmax(values) > span.usual
    farthest = np.nanmin if is_below else np.nanmax
    largest = float(farthest(values)) if np.isfinite(values).any() else math.nan
    early = [row for row in warnings if span.first - LEAD <= row < span.first]
    step = int(log.step_n[span.first])
    lead = step - int(log.step_n[min(early)]) if early else None
    end = None if span.end is None else int(log.step_n[span.end])
    return Event(log.name, step, kind, span.ending, end, largest, span.usual, lead)


def _in_known_rows(find: Callable[[Numbers], Iterator[Span]], value_n: Numbers) -> Iterator[Span]:
    """What a detector finds, in the rows that have a value if these are fewer than half."""
    known_n = np.flatnonzero(~np.isnan(value_n))
    if 2 * len(known_n) >= len(value_n) or find is lasting_overflow:
        yield from find(value_n)
        return
    for span in find(value_n[known_n]):
        end = None if span.end is None else int(known_n[span.end])
        yield span._replace(first=int(known_n[span.first]), last=int(known_n[span.last]), end=end)


def norm_leads(log: Log, row: int) -> list[int]:
    """The row from which on the gradient norm has risen by ``NORM_LEAD``, up to this row; empty if it has not."""
    if "grad_norm" not in log.columns:
        return []
    norm_n = log.columns["grad_norm"][: row + 1]
    has_risen_n = norm_n > NORM_LEAD * before(norm_n)[0]
    first = row
    while first and has_risen_n[max(0, first - 2) : first].any():
        first -= 1 if has_risen_n[first - 1] else 2
    return [first] if first < row else []


def gradient_spikes(norm_n: Numbers) -> Iterator[Span]:
    """Gradient norms above ``GRADIENT_RISE`` times their running mean, which is frozen during an event."""
    mean, seen, first, last, usual = math.nan, 0, -1, -1, math.nan
    largest = np.fmax.accumulate(np.concatenate([[-math.inf], norm_n]))
    for row, norm in enumerate(norm_n):
        high = seen >= FEWEST and not norm <= GRADIENT_RISE * mean
        high = high or (FIRST_NORMS <= seen < FEWEST and GRADIENT_RISE * largest[row] < norm)
        if high and math.isnan(norm) and not np.isfinite(norm_n[row:]).any() and first < 0:
            return
        if high:
            if first >= 0 and row - last >= MERGE:
                yield Span(first, last, usual)
                first = -1
            if first < 0:
                first, usual = row, mean
            last = row
        elif math.isfinite(norm):
            seen += 1
            mean = norm if seen == 1 else MEMORY * mean + (1 - MEMORY) * norm
    if first >= 0:
        yield Span(first, last, usual)


def lasting_overflow(norm_n: Numbers) -> Iterator[Span]:
    """Gradient norms that are not finite in ``LASTING`` rows or more, if no gap between logged ones is as long."""
    known_n = np.flatnonzero(np.isfinite(norm_n))
    if len(known_n) < LASTING:
        return
    usual_gap = int(np.median(np.diff(known_n))) - 1
    for before_row, after_row in zip(known_n, [*known_n[1:].tolist(), len(norm_n)], strict=True):
        missing = after_row - before_row - 1
        if missing >= max(LASTING, LASTING * usual_gap):
            yield Span(int(before_row) + 1, after_row - 1, float(norm_n[before_row]))


def norm_drift(norm_n: Numbers) -> Iterator[Span]:
    """A gradient norm that grows slowly: its median over ``DRIFT_ROWS`` stays above ``DRIFT`` times the smallest."""

    def above(median_n: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
        least_n = np.minimum.accumulate(median_n)
        return median_n > DRIFT * least_n, least_n

    yield from lasting_medians(norm_n, above)


def _rises(factor: float) -> Callable[[Numbers], Iterator[Span]]:
    """A detector of values above ``factor`` times the median before them."""

    def find(value_n: Numbers) -> Iterator[Span]:
        median_n, _ = before(value_n)
        with np.errstate(invalid="ignore"):
            return runs(value_n > factor * median_n, median_n)

    return find


def _above(limit: float) -> Callable[[Numbers], Iterator[Span]]:
    """A detector of values above a limit."""
    return lambda value_n: runs(Level(limit, is_above=True).passed(value_n), limit)


def _lasts(is_flagged: Callable[[Numbers], NDArray[np.bool_]], usual: float) -> Callable[[Numbers], Iterator[Span]]:
    """A detector of values that are flagged ``HELD`` times in a row or more."""
    return lambda value_n: _held(value_n, is_flagged(value_n), usual)


def loss_scale_floor(scale_n: Numbers) -> Iterator[Span]:
    """A loss scale that fell to its least value, 1 or less, and stays there: gradients overflow at any scale."""
    least = np.nanmin(scale_n) if np.isfinite(scale_n).any() else math.nan
    at_least_n = scale_n == least
    if at_least_n.all() or least > HIGHEST_FLOOR:
        return
    edges = np.flatnonzero(np.diff(at_least_n.astype(int), prepend=0, append=0)).reshape(-1, 2)
    for first, end in edges.tolist():
        if end - first >= STALLED_FOR:
            yield Span(first, end - 1, float(np.nanmax(scale_n[: first + 1])), "stalled", first + STALLED_FOR - 1)


def unbalanced(balance_n: Numbers) -> Iterator[Span]:
    """A balancing loss above ``BALANCE_RISE`` times its smallest median so far, in ``HELD`` measurements in a row."""
    known_n = np.flatnonzero(~np.isnan(balance_n))
    if len(known_n) < HELD:
        return
    median_n = np.median(sliding_window_view(balance_n[known_n], HELD), axis=1)
    least_n = np.full(len(balance_n), median_n[0])
    least_n[known_n[HELD - 1 :]] = np.minimum.accumulate(median_n)
    yield from _held(balance_n, balance_n > BALANCE_RISE * least_n, least_n)


def _held(value_n: Numbers, flagged_n: NDArray[np.bool_], usual_n: Numbers | float) -> Iterator[Span]:
    """Measurements that are flagged ``HELD`` times in a row or more, whatever rows lie between them."""
    known_n = np.flatnonzero(~np.isnan(value_n))
    lasting_n = scipy.ndimage.binary_opening(flagged_n[known_n], structure=np.ones(HELD))
    for span in runs(lasting_n, np.broadcast_to(usual_n, value_n.shape)[known_n]):
        yield Span(int(known_n[span.first]), int(known_n[span.last]), span.usual)


KINDS: dict[str, tuple[str, Callable[[Numbers], Iterator[Span]] | None]] = {
    "spike": ("loss", None),  # ``loss_spikes`` reads the steps, too
    "gradient_spike": ("grad_norm", gradient_spikes),
    "logit_growth": ("attention_logit_max", _rises(LOGIT_RISE)),
    "update_rms": ("update_rms", _rises(UPDATE_RISE)),
    "epsilon_ratio": ("eps_ratio", _above(LIMIT)),
    "loss_scale": ("loss_scale", loss_scale_floor),
    "curvature": ("update_curvature", _above(LIMIT)),
    "parting": ("parting", _above(0.0)),
    "logit_rounding": ("logit_rounding", _lasts(lambda cost_n: cost_n >= COSTLY, COSTLY)),
}
# What ``detect`` finds besides; no study of the records counts it.
WATCHED: dict[str, tuple[str, Callable[[Numbers], Iterator[Span]] | None]] = {
    "norm_not_finite": ("grad_norm", lasting_overflow),
    "norm_drift": ("grad_norm", norm_drift),
    "router_collapse": ("expert_load_max", _lasts(lambda load_n: load_n > COLLAPSED_LOAD, 1.0)),
    "router_balance": ("router_balance", unbalanced),
    "router_logits": ("router_logit_max", _rises(LOGIT_RISE)),
    **{kind: (each.column, None) for kind, each in DEPARTURES.items() if kind not in KINDS},
    "nothing_learned": ("loss", None),
    LAST_WORDS: ("loss", None),
}
