"""The shelf: studies of a clone of the repository, and what is found in them because their folders are there."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from lab.core.errors import RequestError

HOME = Path(__file__).parents[2] / "studies"


def studies() -> list[ModuleType]:
    """The packages of all studies, in the order of their names."""
    return [import_module(f"studies.{path.parent.name}") for path in sorted(HOME.glob("*/__init__.py"))]


def modules(part: str, study: str = "*") -> list[ModuleType]:
    """The modules, of one study or of all, whose names end with ``part``, such as ``figures`` or ``answer``."""
    files = sorted(HOME.glob(f"{study}/*{part}.py"))
    return [import_module(f"studies.{path.parent.name}.{path.stem}") for path in files]


def module(study: str, part: str, what: str) -> ModuleType:
    """A module of a study, for ``what`` needs it.

    Raises:
        RequestError: the folder of studies is not there.
    """
    if not (found := modules(part, study)):
        raise RequestError(f"{what} needs the folder studies/ of a clone of the lab, which an installed package lacks")
    return found[0]
