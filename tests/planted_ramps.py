"""A planted sweep of batches that grow, in which every claim on them holds, or none does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

TOKENS = 1_024_000
# Name, steps and sequences at which the ramp ends.
RAMPS = (
    ("quarter", 1000, None),
    ("palm", 345, None),
    ("glm_130b", 266, 800),
    ("mt_nlg", 279, 1422),
    ("gpt3", 276, 1280),
    ("adaptive", 1000, None),
    ("constant", 250, None),
)
AXES = {("batch.name", "steps", "batch.ramp"): RAMPS, "batch_size": (128,)}
# Shares of the tokens seen, and the batch, at the start, a tenth, half and 95 % into the steps.
SEEN = {
    "quarter": (0, 0.1, 0.5, 0.95),
    "constant": (0, 0.1, 0.5, 0.95),
    "palm": (0, 0.03, 0.33, 0.93),
    "adaptive": (0, 0.05, 0.4, 0.93),
}
BATCH = {
    "quarter": (32, 32, 32, 32),
    "constant": (128, 128, 128, 128),
    "palm": (32, 32, 128, 128),
    "adaptive": (32, 48, 90, 128),
}


def batch_ramps(c: Mapping[str, Any], i: int, good: bool) -> tuple[dict[str, float], dict[tuple[str, str], Any]]:
    """Good: small batches lead early and large ones late, ramps lead and end level. Not good: all of it reversed."""
    name = c["batch.name"]
    sign = 1 if good else -1
    lead = {"quarter": 0.2, "constant": 0.0, "adaptive": 0.6 if good else 0.3}.get(name, 0.1)
    final = 1.9 if name == "constant" or good else 2.0
    if name == "quarter":
        final = 1.9 + 0.1 * sign
    seen, batch = SEEN.get(name, (0, 0.1, 0.5, 0.95)), BATCH.get(name, (16, 110, 128, 128))
    tuning = 0.05 * math.log10(c["optimizer.lr"] / 1e-2) ** 2
    shared = np.interp(seen, (0, 0.1, 0.5, 1), (5.62, 3.0, 2.2, 1.9))
    losses = tuple(float(loss) - sign * lead * (share > 0) + tuning for loss, share in zip(shared, seen, strict=True))
    recorded = {
        ("val_loss", ""): losses,
        ("batch", "tokens"): tuple(TOKENS * share for share in seen),
        ("batch", "sequences"): batch,
        ("noise_scale", "trace.block0"): (20.0, 100.0, 300.0, 600.0),
        ("noise_scale", "squared_norm.block0"): 1.0,
    }
    return {"floor": final}, recorded
