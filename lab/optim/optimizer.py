"""A chain of links: every number of the optimizer is claimed by a link, every weight by the whole chain."""

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
from lab.optim.transforms import Link, Now, Tensors


@dataclass(frozen=True)
class Optimizer:
    """Links by name, in the order they act (dicts keep it); the order alone tells coupled from independent decay."""

    name: str
    links: Mapping[str, Link]

    @property
    def lr(self) -> Any:
        """Peak learning rate: a float, or ``[r]`` once stacked."""
        return self.links["peak"].lr  # type: ignore[attr-defined]

    def begin(self, weights: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """Fresh state of every link."""
        return {name: link.begin(weights) for name, link in self.links.items()}

    @torch.no_grad()
    def step(self, gradients: Tensors, state: dict[str, Tensors], now: Now) -> None:
        """Move the weights in place; what passes on the way is announced as gradients, clipped, direction."""
        announce("gradients", "", gradients)
        announce("parameters", "", now.weights)
        updates = gradients
        made = "gradient"
        for name, link in self.links.items():
            if made == "gradient" and link.makes != "gradient":
                announce("clipped_gradients", "", updates)
            updates = link(updates, state[name], now)
            if link.makes == "direction":
                announce("direction", "", updates)
            made = link.makes
        for name, weight in now.weights.items():
            weight.sub_(updates[name])


def build_optimizer(values: Mapping[str, Any]) -> Optimizer:
    """Make the chain from ``{name, chain, numbers ...}``.

    Raises:
        RequestError: an unknown link, a number that no link of the chain claims, or a chain without what it needs.
    """
    for key in ("name", "chain"):
        if key not in values:
            raise RequestError(f"key 'optimizer.{key}' is missing")
    numbers = dict(values)
    name, chain = text_value(numbers.pop("name"), "optimizer.name"), numbers.pop("chain")
    links = [str(link) for link in chain] if isinstance(chain, Sequence) and not isinstance(chain, str) else []
    if len(set(links)) != len(links) or not {"peak", "schedule"} <= set(links):
        raise RequestError(f"optimizer.chain must list links, each once, with 'peak' and 'schedule', not {chain!r}")
    kinds = {link: LINKS[link] for link in links}
    claimed = {field.name for kind in kinds.values() for field in fields(kind)}
    for key in numbers:
        if key not in claimed:
            raise RequestError(f"unknown key 'optimizer.{key}'; {nearest(key, [*claimed, 'chain'])}")
    return Optimizer(
        name,
        {
            link: build(kind, {f.name: numbers[f.name] for f in fields(kind) if f.name in numbers}, "optimizer")
            for link, kind in kinds.items()
        },
    )
