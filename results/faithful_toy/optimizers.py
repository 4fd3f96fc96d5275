"""Scion and Adam-mini as Marin's runs had them (Levanter's ``scion`` and ``mini``): ``--optimizer FILE.py:Scion``.

An optimizer is given the weights of one run without names, so these tell them by their order: the matrices are the
embedding ``[v d]``, in each block query, key, value, output and the three of SwiGLU, each ``[i o]``, and the head
``[d v]``; all other weights are gains. Both clip by themselves, so their chain needs no ``clip`` of the lab.
"""

import math

import torch
from torch.nn.utils import clip_grad_norm_

MATRICES_OF_A_BLOCK = 7
NEWTON_SCHULZ_STEPS = 10


def in_order(params):
    """The embedding, the matrices of the blocks, the head, and the gains; a matrix alone counts as an embedding."""
    weights = list(params)
    matrices = [weight for weight in weights if weight.ndim == 2]
    return matrices[:1], matrices[1:-1], matrices[1:][-1:], [weight for weight in weights if weight.ndim < 2]


class Scion(torch.optim.Optimizer):
    """Orthogonal momentum for matrices of blocks, its sign for all else (Pethick et al. 2025, arXiv 2502.07529).

    As Marin's runs had it, and not as in the paper: the matrices have ``momentum`` and the other weights ``beta1``; the
    rate of these is ``sign_share`` of the matrices', where the paper gives each norm a radius and divides the signs of
    the head by its inputs; a matrix is scaled by sqrt(max(1, out / in)), not by sqrt(out / in); and weights decay by
    the rate times ``weight_decay``, where the paper's constrained steps are convex combinations. ``clip`` is of the
    weights with a sign, by their common norm.
    """

    def __init__(
        self, params, lr=0.016, beta1=0.95, momentum=0.9, eps=1e-15, sign_share=0.2, clip=1.0, weight_decay=0.1
    ):
        embedding, of_blocks, head, gains = in_order(params)
        groups = [
            {"params": of_blocks, "share": 1.0, "beta": momentum},
            {"params": [*embedding, *head, *gains], "share": sign_share, "beta": beta1},
        ]
        super().__init__(groups, {"lr": lr, "eps": eps, "clip": clip, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        of_blocks, others = self.param_groups
        clip_grad_norm_(others["params"], others["clip"])
        for group in self.param_groups:
            lr = group["lr"] * group["share"]
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["beta"])
                direction = spectral_direction(mean, group["eps"]) if group is of_blocks else mean.sign()
                weight.mul_(1 - lr * group["weight_decay"]).sub_(lr * direction)


def spectral_direction(matrix_io, eps):
    """A matrix with its singular values brought near sqrt(max(1, out / in)) by Newton-Schulz steps."""
    inputs, outputs = matrix_io.shape
    is_tall = inputs > outputs
    x = (matrix_io.T if is_tall else matrix_io) / (matrix_io.norm() + eps)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if is_tall else x) * math.sqrt(max(1.0, outputs / inputs))


class AdamMini(torch.optim.Optimizer):
    """Adam with one second moment for each block of weights (Zhang et al. 2024, arXiv 2406.16793).

    A block is a token of embedding and head, a head of queries and keys, and an output of other matrices. As in Marin's
    runs, gains have Adam's own second moments, where the paper gives each vector one, and ``clip`` is of the gains
    alone, by their common norm: no matrix is clipped.
    """

    def __init__(self, params, lr=0.008, betas=(0.9, 0.98), eps=1e-10, clip=1.0, weight_decay=0.1, head_width=16):
        embedding, of_blocks, head, gains = in_order(params)
        by_head = [weight for place, weight in enumerate(of_blocks) if place % MATRICES_OF_A_BLOCK < 2]
        by_output = [weight for place, weight in enumerate(of_blocks) if place % MATRICES_OF_A_BLOCK >= 2]
        groups = [
            {"params": embedding, "block": "row"},
            {"params": by_head, "block": "head"},
            {"params": [*by_output, *head], "block": "column"},
            {"params": gains, "block": "entry"},
        ]
        defaults = {"lr": lr, "betas": betas, "eps": eps, "clip": clip, "weight_decay": weight_decay}
        super().__init__(groups, {**defaults, "head_width": head_width})

    @torch.no_grad()
    def step(self, closure=None):
        gains = self.param_groups[-1]
        clip_grad_norm_(gains["params"], gains["clip"])
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                square = mean_over_blocks(weight.grad.square(), group["block"], group["head_width"])
                if not state:
                    state.update(steps=0, mean=torch.zeros_like(weight), square=torch.zeros_like(square))
                state["steps"] += 1
                state["mean"].lerp_(weight.grad, 1 - beta1)
                state["square"].lerp_(square, 1 - beta2)
                mean = state["mean"] / (1 - beta1 ** state["steps"])
                root = (state["square"] / (1 - beta2 ** state["steps"])).sqrt()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean / (root + group["eps"]))


def mean_over_blocks(square, block, head_width):
    """The mean over each block of a weight, shaped to meet the weight."""
    if block == "row":
        return square.mean(1, keepdim=True)
    if block == "head":
        return square.mean(0).unflatten(0, (-1, head_width)).mean(1).repeat_interleave(head_width)
    return square.mean(0) if block == "column" else square
