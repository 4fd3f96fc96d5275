"""The answer of a sweep of labelled loss spikes, in a sentence that speaks of the alarms."""

from __future__ import annotations

from lab.analysis.events.scores import AlarmScore, score_runs, summarize
from lab.analysis.sensitivity import Study
from lab.analysis.text import listed
from lab.core.detectors import LABELS


def sentence(study: Study) -> str:
    """One sentence on what each alarm finds, how early and how falsely; empty without labelled runs."""
    scores = summarize(score_runs(study.records))
    if not scores or not scores[0].found.n:
        return ""
    rate = max((score.false_alarms for score in scores), key=lambda rate: rate.n)
    often = f"up to {rate.n} of a kind are false" if rate.n else "none is false"
    return (
        f"Of {scores[0].found.n} bursts, alarms find {listed([_found(score) for score in scores])}; {often} in "
        f"{scores[0].clean_steps:,} steps (95 % interval {rate.low:.2g} to {rate.high:.2g} in 1000)."
    )


def _found(score: AlarmScore) -> str:
    lead = f" (median lead {score.lead[1]:g} steps)" if score.leads else ""
    return f"{round(score.found.mean * score.found.n)} by {LABELS[score.kind][0]}{lead}"
