"""The training state of a fleet: everything that a step changes in place, with its names in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.core.registry import PROBES
from lab.model.layers import Operands
from lab.model.low_precision import LowPrecision
from lab.optim.links import Tensors
from lab.optim.optimizer import Optimizer
from lab.probes.earlier import begin_earlier
from lab.training import accumulation
from lab.training.accumulation import Accumulation
from lab.training.config import RunConfig
from lab.training.gating import begin_readings

Fresh = Mapping[str, Callable[[], Tensors]]  # what begins the state of each link, and of the loss scale


class TrainingState(NamedTuple):
    """Everything that a step changes in place; a tree of tensors, as an engine takes it.

    Attributes:
        weights: those that are trained.
        links: state of the optimizer's links by their names, of loss scale and rounding, and what probes compare a
            step with.
        first_bad_r: first step with a non-finite loss, or -1.
        readings: what control reads after a step; empty unless the fleet is controlled.
        sums: over the micro-batches of a step; empty for steps of one batch.
    """

    weights: Tensors
    links: dict[str, Tensors]
    first_bad_r: Tensor
    readings: Tensors
    sums: Accumulation | tuple[()]

    @property
    def loss_scale(self) -> Tensors:
        """State of the loss scale; empty without one."""
        return self.links.get("loss_scale", {})

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of checkpoints and snapshots, by name; the first bad step is stored apart."""
        links = {f"{link}.{name}": tensor for link, tensors in self.links.items() for name, tensor in tensors.items()}
        noise = {f"noise.{name}": sum_r for name, sum_r in self.sums.noise.items()} if self.sums else {}
        smoothed = {f"smoothed.{name}": mean_r for name, mean_r in self.sums.smoothed.items()} if self.sums else {}
        return {f"weight.{name}": weight for name, weight in self.weights.items()} | links | noise | smoothed

    @torch.no_grad()
    def reset(self, fresh: Fresh, run: int, name: str, begin_of_names: str = "") -> None:
        """Put one run's state of a link, or of the loss scale, to what it was before the first update.

        Args:
            fresh: what begins the states.
            run: whose state it is.
            name: of the link.
            begin_of_names: how names of its tensors begin, after the role; others stay.
        """
        for key, tensor in fresh[name]().items():
            if key.rpartition("/")[2].startswith(begin_of_names):
                self.links[name][key][run].copy_(tensor[run])


def fresh_links(
    config: RunConfig,
    optimizers: Iterable[Optimizer],
    weights: Tensors,
    roles: Mapping[str, str],
    operands: Operands | None,
) -> Fresh:
    """Return the initial state of the links of these optimizers, and of loss scale and rounding that have one."""
    fresh: dict[str, Callable[[], Tensors]] = {
        name: partial(optimizer.begin_link, name, weights, roles)
        for optimizer in optimizers
        for name in optimizer.links
    }
    if config.loss_scale is not None:
        first = next(iter(weights.values()))
        fresh["loss_scale"] = partial(config.loss_scale.entry.begin, len(first), first.device)
    if isinstance(operands, LowPrecision) and operands.is_stateful:
        seeds: Any = config.seed
        fresh["rounding"] = partial(operands.begin, seeds, next(iter(weights.values())).device)
    return fresh


def begin_state(config: RunConfig, weights: Tensors, fresh: Fresh) -> TrainingState:
    """The state of a fleet with this config before the first update."""
    first = next(iter(weights.values()))
    runs, device, names = len(first), first.device, config.probes.names
    links = {name: begin() for name, begin in fresh.items()}
    links |= begin_earlier({PROBES[name].event for name in names}, weights)
    readings = begin_readings(runs, device) if config.is_controlled else {}
    sums: Accumulation | tuple[()] = ()
    if config.batch is not None:
        with_noise = "noise_scale" in names or config.adaptive is not None
        sums = accumulation.begin(weights, with_noise=with_noise, adaptive=config.adaptive is not None)
    return TrainingState(weights, links, torch.full((runs,), -1, device=device), readings, sums)
