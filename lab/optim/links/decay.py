"""Links of weight decay; their place in the chain says whether the learning rate multiplies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lab.core.axes import over
from lab.core.registry import LINKS
from lab.core.roles import MATRICES, Role
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors
from lab.optim.schedule import Constant

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
