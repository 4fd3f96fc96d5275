"""Whatever has a name introduces itself and has its file in ``conf``; a wrong name is told the nearest."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import lab.data
import lab.records.trackers  # noqa: F401  (these fill two registries; ``pieces`` fills the others)
from lab.core import registry
from lab.core.errors import nearest
from lab.core.registry import INTERVENTIONS, KINDS, LINKS, PROBES, Registry, first_line
from lab.core.schema import build
from lab.model.config import ModelConfig
from lab.optim.optimizer import build_optimizer
from lab.probes.listener import ProbesConfig
from pieces import CONF, recipe
from small import tree
from test_without_studies import copy_lab

FILLED = [entries for kind, entries in KINDS.items() if kind != "model"]  # custom models are users' own
# Files that are an entry with other numbers.
PRESETS = {
    "data/c4": "huggingface",
    "data/c4_paper": "huggingface",
    "response/restart_from_newest": "restart_and_lower",
    "response/rewind_only": "rewind_and_skip",
    "response/rewind_skip_and_lower": "rewind_and_skip",
}
# Groups of conf whose files are the entries of a registry.
GROUPS = {
    name: KINDS[name]
    for name in ("data", "intervention", "parametrization", "schedule", "batch", "response", "loss_scale", "tracker")
} | {"bad_batches": KINDS["burst"]}
EMPTY = ("bad_batches/none", "response/none", "restarts/none", "loss_scale/none", "recipe/none")
PATHS = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.glob("*/*.yaml"))
FILES = [path for path in PATHS if path not in EMPTY]
# An arm is a bundle of keys without a name, a restart schedule a list of changes; tests of their own compose them.
NAMED = [file for file in FILES if not file.startswith(("arm/", "restarts/"))]


def files(group: str) -> list[str]:
    return [name.split("/")[1] for name in FILES if name.startswith(f"{group}/")]


def test_nearest() -> None:
    assert nearest("lerning_rate", ["learning_rate", "eps"]) == "nearest: learning_rate"
    assert nearest("lr", ["eps", "clip"]) == "known: clip, eps"
    assert nearest("lr", []) == "known: none"


def test_a_name_is_taken_once() -> None:
    shelf: Registry[Any] = Registry("thing", "things")
    shelf.register("one")(int)
    with pytest.raises(ValueError, match="thing 'one' is already registered"):
        shelf.register("one")(float)
    assert shelf["one"] is int


def test_every_entry_introduces_itself_in_one_line() -> None:
    for entries in FILLED:
        for name in entries:
            entry = registry.source(entries[name])
            line = first_line(entry)
            assert len(line.split()) >= 3, f"{entries.kind} {name} says nothing of itself"
            assert not line.startswith(f"{entry.__name__}("), "the docstring is the one dataclasses make up"


def test_a_group_has_one_file_per_entry() -> None:
    for group, entries in GROUPS.items():
        assert [name for name in files(group) if f"{group}/{name}" not in PRESETS] == list(entries)
    others = ("model", "optimizer", "probes", "scale", "arm", "restarts", "recipe")
    assert {name.split("/")[0] for name in FILES} == {*GROUPS, *others}


@pytest.mark.parametrize("group", sorted({file.split("/")[0] for file in NAMED}))
def test_every_file_says_its_own_name_and_builds(group: str) -> None:
    for file in files(group):
        values, name = recipe(group, file), PRESETS.get(f"{group}/{file}", file)
        if group == "intervention":  # the presence of a key
            assert list(values) == [name]
            build(INTERVENTIONS[name], values[name] or {}, f"intervention.{name}")
            continue
        assert (values[group] if group in ("scale", "recipe") else values)["name"] == name, file
        # references as the numbers that they may stand for
        rest = {key: int(value != "${seed}") if "${" in str(value) else value for key, value in values.items()}
        rest = {key: value for key, value in rest.items() if key not in ("name", "over")}
        if group == "optimizer":
            build_optimizer(values)
        elif group in GROUPS:
            build(GROUPS[group][name], rest, group)
        elif group in ("model", "probes"):
            build({"model": ModelConfig, "probes": ProbesConfig}[group], values, group)


def test_a_group_that_may_be_empty_has_a_file_for_that() -> None:
    assert [file for file in EMPTY if recipe(*file.split("/"))] == []


# Of use to whoever studies loss spikes
OF_ROUNDING = ("gradient_underflow", "saturation", "zero_gradients", "gain_octave", "gain_code")
OF_ROUTERS = tuple(recipe("probes", "experts")["names"][4:])
OF_DATA = ("noise_scale", "batch", "source_rows", "clean_val_loss")
OF_RECORDER = (  # which records them by itself
    *("block_kurtosis", "grad_below_eps", "moment_ratio", "moment_outliers", "stable_rank", "query_key_entropy"),
    *(f"grad_underflow_{name}" for name in ("fp16", "e4m3", "mx")),
    *("block_underflow_e4m3", "block_underflow_mx", "block_overflow_fp16", "block_overflow_mx"),
)
OF_UPDATES = (
    *("update_large", "update_bimodality", "update_descent_cosine", "update_curvature", "grad_lag_cosine"),
    "distance_from_init",
)


def test_every_link_is_in_a_recipe_and_every_probe_in_all() -> None:
    links = {name for name in LINKS if LINKS[name].__module__.startswith("lab.")}  # other tests register theirs
    assert {link for name in files("optimizer") for link in recipe("optimizer", name)["chain"]} == links
    # others are of micro-batches, of low precision, or cost a pass over the weights
    assert sorted(recipe("probes", "all")["names"]) == sorted(
        {*PROBES}
        - {"head_common_mode", "log_z_std", "loss_scale"}
        - {*OF_DATA, *OF_UPDATES, *OF_ROUNDING, *OF_ROUTERS, *OF_RECORDER}
    )
    assert recipe("probes", "none")["names"] == []


# What only studies use, and the lab has in any case.
OF_STUDIES = ["data=mixture", "response=branch", "intervention=[kappa_transplant]", "probes.names=[gain_code]"]
WITHOUT_STUDIES = """
import json, sys
from lab import Fleet, run_config
from lab.core.errors import RequestError
from lab.training.loop import train

