"""From overrides to the config trees of points: Hydra composes the chosen files, and values are set in copies."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lab.core.errors import RequestError, nearest, similar_names
from lab.core.files import quoted
from lab.core.shipped import data_folder, files_with

Tree = Mapping[str, Any]

GIVEN = "requested"  # the name, in its config group, of a file that the user gave by its path
BARE = "without_numbers"  # the name of a recipe without the numbers of its interventions and its optimizer
# Launchers from other packages, and the extra of this one that installs them.
EXTRAS = {"submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray", "ray_aws": "ray"}
DEFAULT_STEPS = "${scale.steps}"  # as conf/config.yaml says
MAX_POINTS = 100_000  # of a sweep; more is a typing mistake, and would take hours to compose
KEY = re.compile(r"\w+(\.\w+)*")
MARK = "‽"  # begins the mark of a key, which shows the places where its value ends up

# Numbers of a config that follow from others: ``${divide:${scale.steps},2}``, an integer if the quotient is one, and
# ``${whole_quotient:${steps},40}``, the quotient rounded down, but at least 1.
OmegaConf.register_new_resolver("divide", lambda a, b: int(a / b) if (a / b).is_integer() else a / b, replace=True)
OmegaConf.register_new_resolver("whole_quotient", lambda a, b: max(1, a // b), replace=True)


@dataclass(frozen=True, eq=False)
class Word:
    """One override of a request, parsed.

    Attributes:
        text: the override as it was typed, such as ``+optimizer.lr=1e-3``.
        key: the key or the config group that it is about, without prefix.
        value: its value, None for a deletion; of a swept override an object of Hydra's.
        override: what Hydra's parser made of it.
        chooses_file: whether it chooses files of a config group, rather than a value.
        is_plain: whether it sets a key to a value that OmegaConf keeps as it is.
    """

    text: str
    key: str
    value: Any
    override: Override
    chooses_file: bool
    is_plain: bool

    @property
    def is_swept(self) -> bool:
        """Whether it gives several values."""
        return self.override.is_sweep_override()

    @property
    def is_setting(self) -> bool:
        """Whether it is about Hydra, such as its launcher, rather than about runs."""
        return self.override.is_hydra_override()


def parse(texts: Sequence[str], config_dir: Path | None = None) -> list[Word]:
    """Parse overrides.

    Args:
        texts: ``key=value``, ``group=name``, ``+key=value`` or ``~key``.
        config_dir: a folder of config files besides the lab's.

    Raises:
        RequestError: one of them is no override, or it gives a config group a value that names no file.
    """
    words = []
    with refusing():
        overrides = list(OverridesParser.create().parse_overrides(list(texts)))
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if (key, value) == ("intervention", {}):  # Hydra would merge it, and so change nothing
            words += parse([f"{override.get_key_element()}=[]"])
            continue
        is_group = key == "sweeps" or any((folder / key).is_dir() for folder in config_folders(config_dir))
        is_group &= key != "hydra"
        chooses_file = is_group and not isinstance(value, dict)
        if chooses_file and not (isinstance(value, str | list) or override.is_delete() or override.is_sweep_override()):
            given = "null" if value is None else "a number"
            raise RequestError(
                f"a group cannot be {given}; choose a file of it by name, or none of them, as in intervention=[]"
            )
        changes = not (override.is_add() or override.is_force_add() or override.is_delete())
        is_value = isinstance(value, int | float) or (isinstance(value, str) and "${" not in value and value != "???")
        is_plain = changes and is_value and not chooses_file and not override.package and bool(KEY.fullmatch(key))
        words.append(Word(str(override.input_line), key, value, override, chooses_file, is_plain))
    return words


def expand(words: Sequence[Word], config_dir: Path | None = None) -> list[list[Word]]:
    """Expand swept values into the words of every point; a key given twice keeps its last values.

    Raises:
        RequestError: a key is swept over an interval or nothing, values cannot be read, or there are more than
            ``MAX_POINTS`` points.
    """
    values = {word.key: _single_words(word, config_dir) for word in words}
    if empty := next((key for key, singles in values.items() if not singles), ""):
        raise RequestError(f"{empty} is swept over nothing")
    if math.prod(map(len, values.values())) > MAX_POINTS:
        raise RequestError(f"a sweep may have {MAX_POINTS} points, and this one has more")
    return [list(point) for point in itertools.product(*values.values())]


def _single_words(word: Word, config_dir: Path | None) -> list[Word]:
    """``a=1,2 -> a=1, a=2``."""
    if not word.is_swept:
        return [word]
    key = word.override.get_key_element()
    if not word.override.is_discrete_sweep():
        raise RequestError(f"{key} asks for an interval; give the values one by one: {key}=a,b,c")
    with refusing():
        if GlobalHydra.instance().is_initialized():  # a glob, such as model=*, asks which files there are
            word.override.config_loader = GlobalHydra.instance().config_loader()
        values = list(itertools.islice(word.override.sweep_string_iterator(), MAX_POINTS + 1))
    return parse([f"{key}={value}" for value in values], config_dir)


@contextmanager
def hydra_configs(files: Mapping[str, DictConfig] | None = None) -> Iterator[None]:
    """Within the block ``hydra.compose`` finds the lab's configs, and ``files`` as ``GIVEN`` in their groups."""
    for group, content in (files or {}).items():
        package = "_global_" if group in ("sweeps", "recipe") else None
        ConfigStore.instance().store(group=group, name=GIVEN, node=content, package=package)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(data_folder("conf")), version_base="1.3", job_name="lab"):
        yield
    GlobalHydra.instance().clear()


