"""The program: runs a command line, and ends in one line when it is interrupted."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lab.cli import interrupt

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


# Python looks for garbage whenever this many more objects are alive.  Importing makes a million that all stay, and a
# training step leaves no reference cycles, so the usual 700 costs half a second and frees nothing.
GARBAGE_THRESHOLD = 50_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code.

    Args:
        arguments: the words after ``lab``.  None means those of this process, whose interrupts are then handled until
            it ends.
    """
    if arguments is None:
        interrupt.handle()
        gc.set_threshold(GARBAGE_THRESHOLD)
        import_lazily()
    code = interrupt.INTERRUPTED
    try:
        from lab.cli import dispatch  # here, since an interrupt may come while this is imported

        code = dispatch.run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        interrupt.report()
    if arguments is None:
        interrupt.handle_at_exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
