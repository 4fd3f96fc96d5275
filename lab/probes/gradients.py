"""Gradients of held-out text, to which probes compare those of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from lab.core.axes import over
from lab.core.hooks import listening

Tensors = dict[str, Tensor]


class HeldOutLoss:
    """Gradients of the loss on held-out windows, computed where a probe asks for them.

    Args:
        gradients_of: gradients, by weight, and loss of weights and windows ``[r b t+1]``.
        weights: before the update.
        windows_rbt: the held-out windows, the same for all runs.
        rates: the learning rate ``[r]`` of each weight at this step, as a function of its name.
    """

    def __init__(
        self,
        gradients_of: Callable[[Tensors, Tensor], tuple[Tensors, Tensor]],
        weights: Tensors,
        windows_rbt: Tensor,
        rates: Callable[[str], Tensor | float],
    ) -> None:
        self.gradients_of, self.weights, self.windows_rbt, self.rates = gradients_of, weights, windows_rbt, rates

    @cached_property
    def gradients(self) -> Tensors:
        """The gradient at the weights, computed once for several probes."""
        return self._gradients(self.weights)

    def steps(self, directions: Mapping[str, Tensor]) -> Tensors:
        """Multiply directions by their learning rates: the amounts that an update subtracts from the weights."""
        return {name: direction * over(self.rates(name), direction) for name, direction in directions.items()}

    def gradients_after(self, steps: Mapping[str, Tensor]) -> Tensors:
        """The gradient at the weights less these steps."""
        return self._gradients({name: weight - steps[name] for name, weight in self.weights.items()})

    def _gradients(self, weights: Tensors) -> Tensors:
        # what the passes announce is not of the step
        with torch.enable_grad(), listening(None):
            return self.gradients_of(weights, self.windows_rbt)[0]
