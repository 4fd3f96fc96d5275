"""Emulated fp16, loss scales and weights without master copies do what published formulas and traces say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lab import Fleet
from lab.core.hooks import listening
from lab.core.number_formats import rounded
from lab.interventions.fp16 import HalfGELU, HalfSoftmax
from lab.model.layers import product
from lab.optim.loss_scale import LossScale, MetaseqScale, TorchScale
from lab.training import accumulation
from lab.training.accumulation import SumInFP16, divisor_before
from lab.training.identity import columns
from lab.training.loop import train
from lab.training.recorder import Recorder, Run
from pieces import CPU, intervention, model, tokens
from small import configs
from test_engine import compiles

FP16 = "precision=fp16_emulated"
ONE_BY_ONE = "batch=constant", "batch.micro_batch=1"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_that_of_a_cast(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    exponents = torch.arange(-40, 128).float()
    x = (
        (torch.rand(200, 1, generator=draws) + 1)
        * 2.0**exponents
        * (1 - 2 * torch.randint(2, (200, 1), generator=draws))
    )
    halves = 1 + torch.arange(4096) / 4096  # of fp16 every other, of bf16 many, lie halfway between two
    edges = torch.tensor([65504.0, 65519.99, 65520.0, 1e5, -7e4, 2.0**-25, 2.0**-24, 3 * 2.0**-25, 0.0, -0.0])
    numbers = torch.cat([x.flatten(), halves, halves * 2.0**-14, edges, torch.tensor([math.inf, -math.inf, math.nan])])
    eager = rounded(numbers, dtype)
    monkeypatch.setattr("lab.core.number_formats.get_proxy_mode", lambda: "traced")
    traced = rounded(numbers, dtype)
    torch.testing.assert_close(eager, numbers.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    is_number = ~numbers.isnan()
    assert torch.equal(eager[is_number].view(torch.int32), traced[is_number].view(torch.int32))


def scales(machine: LossScale, overflows: list[bool]) -> list[float]:
    """The scale after each update."""
    state, values = machine.begin(1, CPU), []
    for overflow in overflows:
        state = machine.after(state, torch.tensor([overflow]))
        values.append(state["scale"].item())
    return values


def test_metaseq_doubles_scale_and_window() -> None:
    values = scales(MetaseqScale(), [False] * 4096)
    changes = {step: values[step] for step in range(4096) if values[step] != (values[step - 1] if step else 4.0)}
    assert changes == {255: 8, 511: 16, 1023: 32, 2047: 64, 4095: 128}


def test_metaseq_stays_at_its_floor_and_returns_from_it() -> None:
    values = scales(MetaseqScale(), [True] * 10 + [False] * 16)
    assert values[:10] == [2, 1, 0.5, 0.25, 0.125, 0.0625, *[0.03125] * 4]
    assert values[24] < 1 == values[25]  # the 16th update without overflow
    assert scales(MetaseqScale(threshold=0.25), [True] * 10) == [2, 1, 0.5, *[0.25] * 7]


def test_overflows_at_the_floor_are_counted_in_a_row() -> None:
    machine, counts = MetaseqScale(), []
    state = machine.begin(2, CPU)
    for step in range(12):
        state = machine.after(state, torch.tensor([True, step != 10]))
        counts.append(state["at_floor"].tolist())
    assert [count for count, _ in counts] == [0] * 7 + [1, 2, 3, 4, 5]
    assert [count for _, count in counts[-2:]] == [0, 0]  # one good update doubles the scale, so the next halves it


def test_the_scale_of_torch_is_the_one_of_torch() -> None:
    draws = torch.Generator().manual_seed(1)
    overflows: list[bool] = (torch.rand(80, generator=draws) < 0.1).tolist()
    scale, growth, values = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32), []
    for overflow in overflows:
        torch._amp_update_scale_(scale, growth, torch.tensor(float(overflow)), 2.0, 0.5, 5)
        values.append(scale.item())
    assert scales(TorchScale(interval=5), overflows) == values
    assert max(values) > 65536 > min(values)


def mean_in_fp16(gradients: list[Tensor], divisor: int, scale: float = 1.0) -> Tensor:
    """Mean over workers of gradients ``[r ...]``, each of 64 targets, summed in fp16."""
    sums = accumulation.begin({"w": gradients[0]}, with_noise=False)
    fp16 = SumInFP16(torch.full((1,), scale), 64, divisor)
    for gradient in gradients:
        accumulation.add(sums, {"w": gradient}, torch.zeros(1), torch.tensor([64.0]), fp16)
    return accumulation.mean(sums, fp16)[0]["w"]


def test_the_scale_of_the_loss_is_in_the_sum_and_not_in_the_mean() -> None:
    gradients = [torch.tensor([[1e-9, 1e-3, 3.0]]), torch.tensor([[1e-9, 5e-3, 1.0]])]
    exact = torch.stack(gradients).mean(0)
    assert mean_in_fp16(gradients, 1)[0, 0] == 0
    torch.testing.assert_close(mean_in_fp16(gradients, 2, 2.0**13), exact, rtol=1e-2, atol=0)
    assert mean_in_fp16(gradients, 1, 2.0**15)[0, 2] == math.inf


def test_a_divisor_before_the_sum_and_one_behind_it() -> None:
    assert [divisor_before(workers) for workers in (1, 2, 8, 1024, 992)] == [1, 2, 4, 32, 32]
    gradient = torch.tensor([[1e-6, 1e-3, 1.0, 100.0, 1e3]])
    split, late, early = (mean_in_fp16([gradient] * 1024, divisor)[0] for divisor in (32, 1, 1024))
    assert split.isfinite().all()
    assert (split > 0).all()
    assert split[3].item() == pytest.approx(107, abs=0.5)  # the error of a sum in fp16, one after the other
    assert late[3] == math.inf
    assert early[0] == 0


def scores(entry: float, width: int, query_factor: float, key_factor: float, factor: float) -> float:
    """The score of an aligned query and key, its product in emulated fp16."""
    ones = torch.ones(1, 1, width)
    made = product(entry * query_factor * ones, (entry * key_factor * ones).transpose(1, 2), torch.float16)
    return (made * factor).item()


@pytest.mark.parametrize(("width", "late", "split"), [(64, 32.0, 90.5), (128, 22.6, 76.1)])
def test_split_scaling_moves_the_largest_query(width: int, late: float, split: float) -> None:
    fourth = width**-0.25
    assert scores(40.0, width, 1, 1, width**-0.5) == math.inf
    assert scores(40.0, width, fourth, fourth, 1) == pytest.approx(1600 * width**0.5, rel=1e-3)
    for side, is_finite in ((0.98, True), (1.02, False)):
        assert math.isfinite(scores(side * late, width, 1, 1, width**-0.5)) == is_finite
        assert math.isfinite(scores(side * split, width, fourth, fourth, 1)) == is_finite


def test_gelu_in_fp16_breaks_backward_where_the_square_overflows() -> None:
    x = torch.tensor([-300.0, -41.0, -1.0, 0.5, 40.0, 41.0, 255.0, 256.0, 300.0], requires_grad=True)
    made = HalfGELU()(x)
    torch.testing.assert_close(made, torch.nn.functional.gelu(x, approximate="tanh"), rtol=2e-3, atol=1e-3)
    (slope,) = torch.autograd.grad(made.sum(), x)
    assert slope.isnan().tolist() == [True, *[False] * 6, True, True]
    (slope,) = torch.autograd.grad(x.relu().sum(), x)
    assert slope.isfinite().all()


def test_softmax_in_fp16_is_softmax_to_three_digits() -> None:
    scores_ts = 3 * torch.randn(1, 7, 7, generator=torch.Generator().manual_seed(2))
    weights_ts = HalfSoftmax()(scores_ts)
    future_ts = torch.ones(7, 7, dtype=torch.bool).triu(1)
    torch.testing.assert_close(
        weights_ts, scores_ts.masked_fill(future_ts, -torch.inf).softmax(-1), rtol=5e-3, atol=1e-4
    )
    assert torch.equal(weights_ts, rounded(weights_ts, torch.float16))


def half(x: np.ndarray) -> np.ndarray:
    """The nearest fp16 numbers, in fp32."""
    return x.astype(np.float16).astype(np.float32)


def gelu_by_hand(x: np.ndarray, upstream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GELU and its gradient, every operation rounded by NumPy."""
    factor, cubic = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
    x = half(x)
    square = half(x * x)
    cube = half(square * x)
    inner = half(factor * half(x + half(cubic * cube)))
    tanh = np.tanh(inner)
    rise, halved = half(1 + half(tanh)), half(x / 2)
    to_value = half(upstream)
    to_inner = half(half(to_value * halved) * (1 - tanh * tanh))
    to_sum = half(factor * to_inner)
    to_cube = half(cubic * to_sum)
    to_square = half(to_cube * x)
    to_x = half(to_value * rise) / 2 + to_sum + to_cube * square + 2 * to_square * x
    return half(halved * rise), half(to_x)


