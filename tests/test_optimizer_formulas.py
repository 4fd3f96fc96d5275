"""Each published optimizer against a few independent lines in float64, its test vectors, and its identities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from lab import Link, Role
from lab.core.hooks import listening
from lab.core.schema import stack
from lab.optim.links import Now
from lab.optim.links.adam import Adam, AdamAtan2, AdEMAMix, Adopt, GIAdam, Spam, StableAdam
from lab.optim.links.clipping import AdaGC, Gate, SkipSigma, StableSpam, ZClip
from lab.optim.links.learning_rate import Cautious, CautiousDecay, CorrectedDecay, Decay, ToWeightNorm
from lab.optim.links.momentum import Lion, ScheduleFree
from lab.optim.links.muon import NEWTON_SCHULZ, Muon, orthogonalize
from lab.optim.links.projections import KeepNorm, QKClip, SpectralCap
from lab.optim.optimizer import build_optimizer
from pieces import CPU, optimizer, recipe

QUERY, KEY = "block0.attention.query", "block0.attention.key"
# One tensor of each role, of sizes that differ.
SHAPES = {"embedding": (7, 4), QUERY: (4, 6), KEY: (4, 6), "block0.mlp_up": (4, 9), "final_norm": (4,), "head": (4, 7)}
ROLES = {
    **{"embedding": Role.EMBEDDING, QUERY: Role.QUERY, KEY: Role.MATRIX, "block0.mlp_up": Role.MATRIX},
    **{"final_norm": Role.GAIN, "head": Role.HEAD},
}
Tensors = dict[str, Tensor]


def draws(seed: int) -> Tensors:
    """One tensor ``[1 ...]`` of each role."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((1, *shape), generator=generator, dtype=torch.float64).contiguous()
        for name, shape in SHAPES.items()
    }


def now(step: int, weights: Mapping[str, Tensor], shape: float = 1.0, **more: Any) -> Now:
    shape_r = torch.full((len(next(iter(weights.values()))),), shape, dtype=torch.float64)
    return Now(torch.tensor(step), weights, shape_r, dict.fromkeys(weights, 1.0), roles=ROLES, **more)


def of_run(kind: Any, *values: Any, **named: Any) -> Any:
    """A link of a fleet of one run, its numbers as a fleet has them."""
    return stack([kind(*values, **named)], CPU)


def follow(link: Link, gradients_sn: Tensor, **more: Any) -> Tensor:
    """What a link makes of one vector's gradients ``[s n]``, one after the other."""
    weights = {"w": torch.ones(1, gradients_sn.shape[1], dtype=torch.float64)}
    state, made = link.begin(weights), []
    for step, gradient_n in enumerate(gradients_sn):
        given = {"w": gradient_n[None].clone()}
        made.append(link(given, state, now(step, weights, gradients=given, **more))["w"][0].clone())
    return torch.stack(made)


def random_gradients(steps: int = 12, size: int = 5, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, size, generator=generator, dtype=torch.float64)


def walk(chain: Any, steps: int, shapes: Sequence[float] | None = None, seed: int = 0, **more: Any) -> Tensors:
    """Weights after so many steps with random gradients."""
    weights = draws(1000 + seed)
    state = chain.begin(weights, ROLES)
    for step in range(steps):
        shape = shapes[step] if shapes else 1.0
        chain.step(draws(seed * 100 + step), state, now(step, weights, shape, steps=steps), **more)
    return weights


def chain_of(name: str, **changes: Any) -> Any:
    return optimizer(name, changes)


def close(ours: Tensor, theirs: Tensor | Sequence[float], rtol: float = 1e-12) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=torch.float64), rtol=rtol, atol=1e-14)


# Lion, GI-Adam, ADOPT, AdEMAMix, StableAdamW, Adam-atan2


def test_lion_s_two_interpolations() -> None:
    link = of_run(Lion, 0.9, 0.99)
    weights = {"w": torch.ones(1, 1, dtype=torch.float64)}
    state = {"mean.w": torch.full((1, 1), 0.5, dtype=torch.float64)}
    made = link({"w": torch.full((1, 1), -1.0, dtype=torch.float64)}, state, now(0, weights))
    assert made["w"].item() == 1.0
    close(state["mean.w"][0], [0.485])
    gradients_sn, mean = random_gradients(), torch.zeros(5, dtype=torch.float64)
    for ours, gradient in zip(follow(link, gradients_sn), gradients_sn, strict=True):
        close(ours, (0.9 * mean + 0.1 * gradient).sign())
        mean = 0.99 * mean + 0.01 * gradient
    assert torch.equal(follow(link, gradients_sn), follow(link, 64 * gradients_sn))
    assert torch.equal(follow(of_run(Lion, 0.0, 0.0), gradients_sn), gradients_sn.sign())


def test_a_broken_gradient_stays_broken_under_lion() -> None:
    assert follow(of_run(Lion, 0.9, 0.99), torch.tensor([[math.nan, 1.0]], dtype=torch.float64)).isnan().tolist() == [
        [True, False]
    ]


def test_gi_adam_begins_at_the_first_square() -> None:
    gradients_sn = random_gradients()
    ours = follow(of_run(GIAdam, 0.9, 0.95, 1e-8), gradients_sn)
    mean, square = torch.zeros(5, dtype=torch.float64), gradients_sn[0] ** 2
    for step, gradient in enumerate(gradients_sn):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        close(ours[step], mean / (1 - 0.9 ** (step + 1)) / (square.sqrt() + 1e-8))
    close(ours[0], gradients_sn[0].sign(), rtol=1e-6)
    late = random_gradients(700)
    adam, gi_adam = (follow(of_run(kind, 0.9, 0.95, 1e-8), late)[-1] for kind in (Adam, GIAdam))
    close(gi_adam, adam)


