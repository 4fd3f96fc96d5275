"""The optimizer does what its chain says, per run; the schedule is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lab import Link, PerRun, Role, bounded, over, run_config
from lab.core.errors import RequestError
from lab.core.hooks import announce, listening
from lab.core.registry import LINKS, SCHEDULES
from lab.core.schema import build, stack
from lab.model.parametrization import MuPSimple
from lab.optim.links import Now
from lab.optim.optimizer import Optimizer, build_optimizer
from lab.optim.schedule import Constant, Cosine
from lab.training.identity import columns, run_id, static_key
from pieces import CONF, CPU, intervention, model, optimizer, recipe, weights_of
from small import tree

# Tensors of one run: a matrix, an embedding and a gain, of sizes that fill no vector register evenly.
SHAPES = {
    "query": (5, 3),
    "embedding": (11, 7),
    "final_norm": (13,),
    "block0.attention.query": (6, 4),
    "block0.attention.key": (6, 4),
}
ROLES = {
    **{"query": Role.QUERY, "embedding": Role.EMBEDDING, "final_norm": Role.GAIN},
    "block0.attention.query": Role.QUERY,
    "block0.attention.key": Role.MATRIX,
}
RECIPES = sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml"))
Run = dict[str, Any]


def draw(*seeds: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Tensors ``[r ...]``, those of a run decided by its seed alone."""
    made: dict[str, list[Tensor]] = {name: [] for name in SHAPES}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            made[name].append(scale * torch.randn(shape, generator=generator, dtype=dtype))
    return {name: torch.stack(runs) for name, runs in made.items()}


def at(step: int, weights: Mapping[str, Tensor], shape_r: Tensor, factors: Mapping[str, float] | None = None) -> Now:
    lr_factor = factors or dict.fromkeys(weights, 1.0)
    return Now(torch.tensor(step), weights, shape_r, lr_factor, roles=ROLES, steps=3)


def announced(kind: str, *seeds: int) -> tuple[str, Tensor]:
    """A hook point and what it might announce in a forward pass, that of a run decided by its seed alone."""
    shape = {"train_loss": (), "scores": (2, 2, 3, 3)}[kind]
    draws = (torch.Generator().manual_seed(seed) for seed in seeds)
    return {"scores": "block0"}.get(kind, ""), torch.stack([torch.rand(shape, generator=draw) for draw in draws])


def announced_to(chain: Optimizer, *seeds: int) -> dict[str, dict[str, Tensor]]:
    """What the links of a chain make of the announcements of one step."""
    with chain.measuring() as made:
        for kind in ("train_loss", "scores"):
            where, value = announced(kind, *seeds)
            announce(kind, where, value)
    return made


def walk(
    chain: Optimizer,
    gradients: Iterable[dict[str, Tensor]],
    shape_sr: Tensor,
    factors: Mapping[str, float] | None = None,
    weights: dict[str, Tensor] | None = None,
    roles: Mapping[str, str] = ROLES,
) -> dict[str, Tensor]:
    """The weights after as many steps as there are gradients; they begin at ``weights``, or at random."""
    runs = shape_sr.shape[1]
    weights = weights or draw(*range(100, 100 + runs))
    state = chain.begin(weights, roles)
    for step, gradient in enumerate(gradients):
        now = replace(at(step, weights, shape_sr[step], factors), roles=roles)
        chain.step(gradient, state, now, announced_to(chain, *range(runs)))
    return weights


