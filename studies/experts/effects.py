"""Measures of mixtures of experts and effects of claims: dead experts, loads, router logits, flipped routes."""

from __future__ import annotations

import pandas as pd

from lab.analysis.probe_values import updates
from lab.records.store import Records
from studies.claims.effects import Qualified, exceeds, mean
from studies.claims.evidence import ArmTables
from studies.claims.points import RUN_TABLES

PROBES = {
    "dead": "dead_experts",
    "load_cv": "expert_load_cv",
    "batch_cv": "expert_load_cv_batch",
    "logit": "router_logit_max",
    "flips": "router_flips",
}
LATE = 0.5  # of a run, over which numbers of single batches are averaged


def routing(records: Records) -> pd.DataFrame:
    """Numbers of each run with experts, by its id.

    Returns:
        Columns ``dead`` and ``load_cv`` are the last values, ``batch_cv`` and ``flips`` means over the second half of
        the run, means over blocks all of them; ``logit`` is the largest of all blocks and steps.
    """
    by_block = {name: records.metrics[records.metrics["probe"] == probe] for name, probe in PROBES.items()}
    steps = updates(records.runs)
    numbers = {name: _reduced(name, values, steps) for name, values in by_block.items() if len(values)}
    return pd.DataFrame(numbers, columns=list(PROBES), dtype=float).rename_axis("id")


def _reduced(name: str, values: pd.DataFrame, steps: pd.Series) -> pd.Series:
    if name == "logit":
        return values.groupby("id")["value"].max()
    if name in ("batch_cv", "flips"):
        chosen = values[values["step"] >= LATE * (values["id"].map(steps) - 1)]
    else:
        chosen = values.sort_values("step", kind="stable").drop_duplicates(["id", "where"], keep="last")
    return chosen.groupby("id")["value"].mean()


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