def test_adopt_divides_by_the_moment_before() -> None:
    gradients_sn = random_gradients()
    ours = follow(of_run(Adopt, 0.9, 0.999, 1e-6, 0.25), gradients_sn)
    assert ours[0].eq(0).all()
    mean, square = torch.zeros(5, dtype=torch.float64), gradients_sn[0] ** 2
    for step, gradient in list(enumerate(gradients_sn))[1:]:
        quotient = (gradient / square.sqrt().clamp(min=1e-6)).clamp(-(step**0.25), step**0.25)
        mean = mean + 0.1 * (quotient - mean)
        close(ours[step], mean)
        square = 0.999 * square + 0.001 * gradient**2


def test_adopt_without_its_clip_answers_a_spike_with_a_larger_step() -> None:
    """The spike is divided by a moment that knows nothing of it; clipped it is step ** 0.25 at most."""
    spike_sn = torch.cat(
        [torch.full((16, 1), 0.1, dtype=torch.float64), torch.full((1, 1), 100.0, dtype=torch.float64)]
    )
    free, clipped = (follow(of_run(Adopt, 0.0, 0.99, 1e-6, power), spike_sn)[-1].item() for power in (4.0, 0.25))
    assert free == pytest.approx(1000)
    assert clipped == pytest.approx(2.0)


