"""Public runs held against the lab's claims: curves, claims in planted worlds, and the committed numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import public_limits
import write_pages
from lab.analysis.statistics import student_t
from studies.claims import public_table
from studies.claims.decision import CONTRADICTED, INCONCLUSIVE, NO_EFFECT, REPRODUCED
from studies.claims.public_claims import (
    HOLDS,
    NOT_DECIDED,
    NOT_TESTED,
    SLOPE_HOLDS,
    JudgedClaim,
    PublicClaim,
    judge_public_claim,
)
from studies.claims.registry import CLAIMS, PUBLIC_CLAIMS
from studies.real_runs import figures
from studies.real_runs.curves import RealRuns, changes_of, curve_of, curves_of, rates_of, read_real_runs
from studies.real_runs.effects import MARIN, STEP_LAW
from sweeping import OutputOf

HOME = Path(__file__).parents[2]

RATES = 2.0 ** np.arange(-12, -3, 0.5)
SIZES = (1e8, 3e8, 9e8)
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
    return judge_public_claim(PUBLIC_CLAIMS[name]._replace(lab=""), runs, {}).decision.verdict


def test_a_cliff_has_the_same_bracket_at_half_of_the_way_and_a_slope_has_not() -> None:
    lr = np.array([1e-3, 2e-3, 4e-3, 8e-3])
    cliff, slope = (curve_of(lr, np.array(losses), 7.0) for losses in ([3.1, 3.0, 3.1, 6.9], [3.1, 3.0, 3.5, 5.5]))
    assert (cliff.failing_lr, cliff.half_edge_lr, cliff.half_lr) == (8e-3, 4e-3, 8e-3)
    assert (slope.failing_lr, slope.half_lr) == (4e-3, 8e-3)
    assert math.isnan(curve_of(lr, np.array([3.1, 3.0, 3.1, 6.9])).half_lr)
    curves = read_real_runs().curves
    failed = curves[(curves["source"] == STEP_LAW) & curves["failing_lr"].notna()]
    assert (failed["half_lr"] == failed["failing_lr"]).mean() > 0.95


def test_a_run_that_exploded_counts_as_no_more_than_a_uniform_guess() -> None:
    runs = marin(lambda *_: False).changes
    table = runs[["optimizer", "size", "chinchilla", "parameters", "tokens", "changed_key", "value", "is_base"]].assign(
        loss=runs["loss"].where(runs["changed_key"] != "warmup", 4e4), learning_rate=0.008, warmup=2000.0
    )
    table.loc[table["changed_key"] == "learning_rate", "loss"] = math.nan
    found = changes_of(table)
    assert found.loc[found["changed_key"].isin(["warmup", "learning_rate"]), "excess"].eq(9.0).all()
    assert found.loc[found["changed_key"] == "learning_rate", "breaks"].all()


@pytest.mark.parametrize("exponent", [-0.2, -0.4, -0.9])
def test_a_planted_exponent_is_recovered(exponent: float) -> None:
    runs = RealRuns(curves_of(sweep(exponent, tokens=0.1)), pd.DataFrame(), pd.DataFrame())
    found = PUBLIC_CLAIMS["failing_rate_falls_with_size"].effect(runs)
    assert found.low < -exponent < found.high
    assert found.high - found.low < 0.4
    found = PUBLIC_CLAIMS["failing_rate_hardly_changes_with_tokens"].effect(runs)
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
def test_a_claim_holds_in_a_world_in_which_its_sentence_does(
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
    claim = PublicClaim("a", "a", "a", list, student_t, lab="of_the_lab", is_slope=is_slope)
    assert judge_public_claim(claim, values, OWN).word == word


def test_a_claim_that_the_lab_never_judged_is_not_tested() -> None:
    claim = PublicClaim("a", "a", "a", list, student_t, lab="of_the_lab")
    never = {"of_the_lab": {**OWN["of_the_lab"], "effect": None}}
    assert judge_public_claim(claim, [1.0, 1.1, 1.2], never).word == NOT_TESTED


def test_every_claim_can_be_told_from_the_others() -> None:
    told = [(claim.sentence, claim.runs_of) for claim in PUBLIC_CLAIMS.values()]
    assert len({*told}) == len(told)
    assert {runs_of for _, runs_of in told} == {STEP_LAW, MARIN, "output embedding"}
    assert not {*PUBLIC_CLAIMS} & {*CLAIMS}


@cache
def judged() -> dict[str, JudgedClaim]:
    return {row.claim.name: row for row in public_table.judge_all()}


def test_the_committed_numbers_decide_most_claims() -> None:
    assert judged()["failing_rate_falls_with_size"].word == SLOPE_HOLDS
    assert judged()["qk_norm_keeps_every_learning_rate"].word == CONTRADICTED
    assert sum(row.decision.verdict == INCONCLUSIVE for row in judged().values()) < len(PUBLIC_CLAIMS) / 3
    assert all(math.isfinite(row.decision.shown.mean) for row in judged().values())


def test_the_law_of_other_curves_foretells_those_that_were_left_out() -> None:
    scores = public_limits.held_out().set_index("left out")
    of_sweeps = scores.loc[["Step Law", "Marin", "the lab"]]
    assert (of_sweeps["error"] < 0.1).all()
    assert not scores.loc[~scores.index.str.contains("others"), "costly among clear"].any()
    assert (scores["best among beyond"] <= 0.2).all()


def brackets_about_the_law(step: float, height: float) -> pd.DataFrame:
    """Brackets so many decades wide, in whose middles a law that is this much higher than that of all curves lies."""
    curves = public_limits.curves_of_sources({"the lab": ["adamw"]})
    law = public_limits.law_of(public_limits.curves_of_sources(public_limits.ADAMW), public_limits.LAW)
    middle = np.log10([each.middle for each in public_limits.foretold(law, curves)]) + height
    return curves.assign(low=10 ** (middle - step / 2), high=10 ** (middle + step / 2))


def test_wide_brackets_of_small_curves_allow_many_forecasts_of_large_ones() -> None:
    assert public_limits.allowed_by(brackets_about_the_law(1e-6, 0.2)) == pytest.approx((0.2, 0.2), abs=1e-3)
    narrow, wide = (public_limits.allowed_by(brackets_about_the_law(step, 0.0)) for step in (0.1, 0.5))
    assert wide[0] < narrow[0] < 0 < narrow[1] < wide[1]
    assert wide[1] == pytest.approx(5 * narrow[1], rel=1e-6)
    low, high = public_limits.allowed()["by nats"]
    assert low < -0.5
    assert high > 0.5


def test_public_runs_fall_further_on_the_step_on_which_they_first_fail() -> None:
    public, small = (public_limits.way_fallen(source) for source in ("Step Law", "the lab"))
    assert (public.n, small.n) == (12, 9)
    assert small.high < 0.5 < 0.8 < public.low


def test_documents_have_the_tables_that_the_numbers_make() -> None:
    table = write_pages._public_tables()
    for page in (HOME / "docs" / "held_to_real_runs.md", HOME / "results" / "README.md"):
        text = page.read_text(encoding="utf-8")
        assert table[0] in text
    assert table[1] in (HOME / "docs" / "held_to_real_runs.md").read_text(encoding="utf-8")


def test_claims_on_public_runs_are_listed_beside_the_labs(output_of: OutputOf) -> None:
    text = output_of("claims", "--source", "public runs")
    assert all(claim.sentence in text for claim in PUBLIC_CLAIMS.values())
    rows = {row["name"]: row for row in json.loads(output_of("claims", "--source", "public runs", "--json"))}
    assert rows["best_rate_falls_with_size"]["holds"] == SLOPE_HOLDS
    assert rows["divergence_is_a_cliff"]["claim_of_the_lab"] is None


def test_every_claim_of_the_lab_that_is_held_against_public_runs_exists() -> None:
    assert {claim.lab for claim in PUBLIC_CLAIMS.values() if claim.lab} <= set(CLAIMS)


def test_the_matrix_of_changes_counts_runs() -> None:
    table = marin(lambda optimizer, key, ratio: optimizer == "lion" and key == "warmup" and ratio < 1)
    drawn = figures.changes(table)
    texts = {text.get_text() for text in drawn.axes[0].texts}
    assert {"6/6", "0/6", "0/12"} <= texts
    bold = [text for text in drawn.axes[0].texts if text.get_weight() == "bold"]
    assert [text.get_text() for text in bold] == ["6/6"]


def test_the_figures_draw_the_committed_numbers() -> None:
    runs = read_real_runs()
    assert (
        len(figures.cliff(runs).axes[0].lines)
        == (runs.curves["source"] == STEP_LAW).sum()
        - runs.curves.loc[runs.curves["source"] == STEP_LAW, "failing_lr"].isna().sum()
    )
    assert figures.failing_rates(runs).axes[0].get_xscale() == "log"


@pytest.mark.parametrize(("rise", "share"), [(0.29, 1.0), (0.31, 0.0)])
def test_a_rate_is_costly_from_the_loss_on_that_the_lab_calls_so(rise: float, share: float) -> None:
    rows = [
        {"parameters": size, "arm": "baseline", "lr": lr, "loss": loss}
        for size in (1e7, 2e7, 4e7)
        for lr, loss in ((0.001, 5.0), (0.01, 3.0), (0.1, 3.1), (0.3, 3.0 + rise), (1.0, 9.0))
    ]
    world = RealRuns(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(rows))
    assert PUBLIC_CLAIMS["qk_norm_keeps_every_learning_rate"].effect(world).mean == share


def test_the_batch_of_public_runs_is_the_tokens_of_a_step() -> None:
    changes = marin(lambda *_: False, ["adamw"]).changes
    assert set(rates_of(changes)["batch"]) == {
        20 * size * budget / 5000 for size in (1.3e8, 3e8) for budget in (1, 2, 4)
    }
