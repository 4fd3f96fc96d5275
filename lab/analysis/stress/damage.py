"""What a change takes of the damage that a stress does to training."""

from __future__ import annotations

from lab.analysis.statistics import Interval, zones

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
        at most ``leaves``, ``in part`` if it takes off the margin or more, and ``harms`` if it adds as much. Else
        ``open``.
    """
    zone = zones(improvement, [damage * share for share in (-margin, margin, 1 - leaves)])
    word = {(0, 0): HARMS, (1, 1): NO, (2, 2): IN_PART, (2, 3): IN_PART, (3, 3): CURES}.get(zone, OPEN)
    return word if word == NO or p < alpha else OPEN
