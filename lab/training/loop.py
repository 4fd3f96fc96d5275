"""The training loop: yields a moment per update; its caller writes, prints and stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lab.probes.listener import Listener
from lab.training.fleet import Fleet


class Moment(NamedTuple):
    """The state of training after an update, or before the first.

    Attributes:
        done: updates so far.
        step: index of the last update; 0 before the first.
        probe_values: numbers ``[r]`` by (probe, hook point).
        val_loss_r: cross-entropy on the whole held-out set, nats per token; None if not evaluated.
    """

    done: int
    step: int
    probe_values: dict[tuple[str, str], Tensor]
    val_loss_r: Tensor | None


def train(fleet: Fleet, done: int = 0) -> Iterator[Moment]:
    """Train a fleet, resuming after ``done`` updates; yields a moment before the first update and after each.

    The first and the last moment carry the loss on the whole held-out set.  In between, the probe ``val_loss`` measures
    it on a slice, before the update of that step.
    """
    probes, steps = fleet.config.probes, fleet.config.steps
    # a single step is both the first and the last; its val_loss is measured at the end
    if not done:
        yield _evaluated(
            0, 0, Listener(probes.names if steps > 1 else (), fleet.engine.faults), fleet.evaluate_at_init()
        )
    for step in range(done, steps):
        steps = fleet.updates(step)
        last = step == steps - 1
        listener = Listener(probes.names if probes.fires(step, steps) else (), fleet.engine.faults)
        if listener.hears("val_loss") and step > 0 and not last:
            listener("val_loss", "", fleet.evaluate(whole=False))
        if listener.hears("batch"):
            listener("batch", "", *fleet.batch(step))
        listener.probe_values |= fleet.step(step)
        if last:
            yield _evaluated(steps, step, listener, fleet.evaluate(whole=True))
            return
        else:
            yield Moment(step + 1, step, listener.probe_values, None)


def _evaluated(done: int, step: int, listener: Listener, val_loss_r: Tensor) -> Moment:
    listener("val_loss", "", val_loss_r)
    return Moment(done, step, listener.probe_values, val_loss_r)