def noise(steps: int, runs: int, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """Gradients whose size differs between steps and runs."""
    gradients = [draw(*range(step * runs, (step + 1) * runs), scale=scale) for step in range(steps)]
    for step, gradient in enumerate(gradients):
        for value in gradient.values():
            for run, size in enumerate(torch.logspace(-1, 0.5, runs).tolist()):
                value[run] *= size * (1 + step % 3)
    return gradients


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_sgd_equals_torchs_with_and_without_momentum(name: str) -> None:
    """Independent decay is PyTorch's with weight_decay = lambda / lr, applied outside of the momentum."""
    runs = [{"lr": 0.1, "weight_decay": 0.02}, {"lr": 1.0, "weight_decay": 0.0}]
    if name == "momentum":
        runs = [{**runs[0], "momentum": 0.9}, {**runs[1], "momentum": 0.5}]
    chain = optimizer(name, *({**run, "clip": math.inf} for run in runs))
    gradients, shape_sr = noise(20, 2), Cosine(0.1, 1e-3).shape(20, chain.lr)
    weights = walk(chain, gradients, shape_sr)
    for run, settings in enumerate(runs):
        theirs = {tensor: value[0].requires_grad_() for tensor, value in draw(100 + run).items()}
        torchs = torch.optim.SGD(theirs.values(), lr=1.0, momentum=settings.get("momentum", 0.0))
        for gradient, shape in zip(gradients, shape_sr[:, run].tolist(), strict=True):
            torchs.param_groups[0]["lr"] = settings["lr"] * shape
            with torch.no_grad():
                for tensor, weight in theirs.items():
                    weight.grad = gradient[tensor][run]
                    weight.mul_(1 - settings["weight_decay"] * shape)
            torchs.step()
        for tensor, weight in theirs.items():
            torch.testing.assert_close(weights[tensor][run], weight.detach(), rtol=1e-12, atol=1e-12)


def test_weights_without_a_gradient_shrink_under_sgd() -> None:
    """A forgotten decay would leave them where they are."""
    still = {tensor: torch.zeros_like(value) for tensor, value in draw(0).items()}
    before = draw(1)
    chain = optimizer("sgd", {"weight_decay": 0.01})
    after = walk(chain, [still] * 100, torch.ones(100, 1, dtype=torch.float64), weights=draw(1))
    for tensor, weight in after.items():
        torch.testing.assert_close(weight, before[tensor] * 0.99**100, rtol=1e-12, atol=0)


def torch_adamw(run: int, settings: Run, gradients: Sequence[dict[str, Tensor]], shape_s: Tensor, decay: float) -> Run:
    """One run by ``torch.optim.AdamW``, clipped by hand."""
    weights = {name: weight[0].requires_grad_() for name, weight in draw(100 + run).items()}
    theirs = torch.optim.AdamW(
        weights.values(),
        lr=1.0,
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        weight_decay=decay,
    )
    for gradient, shape in zip(gradients, shape_s.tolist(), strict=True):
        norm = math.sqrt(sum(float(g[run].square().sum()) for g in gradient.values()))
        keep = min(1.0, settings.get("clip", math.inf) / norm)
        for name, weight in weights.items():
            weight.grad = gradient[name][run] * keep
        theirs.param_groups[0]["lr"] = settings["lr"] * shape
        theirs.step()
    return {name: weight.detach() for name, weight in weights.items()}


RUNS: list[Run] = [  # every number differs between the runs, and no run clips always or never
    {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "clip": 2.0},
    {"lr": 0.3, "weight_decay": 0.0, "beta1": 0.5, "beta2": 0.999, "eps": 1e-15, "clip": 10.0},
    {"lr": 3e-2, "weight_decay": 0.7, "beta1": 0.0, "beta2": 0.5, "eps": 0.1, "clip": math.inf},
]


@pytest.mark.parametrize("clipped", [True, False], ids=["clip", "no clip"])
@pytest.mark.parametrize("name", ["adamw", "adamw_coupled"])
def test_every_run_equals_torch_adamw_with_its_own_numbers(name: str, clipped: bool) -> None:
    """Independent decay is PyTorch's with weight_decay = lambda / peak, under any schedule."""
    runs = RUNS if clipped else [{k: v for k, v in run.items() if k != "clip"} for run in RUNS]
    chain = optimizer(name, *runs, without=() if clipped else ("clip",))
    assert ("clip" in chain.links) == clipped
    gradients, shape_sr = noise(50, 3), Cosine(0.1, 1e-3).shape(50, chain.lr)
    weights = walk(chain, gradients, shape_sr)
    for run, settings in enumerate(runs):
        decay = settings["weight_decay"] / (1 if name == "adamw_coupled" else settings["lr"])
        theirs = torch_adamw(run, settings, gradients, shape_sr[:, run], decay)
        for tensor, value in theirs.items():
            torch.testing.assert_close(weights[tensor][run], value, rtol=1e-12, atol=1e-12)
            assert (value - draw(100 + run)[tensor][0]).abs().max() > 1e-3


def test_clipping_and_decay_do_bite() -> None:
    gradients, shape_sr = noise(5, 1), torch.ones(5, 1, dtype=torch.float64)
    ends = [
        walk(optimizer("adamw", change), gradients, shape_sr)["query"]
        for change in ({}, {"clip": 0.1}, {"weight_decay": 0.1})
    ]
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_infinite_clip_and_no_decay_are_no_links() -> None:
    gradients, shape_sr = noise(10, 2), torch.ones(10, 2, dtype=torch.float64)
    lrs = [{"lr": 1e-3}, {"lr": 0.1}]
    off = optimizer("adamw", *({**lr, "clip": math.inf, "weight_decay": 0.0} for lr in lrs))
    values = {key: value for key, value in recipe("optimizer", "adamw").items() if key not in ("clip", "weight_decay")}
    bare = stack([build_optimizer({**values, "chain": ["adam", "peak", "schedule"], **lr}) for lr in lrs], CPU)
    ends = [walk(chain, gradients, shape_sr) for chain in (off, bare)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in SHAPES)


def test_clip_scales_a_whole_run_down_to_the_norm_and_never_up() -> None:
    gradient = draw(0, 1, scale=2.0)
    clipped = LINKS["clip"](clip=torch.tensor([0.5, 1e3]))(gradient, {}, None)
    norm = torch.cat([clipped[name][0].flatten() for name in SHAPES]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.5, dtype=torch.float64))
    ratio = torch.cat([(clipped[name][0] / gradient[name][0]).flatten() for name in SHAPES])
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert all(torch.equal(clipped[name][1], gradient[name][1]) for name in SHAPES)
    nothing = LINKS["clip"](clip=1.0)({name: torch.zeros_like(g) for name, g in gradient.items()}, {}, None)
    assert all(value.eq(0).all() for value in nothing.values())


