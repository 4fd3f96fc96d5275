"""From the words of a command line to Hydra."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lab.cli import hydra_app, override_rules
from lab.cli.compose import (
    CONFIG_DIR_FLAGS,
    composer,
    expand,
    is_override,
    known_keys,
    parse,
    reading_request,
    resolved,
    use_config_dir,
)
from lab.core.errors import RequestError, nearest
from lab.core.files import quoted
from lab.core.shipped import question

# Hydra's flags that show something and run nothing, and those that say how to show it.
SHOW = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version")
SHOW_OPTIONS = ("--package", "-p", "--resolve")
DRY_RUNS = {"--dry-run": "summary", "--dry-run=full": "full"}
TAKE_VALUES = ("--cfg", "-c", "--info", "-i", "--package", "-p", *CONFIG_DIR_FLAGS)


def sweeps() -> dict[str, Path]:
    """The sweeps that come with the lab, by name."""
    return {path.stem: path for path in sorted(hydra_app.data_folder("sweeps").glob("*.yaml"))}


def campaigns() -> dict[str, Path]:
    """The campaigns that come with the lab, by name."""
    return {path.stem: path for path in sorted(hydra_app.data_folder("sweeps").glob("campaigns/*.yaml"))}


def find_sweep(name: str) -> Path:
    """The file of a sweep, given by name or by path.

    Raises:
        RequestError: there is no such sweep.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise RequestError(f"no sweep file {path}")
        return path
    if name not in sweeps():
        raise RequestError(f"unknown sweep {name!r}; {nearest(name, sweeps())}; or give a FILE.yaml")
    return sweeps()[name]


def read_sweep(path: Path) -> DictConfig:
    """A sweep file as Hydra will compose it.

    Raises:
        RequestError: it is not a YAML mapping, or empty.
    """
    try:
        content = OmegaConf.load(path)
    except Exception as error:  # whatever the YAML reader raises
        raise RequestError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, DictConfig) or not content:
        raise RequestError(f"{path} must hold keys and values, as the files in sweeps/ do")
    return content


def run_hydra(words: Sequence[str], *, name: str, sweep: Path | None = None, one: bool = False) -> None:
    """Hand a request to Hydra: train its points, with --dry-run estimate their cost, or show --cfg or --help.

    Args:
        words: overrides and flags.
        name: names the default results folder, ``runs/NAME``.
        sweep: the sweep file, if any.
        one: refuse several points.

    Raises:
        RequestError: the request cannot be carried out; nothing is written.
    """
    from lab.cli import multirun  # here, since lists and tab completion need none of it
    from lab.sweep import pipeline

    pipeline.COMMAND.set(shlex.join([*_program(sys.argv[0]), *sys.argv[1:]]))
    content = read_sweep(sweep) if sweep else OmegaConf.create()
    pipeline.QUESTION.set(question(sweep.read_text(encoding="utf-8")) if sweep else "")
    added: list[str] = []
    if sweep:
        # stored under a fixed name, since a file may be called anything
        ConfigStore.instance().store(group="sweeps", name="requested", node=content, package="_global_")
        added = ["sweeps=requested"]
    shard = [word for word in words if word.startswith("shard=")]  # an option of the sweeper, not of a run
    overrides = [word for word in words if is_override(word) and word not in shard]
    flags = [word for word in words if word not in [*overrides, *shard, *DRY_RUNS]]
    _refuse_unknown_flags(flags)
    use_config_dir(flags)
    overrides = [_with_ledger(word) for word in overrides]
    if any(word.lstrip("+~").startswith("fleet") for word in overrides):
        raise RequestError("key 'fleet' is the sweeper's own")
    shows = any(flag.split("=")[0] in SHOW for flag in flags)
    if not shows and (alone := [flag for flag in flags if flag.split("=")[0] in SHOW_OPTIONS]):
        raise RequestError(f"{alone[0]} goes with --cfg job")
    override_rules.check_overrides(overrides)
    override_rules.check_defaults(content)
    if "out" not in content and not any(word.lstrip("+").startswith("out=") for word in overrides):
        added.append(f"out={quoted(Path('runs', name))}")
    if shows or sweep not in (None, *sweeps().values()) or not override_rules.chooses_own_files_only(overrides):
        point = override_rules.first_point([*added, *overrides], one=one)
    if shows:
        _call_hydra([*flags, *point])
    else:
        dry_run = [f"dry_run={kind}" for word, kind in DRY_RUNS.items() if word in words][-1:]
        sweeper_options = [*shard, *dry_run, *["one=true"] * one]
        sweeper_overrides = [f"hydra.sweeper.{option}" for option in sweeper_options]
        multirun.train_points([*added, *overrides, *sweeper_overrides])


def _with_ledger(word: str) -> str:
    """``ledger=FILE.yaml`` as the choice of a stored config; any other override as it is.

    Raises:
        RequestError: the file does not exist, or holds anything but restarts.
    """
    key, _, value = word.partition("=")
    path = Path(value)
    if key.lstrip("+") != "ledger" or path.suffix not in (".yaml", ".yml"):
        return word
    if not path.is_file():
        raise RequestError(f"no ledger file {path}")
    content = read_sweep(path)
    from lab.optim.ledger import KEYS, unknown_key  # here, since lists and tab completion need none of it

    if unknown := unknown_key(content):
        raise RequestError(f"{path}: unknown key {unknown!r}; {nearest(unknown, KEYS)}")
    named = OmegaConf.merge({"name": path.stem}, content)
    ConfigStore.instance().store(group="ledger", name="requested", node=named)
    return "ledger=requested"


def _program(path: str) -> list[str]:
    """How this program was started: as ``lab``, or as a user's own script that ends in ``lab.main()``."""
    is_script = path.endswith(".py") and Path(path).name != "__main__.py"
    return ["python", path] if is_script else ["lab"]


def _refuse_unknown_flags(flags: Sequence[str]) -> None:
    for before, flag in zip(["", *flags], flags, strict=False):
        if flag.startswith("-") and flag.split("=")[0] not in [*SHOW, *SHOW_OPTIONS, *CONFIG_DIR_FLAGS]:
            raise RequestError(f"unknown option {flag!r}; {nearest(flag, [*DRY_RUNS, *SHOW, *CONFIG_DIR_FLAGS])}")
        if not flag.startswith("-") and before not in TAKE_VALUES:
            hint = f"; {flag}=VALUE sets it" if flag in known_keys() else ""
            raise RequestError(f"unknown word {flag!r}; a request takes key=value and options such as --dry-run{hint}")


def _call_hydra(arguments: list[str]) -> None:
    _check_flags(arguments)
    sys.argv = ["lab", *arguments]
    with reading_request():
        hydra_app.hydra_main()


def _check_flags(arguments: Sequence[str]) -> None:
    """Refuse what Hydra's own parser would answer with its usage."""

    def refuse(message: str) -> NoReturn:
        raise RequestError(message)

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args(list(arguments))


def compose_points(words: Sequence[str]) -> list[dict[str, Any]]:
    """Compose one resolved config tree for every point of these overrides, to train in this process.

    Raises:
        RequestError: a word is no override, or Hydra cannot compose them.
    """
    overrides = use_config_dir(words)
    for word in overrides:
        if not is_override(word):
            raise RequestError(f"unknown option {word!r}; all that can be given here is key=value, and --config-dir")
    override_rules.check_overrides(overrides)
    trees = []
    with composer() as composed:
        for point in expand(parse(overrides)):
            config = composed(point)
            with reading_request():
                tree = resolved(config)
            trees.append({key: value for key, value in tree.items() if key != "fleet"})
    return trees
