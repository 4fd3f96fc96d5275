"""Links of the learning rate and of weight decay; whether decay stands before or after the peak decides its form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lab.core.axes import over, per_run_mean, per_run_norm, per_run_rms
from lab.core.registry import LINKS
from lab.core.roles import MATRICES, Role
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors
from lab.optim.schedule import Constant

SMALLEST_RMS = 1e-3
FEWEST_AGREEING = 1e-3  # share of the entries by which a cautious update is divided at least


@LINKS.register("peak")
@dataclass(frozen=True)
class Peak(Link):
    """Multiply by the peak learning rate and the parametrization's multiplier for that tensor."""

    takes: ClassVar = ("gradient", "direction")
    makes: ClassVar = "step"
    lr: PerRun = bounded(above=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(self.lr * now.lr_factor[name], u) for name, u in updates.items()}


@LINKS.register("lr_factor")
@dataclass(frozen=True)
class LRFactor(Link):
    """Multiply by ``lr_factor``: 1, but for roles with a number of their own, whose rate follows a sweep's."""

    takes: ClassVar = ("direction", "step")
    lr_factor: PerRun = bounded(above=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(self.lr_factor, u) for name, u in updates.items()}


@LINKS.register("rms_scale")
@dataclass(frozen=True)
class RMSScale(Link):
    """Multiply by the RMS of the weight, at least 1e-3, so that the LR is relative (Shazeer & Stern 2018, sec. 8)."""

    takes: ClassVar = ("direction", "step")

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        rms = {name: per_run_rms(now.weights[name]).clamp(min=SMALLEST_RMS) for name in updates}
        return {name: u * over(rms[name], u) for name, u in updates.items()}


@LINKS.register("to_weight_norm")
@dataclass(frozen=True)
class ToWeightNorm(Link):
    """Scale the update of each of the blocks' matrices to the norm of the matrix, so that the LR is relative.

    With ``keep_norm`` at the end of the chain this is the hyperball step: the learning rate is about the angle by which
    a matrix turns.
    """

    takes: ClassVar = ("direction",)
    roles: ClassVar = MATRICES

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        scaled = {}
        for name, u in updates.items():
            norm_r, weight_r = per_run_norm([u]), per_run_norm([now.weights[name]])
            scaled[name] = u * over(torch.where(norm_r == 0, 0.0, weight_r / norm_r), u)
        return scaled


@LINKS.register("cautious")
@dataclass(frozen=True)
class Cautious(Link):
    """Leave out entries of the update against the present gradient, and enlarge the others (arXiv:2411.16085, alg. 2).

    They are divided by their share in the tensor, 1e-3 at least.
    """

    takes: ClassVar = ("direction", "step")

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        kept = {}
        for name, u in updates.items():
            is_uphill = u * now.gradients[name] <= 0
            share_r = per_run_mean(torch.where(is_uphill, 0.0, torch.ones_like(u))).clamp(min=FEWEST_AGREEING)
            kept[name] = torch.where(is_uphill, 0.0, u / over(share_r, u))
        return kept


@LINKS.register("schedule")
@dataclass(frozen=True)
class Schedule(Link):
    """Multiply by the schedule's shape."""

    takes: ClassVar = ("step",)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        return {name: u * over(now.shape_r, u) for name, u in updates.items()}


FEED_A_NORM = (*MATRICES, Role.EMBEDDING)  # the residual stream into which they write is normalized before use


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


@LINKS.register("decay_cautious")
@dataclass(frozen=True)
class CautiousDecay(Decay):
    """As ``decay``, but only of those entries that the update moves towards zero (arXiv:2510.12402)."""

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        decayed = {}
        for name, u in updates.items():
            weight = now.weights[name]
            decayed[name] = torch.where(u * weight < 0, u, u + weight * over(self.weight_decay, u))
        return decayed


@LINKS.register("decay_corrected")
@dataclass(frozen=True)
class CorrectedDecay(Decay):
    """As ``decay``, but of weights that feed a norm once more times the schedule (AdamC, arXiv:2506.02285).

    So the ratio of gradient norm to weight norm settles at the same value whatever the schedule, and gradients do not
    grow at the end.  Matrices of the blocks and embeddings feed a norm; head, gains and biases decay as usual.
    """

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        corrected_r = self.weight_decay * now.shape_r
        decays = {name: corrected_r if now.roles[name] in FEED_A_NORM else self.weight_decay for name in updates}
        return {name: u + now.weights[name] * over(decays[name], u) for name, u in updates.items()}

    def objection(self, config: Any) -> str | None:
        if isinstance(config.schedule.entry, Constant):
            return "multiplies decay by a schedule that stays at its peak; say schedule=cosine, or use 'decay'"
        return None


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
