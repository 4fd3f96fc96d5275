"""Points of the measures of embeddings and known recipes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.probe_values import near
from lab.analysis.sensitivity import Study
from studies.architecture.effects import embedding_share
from studies.claims.points import in_columns


def embedding_shares(study: Study) -> pd.DataFrame:
    """Log10 of the norm of the embedding's gradient over that of the rest, at both ends of the run."""
    shares = embedding_share(study.records)
    steps = {"at the first step": shares["step"].min(), "at the last step": shares["step"].max()}
    at_step = {name: shares[shares["step"] == step].set_index("id")["value"] for name, step in steps.items()}
    return in_columns(study, {name: np.log10(values) for name, values in at_step.items()})


def early_and_late_losses(study: Study) -> pd.DataFrame:
    """Held-out losses at a twentieth of the budget and at its end, at the learning rate that ends lowest."""
    best = study.points[study.points["lr"] == study.points["best_lr"]]
    early, end = near(study.records, "val_loss", "", 0.05), best.set_index("id")["capped"]
    return in_columns(study._replace(points=best), {"at a twentieth of the budget": early, "at the end": end})
