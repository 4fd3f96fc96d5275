"""Batch size: the noisy quadratic, and fits shown right on it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from lab.report.all_figures import FIGURES
from labwatch.events.scores import share_interval
from noisy_quadratic import NoisyQuadratic
from planted import card, records_of
from studies.batch_size.fits import learning_rate_curve, steps_curve
from studies.batch_size.measures import exponent
from studies.batch_size.tuning import TunedSteps

QUADRATIC = NoisyQuadratic.power_law()
BATCHES = 4.0 ** np.arange(0, 7)
LRS = np.geomspace(0.03, 1.7, 14)
TARGET = 0.2


@pytest.fixture(scope="module")
def best() -> list[tuple[int, float]]:
    """Steps to the target, and the learning rate that takes fewest, at each batch size."""
    steps = {(b, lr): QUADRATIC.steps_to(TARGET, lr, b, most=500) for b in BATCHES for lr in LRS}
    return [min((steps[b, lr] or 10**9, lr) for lr in LRS) for b in BATCHES]


def test_the_recursion_is_the_mean_over_draws() -> None:
    """Of 4000 draws, within three standard errors at every step."""
    random, quadratic = np.random.default_rng(0), NoisyQuadratic.power_law(dimensions=5)
    theta_nd, lr, batch = np.ones((4000, 5)), 0.5, 4
    for expected in quadratic.losses(lr, batch, 20):
        losses_n = (quadratic.curvature * theta_nd**2).sum(1) / 2
        assert losses_n.mean() == pytest.approx(expected, abs=3 * losses_n.std() / math.sqrt(4000) + 1e-12)
        noise_nd = random.normal(size=theta_nd.shape) * np.sqrt(quadratic.noise / batch)
        theta_nd = theta_nd - lr * (quadratic.curvature * theta_nd + noise_nd)


def test_a_step_at_the_noise_scale_gains_half_of_what_it_could() -> None:
    """McCandlish et al. 2018, sec. 2.2: the gain of a step, and the optimal step."""
    theta = np.ones(50)
    critical = QUADRATIC.critical_noise_scale(theta)
    (lr, gain), (largest_lr, largest_gain) = (QUADRATIC.best_step(theta, b) for b in (critical, 1e12))
    assert gain / largest_gain == pytest.approx(0.5)
    assert lr / largest_lr == pytest.approx(0.5)
    steps = [QUADRATIC.best_step(theta, b)[0] for b in (1.0, 3.0, 10.0, 100.0)]
    assert learning_rate_curve([1, 3, 10, 100], steps).scale == pytest.approx(critical, rel=1e-6)


def test_the_hyperbola_fits_the_quadratic(best: list[tuple[int, float]]) -> None:
    curve = steps_curve(BATCHES, [steps for steps, _ in best])
    assert curve.rms_log_error < 0.06
    assert curve.low < curve.scale < curve.high < 2 * curve.low
    # averaged over the run, since at the start it is eight times smaller
    assert QUADRATIC.noise_scale(np.ones(50)) < curve.scale / 5


def test_the_best_learning_rate_is_linear_in_small_batches_and_then_flat(best: list[tuple[int, float]]) -> None:
    lrs = [lr for _, lr in best]
    assert exponent(BATCHES[:3], lrs[:3]) == pytest.approx(0.9, abs=0.15)
    assert exponent(BATCHES[-3:], lrs[-3:]) == pytest.approx(0, abs=0.1)


def test_an_exact_hyperbola_is_found_exactly() -> None:
    batches = 2.0 ** np.arange(8)
    curve = steps_curve(batches, 30 * (1 + 20 / batches))
    assert (curve.limit, curve.scale) == pytest.approx((30, 20))
    assert curve.rms_log_error == pytest.approx(0, abs=1e-6)


GRID, TRIES = 2.0 ** np.arange(2, 10), 200


@pytest.mark.parametrize("critical", [0.05, 8.0, 2048.0])
def test_the_interval_holds_the_critical_batch_inside_and_outside_the_grid(critical: float) -> None:
    """In 95 % of simulated curves, or more where an end lies beyond all batch sizes; 0.999 of binomial error apart."""
    random = np.random.default_rng(0)
    steps_kn = 50 * (1 + critical / GRID) * np.exp(0.1 * random.normal(size=(TRIES, len(GRID))))
    curves = [steps_curve(GRID, steps_n) for steps_n in steps_kn]
    held = share_interval(sum(curve.low <= critical <= curve.high for curve in curves), TRIES, level=0.998)
    assert held.high >= 0.95
    if GRID[0] < critical < GRID[-1]:
        assert held.low <= 0.95
        assert all(curve.is_bounded for curve in curves)
    assert all(curve.low < curve.high for curve in curves)


@pytest.mark.parametrize(
    ("steps", "noise", "words"),
    [
        (1000 / GRID, 0.05, "above 2.69e+03 sequences (95 % interval, unbounded above)"),
        (50 + 0 * GRID, 0.05, "below 0.76 sequences (95 % interval, unbounded below)"),
        (GRID**-0.5, 1.5, "unknown (95 % interval, unbounded on both sides)"),
    ],
    ids=["halved by every batch", "saved by none", "lost in noise"],
)
def test_an_interval_without_an_end_says_so(steps: np.ndarray, noise: float, words: str) -> None:
    """The end that it has is where the sum of squares, over the least one, is that of the quantile of Student's t."""
    curve = steps_curve(GRID, steps * np.exp(noise * np.array([1, -1, -1, 1, 1, -1, -1, 1])))
    assert curve.scale_text == words
    assert not curve.is_bounded


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [1.0, 2.0, math.nan, 3.0], [1.0, 2.0, 0.0, 3.0]])
def test_a_curve_takes_four_positive_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"takes 4|must be positive"):
        steps_curve(np.arange(1, len(values) + 1), values)


def test_steps_that_every_batch_halves_name_no_critical_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = pd.DataFrame([1000 / GRID * np.exp(0.05 * np.array([1, -1, -1, 1, 1, -1, -1, 1]))] * 3, columns=GRID)
    halved = TunedSteps("Adam", steps, steps, {}, {})
    monkeypatch.setattr("studies.batch_size.figures.tuned_steps", lambda _: [halved])
    caption = FIGURES["steps_with_batch"](records_of([card()], [])).caption
    assert "With Adam the critical batch is above 2.69e+03 sequences (95 % interval, unbounded above)." in caption
    assert "Dashed lines" not in caption
