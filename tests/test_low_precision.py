"""fp8, MX and NVFP4 round the operands of every product as their specifications say, and nothing between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import Fleet
from lab.core.hooks import listening
from lab.core.number_formats import (
    E2M1,
    E4M3,
    E5M2,
    NumberFormat,
    mx_blocks,
    nv_blocks,
    nv_scales,
    random_noise,
    rounded_to,
    split,
)
from lab.model import low_precision
from lab.model.layers import product
from lab.model.low_precision import HISTORY, LowPrecision, RoundingPass, hadamard, rounded_gain, rounding_pass
from lab.probes.activations import saturation
from lab.training.building import operand_format
from lab.training.identity import columns
from pieces import model, tokens
from small import configs, trained

TORCHS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
PRECISIONS = low_precision.PRECISIONS
RATES = ("optimizer.lr=1e-2", "optimizer.lr=1e-1 seed=1", "optimizer.lr=3e-3 seed=2")
WILD = "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0 seed=3"
PLAIN = tuple(f"precision={name}" for name in PRECISIONS)
SWITCHED = (
    "precision=mxfp8 stochastic_rounding=all norm_gains=rounded gradient_format=e4m3",
    "precision=fp8_delayed stochastic_rounding=gradients kept_in_bf16=ends",
    "precision=nvfp4 stochastic_rounding=gradients norm_gains=rounded attention_precision=same",
    "precision=mxfp4 weight_gradients=hadamard",
)


def made(
    precision: str,
    stochastic: str = "none",
    gradients: str = "e5m2",
    gains: str = "fp32",
    weight_gradients: str = "rounded",
) -> LowPrecision:
    """The rounding of one product."""
    at = LowPrecision(precision, gradients, stochastic, gains, "none", "bf16", weight_gradients).at("product")
    assert isinstance(at, LowPrecision)
    return at


def numbers() -> Tensor:
    """Of every sign and exponent, and many that lie halfway between two of a format."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    steps = torch.arange(-4096, 4096, dtype=torch.float32)
    wild = bits.view(torch.float32)
    every = [wild[wild.abs() > 2.0**-126], *(steps * 2.0**power for power in range(-20, 5, 3))]
    return torch.cat([*every, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])])


@pytest.mark.parametrize("kept_in", TORCHS, ids=lambda each: each.name)
def test_codes_of_fp8_are_those_of_torch(kept_in: NumberFormat) -> None:
    x = numbers()
    theirs = x.clamp(-kept_in.largest, kept_in.largest).to(TORCHS[kept_in]).float()
    torch.testing.assert_close(rounded_to(x, kept_in), theirs, rtol=0, atol=0, equal_nan=True)


def test_codes_of_published_numbers() -> None:
    ours = rounded_to(torch.tensor([1.05, 17, 300, 460, 500, 0.001, 0.0009, 1.5 * 2**-10]), E4M3)
    assert ours.tolist() == [1, 16, 288, 448, 448, 2**-9, 0, 2**-9]
    assert rounded_to(torch.tensor([300, 500, 0.001]), E5M2).tolist() == [320, 512, 0.0009765625]
    assert rounded_to(torch.linspace(-8, 8, 3201), E2M1).abs().unique().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert rounded_to(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), E2M1).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_a_block_saturates_above_the_largest_mantissa() -> None:
    kept, scale = mx_blocks(torch.tensor([[1.9, 0.1, -1.9]]), -1, E4M3)
    assert (kept[0, 0].item(), kept[0, 2].item(), scale.item()) == (1.75, -1.75, 2.0**-8)
    assert mx_blocks(torch.tensor([[1.7, 0.1]]), -1, E4M3)[0][0, 0] == 1.75
    assert mx_blocks(torch.zeros(1, 32), -1, E4M3)[0].abs().sum() == 0


