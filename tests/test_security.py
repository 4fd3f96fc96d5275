"""Nothing that is read runs, and nobody is called: sweep files, overrides, stored records."""

from __future__ import annotations

import ast
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import planted
from lab.core.errors import RequestError
from lab.records import store
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from lab.training.shards import ShardedReader, write_shards
from sweeping import finished, lab

HOME = Path(__file__).parents[1]
SMALL = ["data=synthetic", "validation=short", "model.width=16", "steps=3", "hydra/launcher=basic"]
TRAP = "{_target_: test_security.spring}"
SPRUNG: list[str] = []


def spring(*_: Any, **__: Any) -> None:
    """What no file and no override may lead to."""
    SPRUNG.append("sprung")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(here: Path) -> None:
    SPRUNG.clear()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line by which a request is refused, nothing being run or written."""
    before = sorted(Path().rglob("*"))
    assert lab(*words) == 2, words
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    assert not SPRUNG
    assert sorted(Path().rglob("*")) == before
    return error


# Each would have Hydra or YAML make an object, import a module or set the environment; with what the refusal names.
FILES = {
    f"hydra: {{callbacks: {{x: {TRAP}}}}}": "hydra.callbacks",
    "hydra: {sweeper: {_target_: test_security.spring}}": "_target_",
    "hydra: {searchpath: [pkg://test_security]}": "hydra.searchpath",
    f"intervention: {{z_loss: {TRAP}}}": "intervention.z_loss._target_",
    "seed: !!python/object/apply:test_security.spring []": "mine.yaml",
}


@pytest.mark.parametrize("content", FILES)
def test_a_sweep_file_makes_no_object(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(content)
    assert FILES[content] in refused(capsys, "sweep", "mine.yaml", *SMALL)


WORDS = [
    "+hydra.callbacks.x._target_=test_security.spring",
    "hydra.searchpath=[pkg://test_security]",
    "+hydra.job.env_set.PYTHONSTARTUP=trap.py",
    f"+optimizer.trap={TRAP}",
    "fleet=../../x/0",
]


def test_an_override_sets_how_jobs_are_run_and_nothing_else_of_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    for word in WORDS:
        refused(capsys, "train", "-m", *SMALL, word)


def test_a_sweep_file_reads_no_file_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model/evil.yaml").write_text(f"# @package _global_\nhydra: {{callbacks: {{x: {TRAP}}}}}\n")
    away = os.path.relpath(Path("model").absolute(), HOME / "conf" / "model")
    entries = f"/model: {away}/evil", f"override /model: {away}/evil", "/model@hydra.x: d32", "override /data: '${a}'"
    for entry in entries:
        Path("mine.yaml").write_text(f"defaults:\n  - {entry}\n")
        assert "by their names" in refused(capsys, "sweep", "mine.yaml", *SMALL)
    assert "by their names" in refused(capsys, "sweep", sweeping({"model": f"{away}/evil"}), *SMALL)


# Logging that is set up so truncates a file, calls a function, or imports a module.
TRUNCATES = (
    "{version: 1, handlers: {x: {class: logging.FileHandler, filename: victim.txt, mode: w}}, root: {handlers: [x]}}"
)
IMPORTS = "{version: 1, handlers: {x: {class: trap.Handler}}, root: {handlers: [x]}}"
# Keys that a file may not sweep: by their names, by their values, by what the parser or the config makes of them.
SWEPT: dict[str, Any] = {
    "+hydra.hydra_logging": TRUNCATES,
    "++hydra.job_logging": IMPORTS,
    "seed\n++hydra.hydra_logging": TRUNCATES,
    "+model@hydra.hydra_logging": "d32",
    "seed": "0, ++hydra.hydra_logging=x",
    "batch_size": "1\n++hydra.hydra_logging=x",
}


@pytest.fixture
def _victims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file, and a module that can be imported: neither is touched."""
    (tmp_path / "victim.txt").write_text("precious")
    (tmp_path / "trap.py").write_text("import logging, test_security\nHandler = logging.NullHandler\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    assert (tmp_path / "victim.txt").read_text() == "precious"
    assert "trap" not in sys.modules


def sweeping(params: dict[str, Any], **content: Any) -> str:
    """A sweep file of these, in the current folder."""
    Path("mine.yaml").write_text(json.dumps({**content, "hydra": {"sweeper": {"params": params}}}))
    return "mine.yaml"


@pytest.mark.usefixtures("_victims")
@pytest.mark.parametrize("key", SWEPT)
def test_a_file_sweeps_keys_of_a_run(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "sweep", sweeping({key: SWEPT[key]}), *SMALL)


@pytest.mark.usefixtures("_victims")
def test_completion_reads_no_sweep_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sweeping({"++hydra.hydra_logging": TRUNCATES, "++hydra.job_logging": IMPORTS})
    monkeypatch.setenv("COMP_LINE", "lab sweep mine.yaml mod")
    assert lab("-sc", "query=bash") == 0
    assert "model=" in capsys.readouterr().out


# What a file may sweep, and what comes of it at the first point.
OF_A_RUN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"+intervention.z_loss.coefficient": "0.5,1", "intervention": "[qk_layernorm]"},
        {"intervention": {"qk_layernorm": {}, "z_loss": {"coefficient": 0.5}}},
    ),
    ({"arm": "coupled_decay,independent_decay"}, {"optimizer.name": "adamw_coupled"}),
    ({"model": "mine,d32", "+own": "twice"}, {"model.name": "mine", "batch_size": 32}),
]


