"""The config of a run: turns the resolved config tree into frozen dataclasses, its columns and its id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import lab.data
import lab.interventions.attention
import lab.interventions.loss_terms
import lab.optim.batch_schedule
import lab.optim.schedule
import lab.probes.activations
import lab.probes.noise
import lab.probes.updates
import lab.records.trackers  # noqa: F401  (these nine fill the registries)
from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.core.hooks import HOOK_POINTS, HookIntervention, LossTerm, Predictions
from lab.core.registry import BATCHES, DATA, INTERVENTIONS, MODELS, PARAMETRIZATIONS, SCHEDULES, TRACKERS, Registry
from lab.core.schema import PerRunSeed, bounded, build, convert, leaves, one_of, seed
from lab.model.config import ModelConfig
from lab.optim.optimizer import Optimizer, build_optimizer
from lab.probes.listener import ProbesConfig
from lab.records import store
from lab.training.checkpoint import CheckpointConfig

# Keys without a column: names of other columns, and how a run was saved and split among ranks, which its id ignores.
NO_COLUMN = ("optimizer.owned", "ranks", "checkpoint.steps", "checkpoint.minutes", "checkpoint.keep")


@dataclass(frozen=True)
class ScaleConfig:
    """Name of the preset that sets the sizes of a sweep; other keys refer to its numbers."""

    name: str


@dataclass(frozen=True)
class NamedEntry:
    """An entry of a registry and its name in the registry."""

    name: str
    entry: Any


@dataclass(frozen=True)
class RunConfig:
    """The config of one run; stacked, the config of a fleet."""

    model: ModelConfig
    parametrization: NamedEntry
    intervention: Mapping[str, Any]
    guest: Mapping[str, Any]
    optimizer: Optimizer
    schedule: NamedEntry
    data: NamedEntry
    probes: ProbesConfig
    scale: ScaleConfig
    checkpoint: CheckpointConfig
    tracker: NamedEntry
    out: str
    batch_size: int = bounded(above=0)
    seq_len: int = bounded(above=0)
    steps: int = bounded(above=0)
    seed: PerRunSeed = seed()
    precision: str = one_of("fp32", "bf16")
    engine: str = one_of("auto", "eager", "compiled")
    device: str = one_of("auto", "cpu", "cuda", "mps")
    ranks: str = one_of("ddp", "fsdp")
    batch: NamedEntry | None = None  # without one a step is a single forward and backward pass


def _group(tree: Mapping[str, Any], where: str, *, named: bool = True) -> Mapping[str, Any]:
    values = tree.get(where.rpartition(".")[2])
    if not isinstance(values, Mapping):
        raise RequestError(f"{where} must hold keys and values, not {values!r}")
    if named and "name" not in values:
        raise RequestError(f"key '{where}.name' is missing")
    return values


def _named(registry: Registry[Any], tree: Mapping[str, Any], where: str) -> NamedEntry:
    values = dict(_group(tree, where))
    name = str(values.pop("name"))
    return NamedEntry(name, build(registry[name], values, where))


def _present(registry: Registry[Any], tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Build the entries whose keys are present, which switches them on."""
    _refuse_null(tree, where)
    values = _group(tree, where, named=False)
    keys = {name: f"{where}.{name}" for name in values}
    return {name: build(registry[name], _group(values, key, named=False), key) for name, key in keys.items()}


def _refuse_null(tree: Mapping[str, Any], where: str) -> None:
    """Refuse null, which switches nothing off: a group keeps the keys that it does not replace."""
    values = tree.get(where)
    entries = values if isinstance(values, Mapping) else {}
    null = [where] * (where in tree and values is None) + [
        f"{where}.{name}" for name in entries if entries[name] is None
    ]
    if null:
        others = f"[{', '.join(name for name in entries if entries[name] is not None)}]"
        in_a_file = f"'override /{where}: {others}' among the defaults of a file"
        raise RequestError(f"{null[0]} is null; to leave it out say {where}={others}, or {in_a_file}")