def test_gains_below_one_become_one_number() -> None:
    """The failure of norms in MX, arXiv:2506.20752, in one line."""
    gains = torch.linspace(0.93, 0.999, 32)[None]
    kept = rounded_gain(gains, made("mxfp8"))
    assert kept.unique().tolist() == [0.875]
    assert (kept / gains - 1).mean().item() == pytest.approx(-0.092, abs=1e-3)
    around = rounded_gain(torch.linspace(0.93, 1.07, 32)[None], made("mxfp8"))
    assert around.unique().tolist() == [0.9375, 1, 1.125]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("kept_in", [E4M3, E5M2, E2M1], ids=lambda each: each.name)
def test_a_block_is_rounded_as_its_formula_says(kept_in: NumberFormat, axis: int) -> None:
    """Against the specification in float64; powers of two commute with it."""
    x = torch.randn(3, 70, 45, generator=torch.Generator().manual_seed(1)) * 10 ** torch.linspace(-3, 3, 45)
    blocks = split(x, axis, 32)
    kept, _ = mx_blocks(blocks, axis, kept_in)
    exact = blocks.double()
    largest = exact.abs().amax(axis, keepdim=True)
    theirs_scale = 2.0 ** (largest.log2().floor() - kept_in.highest_exponent)
    scaled = torch.where(largest > 0, exact / theirs_scale, 0)
    spacing = 2.0 ** (scaled.abs().clamp(min=2.0**kept_in.lowest_exponent).log2().floor() - kept_in.mantissa_bits)
    theirs = ((scaled / spacing).round() * spacing).clamp(-kept_in.largest, kept_in.largest) * theirs_scale
    assert torch.equal(kept.double(), theirs.nan_to_num(0))
    assert torch.equal(mx_blocks(blocks * 2.0**-40, axis, kept_in)[0], kept * 2.0**-40)
    assert torch.equal(mx_blocks(kept, axis, kept_in)[0], kept)  # it is idempotent


def test_nvfp4_has_a_scale_for_each_block_and_one_for_the_tensor() -> None:
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)) * 10 ** torch.linspace(-4, 2, 64)
    blocks, of_tensor = split(x, -1, 16), x.abs().amax((1, 2)).view(-1, 1, 1, 1)
    scale = nv_scales(blocks.abs().amax(-1, keepdim=True), of_tensor)
    unit = of_tensor / (6 * 448)
    codes = (scale / unit).expand(2, 5, 4, 1)
    torch.testing.assert_close(rounded_to(codes, E4M3), codes, rtol=1e-6, atol=0)
    assert codes.amax() == 448
    kept = nv_blocks(blocks, scale)
    elements = kept / torch.where(scale > 0, scale, 1)
    torch.testing.assert_close(rounded_to(elements, E2M1), elements, rtol=1e-6, atol=0)
    assert (kept - blocks).abs().max() <= of_tensor.max() / 6
    assert nv_blocks(torch.zeros(1, 16), nv_scales(torch.zeros(1, 1), torch.zeros(1, 1))).abs().sum() == 0


def test_random_rounding_is_right_on_average_and_leaves_numbers_of_the_format() -> None:
    key_r = torch.tensor([3, -(2**31), 12345], dtype=torch.int32)
    for value in (1.05, 17.3, -0.0011, 300.0, 5.9):
        x_rn = torch.full((3, 100_000), value)
        kept_rn = rounded_to(x_rn, E4M3, random_noise(x_rn, key_r))
        error_r = kept_rn.std(1) / math.sqrt(100_000)
        assert ((kept_rn.mean(1) - value).abs() <= 4 * error_r).all()
        assert len(kept_rn.unique()) == 2
    codes_rn = rounded_to(numbers()[:-4], E4M3).expand(3, -1)
    assert torch.equal(rounded_to(codes_rn, E4M3, random_noise(codes_rn, key_r)), codes_rn)
    noise_rn = random_noise(torch.zeros(3, 100_000), key_r)
    assert torch.corrcoef(noise_rn).triu(1).abs().max() < 0.02
    assert torch.equal(noise_rn[1:], random_noise(torch.zeros(2, 100_000), key_r[1:]))  # whoever stands before


