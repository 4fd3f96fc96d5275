"""Quantities that answer questions about batch sizes, ramps and the noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd

from lab.analysis.contrasts import Contrast, Measure, by_column, own_points
from lab.analysis.sensitivity import Study
from lab.analysis.statistics import Interval
from lab.analysis.text import count
from studies.batch_size.measures import budgets, by_tenth, exponent
from studies.batch_size.tuning import tuned_steps
from studies.claims.points import in_columns

# Constant batches: the one with which most ramps end, and the one with which they begin.
CONSTANT = {"constant": "constant batch", "quarter": "constant batch, a quarter as large"}

CRITICAL = Measure(
    "Critical batch on the way to the loss of a bigram model", "sequences", own_points, by_column, is_log=True
)


def cautions(study: Study) -> list[str]:
    """A sentence on each batch size that is left out of a fit."""
    tuned = tuned_steps(study.records) or budgets(study.records, study.points)
    return [sentence for steps in tuned for sentence in steps.cautions()]


def contrasts(study: Study) -> list[Contrast]:
    """The critical batch of each optimizer; empty if the runs do not compare batch sizes by steps to a target."""
    levels = {}
    for curve in (curve for curve in tuned_steps(study.records) if curve.has_fit):
        fit = curve.fit
        low, high = (math.log10(end) if end > 0 else -math.inf for end in (fit.low, fit.high))
        levels[curve.name] = {"": Interval(math.log10(fit.scale), low, high, len(curve.steps))}
    return [Contrast(CRITICAL, "", levels, {})] if levels else []


def powers_of_batch(study: Study) -> pd.DataFrame:
    """By budget and seed the slope of log best learning rate over log batch."""
    rates = {budget.name: budget.lr.dropna(axis=1) for budget in budgets(study.records, study.points)}
    return _by_seed({name: table.apply(lambda lr: exponent(lr.index, lr), axis=1) for name, table in rates.items()})


def changes_of_loss(study: Study) -> pd.DataFrame:
    """By budget and seed the best loss of the largest batch minus that of the smallest."""
    losses = {budget.name: budget.loss for budget in budgets(study.records, study.points)}
    return _by_seed({name: table.iloc[:, -1] - table.iloc[:, 0] for name, table in losses.items()})


def _by_seed(values: Mapping[str, pd.Series]) -> pd.DataFrame:
    rows = [
        {"arm": name, "seed": seed, "value": value}
        for name, of_budget in values.items()
        for seed, value in of_budget.items()
    ]
    return pd.DataFrame(rows, columns=["arm", "seed", "value"]).assign(column="")


def by_schedule(study: Study) -> pd.DataFrame:
    """Points named by batch schedule; empty unless some batches are constant and some are not."""
    names = study.records.runs.set_index("id").reindex(columns=["batch.name"])["batch.name"].astype("string")
    points = study.points.assign(arm=study.points["id"].map(names.replace(CONSTANT).str.replace("_", " ")))
    return points[points["arm"].notna()]


def noise_scales(study: Study) -> pd.DataFrame:
    """Log10 of the noise scale in the first and in the last tenth of runs, at the best learning rate of their size."""
    points = study.points[study.points["lr"] == study.points["best_lr"]]
    tenths = by_tenth(study.records).reset_index().groupby("id")["noise_scale"].agg(["first", "last"])
    ends = {f"in the {end} tenth": np.log10(tenths[end]) for end in tenths}
    named = in_columns(study._replace(points=points), ends)
    return named.assign(arm=[f"{count(size)} parameters" for size in named["size"]])