def run_config(tree: Mapping[str, Any]) -> RunConfig:
    """Build the config of a run from a resolved tree of dicts, lists and scalars.

    Raises:
        RequestError: a key is unknown or missing, a name is unknown, or a value makes no sense.
    """
    keys = [field.name for field in fields(RunConfig)]
    for key in tree:
        if key not in keys:
            raise RequestError(f"unknown key '{key}'; {nearest(key, keys)}")
    if "seed" in tree:  # before the data, whose seed it is by default
        convert(RunConfig, "seed", tree["seed"], "seed")
    groups = {
        "model": build(ModelConfig, _group(tree, "model"), "model"),
        "parametrization": _named(PARAMETRIZATIONS, tree, "parametrization"),
        "intervention": _present(INTERVENTIONS, tree, "intervention"),
        "guest": _present(MODELS, tree, "guest"),
        "optimizer": build_optimizer(_group(tree, "optimizer")),
        "schedule": _named(SCHEDULES, tree, "schedule"),
        "data": _named(DATA, tree, "data"),
        "probes": build(ProbesConfig, _group(tree, "probes"), "probes"),
        "scale": build(ScaleConfig, {"name": _group(tree, "scale")["name"]}, "scale"),
        "checkpoint": build(CheckpointConfig, _group(tree, "checkpoint", named=False), "checkpoint"),
        "tracker": _named(TRACKERS, tree, "tracker"),
        "batch": _named(BATCHES, tree, "batch") if tree.get("batch") else None,
    }
    scalars = {key: value for key, value in tree.items() if key not in groups}
    config = build(RunConfig, {**groups, **scalars}, "")
    _check_consistent(config)
    return config


def _check_consistent(config: RunConfig) -> None:
    """Refuse interventions that exclude others or use what no model has, and what a custom model cannot have."""
    for name, entry in config.intervention.items():
        if isinstance(entry, HookIntervention):
            _check_uses(f"intervention {name} attaches to", entry.hook_points, HOOK_POINTS, ("logits",), config)
            for other in entry.excludes:
                if other in config.intervention:
                    raise RequestError(f"intervention {name} replaces {other}; choose one of the two, not both")
        if isinstance(entry, LossTerm):
            custom_has = tuple(field for field in Predictions._fields if field != "hidden_rbtd")
            _check_uses(f"loss term {name} uses", entry.uses, Predictions._fields, custom_has, config)
    if config.batch is not None:
        config.batch.entry.micro_batches(config.batch_size, config.steps)
    elif "noise_scale" in config.probes.names:
        raise RequestError("probe noise_scale compares micro-batches, and the run has none; add batch=constant")
    if len(config.guest) > 1:
        raise RequestError(f"guest must hold one model, not {', '.join(config.guest)}")
    for key, _, is_per_run in leaves(config.guest, "guest."):
        if is_per_run:
            raise RequestError(
                f"{key} is a number per run, but fields of a custom model are static: declare it int or float"
            )
    if config.guest and config.parametrization.name != "standard":
        name = config.parametrization.name
        raise RequestError(
            f"parametrization={name} does not apply to a custom model, which draws its own initial values"
        )


def _check_uses(
    clause: str, names: Iterable[str], possible: Sequence[str], custom_has: Sequence[str], config: RunConfig
) -> None:
    for name in names:
        if name not in possible:
            raise RequestError(f"{clause} {name!r}; {nearest(name, possible)}")
        if config.guest and name not in custom_has:
            raise RequestError(f"{clause} {name}; a custom model has {', '.join(custom_has)} only")


def _rows(config: RunConfig) -> dict[str, tuple[Any, bool]]:
    """Dotted config key -> (value, whether it may differ inside a fleet); without the tracker."""
    rows = {}
    for key, value, is_per_run in leaves(config):
        if key.startswith("tracker.") or (key == "batch" and value is None):
            continue
        key = key.replace(".entry.", ".")
        if key.startswith("optimizer.links."):
            field = key.removeprefix("optimizer.links.")
            key = f"optimizer.{field if field in config.optimizer.owned else field.partition('.')[2]}"
        if key not in NO_COLUMN:
            rows[key] = (value, is_per_run)
    rows["optimizer.chain"] = (tuple(config.optimizer.links), False)
    return rows


def columns(config: RunConfig) -> dict[str, Any]:
    """Return one run's config as the columns of its record: dotted keys, lists joined with ``+``."""
    flat = {key: "+".join(value) if isinstance(value, tuple) else value for key, (value, _) in _rows(config).items()}
    return {**flat, "intervention": "+".join(sorted(config.intervention)) or "none", **_custom_model(config)}


def _custom_model(config: RunConfig) -> dict[str, str]:
    """The column with the custom model's name; absent without one, so that ids of other runs do not depend on it."""
    return {"guest": next(iter(config.guest))} if config.guest else {}


def static_key(config: RunConfig) -> str:
    """Digest the settings that may not differ inside a fleet; runs with equal keys have the same shapes."""
    labels = ("out", "model.name", "scale.name")
    shared = {key: value for key, (value, is_per_run) in _rows(config).items() if not is_per_run and key not in labels}
    return files.digest({**shared, "intervention": sorted(config.intervention), **_custom_model(config)})


def run_id(config: RunConfig, fingerprint: str) -> str:
    """Return the id of the run with this config, on data with this fingerprint."""
    return store.run_id({**columns(config), "data_fingerprint": fingerprint})
