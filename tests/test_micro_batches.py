"""A step of several micro-batches: one batch of their size, and the gradient noise that they tell."""

from __future__ import annotations

import math

import pytest
import torch

from lab import Fleet
from lab.core.hooks import listening
from lab.optim.batch_schedule import BatchSchedule, Increments, LinearSamples, Steps
from lab.probes.listener import Listener
from lab.training import accumulation
from lab.training.identity import columns
from lab.training.loop import train
from lab.training.recorder import Recorder
from small import configs, tree

RUNS = ("optimizer.lr=0.03 seed=0", "optimizer.lr=0.3 seed=1")
SHORT = ("batch_size=4", "steps=4", "optimizer.clip=0.1", "probes.every=2")
IN_TWOS = ("batch=constant", "batch.micro_batch=2")
NOISE = "probes.names=[train_loss,attention_logit_max,grad_norm,noise_scale]"


def trained(*shared: str, runs: tuple[str, ...] = RUNS, dtype: torch.dtype = torch.float64) -> Recorder:
    fleet = Fleet(configs(*runs, shared=(*SHORT, *shared)), dtype)
    fleet.evaluation.held_out_nt = fleet.evaluation.held_out_nt[:8]
    recorder = Recorder(fleet)
    for result in train(fleet):
        recorder.keep(result)
    return recorder


def values(recorder: Recorder, run: int = 0) -> dict[tuple[int, str, str], float]:
    return {(step, probe, where): value for step, probe, where, value in recorder.runs()[run][1]}


@pytest.fixture(scope="module")
def whole() -> Recorder:
    return trained("probes.names=[train_loss,attention_logit_max,grad_norm]")


@pytest.fixture(scope="module")
def in_twos() -> Recorder:
    return trained(*IN_TWOS, NOISE)


def test_micro_batches_are_one_batch(whole: Recorder, in_twos: Recorder) -> None:
    """Weights, the gradient norm before clipping and what forward passes measure are those of the whole batch."""
    for name, weight in whole.fleet.state.weights.items():
        torch.testing.assert_close(in_twos.fleet.state.weights[name], weight, rtol=1e-12, atol=1e-12)
    measured = values(in_twos)
    for key, value in values(whole).items():
        assert measured[key] == pytest.approx(value, rel=1e-11), key


