"""Points of the measures of low precision."""

from __future__ import annotations

import pandas as pd

from lab.analysis.contrasts import by_column
from lab.analysis.sensitivity import WINDOW, Study, Window, per_seed
from labwatch.events.logit_rounding import RESULTS_IN_FP32
from studies.claims.points import valued
from studies.precision.effects import spike_rate

GAINS, ATTENTION = "norm_gains", "attention_precision"


def spikes(study: Study) -> pd.DataFrame:
    """Loss spikes in 1000 updates."""
    return valued(study, spike_rate(study.records))


def instability(points: pd.DataFrame, window: Window = WINDOW) -> pd.DataFrame:
    """Means of the instability part of LR sensitivity in each ``column``."""
    parts = per_seed(points, *window).set_index(["curve", "seed"])["above"].to_dict()
    keys = zip(points["curve"], points["seed"], strict=True)
    return by_column(points.assign(value=[parts[key] for key in keys]))


def by_format(study: Study) -> pd.DataFrame:
    """The points of a sweep over formats, under the names of the formats; the other interventions make the columns."""
    runs = study.records.runs.set_index("id").reindex(columns=["precision", GAINS, ATTENTION, "intervention"])
    if runs["precision"].nunique() < 2:
        return study.points.iloc[:0]
    rounds_attention = runs["precision"].isin(RESULTS_IN_FP32) & (runs[ATTENTION] != "bf16")
    formats = runs["precision"].astype(str) + runs[GAINS].map({"rounded": ", rounded gains"}).fillna("")
    formats += rounds_attention.map({True: ", rounded attention", False: ""})
    recipes = runs["intervention"].astype(str).str.split("+").map(_recipe)
    points = study.points
    return points.assign(arm=points["id"].map(formats), column=points["id"].map(recipes))


def _recipe(interventions: list[str]) -> str:
    activation = "SwiGLU" if "swiglu" in interventions else "GELU"
    return f"with {activation} {'and qk-layernorm' if 'qk_layernorm' in interventions else 'alone'}"
