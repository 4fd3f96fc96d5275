"""From overrides to the config trees of points: Hydra composes the chosen files, and values are set in copies."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lab.core.errors import RequestError, nearest, similar_names
from lab.core.shipped import files_with
from lab.sweeping.config_files import Chosen, Files, config_folders, groups, merge_files, names_of

Tree = Mapping[str, Any]

# Launchers from other packages, and the extra of this one that installs them.
EXTRAS = {"submitit_slurm": "slurm", "submitit_local": "slurm", "ray": "ray", "ray_aws": "ray"}
DEFAULT_STEPS = "${scale.steps}"  # as conf/config.yaml says
MAX_POINTS = 100_000  # of a sweep; more is a typing mistake, and would take hours to compose
KEY = re.compile(r"\w+(\.\w+)*")
NAMES = re.compile(r"[\w-]+")
# An expression that refers to a key whose name another expression gives.
COMPUTED = re.compile(r"\$\{[\s.\[]*\$\{|\boc\..*\$\{")

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
    # a word that adds a key stays, so that a later one may set it
    values = {(word.key, word.override.is_add()): _single_words(word, config_dir) for word in words}
    if empty := next((key for (key, _), singles in values.items() if not singles), ""):
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
        files: Any = SimpleNamespace(get_group_options=lambda group, **_: names_of(group, config_dir))
        word.override.config_loader = files  # which a glob, such as model=*, asks
        values = list(itertools.islice(word.override.sweep_string_iterator(), MAX_POINTS + 1))
    return parse([f"{key}={value}" for value in values], config_dir)


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
    """Composes the config tree of one point after another, as Hydra composes its words.

    Files are merged once for each choice of files. Points that differ in plain values alone, such as learning rate and
    seed, share a config, in which these values are set; of it is resolved again only what may depend on them.

    Args:
        config_dir: a folder of config files besides the lab's.
        files: the contents of files that were given by their paths, by config group; their name in it is ``GIVEN``.
    """

    def __init__(self, config_dir: Path | None = None, files: Mapping[str, DictConfig] | None = None) -> None:
        self.config_dir = config_dir
        self._files = Files(config_dir, files or {})
        self._of_files: dict[tuple[str, ...], Chosen] = {}
        self._shared: dict[tuple[str, ...], _Shared] = {}

    def of_files(self, point: Sequence[Word]) -> Chosen:
        """What the files make that a point chooses, before its own values.

        Raises:
            RequestError: a file does not exist, or the choices make no sense.
        """
        words = [word for word in point if word.chooses_file]
        chosen = tuple(word.text for word in words)
        if chosen not in self._of_files:
            with refusing():
                self._of_files[chosen] = merge_files(self._files, [word.override for word in words])
        return self._of_files[chosen]

    def config(self, point: Sequence[Word]) -> DictConfig:
        """The config of a point, not resolved.

        Raises:
            RequestError: a word cannot be composed or set.
        """
        values = [word for word in point if not word.chooses_file]
        return with_values(self.of_files(point).config, values, self.config_dir)

    def tree(self, point: Sequence[Word]) -> Tree:
        """The resolved config tree of a point, equal to what Hydra composes from its words.

        Raises:
            RequestError: a word cannot be composed or set, or an expression cannot be resolved.
        """
        kind = tuple(word.key if word.is_plain else word.text for word in point)
        with refusing():
            if kind in self._shared:
                return self._shared[kind].tree(point)
            config = self.config(point)
            if not _are_set_alone(point, config):
                return _Shared(config, []).tree(point)
            self._shared[kind] = _Shared(config, [word.key for word in point if word.is_plain])
            return self._shared[kind].tree(point)


class _Shared:
    """What points share that differ in plain values alone: a config, and its entries that were resolved.

    A value is set wherever it stands or is copied, as by ``${seed}``. An entry of the config is resolved again where
    another value is set within it, or one that its other expressions may refer to.
    """

    def __init__(self, config: DictConfig, keys: Sequence[str]) -> None:
        raw: Any = OmegaConf.to_container(config)
        self.config, self.has_default_steps = config, raw.get("steps") == DEFAULT_STEPS
        self.places = {key: [_place(key)] for key in keys}
        expressions: dict[str, list[str]] = {name: [] for name in raw}
        for name in raw:
            for place, text in _nodes({name: raw[name]}):
                if isinstance(text, str) and "${" in text:
                    if text[2:-1] in keys and text == f"${{{text[2:-1]}}}":
                        self.places[text[2:-1]].append(place)
                    else:
                        expressions[name].append(text)
        self.needs = {name: _needs(name, expressions, self.places) for name in raw}
        self.changing = [name for name in raw if self.needs[name]]
        self.others = {name: None if self.needs[name] else self._resolved(name) for name in raw}
        self.found: dict[tuple[str, ...], Any] = {}

    def tree(self, point: Sequence[Word]) -> dict[str, Any]:
        """The resolved tree of a point, which shares the entries in which it agrees with other points.

        ``tokens`` replaces the default number of steps, but not a given one.
        """
        words, tree = {word.key: word for word in point}, dict[str, Any](self.others)
        for name in self.changing:
            at = (name, *[words[key].text for key in self.needs[name]])
            if at not in self.found:
                for key in self.needs[name]:
                    for place in self.places[key]:
                        OmegaConf.update(self.config, place, words[key].value)
                self.found[at] = self._resolved(name)
            tree[name] = self.found[at]
        return {**tree, "steps": None} if self.has_default_steps and tree.get("tokens") is not None else tree

    def _resolved(self, name: str) -> Any:
        value = self.config[name]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        check_keys({name: value})
        return value


def _are_set_alone(point: Sequence[Word], config: DictConfig) -> bool:
    """Whether each plain value of a point is where its word says, and no other word sets it, or a part of it."""
    places = {place for place, _ in _nodes(OmegaConf.to_container(config))}
    words = [word for word in point if not word.chooses_file]
    return all(not word.is_plain or _place(word.key) in places for word in words) and all(
        sum(f"{word.key}.".startswith(f"{other.key}.") for other in words) == 1 for word in words
    )


def _needs(name: str, expressions: Mapping[str, list[str]], places: Mapping[str, list[str]]) -> list[str]:
    """The keys that are set within an entry of a config, or to which its expressions may refer.

    An expression refers to another entry by its name, unless the name itself is computed.
    """
    entries, words = [name], set[str]()
    for entry in entries:
        for text in expressions[entry]:
            if COMPUTED.search(text):
                return list(places)
            words |= {*NAMES.findall(text)}
        entries += (words & expressions.keys()) - {*entries}
    return [
        key
        for key, of_key in places.items()
        if any(place.split("[")[0] == name or words & {*NAMES.findall(place)} for place in of_key)
    ]


def _nodes(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in nested mappings and lists after its place, such as ``data[seed]``."""
    for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
        at = f"{place}[{key}]" if place else str(key)
        yield at, child
        if isinstance(child, Mapping | list):
            yield from _nodes(child, at)


