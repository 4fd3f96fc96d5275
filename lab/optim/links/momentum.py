"""Links that make a direction from one moment of the gradient, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lab.core.axes import over
from lab.core.registry import LINKS
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors


@LINKS.register("sgd")
@dataclass(frozen=True)
class SGD(Link):
    """The gradient as it is: stochastic gradient descent (Robbins & Monro 1951)."""

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return dict(updates)


@LINKS.register("momentum")
@dataclass(frozen=True)
class Momentum(Link):
    """The sum of past gradients, one ``k`` steps old times ``momentum ** k`` (Polyak 1964; as in ``torch.optim.SGD``).

    Under constant gradients it grows to 1 / (1 - momentum) times the gradient, so the learning rate is that much larger
    than it says.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    momentum: PerRun = bounded(at_least=0, below=1)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {f"sum.{name}": torch.zeros_like(weight) for name, weight in weights.items()}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        for name, gradient in updates.items():
            state[f"sum.{name}"].mul_(over(self.momentum, gradient)).add_(gradient)
        return {name: state[f"sum.{name}"].clone() for name in updates}


@LINKS.register("lion")
@dataclass(frozen=True)
class Lion(Link):
    """The sign of ``beta1`` m + (1 - ``beta1``) g, where m averages gradients with ``beta2`` (Chen et al. 2023).

    Its RMS is 1 whatever the gradient, several times that of Adam, so its learning rate is 3 to 10 times lower
    (arXiv:2302.06675, sec. 5).
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {f"mean.{name}": torch.zeros_like(weight) for name, weight in weights.items()}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        direction = {}
        for name, gradient in updates.items():
            mean = state[f"mean.{name}"]
            mixed = mean * over(self.beta1, mean) + gradient * over(1 - self.beta1, mean)
            direction[name] = torch.where(mixed.isnan(), mixed, mixed.sign())  # the sign of NaN is 0
            mean.mul_(over(self.beta2, mean)).add_(gradient * over(1 - self.beta2, mean))
        return direction
