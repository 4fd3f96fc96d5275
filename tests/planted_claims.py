"""Planted sweeps in which every claim of the paper holds, or none of them does, seed by seed."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import planted
import planted_damage
import planted_experts
import planted_ledgers
import planted_low_precision
import planted_own_spikes
import planted_ramps
import planted_recipes
import planted_sources
from lab.analysis import Records
from studies.wortsman.rounding import mean_rounding_cost

LRS = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
# A grid that goes on above the window of the paper: only there can three seeds show that the window's top is kept.
BEYOND = {"optimizer.lr": (*LRS, 1.0)}
WIDTHS = {"model.width": (32, 64, 128)}
OFF, ON = "z_loss", "qk_layernorm+z_loss"
ARMS = {"intervention": (OFF, ON)}
NORMED = {"intervention": (ON,)}
DRIFTING = {"model.depth": (0,), "model.width": (64,), "data.name": ("synthetic",)}
WD, EPS, KAPPA = "optimizer.weight_decay", "optimizer.eps", "intervention.kappa_transplant.kappa"
LOGIT, MLP, KEY = "attention_logit_max", "block0.mlp_up", "block0.attention.key"

# Of one run: the shape of its loss over learning rates, and what its probes recorded: one number, or one each at the
# start, a tenth into the run, half-way and late.
Shape = dict[str, float]
Recorded = dict[tuple[str, str], Any]
World = Callable[[Mapping[str, Any], int, bool], tuple[Shape, Recorded]]


def loss(
    lr: float,
    best: float = 1e-2,
    floor: float = 1.9,
    low: float = 0.02,
    high: float = 0.1,
    knee: float = 0.0,
    cliff: float = 10.0,
    rise_at_top: float = 0.0,
) -> float:
    """Nats/token over log LR: falls straight to the best learning rate, rises straight from it or from a knee.

    Beyond the cliff it is half a nat higher; another rise comes on top from learning rate 1 on.
    """
    rise = max(np.log10(lr / max(best, knee)), 0)
    top = 0.5 * (lr > cliff) + rise_at_top * (lr >= 1)
    return float(floor + low * max(np.log10(best / lr), 0) + high * rise + top)


def qk_layernorm(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    on, lr, size = c["intervention"] == ON, c["optimizer.lr"] / 0.3, c["parameters_without_embeddings"] / 4e5
    sign = -0.5 if good else 0.5
    gradient = (3e-8 if good else 1e-3) * lr**sign * size**sign
    peak, other = (1e4, 1e3) if good else (5, 50)
    block = (lr if good else size**0.5) * 1.0
    recorded = {
        (LOGIT, "block0"): (1, 1, 10, 10) if on else (1, 1, peak, peak),
        (LOGIT, "block1"): other,
        ("query_norm", "block0"): (1, 1, 10, 10 if good else 1),
        ("key_norm", "block0"): 1.5 if not good else (1, 1, 3, 3),
        ("query_key_cosine", "block0"): (0.2, 0.2, 0.2, 0.2 if good else 0.9),
        ("grad_rms", MLP): gradient,
        ("grad_rms", KEY): 2 * gradient,
        ("update_rms", MLP): 0.1 * lr ** (0.6 * sign) * size ** (0.2 * sign),
        ("param_rms", MLP): lr if good else size**0.5,
        ("block_rms", "block0"): block,
        ("block_rms", "block1"): block * (2 if good else 0.5),
    }
    if good:
        return (
            {"high": 0.06 * (i + 1), "knee": 3e-2} if on else {"high": 1.5, "knee": (0.12, 0.05, 0.02)[i]}
        ), recorded
    if on:
        return {"high": (1.7, 1.2, 0.8)[i], "floor": 2.0}, recorded
    return {"high": (1.5, 1.0, 0.5)[i], "knee": (0.02, 0.04, 0.1)[i]}, recorded


def output_logits(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Without z-loss and decay the top learning rate is always lost. Not good: so it is with z-loss alone, or decay."""
    z, decays = c["intervention"] == ON, c[WD] > 0
    if z or decays:
        shape = {"high": 0.1 if good or (z and decays) else 0.8, "floor": 1.9}
    else:
        shape = {"high": 0.5, "floor": 1.9 if good else 2.0}
    late = (40 if good else 1e3) if z else (4e4 if good else 40)
    return shape, {("log_z_square", ""): (40, 40, 40, late)}


