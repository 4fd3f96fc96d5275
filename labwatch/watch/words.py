"""The words for an alarm: what happened, and what to look at next, as far as the numbers of the log decide it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lab.analysis.rendering import html
from lab.analysis.text import finite, format_value, listed
from lab.core.windows import Numbers
from labwatch.events.detectors import KINDS, LABELS, Event, Log, column_of, constants, label_of
from labwatch.events.held_out_losses import WINDOW
from labwatch.events.levels import LEVEL
from labwatch.events.logit_rounding import format_name

# Other runs rise with this one if theirs begins within so many of its rows.
ALIKE_ROWS = 3
# The learning rate is at its peak above this share of it, and jumps if it changes by this factor from row to row.
AT_PEAK, JUMP = 0.95, 1.5
# A rate that only grew is still tiny below this share of its peak, or in so few rows where the peak is not known.
TINY, FIRST_STEPS = 0.1, 10
# A learning rate is constant once it was the same in more of the log's rows than it had before, or than so many.
CONSTANT_ROWS = 20
# Learning rates of two attempts at a step are the same within this share, since they may be written with few digits.
SAME_RATE = 0.01
# Where the norm is not finite, the loss still falls or not by the medians of so many rows at both ends.
ENDS = 10


def plain_event(log: Log, event: Event) -> dict[str, Any]:
    """An alarm as values for JSON."""
    facts = event._asdict()
    if event.kind == "logit_rounding":
        facts |= {"level": rounded_level(log, event), "mantissa_bits": log.mantissa_bits}
    return {name: finite(value) for name, value in facts.items()}


def sentence(log: Log, event: Event, *, is_growing: bool = False) -> str:
    """``a1b2 step 350: loss spike, 2.01 to 4.5, recovered at step 410, 12 steps after the first warning``.

    The end of a log that ``is_growing`` is not that of the run.
    """
    return f"{event.run} step {event.step}: {what_happened(log, event, is_growing=is_growing)}"


def what_happened(log: Log, event: Event, *, is_growing: bool = False) -> str:
    """``sentence`` without the run and the step."""
    lr_known = math.isfinite(event.value) and math.isfinite(event.usual)
    text = html.render(
        "alarm.txt",
        log=log,
        event=event,
        name=label_of(event.kind),
        level_of=LEVEL,
        window=WINDOW,
        is_growing=is_growing,
        is_finite=math.isfinite(event.value),
        has_no_usual=math.isnan(event.usual),
        steps=int(log.step_n[-1]) - event.step,
        lr_known=lr_known,
        lr_differs=lr_known and not math.isclose(event.value, event.usual, rel_tol=SAME_RATE),
        crossing=_at(log, event),
        level=rounded_level,
        format_name=format_name,
        rows_until=_rows_until,
        rows_after=_rows_after,
        nothing_learned=_nothing_learned,
    )
    return text.strip()


def rounded_level(log: Log, event: Event) -> float:
    """Level of the output logits at the step of an alarm where rounding costs most."""
    during_n = (log.step_n >= event.step) & (log.columns["logit_rounding"] == event.value)
    return float(log.columns["output_logit"][during_n].max())


def next_look(log: Log, event: Event, events: Mapping[str, Sequence[Event]], cause: str = "") -> str:
    """What to look at next, decided by numbers in the log; it names no cause that was not tested.

    Args:
        log: the log.
        event: one of its alarms.
        events: the alarms of each run that was watched beside it.
        cause: of ``CAUSES``, the one that replays show; empty without a replay.
    """
    if event.kind.startswith(LEVEL):
        kinds = {column: kind for kind, (column, _) in KINDS.items()} | {"output_logit": "logit_rounding"}
        kind = kinds.get(column_of(event.kind), "spike")
        return LABELS[kind].get("next", "what the rows before it have in common")
    if event.kind == "norm_not_finite":
        after_n = log.columns["loss"][log.step_n >= event.step]
        return _AFTER_LOSS[bool(np.nanmedian(after_n[-ENDS:]) < np.nanmedian(after_n[:ENDS]))]
    if event.kind != "spike":
        return LABELS[event.kind]["next"]
    if event.ending in _AFTER_ENDING:
        return _AFTER_ENDING[event.ending]
    if event.ending == "recovered":
        return _before_spike(log, event, events, cause)
    if math.isnan(event.usual):
        return "the first batch, the initialization and the number format, since no row before was sound"
    condition = "if it does not come back" if event.ending == "none" else "since it did not come back"
    return f"{_before_spike(log, event, events, cause)}; {condition}, go back to a checkpoint before step {event.step}"


def _before_spike(log: Log, event: Event, events: Mapping[str, Sequence[Event]], cause: str) -> str:
    """What comes before a loss spike, as far as the log and other runs show it."""
    row = int(np.searchsorted(log.step_n, event.step))
    others = [of_run for run, of_run in events.items() if run != event.run]
    near = float(np.median(np.diff(log.step_n))) * ALIKE_ROWS if len(log.step_n) > 1 else 0.0
    rise_too = all(
        any(other.kind == "spike" and abs(other.step - event.step) <= near for other in run) for run in others
    )
    if others and rise_too:
        return f"the batches of step {event.step}, since all {len(others)} other runs rise there, too"
    if event.lead is not None:
        return f"the gradient from step {event.step - event.lead} on, where the first warning came"
    lr_n = log.columns.get("lr", np.full(len(log.step_n), math.nan))
    if _warms_up(lr_n, row):
        rate = f"since the learning rate is still that of the first steps of a warm-up there, {format_value(lr_n[row])}"
        return f"the first batches, the initialization and the number format, {rate}"
    changed = lr_n[row] / lr_n[row - 1] if row and lr_n[row - 1] else math.nan
    if changed > JUMP or 0 < changed < 1 / JUMP:
        return f"the learning rate, which changes there from {format_value(lr_n[row - 1])} to {format_value(lr_n[row])}"
    if event.ending == "diverged" and log.note:
        return "the number format and the loss scale, since the gradient or the loss overflowed"
    peak = AT_PEAK * np.nanmax(lr_n, initial=-math.inf)
    if lr_n[row] >= peak > np.nanmin(lr_n[: row + 1], initial=math.inf) and not _is_constant(lr_n[: row + 1]):
        return f"the learning rate, which is at its peak there, {format_value(lr_n[row])}"
    if cause == "not_batch":
        return f"the state of the run before step {event.step}, since another run takes these batches without a spike"
    replay = "" if cause else "; a second run of these steps, with --replay, tells data from chance"
    return f"the batches just before step {event.step}{replay}"


def _warms_up(lr_n: Numbers, row: int) -> bool:
    """Whether a rate that only grew is a small share of its peak, which may be yet to come where the log ends."""
    known_n = lr_n[np.isfinite(lr_n)]
    if not math.isfinite(lr_n[row]) or not (np.diff(lr_n[: row + 1]) > 0).all():
        return False
    grows = len(known_n) > 1 and bool((np.diff(known_n) > 0).all())
    return bool(lr_n[row] <= TINY * known_n.max() or (grows and row < FIRST_STEPS))


def _is_constant(lr_n: Numbers) -> bool:
    """Whether a learning rate has long been what it is in the last row, as after a warm-up without decay."""
    known_m = lr_n[np.isfinite(lr_n)]
    other = np.flatnonzero(~np.isclose(known_m, known_m[-1], rtol=1e-6, atol=0))
    before = int(other[-1]) + 1 if len(other) else 0
    return len(known_m) - before > min(before, CONSTANT_ROWS)


# By the ending of a loss spike.
_AFTER_ENDING = {
    "isolated": "the data and the reduction of that step alone, since the run goes on as before",
    "anew": "the launcher, and whether the checkpoint was loaded, since the weights are those of a new model",
}
_AFTER_LOSS = {
    True: "whether updates are skipped, since the loss still falls; the format of gradients and the loss scale",
    False: "the weights, since the loss no longer falls: go back to a checkpoint before this step",
}


def _at(log: Log, event: Event) -> float:
    """The value of its column at the first step of an alarm; NaN for a restart."""
    column = column_of(event.kind)
    return float(log.columns[column][np.searchsorted(log.step_n, event.step)]) if column else math.nan


def _nothing_learned(log: Log, event: Event) -> str:
    """What never changes, and in which rows."""
    names = {"grad_norm": "gradient norm", "lr": "learning rate"}
    first = int(np.searchsorted(log.step_n, event.step))
    rows = len(log.step_n) - first
    what = listed([f"the {names.get(name, name)} is {value:.4g}" for name, value in constants(log, first).items()])
    return f"{what} in {'the last' if first else 'all'} {rows} rows"


def _rows_until(log: Log, event: Event) -> int:
    """Rows from the beginning of an alarm to its ending."""
    return int(np.searchsorted(log.step_n, event.end or event.step) - np.searchsorted(log.step_n, event.step))


def _rows_after(log: Log, event: Event) -> int:
    after_n = ~np.isfinite(log.columns["grad_norm"][log.step_n >= event.step])
    return int(np.argmin(after_n)) if not after_n.all() else len(after_n)
