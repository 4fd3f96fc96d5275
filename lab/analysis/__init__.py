"""From records to curves, sensitivity, figures and a page; pandas and matplotlib only, never torch."""

from lab.analysis.claims.scoreboard import verdicts
from lab.analysis.curves import load, points
from lab.analysis.report.notebook import show
from lab.analysis.sensitivity import all_pairs, by_curve, judge, paired, per_seed, study
from lab.records.store import Records

__all__ = [
    "Records",
    "all_pairs",
    "by_curve",
    "judge",
    "load",
    "paired",
    "per_seed",
    "points",
    "show",
    "study",
    "verdicts",
]
