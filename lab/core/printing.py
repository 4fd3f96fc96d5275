"""Text for a terminal, with its control characters escaped, whoever wrote it."""

from __future__ import annotations

import json
import sys
from typing import Any


def printable(text: str) -> str:
    """Escape control characters, surrogates and marks that change the direction of writing."""
    return "\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


_texts_on_stdout = 0


def say(text: str, *, error: bool = False) -> None:
    """Print lines, ``printable``, on stdout at once, or as an ``error`` on stderr."""
    global _texts_on_stdout
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)
    _texts_on_stdout += not error


def say_json(value: Any) -> None:
    """Print a value as JSON; what JSON has no form for is printed as text."""
    say(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False, default=str))


def texts_on_stdout() -> int:
    """How many texts this process has said on stdout."""
    return _texts_on_stdout
