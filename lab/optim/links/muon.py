"""Muon: momentum of matrices, made orthogonal by matrix products for all runs at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lab.core.axes import nonzero, over, per_run_norm
from lab.core.registry import LINKS
from lab.core.roles import MATRICES
from lab.core.schema import PerRun, bounded, one_of
from lab.optim.links.link import Link, Now, Tensors, average

Coefficients = tuple[float, float, float]
# Of each step X <- a X + (b A + c A^2) X with A = X X^T.  Where singular values end that began at 0.005 or above:
NEWTON_SCHULZ: dict[str, tuple[Coefficients, ...]] = {
    "original": ((3.4445, -4.7750, 2.0315),) * 5,  # 0.68 to 1.15 (Jordan et al. 2024)
    "twelve": ((2.0, -1.5, 0.5),) * 12,  # 1 (modded-nanogpt, baseline of track 3)
    "quintic": (  # 0.98 to 1.11
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (  # 0.86 to 1.14 (Amsel et al. 2025, as in modded-nanogpt)
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
}
TOGETHER_ON_CPU = 2**18  # entries of the matrices in a batch
MARGIN = {"polar_express": 1.02}  # of the norm by which a matrix is divided first


@LINKS.register("muon")
@dataclass(frozen=True)
class Muon(Link):
    """Nesterov momentum of the blocks' matrices, made orthogonal by ``newton_schulz`` (Jordan et al. 2024).

    All singular values become about 1.  Other weights pass by: a link after it, such as ``adam``, makes their
    direction.  ``lr_scale`` multiplies the direction of a matrix with so many inputs and outputs by

    - ``match_rms_adamw``: 0.2 sqrt(max(in, out)), whose RMS is 0.2 as AdamW's, so that AdamW's learning rate and decay
      carry over (Liu et al. 2025, arXiv:2502.16982, sec. 2.2);
    - ``original``: sqrt(max(1, out / in));
    - ``spectral``: sqrt(out / in) (Pethick et al. 2025, arXiv:2502.07529).
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "direction"
    roles: ClassVar = MATRICES
    keeps: ClassVar = ("mean",)
    needs_whole_weights: ClassVar = True
    momentum: PerRun = bounded(at_least=0, below=1)
    newton_schulz: str = one_of(*NEWTON_SCHULZ)
    lr_scale: str = one_of("match_rms_adamw", "original", "spectral")

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        mixed = {}
        for name, gradient in updates.items():
            mean = state[f"mean.{name}"]
            average(mean, gradient, self.momentum)
            mixed[name] = gradient * over(1 - self.momentum, mean) + mean * over(self.momentum, mean)
        directions = orthogonalize(list(mixed.values()), self.newton_schulz)
        return {
            name: direction * self._scale(*direction.shape[1:])
            for name, direction in zip(mixed, directions, strict=True)
        }

    def _scale(self, inputs: int, outputs: int) -> float:
        if self.lr_scale == "match_rms_adamw":
            return 0.2 * math.sqrt(max(inputs, outputs))
        ratio = outputs / inputs
        return math.sqrt(max(1.0, ratio) if self.lr_scale == "original" else ratio)


@LINKS.register("normalize_neurons")
@dataclass(frozen=True)
class NormalizeNeurons(Link):
    """Divide each neuron's direction by the root of its running mean square, and keep the norm of the whole matrix.

    A neuron is an output of a matrix.  After ``muon`` this is NorMuon (Li et al. 2025, arXiv:2510.05491, alg. 1), whose
    rate of the running mean is ``neuron_beta2``.
    """

    takes: ClassVar = ("direction",)
    roles: ClassVar = MATRICES
    needs_whole_weights: ClassVar = True
    neuron_beta2: PerRun = bounded(at_least=0, below=1)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {f"square.{name}": torch.zeros_like(weight[:, :1]) for name, weight in weights.items()}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        normalized = {}
        for name, direction in updates.items():
            square_r1o, beta2 = state[f"square.{name}"], over(self.neuron_beta2, direction)
            square_r1o.mul_(beta2).add_(direction.square().mean(1, keepdim=True) * (1 - beta2))
            even = direction / nonzero(square_r1o).sqrt()
            norm_r, even_norm_r = per_run_norm([direction]), per_run_norm([even])
            normalized[name] = even * over(norm_r / nonzero(even_norm_r), even)
        return normalized


def orthogonalize(matrices: Sequence[Tensor], preset: str) -> list[Tensor]:
    """Bring the singular values of matrices ``[r i o]`` near 1 by Newton-Schulz steps.

    Those of one shape, lying or standing, are multiplied in one batch, on a CPU as far as its caches reach.  A
    matrix of zeros stays zero.

    Args:
        matrices: each of all runs.
        preset: one of ``NEWTON_SCHULZ``.
    """
    lying = [matrix if matrix.shape[1] <= matrix.shape[2] else matrix.transpose(1, 2) for matrix in matrices]
    orthogonal: list[Tensor] = list(lying)
    for shape in dict.fromkeys(matrix.shape for matrix in lying):
        indices = [index for index, matrix in enumerate(lying) if matrix.shape == shape]
        most = max(1, TOGETHER_ON_CPU // shape.numel()) if matrices[0].device.type == "cpu" else len(indices)
        for some in (indices[start : start + most] for start in range(0, len(indices), most)):
            batch = _newton_schulz(torch.cat([lying[index] for index in some]), preset)
            for index, part in zip(some, torch.split(batch, shape[0]), strict=True):
                orthogonal[index] = part
    return [
        matrix if before.shape[1] <= before.shape[2] else matrix.transpose(1, 2).contiguous()
        for matrix, before in zip(orthogonal, matrices, strict=True)
    ]


def _newton_schulz(x_nij: Tensor, preset: str) -> Tensor:
    """The steps of a preset on matrices ``[n i j]`` with i <= j."""
    norm_n = per_run_norm([x_nij]) * MARGIN.get(preset, 1.0)
    x_nij = x_nij / over(nonzero(norm_n), x_nij)
    for a, b, c in NEWTON_SCHULZ[preset]:
        square_nii = torch.matmul(x_nij, x_nij.transpose(1, 2))
        mixed_nii = torch.matmul(square_nii, square_nii).mul_(c).add_(square_nii.mul_(b))
        x_nij = torch.matmul(mixed_nii, x_nij).add_(x_nij.mul_(a))
    return x_nij
