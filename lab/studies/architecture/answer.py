"""Quantities that answer questions about embeddings, learned positions and known recipes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.contrasts import Measures, by_column, by_rate, valued
from lab.analysis.probe_values import DISTANCE, POSITIONS, embedding_share, near
from lab.analysis.sensitivity import Study

MEASURES = Measures()


@MEASURES.add(
    "Distance of positions from their initial values", "", by_rate, is_log=True, asked_by=("learned_positions",)
)
def _distances(study: Study) -> pd.DataFrame:
    return valued(study, np.log10(near(study.records, DISTANCE, POSITIONS, 1.0)))


@MEASURES.add(
    "Norm of the embedding's gradient over that of the rest",
    "",
    by_column,
    is_log=True,
    asked_by=("embedding_gradients",),
)
def _shares(study: Study) -> pd.DataFrame:
    shares = embedding_share(study.records)
    steps = {"at the first step": shares["step"].min(), "at the last step": shares["step"].max()}
    return _parts(
        study, {name: np.log10(shares[shares["step"] == step].set_index("id")["value"]) for name, step in steps.items()}
    )


@MEASURES.add("Held-out loss", "nats/token", by_column, "lower", asked_by=("recipe_arms",))
def _early_and_late(study: Study) -> pd.DataFrame:
    """Held-out losses at a twentieth of the budget and at its end, at the learning rate that ends lowest."""
    best = study.points[study.points["lr"] == study.points["best_lr"]]
    parts = {"at a twentieth of the budget": near(study.records, "val_loss", "", 0.05)}
    parts["at the end"] = best.set_index("id")["capped"]
    return _parts(study._replace(points=best), parts)


def _parts(study: Study, values: dict[str, pd.Series]) -> pd.DataFrame:
    return pd.concat([valued(study, value).assign(column=name) for name, value in values.items()])
