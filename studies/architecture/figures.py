"""Figures of embeddings and learned positions: their gradients, and how far they move."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records
from studies.architecture.effects import embedding_share

# The probe of the distance from initialization, and the part of the model where it measures learned positions.
DISTANCE, POSITIONS = "distance_from_init", "embedding.learned_positions"
EMBEDDINGS = ("embedding_scale", "embedding_init")  # interventions that change the initial size of the embedding


@figure("embedding_gradient")
def embedding_gradient(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of the embedding against step: its norm over that of all other weights together.

    Lines are geometric means over seeds, after clipping, which changes both norms alike. The gradient of a tied
    embedding is that of both its uses.
    """
    if not begins_unusually(records):
        raise NothingToDrawError(f"nothing to draw: no run has {' or '.join(EMBEDDINGS)}")
    shares = embedding_share(records).assign(probe="embedding_share", where="")
    row = ProbeSeries("embedding_share", "", "gradient over\nthat of the rest")
    return over_steps(records._replace(metrics=shares), runs, [row])


def begins_unusually(records: Records) -> bool:
    """Whether the initial embedding of some run is larger or smaller than usual."""
    return bool(records.runs["intervention"].str.split("+").explode().isin(EMBEDDINGS).any())


@figure("distance_from_init")
def distance_from_init(records: Records, runs: pd.DataFrame) -> Sheet:
    """Distance of embedding tables from their initial values, against step.

    A distance is the norm of the change over the norm of the initial values, a geometric mean over seeds. There is one
    line per learning rate. Far below 1 a table has hardly changed.
    """
    named = {POSITIONS: "positions", "embedding": "tokens"}
    return over_steps(
        records, runs, [ProbeSeries(DISTANCE, where, f"distance of\n{table}") for where, table in named.items()]
    )
