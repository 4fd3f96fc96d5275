"""Axis letters, reductions that keep the run axis, the causal mask, and one number per run broadcast over a tensor.

``r`` run, ``b`` batch, ``t`` query position, ``s`` key position, ``d`` width, ``h`` heads, ``k`` head width,
``m`` MLP width, ``v`` vocabulary.  A tensor's name ends in its axes: ``q_rbhtk``.  ``r`` leads and is never contracted.

On several ranks a mean or maximum is over the batch of all ranks, and a weight of which each rank holds a shard (a
DTensor) is reduced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.core.distributed import max_over_ranks, mean_over_ranks

PADDING = 64  # entries; a multiple of the vector length of every CPU


def over(number_r: Tensor | float, tensor_r: Tensor) -> Tensor | float:
    """Reshape one number per run ``[r]`` to broadcast over ``tensor_r``; a plain float is returned as it is.

    Numbers per run are kept in float64 and rounded here, once, to the precision of the tensor.
    """
    if isinstance(number_r, Tensor):
        return _replicated(tensor_r, number_r.to(tensor_r.dtype).view(-1, *(1,) * (tensor_r.ndim - 1)))
    return number_r


def _replicated(tensor_r: Tensor, number_r1: Tensor) -> Tensor:
    """Replicate the number on all ranks if the tensor is sharded over them; only then may the two be multiplied."""
    mesh = getattr(tensor_r, "device_mesh", None)
    if mesh is None:
        return number_r1
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(number_r1, mesh, [Replicate()], run_check=False)


def select_per_run(is_so_r: Tensor, tensor_r: Tensor, other_r: Tensor | float) -> Tensor:
    """The first tensor for the runs where the mask holds, and the second for the others."""
    return torch.where(_replicated(tensor_r, is_so_r.view(-1, *(1,) * (tensor_r.ndim - 1))), tensor_r, other_r)


def nonzero(norm_r: Tensor) -> Tensor:
    """A norm to divide by: 1 where it is 0 (Flax, SpectralNorm).  So zeros stay zeros and have a finite gradient."""
    return torch.where(norm_r == 0, 1.0, norm_r)


def causal_mask(scores_ts: Tensor) -> Tensor:
    """A mask ``[t s]`` of scores ``[... t s]``: true for keys up to the query's own position."""
    return torch.ones(scores_ts.shape[-2:], dtype=torch.bool, device=scores_ts.device).tril()


def in_whole_vectors(function: Callable[..., Tensor], *tensors_r: Tensor) -> Tensor:
    """Apply a function of entries to tensors ``[r ...]``; a run's result has the same bits at every index of the fleet.

    CPU kernels round the tail of a buffer differently from its body, so every run is padded to whole vectors.
    """
    entries = tensors_r[0][0].numel()
    if missing := -entries % PADDING:
        padded_rn = function(*(F.pad(tensor_r.flatten(1), (0, missing)) for tensor_r in tensors_r))
        return padded_rn[:, :entries].view_as(tensors_r[0])
    return function(*tensors_r)


def whole(number_r: Tensor) -> Tensor:
    """Combine a number per run over the shards of a tensor."""
    return number_r.full_tensor() if hasattr(number_r, "full_tensor") else number_r


def per_run_mean(tensor_r: Tensor) -> Tensor:
    """``[r ...] -> [r]``: the mean over everything but the run axis."""
    return mean_over_ranks(whole(tensor_r.flatten(1).mean(1)))


def per_run_max(tensor_r: Tensor) -> Tensor:
    """``[r ...] -> [r]``: the largest entry of each run; NaN where the run holds a NaN."""
    return max_over_ranks(whole(tensor_r.flatten(1).amax(1)))


def per_run_rms(tensor_r: Tensor) -> Tensor:
    """``[r ...] -> [r]``: root of the mean square of each run."""
    return per_run_mean(tensor_r.square()).sqrt()


def mean_over_tokens(value_rbt: Tensor, counted_rbt: Tensor) -> Tensor:
    """Return the mean over the counted tokens, ``[r b t]`` to ``[r]``; NaN at other tokens does not enter it."""
    total_r = torch.where(counted_rbt, value_rbt, 0.0).flatten(1).sum(1)
    return total_r / counted_rbt.flatten(1).sum(1)


def per_run_dot(firsts_r: Iterable[Tensor], seconds_r: Iterable[Tensor]) -> Tensor:
    """Dot product ``[r]`` of two lists of tensors of a run, each taken together, in the order given."""
    pairs = zip(firsts_r, seconds_r, strict=True)
    return whole(reduce(add, ((first_r * second_r).flatten(1).sum(1) for first_r, second_r in pairs)))


def per_run_norm(tensors_r: Iterable[Tensor]) -> Tensor:
    """Global norm ``[r]`` of all tensors of a run taken together, in the order given."""
    # one after the other: a reduction over stacked tensors adds in another order for another number of runs
    return whole(reduce(add, (tensor_r.square().flatten(1).sum(1) for tensor_r in tensors_r))).sqrt()
