"""The settings of Hydra that a request may change: how jobs are carried out, and nothing that can name code to run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lab.cli.compose import Request, compose_config, expand, groups, known_keys, parse, reading_request
from lab.core.errors import RequestError, nearest

# The other settings build objects, import packages, set the environment, write elsewhere, or do nothing for a sweep.
COMMAND_LINE_SETTINGS = re.compile(r"hydra\.(launcher|sweeper)\..+|hydra\.job\.chdir")
SWEEP_FILE_SETTINGS = ("params", "max_runs")  # of hydra.sweeper
# Settings that Hydra fills in itself, from the words of the request.
SET_BY_HYDRA = {"overrides", "runtime", "mode"}
# Characters by which a choice of files could leave the config folders, or put a file of the lab into another package.
ESCAPE = re.compile(r"\.\.|[@\\]|\$\{")
# The same for an override, where a slash in the key names a group inside a group.
OVERRIDE_ESCAPE = re.compile(rf"{ESCAPE.pattern}|^[^=]*/")
# A swept key: names joined by dots, or by slashes where a group lies in a group.
SWEPT_KEY = re.compile(r"\+{0,2}(\w[\w-]*)([./]\w[\w-]*)*")


def check_overrides(words: Sequence[str]) -> None:
    """Refuse overrides of Hydra's settings, except plain values that say how a sweep is carried out.

    Raises:
        RequestError: an override deletes a setting of Hydra, sets another one, or gives it anything but a plain value.
    """
    for word, override in zip(words, parse(words), strict=True):
        key = override.key_or_group
        if override.is_delete() and re.match(r"hydra\b", key):
            raise RequestError(f"~{key}: a request may not delete it; hydra.launcher.KEY=VALUE can be set")
        if key.startswith("hydra/") and not (key == "hydra/launcher" and re.fullmatch(r"[\w-]+", _value(override))):
            raise RequestError(f"{key}: a request may not set it; hydra/launcher=NAME can be set")
        if key.split(".")[0] != "hydra":
            continue
        if not COMMAND_LINE_SETTINGS.fullmatch(key):
            raise RequestError(f"{key}: a request may not set it; hydra.launcher.KEY and hydra.sweeper.KEY can be set")
        if "${" in word or re.search(r"_(target|args|recursive|convert|partial)_", word):
            raise RequestError(f"{key} takes plain values, not {word.partition('=')[2] or word}")


def _value(override: Override) -> str:
    with reading_request():
        return str(override.value() or "")


def check_defaults(sweep: DictConfig) -> None:
    """Check that the defaults list of a sweep file stays in the config folders and moves no file to another package.

    Raises:
        RequestError: it does not.
    """
    with reading_request():
        unresolved: Any = OmegaConf.to_container(sweep)
    entries = str(unresolved.get("defaults"))
    if escape := ESCAPE.search(entries):
        raise RequestError(f"defaults must choose files by their names, without {escape[0]}: {entries}")


def chooses_own_files_only(request: Request) -> bool:
    """Whether the overrides choose only files of the lab, and sweep no key that the sweep file does not sweep."""
    words = request.overrides
    escapes = any(OVERRIDE_ESCAPE.search(word.removeprefix("hydra/launcher=")) for word in words)
    return not escapes and not request.config_dir and not any("hydra.sweeper.params" in word for word in words)


def first_point(request: Request, *, one: bool) -> list[str]:
    """The overrides of the point that a request would train first; with ``one``, without the keys a sweep file sweeps.

    Raises:
        RequestError: a file, or a value that it sweeps, changes settings of Hydra other than those allowed.
    """
    parsed = parse(request.overrides)
    settings = _settings(request, request.overrides)
    typed = [word for word, o in zip(request.overrides, parsed, strict=True) if re.match(r"hydra\b", o.key_or_group)]
    without_files = _guarded(_settings(request, typed))
    _refuse_differences(_guarded(settings), without_files)
    params = {} if one else _params(settings, request.config_dir)
    point = expand([*parse([f"{key}={value}" for key, value in params.items()]), *parsed])[0]
    _refuse_differences(_guarded(_settings(request, point)), without_files)
    return point


def _settings(request: Request, overrides: Sequence[str]) -> DictConfig:
    """Hydra's own part of the config composed from these overrides, without the swept ones."""
    fixed = [
        word for word, override in zip(overrides, parse(overrides), strict=True) if not override.is_sweep_override()
    ]
    hydra: DictConfig = compose_config(request, fixed, return_hydra_config=True).hydra
    return hydra


def _refuse_differences(settings: Mapping[str, Any], without_files: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those composed without any file."""
    for key in sorted(settings.keys() | without_files.keys()):
        if settings.get(key) != without_files.get(key):
            choices = f"only {' and '.join(SWEEP_FILE_SETTINGS)} of hydra.sweeper can be set"
            raise RequestError(f"hydra.{key}: a file may not set it; {choices}")


def _params(hydra: DictConfig, config_dir: Path | None) -> dict[str, Any]:
    """The values that a sweep file sweeps, by key of a run or by config group."""
    with reading_request():
        params: dict[str, Any] = {str(key): value for key, value in hydra.sweeper.params.items()}
    own_groups = groups(config_dir)
    known = {key.split(".")[0] for key in known_keys(config_dir)} | own_groups
    for key, value in params.items():
        match = SWEPT_KEY.fullmatch(key)
        if not match or match[1] not in known:
            alike = nearest(key.lstrip("+~").split(".")[0], known)
            raise RequestError(f"hydra.sweeper.params holds {key}, which is no key of a run; {alike}")
        if match[1] in own_groups and "." not in key and ESCAPE.search(str(value)):
            raise RequestError(f"hydra.sweeper.params.{key} must choose files by their names, not {value}")
    return params


def _guarded(hydra: DictConfig) -> Mapping[str, Any]:
    """The unresolved settings that a file must not change; those of launcher and sweeper have a key each."""
    with reading_request():
        tree: Any = OmegaConf.to_container(hydra)
    settings = {key: value for key, value in tree.items() if key not in SET_BY_HYDRA}
    settings["job"].pop("override_dirname", None)
    for group in ("launcher", "sweeper"):
        values = settings.pop(group)
        settings |= {f"{group}.{k}": values[k] for k in values} if isinstance(values, Mapping) else {group: values}
    return {key: value for key, value in settings.items() if key not in [f"sweeper.{k}" for k in SWEEP_FILE_SETTINGS]}
