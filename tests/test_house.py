"""The laws of the house: who imports whom, who speaks, how long a file may be.  To break one, edit it here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
# From the ground up.  A room imports only from lower floors, so rooms side by side never import one another; a new
# room must be given its place here.
FLOORS = [
    "lab",
    "registry hooks products visible",
    "machine disk",
    "ranks",
    "axes sharing",
    "fields store trackers",
    "data model loss optim probes analysis plan parts tracking",
    "checkpoint recipe",
    "config engine export feed",
    "sweep",
    "fleet",
    "train memory",
    "record",
    "trial halving resumable",
    "agenda cost progress sketch",
    "live coordcheck",
    "job",
    "app",
    "hydra_plugins",
    "composing",
    "guard",
    "request",
    "catalogue",
    "completion commands pytest_plugin",
    "__main__",
]
# Who may do what the others must leave to them.
PRINTS = {"app", "commands", "__main__"}
EXITS = {"app", "hydra_plugins", "commands", "__main__"}
READS_ARGUMENTS = {"request", "completion", "__main__"}
KNOWS_HYDRA = {"app", "hydra_plugins", "composing", "guard", "request", "catalogue", "__main__"}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 200, 60
LONGER = {"lab.records.store": 260}  # file -> the lines it may have

FILES = sorted(path for folder in ("lab", "hydra_plugins") for path in (HOME / folder).rglob("*.py"))
NAMES = {".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def room(module: str) -> str:
    """``lab.data.text`` is in the room ``data``."""
    first, _, rest = module.partition(".")
    return rest.split(".")[0] if first == "lab" and rest else first


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(NAMES[module].read_text(encoding="utf-8"))


def all_imports(module: str) -> Iterator[str]:
    """Every dotted name a module imports, at the top or on the way; ``from a import b`` is ``a.b``."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def own_imports(module: str) -> set[str]:
    """The modules of the house that a module imports."""
    found = set()
    for name in all_imports(module):
        while name and name not in NAMES:
            name = name.rpartition(".")[0]
        found |= {name} - {""}
    return found


FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names.split()}


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in NAMES if module != "hydra_plugins"} == set(FLOOR)


def test_the_eye_sees_imports() -> None:
    """At the top, inside functions, of modules and of what is in them."""
    assert "lab.core.registry" in own_imports("lab.core.schema")
    assert "lab.sweep.dry_run" in own_imports("lab.cli.hydra_app")
    assert {"lab", "lab.training.config"} <= own_imports("lab.training.recorder")
    assert "lab.records.store" in own_imports("lab.training.config")


@pytest.mark.parametrize("module", NAMES)
def test_nobody_imports_from_upstairs_or_next_door(module: str) -> None:
    for other in own_imports(module) - {module}:
        mine, theirs = room(module), room(other)
        assert mine == theirs or FLOOR[theirs] < FLOOR[mine], f"{module} imports {other}"


def test_there_are_no_circles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"circle: {' -> '.join([*path, module])}"
        if module not in done:
            for other in own_imports(module) - {module}:
                visit(other, (*path, module))
            done.add(module)

    for module in NAMES:
        visit(module, ())


def test_the_store_is_how_analysis_learns_of_training() -> None:
    wing = [module for module in NAMES if room(module) == "analysis"]
    assert {room(other) for module in wing for other in own_imports(module)} == {
        "analysis",
        "store",
        "registry",
        "visible",
    }


def test_analysis_needs_no_torch() -> None:
    wing = [module for module in NAMES if room(module) == "analysis"]
    code = f"import {', '.join(wing)}, sys; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME, check=False).returncode == 0


def deeds(module: str) -> Iterator[str]:
    """What a module does that few may do."""
    for node in ast.walk(tree(module)):
        match node:
            case (
                ast.Call(func=ast.Name(id="print" | "input"))
                | ast.Attribute(value=ast.Name(id="sys"), attr="stdout" | "stderr")
            ):
                yield "print"
            case ast.Attribute(value=ast.Name(id="traceback"), attr="print_exc"):
                yield "print"
            case ast.Raise(exc=ast.Call(func=ast.Name(id="SystemExit")) | ast.Name(id="SystemExit")):
                yield "exit"
            case ast.Call(func=ast.Name(id="exit" | "quit")):
                yield "exit"
            case ast.Attribute(value=ast.Name(id="sys" | "os"), attr="exit" | "_exit"):
                yield "exit"
            case ast.Attribute(value=ast.Name(id="sys"), attr="argv"):
                yield "read arguments"
    for name in all_imports(module):
        if name.split(".")[0] in ("hydra", "omegaconf"):
            yield "know Hydra"
        if name.split(".")[0] in ("argparse", "click"):
            yield "read arguments"


def test_few_print_exit_read_arguments_or_know_hydra() -> None:
    allowed = {"print": PRINTS, "exit": EXITS, "read arguments": READS_ARGUMENTS, "know Hydra": KNOWS_HYDRA}
    found: dict[str, set[str]] = {deed: set() for deed in allowed}
    for module in NAMES:
        for deed in deeds(module):
            found[deed].add(room(module))
    for deed, rooms in found.items():
        assert rooms, f"nobody seems to {deed}: the eye is blind"
        assert rooms <= allowed[deed], f"{rooms - allowed[deed]} should not {deed}"


@pytest.mark.parametrize("module", NAMES)
def test_files_and_functions_are_short_and_introduce_themselves(module: str) -> None:
    lines = NAMES[module].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGER.get(module, MOST_LINES)
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MOST_LINES_OF_A_FUNCTION, f"{node.name} has {length} lines"
    if module != "hydra_plugins":
        assert (ast.get_docstring(tree(module)) or "").split("\n")[0].strip(), (
            "a room says in its first line what it is for"
        )


def test_nothing_is_left_to_be_done() -> None:
    notes = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    texts = [
        path for folder in ("lab", "hydra_plugins", "conf", "sweeps", "tests") for path in (HOME / folder).rglob("*.*")
    ]
    for path in texts:
        if path.suffix in (".py", ".yaml"):
            assert not [note for note in notes if note in path.read_text(encoding="utf-8")], path