@pytest.mark.parametrize(("params", "expected"), OF_A_RUN, ids=lambda given: "+".join(given))
def test_keys_of_a_run_are_swept(
    params: dict[str, Any], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that some choice of files brings, and groups of the user's own."""
    for path, content in {
        "model/mine": "{name: mine, width: 16, depth: 1, head_width: 8}",
        "own/twice": "# @package _global_\nbatch_size: 32",
    }.items():
        Path("conf", path).parent.mkdir(parents=True, exist_ok=True)
        Path("conf", path).with_suffix(".yaml").write_text(content)
    assert lab("sweep", sweeping(params), "--cfg", "job", "--config-dir", "conf") == 0, capsys.readouterr().err
    shown = OmegaConf.create(capsys.readouterr().out)
    assert {key: OmegaConf.select(shown, key) for key in expected} == expected


def test_settings_of_a_launcher_and_a_folder_of_configs_stay_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("{name: mine, width: 16, depth: 1, head_width: 8}")
    words = ["hydra/launcher=local", "hydra.launcher.processes=1", "hydra.sweeper.max_runs=3", "hydra.job.chdir=true"]
    assert lab("train", "-m", *SMALL, *words, "--config-dir", "conf", "model=mine", "--cfg", "job") == 0
    assert "name: mine" in capsys.readouterr().out
    Path("mine.yaml").write_text("hydra: {sweeper: {max_runs: 2, params: {seed: '${oc.env:SEEDS}'}}}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDS", "4,5")  # a machine's own names and numbers may come from its environment
        assert lab("sweep", "mine.yaml", *SMALL, "--cfg", "job") == 0
    assert "seed: 4" in capsys.readouterr().out


OUTSIDE = ["../escaped", "\x1b[2J"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_run_cannot_be_named_out_of_its_folder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="a run cannot be called"):
        store.write_run(Path("out"), {"id": name, "status": "finished"}, [])
    planted.write(Path("out"), list(planted.cards(widths=[32], seeds=[0])))
    for table in ("runs", "metrics"):
        frame = pd.read_parquet(f"out/{table}.parquet")
        frame.assign(id=frame["id"].where(frame["id"] != frame["id"][0], name)).to_parquet(f"out/{table}.parquet")
    for words in (["report", "out"], ["export", "out", "--to", "csv"]):
        assert "id" in refused(capsys, *words)


def test_a_checkpoint_stays_in_its_folder() -> None:
    keeper = Checkpointer(Path("out"), ["../escaped"], CheckpointConfig(1, 0, 1))
    keeper.save(1, {}, {})
    assert [path.parts[:2] for path in Path().rglob("*.pt")] == [("out", "checkpoints")]


def test_a_part_of_a_checkpoint_is_in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="single process"):
        write_shards(Path("out"), {"a": torch.ones(3)})
    assert ShardedReader("out").shapes() == {"a": (3,)}
    read = ShardedReader.read_metadata

    def elsewhere(self: ShardedReader, *_: Any, **__: Any) -> Metadata:
        metadata: Metadata = read(self)
        info = metadata.storage_data[MetadataIndex("a", torch.Size([0]), 0)]
        info.relative_path = f"../out/{info.relative_path}"
        return metadata

    monkeypatch.setattr(ShardedReader, "read_metadata", elsewhere)
    with pytest.raises(ValueError, match="is not in it"):
        ShardedReader("out").shapes()


# Names by which Python runs what it reads.
RUNNERS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "yaml", "subprocess", "runpy", "code"}
METHODS = {"read_pickle", "to_pickle", "unsafe_load", "full_load", "system", "popen", "instantiate", "get_class"}


def dangers(source: str) -> Iterator[str]:
    """Whatever in this program could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in RUNNERS:
                yield name
            case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not any(k.arg == "weights_only" and getattr(k.value, "value", 0) is True for k in keywords):
                    yield "torch.load"
            case ast.keyword(arg="allow_pickle" | "trust_remote_code" | "shell", value=ast.Constant(value=True)):
                yield str(node.arg)


def test_no_code_of_ours_runs_what_it_reads() -> None:
    found = {}
    for folder in ("lab", "labwatch", "studies", "hydra_plugins"):
        for path in (HOME / folder).rglob("*.py"):
            found[path.relative_to(HOME).as_posix()] = list(dangers(path.read_text(encoding="utf-8")))
    for planted_danger in ("import pickle", "eval('1')", "torch.load(path)", "np.load(path, allow_pickle=True)"):
        assert list(dangers(planted_danger))
    assert {path: said for path, said in found.items() if said} == {
        "lab/training/shards.py": ["pickle"],
        "lab/pytest_plugin.py": ["subprocess"],
        "lab/core/machine.py": ["subprocess"],  # the compiler of C++, of the lab's own file
        "labwatch/watch/command.py": ["subprocess", "shell"],  # the command that the user gives to --on-alarm
        "lab/sweeping/own_code.py": ["compile"],  # the file of a class in hand, to see whether it is the code that runs
        "lab/sweeping/request.py": ["yaml"],  # nodes of its safe loader, which are counted
        "lab/core/shipped.py": ["yaml"],  # its safe loader, of the lab's own files
        "labwatch/tables/run_folders.py": ["yaml"],  # its safe loader, of a small file without aliases
    }


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def forbidden(*to: Any, **_: Any) -> Any:
        raise AssertionError(f"a call to {to}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, forbidden)
    for name in ("create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, forbidden)
    return forbidden


@pytest.mark.usefixtures("_alone", "briefly", "undrawn")
def test_nobody_is_called() -> None:
    with pytest.raises(AssertionError, match="a call to"):
        socket.create_connection(("localhost", 9))
    finished(Path("out"), "train", "-m", *SMALL, "seed=0,1", "optimizer.lr=1e-3,1e-1")
    for words in (["list"], ["claims", "out"], ["export", "out", "--to", "csv"], ["train", *SMALL, "--cfg", "job"]):
        assert lab(*words) == 0, words
    assert lab("report", "out") == 0