def test_ademamix_is_adam_with_a_slow_average() -> None:
    gradients_sn, steps = random_gradients(), 12
    link = of_run(AdEMAMix, 0.9, 0.95, 0.9999, 1e-8, 2.0, 1.0)
    close(link.slow_memory(torch.tensor(0.5, dtype=torch.float64)), [0.99980020], rtol=1e-8)
    ours = follow(link, gradients_sn, steps=steps)
    mean, square, slow = (torch.zeros(5, dtype=torch.float64) for _ in range(3))
    first, last = (math.log(0.5) / math.log(beta) - 1 for beta in (0.9, 0.9999))
    for step, gradient in enumerate(gradients_sn):
        share = (step + 1) / steps
        beta3 = 0.5 ** (1 / (first + share * (last - first) + 1))
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        slow = beta3 * slow + (1 - beta3) * gradient
        unbiased = mean / (1 - 0.9 ** (step + 1))
        root = (square / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
        close(ours[step], (unbiased + 2 * share * slow) / root)
    close(
        follow(of_run(AdEMAMix, 0.9, 0.95, 0.9999, 1e-8, 0.0, 1.0), gradients_sn, steps=steps),
        follow(ADAM, gradients_sn),
    )


ADAM = of_run(Adam, 0.9, 0.95, 1e-8)


@pytest.mark.parametrize("size", [1.0, 1e-5, 1e-10])
def test_stable_adam_divides_by_the_rms_of_the_ratio(size: float) -> None:
    """With gradients of 1e-5 the second moment of 1e-10 lies above epsilon squared, and below epsilon."""
    gradients_sn = size * random_gradients()
    ours, adam = follow(of_run(StableAdam, 0.9, 0.95, 1e-8), gradients_sn), follow(ADAM, gradients_sn)
    square = torch.zeros(5, dtype=torch.float64)
    factors = []
    for step, gradient in enumerate(gradients_sn):
        square = 0.95 * square + 0.05 * gradient**2
        ratio = (gradient**2 / (square / (1 - 0.95 ** (step + 1))).clamp(min=1e-16)).mean().sqrt()
        factors.append(1 / max(1.0, float(ratio)))
        close(ours[step], adam[step] * factors[-1])
    assert (min(factors) < 1) == (size > 1e-8)  # below epsilon nothing is divided
    assert max(factors) == 1


def test_stable_adam_s_factor_of_a_spike_and_where_it_is_adam() -> None:
    """g = 4 where the unbiased second moment is 1: a quarter of the step."""
    weights = {"w": torch.ones(1, 3, dtype=torch.float64)}
    late, (beta2, square) = 10**6, (0.99, (1 - 0.01 * 16) / 0.99)  # so that it is 1 once 4 has entered
    made = []
    for kind in (StableAdam, Adam):
        state = {"mean.w": torch.zeros(1, 3).double(), "square.w": torch.full((1, 3), square).double()}
        made.append(
            of_run(kind, 0.9, beta2, 1e-8)({"w": torch.full((1, 3), 4.0).double()}, state, now(late, weights))["w"]
        )
    close(made[0], made[1] / 4, rtol=1e-7)
    steady_sn = torch.full((20, 4), 0.3, dtype=torch.float64)
    close(follow(of_run(StableAdam, 0.9, 0.95, 1e-8), steady_sn), follow(ADAM, steady_sn))
    gradients_sn = random_gradients()
    close(
        follow(of_run(StableAdam, 0.9, 0.95, 0.0), gradients_sn),
        follow(of_run(StableAdam, 0.9, 0.95, 0.0), 1e3 * gradients_sn),
        rtol=1e-9,
    )


def test_adam_atan2_is_an_arctangent_of_moments() -> None:
    for mean, expected in ((1.0, 0.99745567), (0.1, 0.12657919), (10.0, 1.86833215)):
        assert 1.27 * math.atan2(mean, 1.0) == pytest.approx(expected, abs=1e-8)  # the reference's own numbers
    gradients_sn = random_gradients()
    link = of_run(AdamAtan2, 0.9, 0.95, 1.27, 1.0)
    ours = follow(link, gradients_sn)
    mean, square = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for step, gradient in enumerate(gradients_sn):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        unbiased = mean / (1 - 0.9 ** (step + 1)), (square / (1 - 0.95 ** (step + 1))).sqrt()
        close(ours[step], [1.27 * math.atan2(m, root) for m, root in zip(*(u.tolist() for u in unbiased), strict=True)])
    assert torch.equal(follow(link, 2.0**40 * gradients_sn), ours)
    assert (ours.abs() <= 1.27 * math.pi / 2).all()
    assert follow(link, torch.zeros(3, 2, dtype=torch.float64)).eq(0).all()


# SPAM and Stable-SPAM


def spam(**changes: float) -> Spam:
    usual = {"spike_ratio": 9.0, "spike_patience": 2.0, "reset_every": math.inf, "reset_warmup": 4.0}
    return of_run(Spam, 0.9, 0.95, 1e-8, **{**usual, **changes})


def test_spam_clips_a_spiked_entry_and_is_adam_without() -> None:
    gradients_sn = random_gradients()
    assert torch.equal(follow(spam(spike_ratio=math.inf), gradients_sn), follow(ADAM, gradients_sn))
    spiked = gradients_sn.clone()
    spiked[6, 2] = -1000.0
    square = torch.zeros(5, dtype=torch.float64)
    for gradient in (by_hand := spiked.clone()):
        limit = 3 * square.sqrt()
        clips = (gradient.abs() > limit) & (square > 0)
        if not torch.equal(gradient, by_hand[0]) and not torch.equal(gradient, by_hand[1]):  # of the first two, none
            gradient.copy_(torch.where(clips, gradient.sign() * limit, gradient))
        square = 0.95 * square + 0.05 * gradient**2
    assert -3 < by_hand[6, 2] < 0
    close(follow(spam(), spiked), follow(ADAM, by_hand))


def test_spam_begins_anew_after_a_reset() -> None:
    gradients_sn = random_gradients(5).repeat(2, 1)
    ours = follow(spam(spike_ratio=math.inf, reset_every=5), gradients_sn)
    rise = torch.tensor([(1 - math.cos(math.pi * min(1, k / 4))) / 2 for k in range(1, 6)], dtype=torch.float64)
    close(ours[5:], ours[:5] * rise[:, None])
    assert rise[0] < 0.2 < rise[3] == 1


def test_stable_spam_scales_by_largest_entries_and_norms_so_far() -> None:
    gradients_sn = random_gradients()
    gradients_sn[7, 1] = 50.0
    ours = follow(of_run(StableSpam, 0.9, 0.7, 0.8), gradients_sn)
    largest = norm = square = 0.0
    for step, gradient in enumerate(gradients_sn, 1):
        largest = 0.9 * largest + 0.1 * float(gradient.abs().max())
        usual = largest / (1 - 0.9**step)
        g = torch.where(gradient.abs() > usual, gradient / gradient.abs().max() * usual, gradient)
        norm, square = 0.7 * norm + 0.3 * float(g.norm()), 0.8 * square + 0.2 * float(g.norm()) ** 2
        g = g / g.norm() * (norm / (1 - 0.7**step)) / math.sqrt(square / (1 - 0.8**step))
        close(ours[step - 1], g)
    close(ours[0].norm(), 1.0)


# Clipping


def test_zclip_by_its_test_vector_and_by_hand() -> None:
    link = of_run(ZClip, 2.5, 0.97, 25.0, math.inf)
    weights = {"w": torch.ones(1, 1, dtype=torch.float64)}
    state = {
        name: torch.full((1,), value).double() for name, value in (("mean", 1.0), ("variance", 0.04), ("count", 25.0))
    }
    made = link({"w": torch.full((1, 1), 3.0).double()}, state, now(25, weights))
    close(made["w"][0], [1.12500063], rtol=1e-8)
    close(state["mean"], [1.00375002], rtol=1e-8)
    close(state["variance"], [0.03924105], rtol=1e-6)
    gradients_sn = random_gradients(40, 3)
    gradients_sn[30] *= 1000
    gradients_sn[35] *= 1e9
    ours, norms = follow(link, gradients_sn).norm(dim=1), gradients_sn.norm(dim=1)
    close(ours[:25], norms[:25])
    mean, variance = float(norms[:25].mean()), float(norms[:25].var(correction=0))
    for step in range(25, 40):
        n, sigma = float(norms[step]), math.sqrt(variance)
        z = (n - mean) / (sigma + 1e-6)
        n = mean + 2.5 * sigma * (2.5 / z) if z > 2.5 else n
        assert ours[step] == pytest.approx(n, rel=1e-9)
        mean, before = 0.97 * mean + 0.03 * n, variance
        variance = 0.97 * before + 0.03 * (n - mean) ** 2
    assert ours[35] < 2 * norms[:25].mean()


def test_zclip_leaves_constant_norms_and_bounds_all() -> None:
    steady_sn = torch.full((60, 3), 0.25, dtype=torch.float64)
    assert torch.equal(follow(of_run(ZClip, 2.5, 0.97, 25.0, 1.0), steady_sn), steady_sn)
    close(follow(of_run(ZClip, 2.5, 0.97, 25.0, 0.1), steady_sn).norm(dim=1), [0.1] * 60)


def test_adagc_by_its_test_vector_and_by_hand() -> None:
    link = of_run(AdaGC, 1.05, 0.98, 100.0, 1.0)
    weights = {"w": torch.ones(1, 1, dtype=torch.float64)}
    state = {"count": torch.full((1,), 100.0).double(), "norm.w": torch.ones(1).double()}
    made = link({"w": torch.full((1, 1), 10.0).double()}, state, now(100, weights))
    close(made["w"][0], [1.05])
    close(state["norm.w"], [1.001])
    gradients_sn = random_gradients(20, 3)
    ours, average = follow(of_run(AdaGC, 1.05, 0.98, 5.0, 1.0), gradients_sn), math.inf
    for step, gradient in enumerate(gradients_sn):
        norm = float(gradient.norm())
        after = min(1.0, norm) if step < 5 else min(norm, 1.05 * average)
        close(ours[step], gradient * after / norm)
        before, average = average, min(average, after) if step < 5 else 0.98 * average + 0.02 * after
        assert step < 5 or average <= 1.001 * before * (1 + 1e-12)
    steady_sn = torch.full((20, 3), 0.25, dtype=torch.float64)
    close(follow(of_run(AdaGC, 1.05, 0.98, 5.0, 1.0), steady_sn), steady_sn)


def test_adagc_waits_for_the_first_gradient_of_a_tensor() -> None:
    """Keys have none while queries are zero, as they begin in mup_full."""
    late_sn = torch.cat([torch.zeros(8, 2, dtype=torch.float64), torch.full((3, 2), 0.5, dtype=torch.float64)])
    assert torch.equal(follow(of_run(AdaGC, 1.05, 0.98, 5.0, 1.0), late_sn), late_sn)


# Cautious updates and decays


def test_cautious_moves_no_entry_uphill() -> None:
    updates, gradients = draws(0), draws(1)
    for gradient in gradients.values():
        gradient[..., 0] = 0.0  # an entry without a gradient does not move either
    made = Cautious()(updates, {}, now(0, draws(2), gradients=gradients))
    for name, update in updates.items():
        agrees = update * gradients[name] > 0
        close(made[name], torch.where(agrees, update / agrees.double().mean(), torch.zeros_like(update)))
        assert (made[name] * gradients[name] >= 0).all()
        assert agrees.any()
        assert not agrees.all()
    same = Cautious()(updates, {}, now(0, draws(2), gradients=updates))
    assert all(torch.equal(same[name], updates[name]) for name in updates)
    opposed = Cautious()(updates, {}, now(0, draws(2), gradients={name: -u for name, u in updates.items()}))
    assert all(value.eq(0).all() for value in opposed.values())


def test_cautious_adam_is_not_adam() -> None:
    """A mask of the momentum with itself would be all true, as in a public implementation."""
    cautious, plain = (walk(chain_of(name), 5) for name in ("adamw_cautious", "adamw"))
    assert all((cautious[name] != plain[name]).any() for name in SHAPES)


def test_cautious_decay_shrinks_only_where_the_update_does() -> None:
    updates, weights = draws(0), draws(1)
    made = of_run(CautiousDecay, 0.3)(updates, {}, now(0, weights))
    for name, update in updates.items():
        decays = update * weights[name] >= 0
        close(made[name], torch.where(decays, update + 0.3 * weights[name], update))


def test_corrected_decay_falls_with_the_squared_schedule() -> None:
    updates, weights = draws(0), draws(1)
    peak, plain = (of_run(kind, 0.3)(updates, {}, now(0, weights)) for kind in (CorrectedDecay, Decay))
    assert all(torch.equal(peak[name], plain[name]) for name in SHAPES)
    half = of_run(CorrectedDecay, 0.3)(updates, {}, now(0, weights, 0.5))
    for name in SHAPES:
        factor = 1.0 if name in ("head", "final_norm") else 0.5
        close(half[name], updates[name] + 0.3 * factor * weights[name])
    still = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    chain, before = chain_of("adamc", weight_decay=0.2), draws(1000)
    weights, state = draws(1000), None
    state = chain.begin(weights, ROLES)
    chain.step(still, state, now(0, weights, 0.5))
    close(weights[QUERY], before[QUERY] * (1 - 0.2 * 0.25))
    close(weights["head"], before["head"] * (1 - 0.2 * 0.5))


# Muon


@pytest.mark.parametrize("preset", NEWTON_SCHULZ)
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5)])
def test_newton_schulz_maps_singular_values_alone(preset: str, shape: tuple[int, int]) -> None:
    matrix = torch.randn((2, *shape), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (made,) = orthogonalize([matrix], preset)
    for each, after in zip(matrix, made, strict=True):
        left, values, right = torch.linalg.svd(each, full_matrices=False)
        values = values / values.norm() / (1.02 if preset == "polar_express" else 1.0)
        for a, b, c in NEWTON_SCHULZ[preset]:
            values = a * values + b * values**3 + c * values**5
        close(after, (left * values) @ right, rtol=1e-9)


def test_newton_schulz_by_its_test_vectors() -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.5], dtype=torch.float64))[None]
    (five,), (twelve,) = (orthogonalize([matrix], preset) for preset in ("original", "twelve"))
    close(five[0].diagonal(), [0.68876277, 1.11416400], rtol=1e-8)
    close(twelve[0].diagonal(), [1.0, 1.0], rtol=1e-6)
    random = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (made,) = orthogonalize([random], "twelve")
    torch.testing.assert_close(made.transpose(1, 2) @ made, torch.eye(6).double().expand(3, 6, 6), rtol=0, atol=1e-5)
    torch.testing.assert_close(orthogonalize([1000 * random], "twelve")[0], made, rtol=1e-9, atol=1e-12)
    turn = torch.linalg.qr(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).Q
    torch.testing.assert_close(
        orthogonalize([turn @ random], "original")[0], turn @ orthogonalize([random], "original")[0]
    )
    assert orthogonalize([torch.zeros(1, 3, 2)], "original")[0].eq(0).all()


