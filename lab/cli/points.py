"""Config trees of many points: Hydra composes one tree per kind of point; the others differ from it in plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import AnyNode, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lab.cli.compose import reading_request, resolved

Path = tuple[str, ...]
Tree = Mapping[str, Any]
# From each place of a tree to the key whose value it holds, nested: ``{"seed": "seed", "data": {"seed": "seed"}}``.
Places = dict[str, Any]

KEY = re.compile(r"\w+(\.\w+)*")
REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
DIVISION = re.compile(r"\$\{(?:divide|whole_quotient):[^${}]*\}")
# ``${scale.steps_of.#}``, where # stands for an expression: it refers to one of the keys below ``scale.steps_of``.
CHOICE = re.compile(r"\$\{(\w+(?:\.\w+)*)\.#(?:\.[\w#]+)*\}")


class _Kind(NamedTuple):
    """A kind of points: they give the same keys, and the same words wherever a value is not plain.

    Attributes:
        places: the places at which plain values are substituted.
        others: the keys with plain values that cannot be substituted, since an expression refers to them.
        trees: the tree that Hydra composed, by the words that give the keys in ``others``.
    """

    places: Places
    others: Sequence[str]
    trees: dict[tuple[str, ...], Tree]


class TreeComposer:
    """Composes the config tree of one point after another; the trees share equal parts."""

    def __init__(
        self, config_loader: Any, config: DictConfig, files: Sequence[str] = (), config_dir: FilePath | None = None
    ) -> None:
        """Take the config that Hydra composed from its own settings and from the overrides that choose ``files``."""
        self._loader, self._config, self._config_dir = config_loader, config, config_dir
        self._parser = OverridesParser.create(config_loader=config_loader)
        self._overrides: dict[str, Override] = {}
        self._chooses_file: dict[str, bool] = {}
        self._composed_files: dict[tuple[str, ...], DictConfig] = {tuple(files): config}
        self._kinds: dict[tuple[tuple[str, ...], tuple[str, ...]], _Kind] = {}

    def tree(self, point: Sequence[str]) -> Tree:
        """The resolved config tree of a point, equal to what Hydra composes from its overrides.

        Raises:
            RequestError: a word is no override, or Hydra cannot compose them.
        """
        words = {self._parsed(word).key_or_group: word for word in point}
        values = {key: self._parsed(word).value() for key, word in words.items() if self._is_plain(word)}
        kind_key = tuple(words), tuple(word for key, word in words.items() if key not in values)
        if kind_key not in self._kinds:
            self._kinds[kind_key] = self._kind(words, values)
        places, others, trees = self._kinds[kind_key]
        choice = tuple(words[key] for key in others)
        if choice not in trees:
            trees[choice] = self._resolved(words)
        return _substituted(trees[choice], places, values)

    def of_files(self, point: Sequence[str], key: str) -> Any:
        """The value of a key in the files that a point chooses, before its own words; None if it has none.

        Call ``tree`` first.
        """
        files = tuple(word for word in point if self._chooses_file[word])
        try:
            return OmegaConf.select(self._composed_files[files], key)
        except OmegaConfBaseException:  # such as a reference to a key that the words add
            return None

    def _parsed(self, word: str) -> Override:
        if word not in self._overrides:
            with reading_request():
                (override,) = self._parser.parse_overrides([word])
                self._chooses_file[word] = chooses_file(override, self._loader)
            self._overrides[word] = override
        return self._overrides[word]

    def _is_plain(self, word: str) -> bool:
        """Whether a word sets a key to a value that OmegaConf keeps unchanged."""
        override, value = self._overrides[word], self._overrides[word].value()
        is_text = isinstance(value, str) and "${" not in value and value != "???"
        is_key = override.type is OverrideType.CHANGE and KEY.fullmatch(override.key_or_group) is not None
        is_value = override.package is None and not self._chooses_file[word]
        return is_key and is_value and (is_text or value is None or isinstance(value, (int, float)))

    def _kind(self, words: Mapping[str, str], values: Mapping[str, Any]) -> _Kind:
        config = self._composed(words)
        users = _users(config)
        set_keys = [key for key, word in words.items() if not self._chooses_file[word]]
        places: Places = {}
        others = []
        for key in values:
            is_alone = not any(_overlap(key.split("."), other.split(".")) for other in set_keys if other != key)
            copies = _copies(config, users, tuple(key.split("."))) if is_alone and users is not None else None
            if copies is None:
                others.append(key)
            for *parents, name in copies or ():
                part = places
                for parent in parents:
                    part = part.setdefault(parent, {})
                part[name] = key
        return _Kind(places, others, {})

    def _composed(self, words: Mapping[str, str]) -> DictConfig:
        """The config of a point, not yet resolved; files are composed once, and Hydra's own function sets values."""
        files = tuple(word for word in words.values() if self._chooses_file[word])
        values = [self._overrides[word] for word in words.values() if not self._chooses_file[word]]
        with reading_request(self._config_dir):
            if files not in self._composed_files:
                self._composed_files[files] = self._loader.load_sweep_config(self._config, list(files))
            config = with_values(self._composed_files[files], values, self._loader)
            with open_dict(config):
                del config["hydra"], config["fleet"]
        return config

    def _resolved(self, words: Mapping[str, str]) -> Tree:
        config = self._composed(words)
        with reading_request():
            return resolved(config)


