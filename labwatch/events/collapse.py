"""Whether a run leaves the loss curve of its smaller siblings: an alarm that needs no usual level of its own.

With tuned learning rates, the curves of all sizes are one curve up to an offset and a factor (Qiu et al. 2025, Scaling
collapse, arXiv 2507.02119). So a line in the loss of the siblings foretells that of the run, and how well it foretells
the siblings from one another is the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.core.windows import Numbers
from labwatch.events.detectors import Log
from labwatch.events.twins import finite_losses

# Means of the loss over pieces of the steps, at most so many; and the pieces at the start that are left out, those of a
# first line, and those whose mean is compared with it.
PIECES, EARLY, FIRST, JUDGED = 40, 2, 6, 4
FEWEST = EARLY + FIRST + JUDGED  # pieces
# An alarm is raised by a rise above the line of so many times the usual deviation of the siblings.
DEVIATIONS = 2.5


class Departure(NamedTuple):
    """How a run follows the curve of its siblings.

    Attributes:
        step_n: the steps at which it is judged, each from what was logged up to there.
        excess_n: its loss minus what the siblings' curve foretells, nats per token, in the mean of the last pieces.
        tolerance: an excess above this is an alarm.
        step: the step of the first alarm; None without one.
        piece_step_p: the last step of each piece of the common steps.
        loss_lp: means of the loss over the pieces, of the run and then of each sibling; NaN where the run has not
            logged them yet.
    """

    step_n: NDArray[np.int64]
    excess_n: Numbers
    tolerance: float
    step: int | None
    piece_step_p: NDArray[np.int64]
    loss_lp: Numbers


def departure(log: Log, siblings: Sequence[Log]) -> Departure | None:
    """Where a run leaves the curve of its siblings; None if they have too few steps in common.

    Args:
        log: the run, which may still be training.
        siblings: at least two runs of the same recipe, schedule and number of steps in other sizes, each tuned; better
            on the same batches.
    """
    mine_n, _ = finite_losses(log)
    step_n = reduce(np.intersect1d, [finite_losses(sibling)[0] for sibling in siblings])
    # what the run has not logged yet stays
    step_n = step_n[np.isin(step_n, mine_n) | (step_n > max(mine_n, default=-1))]
    if len(step_n) < FEWEST:
        return None
    edges = np.unique(np.linspace(0, len(step_n), PIECES + 1).round().astype(int))
    curve_sp = np.array([_means(sibling, step_n, edges) for sibling in siblings])
    others_sp = (curve_sp.sum(0) - curve_sp) / (len(siblings) - 1)
    errors = np.concatenate([_excess(one_p, rest_p) for one_p, rest_p in zip(curve_sp, others_sp, strict=True)])
    tolerance = DEVIATIONS * math.sqrt(float((errors**2).mean()))
    pieces = int(np.isin(step_n[edges[1:] - 1], mine_n).sum())
    loss_p = _means(log, step_n[: edges[pieces]], edges[: pieces + 1])
    excess_n, judged_n = _excess(loss_p, curve_sp.mean(0)), step_n[edges[FEWEST : pieces + 1] - 1]
    alarms = np.flatnonzero(excess_n > tolerance)
    alarm = int(judged_n[alarms[0]]) if len(alarms) else None
    run_p = np.append(loss_p, np.full(len(edges) - 1 - pieces, math.nan))
    return Departure(judged_n, excess_n, tolerance, alarm, step_n[edges[1:] - 1], np.vstack([run_p, curve_sp]))


def _means(log: Log, step_n: NDArray[np.int64], edges: NDArray[np.int64]) -> Numbers:
    """Means of the loss over pieces between edges, which count rows of ``step_n``."""
    loss_n = log.columns["loss"][np.isin(log.step_n, step_n)]
    mean_p: Numbers = np.add.reduceat(loss_n, edges[:-1]) / np.diff(edges) if len(edges) > 1 else loss_n[:0]
    return mean_p


def _excess(loss_p: Numbers, curve_p: Numbers) -> Numbers:
    """From the ``FEWEST``-th piece on, the mean of the last pieces above the line in the curve through those before."""
    found = []
    for end in range(FEWEST, len(loss_p) + 1):
        before, last = slice(EARLY, end - JUDGED), slice(end - JUDGED, end)
        slope, offset = np.polyfit(curve_p[before], loss_p[before], 1)
        found.append(float((loss_p[last] - offset - slope * curve_p[last]).mean()))
    return np.array(found)
