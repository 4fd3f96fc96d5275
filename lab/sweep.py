"""From points to fleets: which runs are asked for, which are missing, which train together; pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.config import RunConfig, run_config, run_id, static_key


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


def pack(missing: Sequence[Point], most: Callable[[RunConfig], int]) -> list[list[Point]]:
    """Fleets of one static shape and at most so many runs, even in size, in the order of their first points."""
    alike: dict[str, list[Point]] = {}
    for point in missing:
        alike.setdefault(static_key(point.config), []).append(point)
    place = {point.id: index for index, point in enumerate(missing)}
    fleets = []
    for group in alike.values():
        size = math.ceil(len(group) / math.ceil(len(group) / most(group[0].config)))
        fleets += [group[start : start + size] for start in range(0, len(group), size)]
    return sorted(fleets, key=lambda fleet: place[fleet[0].id])
