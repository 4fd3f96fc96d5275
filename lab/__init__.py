"""Small Transformers that show the training instabilities of large ones.

``lab.register`` files an entry of a user's own, ``lab.main`` runs a command line from a user's own script.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ROOM_OF = {"register": "lab.core.registry", "main": "lab.__main__"}


def __getattr__(name: str) -> Any:
    """What users call by the name of the lab; looked up when they do, since importing the lab must load no torch."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF[name]), name)
