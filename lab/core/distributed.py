"""Several processes training one fleet: who this one is, what they exchange, how they share a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lab.core.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _environment_number(name: str, otherwise: int) -> int:
    """A number out of torchrun's environment; without RANK nobody speaks of ranks."""
    return int(os.environ.get(name, otherwise)) if "RANK" in os.environ else otherwise


def world_size() -> int:
    """How many processes share this request; 1 when torchrun did not start this one."""
    return _environment_number("WORLD_SIZE", 1)


def local_world_size() -> int:
    """How many of them are on this machine."""
    return _environment_number("LOCAL_WORLD_SIZE", 1)


def rank() -> int:
    """This process among them, from 0."""
    return _environment_number("RANK", 0)


def is_first_rank() -> bool:
    """Whether this process is the one that reads requests, writes records and speaks."""
    return rank() == 0


def rank_device(kind: str) -> torch.device:
    """The device of this process: of several CUDA devices on a machine, the one of its place there.

    Raises:
        RequestError: more processes on this machine than devices, or a kind of device that cannot be shared.
    """
    import torch

    if world_size() == 1:
        return torch.device(kind)
    here = local_world_size()
    if kind == "cuda":
        if here > torch.cuda.device_count():
            there = torch.cuda.device_count()
            raise RequestError(f"{here} ranks on a machine with {there} CUDA devices; --nproc-per-node {there} at most")
        torch.cuda.set_device(_environment_number("LOCAL_RANK", 0))
        return torch.device("cuda", _environment_number("LOCAL_RANK", 0))
    if kind != "cpu":
        raise RequestError(f"device={kind} takes one process; ranks run on cpu or cuda")
    return torch.device(kind)


def batch_rows(batch_size: int) -> slice:
    """The rows of a batch that are this rank's.

    Raises:
        RequestError: the ranks do not divide the batch.
    """
    if batch_size % world_size():
        raise RequestError(
            f"batch_size {batch_size} cannot be shared by {world_size()} ranks; give a multiple of {world_size()}"
        )
    size = batch_size // world_size()
    return slice(rank() * size, (rank() + 1) * size)


def join() -> None:
    """Meet the other ranks: tensors on the CPU travel by gloo, those on CUDA by NCCL.

    Raises:
        RequestError: the environment does not say where they are.
    """
    import torch
    from torch import distributed

    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except ValueError as fault:
        raise RequestError(f"RANK is set, but the ranks cannot meet: {fault}; start them with torchrun") from None


def leave() -> None:
    """Part from the other ranks, all at the same point."""
    from torch import distributed

    wait_for_all()
    distributed.destroy_process_group()


def is_joined() -> bool:
    """Whether this process trains together with others."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def send_to_all(what: Any) -> None:
    """From the first rank to all others, which ``hear`` it."""
    from torch import distributed

    distributed.broadcast_object_list([what], src=0)


def receive_from_first() -> Any:
    """What the first rank tells.

    Raises:
        ConnectionError: the first rank is gone.
    """
    from torch import distributed

    heard: list[Any] = [None]
    try:
        distributed.broadcast_object_list(heard, src=0)
    except RuntimeError as lost:
        raise ConnectionError("the first rank is gone") from lost
    return heard[0]


def wait_for_all() -> None:
    """Go on once every rank is here."""
    if is_joined():
        any_rank(0)


def any_rank(number: int) -> int:
    """The highest of the ranks' numbers."""
    import torch

    return int(_from_all(torch.tensor(number)).max()) if is_joined() else number


def mean_over_ranks(number_r: Tensor) -> Tensor:
    """Mean of what each rank found in its share of the batch, which all have equal shares of; one rank's own."""
    return _from_all(number_r).mean(0) if is_joined() else number_r


def max_over_ranks(number_r: Tensor) -> Tensor:
    """Largest of what the ranks found, NaN where one found NaN."""
    return _from_all(number_r).amax(0) if is_joined() else number_r


def _from_all(number: Tensor) -> Tensor:
    """``[ranks ...]``; gathered rather than reduced, since the libraries' maximum may lose a NaN."""
    import torch
    from torch import distributed

    found = [torch.empty_like(number) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, number.detach().contiguous())
    return torch.stack(found)


# The axis FSDP cuts.  The run axis before it may be a single run long.
SHARDED_AXIS = 1


def initial_device(how: str) -> torch.device:
    """Where a model is made before it is shared: nowhere, if no rank is to hold all of it."""
    return torch.device("meta" if is_joined() and how == "fsdp" else "cpu")


def distribute(model: nn.Module, parts: Iterable[nn.Module], how: str, device: torch.device) -> nn.Module:
    """Put a model on its device, there to be initialized, and on all ranks if there are several.

    FSDP holds one of the ``parts`` whole at a time, and what is in none of them.

    Returns:
        What a training step calls; gradients that come back through it are averaged over the ranks.
    """
    if not is_joined():
        return model.to(device)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model.to(device))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nothing changes in place
    mesh = init_device_mesh(device.type, (world_size(),))
    for part in (*parts, model):
        # the model, too, gives its weights back after a forward pass: those that an evaluation left would go stale
        fully_shard(part, mesh=mesh, reshard_after_forward=True, shard_placement_fn=lambda _: Shard(SHARDED_AXIS))
    return model.to_empty(device=device)


def check_divisible(shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights ``[r ...]`` that FSDP cannot cut into equal parts.

    Raises:
        RequestError: it names the weight.
    """
    for name, shape in shapes.items():
        if shape[SHARDED_AXIS] % world_size():
            raise RequestError(
                f"ranks=fsdp: {world_size()} ranks cannot share {name}, {shape[SHARDED_AXIS]} long; say ranks=ddp"
            )


def gradients(loss_r: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the sum over runs; on several ranks by ``backward``, whose hooks average over them."""
    if not is_joined():
        return dict(zip(weights, torch.autograd.grad(loss_r.sum(), list(weights.values())), strict=True))
    loss_r.sum().backward()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    return found


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy ``whole`` into ``target``; where each rank has a part of that, its part."""
    if hasattr(target, "device_mesh") and hasattr(target, "placements"):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(target.device, target.dtype)
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)