def test_only_independent_decay_shrinks_alike_at_every_lr() -> None:
    peaks, steps, decay = (1e-4, 1e-2, 1.0), 40, 0.02
    shrunk = {}
    for name in ("adamw", "adamw_coupled"):
        chain = optimizer(name, *({"lr": lr, "weight_decay": decay} for lr in peaks))
        shape_sr = Cosine(0.1, 0.0).shape(steps, chain.lr)
        still = {tensor: torch.zeros_like(value) for tensor, value in draw(0, 0, 0).items()}
        before = draw(1, 2, 3)
        after = walk(chain, [still] * steps, shape_sr, weights={tensor: w.clone() for tensor, w in before.items()})
        shrunk[name] = {tensor: (after[tensor] / before[tensor]).flatten(1) for tensor in before}
    factor = math.prod(1 - s * decay for s in shape_sr[:, 0].tolist())
    assert factor < 0.7
    for tensor in SHAPES:
        for run, lr in enumerate(peaks):
            assert shrunk["adamw"][tensor][run].sub(factor).abs().max() < 1e-12
            expected = math.prod(1 - s * lr * decay for s in shape_sr[:, 0].tolist())
            assert shrunk["adamw_coupled"][tensor][run].sub(expected).abs().max() < 1e-12


def decays_all(name: str) -> bool:
    values = recipe("optimizer", name)
    return "weight_decay" in values and not any(role in values for role in ("embedding", "gain", "bias"))


@pytest.mark.parametrize("name", list(filter(decays_all, RECIPES)))
def test_every_weight_is_decayed_gains_and_embeddings_too(name: str) -> None:
    made = model(0, 1, changes={"qk_layernorm": intervention("qk_layernorm")})
    weights = {tensor: weight.detach() for tensor, weight in weights_of(made).items()}
    before = {tensor: weight.clone() for tensor, weight in weights.items()}
    still = {tensor: torch.zeros_like(weight) for tensor, weight in weights.items()}
    shape_sr = torch.ones(1, 2, dtype=torch.float64)
    chain = optimizer(name, {"weight_decay": 0.5}, {"weight_decay": 0.0})
    walk(chain, [still], shape_sr, weights=weights, roles=made.roles())
    for tensor, weight in weights.items():
        assert (weight[0].abs() < before[tensor][0].abs()).all(), tensor
        assert torch.equal(weight[1], before[tensor][1])


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_only_epsilon_over_gradient_scale_matters(scale: float) -> None:
    """Scaling the loss and epsilon alike leaves every step where it was (without clipping, which hides it)."""
    gradients, shape_sr = noise(20, 1), torch.ones(20, 1, dtype=torch.float64)
    scaled = [{name: scale * g for name, g in gradient.items()} for gradient in gradients]

    def end(eps: float, given: list[dict[str, Tensor]]) -> Tensor:
        return walk(optimizer("adamw", {"eps": eps, "lr": 0.1}, without=("clip",)), given, shape_sr)["embedding"]

    torch.testing.assert_close(end(0.03 * scale, scaled), end(0.03, gradients), rtol=1e-12, atol=1e-12)
    assert (end(0.03, scaled) - end(0.03, gradients)).abs().max() > 0.01


