"""Composing configs with Hydra: one compose function, one parser, and one line for whatever they refuse."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.cli import hydra_app
from lab.core.errors import RequestError, nearest, similar_names
from lab.core.shipped import files_with

CONFIG_DIR_FLAGS = ("--config-dir", "-cd")
GIVEN = "requested"  # the name, in its config group, of a file that the user gave by its path
# Launchers from other packages, and the extra of this one that installs them.
EXTRAS = {"submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray", "ray_aws": "ray"}
DEFAULT_STEPS = "${scale.steps}"  # as conf/config.yaml says
MAX_POINTS = 100_000  # of a sweep; more is a typing mistake, and would take hours to compose


@dataclass(frozen=True)
class Request:
    """A request: everything that a command line asks for.

    Attributes:
        overrides: all that Hydra composes: keys of runs, and settings of the sweeper and the launcher.
        config_dir: the folder of --config-dir, which is searched for configs, too; None without one.
        files: the contents of files that were given by their paths, by config group.
        flags: Hydra's flags that only show something, and their values; empty if runs are to be trained.
        command: the command line as the user can type it again.
        question: the question that the sweep file asks in its first comment; empty without one.
    """

    overrides: Sequence[str] = ()
    config_dir: Path | None = None
    files: Mapping[str, DictConfig] = field(default_factory=dict)
    flags: Sequence[str] = ()
    command: str = ""
    question: str = ""


@contextmanager
def reading_request(config_dir: Path | None = None) -> Iterator[None]:
    """Refuse the request for whatever Hydra or OmegaConf raises within the block.

    Wrap only calls that parse or compose what the user wrote.

    Args:
        config_dir: the folder of --config-dir, whose keys a refusal may suggest.

    Raises:
        RequestError: Hydra or OmegaConf raised an error of any type.
    """
    try:
        yield
    except (RequestError, BrokenPipeError):
        raise
    except Exception as error:
        raise RequestError(one_line(error, config_dir)) from error


def parse(words: Sequence[str], config_loader: Any = None) -> list[Override]:
    """Parse overrides.

    Raises:
        RequestError: a word is no override.
    """
    with reading_request():
        return list(OverridesParser.create(config_loader=config_loader).parse_overrides(list(words)))


def is_override(word: str) -> bool:
    """Whether a word is an override, ``key=value`` or the deletion ``~key``, and no flag."""
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def take_config_dir(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder of --config-dir, if it is given, and the other words.

    Raises:
        RequestError: the folder does not exist.
    """
    config_dir, others = None, []
    remaining = iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag not in CONFIG_DIR_FLAGS:
            others.append(word)
            continue
        folder = value if equals else next(remaining, "")
        if not folder or not Path(folder).is_dir():
            raise RequestError(f"{flag} names no folder: {folder!r}")
        config_dir = Path(folder).absolute()
    return config_dir, others


def check_keys(node: Any, file: str = "", prefix: str = "") -> None:
    """Refuse a key that is no text, such as a number, in nested mappings and lists.

    Args:
        node: plain values.
        file: opens the refusal, where a file holds them.
        prefix: the dotted keys that lead to the node.

    Raises:
        RequestError: there is one.
    """
    for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
        if isinstance(node, Mapping) and not isinstance(key, str):
            raise RequestError(f"{file}unknown key '{prefix}{key}': {key!r} is no text")
        if isinstance(child, (Mapping, list)):
            check_keys(child, file, f"{prefix}{key}.")


def resolved(config: DictConfig) -> dict[str, Any]:
    """The plain tree of a run's config; ``tokens`` replaces the default number of steps, but not a given one.

    Raises:
        OmegaConfBaseException: a key refers to a key that does not exist, or has no value.
        RequestError: a key is no text.
    """
    tree: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    check_keys(tree)
    if tree.get("tokens") is not None:
        given: Any = OmegaConf.to_container(config)
        if given["steps"] == DEFAULT_STEPS:
            return {**tree, "steps": None}
    return dict(tree)


def compose_config(request: Request, overrides: Sequence[str], **options: Any) -> DictConfig:
    """The config that Hydra composes from these overrides, which may choose the files of a request.

    Raises:
        RequestError: Hydra cannot compose it.
    """
    with config_loader(request), reading_request(request.config_dir):
        return compose("config", list(overrides), **options)


@contextmanager
def config_loader(request: Request) -> Iterator[Any]:
    """Yield Hydra's loader of the lab's configs and of those that a request adds."""
    store_files(request)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(hydra_app.data_folder("conf")), version_base="1.3", job_name="lab"):
        loader: Any = GlobalHydra.instance().config_loader()
        search_path = loader.get_search_path()
        if folder := request.config_dir:
            search_path.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema"))
        loader.repository.initialize_sources(search_path)
        yield loader
    GlobalHydra.instance().clear()


def store_files(request: Request) -> None:
    """Let Hydra find the files of a request, each as ``GIVEN`` in its group."""
    for group, content in request.files.items():
        package = "_global_" if group == "sweeps" else None
        ConfigStore.instance().store(group=group, name=GIVEN, node=content, package=package)


