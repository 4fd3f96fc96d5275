"""From points to fleets: which runs are asked for, which are missing, which train together; pure functions."""

from __future__ import annotations

import math
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


def under_way(missing: Sequence[Point], begun: Iterable[Sequence[str]], max_runs: int) -> list[list[Point]]:
    """Fleets to go on with: of those ``begun``, given by run ids, the ones all of whose runs are still missing.

    Packed anew, what is missing now could make other fleets, which a checkpoint does not fit.
    """
    point_of = {point.id: point for point in missing}
    fleets = []
    for ids in begun:
        if len(ids) <= max_runs and all(name in point_of for name in ids):
            fleets.append([point_of.pop(name) for name in ids])
    return fleets


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