def test_a_tensors_factor_meets_lr_but_not_independent_decay() -> None:
    factors = {**dict.fromkeys(SHAPES, 1.0), "query": 0.25}
    shape_sr = torch.ones(1, 1, dtype=torch.float64)
    for name in ("adamw", "adamw_coupled"):
        for change in ({"weight_decay": 0.0}, {"weight_decay": 0.5}):
            gradient, before = draw(7), draw(8)
            chain = optimizer(name, {**change, "lr": 0.1})
            full, slow = (
                walk(chain, [gradient], shape_sr, f, {n: w.clone() for n, w in before.items()}) for f in (None, factors)
            )
            whole, less = (before["query"] - end["query"] for end in (full, slow))
            untouched = change["weight_decay"] * before["query"] if name == "adamw" else 0
            torch.testing.assert_close(less - untouched, 0.25 * (whole - untouched), rtol=1e-12, atol=1e-14)
            assert torch.equal(full["embedding"], slow["embedding"])


def test_mup_factors_reach_the_step_of_a_real_model() -> None:
    """One Adam step without decay moves a linear layer by base width / width of what it moves others."""
    made = model(0, width=16, depth=1)
    weights = {name: weight.detach() for name, weight in weights_of(made).items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    factors = {name: factor.lr for name, factor in made.factors(MuPSimple(4), 16).items()}
    ones = {name: torch.ones_like(weight) for name, weight in weights.items()}
    chain = optimizer("adamw", {"weight_decay": 0.0, "lr": 0.01, "eps": 1e-30})
    walk(chain, [ones], torch.ones(1, 1, dtype=torch.float64), factors, weights)
    for name, weight in weights.items():
        slow = name == "head" or ("block" in name and "norm" not in name)
        moved = (before[name] - weight).unique()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.0025 if slow else 0.01))


def cosine_by_hand(step: int, steps: int, peak: float, warmup: float, floor: float) -> float:
    length = warmup * steps if warmup < 1 else warmup
    if step < length:
        return peak * step / length
    low = min(floor, peak)
    return low + (peak - low) * (1 + math.cos(math.pi * (step - length) / (steps - length))) / 2


@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.25, 7.0, 1.0, 0.33])
def test_every_learning_rate_of_the_cosine(warmup: float) -> None:
    steps, peaks, floor = 40, [1e-6, 1e-3, 0.3], 1e-5
    schedule = build(Cosine, {"warmup": warmup, "floor": floor}, "schedule")
    peak_r = torch.tensor(peaks, dtype=torch.float64)
    lr_sr = schedule.shape(steps, peak_r) * peak_r
    assert lr_sr.shape == (steps, 3)
    expected = [[cosine_by_hand(step, steps, peak, warmup, floor) for peak in peaks] for step in range(steps)]
    torch.testing.assert_close(lr_sr, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-18)


def test_milestones_of_the_cosine() -> None:
    peak_r = torch.tensor([1e-6, 1e-2], dtype=torch.float64)
    lr_sr = Cosine(10.0, 1e-5).shape(1000, peak_r) * peak_r
    assert lr_sr[0].tolist() == [0, 0]  # the ramp begins at nothing
    assert lr_sr[10].tolist() == peak_r.tolist()  # and is at the peak at the end of warm-up
    assert lr_sr[10:, 0].tolist() == pytest.approx([1e-6] * 990, rel=1e-12)  # a peak below the floor is the floor
    assert 1e-5 < lr_sr[-1, 1] < 1.01e-5  # absolute: not a fraction of the peak
    assert lr_sr[10:, 1].diff().lt(0).all()
    assert lr_sr[505, 1].item() == pytest.approx((1e-2 + 1e-5) / 2, rel=1e-12)  # halfway


def test_schedules_per_run() -> None:
    peak_r = torch.tensor([1e-2, 1e-2, 0.1], dtype=torch.float64)
    numbers = [{"warmup": 5, "floor": 0.0}, {"warmup": 0.5, "floor": 1e-3}, {"warmup": 0, "floor": 1e-5}]
    together = stack([build(Cosine, n, "schedule") for n in numbers], CPU).shape(20, peak_r)
    for run, own in enumerate(numbers):
        alone = build(Cosine, own, "schedule").shape(20, peak_r[run : run + 1])
        assert torch.equal(together[:, run : run + 1], alone)


