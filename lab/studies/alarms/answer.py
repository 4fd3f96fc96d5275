"""Scores of alarms on labelled runs: share of bursts found, lead over the loss, and rate of false alarms."""

from __future__ import annotations

from lab.analysis.contrasts import Contrast, Measure, by_column, own_points
from lab.analysis.events.detectors import LABELS
from lab.analysis.events.scores import AlarmScore, score_runs, summarize
from lab.analysis.sensitivity import Study
from lab.analysis.statistics import Interval

FOUND = Measure("Share of bursts found", "", own_points, by_column, "higher")
LEAD = Measure("Lead over the loss, median and quartiles", "steps", own_points, by_column)
FALSE_ALARMS = Measure("False alarms per 1000 clean steps", "", own_points, by_column, "lower")


def contrasts(study: Study) -> list[Contrast]:
    """The score of each alarm, with exact intervals; empty without labelled runs."""
    scores = {LABELS[score.kind][0]: score for score in summarize(score_runs(study.records))}
    if not scores or not next(iter(scores.values())).found.n:
        return []
    parts = {FOUND: lambda score: score.found, LEAD: _lead, FALSE_ALARMS: _false_alarms}
    return [
        Contrast(measure, "", {name: {"": part(score)} for name, score in scores.items()}, {})
        for measure, part in parts.items()
    ]


def _lead(score: AlarmScore) -> Interval:
    low, middle, high = score.lead
    return Interval(middle, low, high, score.leads)


def _false_alarms(score: AlarmScore) -> Interval:
    return score.false_alarms._replace(n=score.clean_steps)
