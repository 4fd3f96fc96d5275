"""Kernels in C++ of what lies between the matrix products of a block: activations in bf16, each read and written once.

On a processor with matrix units the products of a small model are so fast that memory sets the pace, and a compiler of
graphs passes over it once for each reduction.  A C++ compiler builds these kernels once per machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.core import machine

HEAD_WIDTHS = (16, 32, 64, 128)  # for which ``split_heads`` is compiled
LANES = 16  # numbers in the longest vectors: widths of norms must be multiples
SOURCE = Path(__file__).with_suffix(".cpp")

# Compiled graphs are cached by the names of operations, so these contain what the operations do.
NAMESPACE = "lab_" + sha256(b"".join(map(Path.read_bytes, (Path(__file__), SOURCE)))).hexdigest()[:8]

_operations = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def can_take(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether there are kernels for this tensor: of this precision, on a CPU, where a compiler can build them."""
    return x.dtype is dtype and x.device.type == "cpu" and _library() is not None


@cache
def _library() -> Any:
    return machine.compiled_library(SOURCE)


@cache
def multiplies_tiles() -> bool:
    """Whether this CPU has matrix units (AMX), with which ``attention`` computes."""
    return bool(_library().multiplies_tiles())


def _operation(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operation of torch, which a compiler of graphs calls as it is, and return that operation."""

    def define(function: Callable[..., Any]) -> Any:
        name = function.__name__
        _operations.define(name + schema)  # type: ignore[no-untyped-call]
        for backend in ("CPU", "Meta"):
            _operations.impl(name, function, backend)  # type: ignore[no-untyped-call]
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define


def _run(name: str, *arguments: Tensor | int | None) -> None:
    """Call a kernel with the addresses of contiguous tensors, and with numbers; tensors without memory are left."""
    if any(isinstance(value, Tensor) and value.is_meta for value in arguments):
        return
    addresses = [
        ctypes.c_int64(value)
        if isinstance(value, int)
        else ctypes.c_void_p(None if value is None else value.data_ptr())
        for value in arguments
    ]
    getattr(_library(), name)(*addresses)


@_operation("(Tensor x) -> Tensor")
def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, of every entry."""
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run("gelu", x, y, x.numel())
    return y


@_operation("(Tensor dy, Tensor x) -> Tensor")
def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of GELU's input."""
    dy, x, dx = dy.contiguous(), x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run("gelu_backward", dy, x, dx, x.numel())
    return dx


@_operation("(Tensor scores) -> (Tensor, Tensor)")
def causal_softmax(scores_ts: Tensor) -> tuple[Tensor, Tensor]:
    """Scores ``[... t s]`` to attention weights over s <= t, and two numbers of each row for the way back."""
    scores_ts = scores_ts.contiguous()
    weights_ts = torch.empty(scores_ts.shape, dtype=scores_ts.dtype, device=scores_ts.device)
    kept_t = torch.empty(*scores_ts.shape[:-1], 2, device=scores_ts.device)
    _run("causal_softmax", scores_ts, weights_ts, kept_t, scores_ts[..., 0, 0].numel(), scores_ts.shape[-1])
    return weights_ts, kept_t


@_operation("(Tensor dweights, Tensor scores, Tensor kept) -> Tensor")
def causal_softmax_backward(dweights_ts: Tensor, scores_ts: Tensor, kept_t: Tensor) -> Tensor:
    """Gradient of the scores."""
    dweights_ts, scores_ts = dweights_ts.contiguous(), scores_ts.contiguous()
    dscores_ts = torch.empty(scores_ts.shape, dtype=scores_ts.dtype, device=scores_ts.device)
    matrices = scores_ts[..., 0, 0].numel()
    _run("causal_softmax_backward", dweights_ts, scores_ts, kept_t, dscores_ts, matrices, scores_ts.shape[-1])
    return dscores_ts


@_operation("(Tensor x, Tensor gain) -> Tensor")
def layer_norm(x_rnd: Tensor, gain_rd: Tensor) -> Tensor:
    """LayerNorm over the last axis of ``[r n d]`` in fp32 times a gain ``[r d]``, in bf16; epsilon is 1e-6."""
    x_rnd, y_rnd = x_rnd.contiguous(), torch.empty(x_rnd.shape, dtype=torch.bfloat16, device=x_rnd.device)
    _run("layer_norm", x_rnd, y_rnd, gain_rd.contiguous(), *x_rnd.shape)
    return y_rnd


@_operation("(Tensor dy, Tensor x, Tensor gain) -> (Tensor, Tensor)")
def layer_norm_backward(dy_rnd: Tensor, x_rnd: Tensor, gain_rd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of LayerNorm's input and gain, in fp32."""
    dy_rnd, x_rnd, gain_rd = dy_rnd.contiguous(), x_rnd.contiguous(), gain_rd.contiguous()
    dx_rnd = torch.empty(x_rnd.shape, dtype=x_rnd.dtype, device=x_rnd.device)
    dgain_rd = torch.zeros(gain_rd.shape, dtype=x_rnd.dtype, device=x_rnd.device)
    _run("layer_norm_backward", dy_rnd, x_rnd, gain_rd, dx_rnd, dgain_rd, *x_rnd.shape)
    return dx_rnd, dgain_rd


@_operation("(Tensor qkv, Tensor? q_gain, Tensor? k_gain, Tensor turns) -> (Tensor, Tensor, Tensor)")
def split_heads(
    qkv_rbtn: Tensor, q_gain_rk: Tensor | None, k_gain_rk: Tensor | None, turns_tk: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[r b h t k]`` from all three side by side.

    Args:
        qkv_rbtn: the product, whose last axis is (part, head, entry).
        q_gain_rk: gain of a LayerNorm of queries over the entries of each head; None for no norm.
        k_gain_rk: the same of keys.
        turns_tk: cosines and signed sines of the rotation of queries, then of keys, ``[2 2 t k]``; they carry the
            scale of the scores.
    """
    runs, batch, length, inputs = qkv_rbtn.shape
    width = turns_tk.shape[-1]
    heads = inputs // (3 * width)
    q, k, v = (
        torch.empty(runs, batch, heads, length, width, dtype=qkv_rbtn.dtype, device=qkv_rbtn.device) for _ in range(3)
    )
    shape = (runs, batch, length, heads, width)
    _run("split_heads", qkv_rbtn.contiguous(), q, k, v, q_gain_rk, k_gain_rk, turns_tk, *shape)
    return q, k, v


@_operation(
    "(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor? q_gain, Tensor? k_gain, Tensor turns)"
    " -> (Tensor, Tensor, Tensor)"
)
def split_heads_backward(
    dq_rbhtk: Tensor,
    dk_rbhtk: Tensor,
    dv_rbhtk: Tensor,
    qkv_rbtn: Tensor,
    q_gain_rk: Tensor | None,
    k_gain_rk: Tensor | None,
    turns_tk: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the product, and of both gains ``[r k]``, which are zero without a norm."""
    parts = [part.contiguous() for part in (dq_rbhtk, dk_rbhtk, dv_rbhtk)]
    qkv_rbtn = qkv_rbtn.contiguous()
    runs, batch, heads, length, width = parts[0].shape
    dqkv_rbtn = torch.empty(qkv_rbtn.shape, dtype=qkv_rbtn.dtype, device=qkv_rbtn.device)
    dq_gain, dk_gain = (torch.zeros(runs, width, device=qkv_rbtn.device) for _ in range(2))
    gains, shape = (q_gain_rk, k_gain_rk, dq_gain, dk_gain), (runs, batch, length, heads, width)
    _run("split_heads_backward", *parts, qkv_rbtn, dqkv_rbtn, *gains, turns_tk, *shape)
    return dqkv_rbtn, dq_gain, dk_gain


@_operation("(Tensor qkv, Tensor? q_gain, Tensor? k_gain, Tensor turns) -> (Tensor, Tensor)")
def attention(
    qkv_rbtn: Tensor, q_gain_rk: Tensor | None, k_gain_rk: Tensor | None, turns_tk: Tensor
) -> tuple[Tensor, Tensor]:
    """What attention mixes ``[r b t h k]``, and two numbers of each row for the way back."""
    runs, batch, length, inputs = qkv_rbtn.shape
    width = turns_tk.shape[-1]
    heads = inputs // (3 * width)
    mixed_rbthk = torch.empty(runs, batch, length, heads, width, dtype=qkv_rbtn.dtype, device=qkv_rbtn.device)
    kept_rbht = torch.empty(runs, batch, heads, length, 2, device=qkv_rbtn.device)
    shape = (runs, batch, length, heads, width)
    _run("attention", qkv_rbtn.contiguous(), mixed_rbthk, kept_rbht, q_gain_rk, k_gain_rk, turns_tk, *shape)
    return mixed_rbthk, kept_rbht


@_operation(
    "(Tensor dmixed, Tensor qkv, Tensor kept, Tensor? q_gain, Tensor? k_gain, Tensor turns) -> (Tensor, Tensor, Tensor)"
)
def attention_backward(
    dmixed_rbthk: Tensor,
    qkv_rbtn: Tensor,
    kept_rbht: Tensor,
    q_gain_rk: Tensor | None,
    k_gain_rk: Tensor | None,
    turns_tk: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the product, and of both gains ``[r k]``, which are zero without a norm."""
    dmixed_rbthk, qkv_rbtn = dmixed_rbthk.contiguous(), qkv_rbtn.contiguous()
    runs, width = len(qkv_rbtn), dmixed_rbthk.shape[-1]
    dqkv_rbtn = torch.empty(qkv_rbtn.shape, dtype=qkv_rbtn.dtype, device=qkv_rbtn.device)
    dq_gain, dk_gain = (torch.zeros(runs, width, device=qkv_rbtn.device) for _ in range(2))
    gains = (q_gain_rk, k_gain_rk, dq_gain, dk_gain)
    _run("attention_backward", dmixed_rbthk, qkv_rbtn, kept_rbht, dqkv_rbtn, *gains, turns_tk, *dmixed_rbthk.shape)
    return dqkv_rbtn, dq_gain, dk_gain


@_operation("(Tensor logits, Tensor targets) -> (Tensor, Tensor)")
def token_loss(logits_nv: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and log Z ``[n]``, in nats and fp32; a negative target counts as none."""
    loss_n, log_z_n = (torch.empty(targets_n.shape, device=logits_nv.device) for _ in range(2))
    _run("token_loss", logits_nv.contiguous(), targets_n.contiguous(), loss_n, log_z_n, *logits_nv.shape)
    return loss_n, log_z_n


@_operation("(Tensor dloss, Tensor dlog_z, Tensor logits, Tensor targets, Tensor log_z) -> Tensor")
def token_loss_backward(
    dloss_n: Tensor, dlog_z_n: Tensor, logits_nv: Tensor, targets_n: Tensor, log_z_n: Tensor
) -> Tensor:
    """Gradient of the logits."""
    gradients = dloss_n.contiguous(), dlog_z_n.contiguous()
    logits_nv, targets_n = logits_nv.contiguous(), targets_n.contiguous()
    dlogits_nv = torch.empty(logits_nv.shape, dtype=logits_nv.dtype, device=logits_nv.device)
    _run("token_loss_backward", *gradients, logits_nv, targets_n, log_z_n, dlogits_nv, *logits_nv.shape)
    return dlogits_nv


class Gelu(torch.autograd.Function):
    """``gelu`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gelu(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gelu_backward(*gradients, *ctx.saved_tensors)  # type: ignore[no-any-return]


class CausalSoftmax(torch.autograd.Function):
    """``causal_softmax`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, scores_ts: Tensor) -> Tensor:
        weights_ts, kept_t = causal_softmax(scores_ts)
        ctx.save_for_backward(scores_ts, kept_t)
        return weights_ts  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return causal_softmax_backward(*gradients, *ctx.saved_tensors)  # type: ignore[no-any-return]


class LayerNorm(torch.autograd.Function):
    """``layer_norm`` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x_rnd: Tensor, gain_rd: Tensor) -> Tensor:
        ctx.save_for_backward(x_rnd, gain_rd)
        return layer_norm(x_rnd, gain_rd)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return layer_norm_backward(*gradients, *ctx.saved_tensors)  # type: ignore[no-any-return]


class SplitHeads(torch.autograd.Function):
    """``split_heads`` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, qkv_rbtn: Tensor, q_gain_rk: Tensor | None, k_gain_rk: Tensor | None, turns_tk: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_rbtn, q_gain_rk, k_gain_rk, turns_tk)
        return split_heads(qkv_rbtn, q_gain_rk, k_gain_rk, turns_tk)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dqkv_rbtn, dq_gain_rk, dk_gain_rk = split_heads_backward(*gradients, *ctx.saved_tensors)
        _, has_q_norm, has_k_norm, _ = ctx.needs_input_grad
        return dqkv_rbtn, dq_gain_rk if has_q_norm else None, dk_gain_rk if has_k_norm else None, None


class Attention(torch.autograd.Function):
    """``attention``'s first output with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, qkv_rbtn: Tensor, q_gain_rk: Tensor | None, k_gain_rk: Tensor | None, turns_tk: Tensor
    ) -> Tensor:
        mixed_rbthk, kept_rbht = attention(qkv_rbtn, q_gain_rk, k_gain_rk, turns_tk)
        ctx.save_for_backward(qkv_rbtn, kept_rbht, q_gain_rk, k_gain_rk, turns_tk)
        return mixed_rbthk  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dqkv_rbtn, dq_gain_rk, dk_gain_rk = attention_backward(*gradients, *ctx.saved_tensors)
        _, has_q_norm, has_k_norm, _ = ctx.needs_input_grad
        return dqkv_rbtn, dq_gain_rk if has_q_norm else None, dk_gain_rk if has_k_norm else None, None


class TokenLoss(torch.autograd.Function):
    """``token_loss`` with its gradient."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        loss_n, log_z_n = token_loss(logits_nv, targets_n)
        ctx.save_for_backward(logits_nv, targets_n, log_z_n)
        return loss_n, log_z_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return token_loss_backward(*gradients, *ctx.saved_tensors), None