def test_constant_is_a_ramp_and_then_the_peak() -> None:
    peak_r = torch.tensor([1e-3, 0.3], dtype=torch.float64)
    assert Constant(4.0).shape(8, peak_r)[:, 1].tolist() == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert Constant(0.0).shape(8, peak_r).tolist() == [[1, 1]] * 8
    per_run = Constant(torch.tensor([2.0, 0.0], dtype=torch.float64)).shape(3, peak_r)
    assert per_run.tolist() == [[0, 1], [0.5, 1], [1, 1]]


def test_linear_is_a_ramp_and_then_a_straight_line_to_the_floor() -> None:
    peak_r = torch.tensor([0.1, 1e-6], dtype=torch.float64)
    shape_sr = build(SCHEDULES["linear"], {"warmup": 2, "floor": 0.02}, "schedule").shape(10, peak_r)
    assert shape_sr[:, 0].tolist() == pytest.approx([0, 0.5, *(1 - 0.8 * k / 8 for k in range(8))], rel=1e-12)
    assert shape_sr[2:, 1].tolist() == [1] * 8  # a peak below the floor is the floor


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "wsd_sqrt"])
def test_a_floor_is_the_higher_of_share_and_absolute(name: str) -> None:
    own = {"cooldown": 0.5} if name.startswith("wsd") else {}
    peak_r = torch.tensor([1e-3, 0.1, 10.0], dtype=torch.float64)

    def low_r(**floors: float) -> torch.Tensor:
        schedule = stack([build(SCHEDULES[name], {"warmup": 0.0, **own, **floors}, "schedule")] * 3, CPU)
        return schedule.shape(100_000, peak_r)[-1] * peak_r

    assert low_r(floor=0.0, floor_share=0.1).tolist() == pytest.approx([1e-4, 1e-2, 1.0], rel=0.05)
    assert low_r(floor=2e-3, floor_share=0.1).tolist() == pytest.approx([1e-3, 1e-2, 1.0], rel=0.05)
    assert torch.equal(low_r(floor=1e-5, floor_share=0.0), low_r(floor=1e-5))
    with pytest.raises(RequestError, match=r"schedule.floor_share must be at most 1"):
        low_r(floor=0.0, floor_share=1.5)


def test_rsqrt_falls_as_one_over_the_root_of_the_step() -> None:
    peak_r = torch.tensor([0.1, 0.1], dtype=torch.float64)
    shape_sr = build(SCHEDULES["rsqrt"], {"warmup": 4}, "schedule").shape(65, peak_r)
    assert shape_sr[[0, 2, 4, 16, 64], 1].tolist() == pytest.approx([0, 0.5, 1, 0.5, 0.25], rel=1e-12)
    at_once = build(SCHEDULES["rsqrt"], {"warmup": 0}, "schedule").shape(5, peak_r)
    assert at_once[:, 0].tolist() == pytest.approx([1, 1, 2**-0.5, 3**-0.5, 0.5], rel=1e-12)


def test_wsd_sqrt_falls_by_the_root_of_the_progress() -> None:
    numbers = {"warmup": 2, "cooldown": 0.5, "floor": 0.0}
    shape_sr = build(SCHEDULES["wsd_sqrt"], numbers, "schedule").shape(8, torch.tensor([1.0], dtype=torch.float64))
    expected = [0, 0.5, 1, 1, 1, 1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]
    assert shape_sr.flatten().tolist() == pytest.approx(expected)


def test_wsd_stays_at_the_peak_until_the_cooldown() -> None:
    peak_r = torch.tensor([0.1], dtype=torch.float64)
    wsd = {"warmup": 2, "cooldown": 0.4, "floor": 0.0}
    shape_sr = build(SCHEDULES["wsd"], wsd, "schedule").shape(10, peak_r)
    assert shape_sr[:, 0].tolist() == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25], rel=1e-12)
    late = build(SCHEDULES["wsd"], {**wsd, "warmup": 8, "cooldown": 1.0}, "schedule").shape(10, peak_r)
    assert late[:, 0].tolist() == pytest.approx([*(k / 8 for k in range(8)), 1, 0.5], rel=1e-12)  # after warm-up
    with pytest.raises(RequestError, match=r"schedule.cooldown must be at most 1"):
        build(SCHEDULES["wsd"], {**wsd, "cooldown": 1.5}, "schedule")


