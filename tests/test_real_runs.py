"""Public runs held against the lab's claims: curves, rules in planted worlds, and the committed numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import pytest

from lab.analysis.judging.decision import CONTRADICTED, NO_EFFECT, REPRODUCED
from lab.analysis.judging.rules import HOLDS, NOT_DECIDED, NOT_TESTED, SLOPE_HOLDS, Rule, judge
from lab.analysis.statistics import student_t
from lab.studies.real_runs.claims import EMBEDDING, MARIN, RULES, STEP_LAW
from lab.studies.real_runs.curves import RealRuns, changes_of, curve_of, curves_of, rates_of

RATES = 2.0 ** np.arange(-12, -3, 0.5)
SIZES = (1e8, 3e8, 9e8)
RULE = {rule.name: rule for rule in RULES}
OWN = {"of_the_lab": {"effect": 0.4, "low": 0.3, "high": 0.5, "verdict": REPRODUCED}}


def losses(best: float, failing: float, cliff: float = 4.0) -> np.ndarray:
    """Final losses at ``RATES``: lowest at one, and from another one on higher by ``cliff``."""
    decades = np.log10(RATES / best)
    return 3 + 0.05 * decades**2 + np.where(failing * 0.99 < RATES, cliff, 0.0)


def sweep(
    exponent: float = -0.4, tokens: float = 0.0, batch: float = 0.0, cliff: float = 4.0, noise: float = 0.02
) -> pd.DataFrame:
    """Curves of three sizes, four budgets and three batches, whose first failing rate is a product of powers."""
    draw = np.random.default_rng(0)
    parts = []
    for size in SIZES:
        for budget in (1e9, 1e10, 1e11, 1e12):
            for rows in (2**16, 2**19, 2**22):
                log = math.log10(0.02) + exponent * math.log10(size / 3e8) + tokens * math.log10(budget / 1e10)
                log += batch * math.log10(rows / 2**19) + noise * draw.standard_normal()
                curve = {"lr": RATES, "loss": losses(10**log / 8, 10**log, cliff)}
                keys = {"source": STEP_LAW, "arm": "AdamW", "parameters": size, "tokens": budget, "batch": rows}
                parts.append(pd.DataFrame({**keys, **curve}))
    return pd.concat(parts)


OPTIMIZERS = ("adamw", "nadamw", "lion", "adam_mini", "muon", "scion", "soap")


def marin(breaks: Callable[[str, str, float], bool], optimizers: Sequence[str] = OPTIMIZERS) -> RealRuns:
    """A base and single changes of each optimizer, which end a nat higher where they break."""
    changes = {
        "learning_rate": [0.002, 0.016, 0.032],
        "epsilon": [1e-15, 1e-10],
        "warmup": [500.0, 4000.0],
        "weight_decay": [0.2, 0.4],
    }
    base = {"learning_rate": 0.008, "epsilon": 1e-20, "warmup": 2000.0, "weight_decay": 0.1, "batch_sequences": 128}
    rows = []
    for optimizer in optimizers:
        for size, parameters in (("130m", 1.3e8), ("300m", 3e8)):
            for chinchilla in (1.0, 2.0, 4.0):
                same = {"optimizer": optimizer, "size": size, "parameters": parameters, "chinchilla": chinchilla}
                same |= {"tokens": 20 * parameters * chinchilla, "steps": 5000, **base}
                rows.append({**same, "changed_key": math.nan, "value": math.nan, "loss": 3.0, "is_base": True})
                for key, values in changes.items():
                    for value in values:
                        ratio = value / base[key]
                        loss = 4.0 if breaks(optimizer, key, ratio) else 3.01
                        rows.append({**same, "changed_key": key, "value": value, "loss": loss, "is_base": False})
    table = changes_of(pd.DataFrame(rows))
    return RealRuns(curves_of(rates_of(table)), table, pd.DataFrame())


def verdict(name: str, runs: RealRuns | pd.DataFrame) -> str:
    if isinstance(runs, pd.DataFrame):
        runs = RealRuns(curves_of(runs), pd.DataFrame(), pd.DataFrame())
    return judge(RULE[name]._replace(lab=""), runs, {}).decision.verdict


def test_a_curve_says_where_runs_begin_to_fail() -> None:
    curve = curve_of(np.array([4e-3, 1e-3, 2e-3, 8e-3, 1.6e-2]), np.array([3.05, 3.2, 3.0, 7.0, math.nan]))
    assert (curve.best_lr, curve.edge_lr, curve.failing_lr, curve.is_inside) == (2e-3, 4e-3, 8e-3, True)
    assert (curve.higher, curve.survivors) == (1, 0)
    assert 4e-3 < curve.tolerated_lr < 8e-3


def test_what_did_not_fail_has_no_failing_rate_and_an_optimum_at_the_end_is_not_inside() -> None:
    curve = curve_of(np.array([1e-3, 2e-3, 4e-3]), np.array([3.4, 3.2, 3.0]))
    assert math.isnan(curve.failing_lr)
    assert not curve.is_inside
    lower = curve_of(np.array([1e-3, 2e-3, 4e-3]), np.array([4.0, 3.0, 3.1]))
    assert math.isnan(lower.failing_lr)  # a low rate fails to train, and no high one diverges


def test_a_rate_that_survives_above_one_that_failed_is_counted() -> None:
    curve = curve_of(np.array([1.0, 2, 3, 4, 5]), np.array([3.1, 3.0, 5.0, 3.1, 5.0]))
    assert (curve.failing_lr, curve.higher, curve.survivors) == (3.0, 2, 1)


@pytest.mark.parametrize("exponent", [-0.2, -0.4, -0.9])
def test_a_planted_exponent_is_recovered(exponent: float) -> None:
    runs = RealRuns(curves_of(sweep(exponent, tokens=0.1)), pd.DataFrame(), pd.DataFrame())
    found = RULE["failing_rate_falls_with_size"].effect(runs)
    assert found.low < -exponent < found.high
    assert found.high - found.low < 0.4
    found = RULE["failing_rate_hardly_changes_with_tokens"].effect(runs)
    assert found.low < 0.1 < found.high


@pytest.mark.parametrize(
    ("name", "holds", "fails"),
    [
        ("failing_rate_falls_with_size", sweep(-0.4), sweep(0.4)),
        ("failing_rate_hardly_changes_with_tokens", sweep(), sweep(tokens=0.5)),
        ("failing_rate_hardly_changes_with_batch", sweep(), sweep(batch=0.4)),
        ("best_rate_falls_with_size", sweep(-0.4), sweep(0.4)),
        ("best_rate_rises_with_batch", sweep(batch=0.4), sweep(batch=-0.4)),
        ("best_rate_hardly_changes_with_tokens", sweep(), sweep(tokens=0.5)),
        ("divergence_is_a_cliff", sweep(), sweep(cliff=0.5)),
        ("epsilon_breaks_no_run", marin(lambda *_: False), marin(lambda _, key, ratio: key == "epsilon")),
        ("more_decay_breaks_no_run", marin(lambda *_: False), marin(lambda _, key, ratio: ratio > 1)),
        ("longer_warm_up_breaks_no_run", marin(lambda *_: False), marin(lambda _, key, ratio: key == "warmup")),
        ("shorter_warm_up_ends_higher", marin(lambda *_: True), marin(lambda *_: False)),
    ],
)
def test_a_rule_holds_in_a_world_in_which_its_sentence_does(
    name: str, holds: RealRuns | pd.DataFrame, fails: RealRuns | pd.DataFrame
) -> None:
    assert verdict(name, holds) == REPRODUCED
    assert verdict(name, fails) in (CONTRADICTED, NO_EFFECT)


@pytest.mark.parametrize(
    ("values", "is_slope", "word"),
    [
        ([0.41, 0.42, 0.43, 0.44], True, SLOPE_HOLDS),
        ([0.91, 0.92, 0.93, 0.94], True, CONTRADICTED),  # another slope than the lab's
        ([0.91, 0.92, 0.93, 0.94], False, HOLDS),
        ([-0.41, -0.42, -0.43], True, CONTRADICTED),
        ([-0.4, 0.2, 0.5], True, NOT_DECIDED),
    ],
)
def test_the_labs_claim_has_the_word_that_real_runs_give_it(values: list[float], is_slope: bool, word: str) -> None:
    rule = Rule("a", "a", "a", student_t, lab="of_the_lab", is_slope=is_slope)
    assert judge(rule, values, OWN).word == word


def test_a_claim_that_the_lab_never_judged_is_not_tested() -> None:
    rule = Rule("a", "a", "a", student_t, lab="of_the_lab")
    assert judge(rule, [1.0, 1.1, 1.2], {"of_the_lab": {**OWN["of_the_lab"], "effect": None}}).word == NOT_TESTED


def test_every_rule_can_be_told_from_the_others() -> None:
    assert len(RULE) == len(RULES)
    assert len({(rule.sentence, rule.source) for rule in RULES}) == len(RULES)
    assert {rule.source for rule in RULES} == {STEP_LAW, MARIN, EMBEDDING}
