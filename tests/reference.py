"""The model written a second time, without the lab: one run, one sequence, one head at a time, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# What becomes of a tensor that a matrix product takes or makes, given the name of its place.
Rounding = Callable[[str, Tensor], Tensor]
# What a product makes and the next one takes as it is, mixtures of values for one, is named once.
PLACES = ("weights", "normed", "projected", "turned", "scores", "attention", "mixed", "attention_output")
PLACES += ("mlp_normed", "mlp_up", "mlp_gelu", "mlp_output", "final_normed", "logits")


def exact(place: str, value: Tensor) -> Tensor:
    """No rounding."""
    return value


class Seen(NamedTuple):
    """What passes through: logits ``[b t v]``; per block scores and weights ``[b h t s]``, output ``[b t d]``.

    Per block, too, turned queries and keys ``[b h t k]``.
    """

    logits: Tensor
    scores: list[Tensor]
    attention: list[Tensor]
    outputs: list[Tensor]
    queries: list[Tensor]
    keys: list[Tensor]


def layer_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Centred, over the root of the variance plus 1e-6, times a gain."""
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-6)


def turn(x_tk: Tensor) -> Tensor:
    """Rotary positions: entries i and i + k/2 are one complex number, turned by position / 10000^(2i/k)."""
    length, size = x_tk.shape
    half = size // 2
    position, index = torch.arange(length, dtype=x_tk.dtype), torch.arange(half, dtype=x_tk.dtype)
    angle = position[:, None] / 10000.0 ** (2 * index / size)
    turned = torch.complex(x_tk[:, :half], x_tk[:, half:]) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], dim=1)


def gelu(x: Tensor) -> Tensor:
    """Half x times one plus tanh(sqrt(2/pi) (x + .044715 x^3))."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def causal_softmax(scores_ts: Tensor) -> Tensor:
    """Row t: exponentials of its first t + 1 scores over their sum, then zeros."""
    rows = []
    for t, row in enumerate(scores_ts):
        powers = torch.exp(row[: t + 1] - row[: t + 1].max().detach())
        rows.append(torch.cat([powers / powers.sum(), torch.zeros(len(row) - t - 1, dtype=row.dtype)]))
    return torch.stack(rows)


def transformer(
    weights: Mapping[str, Tensor],
    tokens_bt: Tensor,
    depth: int,
    heads: int,
    qk_layernorm: bool,
    rounded: Rounding = exact,
) -> Seen:
    """The whole model on one run's weights; ``rounded`` is applied in each of ``PLACES``."""
    multiplied = {name: rounded("weights", w) for name, w in weights.items() if w.ndim == 2 and name != "embedding"}
    weights = {**weights, **multiplied}
    seen = Seen(torch.empty(0), *([[] for _ in range(depth)] for _ in range(5)))
    logits = []
    for tokens_t in tokens_bt:
        x_td = torch.stack([weights["embedding"][token] for token in tokens_t])
        for block in range(depth):
            own = {name.removeprefix(f"block{block}."): w for name, w in weights.items() if f"block{block}." in name}
            x_td, *inside = _block(own, x_td, heads, qk_layernorm, rounded)
            for kept, value in zip(seen[1:], (*inside[:2], x_td, *inside[2:]), strict=True):
                kept[block].append(value)
        final = rounded("final_normed", layer_norm(x_td, weights["final_norm"]))
        logits.append(rounded("logits", final @ weights["head"]))
    return Seen(torch.stack(logits), *([torch.stack(values) for values in kept] for kept in seen[1:]))


def _block(
    w: Mapping[str, Tensor], x_td: Tensor, heads: int, qk_layernorm: bool, rounded: Rounding
) -> tuple[Tensor, ...]:
    normed = rounded("normed", layer_norm(x_td, w["attention_norm"]))
    size = x_td.shape[1] // heads
    every_score, every_weight, mixed, every_q, every_k = [], [], [], [], []
    for head in range(heads):
        mine = slice(head * size, (head + 1) * size)
        parts = ("query", "key", "value")
        q, k, v = (rounded("projected", normed @ w[f"attention.{part}"][:, mine]) for part in parts)
        if qk_layernorm:
            q = layer_norm(q, w["attention.query.qk_layernorm"])
            k = layer_norm(k, w["attention.key.qk_layernorm"])
        every_q.append(turn(q))
        every_k.append(turn(k))
        scores = _scores(every_q[-1], every_k[-1], rounded)
        attention = causal_softmax(scores)
        every_score.append(scores)
        every_weight.append(attention)
        mixed.append(rounded("mixed", rounded("attention", attention) @ v))
    x_td = x_td + rounded("attention_output", torch.cat(mixed, dim=1) @ w["attention.output"])
    up = rounded("mlp_up", rounded("mlp_normed", layer_norm(x_td, w["mlp_norm"])) @ w["mlp_up"])
    x_td = x_td + rounded("mlp_output", rounded("mlp_gelu", gelu(up)) @ w["mlp_down"])
    return x_td, *map(torch.stack, (every_score, every_weight, every_q, every_k))


def _scores(q_tk: Tensor, k_sk: Tensor, rounded: Rounding) -> Tensor:
    """Queries are scaled before they are multiplied."""
    scaled = q_tk / math.sqrt(q_tk.shape[-1])
    return rounded("scores", rounded("turned", scaled) @ rounded("turned", k_sk).T)


def losses(logits_btv: Tensor, targets_bt: Tensor, z_coefficient: float) -> tuple[Tensor, Tensor]:
    """Loss with z-loss, and cross-entropy alone: means over all tokens."""
    log_z = torch.log(torch.exp(logits_btv).sum(-1))
    rows = zip(logits_btv.flatten(0, 1), targets_bt.flatten(), strict=True)
    cross_entropy = (log_z.flatten() - torch.stack([row[target] for row, target in rows])).mean()
    return cross_entropy + z_coefficient * (log_z**2).mean(), cross_entropy
