"""The reference burst: Adam meets conflicting labels after a long silence, on a toy in float64, one run per remedy."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.core.schema import stack
from lab.optim.links import Now
from lab.optim.optimizer import Optimizer, build_optimizer
from pieces import CPU

VOCABULARY, WIDTH, HIDDEN, BATCH = 64, 32, 64, 256
STEPS, BURST, AFTERWARDS, CONFLICTING = 6000, 12, 100, 0.2
OFF: dict[str, float] = {
    **{"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "clip": math.inf, "clip_ratio": math.inf},
    **{"clip_memory": 0.99, "clip_update": math.inf, "shrink": 1.0, "shrink_until": math.inf, "shrink_ramp": 0.0},
}
ARMS: dict[str, dict[str, float]] = {
    **{name: {} for name in ("keep", "lower_lr", "skip", "reset")},
    "beta2_0.99": {"beta2": 0.99},
    "beta2_0.95": {"beta2": 0.95},
    "clip_relative": {"clip_ratio": 3.0},
    "clip_1": {"clip": 1.0},
    "clip_update": {"clip_update": 1.0},
    "eps_0": {"eps": 0.0},
    "eps_1e-6": {"eps": 1e-6},
    "eps_1e-4": {"eps": 1e-4},
    "shrink": {"shrink": 0.1},
}
CHAIN = ["shrink_embedding", "clip_relative", "clip", "adam", "clip_update", "peak", "schedule"]


def optimizer() -> Optimizer:
    values: dict[str, Any] = {"name": "toy", "chain": CHAIN}
    return stack([build_optimizer({**values, **OFF, **arm}) for arm in ARMS.values()], CPU)


def losses(weights: dict[str, Tensor], share_vy: Tensor) -> Tensor:
    """Cross-entropy ``[r]`` of a batch that holds each token and label so often; ``[r v y]`` or ``[v y]``."""
    hidden_rvh = torch.tanh(weights["embedding"] @ weights["up"])
    logits_rvy = hidden_rvh @ weights["head"]
    return -(share_vy * logits_rvy.log_softmax(-1)).sum((-2, -1))


def initial() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(0)
    shapes = {"embedding": (VOCABULARY, WIDTH), "up": (WIDTH, HIDDEN), "head": (HIDDEN, VOCABULARY)}
    stds = {"embedding": 1.0, "up": WIDTH**-0.5, "head": HIDDEN**-0.5}
    drawn = {
        name: stds[name] * torch.randn(shape, generator=draws, dtype=torch.float64) for name, shape in shapes.items()
    }
    return {name: value.expand(len(ARMS), *value.shape).clone() for name, value in drawn.items()}


@cache
def peaks() -> dict[str, float]:
    """The largest held-out loss of each arm from the first batch with conflicting labels on, nats."""
    weights, chain, draws = initial(), optimizer(), torch.Generator().manual_seed(1)
    state, runs = chain.begin(weights), {name: run for run, name in enumerate(ARMS)}
    map_v = torch.randperm(VOCABULARY, generator=draws)
    held_out_vy = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    held_out_vy[torch.arange(VOCABULARY), map_v] = 1 / VOCABULARY
    age_r, shape_r = torch.zeros(len(ARMS), dtype=torch.int64), torch.ones(len(ARMS), dtype=torch.float64)
    peak_r = torch.zeros(len(ARMS), dtype=torch.float64)
    for step in range(STEPS + BURST + AFTERWARDS):
        in_burst = STEPS <= step < STEPS + BURST
        token_n = torch.randint(VOCABULARY, (BATCH,), generator=draws)
        other_n = torch.randint(VOCABULARY, (BATCH,), generator=draws)
        is_conflict_n = torch.rand(BATCH, generator=draws) < CONFLICTING * in_burst
        clean_vy, mixed_vy = (
            torch.bincount(token_n * VOCABULARY + label_n, minlength=VOCABULARY**2).view(VOCABULARY, -1) / BATCH
            for label_n in (map_v[token_n], torch.where(is_conflict_n, other_n, map_v[token_n]))
        )
        share_rvy = mixed_vy.double().repeat(len(ARMS), 1, 1)
        share_rvy[runs["skip"]] = clean_vy
        if step == STEPS:
            shape_r[runs["lower_lr"]] = 0.1
            age_r[runs["reset"]] = 0
            for tensor in state["adam"].values():
                tensor[runs["reset"]] = 0
        trained = {name: weight.requires_grad_() for name, weight in weights.items()}
        parts = torch.autograd.grad(losses(trained, share_rvy).sum(), list(trained.values()))
        weights = {name: weight.detach() for name, weight in weights.items()}
        gradients = dict(zip(weights, parts, strict=True))
        chain.step(gradients, state, Now(age_r, weights, shape_r, dict.fromkeys(weights, 1.0)))
        age_r += 1
        if step >= STEPS:
            peak_r = torch.maximum(peak_r, losses(weights, held_out_vy))
    return dict(zip(ARMS, peak_r.tolist(), strict=True))


@pytest.mark.slow
def test_remedies_for_a_burst_after_a_long_silence_keep_their_order() -> None:
    peak = peaks()
    cured = max(peak[name] for name in ("beta2_0.95", "lower_lr", "skip", "clip_relative"))
    unmoved = min(peak[name] for name in ("keep", "eps_0", "eps_1e-6", "eps_1e-4", "clip_1", "shrink"))
    assert 10 * cured < peak["reset"] < peak["clip_update"] < unmoved
    assert peak["beta2_0.95"] < peak["beta2_0.99"] < peak["keep"]
