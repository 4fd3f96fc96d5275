"""The CPU's kernels between products in bf16 compute what float64 computes, and round it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.model import kernels
from lab.model.transformer import _turns, rotate
from pieces import tokens

pytestmark = pytest.mark.skipif(
    not kernels.can_take(torch.ones(1, dtype=torch.bfloat16)), reason="no fast bf16 products, or no C++ compiler"
)
ROUNDING = 2.0**-8  # relative: twice the most that rounding to bf16 moves a number
LENGTHS = (64, 17, 5)  # whole vectors, one and a tail, a tail alone

Function = Callable[..., Any]


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def outputs_and_gradients(function: Function, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    made = function(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    back = torch.autograd.grad(made, learned, [g.to(x.dtype) for g, x in zip(gradients, made, strict=True)])
    return [x.detach() for x in (*made, *back)]


def compare(function: Function, exact: Function, inputs: Sequence[Tensor], *outputs: Sequence[int]) -> None:
    """Outputs and gradients against those of torch in float64; those in fp32 are not rounded to bf16."""
    gradients = [draw(*shape, seed=seed) for seed, shape in enumerate(outputs, 10)]
    ours = outputs_and_gradients(function, inputs, gradients)
    doubles = [x.double() if x.is_floating_point() else x for x in inputs]
    theirs = outputs_and_gradients(exact, doubles, gradients)
    for mine, wanted in zip(ours, theirs, strict=True):
        close = ROUNDING if mine.dtype is torch.bfloat16 else 2e-6
        torch.testing.assert_close(mine.double(), wanted, rtol=close, atol=close * float(wanted.abs().max()) / 8)


@pytest.mark.parametrize("length", LENGTHS)
def test_gelu_is_torchs(length: int) -> None:
    x = draw(3, length, 7, scale=4)
    compare(kernels.Gelu.apply, lambda x: F.gelu(x, approximate="tanh"), [x], x.shape)


def test_gelu_at_the_ends() -> None:
    x = torch.tensor([-1e30, -200, -0.0, 0.0, 200, 1e30, torch.inf, torch.nan], dtype=torch.bfloat16)
    wanted = torch.where(x > 0, x, x.isnan() * x.nan_to_num(0)).masked_fill(x.isnan(), torch.nan)
    torch.testing.assert_close(kernels.Gelu.apply(x), wanted.bfloat16(), rtol=0, atol=1e-7, equal_nan=True)


def softmax(scores_ts: Tensor) -> Tensor:
    future_ts = torch.ones(scores_ts.shape[-2:], dtype=torch.bool).triu(1)
    return scores_ts.masked_fill(future_ts, -torch.inf).softmax(-1)


@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("length", LENGTHS)
def test_causal_softmax_is_torchs(length: int, scale: int) -> None:
    scores = draw(2, 3, length, length, scale=scale)
    compare(kernels.CausalSoftmax.apply, softmax, [scores], scores.shape)


def test_a_future_that_is_not_finite_leaves_the_past_alone() -> None:
    scores = draw(1, 20, 20)
    gradient, future_ts = draw(1, 20, 20, seed=1), torch.ones(20, 20, dtype=torch.bool).triu(1)
    spoilt = [x.masked_fill(future_ts, torch.nan) for x in (scores, gradient)]
    mine = outputs_and_gradients(kernels.CausalSoftmax.apply, spoilt[:1], spoilt[1:])
    wanted = outputs_and_gradients(kernels.CausalSoftmax.apply, [scores], [gradient])
    assert all(map(torch.equal, mine, wanted))
    scores[0, 7, 3] = torch.nan
    assert kernels.CausalSoftmax.apply(scores)[0].isnan().any(-1).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [16, 96])
def test_layer_norm_is_torchs(width: int, length: int) -> None:
    def exact(x_rnd: Tensor, gain_rd: Tensor) -> Tensor:
        return F.layer_norm(x_rnd, (width,), eps=1e-6) * gain_rd[:, None]

    x_rnd, gain_rd = (
        draw(3, length, width, scale=4, dtype=torch.float32) + 2,
        1 + draw(3, width, dtype=torch.float32) / 4,
    )
    compare(kernels.LayerNorm.apply, exact, [x_rnd, gain_rd], x_rnd.shape)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", kernels.HEAD_WIDTHS)
def test_heads_are_split_normed_and_turned_as_torch_does(width: int, length: int, normed: bool) -> None:
    turns_tk = _turns(length, width, 0.3)

    def ours(qkv_rbtn: Tensor, *gains: Tensor) -> Any:
        return kernels.SplitHeads.apply(qkv_rbtn, *(gains or (None, None)), turns_tk)

    def exact(qkv_rbtn: Tensor, *gains: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv_rbtn.unflatten(-1, (3, 2, width)).permute(3, 0, 1, 4, 2, 5)
        if gains:
            q, k = (
                F.layer_norm(x, (width,), eps=1e-6) * gain_rk[:, None, None, None]
                for x, gain_rk in zip((q, k), gains, strict=True)
            )
        return rotate(q, 0.3), rotate(k), v

    gains = [1 + draw(2, width, dtype=torch.float32, seed=seed) / 4 for seed in (1, 2)] if normed else []
    shape = (2, 3, 2, length, width)
    compare(ours, exact, [draw(2, 3, length, 6 * width, scale=2), *gains], shape, shape, shape)


with_tiles = pytest.mark.skipif(
    not (kernels.can_take(torch.ones(1, dtype=torch.bfloat16)) and kernels.multiplies_tiles()), reason="no matrix units"
)


def attention_by_products(qkv_rbtn: Tensor, *gains_and_turns: Any) -> Tensor:
    q, k, v = kernels.SplitHeads.apply(qkv_rbtn, *gains_and_turns)
    return (kernels.CausalSoftmax.apply(q @ k.transpose(-1, -2)) @ v).transpose(2, 3)


@with_tiles
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("length", [*LENGTHS, 130])
@pytest.mark.parametrize("width", kernels.HEAD_WIDTHS)
def test_attention_by_tiles_rounds_where_products_do(width: int, length: int, normed: bool) -> None:
    """Sums in another order may round a tie otherwise, so a few entries differ by one bit, and most by none."""
    turns_tk = _turns(length, width, width**-0.5)
    gains = [1 + draw(2, width, dtype=torch.float32, seed=seed) / 4 for seed in (1, 2)] if normed else []
    inputs = [draw(2, 3, length, 6 * width, scale=2), *gains]
    gradients = [draw(2, 3, length, 2, width, seed=3)]

    def by(kernel: Function) -> list[Tensor]:
        return outputs_and_gradients(lambda x, *given: kernel(x, *(given or (None, None)), turns_tk), inputs, gradients)

    for tiles, products in zip(by(kernels.Attention.apply), by(attention_by_products), strict=True):
        torch.testing.assert_close(tiles, products, rtol=2.0**-6, atol=2e-3 * float(products.abs().max()))
        if tiles.dtype is torch.bfloat16:
            assert (tiles == products).float().mean() > 0.98


@with_tiles
@pytest.mark.parametrize("width", [16, 32])
def test_a_head_that_is_not_finite_leaves_the_next_alone(width: int) -> None:
    turns_tk, qkv_rbtn = _turns(17, width, 1.0), draw(2, 1, 17, 6 * width)
    wanted = outputs_and_gradients(
        lambda x: kernels.Attention.apply(x, None, None, turns_tk), [qkv_rbtn], [torch.ones(2, 1, 17, 2, width)]
    )
    spoilt_rbtn = qkv_rbtn.clone()
    spoilt_rbtn[0] = torch.nan
    heard = outputs_and_gradients(
        lambda x: kernels.Attention.apply(x, None, None, turns_tk), [spoilt_rbtn], [torch.ones(2, 1, 17, 2, width)]
    )
    for mine, clean in zip(heard, wanted, strict=True):
        assert mine[0].isnan().all()
        assert torch.equal(mine[1], clean[1])


@pytest.mark.parametrize("vocabulary", [256, 40, 7])
@pytest.mark.parametrize("length", LENGTHS)
def test_token_loss_is_torchs(length: int, vocabulary: int) -> None:
    targets_n = tokens(0, batch=1, length=length, vocabulary=vocabulary).flatten()

    def exact(logits_nv: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        log_z_n = logits_nv.logsumexp(-1)
        return log_z_n - logits_nv.gather(-1, targets_n[:, None])[:, 0], log_z_n

    logits = draw(length, vocabulary, scale=4)
    compare(kernels.TokenLoss.apply, exact, [logits, targets_n], (length,), (length,))
    targets_n[1] = -1
    logits[1] = torch.nan
    *_, gradient = outputs_and_gradients(kernels.TokenLoss.apply, [logits, targets_n], [torch.ones(length)] * 2)
    assert not gradient[1].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_run_has_the_same_bits_at_any_place_of_a_fleet(length: int) -> None:
    """Also at an address that is no multiple of a vector's."""
    gain, turns_tk = draw(1, 16, dtype=torch.float32), _turns(length, 16, 1.0)
    targets = tokens(0, batch=1, length=length, vocabulary=9)[0]
    cases: list[tuple[Function, list[Tensor]]] = [
        (kernels.Gelu.apply, [draw(1, length, 5)]),
        (kernels.CausalSoftmax.apply, [draw(1, length, length)]),
        (kernels.LayerNorm.apply, [draw(1, length, 16, dtype=torch.float32), gain]),
        (lambda x, *given: kernels.SplitHeads.apply(x, *given, turns_tk), [draw(1, 2, length, 48), gain, gain]),
        (lambda x, y: kernels.TokenLoss.apply(x.flatten(0, 1), y.flatten()), [draw(1, length, 9), targets]),
    ]
    for function, inputs in cases:
        alone = function(*inputs)
        crowd = [torch.cat([x.flip(1) if x.ndim > 1 else x, x, x]) for x in inputs]
        together = function(*crowd)
        pairs = [(alone, together)] if isinstance(alone, Tensor) else zip(alone, together, strict=True)
        for one, many in pairs:
            assert torch.equal(many.unflatten(0, (3, -1))[2], one.unflatten(0, (1, -1))[0])
