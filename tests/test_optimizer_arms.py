"""The optimizer's arms do exactly what algebra says of them, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import Link
from lab.core.schema import stack
from lab.optim.links import Now
from lab.optim.links.adam import Adam, AdamBeta2Ramp
from lab.optim.links.clipping import Clip, ClipRelative, ClipUpdate
from lab.optim.links.learning_rate import DecayLRSquared
from lab.optim.optimizer import build_optimizer
from pieces import CPU, optimizer, recipe

LONG = 10**6  # steps after which no bias correction is left
BETA2 = (0.999, 0.99, 0.98, 0.95)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def directions(link: Link, gradients_sr: Tensor, first_step: int = LONG) -> Tensor:
    """What a link makes of one weight's gradients ``[s r]``, one after another; its state begins at zero."""
    weights = {"w": torch.ones(gradients_sr.shape[1], 1, dtype=gradients_sr.dtype)}
    state, made = link.begin(weights), []
    for step, gradient_r in enumerate(gradients_sr, first_step):
        now = Now(torch.tensor(step), weights, torch.ones(len(gradient_r), dtype=torch.float64), {"w": 1.0})
        made.append(link({"w": gradient_r[:, None].clone()}, state, now)["w"][:, 0])
    return torch.stack(made)


def adam(*beta2: float, beta1: float = 0.9, eps: float = 0.0) -> Adam:
    return Adam(numbers(*[beta1] * len(beta2)), numbers(*beta2), numbers(*[eps] * len(beta2)))


def alike(value: float, runs: int = 4, steps: int = 1) -> Tensor:
    return torch.full((steps, runs), value, dtype=torch.float64)


def test_the_largest_direction_of_any_gradients() -> None:
    """Gradients that grow by beta2 / beta1 reach the bound of Cauchy and Schwarz; nothing goes beyond it."""
    bound_r = 0.1 / ((1 - numbers(*BETA2)) * (1 - 0.81 / numbers(*BETA2))).sqrt()
    assert bound_r.tolist() == pytest.approx([7.27, 2.35, 1.70, 1.165], abs=5e-3)
    ages_s1 = torch.arange(399, -1, -1, dtype=torch.float64)[:, None]
    worst_r = directions(adam(*BETA2), (0.9 / numbers(*BETA2)) ** ages_s1)[-1]
    torch.testing.assert_close(worst_r, bound_r, rtol=1e-6, atol=0)
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        gradients_s1 = torch.randn(40, 1, generator=draws, dtype=torch.float64).exp().cumprod(0)
        assert (directions(adam(*BETA2), gradients_s1.expand(-1, 4)).abs() <= bound_r * (1 + 1e-9)).all()


def test_a_burst_after_a_long_silence() -> None:
    made_sr = directions(adam(*BETA2), alike(1.0, steps=60))
    assert made_sr[0].tolist() == pytest.approx([3.16, 1.0, 0.707, 0.447], abs=5e-3)
    assert made_sr.amax(0).tolist() == pytest.approx([6.57, 2.13, 1.55, 1.10], abs=5e-3)
    assert made_sr[:, 0].argmax() == 11  # the 12th step


def test_epsilon_attenuates_a_steady_direction() -> None:
    made_r = directions(Adam(numbers(0.9, 0.9), numbers(0.95, 0.95), numbers(1e-3, 1e-4)), alike(1e-3, 2, 900))[-1]
    assert made_r.tolist() == pytest.approx([0.5, 10 / 11], rel=1e-9)


def test_without_epsilon_a_second_moment_that_underflows_makes_no_direction() -> None:
    """In float32 the square of 1e-23 is 0 though the mean is not: the rule asks for v == 0, not for 0 / 0."""
    made_sr = directions(adam(0.95, 0.95), torch.tensor([[1e-23, 1e-3]]), first_step=0)
    assert made_sr.dtype == torch.float32
    assert made_sr.tolist() == [[0.0, 1.0]]


