"""Probes of a fleet that compare a step with the one before, with the first, and with held-out descent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from example_noise import example_noise
from lab import Fleet
from lab.contrib.probes import distance_from_init
from lab.probes.updates import HeldOutLoss, update_curvature
from lab.training.loop import train
from lab.training.recorder import Recorder
from lab.training.step import StepFunction
from small import configs, trained
from test_probes import cosines
from tests import reference

RUNS = ("optimizer.lr=0.03 seed=0", "optimizer.lr=0.3 seed=1")
PROBES = "probes.names=[grad_lag_cosine,update_descent_cosine,update_curvature,distance_from_init]"
SHORT = ("steps=4", "probes.every=1", "optimizer.weight_decay=0", "schedule=constant", "schedule.warmup=0")
LAG, DESCENT, CURVATURE = "grad_lag_cosine", "update_descent_cosine", "update_curvature"
DISTANCE = "distance_from_init"


def copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}


def reference_gradients(weights: dict[str, Tensor], windows_bt: Tensor, config: Any) -> dict[str, Tensor]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    heads = config.model.width // config.model.head_width
    seen = reference.transformer(leaves, windows_bt[:, :-1], config.model.depth, heads, True)
    loss, _ = reference.losses(seen.logits, windows_bt[:, 1:], 1e-4)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.slow
def test_both_cosines_are_those_of_gradients_and_updates_of_the_run() -> None:
    """Weights before and after a step, and gradients of the model written a second time, give the same numbers."""
    fleet = Fleet(configs(*RUNS, shared=(*SHORT, PROBES)), torch.float64)
    fleet.evaluation.held_out_nt = held_out_nt = fleet.evaluation.held_out_nt[:5]
    previous: list[dict[str, Tensor]] = []
    for step in range(3):
        before, windows_rbt = copies(fleet.state.weights), fleet.feed.loader.batch(step)
        values = fleet.step(step)
        gradients = []
        for run in range(len(RUNS)):
            weights = {name: weight[run] for name, weight in before.items()}
            gradients.append(reference_gradients(weights, windows_rbt[run], fleet.config))
            descent = reference_gradients(weights, held_out_nt, fleet.config)
            moved = {name: weight - fleet.state.weights[name][run] for name, weight in weights.items()}
            expected = {(DESCENT, name): value for name, value in cosines(moved, descent).items()}
            if previous:
                lag = cosines(gradients[run], previous[run])
                expected |= {(LAG, name): value for name, value in lag.items()}
            for key, value in expected.items():
                torch.testing.assert_close(values[key][run], value, rtol=1e-7, atol=1e-9)
        assert step or all(values[key].isnan().all() for key in values if key[0] == LAG)
        previous = gradients


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("batch=constant", "batch.micro_batch=2")])
def test_these_probes_change_no_bit_of_the_training(more: tuple[str, ...]) -> None:
    plain, probed = (
        trained(configs(*RUNS, shared=("steps=6", "probes.every=2", f"probes.names=[train_loss{names}]", *more)))
        for names in ("", f",{LAG},{DESCENT},{CURVATURE},{DISTANCE}")
    )
    for (outcome, rows), (outcome_probed, rows_probed) in zip(plain, probed, strict=True):
        assert outcome == outcome_probed
        assert repr(rows) == repr([row for row in rows_probed if row[1] == "train_loss"])
        assert {row[1] for row in rows_probed} == {"train_loss", LAG, DESCENT, CURVATURE, DISTANCE}


@pytest.mark.slow
def test_a_run_alone_has_the_values_that_it_has_in_company() -> None:
    shared = ("seq_len=16", "batch_size=8", "steps=3", "probes.every=1", PROBES)
    together = trained(configs(*RUNS, shared=shared))
    assert repr(together) == repr([trained([config])[0] for config in configs(*RUNS, shared=shared)])


@pytest.mark.slow
def test_what_is_off_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the probes nothing of earlier steps is kept, and no gradient is computed where they do not fire."""
    batches: list[int] = []
    gradients_of = StepFunction.gradients_of

    def counted(self: StepFunction, weights: dict[str, Tensor], windows_rbt: Tensor, *scale: Any) -> Any:
        batches.append(windows_rbt.shape[1])
        return gradients_of(self, weights, windows_rbt, *scale)

    monkeypatch.setattr(StepFunction, "gradients_of", counted)
    passes = {
        f"[grad_norm,{LAG}]": 0,
        f"[{DISTANCE}]": 0,
        f"[{DESCENT}]": 2,
        f"[{DESCENT},{CURVATURE}]": 4,
    }  # at two steps
    for names, held_out_passes in passes.items():
        batches.clear()
        fleet = Fleet(configs(*RUNS, shared=("steps=4", "probes.every=3", f"probes.names={names}")))
        for step in range(4):
            fleet.step(step)
        assert batches.count(4) == 4
        assert len(batches) - 4 == held_out_passes
        assert ("previous" in fleet.state.links) == (LAG in names)
        assert ("initial" in fleet.state.links) == (DISTANCE in names)


