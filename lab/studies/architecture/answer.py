"""Answers of sweeps on the embedding's gradient and on learned positions."""

from __future__ import annotations

import numpy as np

from lab.analysis.probe_values import DISTANCE, POSITIONS, embedding_share, near
from lab.analysis.sensitivity import Study
from lab.analysis.text import listed, of_arm
from lab.studies.architecture.figures import begins_unusually


def sentence(study: Study) -> str:
    """How far learned positions move, or how the embedding's share of the gradient changes; empty without either."""
    return distance_answer(study) or embedding_answer(study)


def distance_answer(study: Study) -> str:
    """How far learned positions end from their initial values, by arm; empty where there is one arm, or no distance."""
    metrics = study.records.metrics
    if not ((metrics["probe"] == DISTANCE) & (metrics["where"] == POSITIONS)).any():
        return ""
    points = study.points.assign(distance=study.points["id"].map(near(study.records, DISTANCE, POSITIONS, 1.0)))
    moves = []
    for arm, runs in points.groupby("arm", sort=False):
        by_rate = runs.groupby("lr")["distance"].mean()
        moves.append(f"{by_rate.min():.2g} to {by_rate.max():.2g} {of_arm(str(arm))}")
    if len(moves) < 2:
        return ""
    return (
        "From the lowest to the highest learning rate the table of positions moves by so many times the norm of its "
        f"initial values: {listed(moves)}."
    )


def embedding_answer(study: Study) -> str:
    """Between which arms the embedding's share of the gradient lies at the first step and at the last.

    Geometric means over seeds and learning rates. Empty where every embedding begins as usual, or the gradient is not
    on record.
    """
    shares = embedding_share(study.records).merge(study.points[["id", "arm"]], on="id")
    if shares.empty or not begins_unusually(study.records):
        return ""
    by_step = np.exp(np.log(shares["value"]).groupby([shares["step"], shares["arm"]]).mean())
    first, last = (by_step.loc[step] for step in (shares["step"].min(), shares["step"].max()))
    low, high = first.idxmin(), first.idxmax()
    return (
        f"The norm of the embedding's gradient over that of all other weights begins between {first[low]:.2g} "
        f"{of_arm(low)} and {first[high]:.2g} {of_arm(high)}, and ends between {last.min():.2g} and {last.max():.2g}."
    )