def test_without_epsilon_the_direction_fades_once_gradients_stop() -> None:
    silent_sr = torch.cat([alike(1.0), alike(0.0, steps=100)])
    made_sr = directions(adam(*BETA2), silent_sr)
    torch.testing.assert_close(made_sr[100] / made_sr[0], (0.9 / numbers(*BETA2).sqrt()) ** 100, rtol=1e-9, atol=0)
    assert directions(adam(*BETA2), alike(0.0, steps=3)).eq(0).all()  # a row of the embedding that no token uses


@pytest.mark.parametrize("limit", [2.5, 0.3])
def test_clipping_keeps_the_direction_and_cuts_the_norm(limit: float) -> None:
    gradient = {"a": torch.randn(1, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3}
    clipped = Clip(numbers(limit))(gradient, {}, None)["a"]  # type: ignore[arg-type]
    assert clipped.norm() == pytest.approx(limit, rel=1e-12)
    assert torch.cosine_similarity(clipped, gradient["a"]).item() == pytest.approx(1, abs=1e-12)


def path(name: str, steps: int = 50, **changes: Any) -> Tensor:
    """Where a chain leaves a vector whose gradients are large and noisy."""
    values = {**recipe("optimizer", name), **changes}
    chain = stack([build_optimizer(values)], CPU)
    weights = {"w": torch.ones(1, 7, dtype=torch.float64)}
    state, draws = chain.begin(weights), torch.Generator().manual_seed(2)
    for step in range(steps):
        gradient = 5 + torch.randn(1, 7, generator=draws, dtype=torch.float64)
        chain.step({"w": gradient}, state, Now(torch.tensor(step), weights, numbers(1.0), {"w": 1.0}))
    return weights["w"]


def test_half_the_threshold_is_the_same_path_where_every_step_is_clipped() -> None:
    whole, half = (path("adamw", clip=clip, eps=0.0, lr=1e-2) for clip in (1.0, 0.5))
    torch.testing.assert_close(whole, half, rtol=1e-12, atol=0)
    assert (path("adamw", clip=math.inf, eps=0.0, lr=1e-2) - whole).abs().max() > 1e-4


def test_relative_clipping_cuts_a_burst_and_follows_a_lasting_change() -> None:
    gradients_sr = torch.cat([alike(-2.0, 1, 50), alike(1000.0, 1, 3), alike(-2.0, 1, 5), alike(20.0, 1, 400)])
    made_s = directions(ClipRelative(numbers(3.0), numbers(0.99)), gradients_sr)[:, 0]
    assert torch.equal(made_s[:50], gradients_sr[:50, 0])  # nothing is clipped that is not a burst
    averages = [2 * (0.99 + 0.01 * 3) ** burst for burst in range(3)]
    assert made_s[50:53].tolist() == pytest.approx([3 * average for average in averages], rel=1e-12)
    assert torch.equal(made_s[53:58], gradients_sr[53:58, 0])
    assert made_s[-1] == 20  # the average has followed


def test_relative_clipping_keeps_a_broken_gradient_broken() -> None:
    made_sr = directions(ClipRelative(numbers(3.0, 3.0), numbers(0.9, 0.9)), numbers(1.0, math.nan)[None])
    assert made_sr[0, 0] == 1
    assert made_sr[0, 1].isnan()


def test_the_clipped_update_has_at_most_its_rms_in_each_weight() -> None:
    updates = {"a": torch.tensor([[3.0, 4.0], [0.3, 0.4]]).double(), "b": torch.tensor([[0.5], [8.0]]).double()}
    clipped = ClipUpdate(numbers(1.0, math.inf))(updates, {}, None)  # type: ignore[arg-type]
    torch.testing.assert_close(clipped["a"][0], updates["a"][0] / math.sqrt(12.5))
    assert torch.equal(clipped["b"][0], updates["b"][0])
    assert all(torch.equal(clipped[name][1], updates[name][1]) for name in updates)


def test_windows_of_the_ramped_beta2_and_its_answer_to_a_burst() -> None:
    """1 / (1 - beta2) is k ** 0.8, and the first step of a burst is 0.1 k ** 0.4."""
    for k, window, first in ((100, 40, 0.63), (1000, 251, 1.58), (10_000, 1585, 3.98), (255_000, 21_146, 14.5)):
        made = directions(AdamBeta2Ramp(numbers(0.9), numbers(0.8), numbers(0.0)), alike(1.0, 1), first_step=k - 1)
        unbias1 = 1 - 0.9**k
        assert (made.item() * unbias1) == pytest.approx(0.1 * k**0.4, rel=1e-9)
        assert (made.item() * unbias1 / 0.1) ** 2 == pytest.approx(window, rel=0.01)
        assert made.item() == pytest.approx(first, rel=0.01)


def test_the_ramped_beta2_weighs_squares_as_its_formula_says() -> None:
    gradients_sr = torch.randn(30, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    made_s = directions(AdamBeta2Ramp(numbers(0.0), numbers(0.8), numbers(0.0)), gradients_sr, first_step=0)[:, 0]
    square = 0.0
    for k, (made, gradient) in enumerate(zip(made_s.tolist(), gradients_sr[:, 0].tolist(), strict=True), 1):
        square = (1 - k**-0.8) * square + k**-0.8 * gradient**2
        assert made == pytest.approx(gradient / math.sqrt(square), rel=1e-9)


def test_steps_relative_to_the_weight_grow_with_it() -> None:
    """A weight times c gets an update times c, down to the least RMS."""
    ends = []
    for scale in (1.0, 64.0):
        chain = optimizer("palm", {"lr": 0.1})
        weights = {"w": scale * torch.arange(1.0, 6.0, dtype=torch.float64)[None]}
        gradient = torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0]], dtype=torch.float64)
        chain.step({"w": gradient}, chain.begin(weights), Now(torch.tensor(0), weights, numbers(1.0), {"w": 1.0}))
        ends.append(weights["w"])
    torch.testing.assert_close(ends[1], 64 * ends[0], rtol=1e-15, atol=0)


