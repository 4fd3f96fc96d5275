"""From points to fleets: which runs are asked for, which are missing, which train together; pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.config import RunConfig, run_config, run_id, static_key
from lab.registry import RequestError


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
    found: dict[str, Point] = {}
    for tree in trees:
        config = run_config(tree)
        corpus = config.data.entry.open()
        corpus.check(config.batch_size, config.seq_len)
        name = run_id(config, corpus.fingerprint)
        found.setdefault(name, Point(name, tree, config))
    return sorted(found.values(), key=lambda point: point.config.seed)


def pack(missing: Sequence[Point], max_runs: int) -> list[list[Point]]:
    """Fleets of at most ``max_runs`` runs of one static shape, even in size, in the order of their first points."""
    if max_runs < 1:
        raise RequestError(f"hydra.sweeper.max_runs must be at least 1, not {max_runs}")
    alike: dict[str, list[Point]] = {}
    for point in missing:
        alike.setdefault(static_key(point.config), []).append(point)
    place = {point.id: index for index, point in enumerate(missing)}
    fleets = []
    for group in alike.values():
        size = math.ceil(len(group) / math.ceil(len(group) / max_runs))
        fleets += [group[start : start + size] for start in range(0, len(group), size)]
    return sorted(fleets, key=lambda fleet: place[fleet[0].id])


def part(asked: Sequence[Point], max_runs: int, shard: str) -> list[Point]:
    """The points of the shard ``i/n``, in their order; fleets of each shape are dealt out evenly.

    It follows from all that is asked for, never from what is there already, so that shards cannot overlap.

    Raises:
        RequestError: ``shard`` is not i/n with i from 1 to n.
    """
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", shard)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise RequestError(f"shard must be i/n with i from 1 to n, as in shard=1/4, not {shard!r}")
    # fleets of one shape side by side, so that no shard gets all the large ones
    fleets = sorted(pack(asked, max_runs), key=lambda fleet: static_key(fleet[0].config))
    mine = {point.id for fleet in fleets[int(found[1]) - 1 :: int(found[2])] for point in fleet}
    return [point for point in asked if point.id in mine]
