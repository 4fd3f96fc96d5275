"""The noise of gradients of single examples, to which the estimates from micro-batches are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

GradientsOf = Callable[[dict[str, Tensor], Tensor], tuple[Mapping[str, Tensor], Tensor]]


def example_noise(gradients_of: GradientsOf, weights: Mapping[str, Tensor], windows_nt: Tensor) -> tuple[float, float]:
    """Trace of the covariance of an example's gradient, and squared norm of the true gradient, both unbiased.

    ``add_noise`` estimates them from micro-batches: its mean over all ways to split these windows is exactly this.

    Args:
        gradients_of: gradients and loss of weights ``[r ...]`` and windows ``[r b t+1]``.
        weights: of one run, with the leading axis of one; runs do not see one another, so each example takes a run.
        windows_nt: tokens, a window per example.
    """
    copies = {name: weight.expand(len(windows_nt), *weight.shape[1:]) for name, weight in weights.items()}
    gradients, _ = gradients_of(copies, windows_nt.unsqueeze(1))
    square, mean_square, n = 0.0, 0.0, len(windows_nt)
    for gradient_n in gradients.values():
        square += float(gradient_n.square().sum()) / n
        mean_square += float(gradient_n.mean(0).square().sum())
    trace = (square - mean_square) * n / (n - 1)
    return trace, mean_square - trace / n
