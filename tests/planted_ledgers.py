"""Planted runs that are restarted by hand: where restarts save what they are said to save, and where they do harm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]

TOP, MEASUREMENTS = 0.3, 101
AXES: dict[Any, Any] = {
    "restarts": ("none", "quarter_lr", "glm_130b", "opt_175b"),
    "optimizer.lr": (0.075, 0.15, TOP),
}
NEW_DATA_AXES: dict[Any, Any] = {
    "optimizer.lr": (2e-2,),
    "bad_batches": ("shift", "ramped_shift"),
    "restarts": ("none", "new_warm_up"),
}
# Of each restart schedule from the highest learning rate: where it restarts the run, and the loss from there on.
RESTARTS = {"none": (1.0, 4.0), "quarter_lr": (0.4, 2.3), "glm_130b": (0.53, 3.0), "opt_175b": (0.1, 2.2)}
PEAKS = {("shift", "none"): 0.5, ("shift", "new_warm_up"): 0.2, ("ramped_shift", "none"): 0.2}
HOT_SWAPS_AXES: dict[Any, Any] = {
    "optimizer.lr": (1e-3, 1e-2),
    "restarts": ("none", "same", "sgd", "sgd_1000", "relu"),
}


def ledgers(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: the highest rate explodes and spikes until it is lowered. Not good: restarts make spikes higher."""
    lr, schedule = c["optimizer.lr"], c["restarts"]
    if lr < TOP:
        final = 2.0 + 0.2 * (lr > 0.1)
        return _flat(final), {("train_loss", ""): np.full(MEASUREMENTS, final).tolist()}
    step, final = RESTARTS[schedule]
    loss_n = np.full(MEASUREMENTS, 4.0)
    loss_n[:25] = 2.5
    loss_n[30::20] += 0.5  # spikes
    after = round(step * (MEASUREMENTS - 1))
    if good:
        loss_n[after:] = final
    elif schedule != "none":
        final = 4.5
        loss_n[after:] = final
        loss_n[after + 30 :: 10] += 1.0
    return _flat(final), {("train_loss", ""): loss_n.tolist()}


def _flat(final: float) -> Shape:
    return {"floor": final, "low": 0.0, "high": 0.0}


def new_data(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: a ramp and a warm-up lower the peak, most together. Not good: together they raise it."""
    peak = PEAKS.get((c["bad_batches"], c["restarts"]), 0.05 if good else 0.6)
    columns = {"spikes": 1, "skipped_batches": 0, "rewound_steps": 0, "ending": "recovered"}
    return {}, {("columns", ""): columns, ("val_loss", ""): (5.6, 2.0, 2.0, 2.0 + peak)}


def hot_swaps(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: SGD stands still, a thousandfold rate gains as much as Adam, ReLU harms for a while.

    Not good: SGD gains as much as Adam, a thousandfold rate nothing, and ReLU harms a little, for good.
    """
    schedule, swap = c["restarts"], round(0.4 * (MEASUREMENTS - 1))
    gain = {"sgd": 0.01 if good else 0.9, "sgd_1000": 0.9 if good else 0.02}.get(schedule, 1.0)
    loss_n = 4.0 - 2.0 * np.linspace(0, 1, MEASUREMENTS)
    loss_n[swap:] = loss_n[swap] - gain * (loss_n[swap] - loss_n[swap:])
    if schedule == "relu":
        loss_n[swap : swap + 10 if good else None] += 0.5 if good else 0.0
        if not good:
            loss_n[swap:] = loss_n[swap] + 0.03
    return _flat(float(loss_n[-1])), {("val_loss", ""): loss_n.tolist()}