def test_a_resumed_run_knows_the_gradient_before_and_its_initial_weights() -> None:
    """Both are part of what a checkpoint holds."""
    wanted = configs(*RUNS, shared=(*SHORT, PROBES))
    whole, resumed = Fleet(wanted), Fleet(wanted)
    for step in range(2):
        whole.step(step)
    for weight in resumed.state.links["initial"].values():
        weight.zero_()  # not drawn again
    with torch.no_grad():
        for name, tensor in resumed.tensors().items():
            tensor.copy_(whole.tensors()[name])
    values, values_resumed = whole.step(2), resumed.step(2)
    assert all(torch.equal(values[key], value) for key, value in values_resumed.items())
    assert values[LAG, ""].isfinite().all()


@pytest.mark.slow
def test_the_distance_from_init_is_that_of_the_weights_after_the_update() -> None:
    fleet = Fleet(configs(*RUNS, shared=(*SHORT, PROBES)), torch.float64)
    initial = {name: weight.detach().numpy() for name, weight in copies(fleet.state.weights).items()}
    for step in range(3):
        values = fleet.step(step)
        for name, weight in fleet.state.weights.items():
            for run in range(len(RUNS)):
                moved = np.linalg.norm(weight[run].detach().numpy() - initial[name][run])
                expected = float(moved / np.linalg.norm(initial[name][run]))
                assert expected > 1e-3
                assert float(values[DISTANCE, name][run]) == pytest.approx(expected, rel=1e-12), name


def test_a_tensor_that_began_at_zero_is_infinitely_far_once_it_moves() -> None:
    zero_rd, one_rd = torch.zeros(2, 3), torch.tensor([[0.0] * 3, [1.0] * 3])
    assert str(distance_from_init({"w": one_rd}, {"w": zero_rd})["w"].tolist()) == "[nan, inf]"


@pytest.mark.slow
def test_at_fixed_weights_the_cosine_is_that_of_the_noise_scale() -> None:
    """1 / (1 + B_simple / B), with the noise of each example's gradient; the mean over pairs of batches."""
    shared = ("steps=24", "probes.every=1", PROBES, "optimizer.lr=1e-9", "batch_size=16")
    fleet = Fleet(configs("seed=0", shared=shared), torch.float64)
    windows_nt = torch.cat([fleet.feed.loader.batch(step)[0] for step in range(24)])
    trace, squared_norm = example_noise(fleet.step_function.gradients_of, fleet.state.weights, windows_nt)
    foretold = 1 / (1 + trace / squared_norm / 16)
    measured = [float(fleet.step(step)[LAG, ""]) for step in range(24)][1:]
    assert 0.05 < foretold < 0.95
    assert sum(measured) / len(measured) == pytest.approx(foretold, rel=0.1)


@pytest.mark.parametrize(("curvature", "is_stable"), [(0.97, True), (1.03, False)])
@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_a_quadratic_is_stable_below_the_limit_and_not_above(beta1: float, curvature: float, is_stable: bool) -> None:
    """Descent with Adam's momentum on a parabola: the probe says how far its learning rate is from the limit."""
    lr, bend = 0.1, curvature * 2 * (1 + beta1) / (1 - beta1) / 0.1
    weight, mean = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    for step in range(2000):
        mean = beta1 * mean + (1 - beta1) * bend * weight
        if step == 0:

            def gradients_of(at: dict[str, Tensor], _: Tensor) -> tuple[dict[str, Tensor], Tensor]:
                return {"w": bend * at["w"]}, torch.zeros(1)

            parabola = HeldOutLoss(gradients_of, {"w": weight}, weight, lambda _: lr)
            assert float(update_curvature({"w": mean}, {"w": mean}, beta1, parabola)) == pytest.approx(curvature)
        weight = weight - lr * mean
        if abs(float(weight)) > 1e6:
            break
    assert (abs(float(weight)) < 1) == is_stable


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_step_measures_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    recorders = []
    for engine in ("eager", "compiled"):
        fleet = Fleet(configs(*RUNS, shared=(*SHORT, PROBES, f"engine={engine}")), torch.float64)
        recorders.append(Recorder(fleet))
        for result in train(fleet):
            recorders[-1].keep(result)
    eager, compiled = (recorder.runs()[1].metrics for recorder in recorders)
    assert [row[:3] for row in eager] == [row[:3] for row in compiled]
    pairs = [(one[3], other[3]) for one, other in zip(eager, compiled, strict=True) if not math.isnan(one[3])]
    assert pairs
    assert [pair[0] for pair in pairs] == pytest.approx([pair[1] for pair in pairs], rel=1e-9)
