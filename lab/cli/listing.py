"""Names a user may type: lists for `lab list`, and tab completion."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from lab.core import shipped
from lab.core.errors import RequestError, nearest
from lab.core.files import read_text
from lab.core.registry import first_line, has_plugins

# Decorators of the lab's own entries.
REGISTERING = re.compile(r"^@(probe|figure|[A-Z_]+\.register)\(", re.MULTILINE)


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        yield path.stem, shipped.comment_of(read_text(path))


def _choices(group: str) -> Callable[[], Iterator[tuple[str, str]]]:
    """A function that yields the files of a config group, each with its first comment."""
    return lambda: _files(sorted(shipped.data_folder("conf").glob(f"{group}/*.yaml")))


def _models() -> Iterator[tuple[str, str]]:
    for path in sorted(shipped.data_folder("conf").glob("model/*.yaml"), key=lambda path: (len(path.stem), path.stem)):
        values = shipped.load(path)
        yield path.stem, f"width {values['width']}, depth {values['depth']}, head width {values['head_width']}"


@cache
def _own_entries() -> dict[str, dict[str, str]]:
    """The lab's own entries by the name of their registry, each with the first line of its docstring.

    They are read from the source files, since importing them would load torch, pandas and matplotlib for seconds.
    """
    entries: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source = read_text(path)
        if not REGISTERING.search(source):
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                line = (ast.get_docstring(node) or "").split("\n")[0]
                for decorator in node.decorator_list:
                    match decorator:
                        case ast.Call(ast.Attribute(ast.Name(registry), "register"), [ast.Constant(str(name))]):
                            entries[registry][name] = line
                        case ast.Call(ast.Name("figure"), [ast.Constant(str(name))]):
                            entries["FIGURES"][name] = line
                        case ast.Call(ast.Name("probe")):
                            entries["PROBES"][node.name] = line
    return entries


def _entries(
    registry: str, home: str = "lab.core.registry", filled_by: str = "lab.training.config"
) -> Callable[[], Iterator[tuple[str, str]]]:
    """A function that yields the entries of a registry of the module ``home``, each with its first line of docstring.

    Installed packages and scripts may have added entries; then ``filled_by`` is imported to find them.
    """

    def lines() -> Iterator[tuple[str, str]]:
        if filled_by not in sys.modules and not has_plugins(registry.lower()):
            yield from sorted(_own_entries()[registry].items())
            return
        import_module(filled_by)
        filled = getattr(import_module(home), registry)
        for name in filled:
            yield name, first_line(getattr(filled[name], "measure", filled[name]))

    return lines


def _detectors() -> Iterator[tuple[str, str]]:
    from lab.core.detectors import LABELS

    for name, (label, _) in LABELS.items():
        yield name, label


LISTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "sweeps": lambda: _files(shipped.sweeps().values()),
    "scales": _choices("scale"),
    "arms": _choices("arm"),
    "models": _models,
    "guests": _entries("MODELS"),
    "interventions": _entries("INTERVENTIONS"),
    "parametrizations": _entries("PARAMETRIZATIONS"),
    "optimizers": _choices("optimizer"),
    "links": _entries("LINKS"),
    "schedules": _entries("SCHEDULES"),
    "batches": _entries("BATCHES"),
    "data": _entries("DATA"),
    "bursts": _entries("BURSTS"),
    "loss_scales": _entries("LOSS_SCALES"),
    "responses": _entries("RESPONSES"),
    "ledgers": _choices("ledger"),
    "detectors": _detectors,
    "probes": _entries("PROBES"),
    "trackers": _entries("TRACKERS"),
    "figures": _entries("FIGURES", "lab.analysis.drawing.registry", "lab.studies.figures"),
}


def read_lists(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The entries of the named lists, each with a line about it, by the name of the list; of all if none is named.

    Raises:
        RequestError: a list is unknown.
    """
    for name in names:
        if name not in LISTS:
            raise RequestError(f"unknown list {name!r}; {nearest(name, LISTS)}")
    return {name: dict(LISTS[name]()) for name in names or LISTS}


def lines(named: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of lists for a terminal, under their names if there are several."""
    indent = "" if len(named) == 1 else "  "
    for name, entries in named.items():
        if len(named) != 1:
            yield f"{name}:"
        width = max(map(len, entries), default=0)
        yield from (f"{indent}{entry:{width}}  {line}".rstrip() for entry, line in entries.items())


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
    from lab.cli import launch  # slow to load, and lists need none of it

    launch.call_hydra(arguments)
    return []
