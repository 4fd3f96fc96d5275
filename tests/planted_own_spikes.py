"""Planted sweeps of loss spikes that no bad data bring: branches from before them, and runs that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]

CHANGES = ("same", "batches", "first_moment", "second_moment", "moments", "lr", "eps")
BRANCH_AXES = {
    "intervention": ("none", "qk_layernorm"),
    "optimizer.lr": (2e-2,),
    "response": ("branch",),
    "response.change": CHANGES,
}
SPIKE, BACK = 300, 25  # the step at which a planted spike begins, and updates from the branch to there
NEVER = 380  # a step at which a spike is another one


def spike_causes(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: all but a fresh first moment remove the spike; a fresh second moment makes one. Not good: the reverse."""
    change = c["response.change"]
    again = {"same": True, "first_moment": good, "second_moment": True}.get(change, not good)
    start = SPIKE - BACK
    at = start + 1 if change == "second_moment" else SPIKE if again else NEVER
    spike = (SPIKE, "spike", 3.0, "usual loss 2")
    rewind = (start, "rewind", BACK + 1, f"from step {SPIKE + 1}")
    return {}, {("events", ""): [spike, rewind, (at, "spike", 3.0, "usual loss 2")]}
