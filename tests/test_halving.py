"""Memory that gives out halves a fleet, and the records do not tell, but for a note."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from lab import Fleet
from lab.core.machine import is_out_of_memory, release_memory
from lab.records import plans, store
from lab.sweeping import job
from lab.sweeping.planner import points
from lab.training.engine import ProbeValues
from small import tree

TOLD_OTHERWISE = ["wall_seconds", "model_steps_per_second", "notes"]
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."


def full() -> Exception:
    """Made anew each time, since a fault keeps the frames it went through."""
    return RuntimeError(CPU)


def leave(folder: Path, seeds: int) -> store.Records:
    """Train so many seeds as one fleet of a plan; what is left of it, by seed."""
    text = folder.parent / "text.txt"  # little of it held out
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    fleet = points([tree("steps=4", "data=text", f"data.path={text}", f"seed={seed}") for seed in range(seeds)])
    plan = plans.freeze(folder, [[{"id": point.id, "tree": point.tree} for point in fleet]])
    job.train_fleet(folder, plan, 0)
    runs, metrics, _ = store.read(folder)
    order = ["id", "step", "probe", "where"]
    return store.Records(runs.sort_values("seed", ignore_index=True), metrics.sort_values(order, ignore_index=True))


def plant(monkeypatch: pytest.MonkeyPatch, too_much: Callable[[Fleet], bool]) -> list[int]:
    """Memory gives out in the third step where it is ``too_much``; returns the sizes of the fleets tried."""
    monkeypatch.setattr("lab.core.machine.release_memory", release_memory)  # which other tests do without
    sizes: list[int] = []
    alive = weakref.WeakSet[Fleet]()
    begin, step = Fleet.__init__, Fleet.step

    def beginning(fleet: Fleet, *args: Any) -> None:
        assert not alive, "the fleet before still holds its memory"
        alive.add(fleet)
        begin(fleet, *args)
        sizes.append(fleet.runs)

    def stepping(fleet: Fleet, at: int) -> ProbeValues:
        if at == 2 and too_much(fleet):
            raise full()
        return step(fleet, at)

    monkeypatch.setattr(Fleet, "__init__", beginning)
    monkeypatch.setattr(Fleet, "step", stepping)
    return sizes


@pytest.mark.slow
def test_a_fleet_too_large_for_memory_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leave(tmp_path / "whole", 5)
    with monkeypatch.context() as short:
        sizes = plant(short, lambda fleet: fleet.runs > 2)
        halved = leave(tmp_path / "halved", 5)
    assert sizes == [5, 2, 3, 1, 2]
    runs = [records.runs.drop(columns=TOLD_OTHERWISE) for records in (whole, halved)]
    pd.testing.assert_frame_equal(*runs, check_exact=True)
    pd.testing.assert_frame_equal(whole.metrics, halved.metrics, check_exact=True)
    assert whole.runs["notes"].isna().all()
    notes = ["out of memory in fleets of 5"] * 2 + ["out of memory in fleets of 5, 3"] * 3
    assert halved.runs["notes"].tolist() == notes
    [plan] = (tmp_path / "halved" / "plans").glob("*.jsonl")
    told = plans.read_progress(tmp_path / "halved", plan.stem)[0].notes
    assert [line.split(";")[0] for line in told] == [f"out of memory with {size} runs in a fleet" for size in (5, 3)]


def test_a_run_that_does_not_fit_alone_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda fleet: 1 in fleet.config.seed)
    runs = leave(tmp_path, 3).runs
    assert runs["status"].tolist() == ["finished", "failed", "finished"]
    assert runs["reason"].tolist()[1].startswith("out of memory: ")


def test_the_first_half_is_left_behind_before_the_second_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def look(fleet: Fleet) -> bool:
        left.append(len(list(tmp_path.glob("runs/*/run.json"))))
        return fleet.runs > 2

    plant(monkeypatch, look)
    leave(tmp_path, 4)
    assert left == [0, 0, 2]


def test_what_the_allocators_say_is_understood() -> None:
    for take in (torch.empty, np.empty):
        with pytest.raises((RuntimeError, MemoryError)) as refused:
            take(2**58, dtype=(torch if take is torch.empty else np).uint8)
        assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
