"""Trackers and exports receive what the store holds, and a fault of theirs stays theirs."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest

import planted
from lab.core.registry import TRACKERS
from lab.records import plans, store
from lab.records.trackers import Value, readable_name, tag
from lab.sweeping import job
from lab.sweeping.planner import points
from lab.training.config import run_config
from lab.training.fleet import Fleet
from lab.training.identity import columns, run_id, static_key
from small import tree
from sweeping import lab

# One of the two runs diverges at once, so that NaN is among the values.
SHARED = ["steps=6", "model.width=16", "data=synthetic", "probes.every=2"]
TWO = ["-m", *SHARED, "optimizer.lr=1e-3,1e30"]
pytestmark = pytest.mark.usefixtures("briefly")


class Heard:
    """A run in a planted tracker that remembers, or breaks where it is told to."""

    breaks_at = ""
    all: ClassVar[dict[str, Heard]] = {}

    def __init__(self, name: str, group: str, config: Mapping[str, Value]) -> None:
        self.group, self.config, self.finished = group, config, 0
        self.logged: list[tuple[int, str, Value]] = []
        self.all[name] = self
        self.may_break("begin")

    def may_break(self, place: str) -> None:
        if self.breaks_at == place:
            raise OSError(f"no network in {place}\nand more")

    def log(self, values: Mapping[str, Value], step: int) -> None:
        self.may_break("log" if "status" not in values else "end")
        self.logged += [(step, name, value) for name, value in values.items()]

    def finish(self) -> None:
        self.finished += 1
        self.may_break("finish")


@dataclass(frozen=True)
class Planted:
    """Remembers what it was told."""

    package: ClassVar[str] = ""

    def begin(self, name: str, group: str, config: Mapping[str, Value], folder: Path) -> Heard:
        assert folder.is_dir()
        return Heard(name, group, config)


@pytest.fixture(autouse=True)
def _planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TRACKERS._entries, "planted", Planted)
    monkeypatch.setattr(Heard, "all", {})


def trained(folder: str, tracker: str = "none", *more: str) -> store.Records:
    """The records of the two runs, trained as one fleet."""
    trees = [tree(*SHARED, *more, f"tracker.name={tracker}", f"optimizer.lr={lr}") for lr in (1e-3, 1e30)]
    fleet = [{"id": point.id, "tree": point.tree} for point in points(trees)]
    job.train_fleet(Path(folder), plans.freeze(Path(folder), [fleet]), 0)
    return store.read(Path(folder))


@cache
def untracked() -> store.Records:
    return trained("untracked")


def left_behind(folder: str) -> None:
    """Records of two runs that nobody trained."""
    words = {"probes.names": "train_loss", "optimizer.chain": "adam"}
    planted.write(Path(folder), list(planted.cards(**words))[:2])


def rows(metrics: pd.DataFrame) -> dict[str, set[tuple[int, str, str]]]:
    """What each run left in the store, as (step, tag, value); as text, since NaN is not NaN."""
    found: dict[str, set[tuple[int, str, str]]] = {}
    for row in metrics.itertuples():
        found.setdefault(str(row.id), set()).add((int(row.step), tag(row.probe, row.where), repr(float(row.value))))
    return found


def test_a_tracker_hears_what_the_store_holds() -> None:
    runs, metrics, _ = trained("runs/two", "planted")
    assert set(Heard.all) == set(runs["id"])
    assert "nan" in {value for found in rows(metrics).values() for *_, value in found}
    for row in runs.to_dict("records"):
        heard = Heard.all[row["id"]]
        outcome = {name: value for step, name, value in heard.logged if name in store.RUN_COLUMNS}
        values = {(step, name, repr(value)) for step, name, value in heard.logged if name not in outcome}
        assert values == rows(metrics)[row["id"]]
        assert outcome["status"] == row["status"]
        assert repr(outcome["final_val_loss"]) == repr(row["final_val_loss"])
        assert heard.logged[-1][0] == 5
        assert (heard.group, heard.finished) == ("two", 1)
        assert heard.config["optimizer.lr"] == row["optimizer.lr"]
        assert "status" not in heard.config
    assert sorted(runs["status"]) == ["diverged", "finished"]


def test_a_folder_of_tensorboard_ends_in_the_id_of_its_run(tmp_path: Path) -> None:
    config = columns(run_config(tree("optimizer.lr=3e-3", "seed=7", "intervention=[z_loss,qk_layernorm]")))
    words = "qk_layernorm+z_loss,standard,adamw,cosine,width=16,depth=2,lr=0.003,seed=7"
    assert readable_name("0123456789abcdef", config) == f"{words},0123456789abcdef"
    escaping = readable_name("0123456789abcdef", {"intervention": "../x" * 99, "seed": 1})
    assert (tmp_path / escaping).parent == tmp_path
    (tmp_path / escaping).mkdir()
    assert escaping.endswith(",0123456789abcdef")
    assert readable_name("0123456789abcdef", {}).endswith("0123456789abcdef")


@pytest.mark.parametrize("place", ["begin", "log"])
def test_a_tracker_that_fails_costs_one_line(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heard, "breaks_at", place)
    tracked = trained("tracked", "planted")
    (name,) = (word.stem for word in Path("tracked/plans").glob("*.jsonl"))
    told = plans.read_progress(Path("tracked"), name)[0]
    assert told.notes == [f"tracking ends here, training goes on: OSError: no network in {place}"]
    [final] = tracked.runs["final_val_loss"][tracked.runs["status"] == "finished"]
    assert told.verdict == f"val loss {final:.3f}..{final:.3f}, 1 diverged"
    pd.testing.assert_frame_equal(tracked.metrics, untracked().metrics)
    opened = [run for run in Heard.all.values() if place != "begin"]
    assert [run.finished for run in opened] == [1] * len(opened)


def test_a_tracker_hears_all_of_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, keeping = Fleet.step, ("checkpoint.steps=2",)

    def cut(fleet: Fleet, at: int) -> Any:
        if at == 3:
            raise KeyboardInterrupt
        return step(fleet, at)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Fleet, "step", cut)
        trained("runs/two", "planted", *keeping)
    Heard.all = {}
    _, metrics, _ = trained("runs/two", "planted", *keeping)
    for name, run in Heard.all.items():
        assert rows(metrics)[name] <= {(step, tag, repr(value)) for step, tag, value in run.logged}


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ZeroDivisionError])
def test_runs_are_finished_when_training_breaks(fault: type, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Fleet.step

    def breaks(fleet: Fleet, at: int) -> Any:
        if at == 3:
            raise fault
        return step(fleet, at)

    monkeypatch.setattr(Fleet, "step", breaks)
    with suppress(KeyboardInterrupt):
        trained("runs/two", "planted")
    assert [run.finished for run in Heard.all.values()] == [1, 1]
    failed = [value for run in Heard.all.values() for _, name, value in run.logged if name == "status"]
    assert failed == ([] if fault is KeyboardInterrupt else ["failed"] * 2)


def test_a_tracker_is_no_part_of_a_run() -> None:
    plain, tracked = (run_config(tree(f"tracker={name}")) for name in ("none", "wandb"))
    assert columns(plain) == columns(tracked)
    assert run_id(plain, "text") == run_id(tracked, "text")
    assert static_key(plain) == static_key(tracked)
    assert tracked.tracker.entry.project == "instability-lab"


def test_what_is_not_installed_is_said_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Planted, "package", "no-such-package")
    refusal = "lab: no-such-package is not installed: pip install 'instability-lab[no-such-package]'\n"
    assert lab("train", *TWO, "hydra/launcher=basic", "tracker.name=planted") == 2
    assert capsys.readouterr().err == refusal
    assert not list(Path().iterdir())
    left_behind("runs/two")
    assert lab("export", "runs/two", "--to", "planted") == 2
    assert capsys.readouterr().err == refusal


def test_what_is_exported_is_what_was_tracked() -> None:
    trained("runs/two", "planted")
    tracked, Heard.all = dict(Heard.all), {}
    assert lab("export", "runs/two", "--to", "planted", "--out=elsewhere") == 0
    assert set(Heard.all) == set(tracked)
    for name, run in Heard.all.items():
        assert (run.group, run.config, run.finished) == ("two", tracked[name].config, 1)
        seen = {(step, key, repr(value)) for step, key, value in run.logged}
        gone = {(step, key, repr(value)) for step, key, value in tracked[name].logged} - seen
        assert not seen - {(step, key, repr(value)) for step, key, value in tracked[name].logged}
        assert gone <= {(5, "final_val_loss", "nan")}  # a table has no other word for absent
        assert [step for step, *_ in run.logged] == sorted(step for step, *_ in run.logged)


def test_csv_holds_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    records = trained("runs/two")
    assert lab("export", "runs/two", "--to=csv") == 0
    assert capsys.readouterr().out == "exported 2 runs to csv, files in runs/two\n"
    metrics = pd.read_csv("runs/two/metrics.csv", keep_default_na=False, na_values={"value": [""]})
    assert list(metrics.columns) == list(store.METRIC_COLUMNS)
    pd.testing.assert_series_equal(metrics["value"], records.metrics["value"])
    assert (metrics["where"] == records.metrics["where"]).all()
    runs = pd.read_csv("runs/two/runs.csv")
    assert list(runs["id"]) == list(records.runs["id"])
    assert list(runs["optimizer.lr"]) == list(records.runs["optimizer.lr"])


# The trackers themselves: what a run leaves in their files, trained with one process a fleet, and exported.


def spoken(*words: str, **environment: str) -> str:
    """What a command line says, in a process of its own."""
    told = subprocess.run(
        [sys.executable, "-m", "lab", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout + told.stderr


Logged = Iterator[tuple[str, int, str, Any]]  # run, step, tag, value


def in_tensorboard(place: Path) -> Logged:
    """Every value in the event files of a folder; there is one file a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run in (place / "tensorboard").iterdir():
        (file,), name = run.iterdir(), run.name.rpartition(",")[2]
        seen = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        assert "_hparams_/session_start_info" in seen.summary_metadata
        for tagged in seen.Tags()["scalars"]:
            yield from ((name, event.step, tagged, event.value) for event in seen.Scalars(tagged))
        (status,) = seen.Tensors("status")
        yield name, status.step, "status", status.tensor_proto.string_val[0].decode()


