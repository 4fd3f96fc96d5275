"""Planted runs of published recipes: where their changes do what is said of them, and where they do the reverse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]

MEASUREMENTS = 101
WD, EPS, MLP = "optimizer.weight_decay", "optimizer.eps", "block0.mlp_up"
WEAK, STRONG = 0.43 / 400, 4.3 / 400
FIRST_RUNS: dict[Any, Any] = {
    "intervention": ("z_loss",),
    (WD, EPS): ((WEAK, 1e-4), (STRONG, 1e-4), (STRONG, 1e-2)),
    "optimizer.lr": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0),
}
EMBEDDINGS: dict[Any, Any] = {
    "intervention": (
        *("embedding_scale", "embedding_scale+learned_positions", "embedding_init", "embedding_init+learned_positions"),
        *("tied_head", "deepnorm+tied_head"),
    ),
    "optimizer.lr": (8e-3,),
}
LEFT = "embedding_scale+learned_positions+normformer"
RECIPES: dict[Any, Any] = {
    "intervention": (LEFT, "embedding_init+learned_positions"),
    "optimizer.lr": (1.2e-2, 3e-2),
}


def first_runs(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: decay stops the loss at a fifth of the run, and epsilon keeps high rates. Not good: reversed."""
    stops, steadies = (c[WD] == STRONG) == good, (c[EPS] > 1e-3) == good
    fifth, end = (2.6, 2.5) if stops else (2.4, 2.0)
    loss_n = np.linspace(5.6, fifth, MEASUREMENTS // 5)
    loss_n = np.concatenate([loss_n, np.linspace(fifth, end, MEASUREMENTS - len(loss_n))])
    cliff = 2.0 if steadies else 0.2 if good else 0.02
    if not good and c[EPS] < 1e-3:
        cliff = 0.2
    recorded: Recorded = {("val_loss", ""): loss_n.tolist(), ("grad_rms", MLP): 1e-3}
    return {"best": 1e-2, "low": 0.1, "cliff": cliff}, recorded


def embedding_gradients(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: a small embedding has forty times the share, a tied one ten at first. Not good: twice, and one."""
    share: Any = {"embedding_scale": 0.05 if good else 1.0, "embedding_init": 2.0}.get(
        c["intervention"].removesuffix("+learned_positions")
    )
    tables = 2
    if share is None:
        tables, share = 1, (10, 10, 1, 1) if good else (1, 1, 0.5, 0.5)
    shares = np.array(share if isinstance(share, tuple) else (share,) * 4)
    norm = 1e-3 * math.sqrt((c["parameters"] - c["parameters_without_embeddings"]) / tables)
    return {}, {
        ("grad_rms", "embedding"): 1e-3,
        ("grad_norm_clipped", ""): tuple((norm * np.sqrt(1 + shares**-2.0)).tolist()),
    }


def recipe_arms(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: at either rate the recipe that is left falls fast and ends high. Not good: it is slow, and ends low.

    At the rate of the other each begins higher, and ends nearer to it.
    """
    is_left, is_high = c["intervention"] == LEFT, c["optimizer.lr"] > 2e-2
    fast = is_left == good
    own_rate = is_left == is_high
    final = (2.2 if own_rate else 2.1) if fast else (1.9 if own_rate else 2.0)
    height = 2.5 if not own_rate else 0.5 if fast else 1.5
    loss_n = final + height * np.exp(-np.arange(MEASUREMENTS) / 10)
    return {"floor": final, "low": 0.0, "high": 0.0}, {("val_loss", ""): loss_n.tolist()}
