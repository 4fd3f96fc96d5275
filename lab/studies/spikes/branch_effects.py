"""Effects of claims on what a loss spike belongs to: shares of spikes that a change from before them removes."""

from __future__ import annotations

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds, mean
from lab.analysis.judging.evidence import ArmTables, ComparisonGroup
from lab.analysis.judging.verdicts import ON, QK
from lab.studies.spikes.branches import CHANGE, SAME, branch_counts
from lab.studies.spikes.effects import HALF

KNOWN_TO = 0.01  # a share of few spikes is known to no less


def branches(group: ComparisonGroup, *changes: str) -> list[ArmTables]:
    """The untouched twin and these changes, in this order, without qk-layernorm and then with it."""
    switches = [switch for switch in (None, ON) if any(curve.get(QK) == switch for curve in group.curves.values())]
    return group.arms(*({CHANGE: change, QK: switch} for switch in switches for change in (SAME, *changes)))


def _removed(*arms: ArmTables) -> pd.Series:
    """Share of the spikes of each seed that were removed, over arms with and without qk-layernorm that had one."""
    removed, spikes = (
        mean([arm.column(arm.top, branch_counts, column).iloc[:, -1] for arm in arms])
        for column in ("removed", "spikes")
    )
    return removed / spikes.where(spikes > 0)


def _by_change(arms: tuple[ArmTables, ...]) -> list[pd.Series]:
    """Of the twin and each change."""
    names = list(dict.fromkeys(arm.setting(CHANGE) for arm in arms))
    return [_removed(*(arm for arm in arms if arm.setting(CHANGE) == name)) for name in names]


def the_change_removes_the_spike(*arms: ArmTables) -> Effects:
    """Share of spikes that a change removes minus a half; the control: the twin keeps more than half of them."""
    twin, changed = _by_change(arms)
    return Qualified(changed - HALF, KNOWN_TO, control=exceeds(1 - twin, HALF))


def one_change_removes_more(*arms: ArmTables) -> Effects:
    """Share of spikes that the second change removes minus that of the first; the control is that of the twin."""
    twin, first, second = _by_change(arms)
    return Qualified(second - first, KNOWN_TO, control=exceeds(1 - twin, HALF))
