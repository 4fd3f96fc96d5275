"""Planted sweeps of low precision: formats that fail as published, or do not, and loss scales that bring spikes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]

EXACT, SWIGLU = "z_loss", "swiglu+z_loss"
FORMATS = {
    "intervention": (EXACT, SWIGLU),
    "optimizer.lr": (3e-3, 1e-2, 1e-1, 3e-1, 1.0),
    ("precision", "norm_gains", "attention_precision"): (
        *(("fp32", "fp32", "same"), ("fp8_current", "fp32", "bf16"), ("fp8_delayed", "fp32", "bf16")),
        *(("mxfp8", "fp32", "bf16"), ("mxfp8", "rounded", "bf16")),
    ),
}
ROUNDED = {
    "intervention": (EXACT,),
    "optimizer.lr": FORMATS["optimizer.lr"],
    ("precision", "attention_precision"): (
        ("fp32", "same"),
        *((name, attention) for name in ("fp8_current", "mxfp8", "mxfp4", "nvfp4") for attention in ("bf16", "same")),
    ),
}
LOSS_SCALES = {
    "intervention": ("none",),
    "optimizer.lr": (2e-2,),
    "precision": ("fp16_emulated",),
    "loss_scale.init": (2.0**10, 1.0, 2.0**-9),
    "optimizer.eps": (1e-8, 1e-5),
}
# Products whose operands a figure reads.
PRODUCT = "block1.mlp_down"


def spikes(count: int) -> Recorded:
    """So many loss spikes, far enough from one another, and their number in the card."""
    events = [(40 * (index + 1), "spike", 3.0, "usual loss 2") for index in range(count)]
    return {("events", ""): events, ("columns", ""): {"spikes": count, "rewound_steps": 0, "skipped_batches": 0}}


def low_precision(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: fp8 and rounded gains are unstable earlier, SwiGLU saturates delayed scales.  Not good: the reverse."""
    precision, gains, swiglu = c["precision"], c["norm_gains"] == "rounded", "swiglu" in c["intervention"]
    low, high = (0.4, 1.2) if good else (1.2, 0.4)
    rise = {
        "fp32": low,
        "fp8_current": low if swiglu else high,
        "fp8_delayed": high,
        "mxfp8": high if gains else 0.8,
    }[precision]
    shape = {"high": rise}
    recorded = spikes(4 if gains == good else 1)
    if precision != "fp32":
        saturated = 0.2 if swiglu == good and precision == "fp8_delayed" else 0.05
        recorded |= {("saturation", f"{PRODUCT}.left"): saturated, ("gradient_underflow", PRODUCT): 0.1}
    return shape, recorded | {("gain_code", "block0.mlp_norm"): (1, 0.9, 0.5, 0.4)}


def attention_products(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: every format is less stable than fp32, more so with attention rounded.  Not good: the reverse."""
    level = 0 if c["precision"] == "fp32" else 2 if c["attention_precision"] == "same" else 1
    return {"high": 0.8 + 0.2 * (level if good else -level), "floor": 1.9 + 0.1 * (level if good else -level)}, {}


def loss_scale(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: the smallest scale has more zeros, a slower first block and more spikes.  Not good: it has fewer."""
    low = {2.0**10: 0, 1.0: 1, 2.0**-9: 2}[c["loss_scale.init"]]
    level = low if good else 2 - low
    seen = {
        ("zero_gradients", "block0.attention.query"): 0.1 + 0.2 * level,
        ("update_rms", "block0.attention.query"): 10.0 ** (-0.5 * level),
        ("update_rms", "head"): 1.0,
    }
    return {}, seen | spikes(1 + 2 * level)
