"""Probes of gradients, updates and weights, of the gradient noise, and of the batch.

A norm is one number per run, ``[r]``; an RMS or a ratio is one per weight tensor and run, by the tensor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from lab.core.axes import over, per_run_dot, per_run_norm, per_run_rms
from lab.core.hooks import HeldOut, announce, listening
from lab.probes.listener import probe, share

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


OUT_OF_LINE = 3.0  # roots of the second moment


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


@probe(event="clipped_gradients", is_root=True)
def grad_rms(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradient RMS per tensor, after clipping (Wortsman et al. 2023, fig. 11)."""
    return _rms_of_each(gradients)


@probe(event="direction", is_root=True, largest_tensor=True)
def update_rms(directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Update RMS per tensor, before the learning rate and without decay (Wortsman et al. 2023, fig. 13)."""
    return _rms_of_each(directions)


@probe(event="loss_scale")
def loss_scale(scale_r: Tensor) -> Tensor:
    """Factor of the loss in this update's backward pass."""
    return scale_r


@probe(event="parameters", is_root=True)
def param_rms(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameter RMS per tensor, before the update."""
    return _rms_of_each(weights)


@probe(event="parameters", falls=True)
def stable_rank(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Squared Frobenius norm of each matrix over its squared spectral norm, the least rank that its norm allows."""
    ranks = dict[str, Tensor]()
    for name, weight_r in weights.items():
        if weight_r.ndim == 3:
            energy_rs = _singular_values(weight_r).square()
            ranks[name] = energy_rs.sum(-1) / energy_rs[:, 0]
    return ranks


@probe(event="parameters", falls=True)
def query_key_entropy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entropy of the squared singular values of W_Q W_K^T over their sum, of each block, nats.

    It falls where few directions decide all scores.  A custom model has no matrices by these names.
    """
    entropies = dict[str, Tensor]()
    for name, query_rdo in weights.items():
        block, _, part = name.partition(".")
        key_rdo = weights.get(f"{block}.attention.key")
        if part == "attention.query" and key_rdo is not None and key_rdo.shape == query_rdo.shape:
            energy_rs = _singular_values(query_rdo @ key_rdo.transpose(-1, -2)).square()
            entropies[block] = torch.special.entr(energy_rs / energy_rs.sum(-1, keepdim=True)).sum(-1)
    return entropies


def _singular_values(matrix_rio: Tensor) -> Tensor:
    """The singular values ``[r s]`` of each run, in falling order; NaN where a matrix is not finite."""
    finite_r = matrix_rio.isfinite().all(-1).all(-1)
    values_rs = torch.linalg.svdvals(torch.where(finite_r[:, None, None], matrix_rio, 0.0))
    return torch.where(finite_r[:, None], values_rs, torch.nan)


@probe(event="adam", largest_tensor=True)
def eps_ratio(gradients: Mapping[str, Tensor], eps: Tensor | float) -> dict[str, Tensor]:
    """Adam's epsilon over gradient RMS per tensor; above 1 the update shrinks (Wortsman et al. 2023, sec. 3.4)."""
    return {name: eps / rms for name, rms in _rms_of_each(gradients).items()}


@probe(event="adam")
def grad_below_eps(gradients: Mapping[str, Tensor], eps: Tensor | float) -> dict[str, Tensor]:
    """Share of each tensor's gradient below Adam's epsilon, where epsilon decides the size of the update."""
    return {name: share(gradient.abs() < over(eps, gradient), gradient) for name, gradient in gradients.items()}


@probe(event="second_moments", is_root=True, largest_tensor=True)
def moment_ratio(
    gradients: Mapping[str, Tensor], squares: Mapping[str, Tensor], unbias: Tensor | float
) -> dict[str, Tensor]:
    """RMS of the gradient over the root of Adam's second moment, per tensor (Wortsman et al. 2023, arXiv:2304.13013).

    About 1; above 2 the second moment lags behind the gradient.  An entry without a gradient so far counts as 0.
    """
    return {name: per_run_rms(_over_moment(gradient, squares[name], unbias)) for name, gradient in gradients.items()}


@probe(event="second_moments")
def moment_outliers(
    gradients: Mapping[str, Tensor], squares: Mapping[str, Tensor], unbias: Tensor | float
) -> dict[str, Tensor]:
    """Share of each tensor's gradient beyond three roots of Adam's second moment; 0.003 at most if it is normal."""
    ratios = {name: _over_moment(gradient, squares[name], unbias) for name, gradient in gradients.items()}
    return {name: share(ratio.abs() > OUT_OF_LINE, ratio) for name, ratio in ratios.items()}


def _over_moment(gradient: Tensor, square: Tensor, unbias: Tensor | float) -> Tensor:
    root = (square / over(unbias, square)).sqrt_()
    return (gradient / root).masked_fill_(root == 0, 0.0)


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
