"""From the words of a command line to a request: they are read and parsed once, and what makes no sense is refused."""

from __future__ import annotations

import argparse
import io
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf

from lab.core import usage
from lab.core.errors import RequestError, nearest
from lab.core.files import quoted, read_text
from lab.core.printing import say
from lab.core.schema import FORMER_KEYS, former_keys, key_now, with_keys_now
from lab.core.shipped import data_folder, load, question, sweeps
from lab.sweeping import own_code
from lab.sweeping.compose import Word, check_keys, known_keys, parse
from lab.sweeping.config_files import GIVEN, groups
from lab.sweeping.own_code import OwnCode

CONFIG_DIR = ("--config-dir", "-cd")
OPTIONS = ("--cfg", "--config-dir", "--dry-run", "--help", "--model", "--optimizer", "--probe", "--refine", "--resolve")
# Groups of which a file may choose none, by an empty list or mapping.
MAY_BE_NONE = ("batch", "bad_batches", "custom_model", "intervention", "restarts", "loss_scale", "recipe", "response")
MOST_VALUES = 10_000  # of a YAML file, whose aliases count as often as they are used; OmegaConf writes all of them out
# Settings of Hydra that a request may change; the others write elsewhere, or do nothing for a sweep.
SETTINGS = re.compile(r"hydra\.(launcher|sweeper)\..+|hydra\.job\.chdir|hydra/launcher")
CHOSEN = ("intervention", "override /intervention")  # among defaults, the interventions that a run has
YAML = (".yaml", ".yml")
SWEEP_FILE_SETTINGS = ("params", "max_runs", "refine")  # of hydra.sweeper
# What comes before the key of a word, or of a choice among defaults, and the key.
KEY_OF_WORD = re.compile(r"((?:override )?[+~/]*)([\w./-]*)")


@dataclass(frozen=True)
class Request:
    """A request: everything that a command line asks for.

    Attributes:
        words: its overrides: keys of runs, and settings of Hydra's launcher and sweeper.
        config_dir: the folder of --config-dir, which is searched for configs, too; None without one.
        files: the contents of files that were given by their paths, by config group.
        show: ``help``, ``config`` or ``resolved`` to show that of the first point instead of training; else empty.
        dry_run: ``summary`` or ``full`` to only estimate the cost; else empty.
        shard: ``i/n`` trains the i-th of n parts.
        is_single: whether it is a single run, and the values that a sweep file sweeps are left out.
        command: the command line as the user can type it again.
        question: the question that the sweep file asks in its first comment; empty without one.
        own_code: what each job registers, see ``own_code.entries_for_jobs``.
        remarks: what the user must know of their own code, once it is known that it can be trained.
    """

    words: Sequence[Word] = ()
    config_dir: Path | None = None
    files: Mapping[str, DictConfig] = field(default_factory=dict)
    show: str = ""
    dry_run: str = ""
    shard: str = "1/1"
    is_single: bool = False
    command: str = ""
    question: str = ""
    own_code: Sequence[Sequence[str]] = ()
    remarks: Sequence[str] = ()

    def with_code(self, code: Sequence[OwnCode]) -> Request:
        """The request with a model and an optimizer of the user's own, which its words choose."""
        remarks = [own.remark for own in code if own.remark]
        return replace(self, own_code=own_code.entries_for_jobs(code), remarks=remarks)


class _Parser(argparse.ArgumentParser):
    """Parser of the options of a request; its errors are refusals."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message.removeprefix("argument "))


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", "-cd", nargs="?", const="")
    parser.add_argument("--dry-run", default="", choices=["summary", "full"])
    parser.add_argument("--refine")
    parser.add_argument("--model")
    parser.add_argument("--optimizer")
    parser.add_argument("--probe", action="append", default=[])
    return parser


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a request; ``words`` are its overrides.

    Raises:
        RequestError: an option is unknown or lacks its value, a word is no override, or the folder of --config-dir
            does not exist.
    """
    # argparse would take the word after --dry-run for its value
    words = ["--dry-run=summary" if word == "--dry-run" else word for word in arguments]
    given, unknown = _parser().parse_known_intermixed_args(words)
    if given.config_dir is not None:
        if not given.config_dir or not Path(given.config_dir).is_dir():
            raise RequestError(f"--config-dir names no folder: {given.config_dir!r}")
        given.config_dir = Path(given.config_dir).absolute()
        for former, now in FORMER_KEYS.items():
            if (given.config_dir / former).is_dir():
                raise RequestError(f"the config group {former} is now {now}; rename {given.config_dir / former}")
    if unknown:
        raise RequestError(f"unknown option {unknown[0]!r}; {nearest(unknown[0].partition('=')[0], OPTIONS)}")
    given.words = [*map(_now, given.words), *[f"hydra.sweeper.refine={given.refine}"] * (given.refine is not None)]
    for word in given.words:
        if not is_override(word):
            hint = f"; {word}=VALUE sets it" if word in known_keys() else ""
            raise RequestError(f"unknown word {word!r}; a request takes key=value and options such as --dry-run{hint}")
    return given


