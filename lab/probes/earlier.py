"""Tensors of earlier steps that a fleet keeps for probes: the gradient of the step before, and the initial weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lab.core.hooks import announce

Tensors = dict[str, Tensor]


def begin_earlier(kinds: Collection[str], weights: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """The tensors kept for probes of these announcements, by ``gradient.WEIGHT`` and ``weight.WEIGHT``."""
    earlier: dict[str, Tensors] = {}
    if "successive_gradients" in kinds:
        earlier["previous"] = {f"gradient.{name}": torch.zeros_like(weight) for name, weight in weights.items()}
    if "initial_parameters" in kinds:
        earlier["initial"] = {f"weight.{name}": weight.detach().clone() for name, weight in weights.items()}
    return earlier


@torch.no_grad()
def compare_with_earlier(
    state: Mapping[str, Tensors], weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> None:
    """Announce gradients and weights with the earlier ones, after an update or one left out, and keep the gradients."""
    if "previous" in state:
        before = {name: state["previous"][f"gradient.{name}"] for name in gradients}
        announce("successive_gradients", "", gradients, before)
        for name, gradient in gradients.items():
            before[name].copy_(gradient)
    if "initial" in state:
        announce("initial_parameters", "", weights, {name: state["initial"][f"weight.{name}"] for name in weights})
