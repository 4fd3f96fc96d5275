"""Rounding of fp32 numbers to bf16, fp16, fp8, fp4 or fewer bits: to nearest or at random, alone or in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

EXPONENT, MANTISSA_BITS = 0x7F800000, 23  # of fp32
MX_BLOCK, NV_BLOCK = 32, 16
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class NumberFormat:
    """A format of few bits without infinities in use: what lies beyond its largest number becomes that number.

    Attributes:
        name: as in the Open Compute Project's specifications.
        mantissa_bits: that are stored.
        lowest_exponent: of its normal numbers.
        largest: its largest number.
    """

    name: str
    mantissa_bits: int
    lowest_exponent: int
    largest: float

    @property
    def highest_exponent(self) -> int:
        """Exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def beyond(self) -> float:
        """From here on the nearest number would lie beyond the largest, were there one."""
        return float(self.largest + 2.0 ** (self.highest_exponent - self.mantissa_bits - 1))


E4M3 = NumberFormat("e4m3", 3, -6, 448.0)
E5M2 = NumberFormat("e5m2", 2, -14, 57344.0)
E2M1 = NumberFormat("e2m1", 1, 0, 6.0)
FORMATS = {number_format.name: number_format for number_format in (E4M3, E5M2, E2M1)}


def rounded_to(x: Tensor, kept_in: NumberFormat, noise: Tensor | None = None) -> Tensor:
    """Round to the nearest numbers of a format, halves to even; NaN stays NaN.

    Args:
        x: fp32 numbers.
        kept_in: the format.
        noise: numbers of the shape of ``x``, uniform between -1/2 and 1/2; with them a number rounds up with the
            probability of its distance from the number below (stochastic rounding).
    """
    return within(x.clamp(-kept_in.largest, kept_in.largest), kept_in, noise)


def within(x: Tensor, kept_in: NumberFormat, noise: Tensor | None = None) -> Tensor:
    """As ``rounded_to``, as if there were larger numbers than the largest of the format."""
    return _to_multiples(x, _powers(x).clamp_min_(2.0**kept_in.lowest_exponent), kept_in, noise)


def _powers(x: Tensor) -> Tensor:
    """The power of two at or below each magnitude; 0 for 0, infinity for what is not finite."""
    return x.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)


def _to_multiples(x: Tensor, power: Tensor, kept_in: NumberFormat, noise: Tensor | None) -> Tensor:
    """Round to multiples of ``power / 2**mantissa_bits``, where ``|x| < 2 power``.

    Added and subtracted, 1.5 times a large power of two leaves these multiples.  It works on numbers, because a
    compiler may leave out a cast to a narrower format and back.
    """
    if noise is not None:
        x = torch.addcmul(x, noise, power, value=2.0**-kept_in.mantissa_bits)
    shift = 1.5 * 2.0 ** (MANTISSA_BITS - kept_in.mantissa_bits)
    return torch.add(x, power, alpha=shift).sub_(power, alpha=shift)


def split(x: Tensor, axis: int, size: int) -> Tensor:
    """``[... n ...]`` to ``[... n/size size ...]`` along an axis counted from the end, the last block padded with 0.

    A shorter axis is one block.
    """
    return whole_blocks(x, axis, size) if x.shape[axis] > size else x.unsqueeze(axis - 1)


