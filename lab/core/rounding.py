"""Rounding of fp32 numbers to the range and resolution of fp16 or bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

DROPPED_BITS = {torch.float16: 13, torch.bfloat16: 16}  # of the 23 bits of an fp32 mantissa
LARGEST_FP16, SMALLEST_NORMAL_FP16 = 65504.0, 2.0**-14
# Added and subtracted, it leaves whole multiples of 2**-24, the smallest fp16 number, in numbers below 2**-14.
SUBNORMAL_SHIFT = 0.75


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers to the nearest of ``dtype``, halves to even, in the format of ``x``; fp16 overflows to infinity.

    It works on bits, because a compiler may leave out a cast to a narrower format and back.  Where nothing is traced
    for a compiler, bf16 takes the casts, which are faster.
    """
    if dtype is torch.bfloat16 and get_proxy_mode() is None:
        return x.to(dtype).to(x.dtype)
    given, x = x.dtype, x.float()
    dropped = DROPPED_BITS[dtype]
    bits = x.view(torch.int32)
    nearest = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    kept = (nearest & -(1 << dropped)).view(torch.float32)
    if dtype is torch.float16:
        kept = torch.where(x.abs() < SMALLEST_NORMAL_FP16, (x + SUBNORMAL_SHIFT) - SUBNORMAL_SHIFT, kept)
        kept = torch.where(kept.abs() > LARGEST_FP16, torch.copysign(torch.full_like(x, torch.inf), x), kept)
    return torch.where(x.isfinite(), kept, x).to(given)


class Rounded(torch.autograd.Function):
    """Rounds values, and their gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return rounded(x, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return rounded(gradients[0], ctx.dtype), None


def as_kept_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values and their gradient, as if the tensor were kept in fp16 or bf16."""
    return Rounded.apply(x, dtype)  # type: ignore[no-any-return,no-untyped-call]


def as_fp16(x: Tensor) -> Tensor:
    """Round values and their gradient to fp16."""
    return as_kept_in(x, torch.float16)
