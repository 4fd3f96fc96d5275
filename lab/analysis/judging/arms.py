"""Choices of arms that rows of claims name, where arms depend on which values of a key there are."""

from __future__ import annotations

import math

from lab.analysis.events.costs import NONE
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, MissingRunsError

BURST = "burst"


def each_value_of(group: ComparisonGroup, key: str, above: float = -math.inf) -> list[ArmTables]:
    """An arm for each value of a key above a number, values rising."""
    values = [value for value in group.values(key) if value > above]
    if len(values) < 2:
        raise MissingRunsError(f"one {key}", arms_exist=False)
    return group.arms(*({key: value} for value in values))


def ends_of(group: ComparisonGroup, key: str) -> list[ArmTables]:
    """Arms with the lowest and with the highest value of a key."""
    arms = each_value_of(group, key)
    return [arms[0], arms[-1]]


def bursts_of(group: ComparisonGroup) -> list[str]:
    """The bursts of bad data that runs met.

    Raises:
        MissingRunsError: none met one.
    """
    bursts = [burst for burst in group.values(BURST) if burst != NONE]
    if not bursts:
        raise MissingRunsError("no run has a burst", arms_exist=False)
    return bursts