def whole_blocks(x: Tensor, axis: int, size: int) -> Tensor:
    """As ``split``, a shorter axis padded, too."""
    if missing := -x.shape[axis] % size:
        x = F.pad(x, (0, 0) * (-axis - 1) + (0, missing))
    shape, at = list(x.shape), x.ndim + axis
    return x.reshape(*shape[:at], shape[at] // size, size, *shape[at + 1 :])


def joined(blocks: Tensor, axis: int, length: int) -> Tensor:
    """Undo ``split`` of an axis that was so long."""
    whole = blocks.flatten(axis - 1, axis)
    return whole if whole.shape[axis] == length else whole.narrow(axis, 0, length)


def mx_blocks(blocks: Tensor, axis: int, kept_in: NumberFormat, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round blocks that share a scale, a power of two: ``2**(floor(log2 largest) - highest exponent)``.

    That is the scale E8M0 by flooring of the Open Compute Project's MX (version 1.0, section 6.3): a block whose
    largest number has a mantissa above that of the format's largest saturates.  A block whose largest number lies below
    2**-110 becomes 0, as denormal numbers are flushed.

    Args:
        blocks: numbers; ``axis`` runs over the numbers of a block.
        axis: counted from the end.
        kept_in: the format of the elements.
        noise: as in ``rounded_to``.

    Returns:
        The rounded numbers, and the scale of each block.
    """
    power = _powers(blocks)
    if get_proxy_mode() is None:  # of whole numbers it takes half the time, but compiled a multiple
        largest_power = power.view(torch.int32).amax(axis, keepdim=True).view(torch.float32)
    else:
        largest_power = power.amax(axis, keepdim=True)
    scale = largest_power * 2.0**-kept_in.highest_exponent
    power.clamp_min_(scale * 2.0**kept_in.lowest_exponent)
    largest = scale * kept_in.largest
    kept = _to_multiples(blocks, power, kept_in, noise)
    if axis == -1:  # two passes are faster there than one with both bounds
        return kept.clamp_max_(largest).clamp_min_(-largest), scale
    return kept.clamp_(-largest, largest), scale


def nv_scales(largest: Tensor, of_tensor: Tensor) -> Tensor:
    """Scales of NVFP4 blocks: E4M3 numbers times one number of the tensor, in fp32 (arXiv:2509.25149, section 2).

    Args:
        largest: magnitude in each block.
        of_tensor: largest magnitude of the whole tensor, shaped to meet ``largest``; 0 where all of it is 0.
    """
    most = E2M1.largest * E4M3.largest
    unit = torch.where(of_tensor > 0, of_tensor / most, 1.0)
    return rounded_to(largest / E2M1.largest / unit, E4M3) * unit


def nv_blocks(blocks: Tensor, scale: Tensor, noise: Tensor | None = None) -> Tensor:
    """Round numbers to E2M1 times the ``scale`` of their block; where the scale is 0, they become 0."""
    scaled = blocks * torch.where(scale == 0, 0.0, 1 / scale)
    return within(scaled, E2M1, noise).clamp_(-E2M1.largest, E2M1.largest).mul_(scale)


GOLDEN = 0x9E3779B9


def mixed_bits(number: Tensor) -> Tensor:
    """Scramble 32-bit numbers that are kept in int64 (lowbias32, Wellons 2018)."""
    number = (number ^ (number >> 16)) * 0x7FEB352D & WORD
    number = (number ^ (number >> 15)) * 0x846CA68B & WORD
    return number ^ (number >> 16)


def begin_random(seeds: Sequence[int], device: torch.device) -> Tensor:
    """A random number of 32 bits ``[r]``, kept in int64, from the seed of each run."""
    low, high = (torch.tensor([seed >> shift & WORD for seed in seeds], device=device) for shift in (0, 32))
    return mixed_bits(mixed_bits(low + GOLDEN & WORD) ^ high)


def next_random(number_r: Tensor) -> Tensor:
    """The random number that follows."""
    return mixed_bits(number_r + GOLDEN & WORD)


def signed(number_r: Tensor) -> Tensor:
    """A number of 32 bits in int32."""
    return torch.where(number_r >= 2**31, number_r - 2**32, number_r).to(torch.int32)


def random_noise(x_r: Tensor, key_r: Tensor) -> Tensor:
    """Numbers of the shape of ``x_r``, uniform between -1/2 and 1/2, from a key per run and the index of the entry.

    They have 16 bits and never reach 1/2, so that a number which needs no rounding stays.

    Args:
        x_r: leads with the run axis.
        key_r: 32 bits in int32.
    """
    count = x_r[0].numel()
    bits_rn = torch.arange(count, dtype=torch.int32, device=x_r.device) ^ key_r[:, None]
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, 0x846CA68B - 2**32)):
        bits_rn = ((bits_rn >> shift).bitwise_and_(mask) ^ bits_rn) * factor
    bits_rn = (bits_rn >> 16).bitwise_and_(0xFFFF)
    return bits_rn.to(torch.float32).mul_(2.0**-16).sub_(0.5 - 2.0**-17).view(x_r.shape)


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
    for a compiler, bf16 and fp16 take the casts, which are faster.  Of fp16, no zero has a sign.
    """
    if kept_in is torch.bfloat16 and get_proxy_mode() is None:
        return x.to(kept_in).to(x.dtype)
    given, x = x.dtype, x.float()
    if kept_in is torch.float16 and get_proxy_mode() is None:
        return torch.where(x.isnan(), x, x.to(kept_in).float() + 0.0).to(given)
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
