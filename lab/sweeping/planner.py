"""Planning: check the points requested, give them ids, drop the finished ones, and pack the rest into fleets."""

from __future__ import annotations

import heapq
import math
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lab.core import distributed
from lab.core.errors import RequestError
from lab.core.shipped import at_scale
from lab.data.corpus import look_again
from lab.records import plans, store
from lab.records.trackers import require
from lab.sweeping.capacity import Host, check_fits, measure_host, most_runs
from lab.sweeping.local_jobs import Slot
from lab.training.building import check_own_code, check_ranks, mlp_parts
from lab.training.config import RunConfig, run_config
from lab.training.engine import can_compile
from lab.training.identity import columns, identify, static_key

# FLOPs per shape, on average, above which compiling pays: about five minutes on one core, of which it saves two, or a
# few minutes on a GPU, of which it saves half.
WORTH_COMPILING = {"cpu": 4e13, "mps": 4e13, "cuda": 1e15}
# Runs of one shape that go to a shard together: more in a fleet gain nothing on a CPU.
SHARD_GRAIN = 8
# Fixed overhead of a step of a fleet, in steps of a run: 2 at width 32 on a core, and less in larger models.
FIXED_COST = 2.0


@dataclass(frozen=True)
class Point:
    """One run requested: its id, its resolved config tree, and that tree as dataclasses.

    Points of equal ``shape``, the ``static_key`` of the config, can share a fleet.
    """

    id: str
    tree: Mapping[str, Any]
    config: RunConfig
    shape: str


