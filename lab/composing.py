"""Configs composed outside a run of Hydra's: of the lab's own files, and of those in the user's --config-dir."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from lab import app
from lab.core.errors import RequestError
from lab.sweep import run

PLACES = ("--config-dir", "-cd")
# The folders that ``heed_places`` found.
_OWN: ContextVar[tuple[Path, ...]] = ContextVar("own", default=())


def heed_places(words: Sequence[str]) -> list[str]:
    """Look for configs in the folder that --config-dir names, too, from now on; what is left of the words.

    Raises:
        RequestError: there is no such folder.
    """
    rest, _ = [], _OWN.set(())
    following = iter(words)
    for word in following:
        flag, equals, value = word.partition("=")
        if flag not in PLACES:
            rest.append(word)
            continue
        folder = value if equals else next(following, "")
        if not folder or not Path(folder).is_dir():
            raise RequestError(f"{flag} names no folder: {folder!r}")
        _OWN.set((Path(folder).absolute(),))
    return rest


def own_places() -> tuple[Path, ...]:
    """That folder, if there is one."""
    return _OWN.get()


@contextmanager
def composer() -> Iterator[Callable[..., DictConfig]]:
    """Within the block, what makes a config of overrides."""
    GlobalHydra.instance().clear()
    places = [f"hydra.searchpath=[{run.quoted(folder)}]" for folder in own_places()]
    with initialize_config_dir(str(app.data_folder("conf")), version_base="1.3"):
        yield lambda overrides, **options: compose("config", [*overrides, *places], **options)
    GlobalHydra.instance().clear()


def groups() -> set[str]:
    """The names of groups of files that are of a run: ours and those of the user's folder."""
    places = [app.data_folder("conf"), *own_places()]
    return {path.name for place in places for path in place.iterdir() if path.is_dir()} - {"hydra", "fleet"}


def known_keys() -> list[str]:
    """Every dotted key of the default config."""
    return _known_keys(own_places())


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
