"""The command line as its user meets it: what it leaves behind, what it says, how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

import planted
from lab.core import files
from lab.records import store
from lab.sweeping import compose
from sweeping import lab

TOY = ["scale=toy", "data=synthetic", "hydra/launcher=basic"]
ONE = ["steps=3", "model.width=16", "data=synthetic", "validation=short", "hydra/launcher=basic"]
pytestmark = pytest.mark.usefixtures("briefly", "here")


def test_the_same_command_trains_nothing_and_more_values_train_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    def last_line(*words: str) -> str:
        assert lab("train", "-m", *ONE, *words) == 0
        return capsys.readouterr().out.strip().splitlines()[-1]

    assert last_line("seed=0,1").startswith("2 trained, 0 already there")
    before = {path: path.read_bytes() for path in Path("runs/train/runs").rglob("*.*")}
    assert last_line("seed=0,1").startswith("0 trained, 2 already there")
    assert last_line("seed=0,1,2", "optimizer.lr=1e-2,1e-3").startswith("4 trained, 2 already there")
    assert {path: path.read_bytes() for path in before} == before
    assert len(store.read(Path("runs/train")).runs) == 6
    assert len(store.commands(Path("runs/train"))) == 2


def test_a_key_given_here_replaces_the_sweeps_values() -> None:
    assert lab("sweep", "smoke", *TOY, "optimizer.lr=3e-3", "seed=7,8", "intervention=[]", "out=here") == 0
    runs = store.read(Path("here")).runs
    assert set(runs["seed"]) == {7, 8}
    assert set(runs["optimizer.lr"]) == {3e-3}
    assert set(runs["intervention"]) == {"none"}


@pytest.mark.slow
def test_a_folder_knows_the_learning_rate_of_its_recipe() -> None:
    def recorded(lr: str, *words: str) -> dict[str, float]:
        Path("mine.yaml").write_text(
            f"optimizer: {{lr: {lr}}}\nhydra: {{sweeper: {{params: {{optimizer.lr: '1e-2,1e-1', seed: '0'}}}}}}\n"
        )
        assert lab("sweep", "mine.yaml", *ONE, "intervention=[],[z_loss]", *words) == 0
        return store.recipe_lrs(Path("runs/mine"))

    first = recorded("3e-3")
    runs = store.read(Path("runs/mine")).runs.set_index("id")
    assert sorted(runs.loc[list(first), "intervention"]) == ["none", "z_loss"]
    assert set(first.values()) == {3e-3}
    assert recorded("9e-3") == dict.fromkeys(first, 9e-3)  # though all runs are there already
    assert [*recorded("1e-2", "seed=1").values()] == [9e-3, 9e-3, 1e-2, 1e-2]  # the newest last
    assert lab("train", "-m", *ONE, "seed=3,4", "out=runs/mine") == 0
    assert len(store.recipe_lrs(Path("runs/mine"))) == 4  # nothing is swept over learning rates


def test_a_users_own_sweep_file_is_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(
        "# Mine.\nsteps: 3\nmodel: {width: 16}\ndefaults:\n  - override /data: synthetic\n"
        "hydra: {sweeper: {params: {schedule.warmup: '0,0.5', intervention.z_loss.coefficient: '0,1e-4'}}}\n"
    )
    assert lab("sweep", "mine.yaml", "hydra/launcher=basic") == 0
    runs = store.read(Path("runs/mine")).runs
    assert sorted(zip(runs["schedule.warmup"], runs["intervention.z_loss.coefficient"], strict=True)) == [
        (0.0, 0.0),
        (0.0, 1e-4),
        (0.5, 0.0),
        (0.5, 1e-4),
    ]


@pytest.mark.slow
@pytest.mark.xdist_group("sweeping")
def test_a_dry_run_says_what_it_would_cost_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab("sweep", "quickstart", "--dry-run", *TOY) == 0
    said = capsys.readouterr().out
    assert said.startswith("to train: 4 runs in 2 fleets; 0 already there")  # both widths are 16, so equal points
    for word in ("parameters each", "FLOPs", "min", "GB of memory", "  optimizer.lr: 0.001, 0.1"):
        assert word in said
    assert not list(Path().iterdir())


def test_a_floor_that_makes_learning_rates_arms_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.sweeping.dry_run.estimate", lambda *_, **__: ["estimated"])
    monkeypatch.setattr("lab.sweeping.launch.train_plan", lambda *_, **__: [])
    floor = "schedule.floor='${divide:${optimizer.lr},10}'"
    for dry_run in (["--dry-run"], []):
        assert lab("train", "-m", "steps=30", *ONE[1:], "optimizer.lr=1e-2,3e-2,1e-1", floor, *dry_run) == 0
        caution = "lab: schedule.floor has another value at each learning rate, so each of 3 learning rates is an arm "
        assert caution in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "--cfg", "job"], ["sweep", "smoke", "seed=3,4", "--cfg", "job"]])
def test_the_config_is_shown_and_nothing_runs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(*words) == 0
    said = capsys.readouterr().out
    assert "weight_decay: 0.0001" in said
    assert words[0] == "train" or "seed: 3" in said
    assert not list(Path().iterdir())


def test_a_key_is_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "~optimizer.clip"], ["train", "-m", "seed=0,1", "~optimizer.clip"]):
        assert lab(*words, "--cfg", "job") == 0
        assert "clip" not in OmegaConf.create(capsys.readouterr().out).optimizer


@pytest.mark.parametrize("none", ["[]", "{}"])
def test_an_empty_list_or_mapping_in_a_file_chooses_none(none: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(
        f"intervention: {none}\nburst: {none}\nguest: {none}\n"
        "defaults:\n  - override /data: trigram\n  - override /bad_batches: shift\n"
    )
    for words, kept in (([], []), (["intervention=[relu]"], ["relu"])):
        assert lab("sweep", "mine.yaml", *words, "--cfg", "job") == 0
        shown = OmegaConf.create(capsys.readouterr().out)
        assert (list(shown.intervention), shown.bad_batches, shown.custom_model) == (kept, {}, {})
        assert shown.data.name == "trigram"


def test_a_list_in_a_file_chooses_interventions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine.yaml").write_text("intervention: [relu, z_loss]\n")
    assert lab("sweep", "mine.yaml", "--cfg", "job") == 0
    in_a_file = capsys.readouterr().out
    assert lab("train", "intervention=[relu,z_loss]", "--cfg", "job", "out=runs/mine") == 0
    assert OmegaConf.create(in_a_file).intervention == OmegaConf.create(capsys.readouterr().out).intervention


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_that_of_the_package(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(word) == 0
    assert capsys.readouterr().out == f"instability-lab {version('instability-lab')}\n"


def test_output_that_is_read_in_part_ends_as_sigpipe_ends_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["list"], ["leaderbord"], ["claims", ".", "--html", "pipe"]):
        reader, writer = os.pipe()
        os.close(reader)
        Path("pipe").unlink(missing_ok=True)
        Path("pipe").symlink_to(f"/dev/fd/{writer}")
        with monkeypatch.context() as patch, open(writer, "w") as closed:
            patch.setattr(sys, "stdout", closed)
            code = lab(*words)
            with suppress(BrokenPipeError):
                closed.close()
        assert code == (2 if words == ["leaderbord"] else 141)


def test_one_run_ends_with_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["optimizer.lr=1e30", "optimizer.clip=inf", "schedule.warmup=0", "intervention=[]"]
    for words, ending in (([], "; did not diverge"), (wild, "; diverged at step 1: loss not finite")):
        assert lab("train", *ONE, *words) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        runs = store.read(Path("runs/train")).runs
        loss = runs.loc[runs["optimizer.lr"] == (1e30 if words else 1e-2), "final_val_loss"].item()
        assert last == f"final held-out loss {loss:.4f} nats/token{ending}"


@pytest.mark.parametrize("name", ["a, b=c back\\slash ünï", "end\\"])
def test_a_folder_may_have_any_name(name: str) -> None:
    assert lab("train", *ONE, f"out={files.quoted(Path(name))}") == 0
    assert [path.name for path in Path().iterdir()] == [name]


@pytest.mark.usefixtures("undrawn")
def test_train_without_m_is_one_run_at_any_scale_and_has_a_report() -> None:
    assert lab("train", *TOY, reports=True) == 0
    assert len(store.read(Path("runs/train")).runs) == 1
    assert "1 run" in Path("runs/train/report.html").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused() -> None:
    Path("locked").mkdir(mode=0o555)
    assert lab("train", *ONE, "out=locked") == 2


def test_divergence_is_data_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["optimizer.lr=1e30", "optimizer.clip=inf", "schedule.warmup=0", "intervention=[]"]
    assert lab("train", *ONE, *wild) == 0
    assert "1 trained, 0 already there, 1 diverged, 0 failed" in capsys.readouterr().out
    assert store.read(Path("runs/train")).runs["diverged_at"].notna().all()
    assert lab("train", *ONE, *wild) == 0
    assert "0 trained, 1 already there, 1 diverged, 0 failed" in capsys.readouterr().out


def test_a_fault_in_a_run_is_recorded_exits_1_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lab.training.fleet import Fleet

    with monkeypatch.context() as broken:
        broken.setattr(Fleet, "step", lambda *_: 1 / 0)
        assert lab("train", *ONE) == 1
    assert "0 trained, 0 already there, 0 diverged, 1 failed" in capsys.readouterr().out
    runs = store.read(Path("runs/train")).runs
    assert list(runs["status"]) == ["failed"]
    assert "ZeroDivisionError" in runs["reason"][0]
    assert lab("train", *ONE) == 0
    assert list(store.read(Path("runs/train")).runs["status"]) == ["finished"]


def raising(error: Exception, name: str, file: str) -> Callable[..., Any]:
    """A function that raises this error, and in tracebacks bears that name and stands in that file."""

    def function(*_: Any, **__: Any) -> Any:
        raise error

    return types.FunctionType(
        function.__code__.replace(co_name=name, co_filename=file), globals(), name, (), function.__closure__
    )


@pytest.mark.parametrize(
    ("place", "error", "name"),
    [
        ("lab.sweeping.planner.plan_sweep", HydraException("x"), "carry_out"),
        ("lab.sweeping.local_jobs.choose_slots", ConfigKeyError("x"), "compose"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value),
)
def test_an_error_of_ours_is_no_refusal(
    place: str, error: Exception, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, raising(error, name, compose.__file__))
    assert lab("train", *ONE, "hydra/launcher=local") == 70
    assert "please report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "place", "error"),
    [
        (["train"], "hydra.compose", KeyError("no such thing")),
        (["coordcheck"], "omegaconf.OmegaConf.update", RecursionError("no such thing")),
        (
            ["train", "--cfg", "job"],
            "hydra.core.override_parser.overrides_parser.OverridesParser.parse_overrides",
            RuntimeError("no such thing"),
        ),
    ],
    ids=["train", "coordcheck", "config"],
)
def test_what_hydra_raises_while_it_reads_the_request_is_a_refusal(
    words: list[str], place: str, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of any type, and under any name."""
    monkeypatch.setattr(place, raising(error, "anything", "anywhere.py"))
    assert lab(*words, *ONE[:3]) == 2
    said = capsys.readouterr().err
    assert "no such thing" in said
    assert said.count("\n") == 1