def test_a_run_does_not_see_its_neighbours() -> None:
    together = trained(*IN_TWOS, NOISE, dtype=torch.float32)
    alone = trained(*IN_TWOS, NOISE, runs=RUNS[1:], dtype=torch.float32)
    assert values(together, 1) == values(alone, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_micro_batches_agree_with_eager_ones(in_twos: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    traced = values(trained(*IN_TWOS, NOISE, "engine=compiled"))
    for key, value in values(in_twos).items():
        assert traced[key] == pytest.approx(value, rel=1e-9), key


def test_the_mean_is_over_targets_and_not_over_micro_batches() -> None:
    """Micro-batches of 1, 3 and 0 targets; the last, whose mean is NaN, adds nothing."""
    weights = {"w": torch.zeros(1, 2, dtype=torch.float64)}
    sums = accumulation.begin(weights, with_noise=False)
    for gradient, loss, targets in (([4.0, 0.0], 1.0, 1), ([0.0, 8.0], 5.0, 3), ([math.nan] * 2, math.nan, 0)):
        accumulation.add(
            sums,
            {"w": torch.tensor([gradient]).double()},
            torch.tensor([loss]).double(),
            torch.tensor([targets]).double(),
        )
    gradients, loss_r = accumulation.mean(sums)
    assert gradients["w"].tolist() == [[1.0, 6.0]]
    assert loss_r.tolist() == [4.0]


def gaussian(noise_scales: list[float], micro_batch: int, count: int, steps: int) -> dict[str, torch.Tensor]:
    """What the probe reports of gradients of known covariance: trace ``noise_scales``, squared norm 1."""
    generator, size, runs = torch.Generator().manual_seed(0), 2000, len(noise_scales)
    sums = accumulation.begin({"block0.w": torch.zeros(runs, size, dtype=torch.float64)}, with_noise=True)
    deviation_r1 = (torch.tensor(noise_scales).double() / size / micro_batch).sqrt().unsqueeze(1)
    one_r, listener = torch.ones(runs).double(), Listener(["noise_scale"])
    for _ in range(steps):
        accumulation.clear(sums)
        for _ in range(count):
            noise_rd = torch.randn(runs, size, generator=generator, dtype=torch.float64)
            gradient_rd = size**-0.5 + deviation_r1 * noise_rd
            accumulation.add(sums, {"block0.w": gradient_rd}, one_r, one_r)
        gradients, _ = accumulation.mean(sums)
        with listening(listener):
            accumulation.add_noise(sums, gradients, micro_batch, torch.tensor(float(count)))
    return {name: number_r for (_, name), number_r in listener.probe_values.items()}


@pytest.mark.slow
def test_the_noise_scale_of_gradients_of_known_covariance() -> None:
    """Within a tenth over 200 steps where the batch is at least a quarter of the noise scale (16 x 4 = 64)."""
    expected = [10.0, 100.0, 240.0]
    noise = gaussian(expected, micro_batch=4, count=16, steps=200)
    torch.testing.assert_close(noise["trace.block0"], torch.tensor(expected).double(), rtol=0.1, atol=0)
    torch.testing.assert_close(noise["squared_norm.block0"], torch.ones(3).double(), rtol=0.1, atol=0)


def test_one_micro_batch_tells_nothing_of_the_noise() -> None:
    assert all(number_r.isnan().all() for number_r in gaussian([10.0], micro_batch=4, count=1, steps=2).values())


def steps_to_see(schedule: BatchSchedule, batch_size: int, total: int) -> int:
    seen = steps = 0
    while seen < total:
        seen, steps = seen + schedule.size(seen, batch_size), steps + 1
    return steps


def test_published_ramps_take_their_published_steps() -> None:
    """PaLM's 255k steps are those of Chowdhery et al. 2022; at a constant batch they would be 185k."""
    palm = Steps(micro_batch=512, half=50_000 * 512, full=50_000 * 512 + 65_000 * 1024)
    assert steps_to_see(palm, 2048, 255_000 * 2048 - 50_000 * 1536 - 65_000 * 1024) == 255_000
    # 59 increments of 12e9 / 2048 / 59 sequences each: 14,472 steps, and up to one more per increment
    mt_nlg = Increments(micro_batch=32, start=32, increment=32, ramp=5_859_375)
    exact = sum(5_859_375 / 59 / (32 * n) for n in range(1, 60))
    assert exact == pytest.approx(14_472, abs=1)
    assert exact <= steps_to_see(mt_nlg, 1920, 5_859_375) <= exact + 59
    glm = Increments(micro_batch=24, start=192, increment=24, ramp=5_493_164)
    assert [glm.size(seen, 4224) for seen in (0, 5_493_164 // 168 + 1, 5_493_165)] == [192, 216, 4224]


def test_a_linear_ramp_grows_in_whole_micro_batches() -> None:
    ramp = LinearSamples(micro_batch=2, start=2, ramp=40)
    assert [ramp.size(seen, 10) for seen in (0, 9, 10, 20, 39, 40)] == [2, 2, 4, 6, 8, 10]
    assert ramp.micro_batches(10, 12).tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5]


def test_a_growing_batch_is_measured_in_micro_batches() -> None:
    ramp = ("batch=increments", "batch.micro_batch=1", "batch.start=1", "batch.increment=3", "batch.ramp=2")
    recorder = trained(*ramp, NOISE)
    first = {
        where: value for (step, probe, where), value in values(recorder).items() if probe == "noise_scale" and not step
    }
    later = {
        where: value for (step, probe, where), value in values(recorder).items() if probe == "noise_scale" and step
    }
    assert all(map(math.isnan, first.values())), "a batch of one sequence has no spread"
    assert all(map(math.isfinite, later.values()))
    assert {where.partition(".")[0] for where in later} == {"trace", "squared_norm"}


def test_without_micro_batches_a_run_has_no_column_of_them() -> None:
    """So that ids of runs from before are the same."""
    (plain,), (parts,) = configs(""), configs("", shared=IN_TWOS)
    assert {*columns(parts)} - {*columns(plain)} == {"batch.name", "batch.micro_batch"}
    assert "batch" in tree()


def test_the_noise_is_that_of_the_steps_since_the_measurement_before(in_twos: Recorder) -> None:
    each, both = values(trained(*IN_TWOS, NOISE, "probes.every=1")), values(in_twos)
    noise = [key for key in both if key[:2] == (2, "noise_scale")]
    assert noise
    for step, probe, where in noise:
        mean = (each[1, probe, where] + each[step, probe, where]) / 2
        assert both[step, probe, where] == pytest.approx(mean, rel=1e-9), where


def test_the_noise_of_an_adaptive_batch_moves_by_one_part_of_its_memory() -> None:
    sums = accumulation.begin({"block0.w": torch.zeros(1, 1).double()}, with_noise=True, adaptive=True)
    one_r = torch.ones(1).double()
    for gradient in (1.0, 3.0):
        accumulation.add(sums, {"block0.w": torch.full((1, 1), gradient).double()}, one_r, one_r)
    gradients, _ = accumulation.mean(sums)
    accumulation.add_noise(sums, gradients, 1, torch.tensor(2.0), memory=4.0)
    # squares 1 and 9 of examples, 4 of the mean: trace (5 - 4) * 2, squared norm 2 * 4 - 5
    assert {name: float(mean_r) for name, mean_r in sums.smoothed.items()} == {"trace": 2 / 4, "squared_norm": 3 / 4}
