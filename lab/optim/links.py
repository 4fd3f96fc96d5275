"""Links of an optimizer: clipping, Adam, weight decay, the learning rate, its schedule; each a rule over a whole fleet.

A link reads its numbers by field name out of ``conf/optimizer/NAME.yaml``.  Updates pass through the chain as a
``gradient``, then as a ``direction`` (the rule's own step of about unit size), then as the ``step`` that is subtracted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lab.core.axes import over, per_run_norm, per_run_rms
from lab.core.hooks import HeldOut, announce
from lab.core.registry import LINKS
from lab.core.schema import PerRun, bounded

SMALLEST_RMS = 1e-3
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Now:
    """The state of training at a step: weights, the schedule's value ``[r]``, and each tensor's LR multiplier.

    The step is a tensor without axes, so that one compiled graph serves all steps.  Without ``held_out`` no probe
    measures the descent.
    """

    step: Tensor
    weights: Mapping[str, Tensor]
    shape_r: Tensor
    lr_factor: Mapping[str, float]
    held_out: HeldOut | None = None


class Link(ABC):
    """A link without memory; ``begin`` gives the tensors a link keeps between steps, which it updates in place.

    Attributes:
        takes: the kinds of updates it may be given: ``gradient``, ``direction``, ``step``.
        makes: the kind it hands on; None is the kind it was given.  A probe of ``direction`` receives this direction.
    """

    takes: ClassVar[tuple[str, ...]]
    makes: ClassVar[str | None] = None

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        """Fresh state: tensors ``[r ...]`` by names that the link chooses."""
        return {}

    @abstractmethod
    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        """Return the changed updates, and update the state in place."""


@LINKS.register("clip")
@dataclass(frozen=True)
class Clip(Link):
    """Scale a run's whole gradient down to norm ``clip`` (Pascanu et al. 2013); infinity switches it off."""

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    clip: PerRun = bounded(above=0, infinite=True)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        norm_r = per_run_norm(updates.values())
        keep_r = torch.where(norm_r > self.clip, self.clip / norm_r, 1.0)
        return {name: gradient * over(keep_r, gradient) for name, gradient in updates.items()}


