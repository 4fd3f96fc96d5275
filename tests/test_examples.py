"""The noise of gradients of single examples, and its estimate from micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from example_noise import example_noise
from lab import Fleet
from lab.core.hooks import listening
from lab.probes.listener import Listener
from lab.training import accumulation
from small import configs


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet(configs("", shared=("batch_size=6", "steps=1")), torch.float64)


@pytest.fixture(scope="module")
def windows_nt(fleet: Fleet) -> torch.Tensor:
    return fleet.feed.loader.batch(0)[0]


def pairings(windows_nt: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Every way to split the windows into two micro-batches of three."""
    everyone = set(range(len(windows_nt)))
    for others in combinations(sorted(everyone - {0}), 2):
        first = {0, *others}
        yield [windows_nt[sorted(part)] for part in (first, everyone - first)]


def estimated(fleet: Fleet, micro_batches: list[torch.Tensor]) -> tuple[float, float]:
    """What the probe of a step of these micro-batches measures, summed over groups of weights."""
    sums, listener = accumulation.begin(fleet.state.weights, with_noise=True), Listener(["noise_scale"])
    for windows_bt in micro_batches:
        gradients, loss_r = fleet.step_function.gradients_of(fleet.state.weights, windows_bt.unsqueeze(0))
        accumulation.add(sums, gradients, loss_r, torch.tensor([float(windows_bt[:, 1:].numel())]).double())
    mean, _ = accumulation.mean(sums)
    with listening(listener):
        accumulation.add_noise(sums, mean, len(micro_batches[0]), torch.tensor(float(len(micro_batches))))
    parts = {key: [float(v) for (_, name), v in listener.probe_values.items() if name.startswith(key)] for key in KEYS}
    return sum(parts["trace"]), sum(parts["squared_norm"])


KEYS = ("trace", "squared_norm")


def test_the_estimate_is_exact_in_the_mean_over_splits(fleet: Fleet, windows_nt: torch.Tensor) -> None:
    """In each way it errs, so the mean is no accident of equal terms; micro-batches of one need no mean."""
    exact = example_noise(fleet.step_function.gradients_of, fleet.state.weights, windows_nt)
    estimates = [estimated(fleet, split) for split in pairings(windows_nt)]
    assert len(estimates) == 10
    assert all(abs(trace / exact[0] - 1) > 1e-4 for trace, _ in estimates)
    means = tuple(sum(values) / 10 for values in zip(*estimates, strict=True))
    assert means == pytest.approx(exact, rel=1e-12)
    assert estimated(fleet, list(windows_nt.split(1))) == pytest.approx(exact, rel=1e-12)
