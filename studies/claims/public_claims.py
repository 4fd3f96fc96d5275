"""Claims on runs of others, and what they say of the lab's own claims on small models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lab.analysis.statistics import Interval
from studies.claims.decision import ABOVE_ZERO, CONTRADICTED, IN_PART, NO_EFFECT, REPRODUCED, Decision, decide

HOLDS, SLOPE_HOLDS, NOT_DECIDED, NOT_TESTED = "holds", "slope holds", "not decided", "not tested"
WORDS = (HOLDS, SLOPE_HOLDS, CONTRADICTED, NOT_DECIDED, NOT_TESTED)


class PublicClaim(NamedTuple):
    """A sentence on runs of others that can be false, and how it is judged.

    Attributes:
        name: its name, a key of ``PUBLIC_CLAIMS``.
        runs_of: whose runs they are.
        sentence: what is claimed.
        read: reads the data of its study.
        effect: measures it in these data.
        side: the open range in which the sentence claims the effect to lie, in ``unit``.
        unit: of the effect.
        margin: the size below which an effect above zero does not count.
        lab: the claim on the lab's own runs that says the same; empty if there is none.
        is_slope: whether both are exponents, so that their intervals must meet, and nothing is said of a level.
    """

    name: str
    runs_of: str
    sentence: str
    read: Callable[[], Any]
    effect: Callable[[Any], Interval]
    side: tuple[float, float] = ABOVE_ZERO
    unit: str = ""
    margin: float = 0.0
    lab: str = ""
    is_slope: bool = False


class JudgedClaim(NamedTuple):
    """A claim on runs of others with its verdict.

    Attributes:
        own: the entry of the lab's claim among its committed verdicts; None if there is none.
    """

    claim: PublicClaim
    decision: Decision
    own: Mapping[str, Any] | None

    @property
    def word(self) -> str:
        """What public runs say of the lab's claim, one of ``WORDS``."""
        if self.own is None or self.own["effect"] is None:
            return NOT_TESTED
        if self.decision.verdict in (CONTRADICTED, NO_EFFECT, IN_PART):
            return CONTRADICTED
        if self.decision.verdict != REPRODUCED:
            return NOT_DECIDED
        shown = self.decision.shown
        if self.claim.is_slope and not (self.own["low"] <= shown.high and shown.low <= self.own["high"]):
            return CONTRADICTED
        return SLOPE_HOLDS if self.claim.is_slope else HOLDS


def judge_public_claim(claim: PublicClaim, data: Any, verdicts: Mapping[str, Mapping[str, Any]]) -> JudgedClaim:
    """Judge a claim on runs of others.

    Args:
        data: what its effect is measured in, as its ``read`` gives it.
        verdicts: the committed verdicts on the lab's claims, by name; none of those whose study is not there.
    """
    decision = decide([claim.effect(data)], claim.side, claim.margin)
    return JudgedClaim(claim, decision, verdicts.get(claim.lab))


def effect_text(mean: float | None, low: float | None, high: float | None) -> str:
    """``0.46 [0.37, 0.55]``; empty without an effect."""
    if mean is None or math.isnan(mean):
        return ""
    has_interval = low is not None and high is not None and not math.isnan(low)
    return f"{mean:.3g}" + (f" [{low:.3g}, {high:.3g}]" if has_interval else "")
