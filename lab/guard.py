"""What a request may say to Hydra: how its jobs are carried out, and nothing that could name code to run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lab.composing import composer, own_places
from lab.registry import RequestError

# All other settings of Hydra's make objects, import packages, set the environment, write elsewhere, or serve no sweep.
ON_THE_COMMAND_LINE = re.compile(r"hydra\.(launcher|sweeper)\..+|hydra\.job\.chdir")
IN_A_FILE = ("params", "max_runs")  # of hydra.sweeper
# What Hydra fills in itself, from the words of the request.
FILLED_IN = {"overrides", "runtime", "mode"}
# What may lead an override to a file that is not ours, or a file of ours to another place.
AWAY = re.compile(r"\.\.|[@\\]|\$\{|^[^=]*/")


def check_words(words: Sequence[str]) -> list[str]:
    """The overrides that are of a run, or choose files; those of Hydra's settings are checked and left out.

    Raises:
        RequestError: one sets what is not how a sweep is carried out, or is no plain value.
    """
    others = []
    for word, override in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
        key = override.key_or_group
        if key.startswith("hydra/") and (key != "hydra/launcher" or override.value() is None):
            raise RequestError(f"{key} is not for a request to set; hydra/launcher=NAME can be")
        if key.split(".")[0] != "hydra":
            others.append(word)
        elif not ON_THE_COMMAND_LINE.fullmatch(key):
            raise RequestError(f"{key} is not for a request to set; hydra.launcher.KEY and hydra.sweeper.KEY can be")
        elif "${" in word or re.search(r"_(target|args|recursive|convert|partial)_", word):
            raise RequestError(f"{key} takes plain values, not {word.partition('=')[2] or word}")
    return others


def settings(overrides: Sequence[str]) -> DictConfig:
    """Hydra's own part of what these overrides compose, those that sweep left out."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    fixed = [text for text, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()]
    with composer() as composed:
        found: DictConfig = composed(fixed, return_hydra_config=True).hydra
    return found


def check(overrides: Sequence[str], *, ours: bool) -> None:
    """Refuse settings of Hydra's that come with a file; it would act on them before the sweeper sees any.

    ``ours`` says that the sweep is; where all files are, there is nothing to look for.

    Raises:
        RequestError: there is one.
    """
    away = any(AWAY.search(word.removeprefix("hydra/launcher=")) for word in overrides)
    if ours and not away and not own_places():
        return
    asked = settings(overrides)
    found = _by_name(asked)
    plain = _by_name(settings([f"hydra/launcher={asked.runtime.choices['hydra/launcher']}"]))
    for key in sorted(found.keys() | plain.keys()):
        if found.get(key) != plain.get(key):
            them = f"of hydra.sweeper these can be: {', '.join(IN_A_FILE)}"
            raise RequestError(f"hydra.{key} is not for a file to set; {them}")
    for key in asked.sweeper.params:
        if re.match(r"hydra\b|fleet\b", str(key)):
            raise RequestError(f"hydra.sweeper.params holds {key}, which is not of a run")


def _by_name(hydra: DictConfig) -> Mapping[str, Any]:
    """What a file must leave alone, unresolved; the launcher's and sweeper's own one by one."""
    tree: Any = OmegaConf.to_container(hydra)
    found = {key: value for key, value in tree.items() if key not in FILLED_IN}
    found["job"].pop("override_dirname", None)
    for group in ("launcher", "sweeper"):
        inside = found.pop(group)
        found |= {f"{group}.{key}": inside[key] for key in inside} if isinstance(inside, Mapping) else {group: inside}
    return {key: value for key, value in found.items() if key not in [f"sweeper.{name}" for name in IN_A_FILE]}
