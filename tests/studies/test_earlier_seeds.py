"""What is kept of earlier seeds is judged as their records would be, and only beside runs trained alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import planted
from lab.records import store
from studies.claims import scoreboard
from studies.claims.effects import Qualified
from studies.claims.evidence import EARLIER_KEY, Evidence, config_digest, read_evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import Verdict, effects_of, instability_effects, judge_claim

# Of sensitivity, with a control, read off the grid.
NAMES = ("qk_layernorm_lowers_sensitivity", "qk_layernorm_curves_coincide", "eta_div_falls_with_size")


def cards(seeds: range, **changes: Any) -> list[dict[str, Any]]:
    """Planted runs whose losses differ from seed to seed."""
    runs = [run | changes for run in planted.cards(widths=(32, 64, 128), seeds=tuple(seeds))]
    for run in runs:
        run["final_val_loss"] += 0.01 * ((7 * run["seed"]) % 5) * (run["optimizer.lr"] / 0.3)
    return runs


def tables_of(effects: Qualified, name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The tables of effects by the name that each has in a file, with a row for each part."""
    for table, values in ((name, effects.table), (f"{name} resolution", effects.resolution)):
        if isinstance(values, pd.Series):
            yield table, values.to_frame("").T
        elif isinstance(values, pd.DataFrame):
            yield table, values.T.set_axis(list(map(str, values)), axis=0)
    if effects.control is not None:
        yield from tables_of(effects.control, f"{name} control")


def keep(folder: Path, runs: list[dict[str, Any]], commit: str = "abc1234") -> None:
    """Write only the effects of runs into a folder."""
    evidence, tables = Evidence("earlier", planted.records(runs), ["lab sweep qk_layernorm"]), {}
    for claim in map(CLAIMS.__getitem__, NAMES):
        arms, effects = effects_of(claim, [evidence])
        key = (claim.name, config_digest(arms))
        tables |= {(*key, name): table for name, table in tables_of(effects, "effect")}
        if any(arm.reads_sensitivity for arm in arms):
            part = instability_effects(claim, arms)
            tables |= {(*key, name): table for name, table in tables_of(part, "instability part")}
    pd.concat(tables, names=EARLIER_KEY).to_csv(folder / f"earlier_seeds.{commit}.csv")


def judged(name: str, folder: Path) -> Verdict:
    return judge_claim(CLAIMS[name], [read_evidence(folder, store.read(folder))])


@pytest.mark.slow
def test_effects_that_were_kept_are_judged_as_their_records_would_be(tmp_path: Path) -> None:
    alone = planted.write(tmp_path / "alone" / "qk_layernorm", cards(range(3, 6)))
    pooled = planted.write(tmp_path / "pooled" / "qk_layernorm", cards(range(3, 6)))
    whole = planted.write(tmp_path / "whole" / "qk_layernorm", cards(range(6)))
    keep(pooled, cards(range(3)))
    one, other, without = (judged(NAMES[0], folder) for folder in (pooled, whole, alone))
    assert (one.verdict, one.seeds, one.reason) == (other.verdict, 6, other.reason)
    assert one[1:4] == pytest.approx(other[1:4])
    assert one.p == pytest.approx(other.p)
    assert (without.seeds, without.low) != (one.seeds, pytest.approx(one.low))


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"optimizer.beta2": 0.98}])
def test_seeds_that_were_trained_otherwise_are_not_pooled(change: dict[str, Any], tmp_path: Path) -> None:
    folder = planted.write(tmp_path / "qk_layernorm", cards(range(3, 6)))
    keep(folder, cards(range(3), **change))
    assert judged(NAMES[0], folder).seeds == 3


@pytest.mark.slow
def test_a_seed_counts_once_and_as_it_is_now(tmp_path: Path) -> None:
    folder = planted.write(tmp_path / "qk_layernorm", cards(range(3, 6)))
    keep(folder, cards(range(4)))
    assert judged(NAMES[0], folder).seeds == 6
    keep(folder, cards(range(3, 5)), "def5678")
    with pytest.raises(ValueError, match="overlapping"):
        judged(NAMES[0], folder)


@pytest.mark.slow
def test_the_board_pools_the_seeds_of_a_folder(tmp_path: Path) -> None:
    folder = planted.write(tmp_path / "qk_layernorm", cards(range(3, 6)))
    keep(folder, cards(range(3)))
    rows = {row.claim.name: row.verdict.seeds for row in scoreboard.judge_all(scoreboard.read([tmp_path]))}
    assert {rows[name] for name in NAMES} == {6}
    assert rows["sensitivity_rises_without"] == 3