known, *added = map(json.loads, sys.argv[1:])
print(sum(1 for _ in train(Fleet([run_config(known)]))))
for tree in added:
    try:
        run_config(tree)
    except RequestError as refusal:
        print(refusal)
"""


@pytest.mark.slow
def test_without_studies_a_run_trains_also_with_what_only_they_use(tmp_path: Path) -> None:
    copy_lab(tmp_path, "studies")
    trees = [json.dumps(tree(*words)) for words in (["steps=3"], *([words] for words in OF_STUDIES))]
    asked = subprocess.run(
        [sys.executable, "-c", WITHOUT_STUDIES, *trees], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    updates, *refusals = asked.stdout.splitlines()
    assert updates == "4"  # and one result before the first
    assert refusals == []


# Files in which the formulas of interventions and links are written a second time, and those that others test.
FORMULAS = ("test_intervention_formulas", "test_architecture_arms", "test_optimizer_formulas", "test_optimizer_arms")
TESTED_ELSEWHERE = {
    *("balance", "experts", "router_bias", "router_z"),  # tests/test_experts.py
    *("fp16_gelu", "fp16_residual", "fp16_softmax"),  # tests/test_fp16.py
    *("embedding_rmsnorm", "fixed_gains", "gain_lr", "kappa_transplant", "mu_centering", "pointwise_attention"),
    *("qk_layernorm", "qk_layernorm_model", "sub_ln", "lr_factor", "shrink_embedding", "z_loss", "clip_adamw"),
}


def asserted_names(source: str) -> set[str]:
    """The words of the code of a test file that some test asserts something with: no comments and no docstrings.

    They are names and strings in tests that assert, in what decorates these, and in what they use of the same file.
    """
    tree = ast.parse(source)
    homes = dict[str, ast.stmt]()  # by what is defined in the file
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        homes |= {name: node for target in targets if (name := getattr(target, "id", getattr(target, "name", "")))}
    words = set[str]()
    for test in (node for name, node in homes.items() if name.startswith("test_")):
        used, waiting = list[ast.stmt](), [test]
        while waiting:
            if (node := waiting.pop()) not in used:
                used.append(node)
                names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
                waiting += [homes[name] for name in names if name in homes]
        if any(map(asserts, used)):
            words = words.union(*map(words_of, used))
    return words


def words_of(node: ast.stmt) -> set[str]:
    """The names and the words of strings in a statement, but for those of docstrings."""
    docs = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Expr)}
    words = set[str]()
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                words.add(name)
            case ast.Constant(value=str(text)) if id(each) not in docs:
                words |= {*re.findall(r"\w+", text)}
    return words


def asserts(node: ast.stmt) -> bool:
    """Whether a statement compares values."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    names = [getattr(function, "attr", getattr(function, "id", "")) for function in called]
    return any(isinstance(each, ast.Assert) for each in ast.walk(node)) or any("assert" in name for name in names)


def without_formula(sources: Iterable[str]) -> set[str]:
    """Interventions and links of the lab that no test of these files asserts anything of."""
    entries = {**{name: INTERVENTIONS[name] for name in INTERVENTIONS}, **{name: LINKS[name] for name in LINKS}}
    ours = {name: entry for name, entry in entries.items() if entry.__module__.startswith("lab.")}
    words = set[str]().union(*map(asserted_names, sources))
    return {name for name, entry in ours.items() if not {name, entry.__name__} & words}


def test_every_intervention_and_link_has_its_formula_in_a_test() -> None:
    sources = [Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in FORMULAS]
    assert without_formula(sources) <= TESTED_ELSEWHERE


@pytest.mark.parametrize(
    "mention",
    [
        "# lion",
        '"""lion"""',
        "from lab.optim.links.momentum import Lion",
        "def test_lion():\n    Lion()",
        "NAMES = ['lion']",
    ],
)
def test_a_mention_is_no_formula(mention: str) -> None:
    assert "lion" in without_formula([f"{mention}\n"])
    assert "lion" not in without_formula(["NAMES = ['lion']\ndef test_lion():\n    assert made(NAMES) == 1\n"])
