"""What test_ranks.py has torchrun run: fleets trained by all ranks, in every way.

on_ranks.py FOLDER [--one-run]: leaves ``found.json`` there, values by name, and the checkpoints of two ranks; of one
run alone, or of all fleets.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import Fleet
from lab.core import distributed, machine
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from lab.training.loop import train
from lab.training.recorder import Recorder
from pieces import recipe
from small import configs

RATES = ("optimizer.lr=1e-3", "optimizer.lr=1e-2 seed=1", "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0")
STEPS, HALF = 7, 4
NAMES = ",".join([*recipe("probes", "all")["names"], "grad_lag_cosine", "distance_from_init"])
SHARED = ("optimizer.clip=0.1", "probes.every=3", f"steps={STEPS}", "device=cpu", f"probes.names=[{NAMES}]")
IN_PARTS = ("batch=steps", "batch.micro_batch=2", "batch_size=8", "batch.half=6", "batch.full=14")
IN_PARTS = (*IN_PARTS, "probes.names=[train_loss,grad_norm,noise_scale]")


def wanted(runs: int, how: str = "ddp", *others: str) -> list[Any]:
    return configs(*RATES[:runs], shared=(*SHARED, f"ranks={how}", *others))


def values(tape: Recorder) -> list[dict[str, Any]]:
    """Of each run: how it ended, and what its probes heard by name."""
    told = ("status", "diverged_at", "loss_at_init", "final_val_loss", "parameters")
    return [
        {key: outcome[key] for key in told} | {f"{step} {probe} {where}": value for step, probe, where, value in rows}
        for outcome, rows, _ in tape.runs()
    ]


def trained(folder: Path, runs: int, how: str = "ddp", *, halfway: str = "", resumed: str = "") -> list[dict[str, Any]]:
    """Values of a fleet, kept ``halfway`` under that name, or gone on with from there."""
    tape, done = Recorder(Fleet(wanted(runs, how))), 0
    keeper = Checkpointer(folder, [halfway or resumed], CheckpointConfig(steps=0, minutes=0, keep=1))
    if resumed:
        state = keeper.restore(tape.fleet.tensors(), print)
        assert state is not None
        tape.restore(state)
        done = state["done"]
    for result in train(tape.fleet, done):
        tape.keep(result)
        if halfway and result.done == HALF:
            keeper.save(HALF, tape.fleet.tensors(), tape.state())
    return values(tape)


def trained_in_parts(how: str = "ddp") -> list[dict[str, Any]]:
    """Values of a fleet of two runs whose batch grows from one micro-batch of two sequences to four."""
    tape = Recorder(Fleet(wanted(2, how, *IN_PARTS)))
    for result in train(tape.fleet):
        tape.keep(result)
    return values(tape)


def share_held() -> float:
    """The part of an FSDP fleet's weights that this rank holds."""
    weights: list[Any] = list(Fleet(wanted(1, "fsdp")).state.weights.values())
    return sum(weight.to_local().numel() for weight in weights) / sum(weight.numel() for weight in weights)


# Optimizers that keep numbers of a run, or read weights or the forward pass, with what they need of the rest; and
# experts, whose loads are counted over all ranks.
OPTIMIZERS = {
    "adamw": ("intervention=[experts,balance,router_bias]", "intervention.router_bias.rate=0.1"),
    **{"adamh": (), "adamw_adagc": (), "adamw_zclip": (), "stable_spam": (), "adamw_skip_sigma": ()},
    **{"muon": (), "adamw_spectral_cap": (), "schedule_free": ("schedule=constant",)},
    "adamw_qk_clip": ("intervention=[z_loss]", "optimizer.qk_clip=0.3"),
}
NEED_WHOLE_WEIGHTS = ("muon", "adamw_spectral_cap", "schedule_free", "adamw_qk_clip")


def losses_by(how: str) -> dict[str, list[float]]:
    """Held-out losses after a few updates by each optimizer that can be shared in this way."""
    losses = {}
    for name, others in OPTIMIZERS.items():
        if how == "ddp" or name not in NEED_WHOLE_WEIGHTS:
            shared = (f"optimizer={name}", *others, f"ranks={how}", "device=cpu", "probes=none", "model.depth=1")
            fleet = Fleet(configs(*RATES[:2], shared=shared))
            for step in range(STEPS):
                fleet.step(step)
            losses[name] = fleet.evaluation.loss(whole=False).tolist()
    return losses


def one_run(folder: Path) -> dict[str, Any]:
    """By FSDP alone: the wrapper of DDP loads the compiler, which takes longer than all else."""
    return {"fsdp 1": trained(folder, 1, "fsdp")}


def all_fleets(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in ("ddp", "fsdp"):
        for runs in (1, 3):
            found[f"{how} {runs}"] = trained(folder, runs, how, halfway=f"{how} {runs}")
        found[f"{how} resumed"] = trained(folder, 3, how, resumed="one process")
        found[f"{how} in parts"] = trained_in_parts(how)
    found["ddp resumed as fsdp"] = trained(folder, 3, "fsdp", resumed="ddp 3")
    found["held"] = share_held()
    found["optimizers"] = {how: losses_by(how) for how in ("ddp", "fsdp")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "SHARDED_AXIS", 0)
        found["held, cut along runs"] = share_held()
    return found


def main(folder: Path, *options: str) -> None:
    machine.configure_process()
    machine.configure_torch()
    distributed.join()
    found = (one_run if options else all_fleets)(folder)
    if distributed.is_first_rank():
        (folder / "found.json").write_text(json.dumps(found))
    distributed.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)  # as lab does