@LINKS.register("clip_relative")
@dataclass(frozen=True)
class ClipRelative(Link):
    """Scale a run's gradient down to ``clip_ratio`` times a moving average of its norm, so that a burst is clipped.

    The average begins at the norm of the first gradient.  Clipped norms enter it, so that a burst raises it slowly.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    clip_ratio: PerRun = bounded(above=0, infinite=True)
    clip_memory: PerRun = bounded(at_least=0, below=1)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        first = next(iter(weights.values()))
        return {"norm": first.new_zeros(len(first))}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        norm_r, average_r = per_run_norm(updates.values()), state["norm"]
        average_r.copy_(torch.where(average_r == 0, norm_r, average_r))
        limit_r = average_r * over(self.clip_ratio, average_r)
        is_clipped_r = norm_r > limit_r
        clipped_r = torch.where(is_clipped_r, limit_r, norm_r)
        keep_r = torch.where(is_clipped_r, limit_r / norm_r, 1.0)
        average_r.mul_(over(self.clip_memory, average_r)).add_(clipped_r * over(1 - self.clip_memory, average_r))
        return {name: gradient * over(keep_r, gradient) for name, gradient in updates.items()}


@LINKS.register("shrink_embedding")
@dataclass(frozen=True)
class ShrinkEmbedding(Link):
    """Multiply the embedding's gradient by ``shrink``, which rises to 1 after ``shrink_until`` steps (GLM-130B's log).

    It rises along a line of ``shrink_ramp`` steps.  A custom model has no weight called ``embedding``.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    shrink: PerRun = bounded(at_least=0)
    shrink_until: PerRun = bounded(at_least=0, infinite=True)
    shrink_ramp: PerRun = bounded(at_least=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        begin, ramp, least = (torch.as_tensor(each) for each in (self.shrink_until, self.shrink_ramp, self.shrink))
        progress = ((now.step - begin) / ramp.clamp(min=1)).clamp(0, 1)
        factor = least + (1 - least) * progress
        return {name: g * over(factor, g) if name == "embedding" else g for name, g in updates.items()}


def _power(base: Tensor | float, exponent: Tensor | float) -> Tensor:
    # as exp of log: compilers keep the result of an exp, and take a pow anew for each vector of each weight
    return (torch.as_tensor(base).log() * exponent).exp()


@LINKS.register("adam")
@dataclass(frozen=True)
class Adam(Link):
    """Bias-corrected first moment over root of second (Kingma & Ba 2015); moments kept in the weights' precision.

    With epsilon 0, a weight that never had a gradient has direction 0 / 0 = 0.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)
    eps: PerRun = bounded(at_least=0)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {f"{moment}.{name}": torch.zeros_like(w) for name, w in weights.items() for moment in ("mean", "square")}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        unbias2 = 1 - _power(self.beta2, now.step + 1)
        return _adam(updates, state, now, (self.beta1, self.beta2), unbias2, self.eps)


def _adam(
    updates: Tensors,
    state: Tensors,
    now: Now,
    betas: tuple[Tensor | float, Tensor | float],
    unbias2: Tensor | float,
    eps: Tensor | float,
) -> Tensors:
    """Update both moments and return Adam's direction."""
    announce("adam", "", updates, eps)
    (beta1, beta2), unbias1, direction = betas, 1 - _power(betas[0], now.step + 1), {}
    for name, gradient in updates.items():
        mean, square = state[f"mean.{name}"], state[f"square.{name}"]
        # products and sums apart: a kernel is free to fuse them in the body of a buffer and not in its tail, and a
        # run's bits must not depend on where in the fleet it stands
        mean.mul_(over(beta1, mean)).add_(gradient * over(1 - beta1, mean))
        square.mul_(over(beta2, square)).add_(gradient.square() * over(1 - beta2, square))
        root = (square / over(unbias2, square)).sqrt_().add_(over(eps, square))
        direction[name] = (mean / over(unbias1, mean)).div_(root).masked_fill_(root == 0, 0.0)
    if now.held_out:
        means = {name: state[f"mean.{name}"] for name in updates}
        announce("adam_direction", "", direction, means, beta1, now.held_out)
    return direction


@LINKS.register("adam_beta2_ramp")
@dataclass(frozen=True)
class AdamBeta2Ramp(Link):
    """Adam with beta2 = 1 - k ** -beta2_power at its k-th step, so that v averages ever longer (PaLM, sec. 5.1).

    The first step has beta2 = 0, so the second moment needs no bias correction (Shazeer & Stern 2018, sec. 7.2).
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    beta1: PerRun = bounded(at_least=0, below=1)
    beta2_power: PerRun = bounded(above=0, at_most=1)
    eps: PerRun = bounded(at_least=0)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return Adam.begin(self, weights)  # type: ignore[arg-type]

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        power = torch.as_tensor(self.beta2_power)
        beta2 = 1 - _power((now.step + 1).to(power.dtype), -power)
        return _adam(updates, state, now, (self.beta1, beta2), 1.0, self.eps)


@LINKS.register("clip_update")
@dataclass(frozen=True)
class ClipUpdate(Link):
    """Scale the direction of a weight down to RMS ``clip_update``, each weight apart (Shazeer & Stern 2018, sec. 6)."""

    takes: ClassVar = ("direction",)
    clip_update: PerRun = bounded(above=0, infinite=True)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        clipped = {}
        for name, direction in updates.items():
            rms_r = per_run_rms(direction)
            limit_r = over(self.clip_update, rms_r)
            clipped[name] = direction * over(torch.where(rms_r > limit_r, limit_r / rms_r, 1.0), direction)
        return clipped


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


@LINKS.register("decay")
@dataclass(frozen=True)
class Decay(Link):
    """Add ``weight_decay`` times the weight: before the peak LR the decay is coupled to it, after it independent.

    Independent: theta <- theta - s_t (eta Delta + lambda theta); coupled: theta <- theta - s_t eta (Delta + lambda
    theta) (Wortsman et al. 2023, sec. 3.2.2; Loshchilov & Hutter 2019).
    """

    takes: ClassVar = ("direction", "step")
    weight_decay: PerRun = bounded(at_least=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u + now.weights[name] * over(self.weight_decay, u) for name, u in updates.items()}


@LINKS.register("decay_lr_squared")
@dataclass(frozen=True)
class DecayLRSquared(Link):
    """Add the square of the scheduled learning rate times the weight (PaLM, sec. 5.1).

    After the schedule: theta <- theta - s_t eta Delta - (s_t eta)^2 theta.  Links after it multiply the decay, too.
    """

    takes: ClassVar = ("direction", "step")
    lr: PerRun = bounded(above=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        decay_r = (self.lr * now.shape_r).square()
        return {name: u + now.weights[name] * over(decay_r, u) for name, u in updates.items()}


@LINKS.register("peak")
@dataclass(frozen=True)
class Peak(Link):
    """Multiply by the peak learning rate and the parametrization's multiplier for that tensor."""

    takes: ClassVar = ("gradient", "direction")
    makes: ClassVar = "step"
    lr: PerRun = bounded(above=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(self.lr * now.lr_factor[name], u) for name, u in updates.items()}


@LINKS.register("rms_scale")
@dataclass(frozen=True)
class RMSScale(Link):
    """Multiply by the RMS of the weight, at least 1e-3, so that the LR is relative (Shazeer & Stern 2018, sec. 8)."""

    takes: ClassVar = ("direction", "step")

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        rms = {name: per_run_rms(weight).clamp(min=SMALLEST_RMS) for name, weight in now.weights.items()}
        return {name: u * over(rms[name], u) for name, u in updates.items()}


@LINKS.register("schedule")
@dataclass(frozen=True)
class Schedule(Link):
    """Multiply by the schedule's shape."""

    takes: ClassVar = ("step",)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(now.shape_r, u) for name, u in updates.items()}