@pytest.mark.parametrize("preset", NEWTON_SCHULZ)
def test_where_singular_values_end(preset: str) -> None:
    low, high = {"original": (0.68, 1.15), "twelve": (1, 1), "quintic": (0.98, 1.11), "polar_express": (0.86, 1.14)}[
        preset
    ]
    values = torch.linspace(0.005, 1 / 1.02, 4000, dtype=torch.float64)
    for a, b, c in NEWTON_SCHULZ[preset]:
        values = a * values + b * values**3 + c * values**5
    assert low - 0.01 < values.min() < values.max() < high + 0.01


def test_matrices_are_multiplied_together_to_the_same_result() -> None:
    shapes = [(4, 9), (9, 4), (4, 9), (5, 5)]
    generator = torch.Generator().manual_seed(4)
    matrices = [torch.randn((3, *shape), generator=generator) for shape in shapes]
    for made, each in zip(orthogonalize(matrices, "original"), matrices, strict=True):
        torch.testing.assert_close(made, orthogonalize([each], "original")[0])
        assert made.is_contiguous()


@pytest.mark.parametrize("lr_scale", ["original", "match_rms_adamw"])
def test_muon_equals_torchs_on_the_matrices_of_the_blocks(lr_scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's iterates in bfloat16; here it iterates in float64, as it would without that cast."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    values = {**recipe("optimizer", "muon"), "chain": ["muon", "adam", "decay", "peak", "schedule"], "lr": 0.02}
    del values["clip"]
    chain = stack([build_optimizer({**values, "weight_decay": 0.1, "lr_scale": lr_scale})], CPU)
    shapes = [1.0, 0.5, 0.8, 0.3, 1.0, 0.2]
    ours = walk(chain, 6, shapes)
    theirs = {
        name: weight[0].clone() for name, weight in draws(1000).items() if ROLES[name] in (Role.MATRIX, Role.QUERY)
    }
    # torch's matrices are [out, in]
    parameters = {name: torch.nn.Parameter(weight.T.contiguous()) for name, weight in theirs.items()}
    a, b, c = NEWTON_SCHULZ["original"][0]
    torchs = _muon.Muon(
        parameters.values(), lr=1.0, weight_decay=0.1, momentum=0.95, ns_coefficients=(a, b, c), adjust_lr_fn=lr_scale
    )
    for step, shape in enumerate(shapes):
        torchs.param_groups[0]["lr"] = 0.02 * shape
        for name, parameter in parameters.items():
            parameter.grad = draws(step)[name][0].T.contiguous()
        torchs.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(ours[name][0], parameter.detach().T, rtol=1e-10, atol=1e-12)


def test_muon_leaves_all_other_weights_to_adam() -> None:
    muon, adamw = (walk(chain_of(name, clip=math.inf), 5) for name in ("muon", "adamw"))
    for name in SHAPES:
        assert torch.equal(muon[name], adamw[name]) == (ROLES[name] not in (Role.MATRIX, Role.QUERY))
    state = chain_of("muon").begin(draws(0), ROLES)
    assert set(state["muon"]) == {f"mean.{name}" for name in (QUERY, KEY, "block0.mlp_up")}
    assert set(state["adam"]) == {
        f"{m}.{name}" for m in ("mean", "square") for name in ("embedding", "final_norm", "head")
    }


def test_muon_clip_adamw_clips_what_adam_updates_by_its_own_norm() -> None:
    most, matrices = 0.5, {QUERY, KEY, "block0.mlp_up"}
    chain = chain_of("muon_clip_adamw", clip=most)
    heard: dict[str, Tensors] = {}
    with listening(lambda kind, _, *given: heard.update({kind: dict(given[0])})):
        for step, size in enumerate((1.0, 1e-3)):  # above the limit, and below it
            gradients = {name: size * gradient for name, gradient in draws(step).items()}
            chain.step(dict(gradients), chain.begin(draws(0), ROLES), now(0, draws(1000)))
            norm = math.sqrt(sum((gradients[name] ** 2).sum().item() for name in {*SHAPES} - matrices))
            assert (norm > most) == (size == 1.0)
            for name, gradient in gradients.items():
                kept = 1.0 if name in matrices else min(1.0, most / norm)
                close(heard["clipped_gradients"][name], kept * gradient)
    # so its matrices go as under Muon without a clip, and its other weights not as under AdamW's clip of all
    clipped, free, adamw = (
        walk(chain_of(name, clip=limit), 5)
        for name, limit in (("muon_clip_adamw", most), ("muon", math.inf), ("adamw", most))
    )
    for name in SHAPES:
        assert torch.equal(clipped[name], free[name]) == (name in matrices)
        assert not torch.equal(clipped[name], adamw[name])


def test_normuon_evens_the_neurons_of_muons_direction() -> None:
    chain = chain_of("normuon", clip=math.inf)
    link, weights = chain.links["normalize_neurons"], draws(1000)
    names = (QUERY, KEY, "block0.mlp_up")
    state = link.begin({name: weights[name] for name in names})
    squares = {name: torch.zeros(SHAPES[name][1], dtype=torch.float64) for name in names}
    for step in range(5):
        given = {name: draws(step)[name] for name in names}
        made = link({name: value.clone() for name, value in given.items()}, state, now(step, weights))
        for name in names:
            rows = given[name][0].T  # [out, in], as in the paper: a neuron is a row
            squares[name] = 0.95 * squares[name] + 0.05 * (rows**2).mean(dim=1)
            even = rows / squares[name].sqrt()[:, None]
            close(made[name][0].T, even * rows.norm() / even.norm(), rtol=1e-12)
    still = {name: torch.zeros_like(weights[name]) for name in names}
    fresh = link.begin({name: weights[name] for name in names})
    assert all(not value.any() for value in link(still, fresh, now(0, weights)).values())
    muon, normuon, adamw = (walk(chain_of(name, clip=math.inf), 5) for name in ("muon", "normuon", "adamw"))
    for name in SHAPES:
        assert torch.equal(normuon[name], adamw[name]) == (name not in names)
        assert torch.equal(normuon[name], muon[name]) == (name not in names)


def test_the_three_scales_of_muon() -> None:
    gradient = {name: draws(0)[name] for name in ("block0.mlp_up",)}
    made = {
        scale: of_run(Muon, 0.95, "twelve", scale)(
            gradient, of_run(Muon, 0.95, "twelve", scale).begin(gradient), now(0, gradient)
        )
        for scale in ("original", "match_rms_adamw", "spectral")
    }
    for scale, expected in (("original", 1.5), ("match_rms_adamw", 0.6), ("spectral", 1.5)):
        torch.testing.assert_close(
            torch.linalg.svdvals(made[scale]["block0.mlp_up"][0]),
            torch.full((4,), expected).double(),
            rtol=1e-4,
            atol=0,
        )
    rms = made["match_rms_adamw"]["block0.mlp_up"].square().mean().sqrt()
    assert rms.item() == pytest.approx(0.2, rel=1e-4)
    tall = {"block0.mlp_up": torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(0)).double()}
    for scale, expected in (("original", 1.0), ("match_rms_adamw", 0.6), ("spectral", 2 / 3)):
        link = of_run(Muon, 0.95, "twelve", scale)
        assert torch.linalg.svdvals(link(tall, link.begin(tall), now(0, tall))["block0.mlp_up"][0])[0].item() == (
            pytest.approx(expected, rel=1e-3)
        )


