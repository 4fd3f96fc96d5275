"""Dots of the scores of alarms, for panels of rows: shares found, leads over the loss, rates of false alarms."""

from __future__ import annotations

from collections.abc import Sequence

from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import Interval
from labwatch.events.detectors import LABELS
from labwatch.events.scores import AlarmScore


def alarm_dots(summary: Sequence[AlarmScore], found: str) -> dict[str, dict[int, Dot]]:
    """Dots of three panels by the label of their axis, and by the row of each alarm; ``found`` is what alarms find."""
    shares, leads, rates = dict[int, Dot](), dict[int, Dot](), dict[int, Dot]()
    for row, score in enumerate(summary):
        name, share, rate = LABELS[score.kind]["name"], score.found, score.false_alarms
        hits = f"found {round(share.mean * share.n)} of {share.n} {found}"
        shares[row] = Dot(share, f"{name}\n{hits}\nshare {share:.2f}")
        low, median, high = score.lead
        quartiles = f"median lead {median:g} steps\nquartiles {low:g} to {high:g}"
        text = f"{name}\n{quartiles}\n{score.leads} {found} with both alarms"
        leads[row] = Dot(Interval(median, low, high, score.leads), text)
        alarms = f"{rate.n} false alarms in {score.clean_steps:,} steps"
        rates[row] = Dot(rate, f"{name}\n{alarms}\nin 1000 steps {rate:.3g}")
    return {
        f"share of {found}\nfound": shares,
        "lead over the loss\n(steps)": leads,
        "false alarms in 1000 steps": rates,
    }
