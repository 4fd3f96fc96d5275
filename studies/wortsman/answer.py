"""Points of the measures of learning rates and attention logits that no column of a table or probe makes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis import grouping
from lab.analysis.contrasts import final_losses
from lab.analysis.sensitivity import Study
from studies.claims.points import up_to

KAPPA = "intervention.kappa_transplant.kappa"


def losses_at_the_highest_rate(study: Study) -> pd.DataFrame:
    """Final losses at the highest learning rate of all."""
    return up_to(np.inf, final_losses(study))


def beside_no_blocks(study: Study) -> pd.DataFrame:
    """Best losses by kappa and steps above models without blocks of the same width, steps and seed."""
    cards = study.records.runs.set_index("id").loc[study.points["id"]]
    if KAPPA not in cards:
        return study.points.head(0)
    keys = {"width": "model.width", "steps": "steps", "depth": "model.depth", "kappa": KAPPA}
    points = study.points.assign(**{name: cards[key].to_numpy() for name, key in keys.items()})
    points["value"] = points.groupby(["curve", "seed"])["capped"].transform("min")
    alone, pair = points[points["depth"] == 0], ["width", "steps", "seed"]
    without = alone.groupby(pair)["value"].mean().reindex(pd.MultiIndex.from_frame(points[pair])).to_numpy()
    names = [f"kappa {kappa:g}, {steps:g} steps" for kappa, steps in zip(points["kappa"], points["steps"], strict=True)]
    points = points.assign(value=points["value"] - without, arm=names).sort_values(["steps", "kappa"], kind="stable")
    return points[points["depth"] > 0]


def by_way_to_grow(study: Study) -> pd.DataFrame:
    """Points of models that grow in width, in depth or in both, as arms."""
    return grouping.ways_to_grow(study.records.runs, study.points)
