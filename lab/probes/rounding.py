"""Probes of low precision: what rounds to zero, what saturates, and how gains of norms share exponents and codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lab.core.axes import per_run_mean
from lab.core.number_formats import E4M3, MX_BLOCK, joined, mx_blocks, split
from lab.probes.listener import probe


def _share(is_so_r: Tensor, of_r: Tensor) -> Tensor:
    """Share of the entries of a tensor of which it is so; NaN where one is not a number."""
    return per_run_mean(torch.where(of_r.isnan(), of_r, is_so_r.to(of_r.dtype)))


@probe(event="gradient_rounding")
def gradient_underflow(before_r: Tensor, after_r: Tensor, beyond: Tensor | float) -> Tensor:
    """Share of a gradient's entries that are not zero and round to zero, where a product takes it in low precision.

    Of formats with a scale for each block it is the rounding for the gradient of the product's left operand, which goes
    on to earlier layers.
    """
    return _share((before_r != 0) & (after_r == 0), before_r)


@probe(event="rounding")
def saturation(before_r: Tensor, after_r: Tensor, beyond: Tensor | float) -> Tensor:
    """Share of an operand's entries that the largest number of its format takes the place of.

    Rounding to nearest would leave them beyond it.  A scale by the largest entry of the operand itself leaves none;
    delayed scales do where an operand has grown, and MX where the largest of a block has a large mantissa.
    """
    return _share(before_r.abs() >= beyond, before_r)


@probe(event="gradients")
def zero_gradients(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of each tensor's gradient that is exactly zero when it reaches the optimizer.

    The embedding has zeros in any format: tokens that are not in the batch.
    """
    return {name: _share(gradient == 0, gradient) for name, gradient in gradients.items()}


@probe(event="gains")
def gain_octave(gains: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Largest share of the gains of a norm that lie between one power of two and the next, of one sign."""
    return {
        name: _largest_share(torch.frexp(gain_r)[1] * gain_r.sign().to(torch.int32)) for name, gain_r in gains.items()
    }


@probe(event="gains")
def gain_code(gains: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Largest share of the gains of a norm that MXFP8 (E4M3, blocks of 32, floored scale) would round to one number.

    The same measure in every precision, whether the model rounds its gains or not (arXiv:2506.20752).
    """
    return {name: _largest_share(_as_mxfp8(gain_r)) for name, gain_r in gains.items()}


def _as_mxfp8(gain_r: Tensor) -> Tensor:
    kept_r, _ = mx_blocks(split(gain_r.float(), -1, MX_BLOCK), -1, E4M3)
    return joined(kept_r, -1, gain_r.shape[-1])


def _largest_share(value_r: Tensor) -> Tensor:
    """Share of the entries of each run that have its most frequent value."""
    flat_rn = value_r.flatten(1)
    return per_run_mean((flat_rn == flat_rn.mode(1).values[:, None]).to(torch.float32))
