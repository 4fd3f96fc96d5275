"""Scores of alarms on labelled runs: an alarm is right if it begins in the steps of an injected burst of bad data."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.spikes.trend import PER_STEPS, Span
from lab.analysis.statistics import UNKNOWN, Interval
from lab.core.schema import batches_of_bursts
from lab.core.windows import MERGE
from lab.records.store import Records
from labwatch.events.detectors import KINDS, Event, Log, detect
from labwatch.events.logs import logs_of

NONE, SPIKE = "none", "spike"
REPEATS = "bad_batches.repeats"
COLUMNS = ("id", "kind", "bad_batches", "hit", "delay", "lead", "false_alarms", "clean_steps")
Card = Mapping[Hashable, Any]
QUARTILES = (0.25, 0.5, 0.75)


def score_runs(records: Records, spikes: Callable[[Log], Iterable[Span]] | None = None) -> pd.DataFrame:
    """Score each alarm on each labelled run: one with or without bursts, and without response and restart log.

    The label is the config. An alarm is a hit if it begins between the first step of a burst and 20 measurements after
    its last step, or the next burst if that comes first. It is false if it begins before the first burst, or in a run
    without one. Any other alarm counts as neither, since the burst may still have caused it.

    ``spikes`` finds loss spikes; by default ``loss_spikes`` does.

    Returns:
        A row per run, burst and kind of alarm whose measurements were recorded; no rows unless there are runs with and
        without bursts. The columns are

        - ``id`` of the run and ``kind`` of the alarm.
        - ``bad_batches``: the name of the burst; ``none`` if the run has none, or diverged before the first.
        - ``hit``: whether the alarm found the burst.
        - ``delay``: steps from the first step of the burst to the hit.
        - ``lead``: steps from the hit to the loss spike of the burst, negative after it; NaN unless there are both.
        - ``false_alarms``, and ``clean_steps`` in which these could occur; both 0 from the second burst on.
    """
    if "bad_batches" not in records.runs or (records.runs["bad_batches"].fillna(NONE) == NONE).all():  # most folders
        return pd.DataFrame(columns=list(COLUMNS))
    cards = {
        card["id"]: card
        for card in records.runs.to_dict("records")
        if all(card.get(column, NONE) == NONE for column in ("response", "restarts"))
    }
    if len({bool(_labels(card)) for card in cards.values()}) < 2:
        return pd.DataFrame(columns=list(COLUMNS))
    rows = [row for log in logs_of(records) if log.name in cards for row in _score(log, cards[log.name], spikes)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _score(log: Log, card: Card, spikes: Callable[[Log], Iterable[Span]] | None) -> Iterator[tuple[Any, ...]]:
    """The rows of one run."""
    events, ends = detect(log, spikes(log) if spikes else None), _last_finite_step(log) + 1
    labels = [label for label in _labels(card) if label.start < ends]
    start = labels[0].start if labels else ends
    kinds = [kind for kind, (column, _) in KINDS.items() if column in log.columns]
    if not labels:
        for kind in kinds:
            yield log.name, kind, NONE, False, math.nan, math.nan, _before(events, kind, start), start
    for label, after in zip_longest(labels, labels[1:]):
        hits = _hits(log, events, label, after.start if after else math.inf)
        onset, is_first = hits.get(SPIKE, math.nan), label is labels[0]
        for kind in kinds:
            step, false_alarms = hits.get(kind, math.nan), _before(events, kind, start) if is_first else 0
            alarm = kind in hits, step - label.start, onset - step, false_alarms, start if is_first else 0
            yield log.name, kind, str(card["bad_batches"]), *alarm


def _before(events: list[Event], kind: str, start: int) -> int:
    return sum(event.kind == kind and event.step < start for event in events)


def _labels(card: Card) -> list[range]:
    """The steps of each burst of a run; none for a run without one."""
    if card.get("bad_batches", NONE) == NONE or not card["bad_batches.fraction"]:
        return []
    bursts = batches_of_bursts(
        float(card["bad_batches.start"]), float(card["bad_batches.length"]), int(card["steps"]), repeats_of(card)
    )
    return [steps for steps in bursts if len(steps)]


def _last_finite_step(log: Log) -> int:
    """The last step before the loss was non-finite; -1 without one."""
    broken = np.flatnonzero(~np.isfinite(log.columns["loss"]))
    rows = int(broken[0]) if len(broken) else len(log.step_n)
    return int(log.step_n[rows - 1]) if rows else -1


def _hits(log: Log, events: list[Event], label: range, before: float) -> dict[str, float]:
    """The step at which each alarm first found the burst, before the next one."""
    row = int(np.searchsorted(log.step_n, label.stop)) + MERGE
    stop = min(before, int(log.step_n[row]) if row < len(log.step_n) else math.inf)
    steps: dict[str, float] = {}
    for event in events:  # in the order of their steps
        if label.start <= event.step < stop:
            steps.setdefault(event.kind, event.step)
    return steps


class AlarmScore(NamedTuple):
    """The score of one kind of alarm on labelled runs.

    Attributes:
        kind: the kind of alarm.
        found: share of the bursts that it found.
        lead: quartiles of its lead over the loss spike, steps; NaN for the loss itself, or if no burst has both alarms.
        leads: number of bursts that have both alarms.
        false_alarms: false alarms per 1000 clean steps, with the exact interval of independent ones; ``n`` counts them.
        clean_steps: steps of all runs in which a false alarm could occur.
    """

    kind: str
    found: Interval
    lead: tuple[float, ...]
    leads: int
    false_alarms: Interval
    clean_steps: int


def summarize(scores: pd.DataFrame) -> list[AlarmScore]:
    """The score of each kind of alarm over all rows of ``score_runs``, the loss first."""
    return [_summary(str(kind), rows) for kind, rows in scores.groupby("kind", sort=False)]


def _summary(kind: str, rows: pd.DataFrame) -> AlarmScore:
    planted = rows[rows["bad_batches"] != NONE]
    leads = planted["lead"].dropna().to_numpy(dtype=float)
    known = kind != SPIKE and len(leads) > 0
    quartiles = tuple(map(float, np.quantile(leads, QUARTILES))) if known else (math.nan,) * len(QUARTILES)
    clean_steps = int(rows["clean_steps"].sum())
    return AlarmScore(
        kind,
        share_interval(int(planted["hit"].sum()), len(planted)),
        quartiles,
        len(leads) if known else 0,
        rate_interval(int(rows["false_alarms"].sum()), clean_steps / PER_STEPS),
        clean_steps,
    )


def repeats_of(card: Mapping[Hashable, Any]) -> int:
    """How often the burst of a run comes; once if the card has no such column, or an empty one."""
    repeats = float(card.get(REPEATS, 1))
    return 1 if math.isnan(repeats) else int(repeats)


def share_interval(hits: float, trials: float, level: float = 0.95) -> Interval:
    """Exact interval of the share of hits in independent trials; all NaN without a trial.

    References:
        Clopper and Pearson 1934, https://doi.org/10.1093/biomet/26.4.404.
    """
    if not trials:
        return UNKNOWN
    tail = (1 - level) / 2
    low = float(scipy.special.betaincinv(hits, trials - hits + 1, tail)) if hits else 0.0
    high = float(scipy.special.betaincinv(hits + 1, trials - hits, 1 - tail)) if hits < trials else 1.0
    return Interval(hits / trials, low, high, round(trials))


def rate_interval(count: int, exposure: float, level: float = 0.95) -> Interval:
    """Exact interval of a Poisson rate: independent events per unit of exposure; all NaN without exposure.

    References:
        Garwood 1936, Fiducial limits for the Poisson distribution, https://doi.org/10.1093/biomet/28.3-4.437.
    """
    if not exposure:
        return UNKNOWN
    tail = (1 - level) / 2
    low = float(scipy.special.gammaincinv(count, tail)) if count else 0.0
    return Interval(
        count / exposure, low / exposure, float(scipy.special.gammaincinv(count + 1, 1 - tail)) / exposure, count
    )
