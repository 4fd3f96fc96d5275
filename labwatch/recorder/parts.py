"""The parts of a model that are measured: its blocks, their routers and experts, and which part a weight belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lab.core import shipped
from lab.model.watched import block_lists

EMBEDDING, HEAD, OTHER = "embedding", "head", "other"
BETWEEN = "between"  # what a pass calls between two blocks, until the second one begins


@cache
def names() -> Mapping[str, Any]:
    """The names of published models, by what they mean."""
    table: Mapping[str, Any] = shipped.load(Path(__file__).with_name("names.yaml"))
    return table


@dataclass(frozen=True)
class Router:
    """What chooses experts: what holds these, how many there are, and how many it chooses for a token; 0 if unknown.

    Attributes:
        layer: the name within the block of the module that contains all this.
    """

    module: nn.Module
    holder: nn.Module
    experts: int
    top_k: int
    layer: str


@dataclass(frozen=True)
class Parts:
    """The parts of a model.

    Attributes:
        outer: the modules that contain all blocks, the model first.
        blocks: by ``block0``, ``block1`` and so on, in the order in which the model holds them.
        routers: by block, those that have one.
        head: the module that makes the logits, if it was found by name.
        where: by name of a weight or buffer the part that it belongs to: a block, ``embedding``, ``head`` or ``other``.
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
    found = {name_of[id(block)]: block for block in _blocks(model) or _numbered(model)}
    places = {name: f"block{number}" for number, name in enumerate(found)}
    blocks = dict(zip(places.values(), found.values(), strict=True))

    def block_of(name: str) -> str:
        """The block in which something of this name lies, if it does in one."""
        return next((place for inside, place in places.items() if name.startswith(f"{inside}.")), "")

    routers = {place: router for place, block in blocks.items() if (router := _router(block))}
    embeddings = {name: part for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    of_embedding = {*embeddings}
    for outer in {name.rpartition(".")[0] for name in embeddings} - {""}:
        beside = dict(model.get_submodule(outer).named_children())
        if not any(any(child.children()) for child in beside.values()):  # but positions and a norm
            norms = {f"{outer}.{name}" for name, child in beside.items() if "Norm" in type(child).__name__}
            of_embedding |= {outer, *norms}
    heads = [
        part
        for name, part in model.named_modules()
        if _last(name) in names()["heads"] and not list(part.children()) and not block_of(name)
    ]
    where, expert, stacked = dict[str, str](), dict[str, int](), set[str]()
    name_of_weight = {id(weight): name for name, weight in model.named_parameters()}
    for name in (*name_of_weight.values(), *dict(model.named_buffers())):
        owner = name.rpartition(".")[0]
        is_head = not {*names()["heads"]}.isdisjoint(plain(owner).split("."))
        where[name] = block_of(name) or (EMBEDDING if owner in of_embedding else HEAD if is_head else OTHER)
    for router in routers.values():
        for number, each in enumerate(_alike(router.holder)):
            expert |= {name_of_weight[id(weight)]: number for weight in each.parameters()}
        of_router = {id(weight) for weight in router.module.parameters()}
        for weight in router.holder.parameters():
            name = name_of_weight[id(weight)]
            if weight.ndim and len(weight) == router.experts and name not in expert and id(weight) not in of_router:
                stacked.add(name)
    return Parts(
        _outer(model, list(found)),
        blocks,
        routers,
        heads[-1] if heads else None,
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


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the longest list, and of all with a quarter of the weights of the one with most trained ones."""
    lists = block_lists(model)
    weights = [sum(w.numel() for block in blocks for w in block.parameters() if w.requires_grad) for blocks in lists]
    most, longest = max(weights, default=0), max(map(len, lists), default=0)
    trained = [blocks for blocks, size in zip(lists, weights, strict=True) if 4 * size >= most > 0]
    has_longest = any(len(blocks) == longest for blocks in trained)
    kept = [blocks for blocks in lists if blocks in trained or (len(blocks) == longest and not has_longest)]
    return [block for blocks in kept for block in blocks]


def _numbered(model: nn.Module) -> list[nn.Module]:
    """Blocks that stand in no list: the most children of one class in a module, whose names end in a number."""

    def alike(module: nn.Module) -> list[nn.Module]:
        children = [
            child for name, child in module.named_children() if re.search(r"\d$", name) and any(child.children())
        ]
        return children if len({*map(type, children)}) == 1 else []

    return max(map(alike, model.modules()), key=len, default=[])


def _outer(model: nn.Module, blocks: list[str]) -> list[nn.Module]:
    parents = [block.split(".")[:-1] for block in blocks]
    shared = [names[0] for names in takewhile(lambda names: len({*names}) == 1, zip(*parents, strict=False))]
    depths = len(shared) + (shared not in parents)  # a list itself is not called
    return [model.get_submodule(".".join(shared[:depth])) for depth in range(max(1, depths))]


def _router(block: nn.Module) -> Router | None:
    """The router of a block: what stands beside the experts and has a weight with a row for each of them.

    Router and experts have usual names, or the experts are a list of modules of one class, or weights ``[e ...]`` of
    the module in which the router stands.
    """
    name_of = {module: name for name, module in block.named_modules()}
    for parent in name_of:
        children = {plain(name): child for name, child in parent.named_children()}
        named = [children[name] for name in names()["experts"] if name in children]
        usual = [children[name] for name in names()["routers"] if name in children]
        for holder in (*named, *children.values(), parent):
            cube = next((weight for weight in holder.parameters(recurse=False) if weight.ndim == 3), None)
            count = len(_alike(holder)) or (0 if cube is None else len(cube))
            if not count and all(holder is not each for each in named):
                continue
            others = [child for child in children.values() if _alike(holder) and child is not holder]
            for outer in (*usual, *others):
                for module in outer.modules():
                    weight = getattr(module, "weight", None)
                    if isinstance(weight, Tensor) and weight.ndim == 2 and count in (0, len(weight)):
                        top_k = next(_numbers(names()["top_k"], module, outer, parent), 0)
                        both = zip(*(plain(name_of[each]).split(".") for each in (module, holder)), strict=False)
                        shared = [name for name, _ in takewhile(lambda pair: pair[0] == pair[1], both)]
                        return Router(module, holder, len(weight), top_k, ".".join(shared))
    return None


def _alike(holder: nn.Module) -> list[nn.Module]:
    """The modules of one class in a list, or in one that lies in the module."""
    for part in (holder, *holder.children()):
        children = list(part.children()) if isinstance(part, nn.ModuleList | nn.ModuleDict) else []
        if len(children) > 1 and len({*map(type, children)}) == 1:
            return children
    return []


def _numbers(attributes: list[str], *modules: nn.Module) -> Iterator[int]:
    for module in modules:
        for attribute in attributes:
            if type(number := getattr(module, attribute, None)) is int:
                yield number
