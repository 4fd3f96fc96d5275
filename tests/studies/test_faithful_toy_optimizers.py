"""Scion and Adam-mini of the small model, against the same rules written with loops over numbers."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pieces import intervention, model, weights_of

OPTIMIZERS = runpy.run_path(str(Path(__file__).parents[2] / "results/faithful_toy/optimizers.py"))
HEAD_WIDTH, LR, DECAY, STEPS = 2, 0.01, 0.3, 4
OF_A_BLOCK = dict.fromkeys(("query", "key", "value", "output"), (4, 4)) | {"up": (4, 6), "down": (6, 4)}
SHAPES = {
    "embedding": (5, 4),
    **{f"{block}.{name}": shape for block in (0, 1) for name, shape in [*OF_A_BLOCK.items(), ("gate", (4, 6))]},
    "gain": (4,),
    "head": (4, 5),
}


def gradients() -> Iterator[dict[str, np.ndarray]]:
    """Gradients of a few steps, in which entries differ widely and so do steps."""
    draw = np.random.default_rng(0)
    for step in range(STEPS):
        yield {name: (1 + step) * draw.standard_normal(shape) ** 3 for name, shape in SHAPES.items()}


def first_weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {name: draw.standard_normal(shape) for name, shape in SHAPES.items()}


def trained(name: str, **settings: Any) -> dict[str, np.ndarray]:
    """The weights after the steps of an optimizer of the file."""
    weights = {name: nn.Parameter(torch.tensor(weight)) for name, weight in first_weights().items()}
    optimizer = OPTIMIZERS[name](list(weights.values()), lr=LR, weight_decay=DECAY, **settings)
    for step in gradients():
        for weight_name, weight in weights.items():
            weight.grad = torch.tensor(step[weight_name])
        optimizer.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


def clipped(step: dict[str, np.ndarray], names: list[str], clip: float) -> dict[str, np.ndarray]:
    """The gradients, those of the named weights scaled down to a common norm."""
    norm = sum(float((step[name] ** 2).sum()) for name in names) ** 0.5
    return {name: g * min(1.0, clip / norm) if name in names else g for name, g in step.items()}


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """The polynomial of ten steps, of each singular value by itself."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.linalg.norm(matrix)
    for _ in range(10):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ np.diag(values) @ right


def expected_of_scion(beta1: float, momentum: float, share: float, clip: float) -> dict[str, np.ndarray]:
    weights = first_weights()
    means = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in gradients():
        for name, gradient in clipped(step, ["embedding", "gain", "head"], clip).items():
            is_of_block = "." in name
            beta, rate = (momentum, LR) if is_of_block else (beta1, LR * share)
            means[name] = beta * means[name] + (1 - beta) * gradient
            direction = np.sign(means[name])
            if is_of_block:
                inputs, outputs = SHAPES[name]
                direction = newton_schulz(means[name]) * max(1, outputs / inputs) ** 0.5
            weights[name] = weights[name] - rate * (direction + DECAY * weights[name])
    return weights


def block_of(name: str, place: tuple[int, ...]) -> tuple[int, ...]:
    """Which of a weight's blocks an entry belongs to."""
    if name == "gain":
        return place
    row, column = place
    if name == "embedding":
        return (row,)
    return (column // HEAD_WIDTH,) if name.endswith(("query", "key")) else (column,)


def expected_of_adam_mini(beta1: float, beta2: float, eps: float, clip: float) -> dict[str, np.ndarray]:
    weights = first_weights()
    means = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    squares: dict[Any, float] = {}
    for count, step in enumerate(gradients(), 1):
        for name, gradient in clipped(step, ["gain"], clip).items():
            entries: dict[Any, list[float]] = {}
            for place in np.ndindex(gradient.shape):
                entries.setdefault(block_of(name, place), []).append(gradient[place] ** 2)
            for block, each in entries.items():
                mean = sum(each) / len(each)
                squares[name, block] = beta2 * squares.get((name, block), 0.0) + (1 - beta2) * mean
            means[name] = beta1 * means[name] + (1 - beta1) * gradient
            for place in np.ndindex(gradient.shape):
                root = (squares[name, block_of(name, place)] / (1 - beta2**count)) ** 0.5
                direction = means[name][place] / (1 - beta1**count) / (root + eps)
                weights[name][place] -= LR * (direction + DECAY * weights[name][place])
    return weights


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_scion_makes_the_steps_of_its_rule(clip: float) -> None:
    made = trained("Scion", beta1=0.8, momentum=0.6, sign_share=0.25, clip=clip)
    for name, weight in expected_of_scion(0.8, 0.6, 0.25, clip).items():
        np.testing.assert_allclose(made[name], weight, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_adam_mini_makes_the_steps_of_its_rule(clip: float) -> None:
    made = trained("AdamMini", betas=(0.8, 0.9), eps=1e-3, clip=clip, head_width=HEAD_WIDTH)
    for name, weight in expected_of_adam_mini(0.8, 0.9, 1e-3, clip).items():
        # torch adds 1e-6 to the norm by which it divides
        np.testing.assert_allclose(made[name], weight, rtol=0, atol=1e-8 if name == "gain" else 1e-12, err_msg=name)


@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8)])
def test_a_step_of_scion_has_about_one_singular_value(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(each, dtype=torch.float64)) for each in ((3, 2), shape, (2, 3))]
    optimizer = OPTIMIZERS["Scion"](weights, lr=1.0)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    values = torch.linalg.svdvals(weights[1].detach()) / max(1, shape[1] / shape[0]) ** 0.5
    assert (values - 1).abs().max() < 0.35  # where the coefficients of Newton-Schulz leave them
    assert weights[0].detach().abs().unique().tolist() == pytest.approx([0.2])


def test_adam_mini_is_adam_where_each_block_has_one_entry() -> None:
    """Heads of width one, matrices with one input, and tokens of one feature."""
    torch.manual_seed(0)
    shapes = [(5, 1), *[(1, 3)] * 7, (3,), (1, 5)]
    starts = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    mini, adam = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    numbers = {"lr": LR, "betas": (0.9, 0.98), "eps": 1e-10, "weight_decay": DECAY}
    optimizers = [
        OPTIMIZERS["AdamMini"](mini, clip=float("inf"), head_width=1, **numbers),
        torch.optim.AdamW(adam, **numbers),
    ]
    for _ in range(STEPS):
        for one, other in zip(mini, adam, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(mini, adam, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_lab_gives_weights_in_the_order_that_tells_them() -> None:
    changes = {name: intervention(name) for name in ("rmsnorm", "swiglu")}
    matrices = [name for name, weight in weights_of(model(0, depth=2, changes=changes)).items() if weight.ndim == 3]
    parts = ["query", "key", "value", "output", "mlp_up", "mlp_down", "swiglu"]
    assert [name.rpartition(".")[2] for name in matrices] == ["embedding", *parts, *parts, "head"]