def shrunk(link: Link | Any, shapes: Iterable[float]) -> Tensor:
    """The share of a weight that is left after steps without a gradient, one per value of the schedule."""
    weights = {"w": torch.ones(1, 1, dtype=torch.float64)}
    for shape in shapes:
        now = Now(torch.tensor(0), weights, numbers(shape), {"w": 1.0})
        weights["w"].sub_(link({"w": torch.zeros(1, 1, dtype=torch.float64)}, {}, now)["w"])
    return weights["w"]


def test_decay_by_the_learning_rate_squared() -> None:
    left = shrunk(DecayLRSquared(numbers(0.1)), (1.0, 0.5, 0.1))
    assert left.item() == pytest.approx((1 - 0.01) * (1 - 0.0025) * (1 - 1e-4), rel=1e-12)
    one_step = shrunk(DecayLRSquared(numbers(1e-2)), (1.0,)).item()
    assert math.log(0.5) / math.log(one_step) == pytest.approx(math.log(2) / 1e-4, rel=1e-4)  # half-life in steps
    chain = list(optimizer("palm", {}).links)
    assert chain[-2:] == ["schedule", "decay_lr_squared"]  # nothing multiplies the decay by the learning rate again


@pytest.mark.parametrize(
    ("lr", "decay", "half_life"), [(3e-4, 0.1, 23_105), (3e-4, 0.05, 46_210), (6e-5, 0.1, 115_525)]
)
def test_half_lives_of_weights_under_coupled_decay(lr: float, decay: float, half_life: int) -> None:
    chain = optimizer("adamw_coupled", {"lr": lr, "weight_decay": decay})
    weights = {"w": torch.ones(1, 1, dtype=torch.float64)}
    still, state = {"w": torch.zeros(1, 1, dtype=torch.float64)}, chain.begin(weights)
    for step in range(50):
        chain.step(still, state, Now(torch.tensor(step), weights, numbers(1.0), {"w": 1.0}))
    assert weights["w"].item() == pytest.approx((1 - lr * decay) ** 50, rel=1e-12)
    assert 50 * math.log(0.5) / math.log(weights["w"].item()) == pytest.approx(half_life, rel=1e-4)


