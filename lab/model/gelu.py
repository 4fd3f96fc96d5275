"""GELU, as a CPU computes it fast, and with the same bits wherever in the fleet a run stands."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
WHOLE_VECTORS = 64  # entries; a multiple of what any CPU kernel takes at once


class Gelu(torch.autograd.Function):
    """GELU in its tanh form (Hendrycks & Gimpel, arXiv:1606.08415), written as x sigmoid(2 u).

    u = sqrt(2/pi) (x + 0.044715 x^3), and (1 + tanh u) / 2 = sigmoid(2 u), which a CPU computes several times faster.
    """

    @staticmethod
    def forward(ctx: Any, x_r: Tensor) -> Tensor:
        gate_r = torch.addcmul(x_r.new_full((), SLOPE), x_r, x_r, value=SLOPE * CUBE).mul_(x_r).sigmoid_()
        ctx.save_for_backward(x_r, gate_r)
        return x_r * gate_r

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x_r, gate_r = ctx.saved_tensors
        bend_r = torch.addcmul(x_r.new_full((), SLOPE), x_r, x_r, value=3 * SLOPE * CUBE).mul_(x_r)
        inner_r: Tensor = torch.ops.aten.sigmoid_backward(bend_r, gate_r)
        return inner_r.add_(gate_r).mul_(gradients[0])


def gelu(x_rbtm: Tensor) -> Tensor:
    """GELU of every entry, the same bits wherever in the fleet a run stands.

    A CPU's kernels round the tail of a buffer otherwise than its body; so every run gets whole vectors.
    """
    entries = x_rbtm[0].numel()
    if spare := -entries % WHOLE_VECTORS:
        padded_rn = F.pad(x_rbtm.flatten(1), (0, spare))
        return Gelu.apply(padded_rn)[:, :entries].view_as(x_rbtm)  # type: ignore[no-any-return,no-untyped-call]
    return Gelu.apply(x_rbtm)  # type: ignore[no-any-return,no-untyped-call]