def groups(config_dir: Path | None) -> set[str]:
    """Names of the config groups that describe a run: the lab's own and those in the folder of --config-dir."""
    folders = [hydra_app.data_folder("conf"), *([config_dir] if config_dir else [])]
    return {path.name for folder in folders for path in folder.iterdir() if path.is_dir()} - {"hydra", "fleet"}


@cache
def known_keys(config_dir: Path | None = None) -> Sequence[str]:
    """Every dotted key of the default config."""
    with config_loader(Request(config_dir=config_dir)):
        tree = OmegaConf.to_container(compose("config"))  # without ``reading_request``, which asks for these keys
    keys: set[str] = set()

    def walk(node: Any, prefix: str) -> None:
        for key in node:
            keys.add(f"{prefix}{key}")
            if isinstance(node[key], dict):
                walk(node[key], f"{prefix}{key}.")

    walk(tree, "")
    return sorted(keys - {"fleet"})


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """Expand swept values into the overrides of every point; a key given twice keeps its last values.

    Raises:
        RequestError: a key is swept over an interval or an empty list, values cannot be read, or there are more than
            ``MAX_POINTS`` points.
    """
    values: dict[str, list[str]] = {}
    for override in overrides:
        values[override.key_or_group] = _single_overrides(override)
    if empty := next((key for key, words in values.items() if not words), ""):
        raise RequestError(f"{empty} is swept over nothing")
    if math.prod(map(len, values.values())) > MAX_POINTS:
        raise RequestError(f"a sweep may have {MAX_POINTS} points, and this one has more")
    return [list(point) for point in itertools.product(*values.values())]


def _single_overrides(override: Override) -> list[str]:
    """``a=1,2 -> a=1, a=2``."""
    with reading_request():
        key = override.get_key_element()
        if override.is_delete():
            return [str(override.input_line)]
        if not override.is_sweep_override():
            return [f"{key}={_none_chosen(key, override.get_value_element_as_str())}"]
        if override.is_discrete_sweep():
            values = itertools.islice(override.sweep_string_iterator(), MAX_POINTS + 1)
            return [f"{key}={_none_chosen(key, value)}" for value in values]
    raise RequestError(f"{key} asks for an interval; give the values one by one: {key}=a,b,c")


def _none_chosen(key: str, value: str) -> str:
    """The value, but ``intervention={}``, by which Hydra would change nothing, chooses none."""
    return "[]" if (key, value) == ("intervention", "{}") else value


def one_line(error: BaseException, config_dir: Path | None = None) -> str:
    """The message of an error of Hydra or OmegaConf: one line that names the nearest valid choice."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read '{error.override}'; quote the value, as in \"key='value'\""
    if ("raised while composing config" in text or "Error merging override" in text) and error.__cause__ is not None:
        return one_line(error.__cause__, config_dir)
    if match := re.search(r"Config group override must be a string or a list. Got (\w+)", text):
        given = {"NoneType": "null"}.get(match[1], "a number")
        return f"a group cannot be {given}; choose a file of it by name, or none of them, as in intervention=[]"
    if "Cannot merge DictConfig with ListConfig" in text:
        return "a file has a list where keys and values belong; 'override /intervention: []' is among its defaults"
    if match := re.search(r"already at '([^']*)'", text):
        return f"key '{match[1]}' exists already; give it without the +"
    if match := re.search(r"Could not (?:find|load) '([\w/]+)/([^/']+)'", text):
        return _unknown_choice(match[1], match[2], text)
    if match := re.search(r"Could not (?:override|append|delete|find).*?'[+~]*([^'=\n]*)", text):
        return _unknown_key(max(match[1], getattr(error.__cause__, "full_key", None) or "", key=len), config_dir)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {text.splitlines()[0]}"
    message = (text.split("raised while composing config:\n")[-1].splitlines() or [type(error).__name__])[0].rstrip(
        ".:"
    )
    where = re.search(r"full_key: (\S+)", text)
    return f"{where[1]}: {message}" if where else message


def _unknown_choice(group: str, name: str, text: str) -> str:
    if group == "hydra/launcher" and name in EXTRAS:
        return f"launcher {name!r} needs an extra: pip install 'instability-lab[{EXTRAS[name]}]'"
    listed = re.search(r"Available options in '[^']*':\n((?:\t.*\n?)*)", text)
    files = hydra_app.data_folder("conf").glob(f"{group}/*.yaml")
    return f"unknown {group} {name!r}; {nearest(name, listed[1].split() if listed else [path.stem for path in files])}"


def _unknown_key(key: str, config_dir: Path | None) -> str:
    known, group = known_keys(config_dir), key.split(".")[0]
    if key in known:
        return f"key '{key}' does not exist in every config asked for"
    if group in ("guest", "intervention"):  # groups that hold only what is switched on
        alike = nearest(key, [name for name in known if name.startswith(group)])
        return f"unknown key '{key}'; {alike}; one of your own is added by +{key}=VALUE"
    if group in groups(None) and (files := files_with(key)):
        return f"unknown key '{key}'; it belongs to {group}={'|'.join(files)}"
    alike = nearest(key, known) if similar_names(key, known) else "lab train --help lists the keys"
    return f"unknown key '{key}'; {alike}"
