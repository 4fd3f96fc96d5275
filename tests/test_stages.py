"""The five stages of a spike are found, in order, where Adam meets gradients that vanish and return."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stages import Trace, first_steps

HEALTHY, SILENT, BURST, AFTER = 700, 1200, 12, 600


def adam(gradient_nk: NDArray[np.float64], beta2: float, eps: float) -> NDArray[np.float64]:
    """Adam's direction for each of the gradients ``[n k]``."""
    mean_k, square_k, made = np.zeros(gradient_nk.shape[1]), np.zeros(gradient_nk.shape[1]), []
    for step, gradient_k in enumerate(gradient_nk, 1):
        mean_k = 0.9 * mean_k + 0.1 * gradient_k
        square_k = beta2 * square_k + (1 - beta2) * gradient_k**2
        made.append(mean_k / (1 - 0.9**step) / (np.sqrt(square_k / (1 - beta2**step)) + eps))
    return np.array(made)


def trace(beta2: float = 0.95, eps: float = 1e-8, silence: float = 1e-10, burst: float = 1e-4) -> Trace:
    """Gradients of size 1e-4, then a silence, a burst of one sign, and independent ones again."""
    draws = np.random.default_rng(0)
    size_n = np.repeat([1e-4, silence, burst, 1e-4], [HEALTHY, SILENT, BURST, AFTER])
    gradient_nk = size_n[:, None] * draws.standard_normal((len(size_n), 400))
    rows = slice(HEALTHY + SILENT, HEALTHY + SILENT + BURST)
    gradient_nk[rows] = burst * np.sign(gradient_nk[HEALTHY])
    update_nk = adam(gradient_nk, beta2, eps)
    rms_n, update_n = (np.sqrt((each**2).mean(1)) for each in (gradient_nk, update_nk))
    large_n = (np.abs(update_nk) > 0.8).mean(1)
    return Trace(np.arange(len(size_n)), rms_n, np.full(len(size_n), 1e-4), update_n, large_n)


def test_the_numbers_of_the_burst_are_those_of_adam() -> None:
    """First step of the burst 3.16 or 0.447, its largest 6.3 or 1.02; frozen before, healthy after."""
    start = HEALTHY + SILENT
    for beta2, first, largest in ((0.999, 3.16, 6.3), (0.95, 0.447, 1.02)):
        update_n = trace(beta2, silence=1e-10).update_n
        assert update_n[HEALTHY - 200 : HEALTHY].mean() == pytest.approx(0.229, rel=0.05)
        if beta2 == 0.95:
            assert update_n[start - 1] < 0.05
            assert update_n[start] == pytest.approx(first, rel=0.02)
            assert update_n[start + 11] == pytest.approx(largest, rel=0.1)


def test_five_stages_in_order() -> None:
    begun = first_steps(trace(), beta2=0.95)
    assert list(begun) == [1, 2, 3, 4, 5]
    assert list(begun.values()) == sorted(begun.values())
    assert begun[1] < 500
    assert begun[2] == HEALTHY
    assert HEALTHY + 20 <= begun[3] < HEALTHY + 300
    assert HEALTHY + SILENT <= begun[4] < HEALTHY + SILENT + 5
    assert HEALTHY + SILENT + BURST <= begun[5] < HEALTHY + SILENT + BURST + 100


def test_without_epsilon_the_embedding_thaws_before_the_burst() -> None:
    """The second moment catches up with the gradient, and the burst is the same as with epsilon."""
    start = HEALTHY + SILENT
    bare, usual = trace(eps=0.0).update_n, trace().update_n
    assert bare[start - 1] == pytest.approx(0.22, rel=0.05)
    assert usual[start - 1] < 0.01
    assert bare[start : start + 12] == pytest.approx(usual[start : start + 12], rel=1e-2)


def test_a_run_without_a_silence_or_a_burst_stops_at_its_stage() -> None:
    assert list(first_steps(trace(silence=1e-4), beta2=0.95)) == [1]
    assert list(first_steps(trace(burst=1e-10), beta2=0.95)) in ([1, 2, 3], [1, 2, 3, 4])
