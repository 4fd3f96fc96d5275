"""The training loop of a JAX user: one jitted step in bf16, of one model or, under vmap, of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shapes import BATCH, HEAD_WIDTH, LENGTH, VOCABULARY, depth, runs

from lab.data.text import StandardLibrary

Tree = Any


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Apply LayerNorm in fp32."""
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gain


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return ``x @ w`` with bf16 operands."""
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def rotate(x_bhtk: jax.Array) -> jax.Array:
    """Apply rotary positions."""
    frequency_k = 10_000 ** (-jnp.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    angle_tk = jnp.outer(jnp.arange(LENGTH), frequency_k)
    a, b = jnp.split(x_bhtk, 2, -1)
    cos_tk, sin_tk = jnp.cos(angle_tk), jnp.sin(angle_tk)
    return jnp.concatenate([a * cos_tk - b * sin_tk, b * cos_tk + a * sin_tk], -1)


def block(x_btd: jax.Array, w: Tree) -> jax.Array:
    """Apply attention, then an MLP."""
    heads = x_btd.shape[-1] // HEAD_WIDTH
    qkv_bto = product(norm(x_btd, w["norm_1"]), w["qkv"])
    q, k, v = jnp.moveaxis(qkv_bto.reshape(*x_btd.shape[:2], 3, heads, HEAD_WIDTH), (2, 3), (0, 2))
    q, k = rotate(norm(q, w["norm_q"])) * HEAD_WIDTH**-0.5, rotate(norm(k, w["norm_k"]))
    scores_bhts = product(q, k.swapaxes(-1, -2)).astype(jnp.float32)
    past_ts = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    mixed_bhtk = product(jax.nn.softmax(jnp.where(past_ts, scores_bhts, -jnp.inf)), v)
    x_btd = x_btd + product(mixed_bhtk.swapaxes(1, 2).reshape(x_btd.shape), w["out"])
    return x_btd + product(jax.nn.gelu(product(norm(x_btd, w["norm_2"]), w["up"]).astype(jnp.float32)), w["down"])


def loss_of(weights: Tree, tokens_bt: jax.Array) -> jax.Array:
    """Return cross-entropy plus z-loss."""
    x_btd = weights["embedding"][tokens_bt[:, :-1]]
    for w in weights["blocks"]:
        x_btd = block(x_btd, w)
    logits_btv = product(norm(x_btd, weights["norm"]), weights["head"]).astype(jnp.float32)
    log_z_bt = jax.nn.logsumexp(logits_btv, -1)
    target_bt = jnp.take_along_axis(logits_btv, tokens_bt[:, 1:, None], -1)[..., 0]
    return (log_z_bt - target_bt + 1e-4 * jnp.square(log_z_bt)).mean()


def step_of(state: Tree, tokens_bt: jax.Array) -> Tree:
    """Carry out a step: gradient, clipping at norm 1, AdamW."""
    weights, mean, square, count, lr = state
    gradient = jax.grad(loss_of)(weights, tokens_bt)
    global_norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(gradient)))
    clip, count = jnp.minimum(1.0, 1.0 / global_norm), count + 1

    def update(w: jax.Array, g: jax.Array, m: jax.Array, s: jax.Array) -> tuple[jax.Array, ...]:
        m, s = 0.9 * m + 0.1 * g * clip, 0.95 * s + 0.05 * jnp.square(g * clip)
        direction = m / (1 - 0.9**count) / (jnp.sqrt(s / (1 - 0.95**count)) + 1e-8)
        return w - lr * (direction + 0.1 * w), m, s

    updated = jax.tree.map(update, weights, gradient, mean, square)
    weights, mean, square = (
        jax.tree.map(lambda values, i=i: values[i], updated, is_leaf=lambda leaf: isinstance(leaf, tuple))
        for i in range(3)
    )
    return weights, mean, square, count, lr


def weights_of(width: int, seed: int) -> Tree:
    """Draw initial weights."""
    draw = np.random.default_rng(seed).standard_normal

    def linear(fan_in: int, fan_out: int) -> jax.Array:
        return jnp.asarray(draw((fan_in, fan_out)) * fan_in**-0.5, jnp.float32)

    gains = {"norm_1": width, "norm_2": width, "norm_q": HEAD_WIDTH, "norm_k": HEAD_WIDTH}
    matrices = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [
        {name: jnp.ones(size) for name, size in gains.items()} | {name: linear(*s) for name, s in matrices.items()}
        for _ in range(depth(width))
    ]
    ends = {"embedding": linear(VOCABULARY, width), "head": linear(width, VOCABULARY), "norm": jnp.ones(width)}
    return {"blocks": blocks, **ends}


def loop(width: int, *, vmap: bool) -> Callable[[], int]:
    """Build a step of one model, or of several with different learning rates on the same batch."""
    models = runs(width) if vmap else 1
    states = []
    for run in range(models):
        weights = weights_of(width, run)
        zeros = [jax.tree.map(jnp.zeros_like, weights) for _ in range(2)]
        states.append((weights, *zeros, jnp.zeros(()), jnp.asarray(1e-3 * 2.0**-run)))
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states) if vmap else states[0]
    step_jit = jax.jit(jax.vmap(step_of, in_axes=(0, None)) if vmap else step_of, donate_argnums=0)
    corpus, steps_done = StandardLibrary(seed=0).open(), 0

    def step() -> int:
        nonlocal steps_done, state
        state = step_jit(state, jnp.asarray(corpus.batch(0, steps_done, BATCH, LENGTH), jnp.int32))
        jax.block_until_ready(state)
        steps_done += 1
        return models

    return step