def test_a_job_in_another_folder_finds_what_the_request_means() -> None:
    Path("mine.txt").write_text("the quick brown fox jumps over the lazy dog and runs on\n" * 400)
    words = ["data=text", "data.path=mine.txt", *(word for word in ONE if not word.startswith("data"))]
    assert lab("train", *words, "hydra.job.chdir=true", "out=here") == 0
    assert sorted(path.name for path in Path().iterdir()) == ["here", "mine.txt"]
    assert len(store.read(Path("here")).runs) == 1


def test_lists_for_programs_hold_the_same_names_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab("list", "models", "optimizers", "--json") == 0
    named = json.loads(capsys.readouterr().out)
    assert lab("list", "optimizers") == 0
    assert [line.split("  ", 1)[0] for line in capsys.readouterr().out.splitlines()] == list(named["optimizers"])
    assert named["models"]["d128"] == "width 128, depth 2, head width 16"
    assert lab("list", "optimisers", "--json") == 2


def test_help_needs_no_torch_and_the_report_neither() -> None:
    planted.write(Path("runs/train"), list(planted.cards(widths=(32,), seeds=(0,))))
    program = (
        "import sys; from lab.__main__ import main; from lab.report import build; build.FIGURES = {};"
        "said = {words: main(words.split()) for words in sys.argv[1:]};"
        "assert not any(said.values()), said; assert 'torch' not in sys.modules"
    )
    words = ["--help", "report runs/train", "list sweeps", "status runs/train", "export runs/train --to csv"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lab sweep")


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("lab sweep quick", "quickstart"),
        ("lab sweep smoke model=d", "model=d64"),
        ("lab list ", "probes"),
    ],
)
def test_tab_completion(
    line: str, offers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert lab("-sc", "query=bash") == 0
    assert offers in capsys.readouterr().out.split()


# What commands print of a folder that holds the reference alone, or a run that failed; "" where that is text.
EMPTY_RESULTS = {
    "leaderboard reference": "refused",
    "claims failed --verdict contradicted": "",
    "claims failed --verdict contradicted --json": "json",
    "check failed --baseline reference": "",
    "check failed --baseline reference --json": "json",
    "check failed --baseline reference --junit suite.xml --markdown summary.md": "",
    "watch failed --json": "json",
    "compare failed reference --json": "refused",
    "predict failed --json": "refused",
    "export failed --to csv": "",
}


@pytest.fixture(scope="module")
def with_little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the reference alone, one of a run that failed, and a table of no outcome."""
    home = tmp_path_factory.mktemp("little")
    planted.write(home / "reference", list(planted.cards(arms=["z_loss"], widths=[32])))
    planted.write(home / "failed", [{**planted.card(), "status": "failed", "final_val_loss": None}])
    (home / "outcomes.csv").write_text("a,b,outcome,failure\n")
    return home


@pytest.mark.parametrize("command", EMPTY_RESULTS)
def test_every_form_of_an_empty_result_is_printed_or_refused(
    command: str, with_little: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(with_little)
    code, form = lab(*command.split()), EMPTY_RESULTS[command]
    out, error = capsys.readouterr()
    assert (code, error.count("\n")) == (2, 1) if form == "refused" else (bool(out), error) == (True, "")
    if form == "refused":
        assert json.loads(out)["verdict"] == "refused" if "--json" in command else out == ""
    assert code == 0 or "check" in command or form == "refused"
    if form == "json":
        json.loads(out)


def test_a_calm_log_is_watched_without_pandas_which_loads_when_it_is_used(tmp_path: Path) -> None:
    log = tmp_path / "calm.csv"
    log.write_text("step,loss\n" + "".join(f"{step},{2 + 1 / (step + 1):.4f}\n" for step in range(60)))
    code = f"""
import sys
from lab.__main__ import import_lazily, main
import_lazily()
assert main(["watch", {str(log)!r}]) == 0
assert "pandas.core" not in sys.modules
import pandas as pd
assert pd.DataFrame({{"a": [1]}}).equals(sys.modules["pandas"].DataFrame({{"a": [1]}}))
assert pd.api.types.is_numeric_dtype(pd.Series([1.0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
