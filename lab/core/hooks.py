"""Hook points, where a tensor may be observed or changed, and the probes that observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Kinds of hook points a model may have, and what else is announced in the course of a step.
HOOK_POINTS = ("query", "key", "scores", "weighing", "attention", "block_output", "logits")
ANNOUNCEMENTS = (
    *HOOK_POINTS,
    *("query_key", "log_z", "log_z_square", "train_loss", "val_loss"),
    *("gradients", "parameters", "clipped_gradients", "adam", "direction"),
)
Callback = Callable[..., None]
_callback: ContextVar[Callback | None] = ContextVar("ear", default=None)


def announce(kind: str, where: str, *heard: Any) -> None:
    """Tell whoever listens that a value of this kind passed ``where``; costs nothing when nobody does."""
    ear = _callback.get()
    if ear is not None:
        ear(kind, where, *heard)


@contextmanager
def listening(ear: Callback | None) -> Iterator[None]:
    """Within the block, ``ear(kind, where, *heard)`` overhears every announcement; ``None`` hears nothing."""
    token = _callback.set(ear)
    try:
        yield
    finally:
        _callback.reset(token)


class HookPoint(nn.Module):
    """A place in the model: announces the tensor that arrives, then hands it through whatever is attached.

    What listens hears the tensor *before* it is changed (a score before its cap).  Doing nothing is the empty list.
    """

    def __init__(self, kind: str, where: str) -> None:
        super().__init__()
        self.kind, self.where = kind, where
        self.changes = nn.ModuleDict()

    def forward(self, tensor: Tensor) -> Tensor:
        announce(self.kind, self.where, tensor)
        for change in self.changes.values():
            tensor = change(tensor)
        return tensor


def attach(model: nn.Module, interventions: Mapping[str, Any], runs: int, shape: Any) -> None:
    """Give every hook point of a model the interventions that name its kind, in the order of their names."""
    for name, change in sorted(interventions.items()):  # a request names them in no particular order
        for point in model.modules():
            if isinstance(point, HookPoint) and point.kind in change.attaches_to:
                point.changes[name] = change.attach(runs, shape)


Measure = Callable[..., "Tensor | dict[str, Tensor]"]


@dataclass(frozen=True)
class Probe:
    """A named function of what is announced under ``hears``; gives one number per run, or one per tensor and run."""

    name: str
    hears: str
    measure: Measure
