"""Text for a terminal, with its control characters escaped, whoever wrote it."""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    """Escape control characters, surrogates and marks that change the direction of writing."""
    return "\n".join(line if line.isprintable() else _escaped(line) for line in text.split("\n"))


def _escaped(line: str) -> str:
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


def say(text: str, *, error: bool = False) -> None:
    """Print lines, ``printable``, on stdout at once, or as an ``error`` on stderr."""
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)