@pytest.mark.parametrize("has_signs", [True, False])
def test_a_hadamard_transform_leaves_the_product_it_is_contracted_over(has_signs: bool) -> None:
    draws = torch.Generator().manual_seed(3)
    a, b = (torch.randn(2, 40, size, generator=draws, dtype=torch.float64) for size in (3, 5))
    mixed_a, mixed_b = (hadamard(x, has_signs=has_signs) for x in (a, b))
    torch.testing.assert_close(mixed_a.mT @ mixed_b, a.mT @ b, rtol=0, atol=1e-12)
    outlier = torch.zeros(1, 16, 1)
    outlier[0, 3] = 8
    assert hadamard(outlier, has_signs=has_signs).abs().unique().tolist() == [2]
    # what all numbers of a block have in common goes into the first one, unless signs scatter it
    alike = hadamard(torch.ones(1, 16, 1), has_signs=has_signs)[0, :, 0]
    assert (alike.count_nonzero() == 1) == (not has_signs) == (alike[0].item() == 4)


def scaled(x: Tensor, kept_in: NumberFormat) -> Tensor:
    """One scale for each run, by torch's own types."""
    factor = kept_in.largest / x.abs().amax((1, 2), keepdim=True)
    return (x * factor).clamp(-kept_in.largest, kept_in.largest).to(TORCHS[kept_in]).double() / factor.double()


def in_blocks(x: Tensor, axis: int, kept_in: NumberFormat) -> Tensor:
    """MX in blocks of 32 along an axis, by torch's own types; the axis is a multiple of 32."""
    blocks = x.movedim(axis, -1).unflatten(-1, (-1, 32))
    scale = 2.0 ** (blocks.abs().amax(-1, keepdim=True).log2().floor() - kept_in.highest_exponent)
    codes = (blocks / scale).clamp(-kept_in.largest, kept_in.largest).to(TORCHS[kept_in]).double()
    return (codes * scale.double()).flatten(-2).movedim(-1, axis)


def products(precision: str, gradients: str = "e5m2") -> tuple[list[Tensor], list[Tensor]]:
    """A product and both its gradients, ours and those of operands that were rounded beforehand, in float64."""
    draws = torch.Generator().manual_seed(4)
    a, b, upstream = (torch.randn(2, *shape, generator=draws) for shape in ((64, 32), (32, 96), (64, 96)))
    a.requires_grad_(), b.requires_grad_()
    ours = low_precision.low_precision_product(a, b, made(precision, gradients=gradients), has_weight=True)
    grads = torch.autograd.grad(ours, (a, b), upstream)
    of_gradient = {"e5m2": E5M2, "e4m3": E4M3}[gradients]
    a, b = a.detach(), b.detach()
    if precision == "fp8_current":
        first, second, third = scaled(a, E4M3), scaled(b, E4M3), scaled(upstream, of_gradient)
        theirs = [first @ second, third @ second.mT, first.mT @ third]
    else:
        theirs = [
            in_blocks(a, -1, E4M3) @ in_blocks(b, -2, E4M3),
            in_blocks(upstream, -1, of_gradient) @ in_blocks(b, -1, E4M3).mT,
            in_blocks(a, -2, E4M3).mT @ in_blocks(upstream, -2, of_gradient),
        ]
    return [ours.detach(), *grads], theirs


@pytest.mark.parametrize("gradients", ["e5m2", "e4m3"])
@pytest.mark.parametrize("precision", ["fp8_current", "mxfp8"])
def test_all_three_products_round_their_operands(precision: str, gradients: str) -> None:
    ours, theirs = products(precision, gradients)
    other, _ = products(precision, "e4m3" if gradients == "e5m2" else "e5m2")
    for one, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), reference, rtol=1e-5, atol=1e-4)
    assert torch.equal(ours[0], other[0])
    for one, twin in zip(ours[1:], other[1:], strict=True):
        assert (one - twin).abs().max() > 1e-2


