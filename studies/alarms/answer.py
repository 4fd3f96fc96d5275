"""Scores of alarms on labelled runs: share of bursts found, lead over the loss, and rate of false alarms."""

from __future__ import annotations

from lab.analysis.contrasts import Contrast, Measure, by_column, own_points
from lab.analysis.sensitivity import Study
from lab.analysis.statistics import Interval
from labwatch.events.detectors import LABELS
from labwatch.events.scores import score_runs, summarize

FOUND = Measure("Share of bursts found", "", own_points, by_column, "higher")
LEAD = Measure("Lead over the loss, median and quartiles", "steps", own_points, by_column)
FALSE_ALARMS = Measure("False alarms per 1000 clean steps", "", own_points, by_column, "lower")


def contrasts(study: Study) -> list[Contrast]:
    """The score of each alarm, with exact intervals; empty without labelled runs."""
    scores = {LABELS[score.kind]["name"]: score for score in summarize(score_runs(study.records))}
    if not scores or not next(iter(scores.values())).found.n:
        return []
    levels: dict[Measure, dict[str, dict[str, Interval]]] = {FOUND: {}, LEAD: {}, FALSE_ALARMS: {}}
    for name, score in scores.items():
        low, middle, high = score.lead
        levels[FOUND][name] = {"": score.found}
        levels[LEAD][name] = {"": Interval(middle, low, high, score.leads)}
        levels[FALSE_ALARMS][name] = {"": score.false_alarms._replace(n=score.clean_steps)}
    return [Contrast(measure, "", cells, {}) for measure, cells in levels.items()]
