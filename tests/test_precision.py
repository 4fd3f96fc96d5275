"""``precision=bf16`` rounds what matrix products take and make, forward and backward, and nothing between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from lab.core.number_formats import Mantissa, rounded
from lab.interventions.loss_terms import ZLoss
from lab.model import layers
from lab.model.loss import losses
from lab.model.transformer import Transformer
from lab.training.engine import Compiled, Eager
from pieces import model, tokens, weights_of
from sampling import few
from test_engine import compiles
from test_model import changes, stir
from tests import reference

SEEDS = (0, 1, 2, 3, 4)
Z_COEFFICIENT = 1e-2
# Relative, in norm: a hundred times what fp32 loses, a hundredth of what a rounding changes.
SAME = 1e-5
VALUES, GRADIENTS = (True, False), (False, True)


def nearest(x: Tensor, bits: int = 7) -> Tensor:
    """The closest numbers with so many bits of the mantissa behind the leading one, halves to even."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)


class Round(torch.autograd.Function):
    """Rounds what passes on the way forward, the gradient on the way back, or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: bool, gradients: bool) -> Tensor:
        ctx.rounds = gradients
        return nearest(x) if values else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return nearest(gradient) if ctx.rounds else gradient, None, None


def numbers() -> Tensor:
    """Of every sign and exponent, among them many half-way between two numbers with fewer bits; none subnormal."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (40_000,), generator=generator, dtype=torch.int64)
    zeros_below = torch.randint(24, (40_000,), generator=generator)
    x = ((bits >> zeros_below) << zeros_below).to(torch.int32).view(torch.float32)
    return torch.cat([x[x.abs() > 2.0**-126], torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])])


def test_a_mantissa_is_rounded_to_each_runs_own_bits() -> None:
    bits = list(range(2, 24))
    x = numbers()
    ours_rn = rounded(x.expand(len(bits), -1), Mantissa(torch.tensor(bits, dtype=torch.float64)))
    for each, ours_n in zip(bits, ours_rn, strict=True):
        largest = float(torch.finfo(torch.float32).max)
        theirs_n = nearest(x.double(), each)
        theirs_n = torch.where(theirs_n.abs() > largest, theirs_n.sign() * torch.inf, theirs_n)
        torch.testing.assert_close(ours_n.double(), theirs_n, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours_rn[bits.index(7)].nan_to_num(0), x.bfloat16().float().nan_to_num(0))
    assert torch.equal(ours_rn[bits.index(23)].nan_to_num(0), x.nan_to_num(0))
    normal = (x.abs() >= 2.0**-14) & (x.abs() < 65504)
    assert torch.equal(ours_rn[bits.index(10)][normal], x.half().float()[normal])


def rounding(left_out: str = "", kind: tuple[bool, bool] = VALUES) -> reference.Rounding:
    """Values and gradients in every place, but in one only values or only gradients."""
    return lambda place, x: Round.apply(x, *(kind if place == left_out else (True, True)))


def backward(made: Transformer, rows_rbt: Tensor, terms: Mapping[str, Any], engine: type[Eager]) -> dict[str, Tensor]:
    """Gradients, loss and logits."""
    weights = {name: weight.detach() for name, weight in made.named_parameters()}
    values = {name: torch.empty_like(weight) for name, weight in weights_of(made).items()}
    values |= {"loss": torch.empty(len(rows_rbt)), "logits": made(rows_rbt[..., :-1])[0].detach().fill_(torch.nan)}

    def update(held: Any, rows_rbt: Tensor) -> None:
        weights, values = held
        learned = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        logits_rbtv, _ = functional_call(made, learned, (rows_rbt[..., :-1],))
        loss_r, _ = losses(logits_rbtv, rows_rbt[..., 1:], terms)
        parts = torch.autograd.grad(loss_r.sum(), list(learned.values()))
        for place, value in zip(values.values(), (*parts, loss_r, logits_rbtv), strict=True):
            place.copy_(value.detach())

    engine(update, (weights, values), ())(rows_rbt, with_probes=False)
    return values


def distances(
    rounded: reference.Rounding,
    *,
    depth: int = 1,
    heads: int = 2,
    head_width: int = 4,
    qk_layernorm: bool = True,
    engine: type[Eager] = Eager,
) -> Iterator[float]:
    """For each run the largest distance of logits, loss or a gradient from the reference, which is in float64."""
    interventions = changes("qk_layernorm") if qk_layernorm else {}
    shape = {"width": head_width * heads, "depth": depth, "head_width": head_width}
    sizes: dict[str, Any] = {**shape, "changes": interventions}
    made = stir(model(*SEEDS, **sizes, dtype=torch.float32, operands=torch.bfloat16))
    rows_rbt = tokens(*SEEDS)
    terms = {"z_loss": ZLoss(torch.full((len(SEEDS),), Z_COEFFICIENT))}
    ours = backward(made, rows_rbt, terms, engine)
    for run in range(len(SEEDS)):
        leaves = {name: weight[run].detach().double().requires_grad_() for name, weight in weights_of(made).items()}
        seen = reference.transformer(leaves, rows_rbt[run, :, :-1], depth, heads, qk_layernorm, rounded)
        loss, _ = reference.losses(seen.logits, rows_rbt[run, :, 1:], Z_COEFFICIENT)
        parts = torch.autograd.grad(loss, list(leaves.values()))
        theirs = {**dict(zip(leaves, parts, strict=True)), "loss": loss.detach(), "logits": seen.logits.detach()}
        assert set(ours) == set(theirs)
        yield max(float((ours[name][run] - value).norm() / value.norm()) for name, value in theirs.items())


def median(values: Iterator[float]) -> float:
    """Of a few runs; next to a tie, fp32 may round one otherwise than float64, and all that follows moves."""
    return sorted(values)[len(SEEDS) // 2]


@pytest.mark.parametrize("qk_layernorm", [False, True], ids=["bare", "qk_layernorm"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_bf16_is_the_reference_with_products_rounded(depth: int, heads: int, qk_layernorm: bool) -> None:
    assert median(distances(rounding(), depth=depth, heads=heads, qk_layernorm=qk_layernorm)) < SAME


@pytest.mark.parametrize("qk_layernorm", [False, True], ids=["bare", "qk_layernorm"])
def test_whole_vectors_are_rounded_in_the_same_places(qk_layernorm: bool) -> None:
    """Kernels compute with these."""
    assert median(distances(rounding(), head_width=16, qk_layernorm=qk_layernorm)) < SAME


@pytest.mark.parametrize("has_bf16_units", [True, False])
def test_a_processor_without_bf16_units_rounds_in_the_same_places(
    has_bf16_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MULTIPLIES_BF16", has_bf16_units)
    assert median(distances(rounding(), depth=2)) < SAME


@compiles
@pytest.mark.slow
def test_a_compiled_step_rounds_in_the_same_places() -> None:
    assert median(distances(rounding(), engine=Compiled)) < SAME


@pytest.mark.parametrize("kind", [VALUES, GRADIENTS], ids=["only values", "only gradients"])
@pytest.mark.parametrize("place", few(reference.PLACES, 2))
def test_one_rounding_less_is_seen(place: str, kind: tuple[bool, bool]) -> None:
    assert median(distances(rounding(place, kind))) > 10 * SAME