@pytest.mark.parametrize("weight_gradients", ["hadamard", "bf16"])
def test_gradients_of_weights_are_rounded_in_a_way_of_their_own(weight_gradients: str) -> None:
    """As Cim et al. 2026 (arXiv:2605.09825) do it: by Kronecker's powers in place of Sylvester's rule."""
    draws = torch.Generator().manual_seed(4)
    a, b, upstream = (torch.randn(2, *shape, generator=draws) for shape in ((64, 32), (32, 96), (64, 96)))
    a[:, 5] *= 100

    def gradients(how: str, has_weight: bool = True) -> list[Tensor]:
        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        low = made("mxfp8", weight_gradients=how)
        ours = low_precision.low_precision_product(*leaves, low, has_weight=has_weight)
        return [ours.detach(), *torch.autograd.grad(ours, leaves, upstream)]

    plain, own = gradients("rounded"), gradients(weight_gradients)
    if weight_gradients == "bf16":
        theirs = a.bfloat16().double().mT @ upstream.bfloat16().double()
    else:
        mix = reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * 4) / 4
        mixed_a, mixed = ((mix @ x.unflatten(1, (4, 16))).flatten(1, 2) for x in (a, upstream))
        theirs = in_blocks(mixed_a, -2, E4M3).mT @ in_blocks(mixed, -2, E5M2)
    torch.testing.assert_close(own[2].double(), theirs, rtol=1e-5, atol=1e-3)
    assert (own[2] - plain[2]).abs().max() > 1e-2
    assert all(torch.equal(one, other) for one, other in zip(own[:2], plain[:2], strict=True))
    without, others = gradients(weight_gradients, has_weight=False), gradients("rounded", has_weight=False)
    assert all(torch.equal(one, other) for one, other in zip(without, others, strict=True))


def in_nvfp4(x: Tensor, axis: int, *, squares: bool = False) -> Tensor:
    """NVFP4 in blocks of 16 along an axis, or in squares along both; they are multiples of 16."""
    blocks, along = split(x, axis, 16), (axis,)
    if squares:
        blocks, along = split(split(x, -1, 16), -3, 16), (-1, -3)
    of_tensor = x.abs().amax((1, 2)).view(-1, *[1] * (blocks.ndim - 1))
    return nv_blocks(blocks, nv_scales(blocks.abs().amax(along, keepdim=True), of_tensor)).reshape(x.shape)


