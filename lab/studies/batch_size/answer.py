"""Quantities that answer questions about batch sizes, ramps and the noise scale."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lab.analysis.contrasts import NO_REFERENCE, Contrast, Measure, Measures, by_column, of_curves, own_points, valued
from lab.analysis.sensitivity import Study
from lab.analysis.statistics import Interval
from lab.analysis.text import count
from lab.studies.batch_size.estimates import exponent
from lab.studies.batch_size.measures import budgets, by_tenth, tuned_steps

# Constant batches: the one with which most ramps end, and the one with which they begin.
LARGE, SMALL = "constant batch", "constant batch, a quarter as large"
CONSTANT = {"constant": LARGE, "quarter": SMALL}


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


MEASURES = Measures()


def _at_budgets(study: Study, *, rates: bool) -> pd.DataFrame:
    rows = []
    for budget in budgets(study.records, study.points):
        rates_by_batch = budget.lr.dropna(axis=1)
        for seed in budget.loss.index:
            loss = budget.loss.loc[seed]
            value = (
                exponent(rates_by_batch.columns, rates_by_batch.loc[seed]) if rates else loss.iloc[-1] - loss.iloc[0]
            )
            rows.append({"arm": budget.name, "seed": seed, "value": value})
    return pd.DataFrame(rows, columns=["arm", "seed", "value"]).assign(column="")


@MEASURES.add(
    "Power of the batch by which the best learning rate grows",
    "",
    by_column,
    reference=NO_REFERENCE,
    asked_by=("learning_rate_and_batch",),
)
def _powers(study: Study) -> pd.DataFrame:
    return _at_budgets(study, rates=True)


@MEASURES.add(
    "Best loss of the largest batch minus that of the smallest",
    "nats/token",
    by_column,
    reference=NO_REFERENCE,
    asked_by=("learning_rate_and_batch",),
)
def _changes_of_loss(study: Study) -> pd.DataFrame:
    return _at_budgets(study, rates=False)


@MEASURES.add(
    "Best loss at as many tokens",
    "nats/token",
    of_curves("best"),
    "lower",
    reference=SMALL,
    asked_by=("batch_ramps",),
    affirmed_by="lower",
)
def _ramps(study: Study) -> pd.DataFrame:
    """Points named by batch schedule; empty unless some batches are constant and some are not."""
    names = study.records.runs.set_index("id").reindex(columns=["batch.name"])["batch.name"].astype("string")
    points = study.points.assign(arm=study.points["id"].map(names.replace(CONSTANT).str.replace("_", " ")))
    return points[points["arm"].notna()]


@MEASURES.add("Noise scale", "sequences", by_column, is_log=True, reference=NO_REFERENCE, asked_by=("noise_scale",))
def _noise(study: Study) -> pd.DataFrame:
    """Log10 of the noise scale in the first and in the last tenth of runs, at the best learning rate of their size."""
    points = study.points[study.points["lr"] == study.points["best_lr"]]
    tenths = by_tenth(study.records).reset_index().groupby("id")["noise_scale"].agg(["first", "last"])
    parts = [
        valued(study._replace(points=points), np.log10(tenths[end])).assign(column=f"in the {end} tenth")
        for end in tenths
    ]
    names = pd.concat(parts)
    return names.assign(arm=[f"{count(size)} parameters" for size in names["size"]])
