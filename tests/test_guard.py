"""The lab guards itself: the smoke sweep is what it was, and a recipe that is broken on purpose is found."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import planted_faults
import pytest
import yaml
from planted_faults import FAULTS, SMOKE

from lab.analysis.guard import baseline, compare
from lab.analysis.guard import compare as gate
from lab.analysis.guard.compare import MARGIN, Comparison
from lab.analysis.guard.matching import where
from lab.analysis.guard.quantities import QUANTITIES, measured
from lab.analysis.statistics import student_t
from lab.features.guard.answer import answer_of

PLAIN, ARM = "without qk-layernorm", "with qk-layernorm"


def recorded(column: str) -> dict[str, pd.Series]:
    """A measured quantity of the smoke sweep on record, by arm: one number per seed."""
    old = baseline.read(SMOKE)
    return {where(old, number)[0]: table[column] for number, table in measured(old).items()}


def test_qk_layernorm_lowers_sensitivity_beyond_the_spread_of_seeds() -> None:
    for part in ("total", "above"):  # and it is instability that qk-layernorm takes away
        of_arm = recorded(part)
        assert student_t(of_arm[PLAIN] - of_arm[ARM]).n == 5
        assert student_t(of_arm[PLAIN] - of_arm[ARM]).low > 0


def test_an_effect_can_be_seen_in_it() -> None:
    """The best learning rate of every seed lies inside the grid, and beats the bigram model by more than the margin."""
    places, best, totals = recorded("best_lr_index"), recorded("best"), recorded("total")
    assert all(set(places[arm]) <= {2.0, 3.0, 4.0} for arm in (PLAIN, ARM)), "of five"
    assert all((best[arm] < 0.95 * baseline.read(SMOKE).runs["loss_bigram"].iloc[0]).all() for arm in (PLAIN, ARM))
    margin = MARGIN * best[ARM].mean()
    assert student_t(totals[PLAIN]).low - student_t(totals[ARM]).high > margin
    assert student_t(totals[ARM]).low > 2 * margin


@pytest.mark.slow
def test_three_seeds_of_the_guarded_recipe_are_what_they_were(tmp_path: Path) -> None:
    trained = baseline.from_folder(planted_faults.train(tmp_path / "smoke", *planted_faults.RECIPE, "seed=0,1,2"))
    comparison = compare.compare_baselines(planted_faults.recipe_of(baseline.read(SMOKE)), trained, MARGIN)
    assert comparison.verdict in ("ok", "drift"), answer_of(comparison).text()
    assert len(comparison.changes) == len(QUANTITIES)


@pytest.mark.slow
def test_the_smoke_sweep_is_what_it_was(tmp_path: Path) -> None:
    folder = planted_faults.train(tmp_path / "smoke", "smoke")
    comparison = gate.check_folder(folder, SMOKE)
    assert comparison.verdict in ("ok", "drift"), answer_of(comparison).text()
    assert len(comparison.changes) == 2 * len(QUANTITIES) + 1


def test_an_arm_that_ends_as_the_other_is_found() -> None:
    """What qk-layernorm does is undone in the records: its runs end as those without it."""
    old = baseline.read(SMOKE)
    order = ["lr", "seed"]
    plain, normed = (old.runs[old.runs["arm"] == arm].sort_values(order) for arm in (PLAIN, ARM))
    numbers = ["loss", *baseline.PROBES]
    runs = old.runs.copy()
    runs.loc[normed.index, numbers] = plain[numbers].to_numpy()
    comparison = compare.compare_baselines(old, old._replace(runs=runs), 0.05)
    assert comparison.verdict == "regression"
    parts = ("LR sensitivity", "its instability part", "growth of the attention logits")
    assert {f"{ARM}: {part}" for part in parts} <= regressions(comparison)
    assert not any(name.startswith(f"{PLAIN}: ") for name in regressions(comparison))
    assert comparison.remarks == []  # nothing in the config tells


def regressions(comparison: Comparison) -> set[str]:
    return {f"{change.arm}: {change.quantity}" for change in comparison.changes if change.verdict == "regression"}


def test_the_example_of_the_page_is_the_recipe_in_which_faults_are_planted() -> None:
    smoke = yaml.safe_load((SMOKE.parents[2] / "sweeps" / "smoke.yaml").read_text())
    page = (SMOKE.parents[2] / "docs" / "guard_your_recipe.md").read_text()
    example = yaml.safe_load(page.split("`sweeps/guard.yaml`:\n\n```yaml\n")[1].split("```")[0])
    del smoke["hydra"]["sweeper"]["params"]["intervention"]  # of which the other is the default
    assert example == smoke


@pytest.mark.slow
def test_three_seeds_are_enough_to_find_a_norm_that_is_silently_off(tmp_path: Path) -> None:
    name = "qk-layernorm silently off (code)"
    comparison = planted_faults.check(name, tmp_path, "seed=0,1,2", "probes=none")
    assert comparison.verdict == "regression", answer_of(comparison).text()


@pytest.mark.slow
def test_a_drift_is_told_from_a_regression(tmp_path: Path) -> None:
    comparison = planted_faults.check("warm-up dropped (config)", tmp_path)
    assert comparison.verdict == "drift", answer_of(comparison).text()


def test_every_fault_is_found_by_the_guard_or_by_a_sweep_that_is_named() -> None:
    assert len(FAULTS) >= 12
    assert all((fault.verdict_of_finder or fault.verdict) != "ok" for fault in FAULTS.values())
