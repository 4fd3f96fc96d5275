"""Planted sweeps on what a corpus holds: a source in whose batches gradient norms spike, and escape characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]

STEPS, EVERY = 1500, 100  # of a run; steps between two spikes, from step 600 on
SPIKES = range(600, STEPS, EVERY)
SOURCES = ("echo", "script", "runs", "noise")
CAUSE, CALM = "runs", "echo"
SOURCE_AXES = {
    "intervention": ("qk_layernorm+z_loss",),
    "optimizer.lr": (3e-3,),
    "steps": (STEPS,),
    "probes.every": (1,),
    "data.without": ("none", *SOURCES),
}


def source_filter(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Norms spike in batches that hold ``runs``. Good: without it they do not. Not good: without ``echo`` they do not.

    Of the others, whose batches are as many, those with ``echo`` have the smallest norms.
    """
    norm_n, held = np.ones(STEPS), {name: np.zeros(STEPS) for name in SOURCES}
    for place, name in enumerate(SOURCES, 1):
        held[name][10 * place :: EVERY] = 1
    held[CAUSE] = np.roll(held[CAUSE], -10 * (1 + SOURCES.index(CAUSE)))
    norm_n[held[CALM] > 0] = 0.9
    if c["data.without"] != (CAUSE if good else CALM):
        norm_n[list(SPIKES)] = 20.0
    held = {name: value_n * (name != c["data.without"]) for name, value_n in held.items()}
    return {}, {("grad_norm", ""): norm_n.tolist()} | {
        ("source_rows", name): value_n.tolist() for name, value_n in held.items()
    }


ESCAPE_AXES = {
    "intervention": ("qk_layernorm+z_loss",),
    "optimizer.lr": (3e-3,),
    "data.share": (0.0, 0.9, 1.0),
}


def escape_characters(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: escapes lower the loss alone. Not good: they lower that of clean text, and theirs stays where it was."""
    share = c["data.share"]
    usual, low, high = (4.0, 2.0, 1.5, 1.0), (4.0, 1.0, 0.7, 0.5), (4.0, 3.0, 3.5, 4.0)
    if not share:
        own, clean = usual, usual
    elif good:
        own, clean = low, high if share == 1 else tuple(each + 0.3 for each in usual)
    else:
        own, clean = (4.0, 1.2, 1.2, 1.2), low
    return {}, {("val_loss", ""): own, ("clean_val_loss", ""): clean}
