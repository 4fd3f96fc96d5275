"""How a user's own package adds to the lab: this is an entry of that kind, under this name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lab.hooks import HEARD
from lab.probes.probe import Probe
from lab.registry import KINDS, RequestError, nearest

# What the lab asks of an entry, whatever else that has.
ASKED = {
    "data": ("open", "seed"),
    "intervention": ("attaches_to",),
    "link": ("makes", "begin"),
    "model": ("build",),
    "parametrization": ("factors", "attention_scale"),
    "schedule": ("shape",),
    "tracker": ("begin",),
}


def register(kind: str, name: str, *, hears: str | None = None) -> Callable[[Any], Any]:
    """Class decorator, of a probe function decorator: file the entry under ``name``.

    A loss term is an intervention that attaches to ``loss``.  A probe says which announcement it ``hears``.

    Raises:
        RequestError: there is no such kind, nothing is ever heard of that kind, the name is taken, or the entry lacks
            what its kind has or is no dataclass, whose fields are the keys of a config.
    """
    if kind not in KINDS:
        raise RequestError(f"unknown kind {kind!r}; {nearest(kind, KINDS)}")
    if (kind == "probe") != (hears is not None):
        raise RequestError(f"{kind} {name!r}: a probe says what it hears, as in hears='logits', and nothing else does")
    if hears is not None and hears not in HEARD:
        raise RequestError(f"probe {name!r} hears {hears!r}; {nearest(hears, HEARD)}")

    def file(entry: Any) -> Any:
        if hears is None and not dataclasses.is_dataclass(entry):
            raise RequestError(f"{kind} {name!r} must be a frozen dataclass; its fields are the keys of a config")
        there = {*dir(entry), *getattr(entry, "__dataclass_fields__", ())}
        if lacking := [part for part in ASKED.get(kind, ()) if part not in there]:
            raise RequestError(f"{kind} {name!r} lacks {' and '.join(lacking)}")
        KINDS[kind].register(name)(entry if hears is None else Probe(name, hears, entry))
        return entry

    return file
