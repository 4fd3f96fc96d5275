"""From points to fleets: which runs are asked for, in which shard, what carries them out, which train together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.core.errors import RequestError
from lab.data.corpus import look_again
from lab.training.config import RunConfig, run_config, run_id, static_key

# FLOPs of a shape from which compiling it pays: five minutes of a core, of which it saves two.
WORTH_COMPILING = 4e13
# Runs of one shape that a shard gets together; as many as gain from sharing a fleet on a CPU.
GRAIN = 8


@dataclass(frozen=True)
class Point:
    """One run that is asked for: its id, the config tree it came from, and that tree as types."""

    id: str
    tree: Mapping[str, Any]
    config: RunConfig


def points(trees: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Check every tree and give it its id; trees with equal ids are one run, and the first stands for it.

    Seeds come first in the order, so that an interrupted sweep still holds whole seeds.
    """
    look_again()
    found: dict[str, Point] = {}
    for tree in trees:
        config = run_config(tree)
        corpus = config.data.entry.open()
        corpus.check(config.batch_size, config.seq_len)
        name = run_id(config, corpus.fingerprint)
        found.setdefault(name, Point(name, tree, config))
    return sorted(found.values(), key=lambda point: point.config.seed)


def training_flops(config: RunConfig) -> float:
    """Floating-point operations of one run: six per matrix weight and token, twelve per score, depth and width.

    Kaplan et al. 2020 (arXiv:2001.08361), sec. 2.1, with the head counted and scores counted in full, as they are
    computed; held-out evaluation is left out.
    """
    model, tokens = config.model, config.batch_size * config.seq_len * config.steps
    matrices = 12 * model.depth * model.width**2 + config.data.entry.open().vocabulary * model.width
    return float(tokens * (6.0 * matrices + 12.0 * model.depth * model.width * config.seq_len))


def engine_for(asked: Sequence[Point]) -> str:
    """How steps are carried out: compiled where all points asked for, done or not, have work enough for each shape."""
    flops: dict[str, float] = {}
    for point in asked:
        key = static_key(point.config)
        flops[key] = flops.get(key, 0.0) + training_flops(point.config)
    return "compiled" if min(flops.values()) >= WORTH_COMPILING else "eager"


def with_engine(asked: Sequence[Point], engine: str) -> list[Point]:
    """The points with this engine where none is named; ids stay, since an engine is no part of them."""
    return [
        replace(point, tree={**point.tree, "engine": engine}, config=replace(point.config, engine=engine))
        if point.config.engine == "auto"
        else point
        for point in asked
    ]


def under_way(missing: Sequence[Point], begun: Iterable[Sequence[str]], max_runs: int | None) -> list[list[Point]]:
    """Fleets to go on with: of those ``begun``, given by run ids, the ones all of whose runs are still missing.

    Packed anew, what is missing now could make other fleets, which a checkpoint does not fit.
    """
    point_of = {point.id: point for point in missing}
    fleets = []
    for ids in begun:
        if ids and all(name in point_of for name in ids) and len(ids) <= (max_runs or math.inf):
            fleets.append([point_of.pop(name) for name in ids])
    return fleets


def pack(missing: Sequence[Point], most: Callable[[RunConfig], int], at_once: int = 1) -> list[list[Point]]:
    """Fleets of one static shape and at most so many runs, even in size, in the order of their first points.

    They are smaller where there would be fewer of them than train ``at_once``.
    """
    alike: dict[str, list[Point]] = {}
    for point in missing:
        alike.setdefault(static_key(point.config), []).append(point)
    limits = {key: min(most(group[0].config), len(group)) for key, group in alike.items()}
    cap = max(limits.values(), default=1)
    while cap > 1 and sum(math.ceil(len(group) / min(limits[key], cap)) for key, group in alike.items()) < at_once:
        cap -= 1
    place = {point.id: index for index, point in enumerate(missing)}
    fleets = []
    for key, group in alike.items():
        size = math.ceil(len(group) / math.ceil(len(group) / min(limits[key], cap)))
        fleets += [group[start : start + size] for start in range(0, len(group), size)]
    return sorted(fleets, key=lambda fleet: place[fleet[0].id])


def part(asked: Sequence[Point], grain: int, shard: str) -> list[Point]:
    """The points of the shard ``i/n``, in their order; those of one shape are dealt out by the ``grain``.

    It follows from all that is asked for, never from what is there already nor from this machine, so that shards
    cannot overlap.

    Raises:
        RequestError: ``shard`` is not i/n with i from 1 to n.
    """
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", shard)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise RequestError(f"shard must be i/n with i from 1 to n, as in shard=1/4, not {shard!r}")
    # those of one shape side by side, so that no shard gets all the large ones
    fleets = sorted(pack(asked, lambda config: grain), key=lambda fleet: static_key(fleet[0].config))
    mine = {point.id for fleet in fleets[int(found[1]) - 1 :: int(found[2])] for point in fleet}
    return [point for point in asked if point.id in mine]
