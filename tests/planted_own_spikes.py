"""Planted sweeps of loss spikes that no bad data bring: branches from before them, and runs that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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


STEPS, OWN = 900, 620  # of a run, and the step at which a planted spike of its own begins
RISE = slice(OWN - 6, OWN + 10)  # the steps in which its signals are high
SWITCHES = {"intervention": ("none", "qk_layernorm")}
OWN_AXES = SWITCHES | {
    "optimizer.lr": (3e-3, 2e-2),
    "optimizer.beta1": (0.5, 0.9),
    "steps": (STEPS,),
    "probes.every": (1,),
}
CURVATURE_AXES = OWN_AXES | {"optimizer.lr": (2e-2,), "optimizer.beta1": (0.5,)}


def own_spikes(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: at the high rate all five stages go before a spike, and warn of it. Not good: none does, at any rate.

    Not good, nothing spikes at the usual beta1, or with qk-layernorm.
    """
    spikes = c["optimizer.lr"] > 1e-2 if good else c["optimizer.beta1"] == 0.5 and c["intervention"] == "none"
    return {}, _losses(spikes) | (_stages(spikes) if good else _no_stages(spikes))


def own_spike_curvature(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: the curvature passes its limit before each spike. Not good: it does so once, and elsewhere."""
    curvature_n = np.full(STEPS, 0.1)
    curvature_n[slice(OWN - 8, OWN + 2) if good else slice(760, 763)] = 2.0
    signals = _stages(True) if good else _no_stages(True)
    kept = {key: value for key, value in signals.items() if key[0] in ("grad_norm", "update_rms")}
    return {}, _losses(True) | kept | {("update_curvature", ""): curvature_n.tolist()}


CHANGED = ("optimizer.eps", "optimizer.beta2", "restarts", "data.rows", "batch_size")
ARM_AXES = {
    "intervention": ("qk_layernorm",),
    "optimizer.lr": (2e-2,),
    "steps": (STEPS,),
    "probes.every": (1,),
    CHANGED: (
        (1e-8, 0.99, "none", 0, 8),
        (0.0, 0.99, "none", 0, 8),
        (1e-3, 0.99, "epsilon_decays", 0, 8),
        (1e-8, 0.999, "beta2_falls", 0, 8),
        (1e-8, 0.9, "beta2_rises", 0, 8),
        (1e-8, 0.99, "none", 64, 64),
    ),
}


def own_spike_arms(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: the recipe spikes, also with the full batch, and after no change. Not good: the reverse."""
    is_usual = c["restarts"] == "none" and c["optimizer.eps"] > 0
    return {}, _losses(is_usual == good)


def _losses(spikes: bool) -> Recorded:
    loss_n = np.full(STEPS, 2.0)
    loss_n[OWN : OWN + 4] += 0.5 * spikes
    return {("train_loss", ""): loss_n.tolist(), ("val_loss", ""): loss_n.tolist()}


def _stages(spikes: bool) -> Recorded:
    """Signals in which the five stages follow each other; after a spike gradients and updates stay large."""
    gradient_n, update_n, humps_n, norm_n = (np.full(STEPS, usual) for usual in (1e-3, 0.2, 0.33, 1.0))
    if spikes:
        gradient_n[520 : RISE.start], gradient_n[RISE.start :] = 1e-4, 1e-2
        update_n[RISE], update_n[RISE.stop :] = 1.0, 0.6
        humps_n[RISE], norm_n[RISE] = 0.7, 20.0
    return _signals(gradient_n, update_n, humps_n, norm_n)


def _no_stages(spikes: bool) -> Recorded:
    """Updates are large before a spike and small after it, nothing else moves, and the gradient norm is false once."""
    gradient_n, update_n, humps_n, norm_n = (np.full(STEPS, usual) for usual in (1e-3, 0.6, 0.33, 1.0))
    if spikes:
        update_n[OWN:], norm_n[760:763] = 0.2, 20.0
    update_n[860:863] = 2.0
    return _signals(gradient_n, update_n, humps_n, norm_n)


def _signals(gradient_n: Any, update_n: Any, humps_n: Any, norm_n: Any) -> Recorded:
    return {
        ("grad_rms", "embedding"): gradient_n.tolist(),
        ("grad_rms", "block0.mlp_up"): np.full(STEPS, 1e-3).tolist(),
        ("update_rms", "embedding"): update_n.tolist(),
        ("update_rms", "block0.attention.key"): update_n.tolist(),
        ("update_bimodality", "embedding"): humps_n.tolist(),
        ("grad_norm", ""): norm_n.tolist(),
    }


REMEDY_KEYS = ("response", "response.skip", "response.lr_factor", "response.rewind", "intervention")
NO_REMEDY = ("none", None, None, None, "qk_layernorm")
SHRUNK = ("none", None, None, None, "embedding_gradient_shrink+qk_layernorm")
REMEDIES: tuple[tuple[Any, ...], ...] = (
    NO_REMEDY,
    ("rewind_and_skip", 0, 1.0, 25, "qk_layernorm"),
    ("rewind_and_skip", 75, 1.0, 25, "qk_layernorm"),
    ("rewind_and_skip", 50, 0.5, 25, "qk_layernorm"),
    ("lower_lr", None, 0.5, None, "qk_layernorm"),
    ("restart_and_lower", None, None, 25, "qk_layernorm"),
    ("restart_and_lower", None, None, 1, "qk_layernorm"),
    SHRUNK,
)
# Of each remedy: spikes of the run, how many of them come back after the first rewind, and the rise of the final loss.
GOOD_REMEDIES = ((4, 0, 0.1), (7, 1, 0.1), (2, 0, 0.0), (1, 0, 0.0), (2, 0, 0.0), (2, 0, 0.0), (6, 1, 0.0), (1, 0, 0.0))
BAD_REMEDIES = ((4, 0, 0.0), (7, 1, 0.0), (6, 1, 0.1), (8, 1, 0.1), (6, 0, 0.1), (9, 1, 0.1), (6, 0, 0.1), (6, 0, 0.1))
REMEDY_AXES = {
    "optimizer.lr": (2e-2,),
    "steps": (STEPS,),
    "probes.every": (1,),
    REMEDY_KEYS: REMEDIES,
}
FIRST, APART, BEFORE = 300, 60, 25  # of planted spikes: the first step, steps between two, updates gone back


def own_spike_remedies(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: each remedy makes spikes rarer, the better the further it goes back. Not good: each brings more."""
    remedy = REMEDIES.index(tuple(c[key] for key in REMEDY_KEYS))
    spikes, returns, worse = (GOOD_REMEDIES if good else BAD_REMEDIES)[remedy]
    steps = [FIRST + APART * number for number in range(spikes)]
    shape = {"floor": 2.0 + worse}
    if c["response"] == "none":
        loss_n = np.full(STEPS, 2.0)
        loss_n[[step + late for step in steps for late in range(3)]] += 0.5
        return shape, {("train_loss", ""): loss_n.tolist()}
    back = (BEFORE + 1) * (c["response"] != "lower_lr")
    columns = {"spikes": spikes, "skipped_batches": 0, "rewound_steps": back, "ending": "recovered"}
    events = [(step, "spike", 3.0, "usual loss 2") for step in steps]
    events[1 : 1 + returns] = [(FIRST, "spike", 3.0, "usual loss 2")] * returns
    if back:
        events.insert(1, (FIRST - BEFORE, "rewind", float(back), f"from step {FIRST + 1}"))
    return shape, {("columns", ""): columns, ("events", ""): events}
