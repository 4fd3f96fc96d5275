"""Gating within a step: what it writes down for control, and how response and loss scale change its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lab.core.axes import per_run_norm, where_runs
from lab.core.hooks import announce
from lab.responses.response import Gate
from lab.training.config import RunConfig


def begin_readings(runs: int, device: torch.device) -> dict[str, Tensor]:
    """Measurements of an update for each run ``[r]``, and the usual loss, which the next update reads."""
    readings = {name: torch.zeros(runs, dtype=torch.float64, device=device) for name in ("loss", "norm", "at_floor")}
    kept_r = torch.ones(runs, dtype=torch.float64, device=device)
    return {**readings, "kept": kept_r, "usual_loss": torch.full_like(kept_r, math.inf)}


@torch.no_grad()
def gate_update(
    config: RunConfig, gradients: Mapping[str, Tensor], loss_r: Tensor, step: Tensor, readings: Mapping[str, Tensor]
) -> Gate:
    """Write down what control reads, if anything, and ask response and loss scale how to change this update."""
    gate = Gate()
    if not readings:
        return gate
    norm_r = per_run_norm(gradients.values())
    readings["loss"].copy_(loss_r)
    readings["norm"].copy_(norm_r)
    if config.response is not None:
        gate = config.response.entry.gate(step, loss_r, norm_r, readings["usual_loss"])
    if config.loss_scale is not None:
        finite_r = norm_r.isfinite()
        gate = gate._replace(keep_r=finite_r if gate.keep_r is None else gate.keep_r & finite_r)
    if gate.keep_r is not None:
        readings["kept"].copy_(gate.keep_r)
    return gate


@torch.no_grad()
def update_kept(update: Callable[[], None], keep_r: Tensor, tensors: Sequence[Tensor], *, traced: bool) -> None:
    """Update the runs to keep; the others' tensors stay bit for bit, whatever their gradients are.

    A step that is ``traced`` cannot branch on whether all are kept.
    """
    if not traced and bool(keep_r.all()):
        update()
        return
    before = [tensor.clone() for tensor in tensors]
    update()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(where_runs(keep_r, tensor, old))


@torch.no_grad()
def rescale(config: RunConfig, scale: Mapping[str, Tensor], readings: Mapping[str, Tensor]) -> None:
    """Adapt the loss scale to whether gradients overflowed, and write down how long it has been at its floor."""
    if config.loss_scale is not None:
        announce("loss_scale", "", scale["scale"])
        for name, after_r in config.loss_scale.entry.after(scale, ~readings["norm"].isfinite()).items():
            scale[name].copy_(after_r)
        readings["at_floor"].copy_(scale["at_floor"])