def _now(word: str, where: str = "") -> str:
    """A word, or a key of a file, with the name of now for its key; a former name is noted after ``where``."""
    match = KEY_OF_WORD.match(word)
    assert match
    prefix, key = match.groups()
    if (now := key_now(key)) != key:
        say(f"lab: {where}{key} is now {now}", error=True)
    return f"{prefix}{now}{word[match.end() :]}"


def _with_keys_now(content: DictConfig, path: Path) -> DictConfig:
    """A file in which keys have the names of now: its own, what it sweeps, chooses and changes at restarts."""
    tree: Any = OmegaConf.to_container(content)
    name = partial(_now, where=f"{path}: ")
    for former in former_keys(tree):
        name(former)
    tree = dict(with_keys_now(tree))
    for key in ("defaults", "restarts"):
        entries = tree[key] if isinstance(tree.get(key), list) else []
        for entry in (entry for entry in entries if isinstance(entry, dict)):
            changed = {name(key): value for key, value in entry.items()}
            entry.clear()
            entry.update(changed)
    with suppress(KeyError, TypeError, AttributeError):  # what is no mapping there is refused later
        sweeper = tree["hydra"]["sweeper"]
        sweeper["params"] = {name(key): value for key, value in sweeper["params"].items()}
    renamed: DictConfig = OmegaConf.create(tree)
    return renamed


