"""One model on several ranks: DDP, where each has all of it, or FSDP, where each has a part of every weight."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lab import ranks
from lab.registry import RequestError

# The axis FSDP cuts.  The run axis before it may be a single run long.
CUT = 1


def birthplace(how: str) -> torch.device:
    """Where a model is made before it is shared: nowhere, if no rank is to hold all of it."""
    return torch.device("meta" if ranks.joined() and how == "fsdp" else "cpu")


def share(model: nn.Module, parts: Iterable[nn.Module], how: str, device: torch.device) -> nn.Module:
    """Put a model on its device, there to be initialized, and on all ranks if there are several.

    FSDP holds one of the ``parts`` whole at a time, and what is in none of them.

    Returns:
        What a training step calls; gradients that come back through it are averaged over the ranks.
    """
    if not ranks.joined():
        return model.to(device)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model.to(device))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nothing changes in place
    mesh = init_device_mesh(device.type, (ranks.count(),))
    for part in (*parts, model):
        # the model, too, gives its weights back after a forward pass: those that an evaluation left would go stale
        fully_shard(part, mesh=mesh, reshard_after_forward=True, shard_placement_fn=lambda _: Shard(CUT))
    return model.to_empty(device=device)


def check_shapes(shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights ``[r ...]`` that FSDP cannot cut into equal parts.

    Raises:
        RequestError: it names the weight.
    """
    for name, shape in shapes.items():
        if shape[CUT] % ranks.count():
            raise RequestError(
                f"ranks=fsdp: {ranks.count()} ranks cannot share {name}, {shape[CUT]} long; say ranks=ddp"
            )


def gradients(loss_r: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the sum over runs; on several ranks by ``backward``, whose hooks average over them."""
    if not ranks.joined():
        return dict(zip(weights, torch.autograd.grad(loss_r.sum(), list(weights.values())), strict=True))
    loss_r.sum().backward()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    return found


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copy ``whole`` into ``target``; where each rank has a part of that, its part."""
    if hasattr(target, "device_mesh") and hasattr(target, "placements"):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(target.device, target.dtype)
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)
