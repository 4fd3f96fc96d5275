"""Planted sweeps of mixtures of experts: routers that collapse, grow and round as published, or do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]

BALANCE, RATE, Z = (
    f"intervention.{name}" for name in ("balance.coefficient", "router_bias.rate", "router_z.coefficient")
)
PRECISION = "intervention.experts.router_precision"
BALANCED = "balance+experts+qk_layernorm"
ROUTED = {"intervention.experts.number": (8,), "intervention.experts.router": ("softmax",)}
COLLAPSE = ROUTED | {"intervention": (BALANCED,), BALANCE: (0.0, 1e-2), "optimizer.lr": (1e-3, 3e-3, 1e-1)}
COST = ROUTED | {"intervention": (BALANCED,), BALANCE: (0.0, 1e-2, 1.0, 10.0), "optimizer.lr": (1e-2,)}
BIAS = ROUTED | {"intervention": ("experts+qk_layernorm+router_bias",), RATE: (0.0, 1e-2, 1.0), "optimizer.lr": (1e-2,)}
ROUTER_Z = ROUTED | {
    "intervention": ("balance+experts+qk_layernorm+router_z",),
    Z: (0.0, 1e-3),
    "optimizer.lr": (0.1, 0.3),
}
Z_ALONE = ROUTED | {"intervention": ("experts+qk_layernorm+router_z",), Z: (0.0, 1e-3, 0.1), "optimizer.lr": (0.1,)}
SENSITIVITY = {"intervention": ("none", "balance+experts", "qk_layernorm", BALANCED), "optimizer.lr": (1e-2, 0.1, 0.3)}
BF16 = {
    "intervention": (BALANCED,),
    "intervention.experts.router": ("sigmoid",),
    PRECISION: ("fp32", "bf16"),
    "optimizer.lr": (1e-2, 0.1, 1.0),
}


def of_blocks(**values: float) -> Recorded:
    """The same value in both blocks."""
    return {(probe, block): value for probe, value in values.items() for block in ("block0", "block1")}


def experts_collapse(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: experts die without a balancing loss alone.  Not good: as many die with it, and few without it."""
    dead = 1.0 if c[BALANCE] == 0 else 2.0
    return {}, of_blocks(dead_experts=(4.0 if c[BALANCE] == 0 else 0.1) if good else dead)


def experts_balance_cost(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: a large coefficient costs loss.  Not good: a small one does, and a large one does not."""
    floors = {10.0: 2.1} if good else {10.0: 1.93, 1e-2: 2.0}
    return {"floor": floors.get(c[BALANCE], 1.9)}, {}


def experts_bias(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: a slow bias evens loads, a fast one oscillates.  Not good: neither does."""
    cv = {0.0: 0.9, 1e-2: 0.02, 1.0: 0.3} if good else {0.0: 0.9, 1e-2: 0.5, 1.0: 0.3}
    batch = {0.0: 0.9, 1e-2: 0.15, 1.0: 1.2} if good else {0.0: 0.9, 1e-2: 0.5, 1.0: 0.3}
    return {}, of_blocks(expert_load_cv=cv[c[RATE]], expert_load_cv_batch=batch[c[RATE]])


def experts_router_z(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: the z-loss bounds logits at no cost.  Not good: it bounds them a little, and costs loss."""
    logit = 200.0 if c[Z] == 0 else 20.0 if good else 130.0
    return {"floor": 2.0 if c[Z] and not good else 1.9}, of_blocks(router_logit_max=logit)


def experts_z_alone(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: logits shrink and experts stay dead.  Not good: they live."""
    return {}, of_blocks(router_logit_max=30.0 if c[Z] == 0 else 10.0, dead_experts=5.0 if good or c[Z] == 0 else 0.5)


def experts_sensitivity(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: experts raise the loss without qk-layernorm alone.  Not good: with it alone, and lower it without."""
    with_qk, without_qk = (1.9, 2.0) if good else (2.0, 1.8)
    if "experts" not in c["intervention"]:
        return {"floor": 1.9}, {}
    return {"floor": with_qk if "qk_layernorm" in c["intervention"] else without_qk}, {}


def experts_bf16(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: rounding flips more routes at high rates, and costs nothing.  Not good: the reverse."""
    grown = math.log10(c["optimizer.lr"]) + 2
    shift = 0.005 if good else 0.1
    return {"floor": 1.9 + shift * (c[PRECISION] == "bf16")}, of_blocks(
        router_flips=0.01 * 10 ** (grown * (0.4 if good else 0))
    )


SWEEPS = {
    "experts_collapse": (experts_collapse, COLLAPSE),
    "experts_balance_cost": (experts_balance_cost, COST),
    "experts_bias": (experts_bias, BIAS),
    "experts_router_z": (experts_router_z, ROUTER_Z),
    "experts_z_alone": (experts_z_alone, Z_ALONE),
    "experts_sensitivity": (experts_sensitivity, SENSITIVITY),
    "experts_bf16": (experts_bf16, BF16),
}
