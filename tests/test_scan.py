"""Scans of frozen checkpoints: exact on the noisy quadratic, and right about their own noise on a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.__main__ import main
from lab.cli import launch
from lab.core.errors import RequestError
from lab.data.text import Text
from lab.records import plans
from lab.studies.batch_size.frozen import best_step, frozen_law
from lab.sweeping import scan
from lab.sweeping.scan import RunLandscape, measure_noise
from lab.training.config import run_config
from lab.training.identity import run_id
from noisy_quadratic import NoisyQuadratic
from small import configs

QUADRATIC = NoisyQuadratic.power_law(dimensions=6)
THETA = np.linspace(0.5, 2.0, 6)


class ExactQuadratic:
    """The noisy quadratic with examples whose covariance is its noise exactly: two for each direction."""

    def __init__(self, start: np.ndarray = THETA) -> None:
        self.curvature, self.noise, self.theta = map(torch.tensor, (QUADRATIC.curvature, QUADRATIC.noise, start))

    def _noisy(self, variance: Tensor) -> Iterator[Tensor]:
        for direction in torch.eye(len(variance), dtype=torch.float64):
            for sign in (1, -1):
                yield self.curvature * self.theta + sign * direction * (len(variance) * variance).sqrt()

    def example_gradients(self) -> Iterator[Tensor]:
        n = 2 * len(self.theta)
        return self._noisy(self.noise * (n - 1) / n)  # whose unbiased covariance is the noise

    def hessian_product(self, vector: Tensor) -> Tensor:
        return self.curvature * vector

    def gradients(self, batch_size: int) -> Iterator[Tensor]:
        return self._noisy(self.noise / batch_size)

    def loss_after(self, step: Tensor) -> float:
        return float((self.curvature * (self.theta + step).square()).sum() / 2)


def test_a_scan_of_the_noisy_quadratic_is_exact() -> None:
    """McCandlish et al. 2018, sec. 2.2, in float64."""
    result = scan.scan_steps(ExactQuadratic(), batches=(1, 4, 16, 64), curved=12)
    critical = QUADRATIC.critical_noise_scale(THETA)
    for batch, step in result.steps.items():
        assert step == pytest.approx(QUADRATIC.best_step(THETA, batch), rel=1e-9)
    largest = QUADRATIC.best_step(THETA, math.inf)
    for law, limit in zip((result.step_law, result.gain_law), largest, strict=True):
        assert law == pytest.approx((limit, critical, 1.0), rel=1e-8)


def test_noise_at_a_checkpoint_is_unbiased() -> None:
    """Of a finite set of examples the mean is known as if they were all, so only the bias of the mean is left."""
    noise = measure_noise(ExactQuadratic(), curved=12)
    n, gradient = 12, QUADRATIC.curvature * THETA
    assert noise.trace == pytest.approx(QUADRATIC.noise.sum(), rel=1e-12)
    assert noise.curved_trace == pytest.approx((QUADRATIC.curvature * QUADRATIC.noise).sum(), rel=1e-12)
    assert noise.squared_norm == pytest.approx((gradient**2).sum() - QUADRATIC.noise.sum() / n, rel=1e-12)
    expected = (QUADRATIC.curvature * gradient**2).sum() - noise.curved_trace / n
    assert noise.curvature == pytest.approx(expected, rel=1e-12)


def test_a_gradient_lost_in_noise_has_no_best_step() -> None:
    with pytest.raises(RequestError, match="is too small against its noise"):
        scan.scan_steps(ExactQuadratic(np.zeros(6)), curved=12)


def test_a_loss_that_only_falls_or_only_rises_has_no_best_step() -> None:
    assert all(map(math.isnan, best_step([1, 2, 3], [-1, -2, -3.5], 0)))
    assert all(map(math.isnan, best_step([1, 2, 3], [1, 3, 6], 0)))
    with pytest.raises(ValueError, match="2 batch sizes have a best step"):
        frozen_law({1: 0.1, 2: math.nan, 4: 0.3})


@pytest.fixture(scope="module")
def landscape() -> RunLandscape:
    (config,) = configs("model.depth=1", shared=("precision=bf16",))
    fleet = scan.Fleet([config])
    return RunLandscape(config, fleet.state.weights)


def test_the_hessian_product_is_that_of_the_loss(landscape: RunLandscape) -> None:
    """Symmetric, and the second difference of the loss along a direction."""
    generator = torch.Generator().manual_seed(0)
    size = sum(weight.numel() for weight in landscape.weights.values())
    first, second = torch.randn(2, size, generator=generator, dtype=torch.float64)
    product = landscape.hessian_product(first)
    assert float(second @ product) == pytest.approx(float(first @ landscape.hessian_product(second)), rel=1e-5)
    windows_rbt, size = next(landscape._batches(scan.HELD_OUT)), 1e-3 / float(first.norm())
    moved = (landscape._moved(sign * size * first) for sign in (1, 0, -1))
    above, middle, below = (
        float(landscape.fleet.step_function.gradients_of(weights, windows_rbt)[1]) for weights in moved
    )
    assert float(first @ product) == pytest.approx((above - 2 * middle + below) / size**2, rel=1e-3)


def test_the_loss_falls_along_the_gradient_as_fast_as_its_norm_says(landscape: RunLandscape) -> None:
    """On the very windows of the gradient: the slope of the loss is minus the squared norm of the gradient."""
    windows_rbt = landscape.held_out_rnt
    gradient = landscape._gradient(landscape.weights, windows_rbt)
    start, after = landscape.loss_after(torch.tensor(0.0)), landscape.loss_after(-1e-6 * gradient)
    terms_at_init = 1e-2  # the z-loss is in the gradient, but not in the cross-entropy
    assert (start - after) / 1e-6 == pytest.approx(float(gradient.square().sum()), rel=terms_at_init)


@pytest.mark.parametrize("forged", ["tree", "data_fingerprint"])
def test_a_plan_whose_config_does_not_make_the_id_of_its_run_is_not_used(
    forged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree,) = launch.compose_points(["data=synthetic"])
    config = run_config(tree)
    fingerprint = config.data.entry.open().fingerprint
    name = run_id(config, fingerprint)
    point = {"id": name, "tree": tree, "data_fingerprint": fingerprint}
    plans.freeze(tmp_path, [[point]])
    assert scan._configs(tmp_path, [name]) == [config]
    (tmp_path / "plans").rename(tmp_path / "aside")
    other = {"tree": {**tree, "data": {"name": "text", "path": "/etc/passwd"}}, "data_fingerprint": "another"}
    monkeypatch.setattr(Text, "open", lambda source: pytest.fail(f"{source.path} is read"))
    plans.freeze(tmp_path, [[{**point, forged: other[forged]}]])
    with pytest.raises(RequestError, match="holds the config of another run"):
        scan._configs(tmp_path, [name])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["scan", "{folder}"], "no checkpoint in {folder}; stop a sweep"),
        (["scan", "{folder}/nowhere"], "no results folder {folder}/nowhere"),
        (["scan"], "scan the checkpoints of which folder?"),
        (["scan", "{folder}", "--runs", "a"], "unknown option '--runs'; nearest: --run"),
    ],
)
def test_a_scan_of_nothing_is_refused_in_one_line(words, line, tmp_path, capsys) -> None:
    assert main([word.format(folder=tmp_path) for word in words]) == 2
    message = capsys.readouterr().err
    assert line.format(folder=tmp_path) in message
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_relative_errors_of_the_values_weigh_alike() -> None:
    """The residuals of a least-squares fit with those weights are orthogonal to its terms."""
    values = {1: 0.011, 4: 0.035, 16: 0.10, 64: 0.13}
    law = frozen_law(values)
    batch_n, value_n = np.array(list(values), dtype=float), np.array(list(values.values()))
    residual_n = value_n**2 * (1 / value_n - (1 + law.scale / batch_n) / law.limit)
    assert abs(residual_n).max() > 1e-4
    assert residual_n.sum() == pytest.approx(0, abs=1e-12)
    assert (residual_n / batch_n).sum() == pytest.approx(0, abs=1e-12)
