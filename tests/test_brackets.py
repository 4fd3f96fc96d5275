"""Limits between two rates that were tried: what a curve says of its own, and the power law of many."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from lab.analysis.laws.brackets import PowerLaw, fit_power_law
from studies.real_runs.curves import curve_of, curves_of, failing_brackets

NAN = math.nan


@pytest.mark.parametrize(
    ("losses", "failing", "edge", "higher", "survivors"),
    [
        ([3.2, 3.0, 3.05, 7.0, NAN], 8, 4, 1, 0),
        ([3.1, 3.0, 5.0, 3.1, 5.0], 4, 2, 2, 1),  # one survives between two that fail
        ([3.1, 3.0, 5.0, 3.1, 3.2], 4, 2, 2, 2),
        ([3.1, 3.0, NAN, 5.0, math.inf], 4, 2, 2, 0),
        ([3.4, 3.3, 3.2, 3.1, 3.0], NAN, NAN, 0, 0),
        ([9.0, 5.0, 3.0, 3.1, 3.2], NAN, NAN, 0, 0),  # low rates that train too slowly, and no high one that fails
        ([9.0, 3.0, 3.1, 3.2, 4.0], 16, 8, 0, 0),
        ([3.0, 3.29, 3.31, 3.2, 4.0], 4, 2, 2, 1),  # from 0.3 nats above the best
    ],
)
def test_a_curve_says_where_runs_begin_to_fail(
    losses: list[float], failing: float, edge: float, higher: int, survivors: int
) -> None:
    rates, loss_n = np.array([1.0, 2, 4, 8, 16]), np.array(losses)
    place = int(np.nanargmin(loss_n))
    for order in (slice(None), slice(None, None, -1), [3, 0, 4, 1, 2]):
        curve = curve_of(rates[order], loss_n[order])
        assert (curve.best_lr, curve.best_loss, curve.highest_lr) == (rates[place], losses[place], 16)
        assert (curve.failing_lr, curve.edge_lr) == pytest.approx((failing, edge), nan_ok=True)
        assert (curve.higher, curve.survivors) == (higher, survivors)
        assert curve.is_inside == (0 < place < 4)
        at_failing, at_edge = (losses[list(rates).index(lr)] if lr in rates else NAN for lr in (failing, edge))
        expected = math.inf if lr_is_lost(at_failing, failing) else at_failing
        assert (curve.failing_loss, curve.edge_loss) == pytest.approx((expected, at_edge), nan_ok=True)


def lr_is_lost(loss: float, lr: float) -> bool:
    """Whether a run at a failing rate has no loss."""
    return math.isnan(loss) and not math.isnan(lr)


def test_a_rate_is_tolerated_up_to_a_tenth_of_a_nat_between_two_that_were_tried() -> None:
    curve = curve_of(np.array([1.0, 10, 100]), np.array([3.1, 3.0, 3.2]))
    assert curve.tolerated_lr == pytest.approx(10**1.5)
    assert math.isnan(curve_of(np.array([1.0, 10, 100]), np.array([3.1, 3.0, 3.09])).tolerated_lr)


def test_a_bracket_is_open_where_no_rate_failed() -> None:
    runs = pd.DataFrame({"arm": ["a"] * 3 + ["b"] * 3, "lr": [1.0, 2, 4] * 2, "loss": [3.0, 3.1, 7, 3.2, 3.1, 3.0]})
    table = failing_brackets(curves_of(runs)).set_index("arm")
    assert table.loc["a", ["low", "high"]].tolist() == [2.0, 4.0]
    assert table.loc["b", ["low", "high"]].tolist() == [4.0, math.inf]


def brackets(exponent: float, step: float, top: float = math.inf, bottom: float = 0.0) -> pd.DataFrame:
    """Limits that fall by a power of size, between rates of a grid with this step; beyond ``top`` nothing was tried."""
    draw = np.random.default_rng(1)
    size = np.repeat(np.geomspace(1e4, 1e9, 12), 6)
    log = -1 + exponent * np.log10(size / 1e6) + 0.05 * draw.standard_normal(len(size))
    low = step * np.floor(log / step)
    table = pd.DataFrame({"params": size, "low": 10**low, "high": 10 ** (low + step)})
    table["high"] = table["high"].where(table["high"] <= top, np.inf)
    table["low"] = table["low"].where(table["low"] >= bottom, 0.0)
    return table.assign(low=table["low"].clip(upper=top), high=table["high"].clip(lower=bottom))


@pytest.mark.parametrize("step", [0.05, 0.15, 0.5])
def test_a_power_law_is_recovered_from_brackets_however_wide(step: float) -> None:
    table = brackets(-0.4, step)
    law = fit_power_law(table, ["params"], table["params"])
    found = law.exponent("params")
    assert found.low < -0.4 < found.high
    assert found.high - found.low < 0.15
    assert law.predict({"params": 1e6}).middle == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize(("top", "bottom"), [(0.1, 0.0), (math.inf, 0.1)])
def test_what_failed_nowhere_or_everywhere_counts_as_beyond_what_was_tried(top: float, bottom: float) -> None:
    table = brackets(-0.4, 0.15, top, bottom)
    law = fit_power_law(table, ["params"], table["params"])
    assert law.exponents["params"] == pytest.approx(-0.4, abs=0.06)
    inside = table[(table["low"] > 0) & np.isfinite(table["high"])]
    assert len(inside) < 0.8 * len(table)


def test_nineteen_of_twenty_new_curves_lie_in_the_interval() -> None:
    table = brackets(-0.4, 0.05)
    law = fit_power_law(table, ["params"], table["params"])
    draw = np.random.default_rng(2)
    new = 10 ** (-1 + -0.4 * np.log10(3e10 / 1e6) + 0.05 * draw.standard_normal(2000))
    ends = law.predict({"params": 3e10})
    assert 0.93 < np.mean((new > ends.earliest) & (new < ends.latest)) < 1


def test_groups_count_equally_on_request_and_there_must_be_more_of_them_than_exponents() -> None:
    few, many = brackets(-0.4, 0.05).iloc[::6], brackets(-0.4, 0.05).iloc[:6]
    shifted = many.assign(params=1e4, low=many["low"] * 10, high=many["high"] * 10)
    table = pd.concat([few.iloc[1:], *[shifted] * 20], ignore_index=True)
    heights = [
        fit_power_law(table, ["params"], table["params"], equal=equal).predict({"params": 1e4}).middle
        for equal in (True, False)
    ]
    assert heights[0] < 0.7 * heights[1]
    with pytest.raises(ValueError, match="1 groups of curves, and 2 numbers"):
        fit_power_law(shifted, ["params"], shifted["params"])


T = 4.302653  # Student's quantile of 97.5 % at two degrees of freedom


@pytest.mark.parametrize(
    ("scatter", "covariance", "error", "variance"),
    [
        (0.3, [[0.0, 0.0], [0.0, 0.0]], 0.0, 0.09),
        (0.0, [[0.04, 0.0], [0.0, 0.0]], 0.0, 0.04),
        (0.0, [[0.0, 0.0], [0.0, 0.01]], 0.0, 0.01 * 2**2),  # two decades from the centre
        (0.0, [[0.0, 0.01], [0.01, 0.0]], 0.0, 2 * 0.01 * 2),
        (0.0, [[0.0, 0.0], [0.0, 0.0]], 0.5, 0.25),
        (0.3, [[0.04, 0.0], [0.0, 0.01]], 0.5, 0.09 + 0.04 + 0.04 + 0.25),
    ],
)
def test_a_prediction_has_the_scatter_of_curves_and_the_errors_of_the_law(
    scatter: float, covariance: list[list[float]], error: float, variance: float
) -> None:
    law = PowerLaw(-1.0, {"params": -0.5}, {"params": 1e6}, covariance, scatter, 2)
    found = law.predict({"params": 1e8}, offset=0.25, error=error)
    assert math.log10(found.middle) == pytest.approx(-1 - 0.5 * 2 + 0.25)
    half = T * math.sqrt(variance)
    assert math.log10(found.latest / found.middle) == pytest.approx(half, rel=1e-5)
    assert math.log10(found.middle / found.earliest) == pytest.approx(half, rel=1e-5)


def test_an_exponent_has_the_interval_of_its_own_error() -> None:
    law = PowerLaw(-1.0, {"n": -0.5, "d": 0.2}, {"n": 1e6, "d": 1e8}, np.diag([9.0, 0.01, 0.04]).tolist(), 0.3, 2)
    for name, error in (("n", 0.1), ("d", 0.2)):
        found = law.exponent(name)
        assert (found.mean, found.high - found.mean) == pytest.approx((law.exponents[name], T * error), rel=1e-5)
        assert found.n == 3
