"""The rules of the code base: which package imports which, and who prints.  To change a rule, edit it here."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
TRAINING_PARTS = {"core", "records", "data", "model", "interventions", "optim", "probes", "responses"}
BELOW_SWEEP = {*TRAINING_PARTS, "contrib", "training", "analysis", "report"}
BELOW_FEATURES = {*BELOW_SWEEP, "sweeping"}
# What a package may import besides itself.  Every module may import `lab`, which imports nothing.
PACKAGES: dict[str, set[str]] = {
    "lab": set(),
    "core": set(),
    "records": {"core"},
    "data": {"core"},
    "model": {"core"},
    "optim": {"core"},
    "probes": {"core"},
    "interventions": {"core", "model"},
    "responses": {"core"},
    "contrib": TRAINING_PARTS - {"records"},
    "training": {*TRAINING_PARTS, "contrib"},
    "analysis": {"core", "records"},
    "report": {"core", "records", "analysis"},
    "sweeping": BELOW_SWEEP,
    "features": BELOW_FEATURES,
    "notebook": {"core", "records", "analysis", "report", "features"},
    "labwatch": {"core", "records", "model", "probes", "analysis", "report"},
    "cli": {*BELOW_FEATURES, "features", "labwatch"},
    "studies": {*BELOW_FEATURES, "features", "cli", "labwatch"},
    "hydra_plugins": {"core", "sweeping", "cli"},
    "pytest_plugin": {"core", "records", "analysis", "features", "sweeping"},
    "__main__": {"core", "sweeping", "cli"},
}
# Inside `lab.analysis`: a module or package imports from lower lines only.
ANALYSIS_FLOORS = [
    {"text", "statistics", "probe_values"},
    {"curves", "crossings", "rendering"},
    {"sensitivity", "grouping"},
    {"drawing", "spikes", "runaway"},
    {"laws", "guard", "stress", "contrasts"},
    {"changes"},
]
# Packages that only pass names on, when first asked for; they may name what is of any package but the studies.
FACES = {"lab", "lab.analysis"}
# Who may do what the others must leave to them, by package or by module.
COMMANDS = {
    *(f"lab.features.{path.parent.name}.command" for path in (HOME / "lab" / "features").glob("*/command.py")),
    *(
        "lab.features.selftest",
        "labwatch.watch.command",
        "labwatch.compare.command",
        "lab.__main__",
        "lab.cli",
        "studies.board.command",
        "studies.claims.command",
    ),
}
ALLOWED = {
    "print": {
        *COMMANDS,
        "lab.core.printing",
        "lab.sweeping",
        "lab.report.answer",
        "studies.board.training",
        "lab.features.stress",
    },
    "print unescaped": {"lab.core.printing"},
    "exit": {*COMMANDS, "lab.sweeping.bench", "lab.sweeping.launch", "lab.sweeping.local_jobs", "hydra_plugins"},
    "read arguments": {
        *COMMANDS,
        "lab.core.usage",
        "lab.report.answer",
        "lab.sweeping.request",
        "lab.sweeping.own_code",
    },
    "know Hydra": {
        *("lab.__main__", "lab.cli", "lab.sweeping.compose", "lab.sweeping.request", "lab.sweeping.launch"),
        *("lab.sweeping.config_files", "lab.features.stress.plan", "hydra_plugins"),
    },
    # files.open_file refuses a pipe, which its reader may wait for, and a device, which may have no end
    "open files": {"lab.core.files", "lab.core.machine", "lab.data.packing", "lab.records.leases"},
}

# Lines of code of each package, without blank lines, comments and docstrings.  A number rises only in the commit whose
# message says what a user gains by it.
LINES = {
    "lab": 66,
    "core": 1647,
    "records": 917,
    "data": 882,
    "model": 1485,
    "optim": 1725,
    "probes": 342,
    "interventions": 1053,
    "responses": 127,
    "contrib": 322,
    "training": 2054,
    "analysis": 5111,
    "report": 1378,
    "sweeping": 2705,
    "features": 3462,
    "notebook": 54,
    "labwatch": 9669,
    "cli": 576,
    "studies": 6999,
    "hydra_plugins": 57,
    "pytest_plugin": 139,
    "__main__": 40,
}

FILES = sorted(
    path for folder in ("lab", "labwatch", "studies", "hydra_plugins") for path in (HOME / folder).rglob("*.py")
)
MODULES = {".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
SOURCES = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}


def package(module: str) -> str:
    """``lab.data.text`` is in the package ``data``, and ``studies.spikes.figures`` in ``studies``."""
    first, _, rest = module.partition(".")
    return rest.split(".")[0] if first == "lab" and rest else first


@cache
def tree(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(source: str) -> list[ast.AST]:
    """Every node of its tree."""
    return list(ast.walk(tree(source)))


@cache
def imported_names(source: str) -> list[str]:
    """Every dotted name a module imports, at the top or inside functions; ``from a import b`` is ``a.b``."""
    found: list[str] = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            found += (f"{node.module}.{name.name}" for name in node.names)
    return found


def arrows(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module of the house the modules of the house that it imports."""

    def module_of(name: str) -> str:
        while name and name not in sources:
            name = name.rpartition(".")[0]
        return name

    return {
        module: set() if module in FACES else {module_of(name) for name in imported_names(source)} - {"", module}
        for module, source in sources.items()
    }


