"""Rounding of fp32 numbers to the range and resolution of fp16 or bf16, or to fewer bits of the mantissa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

MANTISSA_BITS = 23  # that fp32 stores
DROPPED_BITS = {torch.float16: 13, torch.bfloat16: 16}  # of those
LARGEST_FP16, SMALLEST_NORMAL_FP16 = 65504.0, 2.0**-14
# Added and subtracted, it leaves whole multiples of 2**-24, the smallest fp16 number, in numbers below 2**-14.
SUBNORMAL_SHIFT = 0.75


@dataclass(frozen=True, eq=False)
class Mantissa:
    """A format with the range of fp32 and, in run i, ``bits_r[i]`` stored bits of the mantissa: bf16 has 7, fp32 23."""

    bits_r: Tensor

    def dropped(self, x_r: Tensor) -> Tensor:
        """How many of fp32's bits it lacks, shaped to meet ``x_r``."""
        return (MANTISSA_BITS - self.bits_r.to(torch.int32)).view(-1, *(1,) * (x_r.ndim - 1))


Format = torch.dtype | Mantissa


def rounded(x: Tensor, kept_in: Format) -> Tensor:
    """Round numbers to the nearest of a format, halves to even, in the format of ``x``; fp16 overflows to infinity.

    It works on bits, because a compiler may leave out a cast to a narrower format and back.  Where nothing is traced
    for a compiler, bf16 takes the casts, which are faster.
    """
    if kept_in is torch.bfloat16 and get_proxy_mode() is None:
        return x.to(kept_in).to(x.dtype)
    given, x = x.dtype, x.float()
    dropped = kept_in.dropped(x) if isinstance(kept_in, Mantissa) else DROPPED_BITS[kept_in]
    bits, spacing = x.view(torch.int32), 1 << dropped
    last = ((bits >> dropped).bitwise_and_(1)).add_((spacing >> 1) - 1).clamp_(min=0)  # which decides a tie
    kept = last.add_(bits).bitwise_and_(-spacing).view(torch.float32)
    if kept_in is torch.float16:
        kept = torch.where(x.abs() < SMALLEST_NORMAL_FP16, (x + SUBNORMAL_SHIFT) - SUBNORMAL_SHIFT, kept)
        kept = torch.where(kept.abs() > LARGEST_FP16, torch.copysign(torch.full_like(x, torch.inf), x), kept)
    return torch.where(x.isfinite(), kept, x).to(given)


class Rounded(torch.autograd.Function):
    """Rounds values, and their gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept_in: Format) -> Tensor:
        ctx.kept_in = kept_in
        return rounded(x, kept_in)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return rounded(gradients[0], ctx.kept_in), None


def as_kept_in(x: Tensor, kept_in: Format) -> Tensor:
    """Round values and their gradient, as if the tensor were kept in this format."""
    return Rounded.apply(x, kept_in)  # type: ignore[no-any-return,no-untyped-call]


def as_fp16(x: Tensor) -> Tensor:
    """Round values and their gradient to fp16."""
    return as_kept_in(x, torch.float16)
