"""What a user may type: lists for `lab list`, tab completion, and the configs that --help and --cfg show."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lab.core import shipped
from lab.core.errors import RequestError, nearest
from lab.core.files import read_text
from lab.core.registry import first_line, source

if TYPE_CHECKING:
    from lab.sweeping.request import Request


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        yield path.stem, shipped.comment_of(read_text(path))


def _choices(group: str) -> Callable[[], Iterator[tuple[str, str]]]:
    """A function that yields the files of a config group, each with its first comment."""
    return lambda: _files(sorted(shipped.data_folder("conf").glob(f"{group}/*.yaml")))


def _recipes() -> Iterator[tuple[str, Mapping[str, str]]]:
    for path in sorted(shipped.data_folder("conf").glob("recipe/*.yaml")):
        texts = shipped.load(path).get("recipe", {})
        texts.pop("name", None)
        yield path.stem, {"about": shipped.comment_of(read_text(path)), **texts}


def _models() -> Iterator[tuple[str, str]]:
    for path in sorted(shipped.data_folder("conf").glob("model/*.yaml"), key=lambda path: (len(path.stem), path.stem)):
        values = shipped.load(path)
        yield path.stem, f"width {values['width']}, depth {values['depth']}, head width {values['head_width']}"


def _entries(
    registry: str, home: str = "lab.core.registry", filled_by: str = "lab.training.config"
) -> Callable[[], Iterator[tuple[str, str]]]:
    """A function that imports ``filled_by`` and yields the entries of a registry, each with its first line."""

    def lines() -> Iterator[tuple[str, str]]:
        import_module(filled_by)
        entries = getattr(import_module(home), registry)
        for name in entries:
            yield name, first_line(source(entries[name]))

    return lines


def _detectors() -> Iterator[tuple[str, str]]:
    from labwatch.events.detectors import LABELS

    for kind, words in LABELS.items():
        yield kind, words["name"]


LISTS: dict[str, Callable[[], Iterator[tuple[str, str | Mapping[str, str]]]]] = {
    "sweeps": lambda: _files(shipped.sweeps().values()),
    "recipes": _recipes,
    "scales": _choices("scale"),
    "arms": _choices("arm"),
    "models": _models,
    "custom_models": _entries("MODELS"),
    "interventions": _entries("INTERVENTIONS"),
    "parametrizations": _entries("PARAMETRIZATIONS"),
    "optimizers": _choices("optimizer"),
    "links": _entries("LINKS"),
    "schedules": _entries("SCHEDULES"),
    "batches": _entries("BATCHES"),
    "data": _entries("DATA"),
    "bad_batches": _entries("BURSTS"),
    "loss_scales": _entries("LOSS_SCALES"),
    "responses": _entries("RESPONSES"),
    "restarts": _choices("restarts"),
    "detectors": _detectors,
    "probes": _entries("PROBES"),
    "trackers": _entries("TRACKERS"),
    "figures": _entries("FIGURES", "lab.analysis.drawing.registry", "lab.report.all_figures"),
}
# Lists that were renamed, and what each is called now.
FORMER_LISTS = {"bursts": "bad_batches", "guests": "custom_models", "ledgers": "restarts"}


def read_lists(names: Sequence[str]) -> dict[str, dict[str, str | Mapping[str, str]]]:
    """The entries of the named lists, each with a line about it, by the name of the list; of all if none is named.

    Of a recipe there are several texts: ``about``, ``size``, ``source``, ``published`` and ``missing``, and if it was
    published, whether it was stable, as ``outcome``.

    Raises:
        RequestError: a list is unknown.
    """
    for name in names:
        if name in FORMER_LISTS:
            raise RequestError(f"list {name!r} is now {FORMER_LISTS[name]}")
        if name not in LISTS:
            raise RequestError(f"unknown list {name!r}; {nearest(name, LISTS)}")
    return {name: dict(LISTS[name]()) for name in names or LISTS}


def lines(named: Mapping[str, Mapping[str, str | Mapping[str, str]]]) -> Iterator[str]:
    """Yield the lines of lists for a terminal, under their names if there are several."""
    indent = "" if len(named) == 1 else "  "
    for name, entries in named.items():
        if len(named) != 1:
            yield f"{name}:"
        width = max(map(len, entries), default=0)
        for entry, text in entries.items():
            about, *details = [text] if isinstance(text, str) else text.values()
            yield f"{indent}{entry:{width}}  {about}".rstrip()
            if len(named) == 1 and not isinstance(text, str):
                yield from (
                    f"{'':{width}}    {key}: {detail}" for key, detail in zip([*text][1:], details, strict=True)
                )


def complete(arguments: Sequence[str], sub_commands: Sequence[str]) -> Sequence[str]:
    """The words that may come next; completions of keys, and the script of ``install=bash``, Hydra prints itself.

    Raises:
        RequestError: Hydra refuses the arguments.
    """
    line = os.environ.get("COMP_LINE", "")
    words, starts_word = line.split(), line.endswith(" ")
    index = len(words) if starts_word else len(words) - 1
    if "query=" in " ".join(arguments):
        if index == 1:
            return sub_commands
        if index == 2 and words[1] in ("sweep", "list"):
            return list(shipped.sweeps() if words[1] == "sweep" else LISTS)
        if index < 1 or words[1] not in ("sweep", "train", "coordcheck"):
            return []
        first_override = 3 if words[1] == "sweep" else 2
        os.environ["COMP_LINE"] = " ".join([words[0], *words[first_override:]]) + " " * starts_word
    import hydra  # slow to load, and lists need none of it

    from lab.sweeping.compose import refusing

    program = hydra.main(version_base="1.3", config_path=str(shipped.data_folder("conf")), config_name="config")
    before, sys.argv = sys.argv, ["lab", *arguments]  # Hydra reads its arguments from here alone
    try:
        with refusing():
            program(lambda config: None)()
    finally:
        sys.argv = before
    return []


KEY = re.compile(r"( *)([\w.-]+):")
COMMENT = re.compile(r"\s# (.*)")


def config_lines(request: Request) -> Iterator[str]:
    """What a request asks to be shown: the config of its first point, or with --help the groups and a commented config.

    Raises:
        RequestError: Hydra cannot compose it.
    """
    from omegaconf import OmegaConf

    from lab.sweeping.compose import refusing
    from lab.sweeping.config_files import config_folders, groups, names_of
    from lab.sweeping.launch import first_point

    config, chosen = first_point(request)
    if request.show != "help":
        with refusing():
            yield OmegaConf.to_yaml(config, resolve=request.show == "resolved").rstrip()
        return
    own, folders = groups(request.config_dir), config_folders(request.config_dir)
    yield "config groups, as in optimizer=sgd:"
    for group in sorted(own):
        yield f"  {group}: {', '.join(names_of(group, request.config_dir))}"
    files = [("", "config.yaml"), *((group, f"{group}/{name}.yaml") for group, name in chosen.items() if group in own)]
    comments = dict[str, str]()
    for folder in folders:
        for group, path in files:
            if (folder / path).is_file():
                comments |= _comments(read_text(folder / path), group)
    yield ""
    yield "keys, as in optimizer.lr=3e-3:"
    for key, line in _keyed(OmegaConf.to_yaml(config)):
        yield f"  {line}  # {comments[key]}" if key in comments else f"  {line}"


def _comments(text: str, group: str) -> dict[str, str]:
    """The comments of a config file by the dotted key of the whole config; the first is about the whole group."""
    package = "" if "# @package _global_" in text else group
    found = {".".join(filter(None, (package, key))): COMMENT.search(line) for key, line in _keyed(text) if key}
    comments = {key: comment[1] for key, comment in found.items() if comment}
    return {group: shipped.comment_of(text), **comments} if group and shipped.comment_of(text) else comments


def _keyed(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line of YAML in block style after its dotted key, which is empty for an entry of a list."""
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = KEY.match(line)
        if match:
            parents = [*(parent for parent in parents if parent[0] < len(match[1])), (len(match[1]), match[2])]
        yield ".".join(name for _, name in parents) if match else "", line