# Hyperball


def test_a_hyperball_step_by_its_test_vector() -> None:
    weights = {QUERY: torch.diag(torch.tensor([3.0, 4.0], dtype=torch.float64))[None]}
    update = {QUERY: torch.tensor([[[0.0, 7.0], [0.0, 0.0]]], dtype=torch.float64)}
    scaled = ToWeightNorm()(update, {}, now(0, weights))[QUERY]
    close(scaled.norm(), 5.0)
    keep = KeepNorm()
    step = keep({QUERY: 0.1 * scaled}, keep.begin(weights), now(0, weights))[QUERY]
    after = weights[QUERY] - step
    close(after[0], [[2.98511157, -0.49751860], [0.0, 3.98014876]], rtol=1e-8)
    cosine = (after * weights[QUERY]).sum() / 25
    assert math.acos(cosine) == pytest.approx(math.atan(0.1), rel=1e-7)


@pytest.mark.parametrize("name", ["adamh", "muonh"])
def test_hyperball_keeps_norms_of_matrices_and_of_no_other(name: str) -> None:
    before, after = draws(1000), walk(chain_of(name, lr=0.3), 200)
    for tensor in SHAPES:
        kept = ROLES[tensor] in (Role.MATRIX, Role.QUERY)
        ratio = float(after[tensor].norm() / before[tensor].norm())
        assert (abs(ratio - 1) < 1e-12) == kept
    scaled = ToWeightNorm()({QUERY: 1e6 * draws(0)[QUERY]}, {}, now(0, before))[QUERY]
    torch.testing.assert_close(scaled, ToWeightNorm()({QUERY: draws(0)[QUERY]}, {}, now(0, before))[QUERY])


