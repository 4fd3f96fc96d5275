"""Things found by name: an unknown name is refused in one line that lists its nearest neighbours."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class RequestError(ValueError):
    """The request cannot be carried out: one line that says what, where, and the nearest valid choice (exit code 2)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``nearest: a, b`` for the known names most like ``name``; all of them when none is alike."""
    known = sorted(set(known))
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"nearest: {', '.join(alike)}" if alike else f"known: {', '.join(known) or 'none'}"


def _load(point: EntryPoint) -> None:
    """Import what an installed package names.

    Raises:
        RequestError: it cannot be imported; whatever that raised, it is no fault of the lab.
    """
    try:
        point.load()
    except Exception as fault:
        package = point.dist.name if point.dist else point.module
        raise RequestError(
            f"package {package} adds {point.value} to {point.group}, which fails: {type(fault).__name__}: {fault}"
        ) from None


@cache
def load_plugins() -> None:
    """Import, once, the modules that installed packages name in ``lab.plugins``; they call ``lab.register``."""
    for point in entry_points(group="lab.plugins"):
        _load(point)


class Registry(Generic[Entry]):
    """Entries of one kind by name.

    Outside packages add theirs through the entry-point group ``lab.<plural>``, of any kind through ``lab.plugins``.
    """

    def __init__(self, kind: str, plural: str) -> None:
        self.kind, self.plural = kind, plural
        self._entries: dict[str, Entry] = {}
        self._outside_loaded = False

    def register(self, name: str) -> Callable[[Any], Any]:
        """Class or function decorator: file the entry under ``name``."""

        def file(entry: Any) -> Any:
            if name in self._entries:
                first, second = (getattr(each, "measure", each).__module__ for each in (self._entries[name], entry))
                raise RequestError(f"{self.kind} {name!r} is already registered, by {first}, so not by {second}")
            self._entries[name] = entry
            return entry

        return file

    def _load_outside(self) -> None:
        if not self._outside_loaded:
            self._outside_loaded = True
            load_plugins()
            for point in entry_points(group=f"lab.{self.plural}"):
                _load(point)

    def __getitem__(self, name: str) -> Entry:
        self._load_outside()
        if name not in self._entries:
            raise RequestError(f"unknown {self.kind} {name!r}; {nearest(name, self._entries)}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        self._load_outside()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load_outside()
        return iter(sorted(self._entries))


def first_line(documented: Any) -> str:
    """The sentence that introduces an entry: the first line of its docstring."""
    return (documented.__doc__ or "").strip().split("\n")[0]


DATA: Registry[Any] = Registry("data", "data")
INTERVENTIONS: Registry[Any] = Registry("intervention", "interventions")
LINKS: Registry[Any] = Registry("optimizer link", "links")
MODELS: Registry[Any] = Registry("guest", "models")
PARAMETRIZATIONS: Registry[Any] = Registry("parametrization", "parametrizations")
PROBES: Registry[Any] = Registry("probe", "probes")
SCHEDULES: Registry[Any] = Registry("schedule", "schedules")
TRACKERS: Registry[Any] = Registry("tracker", "trackers")

# What ``lab.register`` calls them.
KINDS: dict[str, Registry[Any]] = {
    "data": DATA,
    "intervention": INTERVENTIONS,
    "link": LINKS,
    "model": MODELS,
    "parametrization": PARAMETRIZATIONS,
    "probe": PROBES,
    "schedule": SCHEDULES,
    "tracker": TRACKERS,
}