def config_folders(config_dir: Path | None = None) -> list[Path]:
    """The folder of the lab's configs, and that of --config-dir."""
    return [data_folder("conf"), *([config_dir] if config_dir else [])]


def groups(config_dir: Path | None = None) -> set[str]:
    """Names of the config groups that describe a run: the lab's own and those in the folder of --config-dir."""
    return {path.name for folder in config_folders(config_dir) for path in folder.iterdir() if path.is_dir()} - {
        "hydra"
    }


def compose_files(
    words: Sequence[Word], config_dir: Path | None = None, *, return_hydra_config: bool = False
) -> DictConfig:
    """The config that Hydra composes from the files that these words choose, within a block of ``hydra_configs``.

    Raises:
        RequestError: Hydra cannot compose it.
    """
    own = [f"hydra.searchpath=[{quoted(f'file://{config_dir}')}]"] if config_dir else []
    with refusing():
        config = hydra.compose("config", [*own, *(word.text for word in words)], return_hydra_config=True)
        choices = config.hydra.runtime.choices
        with open_dict(config):
            if recipe := choices.get("recipe"):
                optimizer = _keep_without_numbers(recipe, config_dir)
                others = [word.text for word in words if word.key != "recipe"]
                bare = hydra.compose("config", [*own, *others, f"recipe={BARE}"])
                config.intervention = OmegaConf.masked_copy(config.intervention, [*bare.intervention])
                if choices.optimizer != optimizer:
                    config.optimizer = bare.optimizer
            if not return_hydra_config:
                del config["hydra"]
        return config


def _keep_without_numbers(recipe: str, config_dir: Path | None) -> str | None:
    """Keep a recipe as ``BARE``, without the numbers of its interventions and its optimizer; returns the optimizer.

    They belong to what the recipe chooses, and would otherwise change, or switch on, what a request chooses instead.
    """
    content: Any
    if recipe == GIVEN:
        content = deepcopy(ConfigStore.instance().load(f"recipe/{GIVEN}.yaml").node)
    else:
        paths = (folder / "recipe" / f"{recipe}.yaml" for folder in config_folders(config_dir))
        content = OmegaConf.load(next(path for path in paths if path.is_file()))
    for key in ("intervention", "optimizer"):
        content.pop(key, None)
    ConfigStore.instance().store(group="recipe", name=BARE, node=content, package="_global_")
    choices = [entry for entry in content.get("defaults", ()) if "override /optimizer" in entry]
    return str(choices[-1]["override /optimizer"]) if choices else None


