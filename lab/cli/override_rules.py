"""What a request may say to Hydra: how its jobs are carried out, and nothing that could name code to run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lab.cli.compose import composer, config_dir_overrides, expand, groups, known_keys
from lab.core.errors import RequestError, nearest

# All other settings of Hydra's make objects, import packages, set the environment, write elsewhere, or serve no sweep.
ON_THE_COMMAND_LINE = re.compile(r"hydra\.(launcher|sweeper)\..+|hydra\.job\.chdir")
IN_A_FILE = ("params", "max_runs")  # of hydra.sweeper
# What Hydra fills in itself, from the words of the request.
FILLED_IN = {"overrides", "runtime", "mode"}
# What may lead a choice of files out of the folders of configs, or put a file of ours into another place.
ELSEWHERE = re.compile(r"\.\.|[@\\]|\$\{")
# The same of an override; a slash before its value is a group in a group.
AWAY = re.compile(rf"{ELSEWHERE.pattern}|^[^=]*/")
# How a swept key is written: names, put together by dots, or by slashes where groups are in groups.
SWEPT = re.compile(r"\+{0,2}(\w[\w-]*)([./]\w[\w-]*)*")


def check_overrides(words: Sequence[str]) -> list[str]:
    """The overrides that are of a run, or choose files; those of Hydra's settings are checked and left out.

    Raises:
        RequestError: one sets what is not how a sweep is carried out, or is no plain value.
    """
    others = []
    for word, override in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
        key = override.key_or_group
        name = re.fullmatch(r"[\w-]+", str(override.value() or "")) and key == "hydra/launcher"
        if key.startswith("hydra/") and not name:
            raise RequestError(f"{key} is not for a request to set; hydra/launcher=NAME can be")
        if key.split(".")[0] != "hydra":
            others.append(word)
        elif not ON_THE_COMMAND_LINE.fullmatch(key):
            raise RequestError(f"{key} is not for a request to set; hydra.launcher.KEY and hydra.sweeper.KEY can be")
        elif "${" in word or re.search(r"_(target|args|recursive|convert|partial)_", word):
            raise RequestError(f"{key} takes plain values, not {word.partition('=')[2] or word}")
    return others


def check_defaults(sweep: DictConfig) -> None:
    """Refuse a sweep file whose defaults list leads out of the folders of configs, or gives a file another place.

    Raises:
        RequestError: it does.
    """
    entries = str(sweep._get_node("defaults"))  # unresolved
    if away := ELSEWHERE.search(entries):
        raise RequestError(f"defaults must choose files by their names, without {away[0]}: {entries}")


def is_ours(overrides: Sequence[str]) -> bool:
    """Whether these choose no file but ours, and add nothing to what a sweep of ours asks."""
    away = any(AWAY.search(word.removeprefix("hydra/launcher=")) for word in overrides)
    return not away and not config_dir_overrides() and not any("hydra.sweeper.params" in word for word in overrides)


def first_point(overrides: Sequence[str], *, one: bool) -> list[str]:
    """The overrides of the point that a sweep of these would train first; ``one`` leaves out what a file sweeps.

    Raises:
        RequestError: a file, or what a file sweeps, sets what is Hydra's, which Hydra would act on.
    """
    parse = OverridesParser.create().parse_overrides
    parsed = parse(list(overrides))
    asked = _settings(overrides)
    typed = [text for text, o in zip(overrides, parsed, strict=True) if re.match(r"hydra\b", o.key_or_group)]
    plain = _by_name(_settings(typed))
    _refuse_differences(_by_name(asked), plain)
    params = {} if one else _params(asked)
    point = expand([*parse([f"{key}={value}" for key, value in params.items()]), *parsed])[0]
    _refuse_differences(_by_name(_settings(point)), plain)
    return point


def _settings(overrides: Sequence[str]) -> DictConfig:
    """Hydra's own part of what these overrides compose, those that sweep left out."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    fixed = [text for text, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()]
    with composer() as composed:
        hydra: DictConfig = composed(fixed, return_hydra_config=True).hydra
    return hydra


def _refuse_differences(settings: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Refuse settings that are not as they are without any file."""
    for key in sorted(settings.keys() | plain.keys()):
        if settings.get(key) != plain.get(key):
            them = f"of hydra.sweeper these can be: {', '.join(IN_A_FILE)}"
            raise RequestError(f"hydra.{key} is not for a file to set; {them}")


def _params(hydra: DictConfig) -> dict[str, Any]:
    """What a file sweeps: keys of a run, and choices of files by their names."""
    params: dict[str, Any] = {str(key): value for key, value in hydra.sweeper.params.items()}
    known = {key.split(".")[0] for key in known_keys()} | groups()
    for key, value in params.items():
        written = SWEPT.fullmatch(key)
        if not written or written[1] not in known:
            alike = nearest(key.lstrip("+~").split(".")[0], known)
            raise RequestError(f"hydra.sweeper.params holds {key}, which is not of a run; {alike}")
        if written[1] in groups() and "." not in key and ELSEWHERE.search(str(value)):
            raise RequestError(f"hydra.sweeper.params.{key} must choose files by their names, not {value}")
    return params


def _by_name(hydra: DictConfig) -> Mapping[str, Any]:
    """What a file must leave alone, unresolved; the launcher's and sweeper's own one by one."""
    tree: Any = OmegaConf.to_container(hydra)
    found = {key: value for key, value in tree.items() if key not in FILLED_IN}
    found["job"].pop("override_dirname", None)
    for group in ("launcher", "sweeper"):
        inside = found.pop(group)
        found |= {f"{group}.{key}": inside[key] for key in inside} if isinstance(inside, Mapping) else {group: inside}
    return {key: value for key, value in found.items() if key not in [f"sweeper.{name}" for name in IN_A_FILE]}
