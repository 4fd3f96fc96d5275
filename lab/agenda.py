"""What a request leaves to do: its points checked, those that are done left out, the others packed into fleets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import distributed
from lab.core.errors import RequestError
from lab.memory import Host, find_host, most_runs
from lab.records import store
from lab.records.trackers import require
from lab.sweep import GRAIN, Point, engine_for, pack, part, points, under_way, with_engine
from lab.training import checkpoint
from lab.training.config import RunConfig, static_key
from lab.training.engine import can_compile
from lab.training.fleet import check_custom, check_ranks


class Agenda(NamedTuple):
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


def agenda(
    trees: Sequence[Mapping[str, Any]],
    *,
    max_runs: int | None,
    one: bool,
    shard: str,
    here: bool,
    seats: Sequence[str | None],
) -> Agenda:
    """Nothing is written for it.

    ``one`` refuses more than one point; ``shard`` i/n takes the i-th of n parts of them; ``here`` says that jobs run on
    this machine, one at a time on each of ``seats``, GPUs or cores (None), so its devices and its memory must do.

    Raises:
        RequestError: a point makes no sense, or the folder cannot take records.
    """
    if max_runs is not None and max_runs < 1:
        raise RequestError(f"hydra.sweeper.max_runs must be at least 1, not {max_runs}")
    asked, folder = points(trees), folder_of(trees)
    if one and len(asked) > 1:
        raise RequestError("several values given: lab train -m trains a sweep")
    for point in asked:
        check_ranks(point.config)
        require(point.config.tracker.entry)
    for config in {static_key(point.config): point.config for point in asked}.values():
        check_custom(config)
    if distributed.world_size() > 1:
        here, seats = True, [None] * distributed.local_world_size()
    hosts = {d: find_host(d, seats) if here else Host() for d in {point.config.device for point in asked}}

    def most(config: RunConfig) -> int:
        return most_runs(config, hosts[config.device], max_runs)

    engine = _engine(folder, asked, here=here)
    mine, there = with_engine(part(asked, max_runs or GRAIN, shard), engine), store.statuses(folder)
    missing = [point for point in mine if there.get(point.id, "failed") == "failed"]
    begun = under_way(missing, checkpoint.unfinished_fleets(folder), max_runs)
    anew = [point for point in missing if not any(point in fleet for fleet in begun)]
    host = hosts[asked[0].config.device]
    # ranks train one fleet after another
    at_once = 1 if distributed.world_size() > 1 else len(host.seats)
    fleets = begun + pack(anew, most, at_once - len(begun))
    return Agenda(folder, engine, asked, mine, missing, fleets, host)


def folder_of(trees: Sequence[Mapping[str, Any]]) -> Path:
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
