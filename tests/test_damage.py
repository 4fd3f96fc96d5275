"""Files that a disk cut short or turned a bit of are found, said, and never taken for a result."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lab import Fleet
from lab.core import files
from lab.core.errors import RequestError
from lab.records import plans, store
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from lab.training.shards import ShardedReader, write_shards
from small import configs
from sweeping import assert_same
from test_checkpoint import IDS, WANTED, go_on
from test_checkpoint import left as checkpoints
from test_store import leave

KEEP = CheckpointConfig(steps=4, minutes=0, keep=2)


def damages(path: Path, count: int) -> Iterator[None]:
    """The file with one bit turned, each time another one drawn at random, then cut off; whole again in the end."""
    whole, chance = path.read_bytes(), random.Random(path.name)
    for _ in range(count):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        yield
    for _ in range(count // 5):
        path.write_bytes(whole[: chance.randrange(len(whole))])
        yield
    path.write_bytes(whole)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs left behind and gathered."""
    out = tmp_path / "out"
    store.open_folder(out, "eager")
    leave(out, "a", reason="none", **{"optimizer.lr": 3e-4})
    leave(out, "b", versions="of everything", **{"optimizer.lr": 1e-3})
    store.gather(out)
    return out


def test_a_run_that_was_damaged_is_missing(folder: Path) -> None:
    for table in ("runs.parquet", "metrics.parquet"):
        (folder / table).unlink()
    whole, missing = store.read(folder), 0
    for _ in damages(folder / "runs/a/metrics.parquet", 15):
        found = store.read(folder)
        if list(found.runs["id"]) == ["b"]:
            missing += 1
        else:  # 1e-3 may be written 1E-3
            assert_same(found, whole)
    assert missing > 15
    leave(folder, "a")
    assert store.statuses(folder) == {"a": "finished", "b": "finished"}


def test_a_table_that_was_damaged_is_made_again_or_refused(folder: Path) -> None:
    whole, refused, messages = store.read(folder), 0, set[str]()
    runs = folder / "runs"
    for _ in damages(folder / "runs.parquet", 15):
        assert_same(store.read(folder), whole)
        runs.rename(folder / "elsewhere")
        try:  # some bits of a footer mean nothing to its reader
            assert_same(store.read(folder), whole)
        except RequestError as refusal:
            refused += 1
            messages.add(str(refusal).split(":")[0])
        (folder / "elsewhere").rename(runs)
    assert refused > 12
    assert messages == {f"the tables in {folder} are damaged"}
    (folder / "runs.parquet").unlink()
    assert_same(store.read(folder), whole)
    shutil.rmtree(runs / "b")
    with pytest.raises(RequestError, match="their runs are missing"):  # of b, which stands in the other table alone
        store.read(folder)


def test_a_bit_that_changes_a_number_and_nothing_else_is_found(tmp_path: Path) -> None:
    table = pd.DataFrame({"value": np.random.default_rng(0).random(1000)})  # of which nothing can be packed
    files.write_table(tmp_path / "a.parquet", table)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(OSError, match="checksum"):
        files.read_table(tmp_path / "a.parquet")


def test_events_that_are_lost_from_a_folder_are_missed(tmp_path: Path) -> None:
    store.open_folder(tmp_path, "eager")
    happened = [(1, 1, "spike", 9.0, ""), (2, 2, "end", 1.0, "")]
    for name in "ab":
        store.write_run(tmp_path, {"id": name, "status": "finished"}, [(1, "train_loss", "", 9.0)], happened)
    whole = store.gather(tmp_path)
    (tmp_path / "events.parquet").unlink()
    assert_same(store.read(tmp_path), whole)  # from the files of the runs
    assert_same(store.gather(tmp_path), whole)  # a sweep gathers again
    (tmp_path / "events.parquet").unlink()
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(RequestError, match="are damaged: 0 of 4 events are there"):
        store.read(tmp_path)


def test_a_plan_that_was_damaged_is_refused(folder: Path) -> None:
    name = plans.freeze(folder, [[{"id": "a", "tree": {"lr": 1e-3}}]])
    plan, refused = plans.thaw(folder, name, 0), 0
    for _ in damages(folder / "plans" / f"{name}.jsonl", 20):
        try:
            assert plans.thaw(folder, name, 0) == plan
        except RequestError:
            refused += 1
    assert refused > 20


@pytest.mark.slow
@pytest.mark.xdist_group("checkpoint")
def test_a_checkpoint_that_was_damaged_is_not_gone_on_from(tmp_path: Path) -> None:
    wanted = configs(*WANTED[:2])
    go_on(tmp_path, wanted, cut_after=10, ids=IDS[:2])
    older, newest = checkpoints(tmp_path)
    keeper, notes, tensors = Checkpointer(tmp_path, IDS[:2], KEEP), list[str](), Fleet(wanted).tensors()

    def restored() -> tuple[list[Tensor], list[Any]]:
        leaves = tree_leaves((keeper.restore(tensors, notes.append), tensors))
        held = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]
        return held, [leaf for leaf in leaves if not isinstance(leaf, Tensor)]

    def same(one: Any, other: Any) -> bool:
        return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))

    whole = restored()
    newest.rename(tmp_path / "aside")
    before = restored()
    (tmp_path / "aside").rename(newest)
    assert not same(whole, before)
    assert not notes
    fell_back = 0
    for _ in damages(newest, 20):
        notes.clear()
        assert same(restored(), before if notes else whole)
        fell_back += bool(notes)
    assert fell_back > 18
    assert older.exists()


def test_a_part_of_a_checkpoint_that_was_damaged_is_found(tmp_path: Path) -> None:
    tensors = {name: torch.randn(64, 64) for name in ("one", "two")}
    with warnings.catch_warnings(action="ignore"):  # of being one process
        write_shards(tmp_path / "8", tensors)
    (part,) = (tmp_path / "8").glob("*.distcp")
    found = 0
    for _ in damages(part, 20):
        try:
            ShardedReader(tmp_path / "8").shapes()
            filled = {name: torch.zeros(64, 64) for name in tensors}
            ShardedReader(tmp_path / "8").fill(filled)
            assert all(torch.equal(filled[name], tensor) for name, tensor in tensors.items())
        except (ValueError, RuntimeError):
            found += 1
    assert found > 18
