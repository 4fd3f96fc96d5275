"""Claims written as functions: the sentence and the rule stand above the function that measures the effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lab.analysis.statistics import Interval
from studies.claims.decision import ABOVE_ZERO, CONTRADICTED, IN_PART, NO_EFFECT, REPRODUCED, Decision, decide

HOLDS, SLOPE_HOLDS, NOT_DECIDED, NOT_TESTED = "holds", "slope holds", "not decided", "not tested"
WORDS = (HOLDS, SLOPE_HOLDS, CONTRADICTED, NOT_DECIDED, NOT_TESTED)


class Rule(NamedTuple):
    """A sentence that can be false, and how it is judged.

    Attributes:
        name: the name of its function.
        sentence: what is claimed.
        source: the runs that it is judged on.
        effect: measures it in the data of its study.
        side: the open range in which the sentence claims the effect to lie, in ``unit``.
        unit: of the effect.
        margin: the size below which an effect above zero does not count.
        lab: the claim on the lab's own runs that says the same; empty if there is none.
        is_slope: whether both are exponents, so that their intervals must meet, and nothing is said of a level.
    """

    name: str
    sentence: str
    source: str
    effect: Callable[[Any], Interval]
    side: tuple[float, float] = ABOVE_ZERO
    unit: str = ""
    margin: float = 0.0
    lab: str = ""
    is_slope: bool = False


class JudgedRule(NamedTuple):
    """A rule with its verdict.

    Attributes:
        own: the entry of the lab's claim among its committed verdicts; None if there is none.
    """

    rule: Rule
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
        if self.rule.is_slope and not (self.own["low"] <= shown.high and shown.low <= self.own["high"]):
            return CONTRADICTED
        return SLOPE_HOLDS if self.rule.is_slope else HOLDS


def claim(rules: list[Rule], sentence: str, source: str, **fields: Any) -> Callable[[Callable[..., Interval]], Any]:
    """Decorator: add the function as a rule to a list; ``fields`` are those of ``Rule``."""

    def register(effect: Callable[..., Interval]) -> Callable[..., Interval]:
        rules.append(Rule(effect.__name__, sentence, source, effect, **fields))
        return effect

    return register


def judge_rule(rule: Rule, data: Any, verdicts: Mapping[str, Mapping[str, Any]]) -> JudgedRule:
    """Judge a rule on the data of its study.

    Args:
        verdicts: the committed verdicts on the lab's claims, by name; none of those whose study is not there.
    """
    decision = decide([rule.effect(data)], rule.side, rule.margin)
    return JudgedRule(rule, decision, verdicts.get(rule.lab))


def effect_text(mean: float | None, low: float | None, high: float | None) -> str:
    """``0.46 [0.37, 0.55]``; empty without an effect."""
    if mean is None or math.isnan(mean):
        return ""
    has_interval = low is not None and high is not None and not math.isnan(low)
    return f"{mean:.3g}" + (f" [{low:.3g}, {high:.3g}]" if has_interval else "")
