"""The parts of a model that are measured: its blocks, their routers and experts, and which part a weight belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from lab.core import shipped
from lab.model.watched import block_modules

EMBEDDING, HEAD, OTHER = "embedding", "head", "other"


@cache
def names() -> Mapping[str, Any]:
    """The names of published models, by what they mean."""
    table: Mapping[str, Any] = shipped.load(Path(__file__).with_name("names.yaml"))
    return table


@dataclass(frozen=True)
class Router:
    """A module that chooses experts: how many there are, and how many it chooses for a token; 0 if unknown."""

    module: nn.Module
    experts: int
    top_k: int


@dataclass(frozen=True)
class Parts:
    """The parts of a model.

    Attributes:
        outer: the modules that contain all blocks, the model first.
        blocks: by ``block0``, ``block1`` and so on, in the order of the forward pass.
        routers: by block, those that have one.
        head: the module that makes the logits, if it was found by name.
        where: by name of a weight the part that it belongs to: a block, ``embedding``, ``head`` or ``other``.
        expert: by name of a weight the number of its expert, if it is of one.
        stacked: names of weights that hold all experts of a block along their first axis.
        vocabulary: numbers of rows of the embeddings.
    """

    outer: list[nn.Module]
    blocks: dict[str, nn.Module]
    routers: dict[str, Router]
    head: nn.Module | None
    where: dict[str, str]
    expert: dict[str, int]
    stacked: set[str]
    vocabulary: set[int]


def find_parts(model: nn.Module) -> Parts:
    """Find the parts of a model by its structure and by usual names."""
    name_of = {id(module): name for name, module in model.named_modules()}
    found = {name_of[id(block)]: block for block in block_modules(model) or _numbered(model)}
    places = {name: f"block{number}" for number, name in enumerate(found)}
    blocks = dict(zip(places.values(), found.values(), strict=True))
    routers = {place: router for place, block in blocks.items() if (router := _router(block))}
    embeddings = {name: part for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    heads = [
        (name, part)
        for name, part in model.named_modules()
        if _last(name) in names()["heads"] and not list(part.children())
    ]
    where, expert, stacked = dict[str, str](), dict[str, int](), set[str]()
    for name, weight in model.named_parameters():
        owner = name.rpartition(".")[0]
        block = next((place for inside, place in places.items() if name.startswith(f"{inside}.")), "")
        where[name] = block or (EMBEDDING if owner in embeddings else HEAD if owner in dict(heads) else OTHER)
        _, is_expert, inside = name.rpartition(_experts_of(name))
        if block in routers and is_expert:
            number = re.match(r"\d+(?=\.)", inside)
            if number:
                expert[name] = int(number[0])
            elif len(weight) == routers[block].experts:
                stacked.add(name)
    return Parts(
        _outer(model, list(found)),
        blocks,
        routers,
        heads[-1][1] if heads else None,
        where,
        expert,
        stacked,
        {part.num_embeddings for part in embeddings.values()},
    )


def plain(name: str) -> str:
    """A name in the model without what torch has put around it."""
    return ".".join(part for part in name.split(".") if part not in names()["wrappers"])


def _last(name: str) -> str:
    return plain(name).rpartition(".")[2]


def _experts_of(name: str) -> str:
    """What in the name of a weight says that it is of experts, dots included; a text that no name has if nothing."""
    return next((f".{word}." for word in names()["experts"] if f".{word}." in name), "\0")


def _numbered(model: nn.Module) -> list[nn.Module]:
    """Blocks that stand in no list: the most children of one class in a module, whose names end in a number."""

    def alike(module: nn.Module) -> list[nn.Module]:
        children = [
            child for name, child in module.named_children() if re.search(r"\d$", name) and any(child.children())
        ]
        return children if len({*map(type, children)}) == 1 else []

    return max(map(alike, model.modules()), key=len, default=[])


def _outer(model: nn.Module, blocks: list[str]) -> list[nn.Module]:
    parents = blocks[0].split(".")[:-1] if blocks else []
    return [model.get_submodule(".".join(parents[:depth])) for depth in range(max(1, len(parents)))]


def _router(block: nn.Module) -> Router | None:
    """The router of a block: a module with a usual name beside the experts, whose weight has a row for each of them."""
    for parent in block.modules():
        children = dict(parent.named_children())
        if not any(_last(name) in names()["experts"] for name in children):
            continue
        for name in names()["routers"]:
            weight = getattr(children.get(name), "weight", None)
            if weight is not None and weight.ndim == 2:
                return Router(children[name], len(weight), next(_numbers(names()["top_k"], children[name], parent), 0))
    return None


def _numbers(attributes: list[str], *modules: nn.Module) -> Iterator[int]:
    for module in modules:
        for attribute in attributes:
            if type(number := getattr(module, attribute, None)) is int:
                yield number
