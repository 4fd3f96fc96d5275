"""The rule of the scoreboard: from the intervals of a claim's parts to a verdict and its p."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lab.analysis.statistics import FEWEST_SEEDS, Interval

REPRODUCED, IN_PART, CONTRADICTED, NO_EFFECT = "reproduced", "in part", "contradicted", "no effect"
NOT_TESTABLE, INCONCLUSIVE, NOT_RUN = "not testable here", "inconclusive", "not run"
VERDICTS = (REPRODUCED, IN_PART, CONTRADICTED, NO_EFFECT, NOT_TESTABLE, INCONCLUSIVE, NOT_RUN)
DECIDED = VERDICTS[:4]
# The open range in which most claims say that an effect lies.
ABOVE_ZERO = (0.0, math.inf)
# The share of false decisions that all readings of a claim may cause together: the share of the first reading, and an
# equal part of the rest for each of five later ones. A reading judges the claim once on fresh seeds.
ALPHA, ALPHA_OF_FIRST, READINGS = 0.05, 0.04, 6


class Decision(NamedTuple):
    """A verdict on intervals.

    Attributes:
        shown: the interval of the part with the strongest evidence against the claim.
        p: two-sided p of the verdict, or of the nearest one if none is reached; corrected for parts and for earlier
            readings.
        inside: numbers of the parts whose interval lies on the side claimed.
        against: numbers of the parts whose interval does not: it lies on the other side, or within the margin of zero.
    """

    verdict: str
    shown: Interval
    p: float
    inside: tuple[int, ...] = ()
    against: tuple[int, ...] = ()


def alpha_of(reading: int) -> float:
    """The share of false decisions that this reading of a claim may cause; readings are counted from 1.

    Judging a claim again each time seeds are added, until an interval decides, makes false decisions more often than
    one interval does. So alpha is spent over the readings. Their sum bounds the share of false decisions, whether or
    not later readings keep the seeds of earlier ones.

    Raises:
        ValueError: there were ``READINGS`` readings before, so that no alpha is left.

    References:
        Lan and DeMets 1983, Discrete sequential boundaries for clinical trials,
        https://doi.org/10.1093/biomet/70.3.659: alpha may be spent in any way; the bound used here is Bonferroni's.
    """
    if not 1 <= reading <= READINGS:
        raise ValueError(f"reading {reading} of {READINGS}")
    return ALPHA_OF_FIRST if reading == 1 else (ALPHA - ALPHA_OF_FIRST) / (READINGS - 1)


def next_reading(verdicts: Iterable[str]) -> int:
    """The number of the next reading of a claim after these: decided ones do not count, since they cost no alpha."""
    return 1 + sum(verdict not in DECIDED for verdict in verdicts)


def decide(intervals: Sequence[Interval], side: tuple[float, float], margin: float = 0.0, reading: int = 1) -> Decision:
    """Decide on a claim by the interval of each of its parts.

    - *reproduced*: every part lies inside ``side``.
    - *no effect*: the claim is of an effect above zero, and every part lies within ``margin`` of zero (two one-sided
      tests, Schuirmann 1987).
    - *in part*: some parts lie inside, others do not, both with certainty.
    - *contradicted*: some part certainly does not lie inside, and none certainly does.
    - *inconclusive*: everything else, and fewer than three seeds.

    The first two verdicts need every part, so each part is tested at the whole alpha of the reading. The others need
    any one part, so each is tested at its share of alpha (Bonferroni).
    """
    few = [interval for interval in intervals if interval.n < FEWEST_SEEDS]
    if few:
        return Decision(INCONCLUSIVE, min(few, key=lambda interval: interval.n), math.nan)
    alpha, count, (low, high) = alpha_of(reading), len(intervals), side
    zone = (-margin, margin) if side == ABOVE_ZERO else (0.0, 0.0)
    inside = [interval.p_outside(*side) for interval in intervals]
    none = [interval.p_outside(*zone) for interval in intervals]
    against = [min(interval.p_inside(*side), absent) for interval, absent in zip(intervals, none, strict=True)]
    ps = {REPRODUCED: max(inside), NO_EFFECT: max(none), CONTRADICTED: min(1.0, count * min(against))}
    p = min(1.0, min(ps.values()) * ALPHA / alpha)
    parts = range(count)
    holds = tuple(part for part in parts if inside[part] < alpha / count)
    fails = tuple(part for part in parts if against[part] < alpha / count)
    weakest = max(intervals, key=lambda interval: max(low - interval.low, interval.high - high))
    loudest = max(intervals, key=lambda interval: max(low - interval.high, interval.low - high))
    if ps[NO_EFFECT] < alpha:
        return Decision(NO_EFFECT, max(intervals, key=lambda interval: abs(interval.mean)), p, (), tuple(parts))
    if ps[REPRODUCED] < alpha:
        return Decision(REPRODUCED, weakest, p, tuple(parts))
    if fails:
        return Decision(IN_PART if holds else CONTRADICTED, loudest, p, holds, fails)
    return Decision(INCONCLUSIVE, weakest, p, holds)
