"""Studies: a package each, with its claims, measures, figures and answer. Every package in this folder is a study."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).parent


def packages() -> list[ModuleType]:
    """The packages of all studies, in the order of their names."""
    return [import_module(f"{__name__}.{path.parent.name}") for path in sorted(HOME.glob("*/__init__.py"))]


def modules(part: str, study: str = "*") -> list[ModuleType]:
    """The modules, of one study or of all, whose names end with ``part``, such as ``figures`` or ``answer``."""
    files = sorted(HOME.glob(f"{study}/*{part}.py"))
    return [import_module(f"{__name__}.{path.parent.name}.{path.stem}") for path in files]