def _place(key: str) -> str:
    """``data.seed -> data[seed]``, which can hold the names of any keys."""
    first, *rest = key.split(".")
    return first + "".join(f"[{name}]" for name in rest)


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
        return f"unknown {group} {name!r}; {nearest(name, error.options or names_of(group))}"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {first}"
    return _refusal(error.__cause__) if error.__cause__ else first


@cache
def known_keys(config_dir: Path | None = None) -> Sequence[str]:
    """Every dotted key of the default config."""
    places = [NAMES.findall(place) for place, _ in _nodes(OmegaConf.to_container(Composer(config_dir).config([])))]
    return sorted(".".join(place) for place in places if not place[-1].isdigit())  # but for entries of lists


def _unknown_key(key: str, config_dir: Path | None) -> RequestError:
    known, group = known_keys(config_dir), key.split(".")[0]
    if key in known:
        return RequestError(f"key '{key}' does not exist in every config asked for")
    if group in ("custom_model", "intervention"):  # groups that hold only what is switched on
        alike = nearest(key, [name for name in known if name.startswith(group)])
        return RequestError(f"unknown key '{key}'; {alike}; one of your own is added by +{key}=VALUE")
    if group in groups() and (files := files_with(key)):
        return RequestError(f"unknown key '{key}'; it belongs to {group}={'|'.join(files)}")
    alike = nearest(key, known) if similar_names(key, known) else "lab train --help lists the keys"
    return RequestError(f"unknown key '{key}'; {alike}")
