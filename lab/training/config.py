"""The config of a run: turns the resolved config tree into frozen dataclasses, its columns and its id."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lab.contrib
import lab.data
import lab.interventions
import lab.optim.loss_scale
import lab.optim.schedule
import lab.probes.activations
import lab.probes.formats
import lab.probes.routing
import lab.probes.updates
import lab.records.trackers
import lab.responses  # noqa: F401  (these fill the registries)
from lab.core.errors import RequestError, nearest
from lab.core.hooks import HookIntervention, WeightIntervention, changes_weights
from lab.core.number_formats import MANTISSA_BITS
from lab.core.registry import (
    BATCHES,
    BURSTS,
    DATA,
    INTERVENTIONS,
    LOSS_SCALES,
    MODELS,
    PARAMETRIZATIONS,
    RESPONSES,
    SCHEDULES,
    TRACKERS,
    Registry,
)
from lab.core.schema import UNRECORDED, PerRun, PerRunSeed, bounded, build, convert, one_of, seed, with_keys_now
from lab.model.config import ModelConfig
from lab.model.low_precision import PRECISIONS as LOW_PRECISIONS
from lab.optim.batch_schedule import Adaptive, resolve, resolve_within
from lab.optim.optimizer import Optimizer, build_optimizer
from lab.optim.restarts import Groups, RestartSchedule, build_restarts
from lab.probes.listener import ProbesConfig
from lab.training import rules
from lab.training.checkpoint import CheckpointConfig

FEWEST_TARGETS = 1024  # of a short validation


@dataclass(frozen=True)
class Label:
    """Name of a preset of sizes, or of a published recipe, whose settings a run has, some of them perhaps changed."""

    name: str


@dataclass(frozen=True)
class NamedEntry:
    """An entry of a registry and its name in the registry."""

    name: str
    entry: Any


@dataclass(frozen=True)
class ScheduleConfig(NamedEntry):
    """A learning-rate schedule, and what it runs over: ``steps`` or ``tokens``, in which warm-up and decay progress."""

    over: str = one_of("steps", "tokens", default="steps")


@dataclass(frozen=True)
class Budget:
    """The length of a run in tokens, instead of steps."""

    tokens: int = bounded(above=0)


@dataclass(frozen=True)
class RunConfig:
    """The config of one run; stacked, the config of a fleet."""

    model: ModelConfig
    parametrization: NamedEntry
    intervention: Mapping[str, Any]
    custom_model: Mapping[str, Any]
    optimizer: Optimizer
    schedule: ScheduleConfig
    data: NamedEntry
    probes: ProbesConfig
    scale: Label
    checkpoint: CheckpointConfig = field(metadata=UNRECORDED)
    tracker: NamedEntry = field(metadata=UNRECORDED)
    out: str
    batch_size: int = bounded(above=0)
    seq_len: int = bounded(above=0)
    steps: int = bounded(above=0)
    seed: PerRunSeed = seed()
    precision: str = one_of("fp32", "bf16", "fp16_emulated", "mantissa", *LOW_PRECISIONS)
    engine: str = one_of("auto", "eager", "captured", "compiled")
    device: str = one_of("auto", "cpu", "cuda", "mps")
    ranks: str = one_of("ddp", "fsdp", **UNRECORDED)
    validation: str = one_of("whole", "short", default="whole")
    batch: NamedEntry | None = None  # without one a step is a single forward and backward pass
    bad_batches: NamedEntry | None = None
    response: NamedEntry | None = None
    restarts: RestartSchedule | None = None
    loss_scale: NamedEntry | None = None
    recipe: Label | None = None
    master_weights: str = one_of("fp32", "none", default="fp32")
    gradient_sum: str = one_of("fp32", "fp16", "fp16_divided", default="fp32")
    mantissa_bits: PerRun = bounded(default=0, at_least=0, at_most=MANTISSA_BITS)
    gradient_format: str = one_of("e5m2", "e4m3", default="e5m2")
    stochastic_rounding: str = one_of("none", "gradients", "all", default="none")
    norm_gains: str = one_of("fp32", "rounded", default="fp32")
    kept_in_bf16: str = one_of("none", "ends", default="none")
    attention_precision: str = one_of("bf16", "same", default="bf16", older="same")
    weight_gradients: str = one_of("rounded", "hadamard", "bf16", default="rounded")

    @property
    def validation_targets(self) -> float:
        """About how many held-out tokens are predicted before the first update and after the last."""
        return math.inf if self.validation == "whole" else max(FEWEST_TARGETS, self.trained_tokens)

    @property
    def trained_tokens(self) -> int:
        """Tokens that the run trains on, each time it sees them."""
        if self.batch is None:
            return self.batch_size * self.seq_len * self.steps
        sequences: int = self.batch.entry.sequences(self.batch_size, self.steps)
        return sequences * self.seq_len

    @property
    def rows(self) -> int:
        """Sequences of one forward and backward pass."""
        return self.batch_size if self.batch is None else self.batch.entry.micro_batch

    @property
    def rows_key(self) -> str:
        """The key that gives ``rows``."""
        return "batch_size" if self.batch is None else "batch.micro_batch"

    @property
    def adaptive(self) -> Adaptive | None:
        """The batch schedule of a run that chooses its own batches; None for any other."""
        return self.batch.entry if self.batch and isinstance(self.batch.entry, Adaptive) else None

    @property
    def is_traced(self) -> bool:
        """Whether its engine traces a step, which then cannot branch on values."""
        return self.engine in ("captured", "compiled")

    @property
    def is_controlled(self) -> bool:
        """Whether it is read after every update: with a burst, response, restart schedule or loss scale."""
        return any(group is not None for group in (self.bad_batches, self.response, self.restarts, self.loss_scale))

    @property
    def micro_batches(self) -> NDArray[np.int64]:
        """Forward and backward passes of each update ``[steps]``."""
        if self.batch is None:
            return np.ones(self.steps, dtype=np.int64)
        counts: NDArray[np.int64] = self.batch.entry.micro_batches(self.batch_size, self.steps)
        return counts

    @property
    def phases(self) -> Sequence[RunConfig]:
        """The config before the first restart, and after each."""
        restarts = self.restarts.restarts if self.restarts else ()
        return [self, *(replace(self, **restart.groups) for restart in restarts)]

    @property
    def duration(self) -> int:
        """The length of the run as its learning-rate schedule counts: steps, or tokens."""
        return self.trained_tokens if self.schedule.over == "tokens" else self.steps


def _group(tree: Mapping[str, Any], where: str, *, named: bool = True) -> Mapping[str, Any]:
    values = tree.get(where.rpartition(".")[2])
    if not isinstance(values, Mapping):
        raise RequestError(f"{where} must hold keys and values, not {values!r}")
    if named and "name" not in values:
        raise RequestError(f"key '{where}.name' is missing")
    return values


def _named(registry: Registry[Any], values: Mapping[str, Any], where: str) -> NamedEntry:
    numbers = dict(values)
    name = str(numbers.pop("name"))
    keys = {other: {field.name for field in fields(registry[other])} for other in {name, *registry}}
    for key in numbers:
        if key not in keys[name] and (owners := [other for other in registry if key in keys[other]]):
            raise RequestError(f"{where}={name} has no key '{where}.{key}'; it belongs to {where}={'|'.join(owners)}")
    return NamedEntry(name, build(registry[name], numbers, where))


def _schedule(values: Mapping[str, Any], where: str) -> ScheduleConfig:
    own = {key: value for key, value in values.items() if key != "over"}
    over = convert(ScheduleConfig, "over", values.get("over", "steps"), f"{where}.over")
    named = _named(SCHEDULES, own, where)
    return ScheduleConfig(named.name, named.entry, over)


def _present(registry: Registry[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Build the entries whose keys are present, which switches them on."""
    _refuse_null(values, where)
    keys = {name: f"{where}.{name}" for name in values}
    return {name: build(registry[name], _group(values, key, named=False), key) for name, key in keys.items()}