def with_values(config: DictConfig, words: Sequence[Word], config_dir: Path | None = None) -> DictConfig:
    """A copy of a config in which these words, which choose no files, are set as Hydra sets them.

    Raises:
        RequestError: a key is unknown, or exists already.
    """
    config = deepcopy(config)
    for word in words:
        with refusing():
            _set(config, word, config_dir)
    return config


def _set(config: DictConfig, word: Word, config_dir: Path | None) -> None:
    key, value, override = word.key, word.value, word.override
    if override.package is not None:
        raise RequestError(f"unknown group '{key}'; {nearest(key, groups(config_dir))}")
    before = OmegaConf.select(config, key, throw_on_missing=False)
    if override.is_delete():
        if before is None:
            raise _unknown_key(key, config_dir)
        if value is not None and value != before:
            raise RequestError(f"key '{key}' is {before}, so ~{key}={value} does not delete it")
        parent, _, name = key.rpartition(".")
        with open_dict(config):
            del (OmegaConf.select(config, parent) if parent else config)[name]
    elif override.is_add() and before is not None and not isinstance(value, dict | list):
        raise RequestError(f"key '{key}' exists already; give it without the +")
    else:
        try:
            OmegaConf.update(config, key, value, force_add=override.is_add() or override.is_force_add())
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise _unknown_key(max(key, error.full_key or "", key=len), config_dir) from None


class Composer:
    """Composes the config tree of one point after another, within a block of ``hydra_configs``.

    Hydra composes each choice of files once. Of points that differ in plain values alone, such as learning rate and
    seed, one tree is resolved: each of these values is replaced by a mark, and ends up where the mark does. A key whose
    mark reaches no place unchanged, since an expression is made of it, keeps its value instead.
    """

    def __init__(self, config_dir: Path | None = None) -> None:
        self.config_dir = config_dir
        self._of_files: dict[tuple[str, ...], DictConfig] = {}
        self._marked: dict[tuple[str, ...], Collection[str]] = {}
        self._templates: dict[tuple[str, ...], _Template] = {}

    def of_files(self, point: Sequence[Word]) -> DictConfig:
        """The config of the files that a point chooses, before its own values; not resolved.

        Raises:
            RequestError: Hydra cannot compose it.
        """
        files = [word for word in point if word.chooses_file]
        chosen = tuple(word.text for word in files)
        if chosen not in self._of_files:
            self.keep(files, compose_files(files, self.config_dir))
        return self._of_files[chosen]

    def keep(self, files: Sequence[Word], config: DictConfig) -> None:
        """Keep what Hydra composed from these files, without its own settings."""
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", "fleet")])
        OmegaConf.set_struct(own, True)  # so that only known keys can be set
        self._of_files[tuple(word.text for word in files)] = own

    def config(self, point: Sequence[Word]) -> DictConfig:
        """The config of a point, not resolved.

        Raises:
            RequestError: a word cannot be composed or set.
        """
        values = [word for word in point if not word.chooses_file]
        return with_values(self.of_files(point), values, self.config_dir)

    def tree(self, point: Sequence[Word]) -> Tree:
        """The resolved config tree of a point, equal to what Hydra composes from its words.

        Raises:
            RequestError: a word cannot be composed or set, or an expression cannot be resolved.
        """
        kind = tuple(word.key if word.is_plain else word.text for word in point)
        if kind not in self._marked:
            plain = {word.key for word in point if word.is_plain}
            self._marked[kind] = plain if self._reach(point, plain) else {k for k in plain if self._reach(point, {k})}
        marked = self._marked[kind]
        shared = tuple(word.key if word.key in marked else word.text for word in point)
        if shared not in self._templates:
            self._templates[shared] = self._template(point, marked)
        template = self._templates[shared]
        return _filled(template.tree, template.places, {word.key: word.value for word in point})

    def _reach(self, point: Sequence[Word], keys: Collection[str]) -> bool:
        """Whether the marks of these keys all end up unchanged, each in any number of places."""
        try:
            return self._template(point, keys).is_exact
        except RequestError:
            return False

    def _template(self, point: Sequence[Word], keys: Collection[str]) -> _Template:
        marked = [replace(word, value=f"{MARK}{word.key}") if word.key in keys else word for word in point]
        config = self.config(marked)
        with refusing():
            tree = resolved(config)
        places: dict[str, Any] = {}
        is_exact = _find_marks(tree, {f"{MARK}{key}": key for key in keys}, places)
        return _Template(tree, places, is_exact)


