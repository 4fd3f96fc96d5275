"""Hydra's composition remembered: requests of one test that choose the same files compose them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import Overrides
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore


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
    patch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # for which it composes once more