def softmax_by_hand(scores: np.ndarray, upstream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal softmax and its gradient, every operation rounded by NumPy."""
    past = np.tril(np.ones(scores.shape[-2:], dtype=bool))
    scores = half(scores)
    below = half(np.where(past, scores - np.where(past, scores, -np.inf).max(-1, keepdims=True), 0))
    power = np.exp(below)
    share = np.where(past, half(power), 0)
    total = half(share.sum(-1, keepdims=True))
    to_value = half(upstream)
    to_total = half(-(to_value * share / total / total).sum(-1, keepdims=True))
    to_share = half(np.where(past, to_value / total + to_total, 0))
    return half(share / total), half(to_share * power)


@pytest.mark.parametrize(
    ("module", "by_hand", "shape"),
    [(HalfGELU(), gelu_by_hand, (4096,)), (HalfSoftmax(), softmax_by_hand, (16, 48, 48))],
    ids=["gelu", "softmax"],
)
def test_every_operation_is_rounded_forward_and_backward(module: Any, by_hand: Any, shape: tuple[int, ...]) -> None:
    """Bits agree, but where another exponential, or another order of a sum, lies on the other side of a half."""
    draws = torch.Generator().manual_seed(3)
    x, upstream = torch.randn(shape, generator=draws), torch.randn(shape, generator=draws)
    x.requires_grad_()
    made = module(x)
    (slope,) = torch.autograd.grad(made, x, upstream)
    for ours, theirs in zip((made, slope), by_hand(x.detach().numpy(), upstream.numpy()), strict=True):
        assert (ours.detach().numpy() == theirs).mean() > 0.995


def test_the_residual_stream_in_fp16_overflows() -> None:
    made = model(0, changes={"fp16_residual": intervention("fp16_residual")}, dtype=torch.float32)
    with torch.no_grad():
        made.embedding.weight.mul_(1e6)
    values: dict[str, Tensor] = {}
    with listening(lambda kind, where, *tensors: values.setdefault(kind, tensors[0])):
        logits_rbtv, _ = made(tokens(0))
    assert values["embedding"].isfinite().all()  # before it is rounded
    assert logits_rbtv.isnan().any()


def after(steps: int, *shared: str, per_run: tuple[str, ...] = ("seed=0",)) -> Fleet:
    fleet = Fleet(configs(*per_run, shared=shared))
    for step in range(steps):
        fleet.step(step)
    return fleet


@pytest.mark.slow
def test_gradients_do_not_depend_on_a_scale_that_overflows_nothing() -> None:
    plain, small, large = (
        after(4, *extra).state.weights
        for extra in ((), ("loss_scale=metaseq",), ("loss_scale=torch", "loss_scale.init=1048576"))
    )
    for name, weight in plain.items():
        assert torch.equal(weight, small[name])
        assert torch.equal(weight, large[name])


@pytest.mark.slow
def test_micro_batches_are_scaled_like_one_batch() -> None:
    """Scales of powers of two change no bit, and an update that overflows in one micro-batch is left out."""
    shared = ("batch=constant", "batch.micro_batch=4")
    plain, scaled = after(3, *shared), after(3, *shared, "loss_scale=torch")
    assert all(torch.equal(weight, scaled.state.weights[name]) for name, weight in plain.state.weights.items())
    large = Fleet(configs("seed=0", shared=(*shared, FP16, "loss_scale=torch")))
    large.state.links["loss_scale"]["scale"][0] = 2.0**24
    large.step(0)
    assert all(torch.equal(weight, after(0).state.weights[name]) for name, weight in large.state.weights.items())
    assert large.state.links["loss_scale"]["scale"].item() == 2.0**23


@pytest.mark.slow
def test_a_divided_sum_keeps_a_larger_scale() -> None:
    """Thirty-two gradients that agree overflow together; divided by four before, they take the scale of each alone."""
    shared = (FP16, "loss_scale=torch", "loss_scale.init=32768", "batch_size=32", *ONE_BY_ONE)
    fleets = {way: after(1, *shared, f"gradient_sum={way}") for way in ("fp32", "fp16_divided", "fp16")}
    scales = {way: fleet.state.links["loss_scale"]["scale"].item() for way, fleet in fleets.items()}
    assert scales == {"fp32": 32768, "fp16_divided": 32768, "fp16": 16384}


def test_weights_without_a_master_copy_lose_small_updates() -> None:
    """Half the distance between two bf16 numbers is at least 2 ** -9 of them, and a gain of 1 has 2 ** -8 below it."""
    shared = ("optimizer.lr=1e-3", "optimizer.weight_decay=0", "schedule.warmup=0", "precision=bf16")
    kept, lost = after(3, *shared).state.weights, after(3, *shared, "master_weights=none").state.weights
    gains = [name for name in kept if "norm" in name]
    assert all((kept[name] != 1).all() for name in gains)
    assert all((lost[name] == 1).all() for name in gains)
    assert (lost["head"] != after(0, *shared, "master_weights=none").state.weights["head"]).any()
    assert all(torch.equal(weight, rounded(weight, torch.bfloat16)) for weight in lost.values())


def recorded(fleet: Fleet) -> list[Run]:
    recorder = Recorder(fleet)
    for result in train(fleet):
        recorder.keep(result)
    return recorder.runs()


def probe(run: Run, name: str) -> list[float]:
    return [value for _, probe_name, _, value in run.metrics if probe_name == name]


def test_an_overflow_halves_the_scale_of_its_run_alone() -> None:
    shared = (FP16, "loss_scale=torch", "probes.every=1", "probes.names=[loss_scale,train_loss]", "schedule.warmup=0")
    start = after(0, *shared)
    large = Fleet(configs("seed=0", "seed=0", shared=shared))
    large.state.links["loss_scale"]["scale"][1] = 2.0**24
    before = {name: weight.clone() for name, weight in start.state.weights.items()}
    large.step(0)
    for name, weight in large.state.weights.items():
        assert torch.equal(weight[1], before[name][0])
        assert not torch.equal(weight[0], before[name][0])
        assert not large.state.links["adam"][f"mean.{name}"][1].any()
    assert large.state.links["loss_scale"]["scale"].tolist() == [65536, 2.0**23]
    fleet = Fleet(configs("seed=0", "seed=0", shared=shared))
    fleet.state.links["loss_scale"]["scale"][1] = 2.0**24
    calm, scaled = recorded(fleet)
    assert calm.outcome["skipped_batches"] == 0 < scaled.outcome["skipped_batches"]
    assert scaled.outcome["status"] == calm.outcome["status"] == "finished"
    assert probe(calm, "loss_scale") == [65536] * 12
    assert max(probe(scaled, "loss_scale")) == 2.0 ** (24 - scaled.outcome["skipped_batches"])


def test_an_overflow_is_left_out_before_a_response_begins() -> None:
    shared = (FP16, "loss_scale=torch", "loss_scale.init=1e30", "response=skip_update", "response.start=5")
    fleet = Fleet(configs("", shared=shared))
    before = {name: weight.clone() for name, weight in fleet.state.weights.items()}
    fleet.step(0)
    assert all(torch.equal(weight, before[name]) for name, weight in fleet.state.weights.items())


@pytest.mark.slow
def test_a_run_that_overflows_whatever_its_scale_stalls() -> None:
    """In bf16 the same weights overflow nothing, and in the same fleet the other run goes on."""
    shared = ("loss_scale=metaseq", "steps=40", "probes=none", "optimizer.lr=1e-3")
    for precision, endings in ((FP16, ["none", "stalled"]), ("precision=bf16", ["none", "none"])):
        fleet = Fleet(configs("seed=0", "seed=1", shared=(*shared, precision)))
        with torch.no_grad():
            fleet.state.weights["head"][1].mul_(3e6)
        before = {name: tensor.clone() for name, tensor in fleet.state.weights.items()}
        runs = recorded(fleet)
        assert [run.outcome["ending"] for run in runs] == endings
        assert runs[0].outcome["skipped_batches"] == 0
        if precision == FP16:
            assert runs[1].outcome["skipped_batches"] == 7 + 20  # halvings to the floor, then updates at it
            assert all(torch.equal(weight[1], before[name][1]) for name, weight in fleet.state.weights.items())
            assert fleet.state.links["loss_scale"]["scale"][1] == 2.0**-5
        else:
            assert runs[1].outcome["skipped_batches"] == 0


def ends(engine: str, interventions: str) -> dict[str, Tensor]:
    """Weights and state after five updates, of which some are left out."""
    shared = (FP16, f"intervention=[{interventions}]", "master_weights=none", "probes=none", "schedule.warmup=0")
    fleet = Fleet(
        configs("seed=0", "seed=1", shared=(*shared, "loss_scale=torch", "model.depth=1", f"engine={engine}"))
    )
    fleet.state.links["loss_scale"]["scale"][1] = 2.0**26
    for step in range(5):
        fleet.step(step)
    return {name: tensor.clone() for name, tensor in fleet.tensors().items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_step_in_fp16_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    torch.testing.assert_close(ends("compiled", ""), ends("eager", ""), rtol=0, atol=0)


@compiles
@pytest.mark.slow
def test_a_compiled_step_in_fp16_rounds_alike() -> None:
    """A compiler that left out a rounding would leave weights that fp16 does not have."""
    eager, compiled = (ends(engine, "fp16_gelu") for engine in ("eager", "compiled"))
    for name, tensor in compiled.items():
        if name.startswith("weight."):
            assert torch.equal(tensor, rounded(tensor, torch.float16))
            torch.testing.assert_close(tensor, eager[name], rtol=2e-2, atol=2e-2)
    assert torch.equal(compiled["loss_scale.scale"], eager["loss_scale.scale"])


def test_ids_of_other_runs_do_not_know_of_it() -> None:
    assert not {key for key in columns(configs("")[0]) if "scale." in key and key != "scale.name"}
    kept: dict[str, Any] = columns(configs(FP16, shared=("master_weights=none", "loss_scale=torch"))[0])
    assert kept["master_weights"] == "none"
    assert kept["loss_scale.name"] == "torch"