def _label(values: Mapping[str, Any], where: str) -> Label:
    return build(Label, {"name": values["name"]}, where)


# How each group of a config is built from its values and its key.
GROUPS: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "model": partial(build, ModelConfig),
    "parametrization": partial(_named, PARAMETRIZATIONS),
    "intervention": partial(_present, INTERVENTIONS),
    "custom_model": partial(_present, MODELS),
    "optimizer": lambda values, _: build_optimizer(values),
    "schedule": _schedule,
    "data": partial(_named, DATA),
    "probes": partial(build, ProbesConfig),
    "scale": _label,
    "checkpoint": partial(build, CheckpointConfig),
    "tracker": partial(_named, TRACKERS),
    "batch": partial(_named, BATCHES),
    "bad_batches": partial(_named, BURSTS),
    "response": partial(_named, RESPONSES),
    "loss_scale": partial(_named, LOSS_SCALES),
    "recipe": _label,
}
OPTIONAL = [field.name for field in fields(RunConfig) if field.default is None]  # groups that may be empty
NAMELESS = ("intervention", "custom_model", "checkpoint")


def _refuse_null(values: Mapping[str, Any] | None, where: str) -> None:
    """Refuse null, which switches nothing off: a group keeps the keys that it does not replace."""
    entries = values if isinstance(values, Mapping) else {}
    null = [where] * (values is None) + [f"{where}.{name}" for name in entries if entries[name] is None]
    if null:
        others = f"[{', '.join(name for name in entries if entries[name] is not None)}]"
        in_a_file = f"'override /{where}: {others}' among the defaults of a file"
        raise RequestError(f"{null[0]} is null; to leave it out say {where}={others}, or {in_a_file}")