def test_a_hyperball_step_of_nothing_is_nothing() -> None:
    still = {name: torch.zeros_like(value) for name, value in draws(0).items()}
    weights, chain = draws(1), chain_of("adamh")
    before = draws(1)
    state = chain.begin(weights, ROLES)
    chain.step(still, state, now(0, weights))
    chain.step(draws(0), state, now(1, weights, shape=0.0))
    for name in SHAPES:
        torch.testing.assert_close(weights[name], before[name], rtol=1e-15, atol=1e-15)


# Projections


def scores(largest: float, heads: int = 2) -> Tensor:
    """Scores ``[r b h t s]`` of one run: the first head's largest is given, others are 1, and later keys have more."""
    made = torch.ones(1, 2, heads, 3, 3, dtype=torch.float64)
    made[..., 0, 2] = 1e9
    made[0, 1, 0, 2, 1] = largest
    return made


def test_qk_clip_by_its_test_vector() -> None:
    link, weights, steps = of_run(QKClip, 100.0, 0.5), draws(0), draws(1)
    measured = {"block0": link.observe(scores(400.0))}
    assert measured["block0"].tolist() == [[400.0, 1.0]]
    given = {name: steps[name] for name in (QUERY, KEY, "block0.mlp_up")}
    made = link(given, {}, now(0, weights, measured=measured))
    for name in (QUERY, KEY):
        moved, after = weights[name] - steps[name], weights[name] - made[name]
        close(after[..., :3], 0.5 * moved[..., :3])  # the first head of two
        assert torch.equal(made[name][..., 3:], steps[name][..., 3:])
    assert torch.equal(made["block0.mlp_up"], steps["block0.mlp_up"])
    quiet = link(given, {}, now(0, weights, measured={"block0": link.observe(scores(100.0))}))
    assert all(torch.equal(quiet[name], steps[name]) for name in given)
    keys_alone = of_run(QKClip, 100.0, 0.0)(given, {}, now(0, weights, measured=measured))
    assert torch.equal(keys_alone[QUERY], steps[QUERY])
    close((weights[KEY] - keys_alone[KEY])[..., :3], 0.25 * (weights[KEY] - steps[KEY])[..., :3])


