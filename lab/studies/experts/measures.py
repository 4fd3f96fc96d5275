"""What this study computes from records: dead experts, loads, router logits and flipped routes, a number per run."""

from __future__ import annotations

import pandas as pd

from lab.analysis.probe_values import updates
from lab.records.store import Records

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
    columns = {name: probe for name, probe in PROBES.items() if (records.metrics["probe"] == probe).any()}
    by_block = {name: records.metrics[records.metrics["probe"] == probe] for name, probe in columns.items()}
    table = pd.DataFrame(index=pd.Index([], name="id"), columns=list(PROBES), dtype=float)
    numbers = {name: _reduced(name, values, updates(records.runs)) for name, values in by_block.items()}
    return pd.DataFrame(numbers).reindex(columns=list(PROBES)) if numbers else table


def _reduced(name: str, values: pd.DataFrame, steps: pd.Series) -> pd.Series:
    if name == "logit":
        return values.groupby("id")["value"].max()
    if name in ("batch_cv", "flips"):
        chosen = values[values["step"] >= LATE * (values["id"].map(steps) - 1)]
    else:
        chosen = values.sort_values("step", kind="stable").drop_duplicates(["id", "where"], keep="last")
    return chosen.groupby("id")["value"].mean()
