"""The error for a request that the user has to change, and the nearest valid choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RequestError(ValueError):
    """A request that cannot be carried out; one line says what, where, and the nearest valid choice (exit code 2)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``nearest: a, b``, the names most similar to ``name``; all known names when none is similar."""
    known = sorted(set(known))
    similar = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"nearest: {', '.join(similar)}" if similar else f"known: {', '.join(known) or 'none'}"
