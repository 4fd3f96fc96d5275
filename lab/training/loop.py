"""The loop; it yields moments, and whoever calls writes, prints or stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lab.probes.listener import Listener
from lab.training.fleet import Fleet


class Moment(NamedTuple):
    """A step gone by: what the probes heard of it ``[r]`` each, and the whole held-out loss ``[r]`` if evaluated.

    ``done`` counts the updates made so far: none in the moment before the first.
    """

    done: int
    step: int
    heard: dict[tuple[str, str], Tensor]
    val_loss_r: Tensor | None


def train(fleet: Fleet, done: int = 0) -> Iterator[Moment]:
    """Train a fleet: a moment before the first update, then one after each; go on where so many are ``done``.

    The first and the last moment carry the loss on the whole held-out set.  In between, ``val_loss`` is heard on a
    slice of it, before the update of that step.
    """
    probes, steps = fleet.config.probes, fleet.config.steps
    # a single step is the first and the last; its one val_loss is that of the end
    if not done:
        yield _look(0, 0, Listener(probes.names if steps > 1 else (), fleet.engine.faults), fleet.evaluate_at_init())
    for step in range(done, steps):
        last = step == steps - 1
        listener = Listener(probes.names if probes.fires(step, steps) else (), fleet.engine.faults)
        if listener.hears("val_loss") and step > 0 and not last:
            listener("val_loss", "", fleet.evaluate(whole=False))
        listener.heard |= fleet.step(step)
        if last:
            yield _look(steps, step, listener, fleet.evaluate(whole=True))
        else:
            yield Moment(step + 1, step, listener.heard, None)


def _look(done: int, step: int, listener: Listener, val_loss_r: Tensor) -> Moment:
    listener("val_loss", "", val_loss_r)
    return Moment(done, step, listener.heard, val_loss_r)
