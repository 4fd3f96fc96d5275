"""Links that make a direction from moments of the gradient: Adam and its kin."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lab.core.axes import in_whole_vectors, over, per_run_rms, select_per_run
from lab.core.hooks import announce
from lab.core.registry import LINKS
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors, average, shaped


def _power(base: Tensor | float, exponent: Tensor | float) -> Tensor:
    # as exp of log: compilers keep the result of an exp, and take a pow anew for each vector of each weight
    return (torch.as_tensor(base).log() * exponent).exp()


class TwoMoments(Link):
    """A link with moving averages of the gradient and of its square, which begin at zero."""

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    keeps: ClassVar[tuple[str, ...]] = ("mean", "square")


@LINKS.register("adam")
@dataclass(frozen=True)
class Adam(TwoMoments):
    """Bias-corrected first moment over root of second (Kingma & Ba 2015); moments kept in the weights' precision.

    With epsilon 0, a weight that never had a gradient has direction 0 / 0 = 0.
    """

    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)
    eps: PerRun = bounded(at_least=0)

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
        average(mean, gradient, beta1)
        average(square, gradient.square(), beta2)
        root = (square / over(unbias2, square)).sqrt_().add_(over(eps, square))
        direction[name] = (mean / over(unbias1, mean)).div_(root).masked_fill_(root == 0, 0.0)
    announce("second_moments", "", updates, {name: state[f"square.{name}"] for name in updates}, unbias2)
    if now.held_out:
        means = {name: state[f"mean.{name}"] for name in updates}
        announce("adam_direction", "", direction, means, beta1, now.held_out)
    return direction


@LINKS.register("adam_beta2_ramp")
@dataclass(frozen=True)
class AdamBeta2Ramp(TwoMoments):
    """Adam with beta2 = 1 - k ** -beta2_power at its k-th step, so that v averages ever longer (PaLM, sec. 5.1).

    The first step has beta2 = 0, so the second moment needs no bias correction (Shazeer & Stern 2018, sec. 7.2).
    """

    beta1: PerRun = bounded(at_least=0, below=1)
    beta2_power: PerRun = bounded(above=0, at_most=1)
    eps: PerRun = bounded(at_least=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        power = torch.as_tensor(self.beta2_power)
        beta2 = 1 - _power((now.step + 1).to(power.dtype), -power)
        return _adam(updates, state, now, (self.beta1, beta2), 1.0, self.eps)


@LINKS.register("stable_adam")
@dataclass(frozen=True)
class StableAdam(Adam):
    """Adam whose direction, of each tensor apart, is divided by the RMS of g / sqrt(v) where that is above 1.

    The RMS is large where the second moment lags behind the gradient (StableAdamW, Wortsman et al. 2023,
    arXiv:2304.13013, alg. 2).  v counts with its bias corrected, and as epsilon squared at least.

    There the learning rate is divided, and weight decay with it (as in pytorch_optimizer); here decay, a later link,
    keeps its size.
    """

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        direction, unbias2 = super().__call__(updates, state, now), 1 - _power(self.beta2, now.step + 1)
        for name, gradient in updates.items():
            square = state[f"square.{name}"]
            least = shaped(self.eps, square).square()
            expected = torch.maximum(square / over(unbias2, square), least)
            rms_r = per_run_rms(torch.where(expected == 0, 0.0, gradient / expected.sqrt()))
            direction[name] = direction[name] * over(torch.where(rms_r > 1, 1 / rms_r, 1.0), square)
        return direction


@LINKS.register("adam_atan2")
@dataclass(frozen=True)
class AdamAtan2(TwoMoments):
    """Adam with ``atan2_a`` atan2(m, ``atan2_b`` sqrt(v)) as its direction, which needs no epsilon.

    Both moments are bias-corrected.  No entry exceeds ``atan2_a`` pi / 2, and scaling all gradients changes nothing
    (Everett et al. 2024, arXiv:2407.05872).
    """

    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)
    atan2_a: PerRun = bounded(above=0)
    atan2_b: PerRun = bounded(above=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        unbias1, unbias2 = (1 - _power(beta, now.step + 1) for beta in (self.beta1, self.beta2))
        direction = {}
        for name, gradient in updates.items():
            mean, square = state[f"mean.{name}"], state[f"square.{name}"]
            average(mean, gradient, self.beta1)
            average(square, gradient.square(), self.beta2)
            root = (square / over(unbias2, square)).sqrt_() * over(self.atan2_b, square)
            angle = in_whole_vectors(torch.atan2, mean / over(unbias1, mean), root)
            direction[name] = angle * over(self.atan2_a, mean)
        return direction


@LINKS.register("gi_adam")
@dataclass(frozen=True)
class GIAdam(TwoMoments):
    """Adam whose second moment begins at the first squared gradient instead of zero (Kalra & Barkeshli 2024).

    So it needs no bias correction, and early steps are smaller, as in a warm-up (arXiv:2406.09405).
    """

    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)
    eps: PerRun = bounded(at_least=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        for name, gradient in updates.items():
            square = state[f"square.{name}"]
            square.copy_(select_per_run(now.step == 0, gradient.square(), square))
        return _adam(updates, state, now, (self.beta1, self.beta2), 1.0, self.eps)


@LINKS.register("adopt")
@dataclass(frozen=True)
class Adopt(TwoMoments):
    """Divide each gradient by the second moment *before* it, then average the quotients (arXiv:2411.02853, alg. 2).

    The first step only begins the second moment.  Quotients are clipped at step ** ``adopt_clip_power``; without that a
    spike is divided by a moment that knows nothing of it.  Weight decay, a later link, acts in the first step, too; in
    the authors' package (torch-adopt 0.1) it begins with the second.
    """

    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)
    eps: PerRun = bounded(above=0)
    adopt_clip_power: PerRun = bounded(at_least=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        announce("adam", "", updates, self.eps)
        # a step of 0 has no logarithm, and no use
        limit_r = _power(now.step.clamp(min=1).to(torch.as_tensor(self.adopt_clip_power).dtype), self.adopt_clip_power)
        direction = {}
        for name, gradient in updates.items():
            mean, square = state[f"mean.{name}"], state[f"square.{name}"]
            root = torch.maximum(square.sqrt(), shaped(self.eps, square))
            limit = shaped(limit_r, square)
            quotient = (gradient / root).clamp(-limit, limit)
            averaged = mean * over(self.beta1, mean) + quotient * over(1 - self.beta1, mean)
            mean.copy_(select_per_run(now.step == 0, torch.where(gradient.isnan(), gradient, 0.0), averaged))
            squared = square * over(self.beta2, square) + gradient.square() * over(1 - self.beta2, square)
            square.copy_(select_per_run(now.step == 0, gradient.square(), squared))
            direction[name] = mean.clone()
        return direction


@LINKS.register("ademamix")
@dataclass(frozen=True)
class AdEMAMix(TwoMoments):
    """Adam whose first moment is joined by ``slow_share`` times a far slower one (arXiv:2409.03137, eq. 4).

    The slow average has no bias correction.  In the first ``slow_warmup`` of the run, a share of it, its own
    share rises along a line, and its half-life from the half-life of beta1 to that of beta3.
    """

    keeps: ClassVar = ("mean", "square", "slow")
    beta1: PerRun = bounded(above=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)
    beta3: PerRun = bounded(above=0, below=1)
    eps: PerRun = bounded(at_least=0)
    slow_share: PerRun = bounded(at_least=0)
    slow_warmup: PerRun = bounded(at_least=0, at_most=1)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        announce("adam", "", updates, self.eps)
        unbias1, unbias2 = (1 - _power(beta, now.step + 1) for beta in (self.beta1, self.beta2))
        rising = torch.as_tensor(self.slow_warmup) * now.steps  # steps
        progress_r = ((now.step + 1) / rising.clamp(min=1)).clamp(max=1)
        beta3_r, direction = self.slow_memory(progress_r), {}
        for name, gradient in updates.items():
            mean, square, slow = (state[f"{moment}.{name}"] for moment in self.keeps)
            average(mean, gradient, self.beta1)
            average(square, gradient.square(), self.beta2)
            average(slow, gradient, beta3_r)
            root = (square / over(unbias2, square)).sqrt_().add_(over(self.eps, square))
            both = mean / over(unbias1, mean) + slow * over(self.slow_share * progress_r, slow)
            direction[name] = both.div_(root).masked_fill_(root == 0, 0.0)
        return direction

    def slow_memory(self, progress_r: Tensor) -> Tensor:
        """beta3 ``[r]`` at this share of its warm-up: half-lives, one step shorter, rise along a line."""
        begin, end = (math.log(0.5) / torch.as_tensor(beta).log() - 1 for beta in (self.beta1, self.beta3))
        return (math.log(0.5) / ((1 - progress_r) * begin + progress_r * end + 1)).exp()


@LINKS.register("spam")
@dataclass(frozen=True)
class Spam(TwoMoments):
    """Adam that clips single spiked entries and forgets its moments now and then (SPAM, arXiv:2501.06842).

    An entry whose square is above ``spike_ratio`` times its second moment is clipped to the root of that; not in the
    first ``spike_patience`` steps after a reset.  Every ``reset_every`` steps both moments and their age begin anew,
    and the direction rises along half a cosine for ``reset_warmup`` steps.

    ``pytorch_optimizer`` agrees until the first reset.  Its resets come one update earlier, the bias of its moments is
    corrected by the age of the run, and its rise begins at .01 and takes a step more.
    """

    beta1: PerRun = bounded(at_least=0, below=1)
    beta2: PerRun = bounded(at_least=0, below=1)
    eps: PerRun = bounded(at_least=0)
    spike_ratio: PerRun = bounded(above=0, infinite=True)
    spike_patience: PerRun = bounded(at_least=0)
    reset_every: PerRun = bounded(at_least=1, infinite=True)
    reset_warmup: PerRun = bounded(at_least=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        age_r = torch.remainder(now.step, torch.as_tensor(self.reset_every))
        clips_r = age_r >= self.spike_patience
        clipped = {}
        for name, gradient in updates.items():
            square = state[f"square.{name}"]
            for moment in (state[f"mean.{name}"], square):
                moment.copy_(select_per_run(age_r != 0, moment, 0.0))
            limit = (square * over(self.spike_ratio, square)).sqrt()
            is_spike = (gradient.abs() > limit) & (square > 0)  # an entry without a gradient so far has no scale
            shrunk = torch.where(is_spike, gradient.sign() * limit, gradient)
            clipped[name] = select_per_run(clips_r, shrunk, gradient)
        unbias2 = 1 - _power(self.beta2, age_r + 1)
        direction = _adam(clipped, state, replace(now, step=age_r), (self.beta1, self.beta2), unbias2, self.eps)
        rise_r = 1 - torch.cos(math.pi * ((age_r + 1) / torch.as_tensor(self.reset_warmup).clamp(min=1)).clamp(max=1))
        share_r = torch.where(now.step == age_r, 1.0, rise_r / 2)  # the first moments of all are as usual
        return {name: u * over(share_r, u) for name, u in direction.items()}