@pytest.mark.parametrize("eps", [100.0, 1.0])
@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0])
def test_fake_sgdw_errs_by_the_root_of_v_over_epsilon(eps: float, size: float) -> None:
    gradients_sr = alike(size, 1, 5)
    link = optimizer("fake_sgdw", {"eps": eps}).links["adam"]
    error = 1 - directions(link, gradients_sr, first_step=0)[-1].item() * eps / size
    assert error == pytest.approx(size / (size + eps), rel=1e-6)


def test_fake_sgdw_with_a_small_gradient_is_sgdw() -> None:
    fake = path("fake_sgdw", eps=1e6, lr=1e6 * 1e-3, weight_decay=0.0, clip=math.inf)
    torch.testing.assert_close(fake, path("sgd", lr=1e-3, weight_decay=0.0, clip=math.inf), rtol=1e-5, atol=0)


def roots_of_squares(link: Link, gradients_sn: Tensor) -> Tensor:
    """Root of Adam's unbiased second moment ``[s n]`` of one row per column, after each of its steps."""
    weights = {"w": torch.ones(1, gradients_sn.shape[1], dtype=torch.float64)}
    state, squares = link.begin(weights), []
    for step, gradient_n in enumerate(gradients_sn):
        now = Now(torch.tensor(step), weights, numbers(1.0), {"w": 1.0})
        link({"w": gradient_n[None].clone()}, state, now)
        squares.append(state["square.w"][0] / (1 - link.beta2 ** (step + 1) if isinstance(link, Adam) else 1.0))
    return torch.stack(squares).sqrt()


RAMP, CONSTANT = AdamBeta2Ramp(numbers(0.9), numbers(0.8), numbers(0.0)), adam(0.99)


@pytest.mark.slow
def test_a_memory_that_grows_with_the_steps_serves_rare_tokens() -> None:
    """Once it is the longer one, the roots of their second moments vary less over time than with beta2 0.99.

    Each row has a gradient of 1 where its token occurs, with probability p in each step.
    """
    rare, steps, rows = numbers(1 / 128, 1 / 512, 1 / 2048), 4000, 100
    draws_spn = torch.rand(steps, 3, rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients_sn = (draws_spn < rare[:, None]).double().flatten(1)
    ramp_spn, constant_spn = (roots_of_squares(link, gradients_sn).view_as(draws_spn) for link in (RAMP, CONSTANT))
    late, early = slice(steps // 4, None), slice(20, 120)
    assert (variation(ramp_spn[late]) < 0.6 * variation(constant_spn[late])).all()
    assert variation(ramp_spn[early])[0] > variation(constant_spn[early])[0]


def variation(roots_spn: Tensor) -> Tensor:
    """Coefficient of variation over time ``[p]``, the mean over rows that ever had a gradient."""
    return (roots_spn.std(0) / roots_spn.mean(0)).nanmean(1)


def test_the_growing_memory_estimates_better_from_step_348() -> None:
    """The squared coefficient of variation of v is (1 - p) / p times the sum of the squared weights of its average.

    At step 317 the growing memory becomes longer than 100 steps; the shorter ones before still have weights.
    """
    impulses_sn = torch.eye(1000, dtype=torch.float64)  # the second moments after a step are the weights of all steps
    ramp_sn, constant_sn = (roots_of_squares(link, impulses_sn).square() for link in (RAMP, CONSTANT))
    for weights_sn in (ramp_sn, constant_sn):
        torch.testing.assert_close(weights_sn.sum(1), torch.ones(1000, dtype=torch.float64), rtol=1e-12, atol=0)
    is_better_s = ramp_sn.square().sum(1) < constant_sn.square().sum(1)
    assert is_better_s.nonzero()[:, 0].tolist() == list(range(348 - 1, 1000))
