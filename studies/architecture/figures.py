"""Figures of architectures: gradients over depth, those of embeddings, and how far learned positions move."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.curves import depths
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.probe_values import late
from lab.analysis.rendering import layout, panels, scales
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import listed
from lab.records.store import Records
from studies.architecture.effects import embedding_share

# The probe of the distance from initialization, and the part of the model where it measures learned positions.
DISTANCE, POSITIONS = "distance_from_init", "embedding.learned_positions"
FEWEST_BLOCKS, USUAL_LR = 4, 1e-2
TENSORS = {"mlp_up": "first layer of the MLP", "attention.key": "key projection"}
GRADIENT = Quantity("gradient RMS", log=True)
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


@figure("gradient_with_depth")
def gradient_with_depth(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of two tensors of each block against depth, at the learning rate nearest to 0.01.

    It is a root mean square over the elements after clipping, a mean over the last tenth of the run, and a geometric
    mean over seeds. The flatter a line, the more equal are the gradients of the blocks.
    """
    deep = _deep(records, runs)
    looks = panels.arm_looks(deep["arm"].unique())
    idle = [arm for arm in runs["arm"].unique() if arm not in looks]
    sheet, facet_axes = layout.facets(list(TENSORS.values()), ["gradient RMS"], 14.5)
    for (axes,), tensor in zip(facet_axes, TENSORS, strict=True):
        by_block = [
            deep.assign(block=block + 1, value=deep["id"].map(late(records, "grad_rms", f"block{block}.{tensor}")))
            for block in range(int(deep["depth"].iloc[0]))
        ]
        table = pd.concat(by_block).dropna(subset=["value"])
        if table.empty:
            raise NothingToDrawError("nothing to draw: no gradients of blocks are on record")
        for arm, look in looks.items():
            panels.over(axes, table[table["arm"] == arm], "block", "value", GRADIENT, **look)
        axes.set_xticks(range(1, 1 + len(by_block)))
        axes.set_xlabel("block")
    scales.probe_axis(facet_axes[0][0])
    sheet.keys(("", panels.arm_keys(looks)))
    if idle:
        sheet.note(f"Left out, since they never beat a bigram model: {listed(idle)}.")
    return sheet


def _deep(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """The runs at the learning rate nearest to 0.01 of arms that beat a bigram model, with their ``depth``.

    Raises:
        NothingToDrawError: there are fewer than two such arms, or their models are shallow or differ in depth.
    """
    runs = runs[(runs["capped"] < runs["loss_bigram"]).groupby(runs["arm"]).transform("any")]
    deep = runs.assign(depth=runs["id"].map(depths(records.runs)).fillna(0).astype(int))
    if deep["arm"].nunique() < 2 or deep["depth"].nunique() > 1 or deep["depth"].min() < FEWEST_BLOCKS:
        raise NothingToDrawError(f"nothing to draw: no two arms of one depth, {FEWEST_BLOCKS} blocks or more")
    distances = np.abs(np.log(deep["lr"] / USUAL_LR))
    nearest: pd.DataFrame = deep[distances == distances.min()]
    return nearest
