"""From the words of a command line to a request, and what Hydra itself shows of one."""

from __future__ import annotations

import io
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import yaml
from hydra._internal.utils import get_args_parser  # private: the public way prints its usage on an error
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lab.cli import hydra_app, override_rules
from lab.cli.compose import (
    CONFIG_DIR_FLAGS,
    GIVEN,
    Request,
    check_keys,
    config_loader,
    expand,
    groups,
    is_override,
    known_keys,
    parse,
    reading_request,
    store_files,
    take_config_dir,
)
from lab.cli.points import Tree, TreeComposer
from lab.core.errors import RequestError, nearest
from lab.core.files import quoted, read_text
from lab.core.printing import say
from lab.core.shipped import question, sweeps

# Hydra's flags that show something and run nothing, and the flags that say how to show it.
SHOW = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version")
SHOW_OPTIONS = ("--package", "-p", "--resolve")
DRY_RUNS = {"--dry-run": "summary", "--dry-run=full": "full"}
# Groups of which a file may choose none, by an empty list or mapping.
MAY_BE_NONE = ("batch", "burst", "guest", "intervention", "ledger", "loss_scale", "response")
MOST_VALUES = 10_000  # of a YAML file, whose aliases count as often as they are used; OmegaConf writes all of them out
TAKE_VALUES = ("--cfg", "-c", "--info", "-i", "--package", "-p", *CONFIG_DIR_FLAGS)


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
    """A sweep file, or a restart log, as Hydra will compose it.

    Raises:
        RequestError: the file is not YAML, holds no mapping, is empty, has a key that is no text, or is too large.
    """
    try:
        text = read_text(path)
        values = _count_values(yaml.compose(text, yaml.SafeLoader), {})
        content = OmegaConf.load(io.StringIO(text)) if values <= MOST_VALUES else None
    except Exception as error:  # the YAML reader raises errors of many types
        raise RequestError(f"{path} is not YAML: {shorten(str(error), 300)}") from None
    if content is None:
        raise RequestError(f"{path} holds more than {MOST_VALUES:,} values, with all aliases written out")
    if not isinstance(content, DictConfig) or not content:
        raise RequestError(f"{path} must hold keys and values, as the files in sweeps/ do")
    check_keys(OmegaConf.to_container(content), f"{path}: ")
    return content


