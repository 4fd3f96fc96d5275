"""Files that a disk cut short or turned a bit of are found, said, and never taken for a result."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
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
from sampling import few
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


@pytest.mark.parametrize("name", ["run.json", "metrics.parquet"])
def test_a_run_that_was_damaged_is_missing(name: str, folder: Path) -> None:
    for table in ("runs.parquet", "metrics.parquet"):
        (folder / table).unlink()
    whole, missing = store.read(folder), 0
    for _ in damages(folder / "runs/a" / name, 30):
        found = store.read(folder)
        if list(found.runs["id"]) == ["b"]:
            missing += 1
        else:  # 1e-3 may be written 1E-3
            assert_same(found, whole)
    assert missing > 30
    leave(folder, "a")
    assert store.statuses(folder) == {"a": "finished", "b": "finished"}


@pytest.mark.parametrize("name", few(["runs.parquet", "metrics.parquet"], 1))
def test_a_table_that_was_damaged_is_made_again_or_refused(name: str, folder: Path) -> None:
    whole, refused, messages = store.read(folder), 0, set[str]()
    runs = folder / "runs"
    for _ in damages(folder / name, 30):
        assert_same(store.read(folder), whole)
        runs.rename(folder / "elsewhere")
        try:  # some bits of a footer mean nothing to its reader
            assert_same(store.read(folder), whole)
        except RequestError as refusal:
            refused += 1
            messages.add(str(refusal).split(":")[0])
        (folder / "elsewhere").rename(runs)
    assert refused > 24
    assert messages == {f"the tables in {folder} are damaged"}
    (folder / name).unlink()
    assert_same(store.read(folder), whole)
    shutil.rmtree(runs / "b")
    with pytest.raises(RequestError, match="their runs are missing"):  # of b, which stands in the other table alone
        store.read(folder)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: files.write_table(path, files.read_table(path)[:1])])
def test_events_that_are_lost_from_a_folder_are_missed(damage: Callable[[Path], object], tmp_path: Path) -> None:
    store.open_folder(tmp_path, "eager")
    happened = [(1, 1, "spike", 9.0, ""), (2, 2, "end", 1.0, "")]
    for name in "ab":
        store.write_run(tmp_path, {"id": name, "status": "finished"}, [(1, "train_loss", "", 9.0)], happened)
    whole = store.gather(tmp_path)
    damage(tmp_path / "events.parquet")
    assert_same(store.read(tmp_path), whole)  # from the files of the runs
    assert store.digest_of_tables(tmp_path) is None  # a sweep gathers again, and draws
    assert_same(store.gather(tmp_path), whole)
    assert store.digest_of_tables(tmp_path) is not None
    damage(tmp_path / "events.parquet")
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(RequestError, match=r"are damaged: [01] of 4 events are there"):
        store.read(tmp_path)


def test_a_table_of_an_earlier_version_is_read(folder: Path) -> None:
    """Those had a digest in place of checksums, and the runs did not count the rows of the other tables."""
    expected = store.read(folder)
    shutil.rmtree(folder / "runs")
    table = pyarrow.Table.from_pandas(pd.read_parquet(folder / "runs.parquet"), preserve_index=False)
    seal = {b"seal": b"sealed by sha256:" + b"0" * 64}
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **seal})
    pyarrow.parquet.write_table(table, folder / "runs.parquet")
    assert_same(store.read(folder), expected)


def test_tables_of_two_that_gather_at_once_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process leaves one more run and gathers, just after this one has written its metrics."""
    write = files.write_table
    others: list[Callable[[], object]] = [
        lambda: store.gather(folder),
        lambda: leave(folder, "c", **{"optimizer.lr": 1e-3}),
    ]

    def interrupted(path: Path, table: pd.DataFrame, **how: Any) -> str:
        if path == folder / "runs.parquet":
            while others:
                others.pop()()
        return write(path, table, **how)

    monkeypatch.setattr(files, "write_table", interrupted)
    assert list(store.gather(folder).runs["id"]) == ["a", "b", "c"]
    shutil.rmtree(folder / "runs")
    assert list(store.read(folder).runs["id"]) == ["a", "b", "c"]
    assert set(store.read(folder).metrics["id"]) == {"a", "b", "c"}


def test_a_plan_or_a_version_that_was_damaged_is_refused(folder: Path) -> None:
    name = plans.freeze(folder, [[{"id": "a", "tree": {"lr": 1e-3}}]])
    plan, refused = plans.thaw(folder, name, 0), 0
    for _ in damages(folder / "plans" / f"{name}.jsonl", 40):
        try:
            assert plans.thaw(folder, name, 0) == plan
        except RequestError:
            refused += 1
    assert refused > 40
    for _ in damages(folder / "store.json", 40):
        try:
            assert store.check_version(folder) in ("eager", None)
        except RequestError:
            refused += 1
    assert refused > 65


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
    for _ in damages(newest, 50):
        notes.clear()
        assert same(restored(), before if notes else whole)
        fell_back += bool(notes)
    assert fell_back > 45
    assert older.exists()


def test_a_part_of_a_checkpoint_that_was_damaged_is_found(tmp_path: Path) -> None:
    tensors = {name: torch.randn(64, 64) for name in ("one", "two")}
    with warnings.catch_warnings(action="ignore"):  # of being one process
        write_shards(tmp_path / "8", tensors)
    (part,) = (tmp_path / "8").glob("*.distcp")
    found = 0
    for _ in damages(part, 50):
        try:
            ShardedReader(tmp_path / "8").shapes()
            filled = {name: torch.zeros(64, 64) for name in tensors}
            ShardedReader(tmp_path / "8").fill(filled)
            assert all(torch.equal(filled[name], tensor) for name, tensor in tensors.items())
        except (ValueError, RuntimeError):
            found += 1
    assert found > 45
