"""Shards of a sweep: together they are the sweep, and a shared folder ends as one result."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pandas as pd
import pytest

from lab.records import store
from lab.sweeping.planner import Point, pack, points, shard_points
from lab.training.identity import static_key
from small import tree
from sweeping import RUNS, TIMINGS, OutputOf, assert_same, begin

ONE = [
    "steps=3",
    "model.width=16",
    "data=synthetic",
    "validation=short",
    "hydra/launcher=basic",
    "hydra.sweeper.max_runs=1",
]


def grid(widths: tuple[int, ...], seeds: int, rates: int) -> list[Point]:
    values = itertools.product(widths, range(seeds), range(rates))
    return points([tree(f"model.width={width}", f"seed={s}", f"optimizer.lr={10**-rate}") for width, s, rate in values])


@pytest.mark.parametrize(("max_runs", "shards"), [(3, 2), (2, 5), (8, 20)])
def test_shards_are_disjoint_cover_the_sweep_and_are_alike(max_runs: int, shards: int) -> None:
    asked = grid((16, 32), seeds=3, rates=3)
    parts = [shard_points(asked, max_runs, f"{index}/{shards}") for index in range(1, shards + 1)]
    assert sorted(point.id for mine in parts for point in mine) == sorted(point.id for point in asked)
    assert all(mine == [point for point in asked if point in mine] for mine in parts)
    fleets = {frozenset(point.id for point in fleet) for fleet in pack(asked, lambda config: max_runs)}
    for fleet in fleets:  # no fleet is torn apart
        assert sum(bool(fleet & {point.id for point in mine}) for mine in parts) == 1
    for shape in {static_key(point.config) for point in asked}:
        shares = [sum(static_key(point.config) == shape for point in mine) for mine in parts]
        assert max(shares) - min(shares) <= max_runs, "fleets of one shape are dealt out evenly"


def test_one_shard_is_the_sweep() -> None:
    asked = grid((16,), seeds=2, rates=2)
    assert shard_points(asked, 8, "1/1") == asked


@pytest.mark.slow
@pytest.mark.xdist_group("sweeping")
def test_two_shards_at_the_same_time_leave_what_one_sweep_leaves(
    tmp_path: Path, alone: tuple[Path, store.Records]
) -> None:
    shards = [begin(tmp_path / "shared", "local", f"shard={index}/2") for index in (1, 2)]
    assert [shard.wait() for shard in shards] == [0, 0]
    records = store.read(tmp_path / "shared")
    assert_same(store.Records(records.runs.drop(columns=TIMINGS), records.metrics), alone[1])
    assert len(pd.read_parquet(tmp_path / "shared/runs.parquet")) == RUNS
    assert sorted(command.split()[-1] for command in store.commands(tmp_path / "shared")) == ["shard=1/2", "shard=2/2"]
    assert (tmp_path / "shared/report.html").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("unreported", "briefly", "here")
def test_the_last_shard_gathers_and_the_others_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    def last_line(shard: str) -> str:
        words = ["train", "-m", *ONE, "seed=0,1,2,3,4", shard]
        monkeypatch.setattr(sys, "argv", ["lab", *words])
        return output_of(*words).strip().splitlines()[-1]

    counts = "trained, 0 already there, 0 diverged, 0 failed"
    assert last_line("shard=2/3") == f"2 {counts}; 3 points of other shards are still missing in runs/train"
    assert last_line("shard=1/3") == f"2 {counts}; 1 points of other shards are still missing in runs/train"
    assert not Path("runs/train/runs.parquet").exists()
    assert last_line("shard=3/3") == f"1 {counts}; report: runs/train/report.html"
    assert last_line("shard=1/3").startswith("0 trained, 2 already there")
    assert len(pd.read_parquet("runs/train/runs.parquet")) == 5
