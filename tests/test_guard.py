"""The lab guards itself: the smoke sweep is what it was, and a recipe that is broken on purpose is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import planted_faults
import pytest
import yaml
from planted_faults import FAULTS, SMOKE

from lab.analysis import load
from lab.analysis.curves import points
from lab.analysis.guard import baseline, compare, render
from lab.analysis.guard import check as gate
from lab.analysis.guard.compare import Comparison
from lab.analysis.guard.quantities import QUANTITIES
from lab.analysis.sensitivity import paired, study

PLAIN, ARM = "without qk-layernorm", "with qk-layernorm"
pytestmark = pytest.mark.xdist_group("smoke")  # trained once for all of these


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke sweep as it stands."""
    folder = tmp_path_factory.mktemp("smoke") / "smoke"
    subprocess.run([sys.executable, "-m", "lab", "sweep", "smoke", f"out={folder}"], check=True, capture_output=True)
    return folder


def test_qk_layernorm_lowers_sensitivity_beyond_the_spread_of_seeds(smoke: Path) -> None:
    runs = load(smoke).runs
    assert len(runs) == 50
    gain = paired(points(runs), PLAIN, ARM).iloc[0]
    assert gain["total"].n == 5
    assert gain["total"].low > 0
    assert gain["above"].low > 0  # and it is instability that qk-layernorm takes away


def test_an_effect_can_be_seen_in_it(smoke: Path) -> None:
    """The best learning rate of every seed lies inside the grid, and beats the bigram model by more than the margin."""
    analysis = study([smoke])
    grid = sorted(set(analysis.points["lr"]))
    assert set(analysis.seeds["best_lr"]) <= set(grid[1:-1])
    best = analysis.points.groupby(["arm", "seed"])["capped"].min()
    assert (best < 0.95 * analysis.points["loss_bigram"].iloc[0]).all()
    totals = {arm: curve["total"] for arm, curve in analysis.curves.set_index("arm").iterrows()}
    margin = 0.05 * best[ARM].mean()
    assert totals[PLAIN].low - totals[ARM].high > margin
    assert totals[ARM].low > 2 * margin


def test_the_smoke_sweep_is_what_it_was(smoke: Path) -> None:
    comparison = gate.check_folder(smoke, SMOKE).comparison
    assert comparison.verdict in ("ok", "drift"), "\n".join(render.text(comparison))
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


def test_three_seeds_are_enough_to_find_a_norm_that_is_silently_off(tmp_path: Path) -> None:
    name = "qk-layernorm silently off (code)"
    comparison = planted_faults.check(name, tmp_path, "seed=0,1,2", "probes=none")
    assert comparison.verdict == "regression", "\n".join(render.text(comparison))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    fault, comparison = FAULTS[name], planted_faults.check(name, tmp_path)
    assert comparison.verdict == fault.verdict, "\n".join(render.text(comparison))
    if fault.finder:
        comparison = planted_faults.check_finder(name, tmp_path)
        assert comparison.verdict == fault.verdict_of_finder, "\n".join(render.text(comparison))


def test_every_fault_is_found_by_the_guard_or_by_a_sweep_that_is_named() -> None:
    assert len(FAULTS) >= 12
    assert all((fault.verdict_of_finder or fault.verdict) != "ok" for fault in FAULTS.values())
