"""Doubles of a loss spike: faults of machine or code that look like one, identified by replaying the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Largest relative difference between the gradient of a batch and that of its parts that rounding can explain.
PARTS_DIFFER = 1e-5
# Largest relative difference of a loss that a change of the last bits can explain.
ROUNDING = 1e-4
# A finite micro-batch is calm if its gradient norm is at most this many times the usual one.
CALM = 5.0


class ReplayEvidence(NamedTuple):
    """Evidence on a step at which the loss rose, or was not finite, from a log and its replay.

    Attributes:
        loss: the loss of the step, nats per token. If several steps were replayed, ``loss`` and ``replayed`` are those
            of the first at which they differ, since rounding errors grow.
        replayed: the loss of the same step, trained again from the last checkpoint with the same data.
        returns: whether the replay is equal to the bit, or its loss rises at least half as far.
        parts_error: relative difference between the gradient of a batch and that of its micro-batches or shards.
        norms: the gradient norm of each micro-batch of the step.
        usual_norm: the gradient norm of the steps before.
    """

    loss: float
    replayed: float
    returns: bool
    parts_error: float
    norms: Sequence[float]
    usual_norm: float


def diagnose(evidence: ReplayEvidence) -> str:
    """Name the cause of the rise of the loss.

    - ``scaling_bug``: the gradients of the parts of a batch do not add up to that of the batch, from the first update.
    - ``faulty_micro_batch``: single micro-batches are not finite while the others are calm, and the fault does not
      return in the replay.
    - ``rounding``: weights differ, but the loss hardly does.
    - ``corrupted_state``: the loss differs by more, as after a flipped bit in a weight.
    - ``spike``: the rise returns in the replay, so data and state explain it.
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