def with_values(config: DictConfig, overrides: Sequence[Override], config_loader: Any) -> DictConfig:
    """A copy of a config with the values of these overrides set as Hydra sets them; they must choose no files."""
    copy = deepcopy(config)
    # private: any public way reads and merges all files once more
    config_loader._apply_overrides_to_config(list(overrides), copy)
    return copy


def chooses_file(override: Override, config_loader: Any) -> bool:
    """Whether an override chooses a file of a config group, rather than a value."""
    return bool(config_loader.repository.group_exists(override.key_or_group))


def _substituted(tree: Tree, places: Places, values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with values at their places; it shares all other parts."""
    changed = {
        name: values[place] if isinstance(place, str) else _substituted(tree[name], place, values)
        for name, place in places.items()
    }
    return {**tree, **changed}


def _overlap(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two paths are equal, or one leads to a part of the other."""
    return all(one == other for one, other in zip(first, second, strict=False))


def _copies(config: DictConfig, users: Mapping[Path, Sequence[tuple[Path, bool]]], path: Path) -> list[Path] | None:
    """The leaves that only copy the value of this one, and itself; None if any other expression refers to it."""
    copies = [path]
    for copy in copies:  # the list grows meanwhile
        if not _is_plain_leaf(config, copy):
            return None
        for reference, leaves in users.items():
            if not _overlap(reference, copy):
                continue
            if reference != copy or not all(is_copy for _, is_copy in leaves):
                return None
            copies += [leaf for leaf, _ in leaves]
    return copies


def _is_plain_leaf(config: DictConfig, path: Path) -> bool:
    """Whether a leaf lies in dicts alone and takes values of any type."""
    node: Any = config
    *parents, leaf = path
    for name in parents:
        if not isinstance(node, DictConfig) or name not in node or OmegaConf.is_interpolation(node, name):
            return False
        node = node[name]
    # private: no public function says whether a value that is set here would be converted
    return isinstance(node, DictConfig) and leaf in node and type(node._get_node(leaf)) is AnyNode


def _users(config: DictConfig) -> dict[Path, list[tuple[Path, bool]]] | None:
    """The leaves that refer to other nodes, by the path of the node; each with whether it only copies its value.

    Returns:
        None if an expression holds anything but absolute keys, choices among the keys below one, and divisions: it
        could then depend on any key.
    """
    users: dict[Path, list[tuple[Path, bool]]] = {}
    for path, text in _expressions(OmegaConf.to_container(config), ()):
        references, rest = list[str](), text
        while "${" in rest:
            references += REFERENCE.findall(rest) + CHOICE.findall(rest)
            shorter = DIVISION.sub("#", REFERENCE.sub("#", CHOICE.sub("#", rest)))  # no word, so ${#} refers to no key
            if shorter == rest:
                return None
            rest = shorter
        for reference in references:
            users.setdefault(tuple(reference.split(".")), []).append((path, bool(REFERENCE.fullmatch(text))))
    return users


def _expressions(node: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and text of every interpolation."""
    if isinstance(node, str) and "${" in node:
        yield path, node
    elif isinstance(node, (dict, list)):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _expressions(child, (*path, str(name)))
