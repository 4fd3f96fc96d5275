"""Crossings on planted worlds whose rate is known, and laws that any crossing obeys."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.analysis.crossings import Crossing, crossing, failing, over_seeds, rate_text

LADDER = 1e-3 * 10 ** (0.15 * np.arange(16))
ladders = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=12, unique=True)


def power(lr, at, slope):
    """A quantity that passes 1 at a learning rate, like a power of it."""
    return (np.asarray(lr) / at) ** slope


@given(at=st.floats(2e-3, 0.1), slope=st.floats(0.3, 7))
def test_a_power_law_crosses_where_it_was_planted_with_its_slope(at, slope):
    found = crossing(LADDER, power(LADDER, at, slope), 1.0, log=True)
    assert found.at == pytest.approx(at)
    assert found.slope == pytest.approx(slope)
    assert found.low <= at <= found.high
    assert found.width == pytest.approx(0.15)
    assert found.times == 1


@given(lrs=ladders, values=st.data(), level=st.floats(-1, 1))
def test_a_crossing_lies_in_its_bracket_whatever_the_order_of_the_runs(lrs, values, level):
    value = values.draw(st.lists(st.floats(-2, 2) | st.just(math.nan), min_size=len(lrs), max_size=len(lrs)))
    found = crossing(lrs, value, level)
    backwards = crossing(lrs[::-1], value[::-1], level)
    assert found == pytest.approx(backwards, nan_ok=True)
    of_lr = dict(zip(lrs, value, strict=True))
    within = {lr for lr, number in of_lr.items() if number <= level}
    if found.times:
        assert found.high == min(of_lr.keys() - within)
    assert found.low == max((lr for lr in within if lr < found.high), default=0.0)
    if not found.is_censored:
        assert found.low * (1 - 1e-9) <= found.at <= found.high * (1 + 1e-9)


@given(at=st.floats(2e-3, 0.1), factor=st.floats(0.01, 100))
def test_other_units_of_rate_or_quantity_move_nothing_else(at, factor):
    value = power(LADDER, at, 3)
    assert crossing(factor * LADDER, value, 1.0, log=True).at == pytest.approx(factor * at)
    assert crossing(LADDER, factor * value, factor, log=True).at == pytest.approx(at)


@given(at=st.floats(2e-3, 0.1), more=st.floats(1.001e-3, 0.17))
def test_a_rate_more_narrows_the_bracket_or_leaves_it(at, more):
    assume(more not in LADDER)
    coarse = crossing(LADDER, power(LADDER, at, 2), 1.0)
    lrs = np.append(LADDER, more)
    fine = crossing(lrs, power(lrs, at, 2), 1.0)
    assert coarse.low <= fine.low <= at <= fine.high <= coarse.high
    assert abs(math.log(fine.at / at)) <= abs(math.log(coarse.at / at)) + 1e-9


def test_losses_fail_above_the_best_rate_only():
    found = failing([0.001, 0.01, 0.1, 1.0], [3.0, 2.0, 2.2, 2.6], 0.3)
    assert (found.low, found.high) == (0.1, 1.0)
    assert found.at == pytest.approx(10**-0.75)
    assert found.slope == pytest.approx(0.4)


def test_of_several_crossings_the_first_counts_and_their_number_is_told():
    found = failing([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [2.0, 2.5, 2.1, math.nan, 2.9], 0.3)
    assert (found.low, found.high, found.times) == (1e-4, 1e-3, 2)


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_lies_beyond_any_level_in_the_middle_of_its_bracket(lost):
    found = crossing([0.01, 0.1], [5.0, lost], 1e9, log=True)
    assert found.at == pytest.approx(10**-1.5)
    assert found.slope == math.inf


def test_outside_of_what_was_tried_only_a_bound_is_known():
    never, always = crossing([0.01, 0.1], [1, 2], 5), crossing([0.01, 0.1], [6, 7], 5)
    assert (never.low, never.high, never.times) == (0.1, math.inf, 0)
    assert (always.low, always.high, always.times) == (0.0, 0.01, 1)
    assert [rate_text(over_seeds([found])) for found in (never, always)] == ["> 0.1", "< 0.01"]
    assert all(found.is_censored and math.isnan(found.at) for found in (never, always))
    assert (10**never.log_bound, 10**always.log_bound) == pytest.approx((0.1, 0.01))
    nothing = failing([0.01, 0.1], [math.nan, math.nan], 0.3)
    assert (nothing.low, nothing.high) == (0.0, 0.01)
    assert crossing([], [], 1.0) == pytest.approx(Crossing(), nan_ok=True)


@given(at=st.floats(2e-3, 0.1), slope=st.floats(0.3, 7))
def test_looking_down_is_looking_up_in_a_mirror(at, slope):
    value = power(LADDER, at, -slope)
    down = crossing(LADDER, value, 1.0, start=LADDER[-1], below=True)
    up = crossing(1 / LADDER, value, 1.0, start=1 / LADDER[-1])
    assert down.at == pytest.approx(1 / up.at)
    assert (down.low, down.high) == pytest.approx((1 / up.high, 1 / up.low))
    assert down.slope == pytest.approx(-up.slope)


def test_the_interval_over_seeds_holds_the_planted_rate_as_often_as_it_says():
    generator, hits = np.random.default_rng(0), 0
    for _ in range(400):
        rates = 0.03 * 10 ** generator.normal(0, 0.1, size=4)
        rate = over_seeds([crossing(LADDER, power(LADDER, at, 4), 1.0, log=True) for at in rates])
        hits += rate.low <= 0.03 <= rate.high
    assert 0.94 <= hits / 400 <= 0.995  # wider than 95 %, since the width of the brackets counts, too


def test_few_seeds_have_the_interval_of_their_brackets():
    rate = over_seeds([crossing([0.01, 0.1, 1.0], [0, level, 5], 1) for level in (4, 2)])
    assert (rate.low, rate.high, rate.n) == (0.01, 0.1, 2)
    assert 0.01 < rate.mean < 0.1


def test_one_seed_that_never_crosses_leaves_the_interval_open():
    seeds = [crossing([0.01, 0.1], [0, value], 1) for value in (2, 2, 2, 0)]
    rate = over_seeds(seeds)
    assert (rate.low, rate.high) == (0.01, math.inf)
    assert math.isnan(rate.mean)
    assert rate_text(rate) == "> 0.01"
    assert rate_text(over_seeds(seeds[:3])).startswith("0.0316 [")