def test_without_epsilon_zero_over_zero_is_zero() -> None:
    chain = optimizer("adamw", {"eps": 0.0, "weight_decay": 0.0, "lr": 0.5}, without=("clip",))
    weights = {"head": torch.ones(1, 2, 2)}
    gradient = torch.tensor([[[0.0, 1e-12], [-1e-18, math.nan]]])
    shape_r = torch.ones(1, dtype=torch.float64)
    chain.step({"head": gradient}, chain.begin(weights), Now(torch.tensor(0), weights, shape_r, {"head": 1.0}))
    assert weights["head"][0, 0].tolist() == [1.0, 0.5]  # 0 / 0 is 0
    assert weights["head"][0, 1, 0] == 1.5
    assert weights["head"][0, 1, 1].isnan()  # a broken gradient is not hidden


def test_rms_scale_makes_the_learning_rate_relative_to_each_weight() -> None:
    chain = optimizer("adamw_rms_scaled", {"weight_decay": 0.0, "lr": 0.1, "eps": 1e-30}, {"lr": 0.1, "eps": 1e-30})
    weights = {"head": torch.tensor([[3.0, 4.0], [3e-5, 4e-5]], dtype=torch.float64)}
    before = weights["head"].clone()
    gradient, shape_r = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    chain.step({"head": gradient}, chain.begin(weights), Now(torch.tensor(0), weights, shape_r, {"head": 1.0}))
    moved = before - weights["head"]
    torch.testing.assert_close(moved[0], torch.full((2,), 0.1 * math.sqrt(12.5), dtype=torch.float64))
    small = 0.1 * 1e-3 + 1e-4 * before[1]  # the least RMS; this run's decay is the recipe's, independent
    torch.testing.assert_close(moved[1], small)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_contract_of_schedules(name: str) -> None:
    """A shape within [0, 1] for every step and run, in the precision of the peaks, the same for a run alone."""
    numbers = {key: value for key, value in recipe("schedule", name).items() if key not in ("name", "over")}
    schedule = build(SCHEDULES[name], numbers, "schedule")
    peak_r = torch.tensor([1e-6, 1e-3, 1.0], dtype=torch.float64)
    shape_sr = stack([schedule] * 3, CPU).shape(30, peak_r)
    assert shape_sr.shape == (30, 3)
    assert shape_sr.dtype == torch.float64
    assert shape_sr.ge(0).all()
    assert shape_sr.le(1).all()
    assert shape_sr.amax(0).eq(1).any()
    assert torch.equal(schedule.shape(30, peak_r[1:2])[:, 0], shape_sr[:, 1])
    assert schedule.shape(1, peak_r).isfinite().all()


def link(name: str, runs: int) -> Link:
    """A link with the numbers that the recipes give it."""
    known: Run = {}
    for each in RECIPES:
        known |= recipe("optimizer", each)
    kind = LINKS[name]
    return stack([build(kind, {f.name: known[f.name] for f in fields(kind)}, "optimizer")] * runs, CPU)


