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
from lab.__main__ import main
from lab.cli import override_rules
from lab.core.errors import RequestError
from lab.records import store
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from lab.training.shards import ShardedReader, write_shards
from sampling import few
from sweeping import finished

HOME = Path(__file__).parents[1]
SMALL = ["data=synthetic", "validation=short", "model.width=16", "steps=3", "hydra/launcher=basic"]
TRAP = "{_target_: test_security.spring}"
SPRUNG: list[str] = []


def spring(*_: Any, **__: Any) -> None:
    """What no file and no override may lead to."""
    SPRUNG.append("sprung")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
    f"hydra: {{callbacks: {{x: {TRAP}}}}}": "hydra.callbacks: a file may not set it",
    "hydra: {callbacks: {x: '${oc.create:{_target_: test_security.spring}}'}}": "hydra.callbacks: a file may not",
    "hydra: {launcher: {_target_: test_security.spring}}": "hydra.launcher._target_: a file may not set it",
    f"hydra: {{launcher: {{processes: {TRAP}}}}}": "",
    "hydra: {launcher: {processes: 2}}": "Key 'processes' not in 'BasicLauncherConf'",
    "hydra: {launcher: 3}": "",
    "hydra: {launcher: ???}": "",
    "hydra: {sweeper: {_target_: test_security.spring}}": "Key '_target_' not in 'FleetSweeperConf'",
    "hydra: {sweeper: {_recursive_: true}}": "Key '_recursive_' not in 'FleetSweeperConf'",
    f"hydra: {{sweeper: {{params: {{seed: {TRAP}}}}}}}": "",
    "hydra: {sweeper: {params: {seed: '${oc.create:{_target_: test_security.spring}}'}}}": "",
    "hydra: {sweeper: {params: {hydra.launcher.processes: 1}}}": "hydra.launcher.processes, which is no key of a run",
    "hydra: {sweeper: {params: {fleet: ../../x/0}}}": "holds fleet, which is no key of a run",
    "hydra: {hydra_logging: {handlers: {x: {(): test_security.spring}}}}": "hydra.hydra_logging: a file",
    "hydra: {job_logging: {handlers: {x: {(): test_security.spring}}}}": "hydra.job_logging: a file",
    "hydra: {job: {env_set: {PYTHONSTARTUP: trap.py}}}": "hydra.job: a file may not set it",
    "hydra: {searchpath: [pkg://test_security]}": "hydra.searchpath is",
    "hydra: {sweep: {dir: ../elsewhere}}": "hydra.sweep: a file may not set it",
    "hydra: {output_subdir: ../elsewhere}": "hydra.output_subdir: a file may not set it",
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


@pytest.mark.parametrize("content", few(FILES, 7))
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
    "hydra/launcher=../x",
    "hydra.launcher.processes=${seed}",
    "hydra/job_logging=default",
    "~hydra/job_logging",
    "~hydra/launcher=basic",
    "~hydra.launcher.processes",
    "~hydra",
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


