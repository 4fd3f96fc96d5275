"""Text for a terminal, with its control characters escaped, whoever wrote it."""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    """Escape control characters, surrogates and marks that change the direction of writing."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def say(text: str, *, error: bool = False) -> None:
    """Print lines, ``printable``, on stdout at once, or as an ``error`` on stderr."""
    print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)