def points(trees: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The points of config trees, without repetitions; see ``_checked`` and ``_distinct``."""
    return _distinct(_checked(trees))


def _checked(trees: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
    """Check every config tree and give it its id.

    Raises:
        RequestError: a config is invalid, or its data cannot be read.
    """
    look_again()
    groups: dict[str, Any] = {}
    for tree in trees:
        try:
            config = run_config(tree, groups)
        except RequestError as refusal:
            raise RequestError(at_scale(refusal, tree.get("scale"))) from None
        corpus = config.data.entry.open()
        corpus.check(config.batch_size, config.seq_len)
        name, shape = identify(config, corpus.fingerprint)
        yield Point(name, tree, config, shape)


def _distinct(points: Iterable[Point]) -> list[Point]:
    """The first point of each id, since equal ids are the same run.

    They are sorted by seed, so that an interrupted sweep has complete seeds.
    """
    firsts: dict[str, Point] = {}
    for point in points:
        firsts.setdefault(point.id, point)
    return sorted(firsts.values(), key=lambda point: point.config.seed)


def as_recorded(
    points: Sequence[Point], folder: Path, statuses: Mapping[str, str]
) -> tuple[list[Point], dict[str, dict[str, str]]]:
    """The points, those whose runs a folder has as other probes observed them under the ids of these records.

    Returns:
        The points, as many and in the same order; and by id what is asked for of a recorded run and was not measured,
        as ``missing_in`` gives it.
    """
    done = {run for run, status in statuses.items() if status != "failed"}
    observed = {run: seen for run, seen in store.observed(folder).items() if run in done}
    found, unmeasured = list[Point](), dict[str, dict[str, str]]()
    for point in points:
        probes, steps = point.config.probes, point.config.steps
        missing = {
            run: probes.missing_in(every, names.split("+"), steps)
            for run, (_, every, names) in _records_of(point, observed)
        }
        run = min(missing, key=lambda run: len(missing[run]), default=point.id)
        found.append(replace(point, id=run))
        if missing.get(run):
            unmeasured[run] = missing[run]
    return found, unmeasured


def _records_of(point: Point, observed: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Records of the run of a point, by id: its own, or those that differ in what observed it."""
    if point.id in observed:
        yield point.id, observed[point.id]
        return
    card = {**columns(point.config), "data_fingerprint": point.config.data.entry.open().fingerprint}
    for seen in dict.fromkeys(observed.values()):
        run = store.run_id({**card, **dict(zip(store.OBSERVES, seen, strict=True))})
        if run in observed:
            yield run, observed[run]


def training_flops(config: RunConfig) -> float:
    """Floating-point operations of one run: six per matrix weight and token, twelve per score, layer and channel.

    The output head is counted. Attention scores and all experts are counted in full, as they are computed. Evaluation
    is not counted.

    References:
        Kaplan et al. 2020 (arXiv:2001.08361), sec. 2.1.
    """
    model, tokens = config.model, config.trained_tokens
    hidden = math.prod(mlp_parts(config))
    of_blocks = model.depth * (4 * model.width**2 + 2 * model.width * hidden)
    matrices = of_blocks + config.data.entry.open().vocabulary * model.width
    return float(tokens * (6.0 * matrices + 12.0 * model.depth * model.width * config.seq_len))


def engine_for(points: Sequence[Point], kind: str = "cpu", *, compiles: bool = True) -> str:
    """The engine of points on this kind of device, finished or not.

    ``compiled`` if this machine ``compiles`` and training takes long enough to repay it. Else on CUDA ``captured``,
    since the host takes several times as long to launch one kernel after another. Else, and where no step can be
    traced, ``eager``.
    """
    configs = {point.shape: point.config for point in points}
    flops = sum(training_flops(point.config) for point in points)
    if compiles and flops >= WORTH_COMPILING[kind] * len(configs):
        return "compiled"
    return "captured" if kind == "cuda" and all(map(_can_be_captured, configs.values())) else "eager"


def _can_be_captured(config: RunConfig) -> bool:
    captured = replace(config, engine="captured")
    return not config.custom_model and not any(link.objection(captured) for link in config.optimizer.links.values())


def with_engine(points: Sequence[Point], engine: str) -> list[Point]:
    """Set the engine of points that name none; their ids do not change, since an engine is no part of an id."""
    shapes: dict[str, str] = {}

    def with_it(point: Point) -> Point:
        config = replace(point.config, engine=engine)
        if point.shape not in shapes:
            shapes[point.shape] = static_key(config)
        return Point(point.id, {**point.tree, "engine": engine}, config, shapes[point.shape])

    return [with_it(point) if point.config.engine == "auto" else point for point in points]


def unfinished_fleets(
    missing: Sequence[Point], checkpointed: Iterable[Sequence[str]], max_runs: int | None
) -> list[list[Point]]:
    """Fleets to resume: those with a checkpoint, given by their run ids, all of whose runs are missing.

    Packing the missing runs anew could make other fleets, which could not be resumed from any checkpoint.
    """
    point_of = {point.id: point for point in missing}
    fleets = []
    for ids in checkpointed:
        if ids and all(name in point_of for name in ids) and len(ids) <= (max_runs or math.inf):
            fleets.append([point_of.pop(name) for name in ids])
    return fleets


def pack(missing: Sequence[Point], most: Callable[[RunConfig], int], at_once: int = 1) -> list[list[Point]]:
    """Pack points into fleets of one shape and about equal size, in the order of their first points.

    Small fleets take longer for the same runs, and large ones leave cores idle at the end of a sweep. So of several
    sizes that is taken with which all fleets would end first.

    Args:
        missing: the points to train.
        most: how many runs of a shape a fleet may hold.
        at_once: how many fleets train at once.
    """
    groups: dict[str, list[Point]] = {}
    for point in missing:
        groups.setdefault(point.shape, []).append(point)
    limits = {key: min(most(group[0].config), len(group)) for key, group in groups.items()}
    flops = {key: training_flops(group[0].config) for key, group in groups.items()}
    position = {point.id: index for index, point in enumerate(missing)}

    def fleets_of_at_most(cap: int) -> list[list[Point]]:
        parts = [part for key, group in groups.items() for part in _split(group, min(limits[key], cap))]
        return sorted(parts, key=lambda fleet: position[fleet[0].id])

    def end(fleets: list[list[Point]]) -> float:
        return makespan((flops[fleet[0].shape] * (FIXED_COST + len(fleet)) for fleet in fleets), at_once)

    fewest = {key: math.ceil(len(group) / limits[key]) for key, group in groups.items()}
    caps = {
        math.ceil(len(group) / (fewest[key] + more)) for key, group in groups.items() for more in range(2 * at_once + 1)
    }
    return min(map(fleets_of_at_most, sorted(caps, reverse=True)), key=end, default=[])


def makespan(costs: Iterable[float], processes: int) -> float:
    """When the last of these jobs is done if each in turn starts on the first free process."""
    ends = [0.0] * processes
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def _split(group: list[Point], most: int) -> Iterator[list[Point]]:
    """Yield parts of a group, of about equal size."""
    parts = math.ceil(len(group) / most)
    ends = [len(group) * part // parts for part in range(parts + 1)]
    return (group[start:end] for start, end in pairwise(ends))


def shard_points(points: Sequence[Point], grain: int, shard: str) -> list[Point]:
    """The points of the shard ``i/n``, in their order; points of one shape are dealt out ``grain`` at a time.

    The shard depends on the requested points alone, not on finished runs or this machine, so shards never overlap.

    Raises:
        RequestError: ``shard`` is not i/n with i from 1 to n.
    """
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise RequestError(f"shard must be i/n with i from 1 to n, as in shard=1/4, not {shard!r}")
    # sorted by shape, so that no shard gets all the large runs
    fleets = sorted(pack(points, lambda config: grain), key=lambda fleet: fleet[0].shape)
    mine = {point.id for fleet in fleets[int(match[1]) - 1 :: int(match[2])] for point in fleet}
    return [point for point in points if point.id in mine]


class SweepPlan(NamedTuple):
    """The plan of a sweep: the points of a request, and the fleets of those that are left to train.

    Attributes:
        folder: the results folder.
        engine: ``eager``, ``captured`` or ``compiled``, for points that name no engine.
        ids: the id of each config tree that was asked for, in their order.
        requested: all points.
        mine: the points of this shard.
        missing: those of this shard that have neither finished nor diverged.
        fleets: the missing points, packed into fleets.
        host: this machine, if it is the one that trains.
        unmeasured: by id of a run that is recorded, what is asked for and was not measured; see ``as_recorded``.
    """

    folder: Path
    engine: str
    ids: list[str]
    requested: list[Point]
    mine: list[Point]
    missing: list[Point]
    fleets: list[list[Point]]
    host: Host
    unmeasured: Mapping[str, Mapping[str, str]] = MappingProxyType({})

    def with_more(self, other: SweepPlan) -> SweepPlan:
        """The same with the points of another plan."""
        return self._replace(
            ids=self.ids + other.ids,
            requested=self.requested + other.requested,
            mine=self.mine + other.mine,
            missing=self.missing + other.missing,
            fleets=self.fleets + other.fleets,
        )


def plan_sweep(
    trees: Iterable[Mapping[str, Any]],
    *,
    max_runs: int | None,
    is_single: bool,
    shard: str,
    is_local: bool,
    slots: Sequence[Slot],
    by_any_probes: bool = False,
) -> SweepPlan:
    """Plan a sweep without writing anything.

    Args:
        trees: one resolved config tree per point.
        max_runs: the most runs in a fleet.
        is_single: whether to refuse more than one point.
        shard: ``i/n`` plans the i-th of n parts.
        is_local: whether jobs run on this machine, so that its devices and memory limit them.
        slots: the slots on which jobs run at once.
        by_any_probes: whether a run counts as recorded whatever probes observed it, see ``as_recorded``.

    Raises:
        RequestError: a point is invalid, or the folder cannot take records.
    """
    if max_runs is not None and max_runs < 1:
        raise RequestError(f"hydra.sweeper.max_runs must be at least 1, not {max_runs}")
    asked = list(_checked(trees))
    requested, folder = _distinct(asked), results_folder([point.tree for point in asked])
    if is_single and len(requested) > 1:
        raise RequestError("several values given: lab train -m trains a sweep")
    for point in requested:
        check_ranks(point.config)
        require(point.config.tracker.entry)
    for config in {point.shape: point.config for point in requested}.values():
        check_own_code(config)
    if distributed.world_size() > 1:
        is_local, slots = True, [None] * distributed.local_world_size()
    hosts = {d: measure_host(d, slots) if is_local else Host() for d in {point.config.device for point in requested}}

    def most(config: RunConfig) -> int:
        return most_runs(config, hosts[config.device], max_runs)

    statuses = store.statuses(folder)
    recorded, unmeasured = as_recorded(requested, folder, statuses) if by_any_probes else (requested, {})
    recorded_as = {point.id: each.id for point, each in zip(requested, recorded, strict=True)}
    requested = _distinct(recorded)
    host = hosts[requested[0].config.device]
    engine = _engine(folder, requested, host.kind, is_local=is_local)
    mine = with_engine(shard_points(requested, max_runs or SHARD_GRAIN, shard), engine)
    missing = [point for point in mine if statuses.get(point.id, "failed") == "failed"]
    for point in {point.shape: point for point in missing}.values():
        check_fits(point.config, hosts[point.config.device])
    resumed = unfinished_fleets(missing, plans.checkpointed_fleets(folder), max_runs)
    started = {point.id for fleet in resumed for point in fleet}
    unstarted = [point for point in missing if point.id not in started]
    # ranks train one fleet after another
    at_once = 1 if distributed.world_size() > 1 else len(host.slots)
    fleets = resumed + pack(unstarted, most, max(at_once - len(resumed), 1))
    ids = [recorded_as[point.id] for point in asked]
    return SweepPlan(folder, engine, ids, requested, mine, missing, fleets, host, unmeasured)


def results_folder(trees: Sequence[Mapping[str, Any]]) -> Path:
    """The results folder of all these points.

    Raises:
        RequestError: they name none or several, or something that cannot be a folder.
    """
    outs = sorted({str(tree["out"]) for tree in trees})
    if len(outs) > 1 or not outs[0]:
        raise RequestError(f"out must name one folder, not {', '.join(outs) or 'nothing'}")
    folder = Path(outs[0])
    _check_folder(folder)
    return folder


def _check_folder(folder: Path) -> None:
    for path in (folder, *folder.parents):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as refusal:
            raise RequestError(f"out={folder} cannot be a folder: {refusal.strerror}") from None
        if stat.S_ISDIR(mode):
            return
        raise RequestError(f"out={folder} cannot be a folder: {path} is a file; give another out=")


def _engine(folder: Path, requested: Sequence[Point], kind: str, *, is_local: bool) -> str:
    """The engine of points that name none: the one noted in the folder, else that of ``engine_for``."""
    is_alone = distributed.world_size() == 1
    compiles = can_compile() and is_alone
    chosen = engine_for(requested, kind, compiles=compiles) if is_alone else "eager"
    engine = store.check_version(folder) or chosen
    engines = {engine if point.config.engine == "auto" else point.config.engine for point in requested}
    if is_local and not compiles and "compiled" in engines:
        raise RequestError("engine=compiled takes one process, a C++ compiler and Python's headers; say engine=eager")
    return engine
