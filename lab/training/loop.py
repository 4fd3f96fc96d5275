"""The training loop: yields a result per update; its caller writes, prints and stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lab.probes.listener import Listener
from lab.training.control import Control
from lab.training.fleet import Fleet


class StepResult(NamedTuple):
    """The state of training after an update, or before the first.

    Attributes:
        done: updates so far.
        step: index of the last update; 0 before the first.
        probe_values: numbers ``[r]`` by (probe, hook point).
        val_loss_r: cross-entropy on the whole held-out set, nats per token; None if not evaluated.
        steps: of a controlled fleet, the index of each run's last update, -1 for a run that had ended before it.
    """

    done: int
    step: int
    probe_values: dict[tuple[str, str], Tensor]
    val_loss_r: Tensor | None
    steps: tuple[int, ...] | None = None

    @property
    def is_last(self) -> bool:
        """Whether training has ended."""
        return self.done > 0 and self.val_loss_r is not None


def train(fleet: Fleet, done: int = 0) -> Iterator[StepResult]:
    """Train a fleet, resuming after ``done`` updates; yields a result before the first update and after each.

    The first and the last result carry the loss on the whole held-out set.  In between, the probe ``val_loss`` measures
    it on a slice, before the update of that step.

    The runs of a controlled fleet (one with a burst or a response) go at their own pace.  Its results count the batches
    processed, by all runs alike; training ends when every run has made its updates.
    """
    probes, steps = fleet.config.probes, fleet.config.steps
    # a single step is both the first and the last; its val_loss is measured at the end
    if not done:
        yield _evaluated(
            0, 0, Listener(probes.names if steps > 1 else (), fleet.engine.faults), fleet.evaluation.loss_at_init()
        )
    if fleet.control:
        yield from _train_controlled(fleet, fleet.control)
        return
    for step in range(done, steps):
        steps = fleet.feed.updates(step)
        last = step == steps - 1
        listener = Listener(probes.names if probes.fires(step, steps) else (), fleet.engine.faults)
        _evaluate_slices(fleet, listener, at_an_end=last or step == 0)
        if listener.measures("batch"):
            listener("batch", "", *fleet.feed.sizes(step))
        if listener.measures("sources"):
            listener("sources", "", fleet.feed.rows_by_source(step))
        listener.probe_values |= fleet.step(step)
        if last:
            yield _evaluated(steps, step, listener, fleet.evaluation.loss(whole=True))
            return
        else:
            yield StepResult(step + 1, step, listener.probe_values, None)


def _train_controlled(fleet: Fleet, control: Control) -> Iterator[StepResult]:
    probes, steps = fleet.config.probes, fleet.config.steps
    while not control.has_ended:
        steps_now = control.steps_now()
        under_way = [step for step in steps_now if step >= 0]
        fires = any(probes.fires(step, steps) for step in under_way)
        listener = Listener(probes.names if fires else (), fleet.engine.faults)
        control.before_step()
        _restart(fleet, control)
        _evaluate_slices(fleet, listener)
        listener.probe_values |= fleet.advance(control.clock, with_probes=fires)
        control.after_step()
        yield StepResult(control.iterations, min(under_way), listener.probe_values, None, steps_now)
    _restart(fleet, control)  # of a fleet resumed after its last update
    control.restore_final()
    yield _evaluated(
        control.iterations, steps - 1, Listener(probes.names, fleet.engine.faults), fleet.evaluation.loss(whole=True)
    )


def _evaluate_slices(fleet: Fleet, listener: Listener, *, at_an_end: bool = False) -> None:
    """Measure held-out losses on slices of their text, but at either end of the run not the loss of the corpus."""
    if listener.measures("val_loss") and not at_an_end:
        listener("val_loss", "", fleet.evaluation.loss(whole=False))
    if listener.measures("clean_val_loss"):
        listener("clean_val_loss", "", fleet.evaluation.clean_loss())


def _restart(fleet: Fleet, control: Control) -> None:
    if configs := control.restarts.due():
        fleet.restart(configs)


def _evaluated(done: int, step: int, listener: Listener, val_loss_r: Tensor) -> StepResult:
    listener("val_loss", "", val_loss_r)
    return StepResult(done, step, listener.probe_values, val_loss_r)
