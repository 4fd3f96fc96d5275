"""The noise of gradients of single examples, to which the estimates from micro-batches are held."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lab.training.accumulation import GradientsOf, example_gradients


def example_noise(gradients_of: GradientsOf, weights: Mapping[str, Tensor], windows_nt: Tensor) -> tuple[float, float]:
    """Trace of the covariance of an example's gradient, and squared norm of the true gradient, both unbiased.

    ``add_noise`` estimates them from micro-batches: its mean over all ways to split these windows is exactly this.
    Arguments are as in ``example_gradients``.
    """
    square, mean_square, n = 0.0, 0.0, len(windows_nt)
    for gradient_n in example_gradients(gradients_of, weights, windows_nt).values():
        square += float(gradient_n.square().sum()) / n
        mean_square += float(gradient_n.mean(0).square().sum())
    trace = (square - mean_square) * n / (n - 1)
    return trace, mean_square - trace / n
