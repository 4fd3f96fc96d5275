"""What Hydra composes of a request, and of a sweep; remembered where requests of one test choose the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from lab.cli import launch
from lab.cli.compose import expand, parse
from lab.cli.hydra_app import data_folder
from lab.core import shipped

Loaded = tuple[Any, DictConfig]


def load(*words: str) -> Loaded:
    """Hydra's loader and the config of a request."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(data_folder("conf")), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return loader, loader.load_configuration("config", list(words), RunMode.MULTIRUN)


def points_of(name: str, scale: str) -> tuple[Loaded, list[list[str]]]:
    """What Hydra loads of a sweep of the lab at a scale, and the overrides of all its points."""
    sweep = launch.read_sweep(shipped.sweeps()[name])
    ConfigStore.instance().store("requested", sweep, group="sweeps", package="_global_")
    words = ["sweeps=requested", f"scale={scale}"]
    loader, config = load(*words)
    params = [f"{key}={value}" for key, value in config.hydra.sweeper.params.items()]
    return (loader, config), expand(parse([*params, *words], loader))


def remember(patch: pytest.MonkeyPatch) -> None:
    """Let what Hydra finds out be found out once; values are set, and all is judged, anew for every request."""
    held: dict[str, Any] = {}
    defaults, merged = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list

    def once(key: Sequence[Any], find: Callable[[], Any]) -> Any:
        name = repr([*key, ConfigStore.instance().repo.get("sweeps")])  # where the file of a request is kept
        if name not in held:
            held[name] = find()
        return held[name]

    def list_of(repo: Any, config_name: str, overrides_list: Any, **how: Any) -> Any:
        asked = Overrides(repo=repo, overrides_list=overrides_list)
        files = [asked.override_choices, asked.append_group_defaults, asked.deletions]
        places = [source.path for source in repo.get_sources()]
        found = once([places, files, how], lambda: defaults(repo, config_name, overrides_list, **how))
        return replace(found, config_overrides=asked.config_overrides)

    def compose(self: Any, defaults: Any, repo: Any) -> Any:
        places = [source.path for source in repo.get_sources()]
        return deepcopy(once([places, defaults], lambda: merged(self, defaults, repo)))

    patch.setattr(config_loader_impl, "create_defaults_list", list_of)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", compose)
