"""Alarms on loss spikes of a run's own, which build up: how many each finds, how early, and how often it is false."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis.events.costs import NONE
from lab.analysis.events.detectors import KINDS, Log, detect, loss_spikes
from lab.analysis.events.logs import logs_of
from lab.analysis.events.scores import COLUMNS
from lab.analysis.probe_values import TRAIN
from lab.core.detectors import MERGE
from lab.records.store import Records
from lab.studies.spikes.own_spikes import BEFORE, START, Spike, find_spikes, measured

OWN = "own"  # in the place of a burst's name
SPIKE = "spike"


def score_own(records: Records) -> pd.DataFrame:
    """Score each alarm on spikes of the runs' own at the highest learning rate, as ``score_runs`` does on bursts.

    The label is the spike itself: one that the loss on fixed held-out rows shows as well. An alarm is a hit if it
    begins from 40 steps before the spike to 20 after, and false from step 500 on if it begins at no such step, and at
    none that belongs to another spike of the training loss.

    Returns:
        The columns of ``score_runs``: a row per spike and kind of alarm, and for each run and kind a row of burst
        ``none`` with its false alarms. The loss itself is no alarm here.
    """
    lr = records.runs["optimizer.lr"]
    series = measured(records._replace(runs=records.runs[lr == lr.max()]))
    spikes: dict[str, list[Spike]] = {run: [] for run in series}
    for spike in find_spikes(series):
        spikes[spike.run].append(spike)
    logs = logs_of(records._replace(metrics=records.metrics[records.metrics["id"].isin(list(series))]))
    rows = [row for log in logs for row in _score(log, spikes[log.name], series[log.name][TRAIN, ""])]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _score(log: Log, spikes: list[Spike], loss_n: Any) -> Iterator[tuple[Any, ...]]:
    is_clean_n = np.arange(len(loss_n)) >= START
    for span in loss_spikes(loss_n):
        is_clean_n[max(0, span.first - BEFORE) : span.last + MERGE] = False
    events = detect(log)
    for kind in (kind for kind, (column, _) in KINDS.items() if column in log.columns and kind != SPIKE):
        begins = [event.step for event in events if event.kind == kind]
        for spike in spikes:
            near = [step for step in begins if spike.step - BEFORE <= step < spike.step + MERGE]
            lead = spike.step - near[0] if near else math.nan
            yield log.name, kind, OWN, bool(near), -lead, lead, 0, 0
        false_alarms = sum(bool(is_clean_n[step]) for step in begins if step < len(is_clean_n))
        yield log.name, kind, NONE, False, math.nan, math.nan, false_alarms, int(is_clean_n.sum())


def alarm_traits(records: Records) -> pd.DataFrame:
    """``score_own`` as one row for each run, indexed by the run's id.

    Returns:
        Column ``spikes``, their number. Of each kind of alarm ``KIND.hits``, the spikes that it found; ``KIND.lead``,
        the sum of its leads, steps, in which a spike that was not found counts as 0; ``KIND.false``, its false alarms,
        and ``KIND.clean``, steps in which they could occur; and ``curvature.first``, the spikes in which the alarm of
        the curvature is no later than that of the updates.
    """
    rows = {str(run): _traits(of_run) for run, of_run in score_own(records).groupby("id")}
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def _traits(scores: pd.DataFrame) -> Mapping[str, float]:
    traits: dict[str, float] = {}
    for kind, rows in scores.groupby("kind"):
        spikes, clean = rows[rows["burst"] == OWN], rows[rows["burst"] == NONE].iloc[0]
        traits["spikes"] = len(spikes)
        traits[f"{kind}.hits"] = float(spikes["hit"].sum())
        traits[f"{kind}.lead"] = float(spikes["lead"].astype(float).fillna(0.0).sum())
        traits[f"{kind}.false"] = float(clean["false_alarms"])
        traits[f"{kind}.clean"] = float(clean["clean_steps"])
    delays = {str(kind): rows.loc[rows["burst"] == OWN, "delay"] for kind, rows in scores.groupby("kind")}
    if {"curvature", "update_rms"} <= set(delays):
        curvature, updates = (delays[kind].astype(float).to_numpy() for kind in ("curvature", "update_rms"))
        first = curvature <= np.where(np.isnan(updates), math.inf, updates)
        traits["curvature.first"] = float(first.sum())
    return traits
