"""Modules that are loaded when something of them is first used, since loading them takes longer than many commands."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SLOW = ("pandas",)


class LazyModule(ModuleType):
    """Stands for a module; the first name that is asked of it loads the module itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # which the import statement looks at

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)


def import_lazily() -> None:
    """Put such a module in the place of each slow one that is not loaded yet."""
    for name in SLOW:
        sys.modules.setdefault(name, LazyModule(name))
