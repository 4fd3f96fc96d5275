"""Hook points of a model, the announcements of a training step, and the interfaces of interventions and probes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lab.core.routing import Routes

# Kinds of hook points at which a tensor passes, in the order of the forward pass.
TENSOR_POINTS = (
    *("embedding", "query", "key", "value", "scores", "weighing", "attention", "heads", "attention_output"),
    *("mlp_up", "mlp_hidden", "mlp_output", "block_output", "logits"),
)
# Kinds of hook points at which the attached module replaces a part of the model; see ``lab/model/transformer.py``.
PART_POINTS = (
    *("norm", "weight", "rotation", "attention_gate", "activation", "mlp_gate", "residual", "branches", "readout"),
)
# Kinds of hook points that a model may have.
HOOK_POINTS = (*TENSOR_POINTS, *PART_POINTS)
# Kinds of announcements in a step: tensors at hook points, and values that cannot be changed.
ANNOUNCEMENTS = (
    *TENSOR_POINTS,
    *("query_key", "log_z", "train_loss", "val_loss", "clean_val_loss"),
    *("gradients", "successive_gradients", "parameters", "clipped_gradients", "adam", "adam_direction", "direction"),
    *("second_moments", "descent", "noise", "batch", "sources", "loss_scale"),
    *("initial_parameters", "rounding", "gradient_rounding", "gains", "router", "router_load"),
)
Callback = Callable[..., None]
_callback: ContextVar[Callback | None] = ContextVar("callback", default=None)


def announce(kind: str, where: str, *values: Any) -> None:
    """Pass values of this kind, computed at ``where``, to the callback of ``listening``; a no-op without one."""
    callback = _callback.get()
    if callback is not None:
        callback(kind, where, *values)


def is_listening() -> bool:
    """Whether anybody listens to announcements."""
    return _callback.get() is not None


def is_heard(kind: str) -> bool:
    """Whether anybody may listen to announcements of this kind; only callbacks that ``measures`` some say so."""
    callback = _callback.get()
    return callback is not None and getattr(callback, "measures", lambda _: True)(kind)


@contextmanager
def listening(callback: Callback | None) -> Iterator[None]:
    """Call ``callback(kind, where, *values)`` on every announcement within the block; ``None`` mutes them."""
    token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(token)


@contextmanager
def listening_too(callback: Callback, kinds: Collection[str]) -> Iterator[None]:
    """As ``listening``, to these kinds alone, besides the callback that is called already."""
    if not kinds:
        yield
        return
    with listening(_Both(callback, kinds, _callback.get())):
        yield


class _Both:
    """Calls a callback on announcements of some kinds, and another on all."""

    def __init__(self, callback: Callback, kinds: Collection[str], outer: Callback | None) -> None:
        self.callback, self.kinds, self.outer = callback, kinds, outer

    def __call__(self, kind: str, where: str, *values: Any) -> None:
        if kind in self.kinds:
            self.callback(kind, where, *values)
        if self.outer is not None:
            self.outer(kind, where, *values)

    def measures(self, kind: str) -> bool:
        with listening(self.outer):
            return kind in self.kinds or is_heard(kind)


@contextmanager
def collecting(kind: str) -> Iterator[dict[str, Any]]:
    """Yield the first value of each announcement of this kind within the block, by hook point."""
    values: dict[str, Any] = {}

    def collect(_: str, where: str, *announced: Any) -> None:
        values[where] = announced[0]

    with listening_too(collect, (kind,)):
        yield values


class HookPoint(nn.Module):
    """Announces a tensor, then passes it through the attached modules, if any.

    Probes receive the tensor *before* it is changed (a score before its cap).

    Args:
        kind: one of ``HOOK_POINTS``.
        where: the part of the model, such as ``block0``; empty for the whole model.
        size: entries of the tensor's last axis; 0 where they are not known before the forward pass.
        heads: heads of queries, keys, values or what attention mixes; 0 elsewhere.
        inputs: inputs of a weight; 0 elsewhere.
    """

    def __init__(self, kind: str, where: str, size: int = 0, heads: int = 0, inputs: int = 0) -> None:
        super().__init__()
        self.kind, self.where, self.size, self.heads, self.inputs = kind, where, size, heads, inputs
        self.changes = nn.ModuleDict()

    @property
    def block(self) -> int:
        """Number of its block, counted from 1; 0 outside of blocks."""
        name, _, _ = self.where.partition(".")
        return int(name.removeprefix("block")) + 1 if name else 0

    def forward(self, tensor: Tensor) -> Tensor:
        announce(self.kind, self.where, tensor)
        for module in self.changes.values():
            tensor = module(tensor)
        return tensor


class Act(IntEnum):
    """The kind of change that an intervention makes at a hook point; a lower act comes first, whatever the names.

    Two interventions with one act at one hook point must commute or exclude each other.

    Attributes:
        LAYER: completes the layer that made the tensor: its bias, its initial values, its gradient.
        NORMALIZE: divides by the tensor's own scale.
        SCALE: multiplies by a gain or a number.
        POSITIONS: adds positions.
        OTHER: anything else, such as a cap.
        TRANSPLANT: sets a statistic of the tensor, whatever came before.
        REARRANGE: moves a factor to a later hook point, so that exact arithmetic would not change.
        ROUND: rounds to a number format.
        REPLACE: takes the place of a part of the model.
    """

    LAYER = 0
    NORMALIZE = 1
    SCALE = 2
    POSITIONS = 3
    OTHER = 4
    TRANSPLANT = 5
    REARRANGE = 6
    ROUND = 7
    REPLACE = 8


class HookIntervention(ABC):
    """An intervention that changes the tensors at some hook points of the model; subclasses are frozen dataclasses.

    Attributes:
        hook_points: the kinds of hook points it attaches to, out of ``HOOK_POINTS``, with its act at each; kinds
            without acts mean ``Act.OTHER``.
        excludes: names of interventions that do the same in another way, so that a run may have one of them only.
        normalizes_queries_and_keys: whether the model computes the same if their weights are multiplied by a number.
    """

    hook_points: ClassVar[Mapping[str, Act] | tuple[str, ...]]
    excludes: ClassVar[tuple[str, ...]] = ()
    normalizes_queries_and_keys: ClassVar[bool] = False

    @abstractmethod
    def attach(self, point: HookPoint, runs: int, config: Any) -> nn.Module | None:
        """Build the module for one hook point.

        Args:
            point: the hook point, whose kind is one of ``hook_points``.
            runs: number of runs in the fleet.
            config: the shape of the model, a ``ModelConfig``.

        Returns:
            A module from the tensor of the hook point, which leads with the run axis, to one of the same shape; None
            leaves this point as it is.
        """

    def initial_std(self, weight: str, std: float, config: Any) -> float:
        """Initial standard deviation of the weight of this name, given the one that the parametrization chooses."""
        return std

    def key_value_heads(self, heads: int) -> int:
        """Number of heads of keys and values, which divides the number of heads of queries."""
        return heads

    def mlp_parts(self, width: int) -> tuple[int, int] | None:
        """Number of MLPs side by side in one, and hidden units of each; None for a single one of four widths."""
        return None

    @property
    def most_positions(self) -> float:
        """Length of the longest window that it can be attached to."""
        return math.inf


class Predictions(NamedTuple):
    """The predictions of a batch.  A loss term gets the fields that it ``uses``; the others are None.

    Gradients flow back through logits, log Z and hidden states.  At tokens that do not count, logits, hidden states
    and targets are 0.

    Attributes:
        logits_rbtv: logits that enter the cross-entropy.
        log_z_rbt: log of the softmax normalizer.
        targets_rbt: tokens to predict.
        hidden_rbtd: output of the last LayerNorm, before the head; custom models have none.
        routes: by block, how tokens are routed to experts; empty without experts, which custom models lack.
    """

    logits_rbtv: Tensor
    log_z_rbt: Tensor
    targets_rbt: Tensor
    hidden_rbtd: Tensor
    routes: Routes = MappingProxyType({})


class HeldOut(Protocol):
    """The loss on held-out text around the weights before an update, computed where a probe asks for it."""

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Its gradient at these weights, by name ``[r ...]``."""
        ...

    def steps(self, directions: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Multiply directions by their learning rates: the amounts that an update subtracts from the weights."""
        ...

    def gradients_after(self, steps: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Its gradient at the weights less these steps."""
        ...


class LossTerm(ABC):
    """An intervention that adds a term to the loss; subclasses are frozen dataclasses.

    Attributes:
        uses: the fields of ``Predictions`` it reads.
        requires: names of interventions without which it has nothing to act on.
    """

    uses: ClassVar[tuple[str, ...]]
    requires: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __call__(self, predictions: Predictions) -> Tensor:
        """Return the term per token ``[r b t]``; its mean over tokens is added to the run's loss."""


def acting_at(kind: str, interventions: Mapping[str, HookIntervention]) -> list[str]:
    """Names of those that attach to hook points of this kind, in the order in which they act: by act, then by name."""
    acts = {
        name: entry.hook_points[kind] if isinstance(entry.hook_points, Mapping) else Act.OTHER
        for name, entry in interventions.items()
        if kind in entry.hook_points
    }
    return sorted(acts, key=lambda name: (acts[name], name))


def non_alphabetical_orders(interventions: Mapping[str, HookIntervention]) -> set[str]:
    """The orders, joined with ``+``, in which interventions act at hook points where these are not alphabetical."""
    kinds = {kind for entry in interventions.values() for kind in entry.hook_points}
    orders = [acting_at(kind, interventions) for kind in kinds]
    return {"+".join(order) for order in orders if order != sorted(order)}


class WeightIntervention:
    """An intervention on how weights are trained; subclasses are frozen dataclasses and override one of the methods.

    A custom model takes none, since the roles of its weights are unknown.

    Attributes:
        excludes: names of interventions that take away what it acts on.
        requires: names of interventions without which it has nothing to act on.
    """

    excludes: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()

    def lr_factor(self, role: str) -> float:
        """Factor of the learning rate of weights with this role; weights with factor 0 are not trained at all."""
        return 1.0

    def after_update(self, weights: Mapping[str, Tensor]) -> None:
        """Change weights ``[r ...]``, by name, in place after each update that is made."""


def attach(model: nn.Module, interventions: Mapping[str, HookIntervention], runs: int, config: Any) -> None:
    """Attach interventions, in the order of ``acting_at``, to all hook points of the kinds they name.

    Those attached before give way to them, except that modules with weights of their own stay.
    """
    for point in [module for module in model.modules() if isinstance(module, HookPoint)]:
        before, point.changes = point.changes, nn.ModuleDict()
        for name in acting_at(point.kind, interventions):  # the order of a request must not matter
            stays = name in before and _has_weights(before[name])
            module = before[name] if stays else interventions[name].attach(point, runs, config)
            if module is not None:
                point.changes[name] = module


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def changes_weights(intervention: HookIntervention, config: Any) -> bool:
    """Whether a model with this intervention has other weights than one without: more of them, or fewer."""
    with torch.device("meta"):
        modules = [intervention.attach(HookPoint(kind, "block0", 1), 1, config) for kind in intervention.hook_points]
    takes_away = {"readout", "norm", "branches"} & {*intervention.hook_points}
    has_fewer = bool(takes_away) or intervention.key_value_heads(config.heads) < config.heads
    return has_fewer or any(map(_has_weights, filter(None, modules)))


Measure = Callable[..., "Tensor | dict[str, Tensor]"]


@dataclass(frozen=True)
class Probe:
    """A named measurement of the announcements of one kind.

    Attributes:
        name: its name in configs and records.
        event: the kind of announcement, one of ``ANNOUNCEMENTS``.
        measure: from the announced values to one number per run ``[r]``, or to a dict of these by tensor name.
        largest: over several micro-batches the largest number counts, else the mean. A recorder of other training
            loops combines numbers of ranks, and of the tensors of a part, in the same way.
        is_root: it is the root of a mean square, and a recorder combines it as one.
        largest_tensor: of the tensors of a part a recorder takes the largest.
        falls: trouble shows in its fall, so the part with the smallest stands for the whole model.
    """

    name: str
    event: str
    measure: Measure
    largest: bool = False
    is_root: bool = False
    largest_tensor: bool = False
    falls: bool = False