class _Template(NamedTuple):
    """A tree with marks; ``places`` has the same nesting, and at the leaves the key whose value belongs there."""

    tree: Tree
    places: dict[str, Any]
    is_exact: bool


def _find_marks(tree: Tree, keys: Mapping[str, str], places: dict[str, Any]) -> bool:
    """Note the places of marks in nested mappings; returns whether each is a value of its own, and none in a list."""
    is_exact = True
    for name, child in tree.items():
        if isinstance(child, Mapping):
            inner: dict[str, Any] = {}
            is_exact &= _find_marks(child, keys, inner)
            if inner:
                places[name] = inner
        elif isinstance(child, str) and child in keys:
            places[name] = keys[child]
        else:
            is_exact &= MARK not in str(child)
    return is_exact


def _filled(tree: Tree, places: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with values at their places; it shares all other parts."""
    changed = {
        name: values[place] if isinstance(place, str) else _filled(tree[name], place, values)
        for name, place in places.items()
    }
    return {**tree, **changed}


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


@contextmanager
def refusing() -> Iterator[None]:
    """Refuse the request for whatever Hydra or OmegaConf raises within the block.

    Wrap only calls that parse or compose what the user wrote.

    Raises:
        RequestError: Hydra or OmegaConf raised an error of any type.
    """
    try:
        yield
    except (RequestError, BrokenPipeError):
        raise
    except Exception as error:
        raise RequestError(_refusal(error)) from error


def _refusal(error: BaseException) -> str:
    """What an error of Hydra or OmegaConf is about, in a line; of chained errors the first that says it in a field."""
    if isinstance(error, OverrideParseException):
        return f"cannot read '{error.override}'; quote the value, as in \"key='value'\""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group == "hydra/launcher" and name in EXTRAS:
            return f"launcher {name!r} needs an extra: pip install 'instability-lab[{EXTRAS[name]}]'"
        known = error.options or [path.stem for path in data_folder("conf").glob(f"{group}/*.yaml")]
        return f"unknown {group} {name!r}; {nearest(name, known)}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {first}"
    return _refusal(error.__cause__) if error.__cause__ else first


@cache
def known_keys(config_dir: Path | None = None) -> Sequence[str]:
    """Every dotted key of the default config."""
    with hydra_configs():
        tree = OmegaConf.to_container(compose_files([], config_dir))
    keys: set[str] = set()

    def walk(node: Any, prefix: str) -> None:
        for key in node:
            keys.add(f"{prefix}{key}")
            if isinstance(node[key], dict):
                walk(node[key], f"{prefix}{key}.")

    walk(tree, "")
    return sorted(keys - {"fleet"})


def _unknown_key(key: str, config_dir: Path | None) -> RequestError:
    known, group = known_keys(config_dir), key.split(".")[0]
    if key in known:
        return RequestError(f"key '{key}' does not exist in every config asked for")
    if group in ("guest", "intervention"):  # groups that hold only what is switched on
        alike = nearest(key, [name for name in known if name.startswith(group)])
        return RequestError(f"unknown key '{key}'; {alike}; one of your own is added by +{key}=VALUE")
    if group in groups() and (files := files_with(key)):
        return RequestError(f"unknown key '{key}'; it belongs to {group}={'|'.join(files)}")
    alike = nearest(key, known) if similar_names(key, known) else "lab train --help lists the keys"
    return RequestError(f"unknown key '{key}'; {alike}")
