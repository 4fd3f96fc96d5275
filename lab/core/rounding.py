"""Rounding of fp32 numbers to the range and resolution of fp16 or bf16."""

from __future__ import annotations

import torch
from torch import Tensor

DROPPED_BITS = {torch.float16: 13, torch.bfloat16: 16}  # of the 23 bits of an fp32 mantissa
LARGEST_FP16, SMALLEST_NORMAL_FP16 = 65504.0, 2.0**-14
# Added and subtracted, it leaves whole multiples of 2**-24, the smallest fp16 number, in numbers below 2**-14.
SUBNORMAL_SHIFT = 0.75


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round numbers to the nearest of ``dtype``, halves to even, in the format of ``x``; fp16 overflows to infinity.

    It works on bits, because a compiler may leave out a cast to a narrower format and back.
    """
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
    """Rounds values to fp16, and their gradient on the way back, as if the tensor were kept in fp16."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return rounded(x, torch.float16)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return rounded(gradients[0], torch.float16)


def as_fp16(x: Tensor) -> Tensor:
    """Round values and their gradient to fp16."""
    return Rounded.apply(x)  # type: ignore[no-any-return,no-untyped-call]
