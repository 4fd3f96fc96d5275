"""Figures of mixtures of experts: their routers over a run, and what each arm ends with."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.rendering import panels
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records
from studies.claims import row_panels
from studies.claims.row_panels import RowPanel
from studies.experts.effects import routing

ROWS = [
    ProbeSeries("dead_experts", None, "dead experts", "linear"),
    ProbeSeries("expert_load_cv_batch", None, "variation of\nbatch loads", "linear"),
    ProbeSeries("router_logit_max", None, "largest\nrouter logit"),
]
LEAST_LOGIT = 0.1  # below which logits, which may be negative, are drawn at it
DEAD, LOSS = Quantity("dead experts of a block", ""), Quantity("final loss, nats/token", "nats/token")
ENDS = (RowPanel("dead", DEAD.name, DEAD), RowPanel("capped", LOSS.name, LOSS, begins_at_zero=False))


@figure("routers")
def routers(records: Records, runs: pd.DataFrame) -> Sheet:
    """Routers against step, one line per learning rate: dead experts, loads of single batches, and logits.

    A dead expert had less than a tenth of an even share of the routes of the last 50 updates. The variation is the
    standard deviation of the experts' loads over their mean. Of all blocks the largest value counts; lines are means
    over seeds. Logits below 0.1 are drawn at 0.1.
    """
    metrics = records.metrics
    is_below = (metrics["probe"] == "router_logit_max") & (metrics["value"] < LEAST_LOGIT)
    drawn = records._replace(metrics=metrics.assign(value=metrics["value"].mask(is_below, LEAST_LOGIT)))
    return over_steps(drawn, _with_experts(records, runs), ROWS)


@figure("experts_by_arm")
def experts_by_arm(records: Records, runs: pd.DataFrame) -> Sheet:
    """What each arm ends with at each learning rate: dead experts, a mean over blocks, and the loss.

    Bars are 95 % intervals over seeds.
    """
    _with_experts(records, runs)
    table = runs.set_index("id").assign(dead=routing(records)["dead"], name=runs["arm"].to_numpy()).reset_index()
    names = list(dict.fromkeys(table["arm"]))
    looks = panels.arm_looks(sorted(table["lr"].unique()))
    sheet = row_panels.grouped_rows(table, ENDS, names, "lr", looks)
    named = {f"LR {lr:g}": look for lr, look in looks.items()}
    sheet.keys(("learning rate", panels.arm_keys(named, linestyle="")))
    return sheet


def _with_experts(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose routers were measured.

    Raises:
        NothingToDrawError: there are none.
    """
    measured = records.metrics.loc[records.metrics["probe"] == "dead_experts", "id"]
    found = runs[runs["id"].isin(measured)]
    if found.empty:
        raise NothingToDrawError("nothing to draw: no run measured the loads of experts")
    return found