def in_wandb(place: Path) -> Logged:
    """Every value in the offline runs of a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in (place / "wandb").glob("offline-run-*/*.wandb"):
        name = ""
        for record in map(Record.FromString, leveldb_records(file.read_bytes())):
            if record.HasField("run"):
                name = record.run.display_name
                assert record.run.run_group == "two"
            items = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            step = int(items.pop("_step", 0))
            yield from ((name, step, key, json.loads(value)) for key, value in items.items() if key[0] != "_")


def leveldb_records(text: bytes) -> Iterator[bytes]:
    """LevelDB's log format, in blocks of 32 KiB, after seven bytes that wandb puts in front."""
    at, record = 7, b""
    while at + 7 <= len(text):
        if 32768 - at % 32768 < 7:  # no room for a header: padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", text[at : at + 7])
        record += text[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def in_trackio(place: Path) -> Logged:
    """Every value in a database."""
    with closing(sqlite3.connect(place / "trackio" / "instability-lab.db")) as database:
        for name, step, values in database.execute("select run_name, step, metrics from metrics"):
            yield from ((name, step, key, value) for key, value in json.loads(values).items())
        groups = {json.loads(config)["_Group"] for (config,) in database.execute("select config from configs")}
        assert groups == {"two"}


READERS = {"tensorboard": in_tensorboard, "wandb": in_wandb, "trackio": in_trackio}


@pytest.mark.extras
@pytest.mark.parametrize("name", READERS)
def test_a_tracker_holds_what_the_store_holds(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    out = [] if name == "trackio" else ["--out", "exported"]
    said = spoken("train", *TWO, "out=two", f"tracker={name}", WANDB_MODE="offline", TRACKIO_DIR="two/trackio")
    assert len(said.splitlines()) == len(spoken("train", *TWO, "out=plain").splitlines())
    for _ in range(1 if name == "trackio" else 2):  # a second export in place of the first
        shutil.rmtree("exported/wandb", ignore_errors=True)
        spoken("export", "two", "--to", name, *out, WANDB_MODE="offline", TRACKIO_DIR="exported/trackio")
    runs, metrics, _ = store.read(Path("two"))
    for place in ("two", "exported"):
        logged = list(READERS[name](tmp_path / place))
        values: dict[str, set[tuple[int, str, str]]] = {}
        for run, step, key, value in logged:
            if key not in store.RUN_COLUMNS:
                values.setdefault(run, set()).add((step, key, repr(float(value))))
        if name == "tensorboard":  # which keeps single precision
            metrics["value"] = metrics["value"].astype("float32")
        assert values == rows(metrics)
        ends = {run: (step, value) for run, step, key, value in logged if key == "status"}
        assert ends == {row["id"]: (5, row["status"]) for row in runs.to_dict("records")}


@pytest.mark.extras
def test_a_tracker_that_cannot_be_reached_costs_no_run(tmp_path: Path) -> None:
    """Weights & Biases with no key, on a machine where nobody can be asked for one."""
    pytest.importorskip("wandb")
    said = spoken("train", *TWO, "out=two", "tracker=wandb", WANDB_MODE="online", HOME=str(tmp_path), WANDB_API_KEY="")
    assert "lab: tracking ends here, training goes on: UsageError: " in said
    assert sorted(store.read(Path("two")).runs["status"]) == ["diverged", "finished"]
