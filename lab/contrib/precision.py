"""Probes of low precision: gradients that are exactly zero, and gains that a format rounds to one number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lab.core.axes import per_run_mean
from lab.core.number_formats import E4M3, MX_BLOCK, joined, mx_blocks, split
from lab.probes.listener import probe, share


@probe(event="gradients")
def zero_gradients(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of each tensor's gradient that is exactly zero when it reaches the optimizer.

    The embedding has zeros in any format: tokens that are not in the batch.
    """
    return {name: share(gradient == 0, gradient) for name, gradient in gradients.items()}


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
    shares = dict[str, Tensor]()
    for name, gain_r in gains.items():
        kept_r, _ = mx_blocks(split(gain_r.float(), -1, MX_BLOCK), -1, E4M3)
        shares[name] = _largest_share(joined(kept_r, -1, gain_r.shape[-1]))
    return shares


def _largest_share(value_r: Tensor) -> Tensor:
    """Share of the entries of each run that have its most frequent value."""
    flat_rn = value_r.flatten(1)
    return per_run_mean((flat_rn == flat_rn.mode(1).values[:, None]).to(torch.float32))
