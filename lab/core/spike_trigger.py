"""When a run in training responds to a rise of its loss: the rule that triggers its response.

The rule looks at the last losses only, so it costs next to nothing at each step. Which spikes a run *had* is another
question, which ``loss_spikes`` of ``lab/analysis/spikes/trend.py`` answers for records and logs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.core.windows import MERGE, Numbers, before

# A loss triggers the response if it lies above the median of those before it by so many scaled median absolute
# deviations, and by so many nats.
DEVIATIONS, LEAST_RISE = 7.0, 0.1
# The loss is back where it is within so many deviations, in so many measurements.
BACK, PATIENCE = 2.0, 300
# Diverged: so many measurements in a row above the loss at the start, where the model guesses uniformly.
LOST_FOR = 100
# Stalled: so many measurements in a row at the floor of the loss scale, or without an update.
STALLED_FOR = 100


@dataclass
class SpikeTrigger:
    """Follows the loss of one run and says when a response is due, and how what triggered it ends.

    A loss that is not finite triggers, too, and ends as ``diverged``.

    Attributes:
        row: the last measurement.
        first: row at which the spike under way began; -1 without one.
        last: the last row that belongs to a spike.
        begins: whether a spike began at ``row``.
    """

    row: int = -1
    first: int = -1
    last: int = -MERGE
    begins: bool = False
    at_start: float = math.inf
    median: float = math.nan
    deviation: float = math.nan
    usual: float = math.nan
    calm: float = math.nan
    above: int = 0

    def add(self, loss: float, median: float, deviation: float) -> str:
        """Read a loss, and the median and deviation of those before it.

        Returns:
            How the spike under way ends here: ``recovered``, ``stuck`` or ``diverged``; empty if it does not.
        """
        self.row += 1
        if math.isinf(self.at_start) and math.isfinite(loss):
            self.at_start = loss
        if math.isfinite(median):
            self.median = median
        if math.isfinite(deviation):
            self.deviation = deviation
        self.begins = self.first < 0 and self._is_new(loss, median, deviation)
        if self.begins:
            self.first, self.usual, self.above = self.row, self.median, 0
            self.calm = self.median + max(BACK * self.deviation, 0.0)
        return self._ending(loss) if self.first >= 0 else ""

    def forget(self) -> None:
        """Drop the spike under way, and the last one: training went back to before them."""
        self.first, self.last = -1, self.row - MERGE

    def _is_new(self, loss: float, median: float, deviation: float) -> bool:
        """Whether a row outside a spike begins one; a high row soon after the last spike still belongs to it."""
        is_above = loss > median + DEVIATIONS * deviation and loss - median > LEAST_RISE
        is_high = is_above or not math.isfinite(loss)
        if is_high and self.row - self.last < MERGE:
            self.last = self.row
            return False
        return is_high

    def _ending(self, loss: float) -> str:
        self.last = self.row
        self.above = self.above + 1 if loss > self.at_start else 0
        if not math.isfinite(loss) or self.above >= LOST_FOR:
            ending = "diverged"
        elif loss <= self.calm:
            ending = "recovered"
        elif self.row - self.first >= PATIENCE and not self.above:
            ending = "stuck"
        else:
            return ""
        self.first = -1
        return ending


def triggered(loss_n: Numbers) -> list[int]:
    """The rows at which a response would have been triggered in a run that has none."""
    trigger, rows = SpikeTrigger(), list[int]()
    for row, (loss, median, deviation) in enumerate(zip(loss_n, *before(loss_n), strict=True)):
        trigger.add(float(loss), float(median), float(deviation))
        rows += [row] if trigger.begins else []
    return rows
