"""Batch size: the noisy quadratic, fits shown right on it, and the advice of `lab predict`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import planted_claims
from lab.analysis import Records
from lab.analysis.batch_fits import learning_rate_curve, steps_curve
from lab.analysis.batch_sizes import TunedSteps
from lab.features.predict.advice import advise
from lab.report.all_figures import FIGURES
from labwatch.events.scores import share_interval
from noisy_quadratic import NoisyQuadratic
from planted import card, records_of
from studies.batch_size.measures import exponent
from sweeping import OutputOf

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


def planted(noise_scales: tuple[float, ...] = (40.0, 80.0, 120.0, 160.0), seeds: int = 3) -> Records:
    """Runs of 16 sequences a step at two learning rates; the squared norm falls as the noise scale grows."""
    cards, rows = [], []
    for lr, loss in ((1e-2, 2.0), (3e-2, 2.5)):
        for seed in range(seeds):
            run = card(seed=seed, final_val_loss=loss + 0.01 * seed, **{"optimizer.lr": lr})
            cards.append(run)
            for step in range(0, 400, 50):
                scale, norm = noise_scales[step // 100] * (1 + 0.05 * seed), 0.1 ** (step / 100)
                for group in ("block0", "head"):
                    rows.append((run["id"], step, "noise_scale", f"trace.{group}", scale * norm / 2))
                    rows.append((run["id"], step, "noise_scale", f"squared_norm.{group}", norm / 2))
    return records_of(cards, rows)


def test_advice_averages_the_noise_scale_along_training() -> None:
    """Quarters count alike, although early gradients are a thousand times larger."""
    good, _ = advise(planted())
    assert [stage.mean for stage in good.stages] == pytest.approx([42.0, 84.0, 126.0, 168.0], rel=1e-2)
    assert good.critical.mean == pytest.approx(105, rel=1e-2)
    assert good.critical.low < 105 < good.critical.high
    # at B_crit steps are twice the least: 400 = S_min (1 + 105 / 16)
    assert good.steps_there == pytest.approx(2 * 400 / (1 + 105 / 16), rel=1e-2)
    assert good.learning_rates == pytest.approx([1e-2 * (7.56 / 2) ** 0.5, 1e-2 * 7.56 / 2], rel=1e-2)


def test_a_gradient_lost_in_noise_gives_no_noise_scale() -> None:
    records = planted()
    records.metrics.loc[records.metrics["where"].str.startswith("squared"), "value"] *= -1
    assert all(math.isnan(one.critical.mean) for one in advise(records))


def test_a_batch_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf) -> None:
    monkeypatch.setattr("lab.analysis.curves.load", lambda _: planted())
    text = output_of("predict", tmp_path)
    assert "a batch of about 105 sequences" in " ".join(text.split())
    assert "over 4 times the batch of 16" in " ".join(text.split())
    assert (tmp_path / "batch.svg").stat().st_size > 1000
    told = json.loads(output_of("predict", tmp_path, "--json"))["batch"]
    assert told["recommended"]["batch_size"] == pytest.approx(105, rel=1e-2)
    assert len(told["rows"]) == 2


def test_curves_whose_gradients_tell_no_noise_scale_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    records = planted()
    lost = records.metrics["id"].isin(records.runs["id"][records.runs["optimizer.lr"] == 1e-2])
    records.metrics.loc[lost & records.metrics["where"].str.startswith("squared"), "value"] *= -1
    monkeypatch.setattr("lab.analysis.curves.load", lambda _: records)
    table, _, sentences = output_of("predict", tmp_path).partition("\n\n")
    assert len(table.splitlines()) == 2  # names, and one curve
    assert sentences.startswith("Left out: 1 of 2 curves")


def steps_to_target(rise: float = 0.0) -> Records:
    """A planted sweep of batch sizes with one of the three optimizers, its held-out losses higher by so much."""
    runs = planted_claims.cards("steps_to_target", dict.fromkeys(range(3), True))
    adam = [(run, recorded) for run, recorded in runs if run["optimizer.name"] == "adamw"]
    records = planted_claims.records(adam)
    records.metrics.loc[records.metrics["probe"] == "val_loss", "value"] += rise
    return records


@pytest.mark.slow
def test_the_advice_says_what_steps_to_a_target_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    records = steps_to_target()
    lost = records.runs["id"][records.runs["batch_size"] == 1]
    records.metrics.loc[records.metrics["id"].isin(lost) & (records.metrics["probe"] == "val_loss"), "value"] = 9.0
    monkeypatch.setattr("lab.analysis.curves.load", lambda _: records)
    text = " ".join(output_of("predict", tmp_path).split())
    numbers = re.search(r"with Adam: (\S+) at least, twice that at the critical batch of (\S+) \[", text)
    assert numbers
    assert tuple(map(float, numbers.groups())) == pytest.approx((50, 128), rel=0.1)
    assert re.search(r"Caution: left out: Adam at a batch of 1, since 0 of \d+ learning rates reached the target", text)
    answer = json.loads(output_of("predict", tmp_path, "--json"))["batch"]
    assert answer["steps_to_target"][0]["critical_batch_size"]["mean"] == pytest.approx(128, rel=0.1)
    assert any("batch of 1," in caution for caution in answer["cautions"])


def test_steps_that_every_batch_halves_name_no_critical_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    """Neither the advice, in words and as data, nor the figure."""
    steps = pd.DataFrame([1000 / GRID * np.exp(0.05 * np.array([1, -1, -1, 1, 1, -1, -1, 1]))] * 3, columns=GRID)
    halved = TunedSteps("Adam", steps, steps, {}, {})
    for reader in ("lab.features.predict.advice", "studies.batch_size.figures"):
        monkeypatch.setattr(f"{reader}.tuned_steps", lambda _: [halved])
    monkeypatch.setattr("lab.analysis.curves.load", lambda _: planted())
    words = "the critical batch is above 2.69e+03 sequences (95 % interval, unbounded above)."
    assert f"with Adam: {words}" in " ".join(output_of("predict", tmp_path).split())
    (told,) = json.loads(output_of("predict", tmp_path, "--json"))["batch"]["steps_to_target"]
    assert told["critical_batch_size"] == {"mean": None, "low": pytest.approx(2690, rel=0.01), "high": None}
    assert told["fewest_steps"] is None
    caption = FIGURES["steps_with_batch"](planted()).caption
    assert f"With Adam {words}" in caption
    assert "Dashed lines" not in caption


def test_a_target_that_no_run_reached_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    monkeypatch.setattr("lab.analysis.curves.load", lambda _: steps_to_target(rise=math.inf))
    message = output_of("predict", tmp_path, code=2)
    assert "learning rates reached the target" in message
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())
