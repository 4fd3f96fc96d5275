"""The answer of a sweep of labelled loss spikes, in a sentence that speaks of the alarms."""

from __future__ import annotations

from lab.analysis.sensitivity import Study
from lab.analysis.spikes.alarms import LABELS
from lab.analysis.spikes.scores import SPIKE, Score, score_runs, summarize
from lab.analysis.text import listed


def alarm_answer(study: Study) -> str:
    """One sentence on what each alarm finds, how early and how falsely; empty without labelled runs."""
    scores = summarize(score_runs(study.records))
    if not scores or not scores[0].found.n:
        return ""
    parts = [_found(score) for score in scores]
    worst = max(scores, key=lambda score: score.false_alarms.n)
    rate = worst.false_alarms
    return (
        f"Of {scores[0].found.n} bursts, {listed(parts)}; no alarm is false more than {rate.n} times in "
        f"{worst.clean_steps:,} steps (95 % interval {rate.low:.2g} to {rate.high:.2g} in 1000)."
    )


def _found(score: Score) -> str:
    hits = round(score.found.mean * score.found.n)
    _, median, _ = score.lead
    lead = f", leading by {median:g} steps in the median" if score.leads and score.kind != SPIKE else ""
    return f"{hits} raise the alarm {LABELS[score.kind][0]!r}{lead}"
