"""Registries: entries found by name, those of the lab and those a user's own package adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from lab.core.errors import RequestError, nearest

Entry = TypeVar("Entry")


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

# What the lab asks of an entry, whatever else that has.
REQUIRED_ATTRIBUTES = {
    "data": ("open", "seed"),
    "link": ("takes", "begin"),
    "model": ("build",),
    "parametrization": ("factors", "attention_scale"),
    "schedule": ("shape",),
    "tracker": ("begin",),
}


def register(kind: str, name: str, *, hears: str | None = None) -> Callable[[Any], Any]:
    """Class decorator, of a probe function decorator: file the entry under ``name``.

    An intervention is a ``HookIntervention`` or a ``LossTerm``.  A probe says which announcement it ``hears``.

    Raises:
        RequestError: there is no such kind, nothing is ever heard of that kind, the name is taken, or the entry lacks
            what its kind has or is no dataclass, whose fields are the keys of a config.
    """
    from lab.core.hooks import ANNOUNCEMENTS, HookIntervention, LossTerm, Probe  # which loads torch

    if kind not in KINDS:
        raise RequestError(f"unknown kind {kind!r}; {nearest(kind, KINDS)}")
    if (kind == "probe") != (hears is not None):
        raise RequestError(f"{kind} {name!r}: a probe says what it hears, as in hears='logits', and nothing else does")
    if hears is not None and hears not in ANNOUNCEMENTS:
        raise RequestError(f"probe {name!r} hears {hears!r}; {nearest(hears, ANNOUNCEMENTS)}")

    def file(entry: Any) -> Any:
        if hears is None and not dataclasses.is_dataclass(entry):
            raise RequestError(f"{kind} {name!r} must be a frozen dataclass; its fields are the keys of a config")
        required = list(REQUIRED_ATTRIBUTES.get(kind, ()))
        if kind == "intervention":
            if not (isinstance(entry, type) and issubclass(entry, (HookIntervention, LossTerm))):
                raise RequestError(f"intervention {name!r} must inherit from lab.HookIntervention or lab.LossTerm")
            required += ["hook_points"] * issubclass(entry, HookIntervention) + ["uses"] * issubclass(entry, LossTerm)
        present = {*dir(entry), *getattr(entry, "__dataclass_fields__", ())}
        missing = [attribute for attribute in required if attribute not in present]
        if missing := [*missing, *sorted(getattr(entry, "__abstractmethods__", ()))]:
            raise RequestError(f"{kind} {name!r} lacks {' and '.join(missing)}")
        KINDS[kind].register(name)(entry if hears is None else Probe(name, hears, entry))
        return entry

    return file
