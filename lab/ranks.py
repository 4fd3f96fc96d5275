"""The processes torchrun started to train one fleet together: who this one is, and what they tell one another.

Torch is loaded by the first function that needs it; who this process is can be asked without.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lab.registry import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _said(name: str, otherwise: int) -> int:
    """A number out of torchrun's environment; without RANK nobody speaks of ranks."""
    return int(os.environ.get(name, otherwise)) if "RANK" in os.environ else otherwise


def count() -> int:
    """How many processes share this request; 1 when torchrun did not start this one."""
    return _said("WORLD_SIZE", 1)


def beside() -> int:
    """How many of them are on this machine."""
    return _said("LOCAL_WORLD_SIZE", 1)


def place() -> int:
    """This process among them, from 0."""
    return _said("RANK", 0)


def is_first() -> bool:
    """Whether this process is the one that reads requests, writes records and speaks."""
    return place() == 0


def device(kind: str) -> torch.device:
    """The device of this process: of several CUDA devices on a machine, the one of its place there.

    Raises:
        RequestError: more processes on this machine than devices, or a kind of device that cannot be shared.
    """
    import torch

    if count() == 1:
        return torch.device(kind)
    here = beside()
    if kind == "cuda":
        if here > torch.cuda.device_count():
            there = torch.cuda.device_count()
            raise RequestError(f"{here} ranks on a machine with {there} CUDA devices; --nproc-per-node {there} at most")
        torch.cuda.set_device(_said("LOCAL_RANK", 0))
        return torch.device("cuda", _said("LOCAL_RANK", 0))
    if kind != "cpu":
        raise RequestError(f"device={kind} takes one process; ranks run on cpu or cuda")
    return torch.device(kind)


def rows(batch_size: int) -> slice:
    """The rows of a batch that are this rank's.

    Raises:
        RequestError: the ranks do not divide the batch.
    """
    if batch_size % count():
        raise RequestError(f"batch_size {batch_size} cannot be shared by {count()} ranks; give a multiple of {count()}")
    size = batch_size // count()
    return slice(place() * size, (place() + 1) * size)


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


def joined() -> bool:
    """Whether this process trains together with others."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def tell(what: Any) -> None:
    """From the first rank to all others, which ``hear`` it."""
    from torch import distributed

    distributed.broadcast_object_list([what], src=0)


def hear() -> Any:
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
    if joined():
        highest(0)


def highest(number: int) -> int:
    """The highest of the ranks' numbers."""
    import torch

    return int(_from_all(torch.tensor(number)).max()) if joined() else number


def mean_over_ranks(number_r: Tensor) -> Tensor:
    """Mean of what each rank found in its share of the batch, which all have equal shares of; one rank's own."""
    return _from_all(number_r).mean(0) if joined() else number_r


def max_over_ranks(number_r: Tensor) -> Tensor:
    """Largest of what the ranks found, NaN where one found NaN."""
    return _from_all(number_r).amax(0) if joined() else number_r


def _from_all(number: Tensor) -> Tensor:
    """``[ranks ...]``; gathered rather than reduced, since the libraries' maximum may lose a NaN."""
    import torch
    from torch import distributed

    found = [torch.empty_like(number) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, number.detach().contiguous())
    return torch.stack(found)
