"""The noisy quadratic: a loss whose training is known exactly, on which estimators and fits are shown right first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class NoisyQuadratic:
    """Loss ``sum(curvature * theta**2) / 2``; an example's gradient is the true one plus noise of variance ``noise``.

    The expected loss of stochastic gradient descent follows from an exact recursion of mean and variance of each
    coordinate, without sampling (Zhang et al. 2019, arXiv 1907.04164, sec. 2; the losses of McCandlish et al. 2018,
    sec. 2.2).

    Attributes:
        curvature: eigenvalues of the Hessian ``[d]``.
        noise: variance of one example's gradient per coordinate ``[d]``.
        start: initial parameters ``[d]``.
    """

    curvature: Numbers
    noise: Numbers
    start: Numbers

    @classmethod
    def power_law(cls, dimensions: int = 50, power: float = 1.0) -> NoisyQuadratic:
        """Curvature ``i**-power``, noise equal to the curvature, a start at one in each direction."""
        curvature = np.arange(1, dimensions + 1, dtype=float) ** -power
        return cls(curvature, curvature.copy(), np.ones(dimensions))

    def losses(self, lr: float, batch_size: float, steps: int) -> Numbers:
        """Expected loss ``[steps + 1]`` before and after each step of constant learning rate."""
        contraction = 1 - lr * self.curvature
        mean, variance = self.start.copy(), np.zeros_like(self.start)
        losses = np.empty(steps + 1)
        with np.errstate(over="ignore", invalid="ignore"):  # a learning rate beyond 2 / curvature diverges
            for step in range(steps + 1):
                losses[step] = (self.curvature * (mean**2 + variance)).sum() / 2
                mean = contraction * mean
                variance = contraction**2 * variance + lr**2 * self.noise / batch_size
        return losses

    def steps_to(self, target: float, lr: float, batch_size: float, most: int = 10_000) -> int | None:
        """Steps until the expected loss is at most ``target``; None if ``most`` steps do not reach it."""
        reached = np.flatnonzero(self.losses(lr, batch_size, most) <= target)
        return int(reached[0]) if len(reached) else None

    def noise_scale(self, theta: Numbers) -> float:
        """The simple noise scale at ``theta``: trace of the noise over the squared norm of the gradient."""
        return float(self.noise.sum() / ((self.curvature * theta) ** 2).sum())

    def critical_noise_scale(self, theta: Numbers) -> float:
        """B_noise at ``theta``: both weighed by the curvature (McCandlish et al. 2018, sec. 2.2)."""
        gradient = self.curvature * theta
        return float((self.curvature * self.noise).sum() / (self.curvature * gradient**2).sum())

    def greedy(
        self, batch: Callable[[float], float], fraction: float, target: float
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Descend to the expected loss ``target``, each step this fraction of the best one for its batch.

        The smaller the fraction, the nearer the path is to the one that McCandlish et al. 2018, sec. 2.3, integrate.

        Args:
            batch: sequences of a step, given the noise scale before it.
            fraction: of the best learning rate, below 1.
            target: below the loss at the start.

        Returns:
            Per step ``[n]``: its batch, the noise scale before it, and its progress in steps of an infinite batch.
        """
        mean, variance = self.start.copy(), np.zeros_like(self.start)
        steps = []
        while (self.curvature * (mean**2 + variance)).sum() / 2 > target:
            theta = np.sqrt(mean**2 + variance)
            noise_scale = self.critical_noise_scale(theta)
            size = batch(noise_scale)
            steps.append((size, noise_scale, 1 / (1 + noise_scale / size)))
            lr = fraction * self.best_step(theta, size)[0]
            mean = (1 - lr * self.curvature) * mean
            variance = (1 - lr * self.curvature) ** 2 * variance + lr**2 * self.noise / size
        batch_n, noise_n, progress_n = np.array(steps).T
        return batch_n, noise_n, progress_n

    def best_step(self, theta: Numbers, batch_size: float) -> tuple[float, float]:
        """Learning rate of the best single step from ``theta``, and the expected fall of the loss in it."""
        gradient = self.curvature * theta
        squared = (gradient**2).sum()
        bend = (self.curvature * gradient**2).sum() + (self.curvature * self.noise).sum() / batch_size
        return float(squared / bend), float(squared**2 / bend / 2)
