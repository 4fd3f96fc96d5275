"""The shelf: packages of ``lab/studies``, and what is found in them because their folders are there."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from lab.core.errors import RequestError

HOME = Path(__file__).parents[1] / "studies"


def studies() -> list[ModuleType]:
    """The packages of all studies, in the order of their names."""
    return [import_module(f"lab.studies.{path.parent.name}") for path in sorted(HOME.glob("*/__init__.py"))]


def modules(part: str, study: str = "*") -> list[ModuleType]:
    """The modules, of one study or of all, whose names end with ``part``, such as ``figures`` or ``answer``."""
    files = sorted(HOME.glob(f"{study}/*{part}.py"))
    return [import_module(f"lab.studies.{path.parent.name}.{path.stem}") for path in files]


def claims(part: str, what: str) -> ModuleType:
    """A module of what judges claims, for ``what`` needs it.

    Raises:
        RequestError: the folder of studies is not there.
    """
    if not (found := modules(part, "claims")):
        raise RequestError(f"{what} needs the folder lab/studies, which this copy of the lab lacks")
    return found[0]
