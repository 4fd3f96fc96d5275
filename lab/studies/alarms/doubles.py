"""Doubles of a loss spike: faults of machine or code that look like one, told apart by replaying the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Largest relative difference between the gradient of a batch and that of its parts, which only rounding may cause.
PARTS_DIFFER = 1e-5
# Largest relative difference of a loss after a change of the last bits.
ROUNDING = 1e-4
# A finite micro-batch is calm up to so many times the usual gradient norm.
CALM = 5.0


class Twins(NamedTuple):
    """What is known of a step at which the loss rose, or was not finite.

    Attributes:
        loss: of the step, nats per token.
        replayed: the loss of the same step, trained again from the last checkpoint with the same data.  Of several
            steps both are those of the first at which they differ, since rounding grows.
        returns: whether the replay is the same to the bit, or its loss rises at least half as far.
        parts_error: relative difference between the gradient of a batch and that of its micro-batches or shards.
        norms: gradient norm of each micro-batch of the step.
        usual_norm: gradient norm of the steps before.
    """

    loss: float
    replayed: float
    returns: bool
    parts_error: float
    norms: Sequence[float]
    usual_norm: float


def diagnose(evidence: Twins) -> str:
    """Name what made the loss rise.

    ``scaling_bug``: the parts of a batch do not add up to the batch, which shows before the first update.
    ``faulty_micro_batch``: single micro-batches are not finite while the others are calm, and the fault does not return
    in the replay.  ``rounding``: weights differ, the loss hardly.  ``corrupted_state``: the loss differs by more, as
    after a flipped bit in a weight.  ``spike``: the rise returns in the replay, so data and state explain it.
    """
    if not evidence.parts_error <= PARTS_DIFFER:
        return "scaling_bug"
    if evidence.returns:
        return "spike"
    broken = [norm for norm in evidence.norms if not math.isfinite(norm)]
    calm = [norm for norm in evidence.norms if norm <= CALM * evidence.usual_norm]
    if broken and calm and len(broken) + len(calm) == len(evidence.norms):
        return "faulty_micro_batch"
    is_close = abs(evidence.loss - evidence.replayed) <= ROUNDING * abs(evidence.replayed)
    return "rounding" if is_close else "corrupted_state"
