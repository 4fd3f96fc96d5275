"""Planning: the points asked for become run ids, shards and fleets; what is done is left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import distributed
from lab.core.errors import RequestError
from lab.data.corpus import look_again
from lab.records import store
from lab.records.trackers import require
from lab.sweep.capacity import Host, measure_host, most_runs
from lab.training import checkpoint
from lab.training.config import RunConfig, run_config, run_id, static_key
from lab.training.engine import can_compile
from lab.training.fleet import check_custom, check_ranks

# FLOPs of a shape from which compiling it pays: five minutes of a core, of which it saves two.
WORTH_COMPILING = 4e13
# Runs of one shape that a shard gets together; as many as gain from sharing a fleet on a CPU.
SHARD_GRAIN = 8


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


def unfinished_fleets(
    missing: Sequence[Point], begun: Iterable[Sequence[str]], max_runs: int | None
) -> list[list[Point]]:
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


def shard_points(asked: Sequence[Point], grain: int, shard: str) -> list[Point]:
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


class SweepPlan(NamedTuple):
    """Points asked for, those of this shard, and those of them that are missing, in fleets.

    Also where records go, what carries steps out, and the machine that does, if it is this one.
    """

    folder: Path
    engine: str
    asked: list[Point]
    mine: list[Point]
    missing: list[Point]
    fleets: list[list[Point]]
    host: Host


def plan_sweep(
    trees: Sequence[Mapping[str, Any]],
    *,
    max_runs: int | None,
    one: bool,
    shard: str,
    here: bool,
    seats: Sequence[str | None],
) -> SweepPlan:
    """Nothing is written for it.

    ``one`` refuses more than one point; ``shard`` i/n takes the i-th of n parts of them; ``here`` says that jobs run on
    this machine, one at a time on each of ``seats``, GPUs or cores (None), so its devices and its memory must do.

    Raises:
        RequestError: a point makes no sense, or the folder cannot take records.
    """
    if max_runs is not None and max_runs < 1:
        raise RequestError(f"hydra.sweeper.max_runs must be at least 1, not {max_runs}")
    asked, folder = points(trees), results_folder(trees)
    if one and len(asked) > 1:
        raise RequestError("several values given: lab train -m trains a sweep")
    for point in asked:
        check_ranks(point.config)
        require(point.config.tracker.entry)
    for config in {static_key(point.config): point.config for point in asked}.values():
        check_custom(config)
    if distributed.world_size() > 1:
        here, seats = True, [None] * distributed.local_world_size()
    hosts = {d: measure_host(d, seats) if here else Host() for d in {point.config.device for point in asked}}

    def most(config: RunConfig) -> int:
        return most_runs(config, hosts[config.device], max_runs)

    engine = _engine(folder, asked, here=here)
    mine, there = with_engine(shard_points(asked, max_runs or SHARD_GRAIN, shard), engine), store.statuses(folder)
    missing = [point for point in mine if there.get(point.id, "failed") == "failed"]
    begun = unfinished_fleets(missing, checkpoint.unfinished_fleets(folder), max_runs)
    anew = [point for point in missing if not any(point in fleet for fleet in begun)]
    host = hosts[asked[0].config.device]
    # ranks train one fleet after another
    at_once = 1 if distributed.world_size() > 1 else len(host.seats)
    fleets = begun + pack(anew, most, at_once - len(begun))
    return SweepPlan(folder, engine, asked, mine, missing, fleets, host)


def results_folder(trees: Sequence[Mapping[str, Any]]) -> Path:
    """Where all these points leave what they find.

    Raises:
        RequestError: nowhere, or in several places.
    """
    outs = sorted({str(tree["out"]) for tree in trees})
    if len(outs) > 1 or not outs[0]:
        raise RequestError(f"out must name one folder, not {', '.join(outs) or 'nothing'}")
    return Path(outs[0])


def _engine(folder: Path, asked: Sequence[Point], *, here: bool) -> str:
    """What carries out the steps of points that name no engine: what the folder keeps, or what their work deserves."""
    compiles = can_compile() and distributed.world_size() == 1
    engine = store.check_version(folder) or (engine_for(asked) if compiles else "eager")
    engines = {engine if point.config.engine == "auto" else point.config.engine for point in asked}
    if here and not compiles and "compiled" in engines:
        raise RequestError("engine=compiled takes one process, a C++ compiler and Python's headers; say engine=eager")
    return engine