def test_qk_clip_of_heads_that_share_a_key_takes_their_largest_score() -> None:
    link, weights, steps = of_run(QKClip, 100.0, 0.5), draws(0), draws(1)
    of_one_head = {**weights, KEY: weights[KEY][..., :3]}
    given = {QUERY: steps[QUERY], KEY: steps[KEY][..., :3]}
    made = link(given, {}, now(0, of_one_head, measured={"block0": link.observe(scores(400.0))}))
    for name in (QUERY, KEY):
        close(of_one_head[name] - made[name], 0.5 * (of_one_head[name] - given[name]))


def test_a_spectral_cap_bounds_the_largest_singular_value() -> None:
    weights, link = draws(0), of_run(SpectralCap, 1.5, "matrices")
    matrices = {name: weights[name] for name in (QUERY, KEY, "block0.mlp_up")}
    state = link.begin(matrices)
    for step in range(60):
        steps = {name: 0.05 * draws(step)[name] for name in matrices}
        made = link(steps, state, now(step, weights))
        for name in matrices:
            weights[name] = weights[name] - made[name]
            assert torch.linalg.svdvals(weights[name][0])[0] <= 1.5 * 1.01
    below = of_run(SpectralCap, 100.0, "matrices")
    made = below(steps, below.begin(matrices), now(0, weights))
    assert all(torch.equal(made[name], steps[name]) for name in matrices)
    some = of_run(SpectralCap, 0.1, "query_key")
    made = some(steps, some.begin(matrices), now(0, weights))
    assert [torch.equal(made[name], steps[name]) for name in matrices] == [False, False, True]


# Averages of weights


def test_schedule_free_averages_its_fast_sequence() -> None:
    link, weights = of_run(ScheduleFree, 0.9), {"w": torch.full((1, 3), 2.0, dtype=torch.float64)}
    state, shapes = link.begin(weights), [0.0, 0.5, 1.0, 1.0, 1.0]
    fast = mean = weights["w"].clone()
    total = largest = 0.0
    for step, shape in enumerate(shapes):
        u = {"w": shape * random_gradients(5, 3)[step][None]}
        weights["w"] = weights["w"] - link(u, state, now(step, weights, shape))["w"]
        fast, largest = fast - u["w"], max(largest, shape)
        total += largest**2
        share = largest**2 / total if total else 0.0
        mean = (1 - share) * mean + share * fast
        close(weights["w"], 0.1 * fast + 0.9 * mean)
        close(link.evaluated(state)["w"], mean)
        if step == 1:
            close(mean, fast)  # the first share is 1


def test_schedule_free_evaluates_the_mean_of_fast_weights() -> None:
    link, weights = of_run(ScheduleFree, 0.0), {"w": torch.zeros(1, 2, dtype=torch.float64)}
    state, gradients_sn = link.begin(weights), random_gradients(7, 2)
    for step, gradient_n in enumerate(gradients_sn):
        weights["w"] = weights["w"] - link({"w": gradient_n[None]}, state, now(step, weights))["w"]
    fast_sn = -gradients_sn.cumsum(0)
    close(weights["w"][0], fast_sn[-1])
    close(link.evaluated(state)["w"][0], fast_sn.mean(0))


# Updates left out


def skip(
    chain: Any, losses: Iterable[float], scale: Mapping[int, float] | None = None
) -> tuple[Tensors, list[float], Any]:
    """Weights after steps with these losses, which of them were made, and the state."""
    weights, kept = draws(1000), []
    state = chain.begin(weights, ROLES)
    for step, loss in enumerate(losses):
        gradients = {name: (scale or {}).get(step, 1.0) * g for name, g in draws(step).items()}
        measured = {"skip_sigma": {"": torch.tensor([loss], dtype=torch.float64)}}
        chain.step(gradients, state, now(step, weights), measured)
        kept.append(state["skip_sigma"]["kept"].item())
    return weights, kept, state


def test_an_outlier_is_left_out_and_changes_nothing() -> None:
    chain = chain_of("adamw_skip_sigma", skip_fewest=5)
    usual = [3.0 + 0.01 * (step % 3) for step in range(12)]
    for losses, scale in (
        ([*usual, 4.0], {}),
        ([*usual, 3.0], {12: 1e3}),
        ([*usual, math.nan], {}),
        ([*usual, 3.0], {12: math.nan}),
    ):
        weights, kept, state = skip(chain, losses, scale)
        before, _, state_before = skip(chain, usual)
        assert kept == [1.0] * 12 + [0.0]
        assert all(torch.equal(weights[name], before[name]) for name in SHAPES)
        for link in ("adam", "skip_sigma"):
            assert all(torch.equal(state[link][key], state_before[link][key]) for key in state[link] if key != "kept")
    assert all(
        torch.equal(a, b)
        for a, b in zip(skip(chain, usual)[0].values(), walk(chain_of("adamw"), 12).values(), strict=True)
    )


class EveryOther(Gate):
    """A gate that keeps updates of even steps."""

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        state["kept"].fill_(float(now.step % 2 == 0))
        return dict(updates)


