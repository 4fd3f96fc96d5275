"""Nothing that is read runs, and nobody is called: sweep files, overrides, stored records."""

from __future__ import annotations

import ast
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import planted
from composing import remember
from lab import guard, store
from lab.__main__ import main
from lab.checkpoint import CheckpointConfig, Keeper
from lab.parts import Parts, write_parts
from lab.registry import RequestError
from sweeping import finished

HOME = Path(__file__).parents[1]
SMALL = ["data=synthetic", "model.width=16", "steps=3", "hydra/launcher=basic"]
TRAP = "{_target_: test_security.spring}"
SPRUNG: list[str] = []


def spring(*_: Any, **__: Any) -> None:
    """What no file and no override may lead to."""
    SPRUNG.append("sprung")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remember(monkeypatch)
    SPRUNG.clear()


def lab(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lab", *words])
        return main(words)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line by which a request is refused, nothing being run or written."""
    before = sorted(Path().rglob("*"))
    assert lab(*words) == 2, words
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1), error
    assert not SPRUNG
    assert sorted(Path().rglob("*")) == before
    return error


# What a file says, and what is said of it.
FILES = {
    f"hydra: {{callbacks: {{x: {TRAP}}}}}": "hydra.callbacks is not for a file to set",
    "hydra: {callbacks: {x: '${oc.create:{_target_: test_security.spring}}'}}": "hydra.callbacks is not",
    "hydra: {launcher: {_target_: test_security.spring}}": "hydra.launcher._target_ is not for a file to set",
    f"hydra: {{launcher: {{processes: {TRAP}}}}}": "",
    "hydra: {launcher: {processes: 2}}": "Key 'processes' not in 'BasicLauncherConf'",
    "hydra: {launcher: 3}": "",
    "hydra: {launcher: ???}": "",
    "hydra: {sweeper: {_target_: test_security.spring}}": "hydra.sweeper._target_ is not for a file to set",
    "hydra: {sweeper: {_recursive_: true}}": "hydra.sweeper._recursive_ is not for a file to set",
    f"hydra: {{sweeper: {{params: {{seed: {TRAP}}}}}}}": "",
    "hydra: {sweeper: {params: {seed: '${oc.create:{_target_: test_security.spring}}'}}}": "",
    "hydra: {sweeper: {params: {hydra.launcher.processes: 1}}}": "holds hydra.launcher.processes, which is not",
    "hydra: {sweeper: {params: {fleet: ../../x/0}}}": "holds fleet, which is not of a run",
    "hydra: {hydra_logging: {handlers: {x: {(): test_security.spring}}}}": "hydra.hydra_logging is not for a file",
    "hydra: {job_logging: {handlers: {x: {(): test_security.spring}}}}": "hydra.job_logging is not for a file",
    "hydra: {job: {env_set: {PYTHONSTARTUP: trap.py}}}": "hydra.job is not for a file to set",
    "hydra: {searchpath: [pkg://test_security]}": "hydra.searchpath is",
    "hydra: {sweep: {dir: ../elsewhere}}": "hydra.sweep is not for a file to set",
    "hydra: {output_subdir: ../elsewhere}": "hydra.output_subdir is not for a file to set",
    f"data: {TRAP}": "unknown key 'data._target_'",
    f"optimizer: {TRAP}": "unknown key 'optimizer._target_'",
    f"intervention: {{z_loss: {TRAP}}}": "unknown key 'intervention.z_loss._target_'",
    f"intervention: {{trap: {TRAP}}}": "unknown intervention 'trap'",
    f"optimizer: {{lr: {TRAP}}}": "optimizer.lr",
    "seed: !!python/object/apply:test_security.spring []": "could not determine a constructor",
    "seed: !!python/name:test_security.spring": "could not determine a constructor",
    "seed: !!python/object/new:test_security.spring []": "could not determine a constructor",
    "seed: !!python/module:antigravity": "could not determine a constructor",
    "seed: &a [*a]": "",
    'out: "a\\0b"': "out must be Unicode text without NUL",
    'model: {name: "\\uD800"}': "model.name must be Unicode text",
}


@pytest.mark.parametrize("content", FILES)
def test_a_sweep_file_makes_no_object(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(content)
    assert FILES[content] in refused(capsys, "sweep", "mine.yaml", *SMALL)


WORDS = [
    "+hydra.callbacks.x._target_=test_security.spring",
    f"+hydra={{callbacks: {{x: {TRAP}}}}}",
    f"++hydra.callbacks={{x: {TRAP}}}",
    "hydra.launcher._target_=test_security.spring",
    f"+hydra.launcher.x={TRAP}",
    f"hydra.launcher={TRAP}",
    "hydra.launcher.processes=${oc.create:{_target_: test_security.spring}}",
    "+hydra.launcher._recursive_=true",
    "hydra.sweeper._target_=test_security.spring",
    "hydra.sweeper._recursive_=true",
    f"+hydra.sweeper.params.seed={TRAP}",
    "hydra.searchpath=[pkg://test_security]",
    "+hydra.job.env_set.PYTHONSTARTUP=trap.py",
    "hydra.job.env_copy=[HOME]",
    "+hydra.hydra_logging.handlers.x={'()': test_security.spring}",
    "hydra.run.dir=elsewhere",
    "hydra.sweep.dir=elsewhere",
    "hydra.mode=RUN",
    "hydra/sweeper=basic",
    "hydra/launcher=null",
    "hydra/job_logging=default",
    f"+data={TRAP}",
    f"+optimizer.trap={TRAP}",
    "fleet=../../x/0",
    "++fleet=../../x/0",
]


@pytest.mark.parametrize("word", WORDS)
def test_an_override_makes_no_object(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "train", "-m", *SMALL, word)


def test_neither_does_a_file_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """Groups and defaults can be led out of our folder, and a folder of configs can be added to it."""
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/evil.yaml").write_text(f"# @package _global_\nhydra: {{callbacks: {{x: {TRAP}}}}}\n")
    Path("conf/inner.yaml").write_text(TRAP)
    away = os.path.relpath(Path("conf").absolute(), HOME / "conf")
    Path("mine.yaml").write_text(f"defaults: [/{away}/model/evil]")
    for words in (
        ["sweep", "mine.yaml"],
        ["train", f"+{away}/model=evil"],
        ["train", f"model=../{away}/model/evil"],
        ["train", f"+{away}@hydra.callbacks.x=inner"],
        ["train", "--config-dir", "conf", "model=evil"],
        ["train", "--config-dir=conf", "model=evil", "--cfg", "job"],
        ["train", "-cd", "conf", "model=evil", "--help"],
    ):
        refused(capsys, *words, *SMALL)


@pytest.mark.slow
def test_the_trap_would_spring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra itself does as it is told, so what refuses is ours."""
    monkeypatch.setattr(guard, "check", lambda *_, **__: None)
    Path("mine.yaml").write_text(f"hydra: {{callbacks: {{x: {TRAP}}}}}")
    with pytest.warns(UserWarning, match="Callback NoneType"):
        lab("sweep", "mine.yaml", *SMALL, "--dry-run")
    assert SPRUNG


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


OUTSIDE = ["../escaped", "..", "/escaped", "a/b", "", "a\\b", "a\nb", "\x1b[2J"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_run_cannot_be_named_out_of_its_folder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="a run cannot be called"):
        store.write_run(Path("out"), {"id": name, "status": "finished"}, [])
    planted.write(Path("out"), list(planted.cards(widths=[32], seeds=[0])))
    for table in ("runs", "metrics"):
        frame = pd.read_parquet(f"out/{table}.parquet")
        frame.assign(id=frame["id"].where(frame["id"] != frame["id"][0], name)).to_parquet(f"out/{table}.parquet")
    for run in (*Path("out/runs").glob("*/*"), *Path("out/runs").glob("*"), Path("out/runs")):
        run.unlink() if run.is_file() else run.rmdir()
    for words in (["report", "out"], ["export", "out", "--to", "csv"], ["export", "out", "--to", "csv", "--out", "o"]):
        assert "a run's id is no name" in refused(capsys, *words)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_checkpoint_stays_in_its_folder(name: str) -> None:
    keeper = Keeper(Path("out"), [name], CheckpointConfig(1, 0, 1))
    keeper.save(1, {}, {})
    assert [path.parts[:2] for path in Path().rglob("*.pt")] == [("out", "checkpoints")]


def test_a_part_of_a_checkpoint_is_in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="single process"):
        write_parts(Path("out"), {"a": torch.ones(3)})
    assert Parts("out").shapes() == {"a": (3,)}
    read = Parts.read_metadata

    def elsewhere(self: Parts, *_: Any, **__: Any) -> Metadata:
        metadata: Metadata = read(self)
        info = metadata.storage_data[MetadataIndex("a", torch.Size([0]), 0)]
        info.relative_path = f"../out/{info.relative_path}"
        return metadata

    monkeypatch.setattr(Parts, "read_metadata", elsewhere)
    with pytest.raises(ValueError, match="is not in it"):
        Parts("out").shapes()


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


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "eval('1')",
        "pd.read_pickle(path)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "os.system('ls')",
        "hydra.utils.instantiate(config)",
    ],
)
def test_the_eye_sees_dangers(source: str) -> None:
    assert list(dangers(source))


def test_no_code_of_ours_runs_what_it_reads() -> None:
    found = {}
    for folder in ("lab", "hydra_plugins"):
        for path in (HOME / folder).rglob("*.py"):
            found[path.relative_to(HOME).as_posix()] = list(dangers(path.read_text(encoding="utf-8")))
    assert {path: said for path, said in found.items() if said} == {
        "lab/parts.py": ["pickle"],
        "lab/pytest_plugin.py": ["subprocess"],
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


@pytest.mark.usefixtures("_alone", "briefly")
def test_nobody_is_called() -> None:
    with pytest.raises(AssertionError, match="a call to"):
        socket.create_connection(("localhost", 9))
    finished(Path("out"), "train", "-m", *SMALL, "seed=0,1", "optimizer.lr=1e-3,1e-1")
    for words in (["list"], ["claims", "out"], ["export", "out", "--to", "csv"], ["train", *SMALL, "--cfg", "job"]):
        assert lab(*words) == 0, words
    assert lab("report", "out") == 0
