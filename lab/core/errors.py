"""The error for a request that the user has to change, and the nearest valid choices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class RequestError(ValueError):
    """A request that cannot be carried out; one line says what, where, and the nearest valid choice (exit code 2)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``nearest: a, b``, the names most similar to ``name``; all known names when none is similar.

    Of dotted names the last part may be given alone: ``lr`` is nearest to ``optimizer.lr``.
    """
    known = sorted(set(known))
    similar = similar_names(name, known)
    return f"nearest: {', '.join(similar)}" if similar else f"known: {', '.join(known) or 'none'}"


def similar_names(name: str, known: Sequence[str]) -> list[str]:
    """The names, three at most, that are most similar to ``name`` as a whole, or else in their last dotted part."""
    last_parts = {key.rpartition(".")[2]: key for key in reversed(known)}
    by_last_part = [key for key in known if key.rpartition(".")[2] == name]
    alike = by_last_part or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return alike[:3] or [last_parts[part] for part in difflib.get_close_matches(name, last_parts, n=3, cutoff=0.6)]