def test_an_update_takes_place_if_every_gate_keeps_it() -> None:
    chain = chain_of("adamw_skip_sigma", skip_fewest=5)
    chain = replace(chain, links={"every_other": EveryOther(), **chain.links})
    usual = [3.0] * 12
    at_11, _, _ = skip(chain, usual[:11])
    at_12, _, _ = skip(chain, usual)
    spiked, kept, _ = skip(chain, [*usual, 4.0])  # step 12, which skip_sigma alone leaves out
    fine, _, _ = skip(chain, [*usual, 3.0])
    assert kept[-2:] == [1.0, 0.0]
    assert all(torch.equal(at_12[name], at_11[name]) for name in SHAPES)  # step 11 is odd
    assert all(torch.equal(spiked[name], at_12[name]) for name in SHAPES)
    assert all((fine[name] != at_12[name]).any() for name in SHAPES)


def test_the_limit_is_that_of_the_updates_made_in_the_window() -> None:
    link = of_run(SkipSigma, 2.0, 3.0, 4)
    weights = {"w": torch.ones(1, 1, dtype=torch.float64)}
    state, made = link.begin(weights), list[float]()
    for step, loss in enumerate([1.0, 5.0, 2.0, 3.0, 9.0, 9.1, 4.0, 2.0, 30.0, 5.0]):
        given = {"w": torch.ones(1, 1, dtype=torch.float64)}
        measured = {"": torch.tensor([loss], dtype=torch.float64)}
        link(given, state, now(step, weights, gradients=given, measured=measured))
        window = torch.tensor(made[-4:], dtype=torch.float64)
        keeps = len(made) < 3 or loss <= float(window.mean() + 2 * window.std())
        assert state["kept"].item() == keeps
        made += [loss] * keeps
    assert made == [1.0, 5.0, 2.0, 3.0, 4.0, 2.0]  # 9, 9.1, 30 and then 5 are above


# Adafactor


def test_unfactored_adafactor_is_torchs_on_vectors() -> None:
    """``torch.optim.Adafactor`` factors matrices and no vectors; its relative step is ours with a scaled RMS."""
    steps, lr = 15, 0.05
    values = {
        **{"name": "adafactor", "chain": ["adam_beta2_ramp", "clip_update", "rms_scale", "peak", "schedule"]},
        **{"lr": lr, "beta1": 0.0, "beta2_power": 0.8, "eps": 0.0, "clip_update": 1.0},
    }
    ours = walk(stack([build_optimizer(values)], CPU), steps)["final_norm"][0]
    theirs = torch.nn.Parameter(draws(1000)["final_norm"][0].clone())
    torchs = torch.optim.Adafactor([theirs], lr=lr, beta2_decay=-0.8, eps=(1e-30, 1e-3), d=1.0, weight_decay=0.0)
    for step in range(steps):  # its learning rate is 1 / sqrt(steps) at most
        theirs.grad = draws(step)["final_norm"][0]
        torchs.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-12)


# Numbers per role


def test_numbers_of_a_role_reach_its_tensors_and_no_others() -> None:
    plain = walk(chain_of("adamw", weight_decay=0.1), 5)
    still_embedding = walk(chain_of("adamw", weight_decay=0.1, embedding={"weight_decay": 0.0}), 5)
    undecayed = walk(chain_of("adamw", weight_decay=0.0), 5)
    for name in SHAPES:
        assert torch.equal(still_embedding[name], (undecayed if name == "embedding" else plain)[name])


def test_neither_embedding_nor_gains_decay_where_a_recipe_says_so() -> None:
    chain, weights, before = chain_of("adamw_decay_matrices", weight_decay=0.5), draws(0), draws(0)
    chain.step({name: torch.zeros_like(w) for name, w in weights.items()}, chain.begin(weights, ROLES), now(0, weights))
    for name, weight in weights.items():
        factor = 1.0 if name in ("embedding", "final_norm") else 0.5
        assert torch.equal(weight, factor * before[name])


@pytest.mark.parametrize(
    ("name", "role", "factor"), [("adamw_embedding_lr", "embedding", 10), ("adamw_head_lr", "head", 0.1)]
)
def test_a_role_s_own_learning_rate_follows_that_of_all(name: str, role: str, factor: float) -> None:
    for lr in (1e-3, 0.1):
        chains = [chain_of(each, lr=lr, weight_decay=0.0) for each in (name, "adamw")]
        own, plain = (walk(chain, 1) for chain in chains)
        before = draws(1000)
        for tensor in SHAPES:
            moved = (own[tensor] - before[tensor]) / (plain[tensor] - before[tensor])
            torch.testing.assert_close(moved, torch.full_like(moved, factor if tensor == role else 1.0))
        assert float(chains[0].lr_of(role)) == pytest.approx(factor * lr)
        assert float(chains[0].lr_of("matrix")) == pytest.approx(lr)


def test_a_role_may_have_an_absolute_learning_rate() -> None:
    own = walk(chain_of("adamw", weight_decay=0.0, matrix={"lr": 0.5}), 1)
    plain, fast = (walk(chain_of("adamw", weight_decay=0.0, lr=lr), 1) for lr in (0.01, 0.5))
    for name in SHAPES:
        assert torch.equal(own[name], (fast if ROLES[name] in (Role.MATRIX, Role.QUERY) else plain)[name])


def test_a_role_with_its_own_clip_is_clipped_apart() -> None:
    chain, told = chain_of("sgd", lr=1.0, weight_decay=0.0, head={"clip": 0.5}, clip=2.0), draws(5)
    weights = draws(1)
    chain.step(told, chain.begin(weights, ROLES), now(0, weights))
    moved = {name: draws(1)[name] - weight for name, weight in weights.items()}
    close(moved["head"].norm(), 0.5, rtol=1e-9)
    close(torch.cat([moved[name].flatten() for name in SHAPES if name != "head"]).norm(), 2.0, rtol=1e-9)
