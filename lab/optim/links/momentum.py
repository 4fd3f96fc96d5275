"""Links that make a direction from one moment of the gradient, or none, and links that evaluate averaged weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.core.axes import over
from lab.core.registry import LINKS
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors, average, per_run
from lab.optim.schedule import Constant


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
    keeps: ClassVar = ("sum",)
    momentum: PerRun = bounded(at_least=0, below=1)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        for name, gradient in updates.items():
            state[f"sum.{name}"].mul_(over(self.momentum, gradient)).add_(gradient)
        return {name: state[f"sum.{name}"].clone() for name in updates}


@LINKS.register("lion")
@dataclass(frozen=True)
class Lion(Link):
    """The sign of ``beta1`` m + (1 - ``beta1``) g, where m averages gradients with ``beta2`` (Chen et al. 2023).

    Its RMS is 1 whatever the gradient, several times Adam's, so its learning rate is 3 to 10 times lower
    (arXiv:2302.06675, sec. 5).
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    keeps: ClassVar = ("mean",)
    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        direction = {}
        for name, gradient in updates.items():
            mean = state[f"mean.{name}"]
            mixed = mean * over(self.beta1, mean) + gradient * over(1 - self.beta1, mean)
            direction[name] = torch.where(mixed.isnan(), mixed, mixed.sign())  # the sign of NaN is 0
            average(mean, gradient, self.beta2)
        return direction


@LINKS.register("schedule_free")
@dataclass(frozen=True)
class ScheduleFree(Link):
    """Train between a fast sequence z and its average x, and evaluate x (Defazio et al. 2024, arXiv:2405.15682).

    The weights are y = (1 - b) z + b x with b = ``interpolation``; each step, taken from the gradient at y, moves z.
    Then x moves to z by the share of this step's squared learning rate, the largest so far, in the sum of all.  It
    stands for momentum, so the direction has none, and for a schedule, of which a warm-up is left.
    """

    takes: ClassVar = ("step",)
    needs_whole_weights: ClassVar = True
    interpolation: PerRun = bounded(at_least=0, at_most=1)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        sequences = {f"{which}.{name}": w.detach().clone() for name, w in weights.items() for which in ("fast", "mean")}
        return {"largest": per_run(weights), "sum": per_run(weights), **sequences}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        largest_r, sum_r = state["largest"], state["sum"]
        largest_r.copy_(torch.maximum(largest_r, now.shape_r.to(largest_r)))
        sum_r.add_(largest_r.square())
        share_r = torch.where(sum_r == 0, 0.0, largest_r.square() / sum_r)
        steps = {}
        for name, step in updates.items():
            fast, mean = state[f"fast.{name}"], state[f"mean.{name}"]
            fast.sub_(step)
            # by differences, so that nothing moves while both are equal
            mean.add_((fast - mean) * over(share_r, mean))
            steps[name] = now.weights[name] - (mean + (fast - mean) * over(1 - self.interpolation, mean))
        return steps

    def evaluated(self, state: Tensors) -> Tensors:
        """The averages x."""
        return {name.removeprefix("mean."): mean for name, mean in state.items() if name.startswith("mean.")}

    def objection(self, config: Any) -> str | None:
        if not isinstance(config.schedule.entry, Constant):
            return f"averages in place of a schedule, and schedule={config.schedule.name} decays; say schedule=constant"
        return None