def options_and_overrides(command: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options and the overrides in the words of a command that takes both.

    Raises:
        RequestError: an option is unknown, lacks its value, or takes none.
    """
    values = [option for option, takes in usage.COMMANDS[command].parsed_options.items() if takes]
    # the value of an option is no override, even if it has "="
    is_word = [is_override(word) and before not in values for before, word in pairwise(["", *arguments])]
    given = usage.OptionParser(command).read([word for word, skip in zip(arguments, is_word, strict=True) if not skip])
    return given, list(compress(arguments, is_word))


def is_override(word: str) -> bool:
    """Whether a word is an override, ``key=value`` or the deletion ``~key``."""
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def read_request(
    arguments: Sequence[str],
    command: str,
    *,
    name: str,
    sweep: Path | None = None,
    is_single: bool = False,
    code: Sequence[OwnCode] = (),
) -> Request:
    """Read and check the arguments of a request.

    Args:
        arguments: overrides and options.
        command: the command line as the user can type it again.
        name: names the default results folder, ``runs/NAME``.
        sweep: the sweep file, if any.
        is_single: whether it is a single run unless ``-m`` is given.
        code: a model and an optimizer of the user's own, besides those that options name.

    Raises:
        RequestError: the request cannot be carried out.
    """
    given = read_options(arguments)
    code = [*code, *own_code.read_options(given)]
    for own in code:
        if own.kind == "optimizer" and any(word.lstrip("+").startswith("optimizer=") for word in given.words):
            raise RequestError("--optimizer and optimizer= both choose an optimizer; give one of them")
        given.words = own.with_settings(given.words)
        if own.rate and not sweep:
            given.words = [own.rate, *given.words]
    content = read_sweep(sweep) if sweep else OmegaConf.create()
    files = {"sweeps": content} if sweep else {}
    texts, shard = [f"sweeps={GIVEN}"] * bool(sweep), "1/1"
    for text in given.words:
        key, _, value = text.partition("=")
        if key == "shard":  # an option of the sweep, not of a run
            shard = value
        elif (group := key.lstrip("+")) in READ and Path(value).suffix in YAML:
            files[group] = READ[group](Path(value))
            texts.append(f"{group}={GIVEN}")
        else:
            texts.append(text)
    if "out" not in content and not any(text.lstrip("+").startswith("out=") for text in texts):
        texts.insert(0, f"out={quoted(Path('runs', name))}")
    words = parse(texts, given.config_dir)
    for word in words:
        if word.key.split(".")[0] == "fleet":
            raise RequestError("key 'fleet' is the sweeper's own")
        if re.match(r"hydra\b", word.key) and (word.override.is_delete() or not SETTINGS.fullmatch(word.key)):
            settings = "hydra/launcher=NAME, hydra.launcher.KEY and hydra.sweeper.KEY can be set"
            raise RequestError(f"{word.key}: a request may not change it; {settings}")
    show = "help" if given.help else ("resolved" if given.resolve else "config") if given.cfg else ""
    asked = question(read_text(sweep)) if sweep else ""
    is_single = is_single and not given.multirun
    request = Request(words, given.config_dir, files, show, given.dry_run, shard, is_single, command, asked)
    return request.with_code(code)


def find_sweep(name: str) -> Path:
    """The file of a sweep, given by name or by path.

    Raises:
        RequestError: there is no such sweep.
    """
    path = Path(name)
    if path.suffix in YAML:
        if not path.is_file():
            raise RequestError(f"no sweep file {path}")
        return path
    if name not in sweeps():
        raise RequestError(f"unknown sweep {name!r}; {nearest(name, sweeps())}; or give a FILE.yaml")
    return sweeps()[name]


def command_line(words: Sequence[str]) -> str:
    """The command line of these words; the program is ``lab``, or a user's script that ends in ``lab.main()``."""
    path = sys.argv[0]
    is_script = path.endswith(".py") and Path(path).name != "__main__.py"
    return shlex.join([*(["python", path] if is_script else ["lab"]), *words])


def read_sweep(path: Path) -> DictConfig:
    """A sweep file as Hydra will compose it, ``intervention: [z_loss]`` and the like as choices among its defaults.

    Hydra cannot merge a list with keys and values, and by an empty mapping it would change nothing.

    Raises:
        RequestError: the file makes no sense, or sets more of Hydra than what is swept.
    """
    sweep = _read_yaml(path)
    tree: Any = OmegaConf.to_container(sweep)
    chosen: dict[str, Any] = {}
    for key in sorted({*groups(), *MAY_BE_NONE} & tree.keys()):
        value = tree[key]
        are_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
        if key == "intervention" and (value == {} or are_names):
            chosen[key] = [*value]
        elif key in MAY_BE_NONE and value in ([], {}):
            chosen[key] = None
        elif value is not None and not isinstance(value, dict):
            hint = f"; 'override /{key}: {value}' among the defaults chooses a file" if isinstance(value, str) else ""
            raise RequestError(f"{path}: {key} must hold keys and values, not {value!r}{hint}")
    _check_settings(tree, path)
    if not chosen:
        return sweep
    kept = {key: value for key, value in tree.items() if key not in chosen}
    others = [entry for entry in tree.get("defaults", []) if not {f"override /{key}" for key in chosen} & {*entry}]
    return OmegaConf.create({**kept, "defaults": [*others, *({f"override /{key}": chosen[key]} for key in chosen)]})


def _check_settings(tree: Mapping[str, Any], path: Path) -> None:
    """Check that a sweep file, which may be a stranger's, sets nothing of Hydra but what is swept.

    Hydra's other settings make objects, import modules and write files.

    Raises:
        RequestError: it sets more, or its values have another form.
    """
    place: Any = tree
    for key in ("hydra", "sweeper", "params"):
        place = place.get(key, {})
        if not isinstance(place, Mapping):
            raise RequestError(f"{path}: {key} (of hydra.sweeper.params) must hold keys and values, not {place!r}")
    settings = tree.get("hydra", {})
    others = [key for key in settings if key != "sweeper"]
    others += [f"sweeper.{key}" for key in settings.get("sweeper", {}) if key not in SWEEP_FILE_SETTINGS]
    if others:
        raise RequestError(
            f"hydra.{others[0]}: a file may not set it; only {' and '.join(SWEEP_FILE_SETTINGS)} of hydra.sweeper"
        )


def _read_recipe(path: Path) -> DictConfig:
    """Read a recipe, the file of ``recipe=FILE.yaml``, written as those in ``conf/recipe``; its name is the file's.

    Raises:
        RequestError: the file does not exist, makes no sense, or sets anything of Hydra.
    """
    if not path.is_file():
        raise RequestError(f"no recipe file {path}; lab list recipes names those that come with the lab")
    content = read_sweep(path)
    if "hydra" in content:
        raise RequestError(f"{path}: hydra: a recipe may not set it; sweeps/ has files that sweep")
    entries = [*load(data_folder("conf") / "config.yaml")["defaults"], *content.get("defaults", ())]
    choices = [
        value for entry in entries if isinstance(entry, Mapping) for key, value in entry.items() if key in CHOSEN
    ]
    chosen = choices[-1] if choices else []
    if ignored := [str(name) for name in content.get("intervention") or () if name not in (chosen or ())]:
        raise RequestError(
            f"{path}: intervention.{ignored[0]} has numbers and is not chosen; the file chooses those that it has by "
            f"'override /intervention: [{', '.join([*(chosen or ()), ignored[0]])}]' among its defaults"
        )
    named = OmegaConf.merge({"recipe": {"name": path.stem}}, content)
    assert isinstance(named, DictConfig)
    return named


def _read_restarts(path: Path) -> DictConfig:
    """Read a restart log, the file of ``restarts=FILE.yaml``: at which steps a run is restarted with other settings.

    Raises:
        RequestError: the file does not exist, or has an unknown key.
    """
    if not path.is_file():
        raise RequestError(f"no restart log {path}, the file of restarts=FILE.yaml")
    content = _read_yaml(path)
    from lab.optim.restarts import KEYS, unknown_key  # here, since lists and tab completion need none of it

    if unknown := unknown_key(content):
        raise RequestError(f"{path}: unknown key {unknown!r}; {nearest(unknown, KEYS)}")
    content.setdefault("name", path.stem)
    return content


# The groups of which a file may be given by its path.
READ: Mapping[str, Callable[[Path], DictConfig]] = {"restarts": _read_restarts, "recipe": _read_recipe}


def _read_yaml(path: Path) -> DictConfig:
    """The keys and values of a file.

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
    return _with_keys_now(content, path)


def _count_values(node: yaml.Node | None, counts: dict[int, float]) -> float:
    """How many values a YAML node holds, with aliases written out; infinite if it holds itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for pair in inner for child in pair] if isinstance(node, yaml.MappingNode) else inner
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    return counts[id(node)]
