"""The files that come with the lab: the default recipe of `conf/`, the questions of `sweeps/`, committed results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lab.core.files import read_text

DEFAULT_SCALE = "cpu"


def data_folder(name: str) -> Path:
    """``conf``, ``sweeps`` or ``results``: in ``lab/yaml`` of an installed package, beside ``lab`` in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "yaml" / name
    return installed if installed.is_dir() else package.parent / name


def results() -> Path:
    """The folder of results: ``results`` here if it holds any, or else the committed ones.

    Of these an installed package has the records of the board and the verdicts on all claims.
    """
    here = Path("results")
    return here if any(here.glob("*/store.json")) else data_folder("results")


@cache
def sweeps() -> Mapping[str, Path]:
    """The sweeps that come with the lab, by name."""
    return {path.stem: path for path in sorted(data_folder("sweeps").glob("*.yaml"))}


def at_scale(refusal: object, scale: Any) -> str:
    """A refusal, with the name of the scale, given by its values, unless it is the default one.

    The data or the number in question may come from there.
    """
    name = scale.get("name") if isinstance(scale, Mapping) else None
    return f"{refusal} (scale={name})" if name not in (None, DEFAULT_SCALE) else str(refusal)


@cache
def files_with(key: str) -> Sequence[str]:
    """Names of the files of a config group that hold this dotted key, which begins with the group."""
    group, _, rest = key.partition(".")
    return [path.stem for path in sorted((data_folder("conf") / group).glob("*.yaml")) if _holds(load(path), rest)]


def _holds(tree: Any, key: str) -> bool:
    first, _, rest = key.partition(".")
    return isinstance(tree, Mapping) and first in tree and (not rest or _holds(tree[first], rest))


def load(path: Path) -> Any:
    """Read a YAML file of the lab, in plain values."""
    return yaml.load(read_text(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def comment_of(text: str) -> str:
    """The first line of comment of a YAML file, given its text, which introduces it in lists; empty without one."""
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")]
    return next((line for line in lines if not line.startswith("@package")), "")


def question(sweep: str) -> str:
    """The question of a sweep, given the text of its file: its first comment, up to the first question mark.

    A comment without one is taken up to a line such as ``# Source: ...`` or an empty one; empty without a comment.
    """
    lines: list[str] = []
    for line in sweep.splitlines():
        comment = line.removeprefix("#").strip()
        if not line.startswith("#") or not comment or (lines and re.match(r"[\w-]+: ", comment)):
            break
        lines.append(comment)
        if comment.endswith("?"):
            break
    first, mark, _ = " ".join(lines).partition("? ")
    return f"{first}?" if mark else first


@cache
def default_recipe(scale: str = DEFAULT_SCALE) -> Mapping[str, str | float]:
    """The default recipe in the numbers of a scale, by dotted key; a switched-on intervention is ``on``.

    Settings of the interventions that are off count too: their values where one is switched on. A value that only
    Hydra can compute is left out.
    """
    config = _load("config")
    choices = {
        group: choice for entry in config["defaults"] if isinstance(entry, dict) for group, choice in entry.items()
    }
    choices |= {"scale": scale} if (data_folder("conf") / "scale" / f"{scale}.yaml").is_file() else {}
    tree = {key: value for key, value in config.items() if key not in ("defaults", "hydra")}
    for group, choice in choices.items():
        if isinstance(choice, str) and " " not in group and "/" not in group:
            content = _load(f"{group}/{choice}")
            tree = merged(tree, content if group in content else {group: content})
    for path in (data_folder("conf") / "intervention").glob("*.yaml"):
        tree["intervention"] |= _load(f"intervention/{path.stem}")
    values = _flat(tree)
    values = {key: values.get(value[2:-1], "") if _refers(value) else value for key, value in values.items()}
    plain = {key: _number(value) for key, value in values.items() if not str(value).startswith("${") and value != ""}
    return plain | {f"intervention.{name}": "on" for name in choices["intervention"]}


@cache
def optimizer_numbers(name: str) -> Mapping[str, str | float]:
    """The numbers in the file of an optimizer of the lab, by dotted key; empty for another optimizer."""
    files = {path.stem: path for path in (data_folder("conf") / "optimizer").glob("*.yaml")}
    return {key: _number(value) for key, value in _flat(load(files[name])).items()} if name in files else {}


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = load(data_folder("conf") / f"{name}.yaml")
    return content


def merged(tree: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings with the values of a later one over them, as Hydra merges a file of its defaults list."""
    result = dict(tree)
    for key, value in later.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), Mapping):
            result[key] = merged(tree[key], value)
        elif value != "???" or key not in tree:  # a value that is missing replaces none
            result[key] = value
    return result


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings, by dotted key; lists and empty values are left out."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            leaves[f"{prefix}{key}"] = value
    return leaves


def _refers(value: Any) -> bool:
    return bool(re.fullmatch(r"\$\{[\w.]+\}", str(value)))


def _number(value: str | float) -> str | float:
    """A float where the text is one: YAML takes ``1e-2`` for text."""
    try:
        return float(value)
    except ValueError:
        return str(value)
