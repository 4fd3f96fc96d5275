"""Errors a user can mend: one line that says what, where and the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RequestError(ValueError):
    """The request cannot be carried out: one line that says what, where, and the nearest valid choice (exit code 2)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``nearest: a, b`` for the known names most like ``name``; all of them when none is alike."""
    known = sorted(set(known))
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"nearest: {', '.join(alike)}" if alike else f"known: {', '.join(known) or 'none'}"
