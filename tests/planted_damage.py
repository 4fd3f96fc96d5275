"""Planted runs that meet a burst several times, and learned positions: where the claims on them hold, and where not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]

ARM_KEYS = ("bad_batches.fraction", "bad_batches.repeats", "bad_batches.start", "steps")
ARMS: tuple[tuple[Any, ...], ...] = (
    *((0.0, None, 0.1, 800), (1.0, None, 0.1, 800), (1.0, 5.0, 0.1, 800), (1.0, 20.0, 0.1, 800)),
    *((1.0, None, 0.955, 800), (0.0, None, 0.1, 640)),
)
AXES: dict[Any, Any] = {
    "optimizer.lr": (1e-2, 3e-2),
    "bad_batches": ("conflicting_labels",),
    "bad_batches.length": (0.01,),
    ARM_KEYS: ARMS,
}
# The final loss of each arm.
DAMAGED, UNHARMED = (1.9, 1.95, 2.0, 2.3, 2.0, 1.92), (1.9, 2.2, 2.1, 2.05, 2.0, 2.05)
INIT = "intervention.learned_positions.init"
POSITION_AXES: dict[Any, Any] = {
    "intervention": ("learned_positions+qk_layernorm+z_loss",),
    INIT: ("gaussian", "sinusoidal"),
}


def repeated_bursts(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: the more bursts, the higher the final loss. Not good: the lower, and missing batches cost more."""
    arm = ARMS.index(tuple(c[key] for key in ARM_KEYS))
    columns = {"spikes": 1, "skipped_batches": 0, "rewound_steps": 0, "ending": "recovered"}
    usual = (5.6, 2.0, 2.0, 3.0 if c["bad_batches.fraction"] else 2.0)
    return {"floor": (DAMAGED if good else UNHARMED)[arm]}, {("columns", ""): columns, ("val_loss", ""): usual}


def learned_positions(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: a table of sines moves a hundredth as far as a random one. Not good: a third as far."""
    distance = 5.0 if c[INIT] == "gaussian" else 0.05 if good else 1.7
    return {}, {("distance_from_init", "embedding.learned_positions"): distance}
