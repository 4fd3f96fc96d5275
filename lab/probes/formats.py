"""Probes of what number formats would do to gradients and to the residual stream, whatever the precision of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lab.core.axes import over
from lab.core.number_formats import E4M3, LARGEST_FP16, MX_BLOCK, joined, mx_blocks, rounded, rounded_to, split
from lab.probes.activations import gradient_underflow, saturation
from lab.probes.listener import probe

# An fp16 number from here on would round to infinity.
BEYOND_FP16 = LARGEST_FP16 + 16


def in_fp16(x_r: Tensor) -> tuple[Tensor, Tensor | float]:
    """Numbers ``[r ...]`` rounded to fp16 without a scale, and from which magnitude on they overflow."""
    return rounded(x_r, torch.float16), BEYOND_FP16


def in_e4m3(x_r: Tensor) -> tuple[Tensor, Tensor | float]:
    """The same in E4M3, scaled so that the largest entry of a run becomes the largest number, and none overflows."""
    largest_r = x_r.abs().flatten(1).amax(1)
    scale_r = torch.where(largest_r > 0, E4M3.largest / largest_r, 1.0)
    return rounded_to(x_r * over(scale_r, x_r), E4M3), math.inf


def in_mx(x_r: Tensor) -> tuple[Tensor, Tensor | float]:
    """The same in MXFP8, E4M3 in blocks of 32 along the last axis, with a floored power of two as their scale."""
    blocks = split(x_r, -1, min(MX_BLOCK, x_r.shape[-1]))
    kept, scale = mx_blocks(blocks, -1, E4M3)
    length = x_r.shape[-1]
    return joined(kept, -1, length), joined((scale * E4M3.beyond).expand_as(kept), -1, length)


@probe(event="clipped_gradients")
def grad_underflow_fp16(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of each tensor's gradient that is not zero and would be zero in fp16 without a loss scale."""
    return {name: _underflow(gradient, in_fp16) for name, gradient in gradients.items()}


@probe(event="clipped_gradients")
def grad_underflow_e4m3(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of each tensor's gradient that is not zero and would be zero in E4M3, scaled by its largest entry."""
    return {name: _underflow(gradient, in_e4m3) for name, gradient in gradients.items()}


@probe(event="clipped_gradients")
def grad_underflow_mx(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of each tensor's gradient that is not zero and would be zero in MXFP8."""
    return {name: _underflow(gradient, in_mx) for name, gradient in gradients.items()}


@probe(event="block_output")
def block_underflow_e4m3(x_rbtd: Tensor) -> Tensor:
    """Share of a block's output that is not zero and would be zero in E4M3, scaled by its largest entry."""
    return _underflow(x_rbtd, in_e4m3)


@probe(event="block_output")
def block_underflow_mx(x_rbtd: Tensor) -> Tensor:
    """Share of a block's output that is not zero and would be zero in MXFP8."""
    return _underflow(x_rbtd, in_mx)


@probe(event="block_output")
def block_overflow_fp16(x_rbtd: Tensor) -> Tensor:
    """Share of a block's output that would be infinite in fp16."""
    return saturation(x_rbtd, *in_fp16(x_rbtd.float()))


@probe(event="block_output")
def block_overflow_mx(x_rbtd: Tensor) -> Tensor:
    """Share of a block's output that would lie beyond the largest number of MXFP8 in its block of 32."""
    return saturation(x_rbtd, *in_mx(x_rbtd.float()))


def _underflow(x_r: Tensor, into: Callable[[Tensor], tuple[Tensor, Tensor | float]]) -> Tensor:
    return gradient_underflow(x_r, *into(x_r.float()))
