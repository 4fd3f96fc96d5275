"""Training one fleet on several ranks: rank and world size, communication, and sharing the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from lab.core.errors import RequestError

if TYPE_CHECKING:  # torch is loaded by the functions that need it: `lab --help` asks for its rank, too
    import torch
    from torch import Tensor, nn


_is_alone: ContextVar[bool] = ContextVar("is_alone", default=False)


def _environment_number(name: str, default: int) -> int:
    """Read a number from torchrun's environment; without RANK the process is alone."""
    return int(os.environ.get(name, default)) if "RANK" in os.environ else default


def world_size() -> int:
    """Number of processes that train together; 1 without torchrun."""
    return _environment_number("WORLD_SIZE", 1)


def local_world_size() -> int:
    """Number of them on this machine."""
    return _environment_number("LOCAL_WORLD_SIZE", 1)


def rank() -> int:
    """Index of this process among them, from 0."""
    return _environment_number("RANK", 0)


def is_first_rank() -> bool:
    """Whether this process is the one that reads requests, writes records and prints."""
    return rank() == 0


def rank_device(kind: str) -> torch.device:
    """The device of this process; of several CUDA devices the one of its local rank.

    Raises:
        RequestError: this machine has fewer devices than processes, or ranks cannot run on this kind of device.
    """
    import torch

    if world_size() == 1:
        return torch.device(kind)
    ranks = local_world_size()
    if kind == "cuda":
        devices = torch.cuda.device_count()
        if ranks > devices:
            raise RequestError(
                f"{ranks} ranks on a machine with {devices} CUDA devices; --nproc-per-node {devices} at most"
            )
        torch.cuda.set_device(_environment_number("LOCAL_RANK", 0))
        return torch.device("cuda", _environment_number("LOCAL_RANK", 0))
    if kind != "cpu":
        raise RequestError(f"device={kind} takes one process; ranks run on cpu or cuda")
    return torch.device(kind)


def batch_rows(batch_size: int, key: str = "batch_size") -> slice:
    """The rows of a batch that this rank trains on; ``key`` is the config key that sets them.

    Raises:
        RequestError: the ranks do not divide the batch.
    """
    if batch_size % world_size():
        raise RequestError(
            f"{key} {batch_size} cannot be shared by {world_size()} ranks; give a multiple of {world_size()}"
        )
    size = batch_size // world_size()
    return slice(rank() * size, (rank() + 1) * size)


def join() -> None:
    """Join the process group of all ranks, by gloo for tensors on the CPU, by NCCL for those on CUDA.

    Raises:
        RequestError: torchrun's environment is incomplete.
    """
    import torch
    from torch import distributed

    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except ValueError as fault:
        raise RequestError(f"RANK is set, but the ranks cannot meet: {fault}; start them with torchrun") from None


def leave() -> None:
    """Leave the process group, once all ranks are here."""
    from torch import distributed

    wait_for_all()
    distributed.destroy_process_group()


def is_joined() -> bool:
    """Whether this process has joined a process group."""
    from torch import distributed

    return not _is_alone.get() and distributed.is_available() and distributed.is_initialized()


@contextmanager
def alone() -> Iterator[None]:
    """Within the block this process takes means and maxima of its own, whatever group it has joined."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def send_to_all(message: Any) -> None:
    """Send an object from the first rank to all others, which call ``receive_from_first``."""
    from torch import distributed

    distributed.broadcast_object_list([message], src=0)


def receive_from_first() -> Any:
    """Wait for the object that the first rank sends.

    Raises:
        ConnectionError: the first rank is gone.
    """
    from torch import distributed

    messages: list[Any] = [None]
    try:
        distributed.broadcast_object_list(messages, src=0)
    except RuntimeError as fault:
        raise ConnectionError("the first rank is gone") from fault
    return messages[0]


def wait_for_all() -> None:
    """Block until every rank is here."""
    if is_joined():
        highest_on_any_rank(0)


def highest_on_any_rank(number: int) -> int:
    """The highest of the ranks' numbers."""
    import torch

    return int(all_gather(torch.tensor(number)).max()) if is_joined() else number


def mean_over_ranks(number_r: Tensor) -> Tensor:
    """Mean of the ranks' numbers, which come from equal shares of the batch."""
    return all_gather(number_r).mean(0) if is_joined() else number_r


def max_over_ranks(number_r: Tensor) -> Tensor:
    """Largest of the ranks' numbers, NaN where one of them is NaN."""
    return all_gather(number_r).amax(0) if is_joined() else number_r


def all_gather(number: Tensor) -> Tensor:
    """``[ranks ...]``; gathered rather than reduced, since the libraries' maximum may drop a NaN."""
    import torch
    from torch import distributed

    if not is_joined():
        return number[None]
    parts = [torch.empty_like(number) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, number.detach().contiguous())
    return torch.stack(parts)


# The axis that FSDP shards, since the run axis before it may hold a single run.
SHARDED_AXIS = 1


def initial_device(strategy: str) -> torch.device:
    """Where a model is built before it is shared: without memory, if no rank is to hold all of it."""
    import torch

    return torch.device("meta" if is_joined() and strategy == "fsdp" else "cpu")


def distribute(model: nn.Module, parts: Iterable[nn.Module], strategy: str, device: torch.device) -> nn.Module:
    """Put a model on its device, to be initialized there, and share it among the ranks if there are several.

    FSDP gathers one of the ``parts`` at a time, and all the weights that are in none of them.

    Returns:
        The module that a training step calls; its gradients are averaged over the ranks.
    """
    from torch import nn

    if not is_joined():
        return model.to(device)
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model.to(device))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing changes it in place
    mesh = init_device_mesh(device.type, (world_size(),))
    for part in (*parts, model):
        # the model itself, too, frees its weights after a forward pass: those left by an evaluation would be stale
        fully_shard(part, mesh=mesh, reshard_after_forward=True, shard_placement_fn=lambda _: Shard(SHARDED_AXIS))
    return model.to_empty(device=device)


def check_divisible(shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights ``[r ...]`` that FSDP cannot split into equal shards.

    Raises:
        RequestError: the world size does not divide a weight, which the message names.
    """
    for name, shape in shapes.items():
        if shape[SHARDED_AXIS] % world_size():
            raise RequestError(
                f"ranks=fsdp: {world_size()} ranks cannot share {name}, {shape[SHARDED_AXIS]} long; say ranks=ddp"
            )


def gradients(loss_r: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the loss summed over runs; on several ranks by ``backward``, whose hooks average over them."""
    import torch

    if not is_joined():
        return dict(zip(weights, torch.autograd.grad(loss_r.sum(), list(weights.values())), strict=True))
    loss_r.sum().backward()  # type: ignore[no-untyped-call]
    averaged: dict[str, Any] = {name: weight.grad for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = None
    return averaged


def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy ``whole`` into ``target``, on each rank its shard of it if the target is sharded."""
    import torch

    if hasattr(target, "device_mesh") and hasattr(target, "placements"):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(target.device, target.dtype)
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    with torch.no_grad():
        target.copy_(whole)
