"""Gradients of single examples, and the gradient noise that they tell exactly."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lab.core.distributed import gradients
from lab.model.loss import losses
from lab.training.fleet import Fleet


def example_gradients(fleet: Fleet, weights: Mapping[str, Tensor], windows_nt: Tensor) -> dict[str, Tensor]:
    """Gradient of the mean loss of each window ``[n ...]``, all in one backward pass, for small models.

    Runs do not see one another, so each example takes the place of a run with the same weights.

    Args:
        fleet: of one run, in one process.
        weights: of the run, with its leading axis of one.
        windows_nt: tokens, a window per example.
    """
    assert fleet.runs == 1, "examples take the place of runs"
    n = len(windows_nt)
    copies = {name: weight.detach().expand(n, *weight.shape[1:]).requires_grad_() for name, weight in weights.items()}
    logits_n1tv, hidden_n1td = fleet.forward(copies, windows_nt[:, None, :-1])
    loss_n, _ = losses(logits_n1tv, windows_nt[:, None, 1:], fleet.terms, hidden_n1td)
    return gradients(loss_n, copies)


def example_noise(fleet: Fleet, weights: Mapping[str, Tensor], windows_nt: Tensor) -> tuple[float, float]:
    """Trace of the covariance of an example's gradient, and squared norm of the true gradient, both unbiased.

    All micro-batches of these windows have these values on average, whatever their size; ``accumulation.add_noise``
    estimates them from the micro-batches of a step.
    """
    square, mean_square, n = 0.0, 0.0, len(windows_nt)
    for gradient_n in example_gradients(fleet, weights, windows_nt).values():
        square += float(gradient_n.square().sum()) / n
        mean_square += float(gradient_n.mean(0).square().sum())
    trace = (square - mean_square) * n / (n - 1)
    return trace, mean_square - trace / n
