"""The rule of the board: which intervals give which word, and how often it errs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import planted
from lab.analysis.statistics import student_t
from studies.claims.decision import ABOVE_ZERO, ALPHA, DECIDED, READINGS, VERDICTS, alpha_of, decide
from studies.claims.effects import Qualified, drift_beyond_half_a_decade, exceeds, extrapolated, parts
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.statistics import benjamini_hochberg, share_of_clusters
from studies.claims.verdicts import Verdict, judge_claim

UP, DOWN, WIDE = [1.0, 1.1, 1.2], [-1.0, -1.1, -1.2], [-1.0, 1.1, 1.2]
NONE, SLIGHT = [0.001, 0.0, -0.001], [0.010, 0.011, 0.012]
NEAR = (-0.1, 0.1)


@pytest.mark.parametrize(
    ("seeds", "side", "margin", "verdict"),
    [
        ([UP], ABOVE_ZERO, 0, "reproduced"),
        ([DOWN], ABOVE_ZERO, 0, "contradicted"),
        ([WIDE], ABOVE_ZERO, 0, "inconclusive"),
        ([UP[:2]], ABOVE_ZERO, 0, "inconclusive"),
        ([[0.0, 0.0, 0.0]], ABOVE_ZERO, 0, "inconclusive"),
        ([[0.01, 0.0, -0.01]], NEAR, 0, "reproduced"),
        ([[0.5, 0.51, 0.52]], NEAR, 0, "contradicted"),
        ([[0.1, 0.0, -0.1]], NEAR, 0, "inconclusive"),
        # several parts
        ([UP, UP], ABOVE_ZERO, 0, "reproduced"),
        ([UP, WIDE], ABOVE_ZERO, 0, "inconclusive"),
        ([UP, DOWN], ABOVE_ZERO, 0, "in part"),
        ([WIDE, DOWN], ABOVE_ZERO, 0, "contradicted"),
        # an effect that does not count, whether or not its interval touches zero
        ([NONE], ABOVE_ZERO, 0.02, "no effect"),
        ([SLIGHT], ABOVE_ZERO, 0.02, "no effect"),
        ([SLIGHT], ABOVE_ZERO, 0, "reproduced"),
        ([[-0.010, -0.011, -0.012]], ABOVE_ZERO, 0.02, "no effect"),
        ([[0.01, 0.0, -0.01]], ABOVE_ZERO, 0.02, "inconclusive"),  # up to .025
        ([[-0.3, -0.15, -0.01]], ABOVE_ZERO, 0.02, "inconclusive"),  # surely below .3, not surely below zero
        ([UP, NONE], ABOVE_ZERO, 0.02, "in part"),
        ([NONE, SLIGHT], ABOVE_ZERO, 0.02, "no effect"),
        ([WIDE, NONE], ABOVE_ZERO, 0.02, "contradicted"),
        ([NONE], (-0.01, math.inf), 0.02, "reproduced"),  # the margin is for claims of an effect above zero
    ],
)
def test_the_word(seeds: list[list[float]], side: tuple[float, float], margin: float, verdict: str) -> None:
    assert decide([student_t(values) for values in seeds], side, margin).verdict == verdict


def test_parts_are_told_apart_and_the_one_against_the_claim_is_shown() -> None:
    up, down, wide = map(student_t, (UP, DOWN, WIDE))
    decision = decide([up, wide, down], ABOVE_ZERO)
    assert (decision.verdict, decision.inside, decision.against, decision.shown) == ("in part", (0,), (2,), down)
    weak = student_t([0.2, 0.21, 0.22])
    assert decide([up, weak], ABOVE_ZERO).shown == weak


def test_each_part_of_a_claim_is_tested_at_its_share() -> None:
    """A part whose 95 % interval lies just on the other side contradicts alone, and does not beside two others."""
    against = student_t([-0.5, -2.2, -3.0, -2.1, -0.3])
    assert -0.2 < against.high < 0
    assert decide([against], ABOVE_ZERO).verdict == "contradicted"
    assert decide([against, student_t(WIDE), student_t(WIDE)], ABOVE_ZERO).verdict == "inconclusive"


@pytest.mark.parametrize("sign", [1, -1], ids=["in part", "against"])
def test_a_claim_of_two_parts_takes_twice_the_evidence_of_each(sign: int) -> None:
    """A part that decides alone at the whole alpha does not at half of it, neither for the claim nor against it."""
    border = [sign * value for value in (0.5, 2.2, 3.0, 2.1, 0.3)]
    alone = student_t(border)
    assert alpha_of(1) / 2 < min(alone.p_outside(*ABOVE_ZERO), alone.p_inside(*ABOVE_ZERO)) < alpha_of(1)
    other = DOWN if sign > 0 else WIDE
    decision = decide([alone, student_t(other)], ABOVE_ZERO)
    assert decision.verdict == ("contradicted" if sign > 0 else "inconclusive")
    assert 0 not in (*decision.inside, *decision.against)


@pytest.mark.parametrize("level", [0.9, 0.99])
def test_a_p_is_that_of_the_interval_that_ends_at_the_bound(level: float) -> None:
    values = [0.3, 0.5, 0.45, 0.2]
    ends = student_t(values, level)
    interval = student_t(values)
    assert interval.p_outside(ends.low, math.inf) == pytest.approx(1 - level)
    assert interval.p_outside(-math.inf, ends.high) == pytest.approx(1 - level)
    assert interval.p_inside(ends.high, math.inf) == pytest.approx(1 - level)
    assert interval.p_inside(-math.inf, ends.low) == pytest.approx(1 - level)
    assert interval.p_outside(0.0, 0.0) == 1
    assert interval.p_inside(0.0, math.inf) == 1


def test_the_interval_of_a_share_stays_within_the_shares_and_is_exact() -> None:
    """Student's passes 1 where two of each seed's spikes are found but for one."""
    hits, trials = [2] * 35 + [1], [2] * 36
    assert student_t([each / 2 for each in hits]).high > 1 > share_of_clusters(hits, trials).high
    share = share_of_clusters([9, 8, 10, 9], [10] * 4, 0.5)
    exact = stats.binomtest(36, 40).proportion_ci(method="exact")
    assert share[:4] == pytest.approx((36 / 40 - 0.5, exact.low - 0.5, exact.high - 0.5, 4))
    assert share.p_outside(*ABOVE_ZERO) == pytest.approx(2 * stats.binomtest(36, 40, 0.5, "greater").pvalue)
    assert [share.p_outside(share.low, math.inf), share.p_inside(share.high, math.inf)] == pytest.approx([0.05] * 2)
    assert (-share).p_outside(-math.inf, -share.low) == pytest.approx(0.05)
    assert share_of_clusters([0, 0, 0], [4, 4, 4]).p_outside(-math.inf, 0.5) == pytest.approx(2 * 0.5**12)
    assert decide([share_of_clusters([0, 0, 0], [0, 0, 0])], ABOVE_ZERO).verdict == "inconclusive"


@pytest.mark.slow
def test_trials_of_one_seed_that_are_alike_count_as_fewer() -> None:
    """The share of each seed is drawn around 0.5, so that one interval in twenty misses it; pooled, many more would."""
    worlds, draws = 400, np.random.default_rng(0)
    of_seed = draws.beta(4.5, 4.5, size=(worlds, 16))
    hits = draws.binomial(20, of_seed)
    missed = sum(not one.low <= 0.5 <= one.high for one in (share_of_clusters(each, [20] * 16) for each in hits))
    pooled = [stats.binomtest(each.sum(), 320).proportion_ci(method="exact") for each in hits]
    chance = stats.binom.ppf(0.999, worlds, 0.05)
    assert missed <= chance
    assert sum(not one.low <= 0.5 <= one.high for one in pooled) > 2 * chance


def test_a_claim_on_a_share_is_judged_by_the_trials_of_its_seeds() -> None:
    seeds, claim = list("012"), CLAIMS["qk_layernorm_lowers_sensitivity"]
    found, spikes = pd.Series([3.0, 4.0, 5.0], seeds), pd.Series([4.0, 4.0, 6.0], seeds)

    def judged(effects: Qualified) -> Verdict:
        shown = claim._replace(effects=lambda *_: effects, unit="share")
        return judge_claim(shown, [Evidence("made", planted.records(list(planted.cards())))])

    one = judged(exceeds(found / spikes, 0.5, spikes))
    exact = share_of_clusters(found, spikes, 0.5)
    assert one[1:5] == exact[:4]
    both = parts(first=found / spikes - 0.5, other=pd.Series(UP, seeds))
    trials = parts(first=spikes, other=math.nan * spikes)
    intervals = Qualified(both, trials=trials, minus=0.5).intervals()
    assert intervals[0] == exact
    assert intervals[1][:4] == pytest.approx(student_t(UP)[:4])


def test_the_p_of_a_verdict_is_corrected_for_parts_and_readings() -> None:
    values = [1.0, 1.2, 0.7, 1.4]
    alone = stats.ttest_1samp(values, 0).pvalue
    first = ALPHA / alpha_of(1)
    assert decide([student_t(values)], ABOVE_ZERO).p == pytest.approx(alone * first)
    assert decide([student_t(values)], ABOVE_ZERO, reading=2).p == pytest.approx(min(1, alone * ALPHA / alpha_of(2)))
    down = student_t([-value for value in values])
    assert decide([down, student_t(WIDE)], ABOVE_ZERO).p == pytest.approx(2 * alone * first)


def test_alpha_is_spent_once() -> None:
    assert sum(alpha_of(reading) for reading in range(1, READINGS + 1)) == pytest.approx(ALPHA)
    with pytest.raises(ValueError, match="reading 7 of 6"):
        alpha_of(READINGS + 1)


@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 6))])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "fresh"])
def test_repeated_readings_err_in_one_of_twenty_cases(count: int, pooled: bool) -> None:
    """Six readings of four seeds each, all effects zero, so both `reproduced` and `contradicted` are false.

    By the plain 95 % interval of each reading it would be one in five with one part, and more with more.
    """
    draws = np.random.default_rng(count)
    worlds, false, plain = 1000, 0, 0
    for values in draws.normal(size=(worlds, count, 4 * READINGS)):
        seen = [values[:, (0 if pooled else 4 * n) : 4 * (n + 1)] for n in range(READINGS)]
        intervals = [[student_t(part) for part in each] for each in seen]
        words = (decide(each, ABOVE_ZERO, reading=n).verdict for n, each in enumerate(intervals, 1))
        false += any(word in DECIDED for word in words)
        plain += any(one.high < 0 or (count == 1 and one.low > 0) for each in intervals for one in each)
    chance = stats.binom.ppf(0.999, worlds, ALPHA)
    assert false <= chance
    assert plain > 2 * chance


def test_only_undecided_readings_cost_alpha() -> None:
    claim = CLAIMS["qk_layernorm_lowers_sensitivity"]
    cards = list(planted.cards())
    for card in cards:  # seeds that differ so much that the first reading just decides
        if "qk_layernorm" in card["intervention"] and card["optimizer.lr"] > 0.01:
            card["final_val_loss"] += 0.1 * card["seed"] * (card["optimizer.lr"] / 0.3)

    def judged(sweep: str, *readings: str) -> Verdict:
        return judge_claim(claim, [Evidence(sweep, planted.records(cards), readings={claim.name: readings})])

    first, second = judged(claim.sweep, "inconclusive"), judged(claim.sweep, "inconclusive", "reproduced")
    assert judged(claim.sweep) == first == judged(claim.sweep, "reproduced", "inconclusive")
    assert judged("another sweep", "inconclusive", "inconclusive").verdict == "reproduced"
    assert (first.verdict, second.verdict) == ("reproduced", "inconclusive")
    assert first[1:4] == second[1:4]
    assert second.reason.startswith("the 99.8 % interval, which decides, reaches beyond what is claimed, above 0 ")


@pytest.mark.parametrize(
    ("effect", "control", "verdict"),
    [
        (UP, UP, "reproduced"),
        (DOWN, UP, "contradicted"),
        (NONE, UP, "no effect"),
        *((effect, WIDE, "inconclusive") for effect in (UP, DOWN, NONE)),
        *((effect, DOWN, "not testable here") for effect in (UP, DOWN, NONE)),
        (WIDE, DOWN, "inconclusive"),
    ],
)
def test_every_decision_takes_a_control(effect: list[float], control: list[float], verdict: str) -> None:
    def effects(*_: object) -> Qualified:
        return Qualified(pd.Series(effect, list("012")), control=Qualified(pd.Series(control, list("012"))))

    claim = CLAIMS["qk_layernorm_lowers_sensitivity"]._replace(effects=effects, unit="nats/token")
    judged = judge_claim(claim, [Evidence("made", planted.records(list(planted.cards())))])
    assert judged.verdict == verdict
    assert judged.verdict in VERDICTS
    assert math.isnan(judged.p) == (verdict == "not testable here")


def test_a_claim_that_holds_in_part_says_for_which_parts() -> None:
    def effects(*_: object) -> pd.DataFrame:
        return parts(rare_tokens=pd.Series(UP, list("012")), final=pd.Series(DOWN, list("012")))

    claim = CLAIMS["qk_layernorm_lowers_sensitivity"]._replace(effects=effects)
    judged = judge_claim(claim, [Evidence("made", planted.records(list(planted.cards())))])
    assert judged.verdict == "in part"
    assert judged.reason.startswith("so for rare tokens, not for final; tried: ")
    sizes = pd.DataFrame([[1, 2], [1, 2]], columns=[24_736, 98_624])
    assert Qualified(sizes).parts == ["24.7k parameters", "98.6k parameters"]
    assert Qualified(sizes.iloc[:, 1]).parts == ["98.6k parameters"]
    assert Qualified(pd.Series([1.0])).parts == ["all of it"]
    assert Qualified(pd.concat([sizes, sizes], axis=1)).parts == ["part 1", "part 2", "part 3", "part 4"]


def test_q_is_that_of_benjamini_and_hochberg() -> None:
    ps = [0.001, 0.5, 0.03, 0.02, 0.9, 0.04]
    assert benjamini_hochberg(ps) == pytest.approx(stats.false_discovery_control(ps).tolist())
    with_gap = benjamini_hochberg([*ps[:2], math.nan, *ps[2:]])
    assert math.isnan(with_gap.pop(2))
    assert with_gap == benjamini_hochberg(ps)


def test_only_seeds_count_that_a_control_and_a_presumption_have_too() -> None:
    of_four = pd.Series([1.0, 1.1, 0.9, 1.0], list("0123"))
    lacks_one, lacks_another = of_four.replace(1.1, math.nan), of_four.replace(0.9, math.inf)
    both = Qualified(of_four, control=Qualified(lacks_one), presumed=Qualified(lacks_another))
    assert [interval.n for interval in Qualified(of_four).intervals()] == [4]
    assert [interval.n for interval in both.intervals()] == [2]
    assert [interval.n for interval in both.control_intervals()] == [2]


def test_a_line_over_sizes_is_continued_to_another() -> None:
    table = pd.DataFrame([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], columns=[1e3, 1e4, 1e5])
    assert list(extrapolated(table, 1e7)) == pytest.approx([5, 0])
    assert list(extrapolated(table, 1e3)) == pytest.approx([1, 0])


@pytest.mark.parametrize("direction", [-1, 1])
def test_a_best_rate_may_leave_its_place_on_either_side(direction: int) -> None:
    best = pd.DataFrame({1e3: [-2.0, -2.0], 1e4: [-2.0, -2.1], 1e5: [-2.0 + direction, -2.0 + 0.2 * direction]})
    zero = best * 0
    arm: Any = SimpleNamespace(sizes=list(best), table=lambda _: best, resolution=lambda _: zero)
    assert list(drift_beyond_half_a_decade(arm).table) == pytest.approx([0.5, -0.3])