@pytest.mark.parametrize("has_weight", [True, False])
def test_all_three_products_round_their_operands_in_nvfp4(has_weight: bool) -> None:
    """A weight in squares, alike for both products; the gradient of a weight is that of mixed tokens, for outliers."""
    draws = torch.Generator().manual_seed(4)
    a, b, upstream = (torch.randn(2, *shape, generator=draws) for shape in ((64, 32), (32, 48), (64, 48)))
    a[:, 5] *= 100
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    ours = low_precision.low_precision_product(*leaves, made("nvfp4"), has_weight=has_weight)
    rounded_b = [in_nvfp4(b, axis, squares=has_weight) for axis in (-2, -1)]
    mix = partial(hadamard, has_signs=True) if has_weight else lambda x: x
    theirs = [
        in_nvfp4(a, -1) @ rounded_b[0],
        in_nvfp4(upstream, -1) @ rounded_b[1].mT,
        in_nvfp4(mix(a), -2).mT @ in_nvfp4(mix(upstream), -2),
    ]
    for one, reference in zip([ours, *torch.autograd.grad(ours, leaves, upstream)], theirs, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("precision", ["mxfp4", "nvfp4"])
def test_fp4_is_near_the_product(precision: str) -> None:
    draws = torch.Generator().manual_seed(5)
    a, b, upstream = (torch.randn(2, *shape, generator=draws) for shape in ((64, 32), (32, 96), (64, 96)))
    a.requires_grad_(), b.requires_grad_()
    ours = low_precision.low_precision_product(a, b, made(precision), has_weight=True)
    exact = a @ b
    pairs = [(ours, exact), *zip(*(torch.autograd.grad(each, (a, b), upstream) for each in (ours, exact)), strict=True)]
    for one, other in pairs:
        assert 0.01 < (one - other).norm() / other.norm() < 0.3


@pytest.mark.parametrize("size", [1e-30, 1e-40])
def test_an_operand_too_small_for_the_largest_scale_becomes_zero(size: float) -> None:
    """Its own scale would be as large as 1e32, or infinite."""
    a, b = torch.full((1, 2, 3), size, requires_grad=True), torch.ones(1, 3, 2, requires_grad=True)
    made_of = low_precision.low_precision_product(a, b, made("fp8_current"), has_weight=False)
    of_a, of_b = torch.autograd.grad(made_of, (a, b), torch.ones(1, 2, 2))
    assert made_of.eq(0).all()
    assert of_b.eq(0).all()
    torch.testing.assert_close(of_a, torch.full_like(a, 2))


@pytest.mark.parametrize("precision", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_block_of_zeros_saturates_nothing(precision: str) -> None:
    """Of the other block, whose mantissas are above that of the largest number, MX saturates all, and NVFP4 nothing."""
    shares = {}

    def listen(kind: str, where: str, before: Tensor, after: Tensor, beyond: Tensor) -> None:
        shares[where] = saturation(before, after, beyond).item()

    a = torch.cat([torch.zeros(1, 2, 32), torch.full((1, 2, 32), 1.95)], -1)
    with listening(listen):
        low_precision.low_precision_product(a, torch.zeros(1, 64, 1), made(precision), has_weight=False)
    assert shares == {"product.left": 0.0 if precision == "nvfp4" else 0.5, "product.right": 0.0}


def test_an_operand_is_rounded_at_random_anew_for_the_backward_pass() -> None:
    at, eye = made("mxfp8", stochastic="all"), torch.eye(32)[None]
    a, b = torch.full((1, 32, 32), 1.05), eye.clone().requires_grad_()
    with rounding_pass(at, at.begin((0,), torch.device("cpu"))):
        first = low_precision.low_precision_product(a, b, at, has_weight=True)
        (again,) = torch.autograd.grad(first, b, eye)
    assert first.unique().tolist() == again.unique().tolist() == [1, 1.125]
    assert not torch.equal(first, again.mT)


def test_a_delayed_scale_knows_earlier_steps_alone() -> None:
    at = made("fp8_delayed")
    state, b = at.begin((0, 1), torch.device("cpu")), torch.ones(2, 1, 1)
    sizes = (1.0, 1.0, 10.0, 10.0)
    kept = []
    for size in sizes:
        a = torch.tensor([[[size]], [[1.0]]])
        with rounding_pass(at, state) as rounding:
            kept.append(low_precision.low_precision_product(a, b, at, has_weight=False).flatten().tolist())
            assert rounding
            rounding.keep()
    assert [run for run, _ in kept] == pytest.approx([1, 1, 1, 10], rel=1e-6)  # a tenfold growth saturates once
    assert [other for _, other in kept] == pytest.approx([1, 1, 1, 1], rel=1e-6)
    for _ in range(HISTORY - 1):
        with rounding_pass(at, state) as rounding:
            low_precision.low_precision_product(torch.full((2, 1, 1), 0.5), b, at, has_weight=False)
            assert rounding
            rounding.keep()
    assert RoundingPass(at, state).largest_ro[:, 0].tolist() == [10, 1]
    with rounding_pass(at, state) as rounding:  # the 1024th since then
        low_precision.low_precision_product(torch.tensor([[[torch.inf]], [[0.5]]]), b, at, has_weight=False)
        assert rounding
        rounding.keep()
    assert RoundingPass(at, state).largest_ro[:, 0].tolist() == [0.5, 0.5]  # and nothing infinite is remembered


@pytest.mark.slow
def test_a_jump_saturates_in_the_delayed_scale_alone() -> None:
    found: dict[tuple[str, str], list[float]] = {}
    at_first: dict[str, list[float]] = {}
    shared = ("probes.every=1", "probes.names=[saturation,gradient_underflow,zero_gradients]", "intervention=[swiglu]")
    for precision in ("fp8_current", "fp8_delayed"):
        [(_, rows)] = trained(configs("optimizer.lr=0.3", shared=(f"precision={precision}", *shared)))
        for step, probe, _, value in rows:
            found.setdefault((precision, probe), []).append(value)
            if step == 0 and probe == "gradient_underflow":
                at_first.setdefault(precision, []).append(value)
    assert max(found["fp8_current", "saturation"]) == 0
    assert 0 < max(found["fp8_delayed", "saturation"]) < 1
    # without a history the scale is one, and gradients are small
    assert sum(at_first["fp8_delayed"]) > 10 * sum(at_first["fp8_current"])
    assert all(0 <= value <= 1 for values in found.values() for value in values)


@pytest.mark.parametrize("switches", SWITCHED[1:2])
def test_a_run_is_the_same_bits_alone_and_in_any_company(switches: str) -> None:
    wanted = configs(*RATES, shared=(*switches.split(), "intervention=[qk_layernorm,swiglu]"))
    together = trained(wanted)
    assert repr(together) == repr([trained([config])[0] for config in wanted])
    assert len({repr(rows) for _, rows in together}) == len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("switches", SWITCHED[1:2])
def test_a_broken_run_leaves_its_neighbours_alone(switches: str) -> None:
    with_a_broken_one = trained(configs(*RATES[:1], WILD, RATES[2], shared=(*switches.split(), "intervention=[]")))
    assert with_a_broken_one[1][0]["status"] == "diverged"
    assert repr(with_a_broken_one[::2]) == repr(
        trained(configs(*RATES[::2], shared=(*switches.split(), "intervention=[]")))
    )


@pytest.mark.slow
@pytest.mark.parametrize("switches", SWITCHED[1:2])
def test_probes_change_no_bits(switches: str) -> None:
    names = "probes.names=[saturation,gradient_underflow,zero_gradients,gain_octave,gain_code,update_descent_cosine]"
    heard = trained(configs(*RATES, shared=(*switches.split(), names)))
    deaf = trained(configs(*RATES, shared=(*switches.split(), "probes=none")))
    assert [outcome for outcome, _ in heard] == [outcome for outcome, _ in deaf]


@pytest.mark.slow
@pytest.mark.parametrize("switches", [PLAIN[1], SWITCHED[0]])
def test_a_fleet_goes_on_from_its_tensors_to_the_same_bits(switches: str) -> None:
    """The history of scales and the random numbers are part of a checkpoint."""
    wanted = configs(*RATES[:2], shared=switches.split())

    def after(fleet: Fleet, steps: range) -> dict[str, Tensor]:
        for step in steps:
            fleet.step(step)
        return {name: tensor.clone() for name, tensor in fleet.tensors().items()}

    whole, half = Fleet(wanted), Fleet(wanted)
    expected, kept = after(whole, range(8)), after(half, range(4))
    fresh = Fleet(wanted)
    for name, tensor in fresh.tensors().items():
        tensor.data.copy_(kept[name])
    resumed = after(fresh, range(4, 8))
    assert all(torch.equal(value, resumed[name]) for name, value in expected.items())
    other = Fleet(wanted)
    for name, tensor in other.tensors().items():
        if not name.startswith("rounding."):
            tensor.data.copy_(kept[name])
    without = after(other, range(4, 8))
    assert not torch.equal(expected["weight.head"], without["weight.head"])  # the twin that must differ


def test_evaluating_changes_no_state() -> None:
    fleet = Fleet(configs(*RATES, shared=SWITCHED[1].split()))
    fleet.step(0)
    before = {name: tensor.clone() for name, tensor in fleet.tensors().items()}
    first = fleet.evaluation.loss(whole=False)
    assert torch.equal(first, fleet.evaluation.loss(whole=False))
    assert all(torch.equal(tensor, before[name]) for name, tensor in fleet.tensors().items())


def values(*overrides: str) -> Mapping[str, Any]:
    """The weights of a fleet after two updates, of which the first has learning rate 0."""
    fleet = Fleet(configs("", shared=overrides))
    fleet.step(0), fleet.step(1)
    return fleet.state.weights


def test_switches_change_what_they_name() -> None:
    plain = values("precision=mxfp8")
    switches = ("gradient_format=e4m3", "stochastic_rounding=gradients", "kept_in_bf16=ends")
    for switch in (*switches, "attention_precision=same", "weight_gradients=hadamard", "weight_gradients=bf16"):
        switched = values("precision=mxfp8", switch)
        assert not torch.equal(switched["block1.mlp_up"], plain["block1.mlp_up"]), switch
    # gains begin at one, which every format has: until they have moved nothing changes
    assert torch.equal(values("precision=mxfp8", "norm_gains=rounded")["block1.mlp_up"], plain["block1.mlp_up"])


def test_the_first_block_and_the_head_are_kept_in_bf16() -> None:
    kept = Fleet(configs("", shared=("precision=mxfp8", "kept_in_bf16=ends", "norm_gains=rounded"))).model
    operands = {name: layer.operands for name, layer in kept.layers() if hasattr(layer, "operands")}  # type: ignore
    rounds = {
        name.split(".")[0] for name, each in operands.items() if each is not torch.bfloat16 and "attention" not in name
    }
    assert rounds == {"block1"}
    gains = {name for name, layer in kept.layers() if layer.gain_rounding is not None}  # type: ignore
    assert "block1.mlp_norm" in gains
    assert not any(name.startswith("block0") for name in gains)


@pytest.mark.parametrize(
    "switches",
    [*(f"{name} attention_precision=same" for name in ("mxfp8", "mxfp4", "nvfp4")), "fp8_current", "nvfp4"],
)
def test_what_is_said_to_see_the_future_does(switches: str) -> None:
    """Blocks of values along positions, and a scale that all tokens share; `test_interventions` has all that do not."""
    made = model(0, 1, 2, 3, depth=1, operands=operand_format(*configs(f"precision={switches}")), dtype=torch.float32)
    rows_rbt, known = tokens(0, 1, 2, 3), 4
    other_rbt = rows_rbt.clone()
    other_rbt[..., known:] = (other_rbt[..., known:] + 1) % 11
    assert not torch.equal(made(rows_rbt)[0][..., :known, :], made(other_rbt)[0][..., :known, :])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_rounds_its_operands_to_bf16_and_none_of_its_results(precision: str) -> None:
    low = LowPrecision(precision, "e5m2", "none", "fp32", "ends", "bf16", "rounded")
    usual = low.at("block0.attention.scores")
    draws = torch.Generator().manual_seed(6)
    a, b, upstream = (torch.randn(2, *shape, generator=draws) for shape in ((5, 8), (8, 6), (5, 6)))
    first, second, third = (each.to(torch.bfloat16).float() for each in (a, b, upstream))
    ours = product(a.requires_grad_(), b.requires_grad_(), usual)
    theirs = (first @ second, third @ second.mT, first.mT @ third)
    for one, other in zip((ours, *torch.autograd.grad(ours, (a, b), upstream)), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_attention_has_its_precision_only_where_asked_for() -> None:
    """The operands that a step rounds to it, as probes hear of them."""
    heard = {}
    for attention in ("bf16", "same"):
        words = (f"precision=mxfp8 attention_precision={attention} probes.names=[saturation]",)
        [(_, rows)] = trained(configs(*words, shared=("probes.every=1", "steps=2")))
        heard[attention] = {where.rpartition(".")[0] for _, probe, where, _ in rows if probe == "saturation"}
    products = {f"block{block}.attention.{name}" for block in range(2) for name in ("scores", "mixing")}
    assert heard["same"] - heard["bf16"] == products
    assert "block0.attention.qkv" in heard["bf16"]


def test_ids_of_other_runs_know_nothing_of_the_switches() -> None:
    plain, usual, *switched = (
        columns(each).keys()
        for each in configs(
            "precision=bf16",
            "precision=mxfp8",
            "precision=mxfp8 attention_precision=same",  # as all runs were before there was the switch
            "precision=mxfp8 attention_precision=same norm_gains=rounded",
            "precision=mxfp8 attention_precision=same weight_gradients=bf16",
        )
    )
    expected = [{"attention_precision"}, set(), {"norm_gains"}, {"weight_gradients"}]
    assert [keys - plain for keys in (usual, *switched)] == expected
    assert not plain - usual


@pytest.mark.slow
def test_a_power_of_two_ahead_of_the_loss_changes_nothing() -> None:
    """What a loss scale cures in fp16, formats with scales do not have."""

    def after(precision: str, scale: float) -> Tensor:
        switches = (f"precision={precision}", "loss_scale=constant", f"loss_scale.init={scale}")
        return values(*switches)["block0.mlp_up"]

    for precision in ("fp8_current", "mxfp8"):
        assert torch.equal(after(precision, 1), after(precision, 2.0**-8))
    assert not torch.equal(after("fp16_emulated", 1), after("fp16_emulated", 2.0**-8))


def test_a_small_loss_scale_loses_gradients_in_fp16() -> None:
    shared = ("precision=fp16_emulated", "loss_scale=constant", "probes.names=[zero_gradients]")
    scales = ("loss_scale.init=1", "loss_scale.init=1e-3", "loss_scale.init=1e-6")
    shares = [
        max(value for _, _, where, value in rows if where == "block0.mlp_up")
        for _, rows in trained(configs(*scales, shared=shared))
    ]
    assert shares[0] < shares[1] < shares[2]
    assert shares[2] > 0.5


def test_clustering_of_gains_is_measured() -> None:
    fleet = Fleet(configs("", "", shared=("precision=mxfp8", "probes.names=[gain_octave,gain_code]", "probes.every=1")))
    gain_rd = fleet.state.weights["final_norm"].data
    gain_rd[0] = torch.linspace(0.93, 0.999, gain_rd.shape[1])
    gain_rd[1] = torch.linspace(0.5, 2.0, gain_rd.shape[1])
    measured = fleet.step(0)
    assert measured["gain_code", "final_norm"][0] == measured["gain_octave", "final_norm"][0] == 1
    assert measured["gain_code", "final_norm"][1] < 0.3
    assert 0.5 < measured["gain_octave", "final_norm"][1] < 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_step_rounds_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler is given is the whole step; kernels of so many roundings take it minutes."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    shared = (*SWITCHED[0].split(), "model.depth=1", "steps=6", "probes.names=[train_loss]", "probes.every=1")
    wanted = configs(*RATES[:2], shared=shared)
    eager, compiled = (trained([replace(each, engine=name) for each in wanted]) for name in ("eager", "compiled"))
    for (_, rows), (_, fast) in zip(eager, compiled, strict=True):
        losses, fast_losses = (torch.tensor([row[-1] for row in of]) for of in (rows, fast))
        torch.testing.assert_close(losses, fast_losses, rtol=2e-3, atol=0)
