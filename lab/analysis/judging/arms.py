"""Choices of arms for claims whose arms depend on the values that a key has in the runs."""

from __future__ import annotations

import math

from lab.analysis.events.costs import NONE
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup, MissingRunsError

BURST = "burst"


def each_value_of(group: ComparisonGroup, key: str, above: float = -math.inf) -> list[ArmTables]:
    """An arm for each value of a key above a number, in rising order."""
    values = [value for value in group.values(key) if value > above]
    if len(values) < 2:
        raise MissingRunsError(f"one {key}", arms_exist=False)
    return group.arms(*({key: value} for value in values))


def ends_of(group: ComparisonGroup, key: str) -> list[ArmTables]:
    """The arms with the lowest and the highest value of a key."""
    arms = each_value_of(group, key)
    return [arms[0], arms[-1]]


def bursts_of(group: ComparisonGroup) -> list[str]:
    """The kinds of bursts of bad data that were injected into runs.

    Raises:
        MissingRunsError: no run has a burst.
    """
    bursts = [burst for burst in group.values(BURST) if burst != NONE]
    if not bursts:
        raise MissingRunsError("no run has a burst", arms_exist=False)
    return bursts
