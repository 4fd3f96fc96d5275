"""A user's own package and script, and the page that tells of them: its files as they are, its commands as they run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import lab
from lab import Fleet, main
from lab.analysis.stress import battery
from lab.core import hooks, machine, registry
from lab.core.errors import RequestError
from lab.core.hooks import HookPoint, listening
from lab.core.registry import DATA, INTERVENTIONS, KINDS, LINKS, MODELS, PARAMETRIZATIONS, PROBES
from lab.records import store
from small import configs

HOME = Path(__file__).parents[1]
THEIRS = HOME / "tests" / "own_recipe"
PAGE = (HOME / "docs" / "your_own_recipe.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
SMALLER = {
    "sweep": ["scale=toy", "optimizer.lr=1e-2,1e-1", "hydra/launcher=basic"],
    "coordcheck": ["model.width=16,32", "model.depth=1", "batch_size=4", "seed=0,1,2", "steps=2"],
    "stress": ["seed=0", "steps=20", "--tests=lr_x10"],
    "train": ["scale=toy", "data=synthetic", "seed=0", "probes=none"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package in an empty folder, installed as by pip: what its pyproject.toml says, in a dist-info on the path."""
    shutil.copytree(THEIRS, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    install(tmp_path, tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield from _afresh(monkeypatch)


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries that have not looked outside, and forget what the test adds."""
    yield from _afresh(monkeypatch)


def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for shelf in KINDS.values():
        monkeypatch.setattr(shelf, "_entries", dict(shelf._entries))
        monkeypatch.setattr(shelf, "_external_loaded", False)
    monkeypatch.setattr(battery, "_ADDED", {})
    look_outside_again()
    yield Path.cwd()
    look_outside_again()
    for module in ("own_recipe", "theirs"):
        sys.modules.pop(module, None)


def look_outside_again() -> None:
    registry.points_of_others.cache_clear()
    registry.load_plugins.cache_clear()
    battery.read_battery.cache_clear()


def install(where: Path, project: dict[str, Any]) -> None:
    info = where / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    groups = project["entry-points"]
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def lab_(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lab", *words])
        return main(list(words))


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = dict(re.findall(r"`([\w/]+\.\w+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
    files = {
        path.relative_to(THEIRS).as_posix() for path in THEIRS.rglob("*.*") if path.suffix in (".py", ".toml", ".yaml")
    }
    assert set(shown) == files - {"own_recipe.py"}
    for name, text in shown.items():
        assert text == (THEIRS / name).read_text(encoding="utf-8"), name
    pieces = [block.strip("\n") for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)]
    for name in ("my_model.py", "my_optimizer.py", "recipe.py"):
        pieces.remove(shown[name].strip("\n"))
    assert "\n\n\n".join(pieces) + "\n" == (THEIRS / "own_recipe.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "briefly", "folder")
def test_the_pages_commands_work_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    ran = [words[1:] for words in COMMANDS if words[0] == "lab" and words[1] != "check"]
    assert {words[0] for words in ran} == {"stress", "sweep", "report", "list", "coordcheck"}
    for words in ran:
        if "LlamaConfig" in words and not find_spec("transformers"):
            continue
        code = lab_(*words, *SMALLER.get(words[0], []), *(["seed=0"] if words[0] == "sweep" else []))
        assert code == 0 or words[0] == "coordcheck", capsys.readouterr().err  # whose verdict is its exit code
        assert code in (0, 1)
    said = capsys.readouterr().out
    assert "window_mlp  The last few tokens side by side" in said
    transformers, windows = (store.read(Path("runs", name)) for name in ("transformer", "window"))
    assert set(transformers.runs["intervention"]) == {"z_slope", "score_cap+z_slope"}
    assert set(transformers.runs["intervention.score_cap.cap"].dropna()) == {50}
    assert {*transformers.runs["optimizer.chain"]} == {"clip+adam+bounded_direction+peak+decay+schedule"}
    assert {*transformers.runs["parametrization.name"]} == {"root_width"}
    assert {*transformers.runs["data.name"]} == {"counting"}
    assert {*windows.runs["custom_model"]} == {"window_mlp"}
    assert {*windows.runs["custom_model.window_mlp.window"]} == {2, 8}
    assert "output_logit_max" in set(transformers.metrics["probe"]) & set(windows.metrics["probe"])
    assert {*transformers.runs["status"], *windows.runs["status"]} == {"finished"}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "briefly", "folder")
def test_the_pages_check_passes_against_itself() -> None:
    (words,) = [words[1:] for words in COMMANDS if words[:2] == ["lab", "check"]]
    (sweep,) = [words[1:] for words in COMMANDS if words[:3] == ["lab", "sweep", "window.yaml"]]
    assert lab_(*sweep, *SMALLER["sweep"], "seed=0,1,2") == 0
    assert lab_(*words) == 0


@pytest.mark.slow
def test_a_script_needs_no_installation(tmp_path: Path) -> None:
    """As the page starts it, in a process of its own: its children, too, must know what it registers."""
    shutil.copy(THEIRS / "recipe.py", tmp_path)
    (words,) = [words for words in COMMANDS if words[0] == "python"]
    made = subprocess.run(
        [sys.executable, *words[1:], *SMALLER["train"]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-1].startswith("4 trained, 0 already there, 0 diverged, 0 failed")
    runs = store.read(tmp_path / "runs/train").runs
    assert set(runs["intervention.z_hinge.coefficient"]) == {0, 1e-2}
    assert runs["final_val_loss"].nunique() == 4  # the term is felt
    assert store.commands(tmp_path / "runs/train") == [shlex.join([*words, *SMALLER["train"]])]


@pytest.mark.usefixtures("folder")
def test_one_entry_point_brings_one_of_each_kind() -> None:
    for shelf, name in (
        *((INTERVENTIONS, name) for name in ("score_cap", "z_slope")),
        *((LINKS, "bounded_direction"), (PARAMETRIZATIONS, "root_width"), (PROBES, "output_logit_max")),
        *((DATA, "counting"), (MODELS, "window_mlp")),
    ):
        assert name in shelf
        assert name in list(shelf)


@pytest.mark.usefixtures("folder")
def test_numbers_need_no_files() -> None:
    """What the page says of the command line."""
    (said,) = re.findall(r"onto the command line:\n(.*?)\n\n", PAGE, re.DOTALL)
    words = " ".join(re.findall(r"`(.*?)`", said, re.DOTALL)).split()
    custom_models = [word for word in words if "custom_model" in word]
    assert len(words) == 4
    for asked in ([word for word in words if word not in custom_models], [*custom_models, "intervention=[]"]):
        assert lab_("train", "--cfg", "job", *asked) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("folder", "briefly", "undrawn")
@pytest.mark.parametrize("launcher", ["basic", pytest.param("local", marks=pytest.mark.slow)])
def test_one_group_of_a_kind_does_too(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    (info,) = Path().glob("*.dist-info")
    (info / "entry_points.txt").write_text("[lab.models]\nanything = own_recipe\n")
    asked = ["+custom_model.window_mlp.window=3", "intervention=[]", f"hydra/launcher={launcher}"]
    words = ["train", *SMALLER["train"], *asked]
    assert lab_(*words) == 0, capsys.readouterr().err
    assert {*store.read(Path("runs/train")).runs["custom_model"]} == {"window_mlp"}


@pytest.mark.usefixtures("folder")
def test_a_users_configs_are_shown_and_named() -> None:
    """Where the lab composes by itself, it looks into --config-dir as well."""
    assert lab_("sweep", "window.yaml", "--config-dir", "conf", "--cfg", "job") == 0
    assert lab_("train", "custom_model=window_mlp", "--cfg", "job", "--config-dir=conf") == 0
    assert not Path("runs").exists()


@pytest.mark.usefixtures("folder")
def test_former_words_choose_a_custom_model_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    Path("conf/arm").mkdir()
    Path("conf/arm/window.yaml").write_text("# @package _global_\ndefaults: [override /guest: window_mlp]\n")
    config = []
    for word in ("guest=window_mlp", "custom_model=window_mlp", "arm=window"):
        assert lab_("train", word, "--config-dir", "conf", "--cfg", "job") == 0
        out, error = capsys.readouterr()
        config.append(yaml.safe_load(out)["custom_model"])
        assert ("guest is now custom_model" in error) == word.startswith("guest")
    assert config == [{"window_mlp": {"window": 4}}] * 3
    Path("conf/custom_model").rename("conf/guest")
    assert lab_("train", "guest=window_mlp", "--config-dir", "conf", "--cfg", "job") == 2
    assert "guest is now custom_model; rename " in capsys.readouterr().err


REFUSED = [
    (["train", "--config-dir", "nowhere"], "'nowhere'"),
    (["train", "custom_model=windw_mlp", "--config-dir", "conf"], "nearest: window_mlp"),
    (["train", "custom_model=window_mlp"], "custom_model"),
    (["train", "+custom_model.window_mlp.window=0"], "above 0"),
    (["train", "+custom_model.window_mlp={}"], "custom_model.window_mlp.window"),
    (["coordcheck", "+custom_model.window_mlp.window=3", "model.width=16", "seed=0"], "coordcheck"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_bad_request_gets_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab_(*words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert said in error
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("def broken(:", "SyntaxError"),
        (
            "import lab, dataclasses as d\n@lab.register('intervention', 'z_loss')\n@d.dataclass\n"
            "class Z(lab.LossTerm):\n uses = ()\n def __call__(self, p): ...",
            "'z_loss'",
        ),
        (None, "'theirs'"),
    ],
)
@pytest.mark.usefixtures("afresh")
def test_a_package_that_cannot_be_imported_is_named_in_one_line(
    module: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, {"name": "their-package", "version": "1", "entry-points": {"lab.plugins": {"x": "theirs"}}})
    if module is not None:
        (tmp_path / "theirs.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert lab_("train", "data=synthetic") == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("lab: package their-package adds theirs to lab.plugins, which fails: ")
    assert said in error


def test_registering_says_what_is_wrong(afresh: None) -> None:
    class Plain:
        """No dataclass."""

    @dataclass(frozen=True)
    class Lacking:
        """Inherits from nothing."""

    for wrong, said in (
        (lambda: lab.register("interventoin", "x"), "nearest: intervention"),
        (lambda: lab.register("probe", "x"), "event"),
        (lambda: lab.register("probe", "x", event="grads"), "nearest: gradients"),
        (lambda: lab.register("intervention", "x")(Plain), "frozen dataclass"),
        (lambda: lab.register("intervention", "x")(Lacking), "lab.HookIntervention"),
        (lambda: lab.register("data", "x")(Lacking), "open and seed"),
    ):
        with pytest.raises(RequestError, match=re.escape(said)):
            wrong()
    assert "x" not in INTERVENTIONS


@pytest.mark.slow
def test_pip_installs_the_package(tmp_path: Path) -> None:
    shutil.copytree(THEIRS, tmp_path / "own")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(tmp_path / "own")], check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(HOME)])}
    words = [sys.executable, "-m", "lab", "list", "custom_models"]
    said = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("window_mlp  The last few tokens")


def test_what_can_be_heard_and_attached_to_is_what_there_is() -> None:
    fleet, heard = (
        Fleet(configs("", shared=("intervention=[pointwise_attention]",))),
        {"val_loss"},
    )  # the loop tells that
    with listening(lambda kind, where, *values: heard.add(kind)):
        fleet.step_function.update(fleet.state, fleet.feed.loader.batch(0), fleet.step_sr[0], fleet.shape_sr[0])
    elsewhere = {
        "noise",
        "batch",
        "sources",
        "clean_val_loss",
        "loss_scale",
        "successive_gradients",
        "initial_parameters",
        "rounding",
        "gradient_rounding",
        "router",
        "router_load",
    }  # told by other steps, and by the loop
    assert heard == set(hooks.ANNOUNCEMENTS) - elsewhere
    points = {point.kind for point in fleet.model.modules() if isinstance(point, HookPoint)}
    assert points == set(hooks.HOOK_POINTS)
    machine.release_memory()


@pytest.mark.usefixtures("folder", "undrawn")
def test_a_package_adds_a_test_to_the_crash_test(capsys: pytest.CaptureFixture[str]) -> None:
    added = battery.read_battery().tests["output_logits"]
    assert (added.passes, added.fails, added.fails_with) == (64, 512, None)
    tiny = ["data=synthetic", "model.width=16", "model.head_width=8", "model.depth=1", "batch_size=2", "seq_len=8"]
    assert lab_("stress", *tiny, "steps=4", "seed=0", "--tests", "output_logits", "--json", "hydra/launcher=basic") == 0
    (test,) = json.loads(capsys.readouterr().out)["tests"]
    assert test["name"] == "output_logits"
    assert test["seeds"][0] > 0


ENTRY = {"title": "t", "failure": "f", "source": "s", "metric": "loss", "unit": "nats", "passes": 0, "fails": 1}
ENTRY |= {"seconds": 1, "means": "m", "stressed": {"times_best": 10}}


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("depth", {}, "has one of this name"),
        ("mine", {"metrik": "loss"}, r"unknown key '.*tests.yaml: mine\.metrik'; nearest: metric"),
        ("mine", {"means": None}, r"mine\.means' is missing"),
        ("mine", {"stressed": None}, "needs 'stressed'"),
        ("mine", {"metric": "los"}, "unknown metric 'los'"),
        ("mine", {"cures": ["z_los"]}, "unknown cure 'z_los'"),
        ("mine", {"stressed": {"times_bset": 10}}, r"mine\.stressed\.times_bset.; nearest: times_best"),
        ("mine", {"passes": "high"}, r"mine\.passes must be a number, not .high."),
    ],
)
def test_a_test_that_cannot_be_added_is_named(tmp_path: Path, name: str, changed: dict[str, Any], told: str) -> None:
    entry = {key: value for key, value in (ENTRY | changed).items() if value is not None}
    path = tmp_path / "tests.yaml"
    path.write_text(json.dumps({"tests": {name: entry}}), encoding="utf-8")
    with pytest.raises(RequestError, match=told):
        lab.add_stress_tests(path)
    assert name == "depth" or name not in battery.read_battery().tests


@pytest.mark.usefixtures("afresh")
def test_a_test_needs_these_keys_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "tests.yaml"
    for key in ENTRY:
        lacking = {name: value for name, value in ENTRY.items() if name != key}
        path.write_text(json.dumps({"tests": {"mine": lacking}}), encoding="utf-8")
        with pytest.raises(RequestError, match=key):
            lab.add_stress_tests(path)
    path.write_text(json.dumps({"tests": {"mine": ENTRY}}), encoding="utf-8")
    lab.add_stress_tests(path)
    assert battery.read_battery().tests["mine"].stressed == battery.Place(times_best=10)
