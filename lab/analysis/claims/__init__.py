"""Claims of papers, judged by the records; importing the package imports its modules, which file their claims."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
