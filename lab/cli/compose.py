"""Composing configs outside a run of Hydra, and expanding overrides into points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from lab.cli import hydra_app
from lab.core.errors import RequestError
from lab.sweep import run

CONFIG_DIR_FLAGS = ("--config-dir", "-cd")
# The folders that ``heed_places`` found.
_CONFIG_DIR: ContextVar[tuple[Path, ...]] = ContextVar("own", default=())


def use_config_dir(words: Sequence[str]) -> list[str]:
    """Look for configs in the folder that --config-dir names, too, from now on; what is left of the words.

    Raises:
        RequestError: there is no such folder.
    """
    rest, _ = [], _CONFIG_DIR.set(())
    following = iter(words)
    for word in following:
        flag, equals, value = word.partition("=")
        if flag not in CONFIG_DIR_FLAGS:
            rest.append(word)
            continue
        folder = value if equals else next(following, "")
        if not folder or not Path(folder).is_dir():
            raise RequestError(f"{flag} names no folder: {folder!r}")
        _CONFIG_DIR.set((Path(folder).absolute(),))
    return rest


def config_dir_overrides() -> tuple[Path, ...]:
    """That folder, if there is one."""
    return _CONFIG_DIR.get()


@contextmanager
def composer() -> Iterator[Callable[..., DictConfig]]:
    """Within the block, what makes a config of overrides."""
    GlobalHydra.instance().clear()
    places = [f"hydra.searchpath=[{run.quoted(folder)}]" for folder in config_dir_overrides()]
    with initialize_config_dir(str(hydra_app.data_folder("conf")), version_base="1.3"):
        yield lambda overrides, **options: compose("config", [*overrides, *places], **options)
    GlobalHydra.instance().clear()


def groups() -> set[str]:
    """The names of groups of files that are of a run: ours and those of the user's folder."""
    places = [hydra_app.data_folder("conf"), *config_dir_overrides()]
    return {path.name for place in places for path in place.iterdir() if path.is_dir()} - {"hydra", "fleet"}


def known_keys() -> list[str]:
    """Every dotted key of the default config."""
    return _known_keys(config_dir_overrides())


@cache
def _known_keys(places: tuple[Path, ...]) -> list[str]:
    with composer() as composed:
        tree = composed([])
    keys: set[str] = set()

    def walk(node: Any, prefix: str) -> None:
        for key in node:
            keys.add(f"{prefix}{key}")
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                walk(child, f"{prefix}{key}.")

    walk(tree, "")
    return sorted(keys - {"fleet"})


MAX_POINTS = 100_000  # of a sweep; more is a slip of the pen, and would take hours to compose


def expand(overrides: Sequence[Override]) -> list[list[str]]:
    """The product of all values given; a key given again replaces what stood there before."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[override.key_or_group] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            some = itertools.islice(override.sweep_string_iterator(), MAX_POINTS + 1)
            values[override.key_or_group] = [f"{key}={value}" for value in some]
        else:
            raise HydraException(f"{key} asks for an interval; give the values one by one: {key}=a,b,c")
    if math.prod(map(len, values.values())) > MAX_POINTS:
        raise HydraException(f"a sweep may have {MAX_POINTS} points, and this one has more")
    return [list(point) for point in itertools.product(*values.values())]