def _count_values(node: yaml.Node | None, counts: dict[int, float]) -> float:
    """How many values a YAML node holds, with aliases written out; infinite if it holds itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [each for pair in inner for each in pair] if isinstance(node, yaml.MappingNode) else inner
        counts[id(node)] = 1 + sum(_count_values(each, counts) for each in flat)
    return counts[id(node)]


def _with_choices(sweep: DictConfig, path: Path) -> DictConfig:
    """The sweep file with ``intervention: [z_loss]``, ``intervention: {}`` and the like as choices among its defaults.

    Hydra cannot merge a list with keys and values, and by an empty mapping it would change nothing.

    Raises:
        RequestError: a group, or a part of Hydra's settings, holds neither keys and values nor such a choice.
    """
    tree: Any = OmegaConf.to_container(sweep)
    chosen: dict[str, Any] = {}
    for key in sorted({*groups(None), *MAY_BE_NONE} & tree.keys()):
        value = tree[key]
        if key == "intervention" and (value == {} or _are_names(value)):
            chosen[key] = [*value]
        elif key in MAY_BE_NONE and value in ([], {}):
            chosen[key] = None
        elif value is not None and not isinstance(value, dict):
            hint = f"; 'override /{key}: {value}' among the defaults chooses a file" if isinstance(value, str) else ""
            raise RequestError(f"{path}: {key} must hold keys and values, not {value!r}{hint}")
    place = tree
    for key in ("hydra", "sweeper", "params"):
        place = place.get(key, {})
        if not isinstance(place, dict):
            raise RequestError(f"{path}: {key} (of hydra.sweeper.params) must hold keys and values, not {place!r}")
    defaults = tree.get("defaults", [])
    if not isinstance(defaults, list):
        raise RequestError(f"{path}: defaults must be a list, not {defaults!r}")
    if not chosen:
        return sweep
    kept = {key: value for key, value in tree.items() if key not in chosen}
    others = [entry for entry in defaults if not {f"override /{key}" for key in chosen} & {*entry}]
    return OmegaConf.create({**kept, "defaults": [*others, *({f"override /{key}": chosen[key]} for key in chosen)]})


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def read_request(
    words: Sequence[str], command: str, *, name: str, sweep: Path | None = None, one: bool = False
) -> Request:
    """Read and check the words of a request.

    Args:
        words: overrides and flags.
        command: the command line as the user can type it again.
        name: names the default results folder, ``runs/NAME``.
        sweep: the sweep file, if any.
        one: whether to refuse more than one point.

    Raises:
        RequestError: the request cannot be carried out.
    """
    content = _with_choices(read_sweep(sweep), sweep) if sweep else OmegaConf.create()
    files = {"sweeps": content} if sweep else {}
    shard = [word for word in words if word.startswith("shard=")]  # an option of the sweeper, not of a run
    overrides = [word for word in words if is_override(word) and word not in shard]
    flags = [word for word in words if word not in [*overrides, *shard, *DRY_RUNS]]
    _refuse_unknown_flags(flags)
    config_dir, _ = take_config_dir(flags)
    for index, word in enumerate(overrides):
        key, _, value = word.partition("=")
        if key.lstrip("+") == "ledger" and Path(value).suffix in (".yaml", ".yml"):
            files["ledger"], overrides[index] = _read_ledger(Path(value)), f"ledger={GIVEN}"
    if any(word.lstrip("+~").startswith("fleet") for word in overrides):
        raise RequestError("key 'fleet' is the sweeper's own")
    shows = any(flag.split("=")[0] in SHOW for flag in flags)
    if not shows and (alone := [flag for flag in flags if flag.split("=")[0] in SHOW_OPTIONS]):
        raise RequestError(f"{alone[0]} goes with --cfg job")
    override_rules.check_overrides(overrides)
    override_rules.check_defaults(content)
    added = [f"sweeps={GIVEN}"] if sweep else []
    if "out" not in content and not any(word.lstrip("+").startswith("out=") for word in overrides):
        added.append(f"out={quoted(Path('runs', name))}")
    asked = question(read_text(sweep)) if sweep else ""
    request = Request([*added, *overrides], config_dir, files, flags if shows else (), command, asked)
    if shows or sweep not in (None, *sweeps().values()) or not override_rules.chooses_own_files_only(request):
        point = override_rules.first_point(request, one=one)
        if shows:
            return replace(request, overrides=point)
    dry_run = [f"dry_run={kind}" for word, kind in DRY_RUNS.items() if word in words][-1:]
    sweeper_options = [*shard, *dry_run, *["one=true"] * one]
    return replace(request, overrides=[*request.overrides, *(f"hydra.sweeper.{each}" for each in sweeper_options)])


def carry_out(request: Request) -> None:
    """Train the points of a request, with --dry-run estimate their cost, or show what --cfg or --help asks for.

    Raises:
        RequestError: the request cannot be carried out; nothing is written.
        SystemExit: with status 1 when a run failed.
    """
    if {"--help", "-h"} & {*request.flags}:
        from lab.cli import config_help  # here, since nothing else needs it

        for line in config_help.lines(request):
            say(line)
    elif request.flags:
        _check_flags([*request.flags, *request.overrides])
        store_files(request)
        call_hydra([*request.flags, *request.overrides], request.config_dir)
    else:
        from lab.cli import multirun  # here, since lists and tab completion need none of it

        multirun.carry_out(request)


def _read_ledger(path: Path) -> DictConfig:
    """Read a restart log, the file of ``ledger=FILE.yaml``: at which steps a run is restarted with other settings.

    Raises:
        RequestError: the file does not exist, or has an unknown key.
    """
    if not path.is_file():
        raise RequestError(f"no restart log {path}, the file of ledger=FILE.yaml")
    content = read_sweep(path)
    from lab.optim.ledger import KEYS, unknown_key  # here, since lists and tab completion need none of it

    if unknown := unknown_key(content):
        raise RequestError(f"{path}: unknown key {unknown!r}; {nearest(unknown, KEYS)}")
    named = OmegaConf.merge({"name": path.stem}, content)
    assert isinstance(named, DictConfig)
    return named


def command_line(words: Sequence[str]) -> str:
    """The command line of these words; the program is ``lab``, or a user's script that ends in ``lab.main()``."""
    path = sys.argv[0]
    is_script = path.endswith(".py") and Path(path).name != "__main__.py"
    return shlex.join([*(["python", path] if is_script else ["lab"]), *words])


def _refuse_unknown_flags(flags: Sequence[str]) -> None:
    for before, flag in zip(["", *flags], flags, strict=False):
        if flag.startswith("-") and flag.split("=")[0] not in [*SHOW, *SHOW_OPTIONS, *CONFIG_DIR_FLAGS]:
            raise RequestError(f"unknown option {flag!r}; {nearest(flag, [*DRY_RUNS, *SHOW, *CONFIG_DIR_FLAGS])}")
        if not flag.startswith("-") and before not in TAKE_VALUES:
            hint = f"; {flag}=VALUE sets it" if flag in known_keys() else ""
            raise RequestError(f"unknown word {flag!r}; a request takes key=value and options such as --dry-run{hint}")


def call_hydra(arguments: Sequence[str], config_dir: Path | None = None) -> None:
    """Let Hydra's own main show something, such as a config or completions.

    Raises:
        RequestError: Hydra refuses the arguments.
    """
    before = sys.argv
    sys.argv = ["lab", *arguments]  # Hydra reads its arguments, and the program's name in its help, from here alone
    try:
        with reading_request(config_dir):
            hydra_app.hydra_main()
    finally:
        sys.argv = before


def _check_flags(arguments: Sequence[str]) -> None:
    """Refuse, in one line, arguments for which Hydra's own parser would print its usage."""

    def refuse(message: str) -> NoReturn:
        raise RequestError(message)

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    parser.parse_args(list(arguments))


def compose_points(words: Sequence[str]) -> list[Tree]:
    """Compose a resolved config tree for every point of these overrides.

    Raises:
        RequestError: a word is no override, or Hydra cannot compose them.
    """
    config_dir, overrides = take_config_dir(words)
    for word in overrides:
        if not is_override(word):
            raise RequestError(f"unknown option {word!r}; this command takes key=value and --config-dir only")
    override_rules.check_overrides(overrides)
    with config_loader(Request(overrides, config_dir)) as loader:
        with reading_request(config_dir):
            config = loader.load_configuration("config", [], RunMode.RUN)
        composer = TreeComposer(loader, config, config_dir=config_dir)
        return [composer.tree(point) for point in expand(parse(overrides, loader))]