def run_config(tree: Mapping[str, Any], groups: dict[str, Any] | None = None) -> RunConfig:
    """Build the config of a run from a resolved tree of dicts, lists and scalars.

    Args:
        tree: the resolved tree, under the keys of now or former ones.
        groups: the groups built so far, by key and values; configs of many runs share those that are equal.

    Raises:
        RequestError: a key is unknown or missing, a name is unknown, or a value makes no sense.
    """
    tree = with_keys_now(tree)
    keys = [field.name for field in (*fields(RunConfig), *fields(Budget))]
    for key in tree:
        if key not in keys:
            raise RequestError(f"unknown key '{key}'; {nearest(key, keys)}")
    if "seed" in tree:  # before the data, whose seed it is by default
        convert(RunConfig, "seed", tree["seed"], "seed")
    known = {} if groups is None else groups
    built: dict[str, Any] = {}
    for key, make in GROUPS.items():
        if key in OPTIONAL and not tree.get(key):
            built[key] = None
            continue
        if key in ("intervention", "custom_model") and key in tree and tree[key] is None:
            _refuse_null(None, key)
        values = _group(tree, key, named=key not in NAMELESS)
        identity = f"{key} {values!r}"
        if identity not in known:
            known[identity] = make(values, key)
        built[key] = known[identity]
    scalars = {key: value for key, value in tree.items() if key not in built and key != "restarts"}
    config = _in_steps(built, scalars)
    if tree.get("restarts"):
        schedule = build_restarts(tree["restarts"], tree, config.steps, partial(_restarted_groups, config))
        config = replace(config, restarts=schedule)
    rules.check(config)
    return config


def _restarted_groups(config: RunConfig, values: Groups) -> dict[str, Any]:
    """Groups that a restart changes, from their plain values."""
    groups = {key: GROUPS[key](own, key) for key, own in values.items()}
    after = replace(config, **groups)
    rules.check(after)
    for name in sorted({*config.intervention, *after.intervention}):
        entries = [phase.intervention.get(name) for phase in (config, after)]
        entry = next(filter(None, entries))
        is_other = entries[0] != entries[1]
        if is_other and isinstance(entry, HookIntervention) and changes_weights(entry, config.model):
            raise RequestError(f"intervention {name} changes which weights there are, and a restart keeps all of them")
        if is_other and isinstance(entry, WeightIntervention):
            raise RequestError(f"intervention {name} acts on weights from the first update, and a restart keeps it")
    return groups


def _in_steps(groups: Mapping[str, Any], scalars: Mapping[str, Any]) -> RunConfig:
    """The config, whose length may be given in tokens; its batch schedule no longer holds fractions of the run."""
    numbers = dict(scalars)
    budget = numbers.pop("tokens", None)
    if budget is None:
        config = build(RunConfig, {**groups, **numbers}, "")
        entry = config.batch and resolve(config.batch.entry, config.batch_size, config.steps)
    else:
        if numbers.get("steps") is not None:
            raise RequestError(f"steps={numbers['steps']} and tokens={budget} both set the length of a run; give one")
        config = build(RunConfig, {**groups, **numbers, "steps": 1}, "")
        sequences = convert(Budget, "tokens", budget, "tokens") // config.seq_len
        entry, steps = None, sequences // config.batch_size
        if config.batch:
            entry, steps = resolve_within(config.batch.entry, config.batch_size, sequences)
        if not steps:
            first = (entry.size(0, config.batch_size) if entry else config.batch_size) * config.seq_len
            raise RequestError(f"tokens={budget} is less than a batch, which holds {first} tokens")
        config = replace(config, steps=steps)
    return config if config.batch is None else replace(config, batch=NamedEntry(config.batch.name, entry))
