"""Training that can be cut off: from the newest checkpoint to the end, or to where it is told to stop."""

from __future__ import annotations

from collections.abc import Callable

from lab.core import distributed
from lab.core.errors import RequestError
from lab.training.checkpoint import Checkpointer
from lab.training.loop import Moment, train
from lab.training.recorder import Recorder

Say = Callable[[str], None]


def train_on(
    tape: Recorder, keeper: Checkpointer, hear: Callable[[Moment], None], note: Say, told_to_stop: Callable[[], bool]
) -> bool:
    """Train the tape's fleet from where it was left; whether it came to its end, not having been told to stop before.

    ``hear`` is told of every moment, ``note`` of a checkpoint that cannot be read or written.
    """
    fleet = tape.fleet
    state = keeper.restore(fleet.tensors(), note)
    if state:
        tape.restore(state)
    for moment in train(fleet, state["done"] if state else 0):
        tape.keep(moment)
        hear(moment)
        if moment.done == fleet.config.steps:
            break
        # every rank stops, and keeps, after the same step
        stops, keeps = distributed.any_rank(told_to_stop()), distributed.any_rank(keeper.due(moment.done))
        if moment.done and (stops or keeps):
            _save(tape, keeper, moment.done, note)
        if stops:
            return False
    return True


def _save(tape: Recorder, keeper: Checkpointer, done: int, note: Say) -> None:
    try:
        keeper.save(done, tape.fleet.tensors(), tape.state())
    except RequestError as refusal:  # the run goes on, less safely
        note(str(refusal))