def packages_below(module: str, known: Mapping[str, set[str]]) -> set[str]:
    """The packages of everything that a module loads, directly or not."""
    below, found = [module], set[str]()
    while below:
        if (other := below.pop()) not in found:
            found.add(other)
            below += known[other]
    return {package(other) for other in found}


def passed_on(face: str) -> Iterator[str]:
    """The dotted names of the house in the source of a face, in imports for type checkers or as words."""
    words = (node.value for node in nodes(face) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    yield from (
        name for name in (*imported_names(face), *words) if re.fullmatch(r"(lab|labwatch|studies)(\.\w+)+", name)
    )


def upward_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports that the tables above do not allow."""
    floor = {name: height for height, names in enumerate(ANALYSIS_FLOORS) for name in names}
    refused = [
        f"{face} passes on {name}" for face in FACES for name in passed_on(sources[face]) if package(name) == "studies"
    ]
    for module, others in arrows(sources).items():
        for other in others - {"lab"}:
            mine, theirs = package(module), package(other)
            inside = [name.split(".")[2] for name in (module, other) if name.startswith("lab.analysis.")]
            if mine != theirs:
                fits = theirs in PACKAGES[mine]
            elif mine == "analysis" and len(inside) == 2 and inside[0] != inside[1]:
                fits = floor[inside[1]] < floor[inside[0]]
            else:
                fits = True
            if not fits:
                refused.append(f"{module} imports {other}")
    return refused


def imports_of_neighbours(sources: Mapping[str, str], home: str, shared: str = "") -> list[str]:
    """Imports of a package of ``home``, such as a feature, by another, but for the one that all may import."""

    def name(module: str) -> str:
        return module.removeprefix(f"{home}.").split(".")[0] if module.startswith(f"{home}.") else ""

    return [
        f"{module} imports {other}"
        for module, others in arrows(sources).items()
        for other in others
        if name(module) and name(other) not in ("", shared, name(module))
    ]


def circles(sources: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    known, done = arrows(sources), set[str]()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in known[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in sources:
        visit(module, ())
    return found


def test_every_package_is_in_the_table() -> None:
    assert {package(module) for module in MODULES} == set(PACKAGES)
    inside = {module.split(".")[2] for module in MODULES if module.startswith("lab.analysis.")}
    assert inside == set().union(*ANALYSIS_FLOORS)


def test_no_package_imports_what_its_line_does_not_allow() -> None:
    assert not upward_imports(SOURCES)


def test_no_feature_imports_another() -> None:
    assert not imports_of_neighbours(SOURCES, "lab.features")
    planted = f"{SOURCES['lab.features.guard.answer']}\nfrom lab.features.stress import card\n"
    assert imports_of_neighbours({**SOURCES, "lab.features.guard.answer": planted}, "lab.features")


@pytest.mark.parametrize("module", ["studies.experts.figures", "studies.claims.public_table"])
def test_no_study_imports_another_nor_do_the_claims_import_one(module: str) -> None:
    assert not imports_of_neighbours(SOURCES, "studies", shared="claims")
    planted = f"{SOURCES[module]}\nfrom studies.alarms.figures import detector_scores\n"
    assert imports_of_neighbours({**SOURCES, module: planted}, "studies", shared="claims")


def test_there_are_no_circles() -> None:
    assert not circles(SOURCES)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("lab.core.files", "from lab.records import store"),
        ("lab.optim.schedule", "def f():\n    from lab.model.layers import Linear"),
        ("lab.analysis.curves", "import lab.analysis.sensitivity"),
        ("lab.report.build", "from studies.claims import scoreboard"),
        ("lab.analysis", "if TYPE_CHECKING:\n    from studies.claims.scoreboard import verdicts"),
        ("lab", 'MODULES = {"studies.claims.scoreboard": ("verdicts",)}'),
    ],
)
def test_a_planted_upward_import_is_found(module: str, line: str) -> None:
    assert upward_imports({**SOURCES, module: f"{SOURCES[module]}\n{line}\n"})


def test_a_planted_circle_is_found() -> None:
    planted = f"{SOURCES['lab.core.errors']}\nfrom lab.core import files\n"
    assert circles({**SOURCES, "lab.core.errors": planted})


def test_analysis_needs_neither_torch_nor_hydra() -> None:
    readers = ("analysis", "studies", "report", "features", "labwatch")
    modules = [module for module in MODULES if package(module) in readers and "labwatch.recorder" not in module]
    known = arrows(SOURCES)
    modules = [module for module in modules if not {"sweeping", "training"} & packages_below(module, known)]
    code = f"import {', '.join(modules)}, sys; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME, check=False).returncode == 0


def deeds(source: str) -> Iterator[str]:
    """What a module does that few may do."""
    for node in nodes(source):
        match node:
            case (
                ast.Name(id="print" | "input")
                | ast.Attribute(value=ast.Name(id="traceback"), attr="print_exc")
                | ast.Attribute(value=ast.Attribute(value=ast.Name(id="sys")), attr="write" | "writelines")
            ):
                yield "print unescaped"
            case ast.Attribute(value=ast.Name(id="sys"), attr="stdout" | "stderr"):
                yield "print"
            case (
                ast.Raise(exc=ast.Call(func=ast.Name(id="SystemExit")) | ast.Name(id="SystemExit"))
                | ast.Call(func=ast.Name(id="exit" | "quit"))
                | ast.Attribute(value=ast.Name(id="sys" | "os"), attr="exit" | "_exit")
            ):
                yield "exit"
            case ast.Attribute(value=ast.Name(id="sys"), attr="argv"):
                yield "read arguments"
            case ast.Call(func=ast.Name(id="open")):
                yield "open files"
            case ast.Call(func=ast.Attribute(value=place, attr="read_text" | "read_bytes")) if not (
                isinstance(place, ast.Name) and place.id == "files"
            ):
                yield "open files"
    for name in imported_names(source):
        if name == "lab.core.printing.say":
            yield "print"
        if name.split(".")[0] in ("hydra", "omegaconf"):
            yield "know Hydra"
        if name.split(".")[0] in ("argparse", "click"):
            yield "read arguments"


@cache
def deeds_of_modules() -> dict[str, set[str]]:
    return {module: set(deeds(source)) for module, source in SOURCES.items()}


@pytest.mark.parametrize("deed", ALLOWED)
def test_few_print_exit_read_arguments_or_know_hydra(deed: str) -> None:
    doers = {module for module, done in deeds_of_modules().items() if deed in done}
    assert doers, f"nobody seems to {deed}: the test cannot see it"
    assert not {module for module in doers if not any(f"{module}.".startswith(f"{may}.") for may in ALLOWED[deed])}


def lines_of_code(source: str) -> int:
    """Lines that hold code, and no docstring."""
    lines = enumerate(map(str.strip, source.split("\n")), 1)
    code = {number for number, line in lines if line and not line.startswith("#")}
    documenting = set[int]()
    for node in nodes(source):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # of which empty lines are code
            code |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documenting |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code - documenting)


def test_no_package_grows_unsaid() -> None:
    assert lines_of_code('"""A.\n\nB."""\n\n# c\nx = [\n    1,  # d\n]\ny = """\n\n# e"""\n') == 6
    counts = Counter[str]()
    for module, source in SOURCES.items():
        counts[package(module)] += lines_of_code(source)
    assert {name: (count, LINES[name]) for name, count in counts.items() if count > LINES[name]} == {}


def test_modules_say_in_their_first_line_what_they_are_for() -> None:
    assert not [module for module, source in SOURCES.items() if not (ast.get_docstring(tree(source)) or "").strip()]


def test_few_modules_stand_outside_the_packages() -> None:
    assert {path.name for path in (HOME / "lab").glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "notebook.py",
        "pytest_plugin.py",
    }


def test_no_name_is_both_a_module_and_something_in_it() -> None:
    """``from lab.analysis import study`` must mean one thing."""
    for module, source in SOURCES.items():
        names = {node.name for node in tree(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert module.rpartition(".")[2] not in names, module


@pytest.mark.parametrize("face", sorted(FACES))
def test_a_public_name_is_one_thing_and_known_to_type_checkers(face: str) -> None:
    """Each name resolves; none is both a module beside it and something else."""
    package = importlib.import_module(face)
    typed = [name for node in tree(SOURCES[face]).body if isinstance(node, ast.If) for name in aliases(node)]
    assert sorted(typed) == sorted(package.__all__)
    for name in package.__all__:
        module = f"{face}.{name}"
        assert module not in MODULES or getattr(package, name) is importlib.import_module(module), name


def aliases(block: ast.If) -> Iterator[str]:
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        yield from (name.asname or name.name for name in node.names)


DOCUMENTS = [
    *sorted((HOME / "docs").glob("*.md")),
    *sorted((HOME / "notebooks").glob("*.ipynb")),
    *sorted((HOME / "tests" / "own_recipe").rglob("*.py")),
    HOME / "README.md",
]
PUBLIC = re.compile(r"(?:from|import) (lab[\w.]*)")


def test_documents_and_examples_import_the_public_face_only() -> None:
    named = {path.name: {*PUBLIC.findall(path.read_text(encoding="utf-8"))} for path in DOCUMENTS}
    assert {name: imported for name, imported in named.items() if not imported <= {"lab", "lab.analysis"}} == {}


def test_tests_run_on_one_thread() -> None:
    """With two, those that train small models take five times as long, which no other test would tell."""
    assert importlib.import_module("torch").get_num_threads() == 1


def test_nothing_is_left_to_be_done() -> None:
    notes = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    texts = [
        path
        for folder in ("lab", "labwatch", "studies", "hydra_plugins", "conf", "sweeps", "tests")
        for path in (HOME / folder).rglob("*.*")
    ]
    for path in texts:
        if path.suffix in (".py", ".yaml"):
            assert not [note for note in notes if note in path.read_text(encoding="utf-8")], path
