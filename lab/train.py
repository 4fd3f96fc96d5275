"""The loop; it yields moments, and whoever calls writes, prints or stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lab.fleet import Fleet
from lab.hooks import listening
from lab.probes.probe import Listener


class Moment(NamedTuple):
    """A step gone by: what the probes heard of it ``[r]`` each, and the whole held-out loss ``[r]`` if evaluated."""

    step: int
    heard: dict[tuple[str, str], Tensor]
    val_loss_r: Tensor | None


def train(fleet: Fleet) -> Iterator[Moment]:
    """Train a fleet: a moment before the first update, then one after each.

    The first and the last moment carry the loss on the whole held-out set.  In between, ``val_loss`` is heard on a
    slice of it, before the update of that step.
    """
    probes, steps = fleet.config.probes, fleet.config.steps
    yield _look(fleet, 0, Listener(probes.names), whole=True)
    for step in range(steps):
        listener = Listener(probes.names if probes.fires(step, steps) else ())
        if listener.hears("val_loss") and 0 < step < steps - 1:
            _look(fleet, step, listener, whole=False)
        with listening(listener):
            fleet.step(step)
        yield Moment(step, listener.heard, None) if step < steps - 1 else _look(fleet, step, listener, whole=True)


def _look(fleet: Fleet, step: int, listener: Listener, *, whole: bool) -> Moment:
    """Evaluate; who listens hears the result, and nothing of the way to it."""
    val_loss_r = fleet.evaluate(whole=whole)
    listener("val_loss", "", val_loss_r)
    return Moment(step, listener.heard, val_loss_r)
