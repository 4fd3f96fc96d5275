"""Effects of claims on mixtures of experts."""

from __future__ import annotations

import pandas as pd

from lab.analysis.judging.effects import Qualified, exceeds, mean
from lab.analysis.judging.evidence import ArmTables
from lab.analysis.judging.quantities import RUN_TABLES
from lab.studies.experts.measures import routing

RUN_TABLES["experts"] = routing


def difference_in_mean_loss(first: ArmTables, second: ArmTables, *without: ArmTables) -> Qualified:
    """Mean final loss over the learning rates of the first arm minus that of the second, nats/token.

    The control, if there are two more arms: between these it is above zero.
    """
    difference = _mean_loss(first) - _mean_loss(second)
    if not without:
        return Qualified(difference)
    return Qualified(difference, control=exceeds(_mean_loss(without[0]) - _mean_loss(without[1]), 0.0))


def _mean_loss(arm: ArmTables) -> pd.Series:
    """Of the largest model, since experts and a dense MLP differ in size."""
    return mean([arm.loss(lr).iloc[:, -1] for lr in arm.lrs])