def acted_on(made: Link, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a role on which the link acts."""
    return {name: tensor for name, tensor in tensors.items() if ROLES[name] in made.roles}


def follow(name: str, *seeds: int, broken: int | None = None) -> list[Tensor]:
    """All that a link makes and keeps over three steps, in float32."""
    made = link(name, len(seeds))
    weights = acted_on(made, draw(*seeds, dtype=torch.float32))
    state, seen = made.begin(weights), []
    shape_r = torch.tensor([0.1 + 0.2 * seed for seed in seeds], dtype=torch.float64)
    for step in range(3):
        gradient = acted_on(made, draw(*(seed + 10 * step for seed in seeds), scale=3.0, dtype=torch.float32))
        if broken is not None and step == 1:
            gradient["query" if "query" in gradient else "embedding"][broken, 0, 0] = math.nan
        given = {tensor: value.clone() for tensor, value in gradient.items()}
        announcements = [announced(kind, *(seed + 10 * step for seed in seeds)) for kind in made.events]
        now = replace(at(step, weights, shape_r), gradients={tensor: -u for tensor, u in given.items()})
        now = replace(now, measured={where: made.observe(value) for where, value in announcements})
        updates = made(gradient, state, now)
        assert {tensor: u.shape for tensor, u in updates.items()} == {tensor: w.shape for tensor, w in weights.items()}
        assert all(torch.equal(given[t], gradient[t]) or broken is not None for t in given), "a link spoils its input"
        if broken is not None and step == 1:
            assert any(u[broken].isnan().any() for u in updates.values()), "a link hides a broken gradient"
        seen += [*updates.values(), *(value.clone() for value in state.values())]
    return seen


@pytest.mark.parametrize("name", list(LINKS))
def test_contract_of_links(name: str) -> None:
    """State leads with the run axis; a run's bits depend on no other run, wherever it stands, NaN or not."""
    kind, runs = LINKS[name], (3, 0, 2)
    assert {*kind.takes} <= {"gradient", "direction", "step"}
    assert kind.makes in (None, "gradient", "direction", "step")
    weights = draw(*runs)
    made = link(name, 3)
    assert all(len(value) == 3 for value in made.begin(acted_on(made, weights)).values())
    company, hurt = follow(name, *runs), follow(name, *runs, broken=1)
    for place, seed in enumerate(runs):
        for alone, together, beside_nan in zip(follow(name, seed), company, hurt, strict=True):
            assert together.dtype == torch.float32
            assert torch.equal(alone[0], together[place])
            assert together[place].isfinite().all()
            if place != 1:
                assert torch.equal(together[place], beside_nan[place])


@pytest.mark.parametrize("name", RECIPES)
def test_contract_of_recipes(name: str) -> None:
    """Every run of every chain: the same bits alone and in company, and gradients that come out as they went in."""
    values = recipe("optimizer", name)
    assert values["name"] == name
    runs = [{"lr": 1e-3}, {"lr": 0.3}, {"lr": 1e-2}]
    for place, run in enumerate(runs):
        ends = []
        for these, seeds in ((runs, (0, 1, 2)), ([run], (place,))):
            chain, weights = optimizer(name, *these), draw(*seeds, dtype=torch.float32)
            state = chain.begin(weights, ROLES)
            for step in range(3):
                gradient = draw(*(seed + 10 * step for seed in seeds), dtype=torch.float32)
                now = at(step, weights, torch.ones(len(seeds), dtype=torch.float64))
                chain.step(gradient, state, now, announced_to(chain, *(seed + 10 * step for seed in seeds)))
                again = draw(*(seed + 10 * step for seed in seeds), dtype=torch.float32)
                assert all(torch.equal(gradient[tensor], again[tensor]) for tensor in gradient)
            ends.append(weights)
        company, alone = ends
        assert all(torch.equal(alone[tensor][0], company[tensor][place]) for tensor in SHAPES)
        assert not any(torch.equal(alone[tensor], draw(place, dtype=torch.float32)[tensor]) for tensor in SHAPES)


def test_the_order_of_the_chain_is_kept() -> None:
    for name, order in (("adamw", ["peak", "decay"]), ("adamw_coupled", ["decay", "peak"])):
        assert list(optimizer(name, {}).links) == ["clip", "adam", *order, "schedule"]


RIGHT_ORDERS = {
    "clip adam decay peak schedule",
    "clip adam peak decay schedule",
    "clip adam peak schedule decay",
}


@pytest.mark.parametrize("order", [" ".join(p) for p in permutations(("clip", "adam", "decay", "peak", "schedule"))])
def test_only_chains_from_gradient_to_direction_to_step_are_built(order: str) -> None:
    values = {**recipe("optimizer", "adamw"), "chain": order.split()}
    if order in RIGHT_ORDERS:
        assert list(build_optimizer(values).links) == order.split()
        return
    with pytest.raises(RequestError, match=r"^optimizer.chain: '\w+' takes a .* '\w+'.* a (gradient|direction|step)$"):
        build_optimizer(values)


@pytest.mark.parametrize("name", RECIPES)
def test_probes_hear_the_direction_before_decay_and_scale(name: str) -> None:
    """Whatever follows: coupled decay and the RMS of weights do not enter the direction."""
    told: dict[str, dict[str, Tensor]] = {}
    gradient, weights = draw(0, scale=5.0), draw(1)
    numbers = {"clip": 0.5, "weight_decay": 0.5, "eps": 1e-30}
    chain = optimizer(name, {key: number for key, number in numbers.items() if key in recipe("optimizer", name)})

    def record(kind: str, where: str, values: dict[str, Tensor], *more: Any) -> None:
        assert kind not in told
        told[kind] = {tensor: value.clone() for tensor, value in values.items()}

    announcements = announced_to(chain, 0)
    with listening(record):
        now = at(0, weights, torch.ones(1, dtype=torch.float64))
        chain.step(gradient, chain.begin(weights, ROLES), now, announcements)
    assert all(torch.equal(told["gradients"][tensor], gradient[tensor]) for tensor in SHAPES)
    norm = math.sqrt(sum(float(value.square().sum()) for value in told["clipped_gradients"].values()))
    if "clip" in chain.links:
        assert norm == pytest.approx(0.5)
    for tensor in SHAPES:
        first = first_direction(chain, tensor, gradient[tensor], told["clipped_gradients"][tensor])
        torch.testing.assert_close(told["direction"][tensor], first)


def first_direction(chain: Optimizer, tensor: str, gradient: Tensor, clipped: Tensor) -> Tensor:
    """What the first step makes of a gradient: its sign, of Adam and many others, or as the rule says."""
    if {"sgd", "momentum"} & {*chain.links}:
        return clipped
    if "muon" in chain.links and ROLES[tensor] in (Role.QUERY, Role.MATRIX):
        values, vectors = torch.linalg.svdvals(gradient[0]), torch.linalg.svd(gradient[0], full_matrices=False)
        after = newton_schulz_of(values / values.norm(), [(3.4445, -4.7750, 2.0315)] * 5)
        direction = 0.2 * math.sqrt(max(gradient.shape[1:])) * (vectors.U * after @ vectors.Vh)[None]
        if "normalize_neurons" not in chain.links:
            return direction
        even = direction / direction.norm(dim=1, keepdim=True)
        return even * direction.norm() / even.norm()
    size = {"adam_atan2": 1.27 * math.pi / 4, "ademamix": 1 + 2 / 3 * (1 - slow_beta(1 / 3)), "adopt": 0.0}
    return gradient.sign() * next((size[link] for link in chain.links if link in size), 1.0)


def newton_schulz_of(values: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    """Where Newton-Schulz steps bring singular values, each by itself."""
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return values


def slow_beta(progress: float, begin: float = 0.9, end: float = 0.9999) -> float:
    """beta3 of AdEMAMix during its warm-up: its half-life rises along a line."""
    first, last = (math.log(0.5) / math.log(beta) - 1 for beta in (begin, end))
    return 0.5 ** (1 / ((1 - progress) * first + progress * last + 1))


@dataclass(frozen=True)
class Damp(Link):
    """Shrink entries that are small beside ``eps``."""

    takes: ClassVar = ("direction",)
    makes: ClassVar = "direction"
    eps: PerRun = bounded(at_least=0)

    def __call__(self, updates: dict[str, Tensor], state: dict[str, Tensor], now: Now) -> dict[str, Tensor]:
        return {name: u * u.abs() / (u.abs() + over(self.eps, u)) for name, u in updates.items()}


def damped(**values: Any) -> Run:
    """A recipe in which two links have a number called ``eps``."""
    return {**recipe("optimizer", "adamw"), "chain": ["clip", "adam", "damp", "peak", "decay", "schedule"], **values}


def test_two_links_may_each_have_an_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINKS._entries, "damp", Damp)
    gradients, shape_sr = noise(3, 1), torch.ones(3, 1, dtype=torch.float64)
    shared, own, both = (
        damped(eps=0.1),
        damped(eps=0.1, damp={"eps": 0.5}),
        {key: value for key, value in damped(damp={"eps": 0.5}, adam={"eps": 0.1}).items() if key != "eps"},
    )
    chains = [stack([build_optimizer(values)], CPU) for values in (shared, own, both)]
    assert [(c.links["adam"].eps.item(), c.links["damp"].eps.item()) for c in chains] == [
        (0.1, 0.1),
        (0.1, 0.5),
        (0.1, 0.5),
    ]
    ends = [walk(chain, gradients, shape_sr) for chain in chains]
    assert all(torch.equal(ends[1][name], ends[2][name]) for name in SHAPES)
    assert not any(torch.equal(ends[0][name], ends[1][name]) for name in SHAPES)


def test_numbers_of_a_link_have_columns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINKS._entries, "damp", Damp)
    shared, *own = (
        run_config({**tree(), "optimizer": damped(eps=0.1, **change)})
        for change in ({}, {"damp": {"eps": 0.1}}, {"damp": {"eps": 0.5}})
    )
    numbers = [{k: v for k, v in columns(c).items() if k.endswith(".eps")} for c in (shared, *own)]
    assert numbers == [
        {"optimizer.eps": 0.1},
        {"optimizer.eps": 0.1, "optimizer.damp.eps": 0.1},
        {"optimizer.eps": 0.1, "optimizer.damp.eps": 0.5},
    ]
    assert {*columns(own[0])} - {*columns(shared)} == {"optimizer.damp.eps"}
    assert "optimizer.owned" not in columns(shared)
    assert static_key(own[0]) == static_key(own[1])
    assert stack(own, CPU).optimizer.links["damp"].eps.tolist() == [0.1, 0.5]
    assert run_id(own[0], "data") != run_id(own[1], "data")
