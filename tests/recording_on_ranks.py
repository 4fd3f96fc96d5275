"""What test_recording.py has torchrun run: a recorded model shared by two ranks, by DDP and by FSDP.

recording_on_ranks.py FOLDER: leaves ``ddp.jsonl``, ``fsdp.jsonl`` and ``failing.jsonl`` there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lab
from test_recording import Experts, batch, built, loss_of


def share(how: str) -> nn.Module:
    model: Any = built(mlp=Experts)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(how: str, out: Path, *, fails: bool = False) -> None:
    model, rank = share(how), distributed.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = lab.record(model, optimizer, every=2, out=out)
    if fails and rank:
        recorder.measurement.fault = "planted"
    for step in range(3):
        loss = loss_of(model, batch(step).chunk(2)[rank])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for how in ("ddp", "fsdp"):
        trained(how, folder / f"{how}.jsonl")
    trained("ddp", folder / "failing.jsonl", fails=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
