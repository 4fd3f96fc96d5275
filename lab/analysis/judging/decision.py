"""The rule of the board: from the intervals of a claim's parts to a verdict word and the p that goes with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lab.analysis.statistics import FEWEST_SEEDS, Interval

REPRODUCED, IN_PART, CONTRADICTED, NO_EFFECT = "reproduced", "in part", "contradicted", "no effect"
NOT_TESTABLE, INCONCLUSIVE, NOT_RUN = "not testable here", "inconclusive", "not run"
VERDICTS = (REPRODUCED, IN_PART, CONTRADICTED, NO_EFFECT, NOT_TESTABLE, INCONCLUSIVE, NOT_RUN)
DECIDED = VERDICTS[:4]
# What sentences claim of an effect: the open range in which it lies.
ABOVE_ZERO = (0.0, math.inf)
# The share of false decisions that all readings of a claim may cause together, of which the first may cause this much
# and each of five later ones an equal part of the rest.
ALPHA, ALPHA_OF_FIRST, READINGS = 0.05, 0.04, 6


class Decision(NamedTuple):
    """A verdict on intervals.

    Attributes:
        shown: the interval that speaks loudest against the claim.
        p: two-sided, of the verdict, or of the one that lies nearest where none is reached; corrected for parts and
            for earlier readings.
        inside: numbers of the parts that surely lie on the side claimed.
        against: numbers of those that surely do not: on the other side, or without an effect that counts.
    """

    verdict: str
    shown: Interval
    p: float
    inside: tuple[int, ...] = ()
    against: tuple[int, ...] = ()


def alpha_of(reading: int) -> float:
    """The share of false decisions that this reading of a claim may cause, counted from 1.

    A claim that is read again each time seeds are added, until an interval decides, is decided falsely more often than
    one interval errs.  Alpha is spent over the readings, so their sum bounds the share of false decisions, whether or
    not later readings keep the seeds of earlier ones.

    Raises:
        ValueError: the alpha of ``READINGS`` readings is spent.

    References:
        Lan and DeMets 1983, Discrete sequential boundaries for clinical trials,
        https://doi.org/10.1093/biomet/70.3.659: any way to spend alpha; the bound is Bonferroni's.
    """
    if not 1 <= reading <= READINGS:
        raise ValueError(f"reading {reading} of {READINGS}")
    return ALPHA_OF_FIRST if reading == 1 else (ALPHA - ALPHA_OF_FIRST) / (READINGS - 1)


def decide(intervals: Sequence[Interval], side: tuple[float, float], margin: float = 0.0, reading: int = 1) -> Decision:
    """The one rule, on the interval of each part of a claim.

    - *reproduced*: every part lies inside ``side``.
    - *no effect*: of a claim of an effect above zero every part lies within ``margin`` of zero, wherever else its
      interval reaches (two one-sided tests, Schuirmann 1987).
    - *in part*: some parts lie inside, others surely not.
    - *contradicted*: some part surely does not lie inside, and none surely does.
    - *inconclusive*: everything else, and fewer than three seeds.

    The first two take every part at once, so each may be tested at the whole alpha of the reading; the others take any
    one, so each part is tested at its share (Bonferroni).
    """
    few = [interval for interval in intervals if interval.n < FEWEST_SEEDS]
    if few:
        return Decision(INCONCLUSIVE, min(few, key=lambda interval: interval.n), math.nan)
    alpha, count, (low, high) = alpha_of(reading), len(intervals), side
    zone = (-margin, margin) if side == ABOVE_ZERO else (0.0, 0.0)
    inside = [one.p_outside(*side) for one in intervals]
    none = [one.p_outside(*zone) for one in intervals]
    against = [min(one.p_inside(*side), absent) for one, absent in zip(intervals, none, strict=True)]
    ps = {REPRODUCED: max(inside), NO_EFFECT: max(none), CONTRADICTED: min(1.0, count * min(against))}
    p = min(1.0, min(ps.values()) * ALPHA / alpha)
    parts = range(count)
    holds = tuple(part for part in parts if inside[part] < alpha / count)
    fails = tuple(part for part in parts if against[part] < alpha / count)
    weakest = max(intervals, key=lambda one: max(low - one.low, one.high - high))
    loudest = max(intervals, key=lambda one: max(low - one.high, one.low - high))
    if ps[NO_EFFECT] < alpha:
        return Decision(NO_EFFECT, max(intervals, key=lambda one: abs(one.mean)), p, (), tuple(parts))
    if ps[REPRODUCED] < alpha:
        return Decision(REPRODUCED, weakest, p, tuple(parts))
    if fails:
        return Decision(IN_PART if holds else CONTRADICTED, loudest, p, holds, fails)
    return Decision(INCONCLUSIVE, weakest, p, holds)
