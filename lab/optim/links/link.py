"""The interface of a link, and the state of training that it sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.core.axes import over
from lab.core.hooks import HeldOut
from lab.core.roles import Role

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Now:
    """The state of training at a step, as tensors, so that one compiled graph serves all steps.

    Attributes:
        step: updates made before this one, ``[r]`` or one number for all runs.
        weights: of the model, by name.
        shape_r: the schedule's value, the learning rate over its peak.
        lr_factor: the parametrization's multiplier of each tensor's learning rate.
        held_out: the loss on held-out text; without it no probe measures the descent.
        roles: of the tensors, by name (``lab.Role``); a custom model's are unknown, and absent.
        gradients: as the optimizer got them, before clipping.
        measured: what the link made of the announcements of this step's forward pass, by hook point.
        steps: updates of the whole run.
    """

    step: Tensor
    weights: Mapping[str, Tensor]
    shape_r: Tensor
    lr_factor: Mapping[str, float]
    held_out: HeldOut | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int = 0


class Link(ABC):
    """A rule of the chain; ``begin`` gives the tensors a link keeps between steps, which it updates in place.

    Attributes:
        takes: the kinds of updates it may be given: ``gradient``, ``direction``, ``step``.
        makes: the kind it hands on; None is the kind it was given.  A probe of ``direction`` receives this direction.
        roles: of the tensors it acts on; other tensors pass by.  A tensor also passes by while its update is of a kind
            that the link does not take.
        keeps: what it keeps of each weight in a tensor of the same shape, which begins at zero: ``NAME.WEIGHT``.
        events: kinds of announcements of the forward pass that it reads.
        needs_whole_weights: whether it reads a weight as a whole; ``ranks=fsdp`` would give it shards.
    """

    takes: ClassVar[tuple[str, ...]]
    makes: ClassVar[str | None] = None
    roles: ClassVar[tuple[Role, ...]] = tuple(Role)
    keeps: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ()
    needs_whole_weights: ClassVar[bool] = False

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        """Fresh state for the weights it acts on: tensors ``[r ...]`` by names that the link chooses."""
        return {f"{kept}.{name}": torch.zeros_like(weight) for name, weight in weights.items() for kept in self.keeps}

    @abstractmethod
    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        """Return the changed updates, and update the state in place."""

    def observe(self, *announced: Any) -> Tensor:
        """What it keeps ``[r ...]`` of an announcement of a kind in ``events``, until the update of this step."""
        raise NotImplementedError

    def evaluated(self, state: Tensors) -> Tensors:
        """Weights that are evaluated in place of those that are trained, by name."""
        return {}

    def objection(self, config: Any) -> str | None:
        """Why it does nothing in a run with this ``RunConfig``, as a sentence about it; None if it acts."""
        return None


def average(mean: Tensor, value: Tensor, beta: Tensor | float) -> None:
    """Let a value enter an exponential moving average, in place."""
    # products and sums apart: a kernel is free to fuse them in the body of a buffer and not in its tail, and a
    # run's bits must not depend on where in the fleet it stands
    mean.mul_(over(beta, mean)).add_(value * over(1 - beta, mean))


def per_run(weights: Mapping[str, Tensor], value: float = 0.0) -> Tensor:
    """One number per run ``[r]``, in the precision of the weights; every rank holds it whole."""
    first = next(iter(weights.values()))
    return torch.full((len(first),), value, dtype=first.dtype, device=first.device)


def shaped(number_r: Tensor | float, tensor_r: Tensor) -> Tensor:
    """As ``over``, and a tensor in any case."""
    return torch.as_tensor(over(number_r, tensor_r)).to(tensor_r)
