"""Registries of the entries, by name, that the lab and installed packages add."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from lab.core.errors import RequestError, nearest

Entry = TypeVar("Entry")


def _load(point: EntryPoint) -> None:
    """Import the object of an entry point."""
    try:
        point.load()
    except Exception as fault:
        package = point.dist.name if point.dist else point.module
        raise RequestError(
            f"package {package} adds {point.value} to {point.group}, which fails: {type(fault).__name__}: {fault}"
        ) from None


@cache
def points_of_others() -> EntryPoints:
    """The entry points by which installed packages add to the lab; looking for them reads every package's metadata."""
    every = entry_points()
    groups = (group for group in every.groups if group.startswith("lab."))
    return EntryPoints(point for group in groups for point in every.select(group=group))


@cache
def load_plugins() -> None:
    """Import, once, the modules that installed packages name in ``lab.plugins``; they call ``lab.register``."""
    for point in points_of_others().select(group="lab.plugins"):
        _load(point)


def packages_of_others() -> set[str]:
    """The top-level modules of installed packages that add to the lab."""
    return {point.module.split(".")[0] for point in points_of_others()}


class Registry(Generic[Entry]):
    """Entries of one kind by name.

    Other packages add entries through the entry-point group ``lab.<plural>``, or, of any kind, through ``lab.plugins``.

    Args:
        kind: what an entry is called in messages.
        plural: the last part of the name of the entry-point group.
        methods: what every entry must have.
    """

    def __init__(self, kind: str, plural: str, *methods: str) -> None:
        self.kind, self.plural, self.methods = kind, plural, methods
        self._entries: dict[str, Entry] = {}
        self._external_loaded = False

    def register(self, name: str) -> Callable[[Any], Any]:
        """Return a class or function decorator that registers the entry under ``name``.

        What a notebook defines replaces what it was when its cell ran before.

        Raises:
            RequestError: the name is taken, or the entry lacks a method that its kind must have.
        """

        def decorate(entry: Any) -> Any:
            if name in self._entries:
                first, second = source(self._entries[name]), source(entry)
                if (first.__module__, first.__qualname__) != ("__main__", second.__qualname__):
                    origins = f"by {first.__module__}, so not by {second.__module__}"
                    raise RequestError(f"{self.kind} {name!r} is already registered, {origins}")
            fields = getattr(entry, "__dataclass_fields__", ())
            lacking = [method for method in self.methods if not hasattr(entry, method) and method not in fields]
            if lacking := [*lacking, *sorted(getattr(entry, "__abstractmethods__", ()))]:
                raise RequestError(f"{self.kind} {name!r} lacks {' and '.join(lacking)}")
            self._entries[name] = entry
            return entry

        return decorate

    def replace(self, name: str, entry: Entry) -> None:
        """Register an entry under a name that may be taken."""
        self._entries[name] = entry

    def _load_external(self) -> None:
        if not self._external_loaded:
            self._external_loaded = True
            load_plugins()
            for point in points_of_others().select(group=f"lab.{self.plural}"):
                _load(point)

    def __getitem__(self, name: str) -> Entry:
        self._load_external()
        if name not in self._entries:
            raise RequestError(f"unknown {self.kind} {name!r}; {nearest(name, self._entries)}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        self._load_external()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load_external()
        return iter(sorted(self._entries))


def source(entry: Any) -> Any:
    """The class that is registered, or the function of a probe."""
    return getattr(entry, "measure", entry)


def first_line(documented: Any) -> str:
    """Return the first line of a docstring, which introduces an entry in lists."""
    return (documented.__doc__ or "").strip().split("\n")[0]


BATCHES: Registry[Any] = Registry("batch schedule", "batches", "size", "micro_batches", "in_sequences")
BURSTS: Registry[Any] = Registry("burst", "bursts", "batch", "covers")
DATA: Registry[Any] = Registry("data", "data", "open", "seed")
INTERVENTIONS: Registry[Any] = Registry("intervention", "interventions")
LINKS: Registry[Any] = Registry("optimizer link", "links", "takes", "begin")
LOSS_SCALES: Registry[Any] = Registry("loss scale", "loss_scales", "begin", "after")
MODELS: Registry[Any] = Registry("custom model", "models", "build")
PARAMETRIZATIONS: Registry[Any] = Registry("parametrization", "parametrizations", "factors", "attention_scale")
PROBES: Registry[Any] = Registry("probe", "probes", "measure")
RESPONSES: Registry[Any] = Registry("response", "responses")
SCHEDULES: Registry[Any] = Registry("schedule", "schedules", "shape")
TRACKERS: Registry[Any] = Registry("tracker", "trackers", "begin")

# Registries by the kind that ``lab.register`` takes.
KINDS: dict[str, Registry[Any]] = {
    "batch": BATCHES,
    "burst": BURSTS,
    "data": DATA,
    "intervention": INTERVENTIONS,
    "link": LINKS,
    "loss_scale": LOSS_SCALES,
    "model": MODELS,
    "parametrization": PARAMETRIZATIONS,
    "probe": PROBES,
    "response": RESPONSES,
    "schedule": SCHEDULES,
    "tracker": TRACKERS,
}


def register(kind: str, name: str, *, event: str | None = None) -> Callable[[Any], Any]:
    """Return a decorator that registers a class, or the function of a probe, under ``name``.

    The class is a frozen dataclass, whose fields are the keys of a config.  An intervention inherits from
    ``HookIntervention``, ``LossTerm`` or ``WeightIntervention``.

    Args:
        kind: one of ``KINDS``.
        name: the name by which configs choose the entry.
        event: for a probe, the kind of announcement that it measures, one of ``ANNOUNCEMENTS``.

    Raises:
        RequestError: the kind or the announcement is unknown, the name is taken, or the entry is no dataclass or lacks
            a method that its kind must have.
    """
    # imported here because it loads torch
    from lab.core.hooks import ANNOUNCEMENTS, HookIntervention, LossTerm, Probe, WeightIntervention

    if kind not in KINDS:
        raise RequestError(f"unknown kind {kind!r}; {nearest(kind, KINDS)}")
    if (kind == "probe") != (event is not None):
        raise RequestError(
            f"{kind} {name!r}: a probe names the event that it measures, as in event='logits', and nothing else does"
        )
    if event is not None and event not in ANNOUNCEMENTS:
        raise RequestError(f"probe {name!r} measures no event {event!r}; {nearest(event, ANNOUNCEMENTS)}")

    def decorate(entry: Any) -> Any:
        if event is not None:
            PROBES.register(name)(Probe(name, event, entry))
            return entry
        if not dataclasses.is_dataclass(entry):
            raise RequestError(f"{kind} {name!r} must be a frozen dataclass; its fields are the keys of a config")
        if kind == "intervention" and not issubclass(entry, (HookIntervention, LossTerm, WeightIntervention)):  # type: ignore[arg-type]
            bases = "lab.HookIntervention, lab.LossTerm or lab.WeightIntervention"
            raise RequestError(f"intervention {name!r} must inherit from {bases}")
        return KINDS[kind].register(name)(entry)

    return decorate
