"""What a change takes of the damage that a stress does to training, against a control without it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lab.analysis.statistics import Interval, Spread, spread_within, zones

CURES, IN_PART, NO, OPEN, HARMS = "cures", "in part", "no", "open", "harms"


def verdict_of(improvement: Interval, p: float, damage: float, *, margin: float, leaves: float, alpha: float) -> str:
    """Judge a change by the share of the damage that it takes away.

    Damage is what is measured under stress minus what is measured at ease, within a recipe and a seed. So a change that
    lowers the loss in both alike takes no damage away.

    Args:
        improvement: the damage without the change minus that with it, paired by seed, with its 95 % interval.
        p: of no improvement, adjusted for all changes that were tried.
        damage: without the change, in the mean over seeds; positive.
        margin: the share of the damage that counts as no effect.
        leaves: the share that a cure may leave.
        alpha: the level of p.

    Returns:
        ``no`` if the whole interval lies within the margin. With p below alpha, ``cures`` if the whole interval leaves
        at most ``leaves``, ``in part`` if it removes the margin or more, and ``harms`` if it adds as much. Else
        ``open``.
    """
    zone = zones(improvement, [damage * share for share in (-margin, margin, 1 - leaves)])
    word = {(0, 0): HARMS, (1, 1): NO, (2, 2): IN_PART, (2, 3): IN_PART, (3, 3): CURES}.get(zone, OPEN)
    return word if word == NO or p < alpha else OPEN


def against_control(verdict: str, *, above: float, at_most: float, trains: bool) -> str:
    """A verdict, which is open where a change would help and is no better a run than the control.

    Args:
        verdict: of ``verdict_of``.
        above: the loss under stress minus that of the control there, in the mean over seeds, nats.
        at_most: how far above the control's it may lie.
        trains: whether the change trains at ease; else it has nothing to lose under stress.
    """
    return OPEN if verdict in (CURES, IN_PART) and (above > at_most or not trains) else verdict


class Compared(NamedTuple):
    """The mean of paired differences, with its 95 % interval, and p of no difference."""

    interval: Interval
    p: float


def compared(values: np.ndarray, prior: Spread) -> Compared:
    """The mean of paired differences, with a spread that is moderated by the prior if there is one.

    ``spread_prior`` makes the prior of all changes that were tried beside one another.
    """
    spread = prior.combine(spread_within([values]))
    interval = spread.interval(values)
    return Compared(interval, spread.p(interval))
