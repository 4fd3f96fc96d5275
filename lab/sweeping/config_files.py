"""Config files: which of them a request chooses, by rules of Hydra's defaults lists, and what they make together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lab.core.errors import RequestError, nearest
from lab.core.files import read_text
from lab.core.schema import key_now
from lab.core.shipped import data_folder, merged

GIVEN = "requested"  # the name, in its config group, of a file that the user gave by its path
PACKAGE = re.compile(r"\s*# *@package +([\w.]+)")
# An entry of a defaults list: whether it overrides another, whether its group is named from the top, and the group.
ENTRY = re.compile(r"|(override )?(/?)([\w-]+(?:/[\w-]+)*)")
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # of a file, which cannot lead out of the folders of configs


def config_folders(config_dir: Path | None = None) -> list[Path]:
    """The folder of the lab's configs, and that of --config-dir."""
    return [data_folder("conf"), *([config_dir] if config_dir else [])]


def names_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Names of the files of a config group."""
    return sorted({path.stem for folder in config_folders(config_dir) for path in folder.glob(f"{group}/*.yaml")})


def groups(config_dir: Path | None = None) -> set[str]:
    """Names of the config groups that describe a run: the lab's own and those in the folder of --config-dir."""
    return {path.name for folder in config_folders(config_dir) for path in folder.iterdir() if path.is_dir()} - {
        "hydra"
    }


class ConfigFile(NamedTuple):
    """A config file: its content, the files that it chooses, and the key at which its header says that it belongs."""

    content: Mapping[str, Any]
    defaults: Sequence[Any]
    package: str


def _config_file(config: Any, package: str = "") -> ConfigFile:
    content: Any = OmegaConf.to_container(config)
    defaults = content.pop("defaults", [])
    if not isinstance(defaults, list):
        raise RequestError(f"defaults must be a list, not {defaults!r}")
    return ConfigFile(content, defaults, package)


def _read_file(path: Path) -> ConfigFile:
    text = read_text(path)
    package = PACKAGE.match(text)
    try:
        return _config_file(OmegaConf.create(text), package[1] if package else "")
    except Exception as error:  # the YAML reader raises errors of many types
        raise RequestError(f"{path} cannot be read: {shorten(str(error), 300)}") from None


@cache
def _file_of_the_lab(path: Path) -> ConfigFile:
    return _read_file(path)


class Files:
    """The config files that a request may choose.

    Args:
        config_dir: a folder of config files besides the lab's.
        given: the contents of files that were given by their paths, by config group; their name in it is ``GIVEN``.
    """

    def __init__(self, config_dir: Path | None, given: Mapping[str, DictConfig]) -> None:
        self.config_dir = config_dir
        self.known = {
            (group, GIVEN): _config_file(content, "_global_" if group in ("sweeps", "recipe") else "")
            for group, content in given.items()
        }

    def read(self, group: str, name: str) -> ConfigFile:
        """A file of a config group; those of the lab are read once.

        Raises:
            RequestError: it does not exist, or cannot be read.
        """
        if not NAME.fullmatch(name):
            raise RequestError(f"files of {group} are chosen by their names, not by {name!r}")
        if (group, name) not in self.known:
            folders = [folder / group for folder in config_folders(self.config_dir)]
            paths = [folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()]
            if not paths:
                raise RequestError(f"unknown {group} {name!r}; {nearest(name, names_of(group, self.config_dir))}")
            of_the_lab = paths[0].is_relative_to(data_folder("conf"))
            self.known[group, name] = (_file_of_the_lab if of_the_lab else _read_file)(paths[0])
        return self.known[group, name]


class Chosen(NamedTuple):
    """What the files make that a request chooses.

    Attributes:
        config: their keys and values, merged and not resolved.
        choices: the name of the file of each group, or the names.
        sweeper: what they set of ``hydra.sweeper``.
    """

    config: DictConfig
    choices: Mapping[str, Any]
    sweeper: Mapping[str, Any]


