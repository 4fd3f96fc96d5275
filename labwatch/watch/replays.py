"""Replays: a loss spike, or a fault of machine or code that looks like one, told apart by training the step again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from lab.core import shipped
from lab.core.spike_trigger import LEAST_RISE
from lab.core.windows import Numbers
from labwatch.events.detectors import Event, Log
from labwatch.events.log_names import MICRO_BATCH
from labwatch.events.twins import TREND_ROWS, common_losses, shared_batches, shares_event

# Largest relative difference between the gradients of a batch and of its parts that rounding can explain.
PARTS_DIFFER = 1e-5
# Largest relative difference of a loss that a change of the last bits can explain.
ROUNDING = 1e-4
# Losses that are written with few digits are close if they differ by so many of the last one.
DIGITS = 1.5
# A finite micro-batch is calm if its gradient norm is at most this many times the usual one.
CALM = 5.0


CAUSES: dict[str, str] = shipped.load(Path(__file__).with_name("causes.yaml"))


class Cause(NamedTuple):
    """The likely cause, one of ``CAUSES``, of an event at a step of a run."""

    run: str
    step: int
    cause: str


Pair: TypeAlias = "tuple[pd.DataFrame, pd.DataFrame]"  # a text, since loading pandas takes long


def _pair(log: Log, replay: Log) -> Pair:
    """A log and its replay as tables of the columns that both have, at the steps that both have."""
    first, again = (pd.DataFrame(source.columns, source.step_n) for source in (log, replay))
    return first.align(again, join="inner")


class Twin(NamedTuple):
    """A run on the batches of a log, as far as it has them.

    Attributes:
        log: the run, without what follows ``parting``.
        events: its alarms.
        parting: the first step with other batches; None if there is none, or if too few steps tell.
    """

    log: Log
    events: Sequence[Event]
    parting: int | None

    def has_others_at(self, step: int) -> bool:
        """Whether it has other batches than the log at a step."""
        return self.parting is not None and step >= self.parting


def same_batches(log: Log, twin: Log, spikes: Sequence[Event], events: Sequence[Event]) -> Twin:
    """A twin as far as it has the batches of a log.

    A spike that begins where losses cease to move together explains that by itself, so batches are not blamed.
    ``spikes`` are alarms of the log, and ``events`` those of the twin.
    """
    sharing = shared_batches(log, twin)
    step_n = common_losses(log, twin)[0]
    if not sharing.is_known or sharing.is_lasting:
        return Twin(twin, events, None)
    first = int(step_n[sharing.shared_rows])
    near = step_n[max(0, sharing.shared_rows - TREND_ROWS) : sharing.shared_rows + TREND_ROWS]
    if sharing.shared_rows and any(near[0] <= spike.step <= near[-1] for spike in spikes if spike.kind == "spike"):
        return Twin(twin, events, None)
    return Twin(up_to(twin, first), events, first)


def up_to(log: Log, step: int) -> Log:
    """The rows before a step."""
    kept_n = log.step_n < step
    columns = {name: column[kept_n] for name, column in log.columns.items()}
    return log._replace(step_n=log.step_n[kept_n], columns=columns)


def find_twins(log: Log, logs: Sequence[Log], replays: Sequence[Sequence[Log]]) -> list[Log]:
    """The runs that were trained on the batches of a log: from each source the runs of its name.

    If no run has its name and there is only one log, all runs of the source count.
    """
    twins = list[Log]()
    for source in replays:
        named = [replay for replay in source if replay.name == log.name]
        twins += named or (source if len(logs) == 1 else [])
    return twins


def twin_cause(spike: Event, log: Log, twins: Sequence[Twin]) -> str:
    """The cause of a loss spike by its twins: the batches if at least half of those that have the step spike, too."""
    if all(twin.has_others_at(spike.step) for twin in twins):
        return "other_batches"
    shared = [shares_event(spike, log, twin.log, twin.events) for twin in twins if len(twin.log.step_n)]
    known = [is_shared for is_shared in shared if is_shared is not None]
    if not known:
        return "not_replayed"
    return "batch" if sum(known) >= len(known) / 2 else "not_batch"


def spike_cause(log: Log, twin: Twin | None, spike: Event) -> str:
    """The likely cause of a loss spike of the log, by its only replay."""
    if twin and twin.has_others_at(spike.step):
        return "other_batches"
    pair = _pair(log, twin.log) if twin else None
    if pair is None or spike.step not in pair[0].index:
        return "not_replayed"
    until = int(log.step_n[-1] if spike.end is None else spike.end)
    losses = [table["loss"].loc[spike.step : until].to_numpy() for table in pair]
    first, again = (float(np.max(loss_n, where=np.isfinite(loss_n), initial=-math.inf)) for loss_n in losses)
    returns = (
        not _departures(pair, until)
        or not np.isfinite(losses[1]).all()
        or (first - spike.usual > LEAST_RISE and again - spike.usual > (first - spike.usual) / 2)
    )
    cause = _diagnose(log, pair, spike.step, until, returns=returns)
    return "not_batch" if cause in ("corrupted_state", "rounding") and not _begins_alike(pair) else cause


def departure(log: Log, twin: Twin | None, events: Sequence[Event]) -> Cause | None:
    """The first step at which a log without loss spikes differs from its replay, or at which it ends too early.

    None for a run that differs from its first step on, as one of another machine does.
    """
    if twin is None or not len(twin.log.step_n) or any(event.kind == "spike" for event in events):
        return None
    log, replay = log if twin.parting is None else up_to(log, twin.parting), twin.log
    pair, last = _pair(log, replay), int(log.step_n[-1])
    if not _begins_alike(pair):
        return None
    if steps := _departures(pair, last):
        step = steps[0]
        return Cause(log.name, step, _diagnose(log, pair, step, last, returns=False))
    return Cause(log.name, last, "stopped") if last < replay.step_n[-1] else None


def _begins_alike(pair: Pair) -> bool:
    """Whether the losses of the first step with both are equal to rounding, as those of the same run again are."""
    loss_n, replayed_n = (table["loss"].to_numpy() for table in pair)
    first = np.flatnonzero(np.isfinite(loss_n) & np.isfinite(replayed_n))[:1]
    near_n = ROUNDING * np.abs(replayed_n) + DIGITS * _digit(loss_n)
    return bool((np.abs(loss_n - replayed_n)[first] <= near_n[first]).all())


def _digit(loss_n: Numbers) -> float:
    """The last digit to which losses are written, or less: the smallest difference between two of them."""
    different = np.diff(np.unique(loss_n[np.isfinite(loss_n)]))
    return float(different.min()) if len(different) else 0.0


def _departures(pair: Pair, until: int, column: str | None = None) -> list[int]:
    """The steps, up to one, at which a column of the replay differs, or any of them."""
    first, again = pair if column is None else (table[[column]] for table in pair)
    return [step for step in first.compare(again).index.tolist() if step <= until]


def _diagnose(log: Log, pair: Pair, step: int, until: int, *, returns: bool) -> str:
    """Name the cause of the rise of the loss at a step.

    - ``scaling_bug``: gradients of the parts of a batch do not add up to the batch's gradient, from the first update.
    - ``spike``: the rise ``returns`` in the replay, so data and state explain it.
    - ``faulty_micro_batch``: single micro-batches are not finite while the others are calm, and the fault does not
      return in the replay.
    - ``rounding``: weights differ, but the loss hardly does.
    - ``corrupted_state``: the loss differs by more, as after a flipped bit in a weight.

    Losses are compared at the first step up to ``until`` at which they differ, since rounding errors grow.
    """
    errors_n = log.columns.get("parts_error", np.zeros(1))
    if np.isfinite(errors_n).any() and np.nanmax(errors_n) > PARTS_DIFFER:
        return "scaling_bug"
    if returns:
        return "spike"
    norms_mn = np.array([column for name, column in log.columns.items() if name.startswith(MICRO_BATCH)])
    if len(norms_mn):
        row = int(np.flatnonzero(log.step_n == step)[0])
        norm_m, before = norms_mn[:, row], norms_mn[:, :row][np.isfinite(norms_mn[:, :row])]
        is_broken_m = ~np.isfinite(norm_m)
        is_calm_m = norm_m <= CALM * (float(np.median(before)) if len(before) else math.nan)
        if is_broken_m.any() and is_calm_m.any() and (is_broken_m | is_calm_m).all():
            return "faulty_micro_batch"
    first = next(iter(_departures(pair, until, "loss")), step)
    loss, replayed = (float(table["loss"].to_numpy()[table.index == first][0]) for table in pair)
    is_close = abs(loss - replayed) <= ROUNDING * abs(replayed) + DIGITS * _digit(log.columns["loss"])
    return "rounding" if is_close else "corrupted_state"
