"""What Hydra composes of a request, and of a sweep; remembered by tests before a commit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import open_dict

from lab.core.shipped import data_folder, sweeps
from lab.sweeping import launch
from lab.sweeping.compose import Composer, Word
from lab.sweeping.config_files import GIVEN
from lab.sweeping.request import read_request


def points_of(name: str, scale: str) -> tuple[Composer, list[list[Word]]]:
    """A composer, and the words of all points of a sweep of the lab at a scale."""
    request = read_request([f"scale={scale}"], "lab", name=name, sweep=sweeps()[name])
    composer = Composer(request.config_dir, request.files)
    config = composer.config(request.words)
    with open_dict(config):
        config.hydra = {"sweeper": composer.of_files(request.words).sweeper}
    store = ConfigStore.instance()  # where Hydra itself would look for the file
    store.store(group="sweeps", name=GIVEN, node=request.files["sweeps"], package="_global_")
    return composer, launch.points_of(request, config)


def remember(patch: pytest.MonkeyPatch) -> None:
    """Let what Hydra finds out of the lab's own files be found out once; values are set, and all is judged, anew.

    Files in other folders, which tests write and change, are read every time.
    """
    held: dict[str, bytes] = {}
    defaults, merged = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    Plugins.instance()  # registers kinds of sources
    kinds: list[Any] = [SourcesRegistry.instance().resolve(scheme) for scheme in ("file", "pkg")]
    own = str(data_folder("conf"))

    def once(key: Sequence[Any], find: Callable[[], Any]) -> Any:
        name = repr(key)
        if name not in held:
            held[name] = pickle.dumps(find())
        return pickle.loads(held[name])

    def sources(repo: Any) -> list[str] | None:
        """The folders of configs and the files of a request; None where others may change them."""
        places = [source.path for source in repo.get_sources()]
        given = [ConfigStore.instance().repo.get(group) for group in ("sweeps", "restarts", "recipe")]
        return [*places, repr(given)] if places == ["hydra.conf", own, ""] else None

    def list_of(repo: Any, config_name: str, overrides_list: Any, **how: Any) -> Any:
        if (known := sources(repo)) is None:
            return defaults(repo, config_name, overrides_list, **how)
        asked = Overrides(repo=repo, overrides_list=overrides_list)
        files = [config_name, asked.override_choices, asked.append_group_defaults, asked.deletions]
        found = once([known, files, how], lambda: defaults(repo, config_name, overrides_list, **how))
        return replace(found, config_overrides=asked.config_overrides)

    def compose(self: Any, defaults: Any, repo: Any) -> Any:
        if (known := sources(repo)) is None:
            return merged(self, defaults, repo)
        return once([known, defaults], lambda: merged(self, defaults, repo))

    def reading(kind: Any) -> Any:
        read = kind.load_config

        def read_once(self: Any, config_path: str) -> Any:
            find = partial(read, self, config_path)
            return once([self.path, config_path], find) if self.path in (own, "hydra.conf") else find()

        return read_once

    patch.setattr(config_loader_impl, "create_defaults_list", list_of)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose)
    # the list of sources is replaced in a copy, and never the sources themselves
    patch.setattr(ConfigRepository, "__deepcopy__", lambda self, memo: copy(self), raising=False)
    for kind in kinds:
        patch.setattr(kind, "load_config", reading(kind))