class _Walk:
    """A walk through the config files that a request chooses, in the order in which they are merged.

    The rules are those of Hydra's defaults lists: a file may choose files of its own group and of others, and override
    choices. Words win over files, and later files over earlier ones.
    """

    def __init__(self, files: Files, words: Sequence[Override]) -> None:
        self.files = files
        self.overrides: dict[str, Any] = {}  # by group
        self.by_recipe: dict[str, Any] = {}  # what recipes override
        self.added: list[Any] = []  # entries of the defaults list
        self.deleted: dict[str, Any] = {}  # by group, the file that is not wanted; None for any
        self.left_out: set[str] = set()
        self.choices: dict[str, Any] = {}  # by group, in the end
        for word in words:
            group = word.key_or_group
            if word.package is not None or word.is_force_add():
                raise RequestError(f"{word.input_line}: choose a file of a group by {group}=NAME")
            if word.is_delete():
                self.deleted[group] = word.value()
            elif word.is_add():
                self.added.append({group: word.value()})
            else:
                self.overrides[group] = word.value()
        self.parts = self._parts("", "config", "")
        if unused := self.deleted.keys() - self.left_out:
            raise RequestError(f"~{min(unused)} leaves out a file that is not chosen")
        for group, name in self.overrides.items():
            if group not in self.choices:
                raise RequestError(f"no file of {group} is chosen by default; +{group}={name} adds one")
            if {*_names(self.choices[group])} != {*_names(name)} and group not in self.deleted:
                raise RequestError(
                    f"a file chooses {group}={name}, after it was chosen; the command line may choose it"
                )

    def _parts(self, group: str, name: str, package: str) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Groups, packages and contents of a file and of those that it chooses."""
        file = self.files.read(group, name)
        if file.package:
            package = "" if file.package == "_global_" else file.package
        entries = [*file.defaults] if "_self_" in file.defaults else [*file.defaults, "_self_"]
        known = [self._entry(entry, group) for entry in [*entries, *([] if group else self.added)]]
        of_hydra = [target for target, _, _ in known if target.startswith("hydra/")]
        of_hydra += [f"hydra.{key}" for key in file.content.get("hydra", ()) if key != "sweeper" and not package]
        if group and of_hydra:
            raise RequestError(f"{group}={name} may not set {of_hydra[0]}; the command line may")
        known = [entry for entry in known if not entry[0].startswith("hydra/")]
        for target, value, is_override in known:
            if is_override:
                self.overrides.setdefault(target, value)
                if group == "recipe":
                    self.by_recipe.setdefault(target, value)
        parts = []  # from the last to the first, so that later files override first
        for target, value, is_override in reversed(known):
            if value == "_self_":
                parts.append([(group, package, file.content)])
            elif target == group:
                parts.append(self._parts(group, value, package))
            elif not is_override:
                at = ".".join(filter(None, (package, target.removeprefix(f"{group}/").replace("/", "."))))
                key = target if at == target.replace("/", ".") else f"{target}@{at}"  # as Hydra calls it elsewhere
                parts += [self._parts(target, name, at) for name in reversed(self._choose(key, value))]
        return [part for of_entry in reversed(parts) for part in of_entry]

    def _entry(self, entry: Any, group: str) -> tuple[str, Any, bool]:
        """The group that an entry of a defaults list is about, the names of its files, and whether it overrides."""
        key, value = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else ("", entry)
        match, names = ENTRY.fullmatch(str(key)), value if isinstance(value, list) else [value]
        if not match or not all(isinstance(name, str) and NAME.fullmatch(name) for name in names if value is not None):
            raise RequestError(f"defaults must choose files by their names, as in 'override /model: d64', not {entry}")
        if not key:
            return group, value, False
        return (key_now(match[3]) if match[2] or not group else f"{group}/{match[3]}"), value, bool(match[1])

    def _choose(self, group: str, default: Any) -> Sequence[str]:
        """The names of the files of a group."""
        choice = self.overrides.get(group, default)
        if group in self.deleted and self.deleted[group] in (None, choice):
            choice = None
            self.left_out.add(group)
        names = _names(choice)
        if group in self.choices:
            if not isinstance(choice, list) and not isinstance(self.choices[group], list):
                raise RequestError(f"{group} is chosen already; give it without the +, or by 'override /{group}: NAME'")
            choice = [*names, *_names(self.choices[group])]
        self.choices[group] = choice
        self.by_recipe.setdefault(group, default)
        return names


def _names(choice: Any) -> Sequence[str]:
    return choice if isinstance(choice, list) else [] if choice is None else [choice]


def _where_it_applies(content: Mapping[str, Any], walk: _Walk) -> Mapping[str, Any]:
    """A recipe without the numbers of interventions and optimizers that a request chooses others instead of.

    They would otherwise change, or switch on, what it chooses.
    """
    kept = dict(content)
    if walk.choices["optimizer"] != walk.by_recipe["optimizer"]:
        kept.pop("optimizer", None)
    if isinstance(numbers := content.get("intervention"), Mapping):
        chosen = _names(walk.choices["intervention"])
        kept["intervention"] = {name: value for name, value in numbers.items() if name in chosen}
    return kept


def merge_files(files: Files, words: Sequence[Override]) -> Chosen:
    """What the files make that these words choose.

    Raises:
        RequestError: a file does not exist, or the choices make no sense.
    """
    walk = _Walk(files, words)
    tree: Mapping[str, Any] = {}
    for group, package, content in walk.parts:
        applies = _where_it_applies(content, walk) if group == "recipe" else content
        for key in reversed(package.split(".") if package else []):
            applies = {key: applies}
        tree = merged(tree, applies)
    config = OmegaConf.create({key: value for key, value in tree.items() if key not in ("hydra", "fleet")})
    OmegaConf.set_struct(config, True)  # so that only known keys can be set
    return Chosen(config, walk.choices, tree["hydra"].get("sweeper", {}))
