"""The optimizer: links chained from gradient to update, their order checked, their numbers read from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lab.core.errors import RequestError, nearest
from lab.core.hooks import announce
from lab.core.registry import LINKS
from lab.core.schema import build, text_value
from lab.optim.links import Link, Now, Tensors


@dataclass(frozen=True)
class Optimizer:
    """Links by name, in the order they act (dicts keep it); the order alone tells coupled from independent decay.

    Attributes:
        owned: the numbers, as ``LINK.KEY``, that a link does not share with the others.
    """

    name: str
    links: Mapping[str, Link]
    owned: tuple[str, ...] = ()

    @property
    def lr(self) -> Any:
        """Peak learning rate: a float, or ``[r]`` once stacked."""
        return self.links["peak"].lr  # type: ignore[attr-defined]

    def begin(self, weights: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """Fresh state of every link."""
        return {name: link.begin(weights) for name, link in self.links.items()}

    @torch.no_grad()
    def step(self, gradients: Tensors, state: dict[str, Tensors], now: Now) -> None:
        """Update the weights in place; announce the gradients, before and after clipping, weights and direction."""
        announce("gradients", "", gradients)
        announce("parameters", "", now.weights)
        updates, kind = gradients, "gradient"
        for name, link in self.links.items():
            made = link.makes or kind
            if kind == "gradient" != made:
                announce("clipped_gradients", "", updates)
            updates, kind = link(updates, state[name], now), made
            if link.makes == "direction":
                announce("direction", "", updates)
                if now.held_out:
                    announce("descent", "", updates, now.held_out)
        for name, weight in now.weights.items():
            weight.sub_(updates[name])


def build_optimizer(values: Mapping[str, Any]) -> Optimizer:
    """Make the chain from ``{name, chain, KEY: number ..., LINK: {KEY: number ...} ...}``.

    All links with a field KEY share the number of that key, but those that have one of their own under LINK.

    Raises:
        RequestError: an unknown link, links in a wrong order, a number that reaches no link, or a missing number.
    """
    for key in ("name", "chain"):
        if key not in values:
            raise RequestError(f"key 'optimizer.{key}' is missing")
    name, kinds = text_value(values["name"], "optimizer.name"), link_kinds(values["chain"])
    _check_order(kinds)
    numbers = {key: value for key, value in values.items() if key not in ("name", "chain")}
    own = {key: numbers.pop(key) for key, value in values.items() if isinstance(value, Mapping)}
    _check_numbers(kinds, numbers, own)
    return Optimizer(
        name,
        {link: _build_link(link, kind, numbers, own.get(link, {})) for link, kind in kinds.items()},
        tuple(sorted(f"{link}.{key}" for link in own for key in own[link])),
    )


def reached(values: Mapping[str, Any]) -> list[str]:
    """Keys of the numbers that links of the chain share, in the order of the chain."""
    kinds, own = link_kinds(values["chain"]), {key: each for key, each in values.items() if isinstance(each, Mapping)}
    keys = [field.name for link in kinds for field in fields(kinds[link]) if field.name not in own.get(link, ())]
    return list(dict.fromkeys(keys))


def link_kinds(chain: Any) -> dict[str, Any]:
    """The links' classes by name, in the order of the chain.

    Raises:
        RequestError: it is no list of links, names one twice, or lacks the peak or the schedule.
    """
    links = [str(link) for link in chain] if isinstance(chain, Sequence) and not isinstance(chain, str) else []
    if len(set(links)) != len(links) or not {"peak", "schedule"} <= set(links):
        raise RequestError(f"optimizer.chain must list links, each once, with 'peak' and 'schedule', not {chain!r}")
    return {link: LINKS[link] for link in links}


def _check_order(kinds: Mapping[str, Any]) -> None:
    """Refuse a chain in which a link is given what it does not take."""
    given, before = "gradient", ""
    for name, kind in kinds.items():
        if given not in kind.takes:
            expected = " or ".join(f"a {taken}" for taken in kind.takes)
            given_by = f"follows {before!r}, which makes" if before else f"comes before {list(kinds)[1]!r} and is given"
            raise RequestError(f"optimizer.chain: {name!r} takes {expected}, but {given_by} a {given}")
        given, before = kind.makes or given, name


def _check_numbers(kinds: Mapping[str, Any], numbers: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse numbers that reach no link."""
    keys = {link: [field.name for field in fields(kind)] for link, kind in kinds.items()}
    for link in own:
        if link not in keys:
            raise RequestError(f"optimizer.{link} holds numbers, but is no link of the chain; {nearest(link, keys)}")
    if "lr" in own.get("peak", {}):
        raise RequestError("unknown key 'optimizer.peak.lr'; the peak learning rate is 'optimizer.lr'")
    shared = {key for link in keys for key in keys[link] if key not in own.get(link, {})}
    for key in numbers:
        owners = [link for link in own if key in own[link]]
        if key not in shared and owners:
            raise RequestError(
                f"'optimizer.{key}' reaches no link: only {', '.join(owners)} takes it, and has its own; leave one out"
            )
        if key not in shared:
            raise RequestError(f"unknown key 'optimizer.{key}'; {nearest(key, [*shared, 'chain'])}")


def _build_link(name: str, kind: Any, numbers: Mapping[str, Any], own: Mapping[str, Any]) -> Link:
    shared = {field.name: numbers[field.name] for field in fields(kind) if field.name in numbers}
    link: Link = build(kind, {**shared, **own}, f"optimizer.{name}" if own else "optimizer")
    return link