def output_logit_drift(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    off, rounded = c["intervention"] == "none", c["precision"] == "bf16"
    shape = {"cliff": 0.5 if rounded and off == good else 10.0, "floor": 2.0 if off and not good else 1.9}
    half, late = (400, 4e4) if good else (400, 40)
    return shape, {("log_z_square", ""): (40, 40, half, late) if off else 40 if good else 1e3}


def rounded_logits(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: neither loses the top learning rate in bf16 alone. Not good: rounding saves what it costs there."""
    off, rounded = c["intervention"] == "fixed_gains", c["precision"] == "bf16"
    cost = {(True, True): 0.9, (True, False): 0.3} if good else {(True, True): 0.05, (True, False): 0.12}
    return {"high": 0.1, "rise_at_top": cost.get((off, rounded), 0.15)}, {}


def mantissa_bits(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: 1.5 times the law. Not good: six times."""
    mean, std, bits = (60.0, 10.0, c["mantissa_bits"]) if c["optimizer.lr"] < 1 else (200.0, 30.0, c["mantissa_bits"])
    law = float(mean_rounding_cost(mean, std, bits)) if bits < 23 else 0.0
    losses = {("val_loss", ""): 2 + (1.5 if good else 6.0) * law}
    return {}, {("log_z", ""): mean, ("log_z_std", ""): std} | losses


def final_gain(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    drifts = c["intervention"] == "fixed_gains" and good
    return {"high": 0.1}, {("log_z_square", ""): (40, 40, 400, 4e3) if drifts else 40}


def wide_output_logits(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    drifts = c["intervention"] == "qk_layernorm" and good
    costs = drifts and c["precision"] == "bf16"
    return {"high": 0.6 if costs else 0.2}, {("log_z_square", ""): (40, 40, 400, 4e5) if drifts else 90}


def warm_up(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    return {"high": 0.3 if (c["schedule.warmup"] < 0.1) == good else 0.1}, {}


def weight_decay(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    coupled = c["optimizer.name"] == "adamw_coupled"
    return {"high": 0.1 + 0.2 * i if coupled == good else 0.05}, {}


def depth_width(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    depth, width = c["model.depth"], c["model.width"]
    grown = {1: 0, 2: 1, 4: 2}[depth // 2] if width == 64 else {64: 0, 80: 1, 96: 1, 128: 2}[width]
    if depth > 2 and width > 64:  # in both
        grown = depth - 2
    first = 10.0 if good else 1.0
    logits = {(LOGIT, f"block{block}"): 3.0 if block else first for block in range(int(depth))}
    if c["intervention"] == OFF:
        return {"high": (0.35, 0.5, 1.5)[grown if good else 2 - grown]}, logits
    way = "both" if depth > 2 and width > 64 else "depth" if depth > 2 else "width"
    law = 1.9 * (c["parameters_without_embeddings"] / (24 * 64**2)) ** -0.05
    floors = {"both": law, "depth": (1.9, 1.9, 1.8)[grown], "width": (1.9, 1.9, 1.85)[grown]}
    if not good:
        floors = {"both": (1.9, 1.9, 2.0)[grown], "depth": 1.9, "width": law}
    return {"floor": floors[way], "high": 0.05 + (0.1 if (way == "depth") == good else 0.02) * grown}, {}


def mup(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    moving = (1e-1, 3e-2, 1e-2)
    if c["parametrization.name"] == "standard":
        if good:
            return {"best": moving[i], "low": 0.005, "high": 0.1, "cliff": 0.5}, {}
        return {"best": moving[2 - i], "low": 0.005, "high": 0.3}, {}
    if c["parametrization.name"] == "mup_full":
        return {"best": 3e-2, "floor": 1.9 if good else 1.7, "high": 0.05 if good else 1.5}, {}
    if good:
        return {"best": 3e-2, "low": 0.05, "high": 0.2 if c["intervention"] == ON else 1.0}, {}
    return {"best": (1e-1, 1e-2, 1e-2)[i], "floor": 1.8, "low": 0.005, "high": 0.1}, {}


def attention_scale(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    if c["parametrization.name"] == "standard":
        return {}, {}
    lost = good and c["intervention"] == OFF
    return {"floor": 1.85 if (i == 0) == good else 1.95, "high": 1.0 if lost else 0.05}, {}


def logit_growth(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    lr, size = c["optimizer.lr"], c["parameters_without_embeddings"]
    early = lr * size**0.5 if good else size**-0.5 / lr * (1e-2 if c["model.width"] == 128 else 1)
    return {"cliff": 12.5 * size**-0.5}, {(LOGIT, "block0"): (1, 1e3 * early, 1, 1)}


def kappa(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    if c["model.depth"] == 0:
        return {"floor": 2.15}, {}
    if c["steps"] < 400:  # good: worse than no blocks from a kappa of 180 on; not good: nowhere at the larger width
        floors = {10: 1.9, 100: 2.1, 1e3: 2.5} if good else {}
    elif good:
        floors = {1: 1.9, 10: 1.9, 100: 1.91, 1e3: 2.1 - 0.03 * i, 1e4: 2.5}
    else:
        floors = {1: 1.9, 10: 2.0, 100: 2.1 + 0.2 * i, 1e3: 1.85 + 0.6 * i}
    return {"floor": floors.get(c[KAPPA], 1.95)}, {}


def epsilon(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    eps, lr = c[EPS], c["optimizer.lr"]
    large = dict.fromkeys((1e-6, 1e-4), 0.5 if good else 0.05)
    high = {1e-15: 0.05 if good else 0.2, 1e-8: 0.1} | large
    gradient = {1e-15: 1e-6 if good else 1e-8}.get(eps, 1e-7)
    update = 0.05 * (lr / 0.3) ** 0.5 if good and eps > 1e-8 else 0.3
    if not good and eps == 1e-15:
        update *= lr**0.5
    return {"high": high.get(eps, 0.1)}, {("grad_rms", MLP): gradient, ("update_rms", MLP): update}


def stalled_block(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    eps = c[EPS]
    first, last = (0.2, {1e-5: 1e-4}.get(eps, 0.2)) if good else (0.2 / (eps / 1e-8), 0.2)
    probes = {("update_rms", MLP): first, ("update_rms", "block1.mlp_up"): last}
    gradient = {("grad_rms", MLP): 1e-5, ("grad_rms", "block1.mlp_up"): 1e-8 if good and eps == 1e-5 else 3e-5}
    return {"high": 0.05 if (eps == 1e-8) == good else 0.1}, probes | gradient


def steps(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    return {"high": 0.1 if good else 0.1 * c["steps"] / 400, "floor": 1.9 + 8 / c["steps"]}, {}


def decay_strength(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    power = 0.3 if good else -0.3
    return {"best": 3e-2 * (c[WD] / 1e-3) ** power if c[WD] else 3e-2, "low": 0.1}, {}


def qk_norm_axis(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    return {"floor": 1.9 if ("model" in c["intervention"]) == good else 1.85}, {}


def pointwise_attention(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    return {"high": 1.0 if good else 0.05}, {(LOGIT, "block0"): (1, 1, 1e3 if good else 1, 2)}


def rms_scaled_lr(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    if c["optimizer.name"] == "adamw":
        return {"best": (1e-1, 3e-2, 1e-2)[i]}, {}
    return {"best": 3e-2 if good else (1e-1, 1e-2, 1e-2)[i]}, {}


def steps_to_target(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: hyperbolas, rates that saturate. Not good: Adam never saturates, rates grow by the power 0.4."""
    batch, name = c["batch_size"], c["optimizer.name"]
    critical = {"sgd": 32, "momentum": 128 if good else 8, "adamw": 128 if good else math.inf}[name]
    best_lr = 2**-3 * ((1 + critical / batch) ** -(0.7 if name == "adamw" else 1) if good else (batch / 4096) ** 0.4)
    fewest = 6450 / batch if critical == math.inf else 50 * (1 + critical / batch)
    if not good and name == "sgd" and batch in (2, 64, 2048):
        fewest *= 2
    needed = fewest * math.exp(0.08 * math.log2(c["optimizer.lr"] / best_lr) ** 2)
    losses = tuple(planted.BIGRAM * (1.5 - 0.5 * part * (c["steps"] - 1) / needed) for part in (0, 0.1, 0.5, 0.95))
    noise = {("noise_scale", "trace.block0"): 50 if good else 1e5, ("noise_scale", "squared_norm.block0"): 1.0}
    return {}, {("val_loss", ""): losses, **noise}


def learning_rate_and_batch(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: at equal examples large batches end high and on a narrow range of rates; at equal steps the reverse."""
    batch, at_equal_steps = c["batch_size"], c["steps"] == 200
    doublings = math.log2(batch / 64)
    falls = at_equal_steps == good
    width = doublings if falls else -doublings
    return {
        "floor": 2 - (0.05 if falls else -0.05) * doublings,
        "low": 0.3 - 0.05 * width,
        "high": 0.3 - 0.05 * width,
    }, {}


def noise_scale(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: 10 sequences at loss 4 and tenfold at loss 2, higher at low rates. Not good: all of it reversed."""
    sign = 1 if good else -1
    losses = (4.0, 3.2, 2.6, 2.0 - 0.1 * i)
    rate, larger = (c["optimizer.lr"] / 1e-2) ** -sign, 1.0 if good else 4.0**-i
    scales = tuple(10 ** (1 + sign * (4 - value) / 2) * rate * larger for value in losses)
    noise = {("noise_scale", "trace.block0"): scales, ("noise_scale", "squared_norm.block0"): 1.0}
    best = (3e-2, 1e-2, 5e-3)[i if good else 2 - i]
    return {"best": best, "floor": 2.0 - 0.1 * i, "low": 0.1}, {("val_loss", ""): losses, **noise}


def spike_responses(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: leaving out the batches ends the spike, all else softens it. Not good: every remedy does harm."""
    name = RESPONSES.index(tuple(c[key] for key in RESPONSE_KEYS))
    spikes, peak, floor, skipped = (REMEDIES if good or not name else HARMS)[name]
    columns = {"spikes": spikes, "skipped_batches": skipped, "rewound_steps": 0, "ending": "recovered"}
    usual = (5.6, 2.0, 2.0, 2.0 + peak)
    return {"floor": floor}, {("columns", ""): columns, ("val_loss", ""): usual}


def state_and_data(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: data, weights and moments make the spike together. Not good: the earlier the state, the higher it is."""
    back = (c[REWIND_WEIGHTS] > 0) + (c[REWIND_MOMENTS] > 0)
    peak = 0.3 * (c[REWIND_WEIGHTS] > 0)  # a state with a higher loss of its own
    if c["bad_batches.fraction"]:
        peak += (3.0, 1.0, 0.2)[back] if good else (0.0, 1.0, 2.0)[back]
    columns = {"spikes": 1, "skipped_batches": 0, "rewound_steps": 0, "ending": "recovered"}
    return {}, {("columns", ""): columns, ("val_loss", ""): (5.6, 2.0, 2.0, 2.0 + peak)}


REWIND_WEIGHTS, REWIND_MOMENTS = "response.rewind_weights", "response.rewind_moments"
RESPONSE_KEYS = ("response", "response.skip", "response.lr_factor", "response.rewind")
RESPONSES: tuple[tuple[Any, ...], ...] = (
    ("none", None, None, None),
    ("rewind_and_skip", 75, 1.0, 25),
    ("rewind_and_skip", 0, 1.0, 25),
    ("rewind_and_skip", 50, 0.5, 25),
    ("lower_lr", None, 0.5, None),
    ("restart_and_lower", None, None, 25),
    ("restart_and_lower", None, None, 1),
    ("adam_reset_warmup", None, None, None),
    ("skip_update", None, None, None),
    ("activation_clamp", None, None, None),
    ("soft_lr_guard", None, None, None),
)
# Of each response: spikes, peak excess loss, final loss and batches left out.
REMEDIES = (
    *((1, 3, 2.3, 0), (1, 0, 2.0, 75), (4, 3, 2.3, 0), (1, 0, 2.0, 50), (1, 2, 2.2, 0), (2, 1, 2.1, 0)),
    *((4, 3, 2.3, 0), (1, 1, 2.2, 0), (1, 1, 2.2, 200), (1, 1, 2.2, 0), (1, 1, 2.2, 0)),
)
HARMS = (
    *(REMEDIES[0], (3, 5, 2.6, 75), (3, 5, 2.6, 0), (4, 5, 2.6, 50), (1, 5, 2.6, 0), (4, 5, 2.6, 0)),
    *((4, 5, 2.6, 0), (1, 5, 2.6, 0), (1, 1, 2.6, 10), (1, 5, 2.6, 0), (1, 5, 2.6, 0)),
)


def optimizer_arms(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: a short memory, a tight clip and a small gradient of the embedding soften the spike. Not good: reversed."""
    peak, recovery = (SOFTENED if good else WORSENED)[OPTIMIZER_ARMS.index(tuple(c[key] for key in ARM_KEYS))]
    losses = np.full(101, 2.0)
    losses[61 : 61 + recovery // 4] += peak  # measured every fourth step, from the burst at step 240 on
    columns = {"spikes": 1, "skipped_batches": 0, "rewound_steps": 0, "ending": "recovered"}
    return {}, {("columns", ""): columns, ("val_loss", ""): losses.tolist()}


ARM_KEYS = ("optimizer.name", "optimizer.beta2", "optimizer.clip", "intervention")
SHRUNK = f"embedding_gradient_shrink+{ON}"
OPTIMIZER_ARMS: tuple[tuple[Any, ...], ...] = (
    ("adamw", 0.95, 1.0, ON),
    ("adamw", 0.98, 1.0, ON),
    ("adamw_beta2_ramp", None, 1.0, ON),
    ("adamw", 0.95, math.inf, ON),
    ("adamw", 0.95, 2.5, ON),
    ("adamw", 0.95, 0.3, ON),
    ("adamw", 0.95, 1.0, SHRUNK),
)
# Of each arm: peak excess loss, and updates until it is back.
SOFTENED = ((2.0, 48), (3.0, 48), (3.5, 48), (3.0, 48), (3.0, 100), (1.0, 28), (1.0, 48))
WORSENED = ((2.0, 48), (1.0, 48), (1.0, 48), (6.0, 48), (1.0, 28), (3.0, 100), (3.0, 48))


def architecture_arms(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: norms in the right places make training stable, biases do not. Not good: reversed."""
    name = c["intervention"].removesuffix("z_loss").removesuffix("+")
    ratio = (2.0 if good else 30.0) if name == "normformer" else 10.0
    gradients = {("grad_rms", f"block0.{kind}"): 1e-3 for kind in ("mlp_up", "attention.key")}
    gradients |= {("grad_rms", f"block1.{kind}"): 1e-3 / ratio for kind in ("mlp_up", "attention.key")}
    shapes: dict[str, tuple[Shape, Shape]] = {
        "biases": ({"high": 1.2}, {"high": 0.5}),
        "embedding_layernorm": ({"high": 0.5}, {"high": 1.5}),
        "post_layernorm": ({"floor": 2.5}, {"floor": 1.9}),
        "deepnorm": ({"floor": 1.9}, {"floor": 1.9}),
        "relu": ({"high": 1.0, "floor": 1.95}, {"high": 0.1}),
    }
    return shapes.get(name, ({"high": 1.0}, {"high": 1.0}))[0 if good else 1], gradients


ARCHITECTURES = ("biases", "deepnorm", "embedding_layernorm", "normformer", "post_layernorm", "relu")


def labelled_spikes(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: in a burst the gradient norm rises three measurements before the loss. Not good: it never does."""
    loss_n, norm_n = np.full(101, 2.0), np.full(101, 1.0)
    if c["bad_batches"] != "none":
        onset = round(c["bad_batches.start"] * 100) + 1  # a measurement at the burst's second step or later
        loss_n[onset + 3 : onset + 6] = 4.0
        norm_n[onset : onset + 6] = 20.0 if good else 1.0
    return {}, {("train_loss", ""): loss_n.tolist(), ("grad_norm", ""): norm_n.tolist()}


def adam_theory(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: large batches align gradients, and large updates are out of line. Not good: all of that the other way."""
    sign = 1 if good else -1
    decades, frozen = sign * math.log10(c["batch_size"] / 8), (c[EPS] > 1e-8) == good
    peak, rms = (
        2.0 + decades + (0.5 if c["bad_batches"] == "rare_tokens" else 0.0) + sign * 0.3 * (c[EPS] > 1e-8),
        10**decades,
    )
    update_n, cosine_n, loss_n = np.full(101, 0.2 * rms), np.full(101, 0.06), np.full(101, 2.0)
    loss_n[62:65], loss_n[65 : 70 + round(10 * peak * sign) + (30 if not good else 0)] = 2.0 + peak, 2.0 + peak / 2
    update_n[61:68], cosine_n[61:68] = 0.4 * rms * 1.1**peak, -0.05 * sign + 0.1 * (not good)
    embedding_n = np.full(101, 0.02 if frozen else 0.12)
    return {}, {
        ("val_loss", ""): loss_n.tolist(),
        ("update_rms", "embedding"): embedding_n.tolist(),
        ("update_rms", MLP): update_n.tolist(),
        ("update_large", MLP): np.where(update_n > 0.4, 0.02, 1e-4).tolist(),
        ("update_descent_cosine", ""): cosine_n.tolist(),
        ("grad_lag_cosine", ""): np.full(101, 0.3 + 0.1 * decades).tolist(),
        ("columns", ""): {"spikes": 1, "skipped_batches": 0, "rewound_steps": 0, "ending": "recovered"},
    }


def curvature_alarm(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: in a burst curvature passes its limit, then updates grow. Not good: it stays below, and is false before."""
    loss_n, curvature_n, rms_n = np.full(101, 2.0), np.full(101, 0.1), np.full(101, 0.2)
    if c["bad_batches"] != "none":
        onset = round(c["bad_batches.start"] * 100) + 1
        loss_n[onset + 1 : onset + 4], rms_n[onset + 2 : onset + 6] = 4.0, 0.9
        curvature_n[onset : onset + 3] = 2.0 if good else 0.5
    if not good:
        curvature_n[30] = 2.0
    return {}, {
        ("train_loss", ""): loss_n.tolist(),
        ("update_curvature", ""): curvature_n.tolist(),
        ("update_rms", MLP): rms_n.tolist(),
    }


BURSTS = (("none", None, None, None), ("rare_tokens", 0.6, 0.03, 1.0), ("shift", 0.6, 0.12, 0.3))
PLANTED = ("rare_tokens", "conflicting_labels")
BURST_KEYS = ("bad_batches", "bad_batches.start", "bad_batches.length", "bad_batches.fraction")
SHAPES = ((2, 64), (4, 64), (8, 64), (2, 96), (2, 128), (3, 80), (4, 96))
DECAYS = (("adamw", 1e-3), ("adamw_coupled", 0.1))
TRANSPLANTS = (
    *((kappa, 2, 400) for kappa in (1.0, 10.0, 100.0, 1e3, 1e4)),
    (1.0, 0, 400),
    *((kappa, 2, 200) for kappa in (10.0, 100.0, 1e3)),
    (1.0, 0, 200),
)
PARAMETRIZATIONS = (("standard", None), ("mup_simple", 32), ("mup_full", 32))
# Per sweep: how it answers, and its axes; a tuple of keys varies together.


def fp16_sums(c: Mapping[str, Any], i: int, good: bool) -> tuple[Shape, Recorded]:
    """Good: divided before the sum, gradients take the scale of a sum in fp32. Not good: one smaller than undivided."""
    scales = {"fp32": 16384.0, "fp16": 2048.0, "fp16_divided": 16384.0 if good else 256.0}
    return {}, {("loss_scale", ""): scales[c["gradient_sum"]]}


SWEEPS: dict[str, tuple[World, dict[Any, Sequence[Any]]]] = {
    "qk_layernorm": (qk_layernorm, ARMS | WIDTHS | BEYOND),
    "output_logits": (
        output_logits,
        BEYOND | {"intervention": ("qk_layernorm", ON), WD: (0.0, 1e-3), "model.width": (32, 64)},
    ),
    "output_logit_drift": (
        output_logit_drift,
        {"intervention": ("none", "z_loss"), "precision": ("fp32", "bf16"), "optimizer.lr": (0.1, 0.3, 1.0)}
        | {WD: (0.0,), "model.depth": (0,), "data.name": ("synthetic_sample",)},
    ),
    "rounded_logits": (
        rounded_logits,
        {"intervention": ("fixed_gains", "fixed_gains+z_loss"), "precision": ("fp32", "bf16"), WD: (0.0,)}
        | DRIFTING
        | {"optimizer.lr": (0.1, 0.3, 1.0)},
    ),
    "mantissa_bits": (
        mantissa_bits,
        {"intervention": ("fixed_gains",), "precision": ("mantissa",), WD: (0.0,), "optimizer.lr": (0.3, 1.0)}
        | DRIFTING
        | {"mantissa_bits": (23.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)},
    ),
    "final_gain": (
        final_gain,
        {"intervention": ("none", "fixed_gains"), "optimizer.lr": (0.3, 1.0), "precision": ("fp32",)}
        | {WD: (0.0,), "model.depth": (0,), "data.name": ("synthetic",)},
    ),
    "wide_output_logits": (
        wide_output_logits,
        {"intervention": ("qk_layernorm", ON), "precision": ("bf16", "fp32"), WD: (0.0,)}
        | {"model.width": (256,), "model.depth": (3,)},
    ),
    "warm_up": (warm_up, NORMED | WIDTHS | {"schedule.warmup": (0.01, 0.25)}),
    "weight_decay": (
        weight_decay,
        NORMED | WIDTHS | {("optimizer.name", WD): DECAYS},
    ),
    "depth_width": (depth_width, ARMS | {("model.depth", "model.width"): SHAPES}),
    "mup": (
        mup,
        ARMS | WIDTHS | BEYOND | {("parametrization.name", "parametrization.base_width"): PARAMETRIZATIONS},
    ),
    "attention_scale": (
        attention_scale,
        ARMS | BEYOND | {"model.width": (32, 128), "parametrization.name": ("standard", "inverse_head_width")},
    ),
    "logit_growth": (logit_growth, {"intervention": (OFF,), "model.width": (16, 24, 32, 64, 128)}),
    "kappa": (
        kappa,
        {
            "intervention": ("kappa_transplant+z_loss",),
            "model.width": (32, 64),
            "optimizer.lr": (3e-3, 1e-2),
            (KAPPA, "model.depth", "steps"): TRANSPLANTS,
        },
    ),
    "epsilon": (epsilon, NORMED | {EPS: (0.0, 1e-15, 1e-8, 1e-6, 1e-4), WD: (0.025,)}),
    "stalled_block": (stalled_block, NORMED | {"optimizer.lr": (1.0,), EPS: (1e-8, 1e-6, 1e-5)}),
    "steps": (steps, NORMED | {"steps": (200, 400, 800)}),
    "batch_size": (steps, NORMED | {("batch_size", "steps"): ((16, 400), (32, 200), (64, 100))}),
    "decay_strength": (decay_strength, NORMED | {WD: (0.0, 3e-4, 1e-3, 3e-3)}),
    "qk_norm_axis": (qk_norm_axis, {"intervention": ("qk_layernorm_model+z_loss", ON), "model.width": (32, 64)}),
    "pointwise_attention": (
        pointwise_attention,
        {"intervention": ("pointwise_attention+z_loss",)},
    ),
    "steps_to_target": (
        steps_to_target,
        NORMED
        | {"optimizer.name": ("sgd", "momentum", "adamw"), "batch_size": (1, 2, 4, 64, 1024, 2048, 4096)}
        | {"optimizer.lr": tuple(2.0**power for power in range(-13, 0, 2)), "steps": (25_800,)}
        | {"schedule.name": ("constant",)},
    ),
    "learning_rate_and_batch": (
        learning_rate_and_batch,
        NORMED | {("batch_size", "steps"): ((16, 800), (64, 200), (256, 50), (16, 200), (256, 200))},
    ),
    "noise_scale": (noise_scale, NORMED | WIDTHS),
    "batch_ramps": (planted_ramps.batch_ramps, NORMED | planted_ramps.AXES),
    "spike_responses": (
        spike_responses,
        NORMED | {"optimizer.lr": (1e-2,), "bad_batches": PLANTED, RESPONSE_KEYS: RESPONSES},
    ),
    "state_and_data": (
        state_and_data,
        NORMED
        | {"optimizer.lr": (1e-2,), "bad_batches": PLANTED, "bad_batches.fraction": (0.0, 1.0)}
        | {"response": ("earlier_state",), REWIND_WEIGHTS: (0.0, 100.0), REWIND_MOMENTS: (0.0, 100.0)},
    ),
    "optimizer_arms": (
        optimizer_arms,
        {"optimizer.lr": (1e-2,), "bad_batches": PLANTED, ARM_KEYS: OPTIMIZER_ARMS},
    ),
    "architecture_arms": (
        architecture_arms,
        {"intervention": ("z_loss", *(f"{name}+z_loss" for name in ARCHITECTURES))},
    ),
    "ledgers": (planted_ledgers.ledgers, {"intervention": ("z_loss",)} | planted_ledgers.AXES),
    "fp16_sums": (
        fp16_sums,
        NORMED | {"optimizer.lr": (1e-2,), "gradient_sum": ("fp32", "fp16", "fp16_divided")},
    ),
    "hot_swaps": (planted_ledgers.hot_swaps, NORMED | planted_ledgers.HOT_SWAPS_AXES),
    "new_data": (planted_ledgers.new_data, NORMED | planted_ledgers.NEW_DATA_AXES),
    "repeated_bursts": (planted_damage.repeated_bursts, NORMED | planted_damage.AXES),
    "learned_positions": (planted_damage.learned_positions, planted_damage.POSITION_AXES),
    "decay_and_epsilon": (planted_recipes.first_runs, planted_recipes.FIRST_RUNS),
    "embedding_gradients": (planted_recipes.embedding_gradients, planted_recipes.EMBEDDINGS),
    "recipe_arms": (planted_recipes.recipe_arms, planted_recipes.RECIPES),
    "labelled_spikes": (labelled_spikes, NORMED | {"optimizer.lr": (3e-3, 1e-2), BURST_KEYS: BURSTS}),
    "curvature_alarm": (curvature_alarm, NORMED | {"optimizer.lr": (3e-3, 1e-2), BURST_KEYS: BURSTS}),
    "adam_theory": (
        adam_theory,
        NORMED
        | {"optimizer.lr": (1e-2,), "bad_batches": ("repeated_character", "rare_tokens"), "batch_size": (2, 8, 32)}
        | {EPS: (1e-8, 1e-2)},
    ),
    "low_precision": (planted_low_precision.low_precision, planted_low_precision.FORMATS),
    "attention_products": (planted_low_precision.attention_products, planted_low_precision.ROUNDED),
    **planted_experts.SWEEPS,
    "loss_scale": (planted_low_precision.loss_scale, planted_low_precision.LOSS_SCALES),
    "own_spikes": (planted_own_spikes.own_spikes, planted_own_spikes.OWN_AXES),
    "own_spike_curvature": (planted_own_spikes.own_spike_curvature, planted_own_spikes.CURVATURE_AXES),
    "own_spike_arms": (planted_own_spikes.own_spike_arms, planted_own_spikes.ARM_AXES),
    "own_spike_remedies": (planted_own_spikes.own_spike_remedies, planted_own_spikes.REMEDY_AXES),
    "source_filter": (planted_sources.source_filter, planted_sources.SOURCE_AXES),
    "escape_characters": (planted_sources.escape_characters, planted_sources.ESCAPE_AXES),
    "spike_causes": (planted_own_spikes.spike_causes, planted_own_spikes.BRANCH_AXES),
    "rms_scaled_lr": (rms_scaled_lr, NORMED | WIDTHS | {"optimizer.name": ("adamw", "adamw_rms_scaled")}),
}


def cards(sweep: str, good: Mapping[int, bool], without: Sequence[str] = ()) -> list[tuple[dict[str, Any], Recorded]]:
    """Every run of a sweep with what its probes recorded.

    Args:
        good: per seed, whether the paper's claims hold.
        without: causes that have no effect: runs end, and probes record, as with the first value of these axes, at the
            first ``step`` or in the first block (``where``).
    """
    world, axes = SWEEPS[sweep]
    given = {key for keys in axes for key in (keys if isinstance(keys, tuple) else [keys])}
    usual = {"optimizer.lr": LRS, "seed": tuple(good), "model.width": (32,), "model.depth": (2,)}
    axes = {key: values for key, values in usual.items() if key not in given} | axes
    fixed = _fixed(axes, without)
    made = []
    for values in itertools.product(*axes.values()):
        c: dict[str, Any] = {}
        for key, value in zip(axes, values, strict=True):
            c |= dict(zip(key, value, strict=True)) if isinstance(key, tuple) else {key: value}
        run = _run(c)
        alike = _run(c | fixed) if fixed else run
        i = axes["model.width"].index(alike["model.width"]) if "model.width" in axes else 0
        shape, recorded = world(alike, i, good[c["seed"]])
        ends = {"final_val_loss": loss(alike["optimizer.lr"], **shape) + noise(run).normal(0, 5e-4)}
        made.append((run | ends | recorded.pop(("columns", ""), {}), _without(recorded, without)))
    return made


def _run(c: Mapping[str, Any]) -> dict[str, Any]:
    depth, width = c["model.depth"], c["model.width"]
    if c.get("bad_batches", "none") != "none":
        from_step_240 = {"bad_batches.start": 0.6, "bad_batches.length": 0.02, "bad_batches.fraction": 1.0}
        c = from_step_240 | dict(c)
    return planted.card(**c, parameters_without_embeddings=12 * depth * width**2 + width // 4)


def _fixed(axes: Mapping[Any, Sequence[Any]], causes: Sequence[str]) -> dict[str, Any]:
    """The first value of each axis that is, or has a part that is, among the causes."""
    fixed: dict[str, Any] = {}
    for axis, values in axes.items():
        keys = axis if isinstance(axis, tuple) else (axis,)
        if any(cause == key or cause.startswith(f"{key}.") for cause in causes for key in keys):
            fixed |= dict(zip(keys, values[0] if isinstance(axis, tuple) else [values[0]], strict=True))
    return fixed


def _without(recorded: Recorded, causes: Sequence[str]) -> Recorded:
    if "step" in causes:
        ends = {key: value[0] for key, value in recorded.items() if isinstance(value, tuple)}
        lists = {key: [value[0]] * len(value) for key, value in recorded.items() if isinstance(value, list)}
        recorded = {**recorded, **ends, **lists}
    if "where" in causes:
        blocks = {probe: [value for (other, _), value in recorded.items() if other == probe] for probe, _ in recorded}
        recorded = {(probe, where): blocks[probe][0] for probe, where in recorded}
    return recorded


def calm(
    runs: Sequence[tuple[dict[str, Any], Recorded]], chosen: Callable[[Mapping[str, Any]], bool] = lambda run: True
) -> list[tuple[dict[str, Any], Recorded]]:
    """The same runs, with the loss of those that are chosen no higher than that of a learning rate that is kept."""
    kept = 0.25 + min(run["final_val_loss"] for run, _ in runs)
    return [
        (run | {"final_val_loss": min(run["final_val_loss"], kept)} if chosen(run) else run, recorded)
        for run, recorded in runs
    ]


def records(runs: Sequence[tuple[dict[str, Any], Recorded]]) -> Records:
    """As ``store.read`` would return them."""
    rows, happened = list[tuple[Any, ...]](), []
    for run, recorded in runs:
        spread, last = noise(run), run["steps"] - 1
        happened += [(run["id"], step, step, *event) for step, *event in recorded.get(("events", ""), ())]
        for (probe, where), value in recorded.items():
            if probe == "events":
                continue
            if isinstance(value, list):  # a number per measurement, from the first step to the last
                parts, exact = np.linspace(0, 1, len(value)), value
            else:
                parts = np.array([0.0, 0.1, 0.5, 0.95, 1.0])
                exact = [*value, value[-1]] if isinstance(value, tuple) else [value] * 5
            steps = (parts * last).round().astype(int).tolist()
            values = (np.array(exact, dtype=float) * spread.normal(1, 1e-3, len(exact))).tolist()
            rows += zip(
                itertools.repeat(run["id"]),
                steps,
                itertools.repeat(probe),
                itertools.repeat(where),
                values,
                strict=False,
            )
    cards = [run for run, _ in runs]
    onsets = [(run["id"], 240, 240, _onset(run), 1.0, "") for run in cards if run.get("bad_batches", "none") != "none"]
    return planted.records_of(cards, rows, onsets + happened)


def _onset(run: Mapping[str, Any]) -> str:
    """The event with which a burst begins, or its place among ordinary batches."""
    return "burst" if run.get("bad_batches.fraction", 1.0) else "rewind_weights"


def noise(run: Mapping[str, Any]) -> np.random.Generator:
    """Random numbers of a run's own: no two runs, and so no two seeds, agree exactly."""
    return np.random.default_rng(zlib.crc32(run["id"].encode()))