FLAGS: dict[str, list[str]] = {
    "training": [],
    "dry run": ["--dry-run"],
    "help": ["--help"],
    "Hydra's help": ["--hydra-help"],
    "info": ["--info"],
    "config": ["--cfg", "job"],
    "config of Hydra": ["--cfg", "hydra"],
}
# Logging that is set up so truncates a file, calls a function, or imports a module.
TRUNCATES = (
    "{version: 1, handlers: {x: {class: logging.FileHandler, filename: victim.txt, mode: w}}, root: {handlers: [x]}}"
)
SPRINGS = "{(): test_security.spring}"
IMPORTS = "{version: 1, handlers: {x: {class: trap.Handler}}, root: {handlers: [x]}}"
# What a file may not sweep, and what is said of it.
SWEPT = {
    "+hydra.hydra_logging": (TRUNCATES, "which is no key of a run; known: arm, "),
    "++hydra.hydra_logging": (TRUNCATES, "holds ++hydra.hydra_logging, which is no key of a run"),
    "++hydra.job_logging": (IMPORTS, "holds ++hydra.job_logging, which is no key"),
    "++hydra": (f"{{hydra_logging: {IMPORTS}}}", "holds ++hydra, which is no key"),
    "+hydra.callbacks.x._target_": ("test_security.spring", "which is no key of a run"),
    "++hydra.searchpath": ("[pkg://trap]", "which is no key of a run"),
    "++hydra.mode": ("RUN", "which is no key of a run"),
    "+hydra/job_logging": ("default", "which is no key of a run"),
    "~hydra.hydra_logging": (None, "holds ~hydra.hydra_logging, which is no key"),
    "~optimizer.clip": (None, "holds ~optimizer.clip, which is no key"),
    "~model": (None, "holds ~model, which is no key"),
    "+fleet": ("../../x/0", "holds +fleet, which is no key"),
    "++fleet": ("../../x/0", "holds ++fleet, which is no key"),
    "sweeps": ("requested", "holds sweeps, which is no key"),
    "+mine.key": (1, "holds +mine.key, which is no key"),
    "++optmizer.lr": (1, "holds ++optmizer.lr, which is no key of a run; nearest: optimizer"),
    "seed=0,++hydra.hydra_logging": (TRUNCATES, "which is no key of a run"),
    "seed=0\n++hydra.hydra_logging": (TRUNCATES, "which is no key of a run"),
    "seed ++hydra.hydra_logging": (TRUNCATES, "which is no key of a run"),
    "+model@hydra.hydra_logging": ("d32", "which is no key of a run"),
    "model@hydra.hydra_logging": ("d32", "which is no key of a run"),
    "+model@_global_": ("evil", "which is no key of a run"),
    "--config-dir": ("conf", "which is no key of a run"),
    "-cd": ("conf", "which is no key of a run"),
    "": (1, "which is no key of a run"),
    "model": ("d32@hydra.hydra_logging", "params.model must choose files by their names"),
    "+arm": ("../../evil", "params.+arm must choose files by their names"),
    "data": ("\\${oc.env:HOME}", "params.data must choose files by their names"),
    "seed": ("0, ++hydra.hydra_logging=x", "cannot read 'seed=0, ++hydra.hydra_logging=x'"),
    "batch_size": ("1\n++hydra.hydra_logging=x", "batch_size"),
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


# One key for each way in which a swept key is refused: by its name, by its value, by the parser, by composing it.
EACH_REFUSAL = ("+hydra.hydra_logging", "~model", "model", "seed", "batch_size")
# Flags take other ways through the launcher than training does.
A_FEW_FLAGS = ("training", "dry run", "config")
CROSS = [
    pytest.param(key, flags, marks=() if key in EACH_REFUSAL and flags in A_FEW_FLAGS else pytest.mark.slow)
    for key in SWEPT
    for flags in FLAGS
]


@pytest.mark.usefixtures("_victims")
@pytest.mark.parametrize(("key", "flags"), CROSS)
def test_a_file_sweeps_keys_of_a_run(key: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    value, answer = SWEPT[key]
    assert answer in refused(capsys, "sweep", sweeping({key: value}), *SMALL, *FLAGS[flags])


@pytest.mark.usefixtures("_victims")
@pytest.mark.parametrize("flags", few(FLAGS, 1))
def test_a_file_leads_to_no_settings(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by what it sweeps, nor by its defaults, nor by a file in the user's own folder."""
    Path("conf/model").mkdir(parents=True)
    evil = f"# @package _global_\nhydra: {{hydra_logging: {TRUNCATES}}}\nmodel: {{width: 16}}\n"
    Path("conf/model/evil.yaml").write_text(evil)
    away = os.path.relpath(Path("conf/model").absolute(), HOME / "conf" / "model")
    words = [*SMALL, *FLAGS[flags]]
    assert "by their names" in refused(capsys, "sweep", sweeping({"model": f"{away}/evil"}), *words)
    for entry in (f"override /model: {away}/evil", f"/model@hydra.x: {away}/evil", "override /data: '${oc.env:HOME}'"):
        sweep = sweeping({}, defaults=[dict([entry.split(": ")])])
        assert "by their names" in refused(capsys, "sweep", sweep, *words)
    sweep = sweeping({"model": "evil,d32"})
    answer = refused(capsys, "sweep", sweep, *words, "--config-dir", "conf")
    assert "hydra.hydra_logging: a file may not set it" in answer


@pytest.mark.usefixtures("_victims")
@pytest.mark.parametrize("flags", few(FLAGS, 2))
def test_neither_does_the_command_line_sweep_more(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    word = f"+hydra.sweeper.params={{++hydra.hydra_logging: {TRUNCATES}}}"
    answer = refused(capsys, "train", "-m", *SMALL, word, *FLAGS[flags])
    assert "holds ++hydra.hydra_logging, which is no key of a run" in answer


@pytest.mark.usefixtures("_victims")
@pytest.mark.parametrize("line", ["lab sweep mine.yaml ", "lab sweep mine.yaml mod", "lab sweep mine.yaml model="])
def test_completion_reads_no_sweep_file(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweeping({"++hydra.hydra_logging": TRUNCATES, "++hydra.job_logging": IMPORTS})
    monkeypatch.setenv("COMP_LINE", line)
    assert lab("-sc", "query=bash") == 0
    assert "model=" in capsys.readouterr().out


# What a file may sweep, and what comes of it at the first point.
OF_A_RUN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"optimizer.beta2": "0.9,0.95", "optimizer": "adamw,adamw_rms_scaled"}, {"optimizer.beta2": 0.9}),
    (
        {"intervention.kappa_transplant.kappa": "1,2", "intervention": "[kappa_transplant]"},
        {"intervention": {"kappa_transplant": {"kappa": 1}}},
    ),
    (
        {"+intervention.z_loss.coefficient": "0.5,1", "intervention": "[qk_layernorm]"},
        {"intervention": {"qk_layernorm": {}, "z_loss": {"coefficient": 0.5}}},
    ),
    ({"++checkpoint.keep": 3}, {"checkpoint.keep": 3}),
    ({"data.path": "../corpus.txt", "data": "text"}, {"data.name": "text", "data.path": "../corpus.txt"}),
    ({"+parametrization.base_width": "16,32"}, {"parametrization.base_width": 16}),
    ({"schedule.cooldown": "0.1,0.2", "schedule": "wsd"}, {"schedule.cooldown": 0.1}),
    ({"+guest.window_mlp.window": "2,8"}, {"guest": {"window_mlp": {"window": 2}}}),
    ({"arm": "coupled_decay,independent_decay"}, {"optimizer.name": "adamw_coupled"}),
    ({"scale": "toy,cpu"}, {"scale.name": "toy"}),
    ({"model": "mine,d32", "+own": "twice"}, {"model.name": "mine", "batch_size": 32}),
    ({"data": "in/side"}, {"data": {"name": "synthetic", "seed": 7}}),
]


@pytest.mark.parametrize(
    ("params", "expected"), few([pytest.param(*case) for case in OF_A_RUN], 4), ids=lambda given: "+".join(given)
)
def test_keys_of_a_run_are_swept(
    params: dict[str, Any], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that some choice of files brings, and groups of the user's own."""
    for path, content in {
        "model/mine": "{name: mine, width: 16, depth: 1, head_width: 8}",
        "own/twice": "# @package _global_\nbatch_size: 32",
        "data/in/side": "# @package data\nname: synthetic\nseed: 7",
    }.items():
        Path("conf", path).parent.mkdir(parents=True, exist_ok=True)
        Path("conf", path).with_suffix(".yaml").write_text(content)
    assert lab("sweep", sweeping(params), "--cfg", "job", "--config-dir", "conf") == 0, capsys.readouterr().err
    shown = OmegaConf.create(capsys.readouterr().out)
    assert {key: OmegaConf.select(shown, key) for key in expected} == expected


@pytest.mark.slow
def test_the_trap_would_spring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra itself does as it is told, so what refuses is ours."""
    monkeypatch.setattr(override_rules, "_refuse_differences", lambda *_: None)
    Path("mine.yaml").write_text(f"hydra: {{hydra_logging: {{handlers: {{x: {SPRINGS}}}, root: {{handlers: [x]}}}}}}")
    lab("sweep", "mine.yaml", *SMALL)
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
        assert "a run's id is not a valid name" in refused(capsys, *words)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_checkpoint_stays_in_its_folder(name: str) -> None:
    keeper = Checkpointer(Path("out"), [name], CheckpointConfig(1, 0, 1))
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
        "lab/training/shards.py": ["pickle"],
        "lab/pytest_plugin.py": ["subprocess"],
        "lab/cli/watching.py": ["subprocess", "shell"],  # the command that the user gives to --on-alarm
        "lab/cli/launch.py": ["yaml"],  # nodes of its safe loader, which are counted
        "lab/core/shipped.py": ["yaml"],  # its safe loader, of the lab's own files
        "lab/records/event_files.py": ["yaml"],  # its safe loader, of a small file without aliases
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


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("hydra/launcher=../x", "hydra/launcher: a request may not set it; hydra/launcher=NAME can be set"),
        ("hydra.launcher.processes=${seed}", "hydra.launcher.processes takes plain values, not ${seed}"),
    ],
)
def test_a_launcher_takes_a_name_and_plain_values(word: str, line: str) -> None:
    with pytest.raises(RequestError) as refusal:
        override_rules.check_overrides([word])
    assert str(refusal.value) == line
