"""Probes of gradients, updates and weights, of the gradient noise, and of the batch and its sources.

A norm is one number per run, ``[r]``; an RMS or a ratio is one per weight tensor and run, by the tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from lab.core.axes import over, per_run_cosine, per_run_dot, per_run_mean, per_run_norm, per_run_rms
from lab.core.hooks import HeldOut, announce, listening
from lab.probes.listener import probe

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


LARGE = 0.8  # of an entry of the update, whose size is about 1 at most once gradients agree for long


def _rms_of_each(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: per_run_rms(tensor) for name, tensor in tensors.items()}


@probe(event="gradients")
def grad_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Global norm of the gradient before clipping."""
    return per_run_norm(gradients.values())


@probe(event="clipped_gradients")
def grad_norm_clipped(gradients: Mapping[str, Tensor]) -> Tensor:
    """Global norm of the gradient after clipping."""
    return per_run_norm(gradients.values())


@probe(event="clipped_gradients")
def grad_rms(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient RMS per tensor, after clipping (Wortsman et al. 2023, fig. 11)."""
    return _rms_of_each(gradients)


@probe(event="direction")
def update_rms(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Update RMS per tensor, before the learning rate and without decay (Wortsman et al. 2023, fig. 13)."""
    return _rms_of_each(directions)


@probe(event="loss_scale")
def loss_scale(scale_r: Tensor) -> Tensor:
    """Factor of the loss in this update's backward pass."""
    return scale_r


@probe(event="parameters")
def param_rms(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameter RMS per tensor, before the update."""
    return _rms_of_each(weights)


@probe(event="parameters")
def head_common_mode(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of the head's norm in its common mode, the mean over the vocabulary, which moves all logits alike.

    From 0 (the columns ``[d]`` of the head add up to zero) to 1 (all are equal), about 1/sqrt(vocabulary) at the start.
    A custom model has no head by this name.
    """
    if "head" not in weights:
        return {}
    head_rdv = weights["head"]
    common_rd = head_rdv.mean(-1) * head_rdv.shape[-1] ** 0.5
    return {"head": per_run_norm([common_rd]) / per_run_norm([head_rdv])}


@probe(event="adam")
def eps_ratio(gradients: Mapping[str, Tensor], eps: Tensor | float) -> dict[str, Tensor]:
    """Adam's epsilon over gradient RMS per tensor; above 1 the update shrinks (Wortsman et al. 2023, sec. 3.4)."""
    return {name: eps / rms for name, rms in _rms_of_each(gradients).items()}


@probe(event="direction")
def update_large(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Share of the entries of the update above 0.8, before the learning rate (Molybog et al. 2023, arXiv:2304.09871).

    Adam's entries are about normal with RMS 0.23 if successive gradients are independent, and near 1 if they agree.
    """
    return {name: per_run_mean(_is_large(direction)) for name, direction in directions.items()}


@probe(event="direction")
def update_bimodality(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bimodality coefficient of the update's entries, (skewness^2 + 1) / kurtosis (Sarle; Molybog et al. 2023).

    A normal distribution has 1/3, a uniform one 5/9, two points 1.  It is no alarm by itself: with beta2 = 0.999,
    gradients whose correlation outlasts a hundred steps give an RMS near 1 and still a single mode.  Read it together
    with ``update_rms`` and ``update_large``.  A tensor of equal entries has none (NaN).
    """
    bimodality = dict[str, Tensor]()
    for name, direction in directions.items():
        centred_r = direction - over(per_run_mean(direction), direction)
        square_r, cube_r, fourth_r = (per_run_mean(centred_r**power) for power in (2, 3, 4))
        bimodality[name] = (cube_r.square() / square_r**3 + 1) * square_r.square() / fourth_r
    return bimodality


@probe(event="descent")
def update_descent_cosine(directions: Mapping[str, Tensor], held_out: HeldOut) -> dict[str, Tensor]:
    """Cosine of the update with the descent of the held-out loss, per tensor and of all weights together.

    1 where the update follows the steepest descent, 0 where it is uncorrelated with it (Molybog et al. 2023).  The
    update is taken before learning rate and decay, the gradient, with added terms of the loss, at the weights before
    the update, on the slice of held-out text of ``val_loss``.  That slice is small, so its noise brings the cosine
    nearer to zero, by a factor that does not depend on the update.
    """
    return _cosines(directions, held_out.gradients)


@probe(event="adam_direction")
def update_curvature(
    directions: Mapping[str, Tensor], means: Mapping[str, Tensor], beta1: Tensor | float, held_out: HeldOut
) -> Tensor:
    """Curvature of the held-out loss along Adam's update, over the limit of stability; above 1 steps overshoot.

    With the update D = lr u, Adam's preconditioner P (root of the second moment plus epsilon) and its first moment m,
    it is lr uᵀHu / uᵀPu = DᵀHD / Dᵀm over the limit 2 (1 + beta1) / (1 - beta1), which is 38 at beta1 = 0.9: that of
    gradient descent preconditioned by P, with Adam's momentum (Cohen et al. 2022, arXiv:2207.14484).  It is the limit
    2 / lr of Bai et al. 2025 (arXiv:2506.04805), who count momentum and the bias correction of m (left out of Dᵀm) with
    the preconditioner.  HD is the difference of the held-out gradients before and after the step D, so H is the mean
    Hessian along it, and rounded products leave the difference its first digits.  Weight decay does not count.
    """
    steps = held_out.steps(directions)
    before, after = held_out.gradients, held_out.gradients_after(steps)
    bend_r = per_run_dot(steps.values(), [before[name] - after[name] for name in steps])
    limit_r = 2 * (1 + torch.as_tensor(beta1)) / (1 - torch.as_tensor(beta1))
    return bend_r / (per_run_dot(steps.values(), [means[name] for name in steps]) * limit_r.to(bend_r))


@probe(event="successive_gradients")
def grad_lag_cosine(gradients: Mapping[str, Tensor], previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cosine of the gradients of this step and the one before, per tensor and of all weights together.

    Each gradient is of its own batch at the weights of its own step, before clipping: the correlation in time of
    Molybog et al. 2023.  At fixed weights it would be about 1 / (1 + B_simple / B) for batches of B sequences and
    gradients of noise scale B_simple; steps that overshoot make it smaller, or negative.  The first step has none.
    """
    return _cosines(gradients, previous)


@probe(event="initial_parameters")
def distance_from_init(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Distance of each tensor from its initial value, over the norm of that value, after the update.

    Infinite for a tensor that began at zero and has moved, NaN while it has not.
    """
    distances = {name: per_run_norm([weight - initial[name]]) for name, weight in weights.items()}
    return {name: distance_r / per_run_norm([initial[name]]) for name, distance_r in distances.items()}


def _cosines(firsts: Mapping[str, Tensor], seconds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    cosines = {name: per_run_cosine([first], [seconds[name]]) for name, first in firsts.items()}
    return {**cosines, "": per_run_cosine(list(firsts.values()), [seconds[name] for name in firsts])}


def _is_large(direction: Tensor) -> Tensor:
    """1 or 0, and NaN where an entry is not a number."""
    return torch.where(direction.isnan(), direction, (direction.abs() > LARGE).to(direction.dtype))


@probe(event="noise")
def noise_scale(noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Trace of the gradient's covariance and squared norm of the true gradient, of each group of weights.

    Unbiased, from all micro-batches of the steps since the last measurement (McCandlish et al. 2018, app. A.1).
    The noise scale is the ratio of their averages; its unit is a sequence.
    """
    steps_r = noise["steps"]
    return {name: sum_r / steps_r for name, sum_r in noise.items() if name != "steps"}


@probe(event="batch")
def batch(sequences_r: Tensor, tokens_r: Tensor) -> dict[str, Tensor]:
    """Sequences of the update, and tokens seen before it."""
    return {"sequences": sequences_r, "tokens": tokens_r}


@probe(event="sources")
def source_rows(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Windows of the update that are of each source of a mixture, by its name; of other data there is none."""
    return rows
