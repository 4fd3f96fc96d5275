"""What is kept of earlier seeds is judged as their records would be, and only beside runs trained alike."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import planted
from committed import RESULTS
from lab.__main__ import main
from lab.analysis.judging import earlier_seeds
from lab.analysis.judging.earlier_seeds import INSTABILITY_PART
from lab.analysis.judging.evidence import Evidence
from lab.analysis.judging.verdicts import effects_of, instability_effects, judge_claim
from lab.core.errors import RequestError
from lab.report import scoreboard
from lab.studies.claims import CLAIMS
from test_results import git

SCRIPT = runpy.run_path(str(RESULTS / "earlier_seeds.py"))
COMMITS, effects_at = SCRIPT["COMMITS"], SCRIPT["effects_at"]
# Of sensitivity, with a control, read off the grid.
NAMES = ("qk_layernorm_lowers_sensitivity", "qk_layernorm_curves_coincide", "eta_div_falls_with_size")


def cards(seeds: range, **changes: Any) -> list[dict[str, Any]]:
    """Planted runs whose losses differ from seed to seed."""
    made = [one | changes for one in planted.cards(widths=(32, 64, 128), seeds=tuple(seeds))]
    for one in made:
        one["final_val_loss"] += 0.01 * ((7 * one["seed"]) % 5) * (one["optimizer.lr"] / 0.3)
    return made


def keep(folder: Path, runs: list[dict[str, Any]], commit: str = "abc1234") -> None:
    """Write of runs only the effects, into a folder."""
    evidence = Evidence("earlier", planted.records(runs), ["lab sweep qk_layernorm"])
    tables = []
    for claim in map(CLAIMS.__getitem__, NAMES):
        arms, effects = effects_of(claim, [evidence])
        config = earlier_seeds.config_of(arms)
        tables.append(earlier_seeds.rows(claim.name, config, effects))
        if any(arm.reads_sensitivity for arm in arms):
            tables.append(earlier_seeds.rows(claim.name, config, instability_effects(claim, arms), INSTABILITY_PART))
    folder.mkdir(exist_ok=True)
    pd.concat(tables).to_csv(folder / earlier_seeds.PATTERN.replace("*", commit))


@pytest.mark.parametrize("name", NAMES)
def test_effects_that_were_kept_are_judged_as_their_records_would_be(name: str, tmp_path: Path) -> None:
    keep(tmp_path, cards(range(3)))
    records = planted.records(cards(range(3, 6)))
    pooled = Evidence("made", records, ["lab sweep qk_layernorm"], earlier_seeds.read(tmp_path))
    whole = Evidence("made", planted.records(cards(range(6))), ["lab sweep qk_layernorm"])
    alone = Evidence("made", records, ["lab sweep qk_layernorm"])
    one, other, without = (judge_claim(CLAIMS[name], [each]) for each in (pooled, whole, alone))
    assert (one.verdict, one.seeds, one.reason) == (other.verdict, 6, other.reason)
    assert one[1:4] == pytest.approx(other[1:4])
    assert one.p == pytest.approx(other.p)
    assert (without.seeds, without.low) != (one.seeds, pytest.approx(one.low))


@pytest.mark.parametrize(
    "change", [{"precision": "bf16"}, {"engine": "compiled"}, {"steps": 800}, {"optimizer.beta2": 0.98}]
)
def test_seeds_that_were_trained_otherwise_are_not_pooled(change: dict[str, Any], tmp_path: Path) -> None:
    keep(tmp_path, cards(range(3), **change))
    records = planted.records(cards(range(3, 6)))
    judged = judge_claim(CLAIMS[NAMES[0]], [Evidence("made", records, earlier_seeds=earlier_seeds.read(tmp_path))])
    assert judged.seeds == 3


def test_a_seed_counts_once_and_as_it_is_now(tmp_path: Path) -> None:
    keep(tmp_path, cards(range(4)))
    records = planted.records(cards(range(3, 6)))
    judged = judge_claim(CLAIMS[NAMES[0]], [Evidence("made", records, earlier_seeds=earlier_seeds.read(tmp_path))])
    assert judged.seeds == 6
    keep(tmp_path, cards(range(3, 5)), "def5678")
    with pytest.raises(RequestError, match="seed 3 is in two tables of earlier seeds"):
        earlier_seeds.read(tmp_path)


def test_the_board_pools_the_seeds_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planted.write(tmp_path / "qk_layernorm", cards(range(3, 6)))
    keep(tmp_path / "qk_layernorm", cards(range(3)))
    rows = {row.claim.name: row.verdict.seeds for row in scoreboard.judge_all(scoreboard.read([tmp_path]))}
    assert {rows[name] for name in NAMES} == {6}
    assert rows["sensitivity_rises_without"] == 3
    path = tmp_path / "qk_layernorm" / earlier_seeds.PATTERN.replace("*", "abc1234")
    table = pd.read_csv(path, dtype=str)
    table[table["part"] != "24736"].to_csv(path, index=False)
    assert main(["claims", str(tmp_path)]) == 2
    assert "have other parts; results/earlier_seeds.py writes them anew" in capsys.readouterr().err
    path.write_text("claim,seeds\na,3-5\n")
    assert main(["claims", str(tmp_path)]) == 2
    assert "cannot be read as a table with columns claim,config,table,part and seeds" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("sweep", "commit"), [(sweep, each) for sweep, commits in COMMITS.items() for each in commits])
def test_the_committed_effects_are_those_of_the_records_in_the_history(sweep: str, commit: str, tmp_path: Path) -> None:
    git("cat-file", "-e", f"{commit}:results/{sweep}/runs.parquet")
    made, otherwise = effects_at(commit, sweep)
    path = RESULTS / sweep / earlier_seeds.PATTERN.replace("*", commit)
    assert path.exists() == (len(made) > 0)
    assert bool(otherwise) == (sweep in ("decay_and_epsilon", "optimizer_arms"))
    if len(made):
        made.to_csv(tmp_path / path.name)
        committed = earlier_seeds.read(path.parent)[list(made)].dropna(how="all")
        pd.testing.assert_frame_equal(earlier_seeds.read(tmp_path), committed)
