"""The threshold: which value early in a run tells those that will be unstable from the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd


class Threshold(NamedTuple):
    """The limit that best tells unstable runs from the rest.

    ``low`` and ``high`` are the nearest runs on its two sides; ``unstable`` and ``stable`` say how many of each kind
    lie on their own side, of how many.
    """

    value: float
    low: float
    high: float
    unstable: tuple[int, int]
    stable: tuple[int, int]


def calibrate(values: Iterable[float], unstable: Iterable[bool]) -> Threshold | None:
    """The cut, half-way in log between two neighbouring values, with the best mean of the two classes' shares.

    Of equally good cuts the one in the widest gap.  None where one class has no runs, or where no cut does better than
    chance.
    """
    table = pd.DataFrame({"value": [*values], "unstable": [*unstable]}).dropna()
    known = np.unique(table["value"])
    bad, good = (table.loc[table["unstable"] == lost, "value"].to_numpy() for lost in (True, False))
    if not len(bad) or not len(good) or len(known) < 2:
        return None
    best, *_ = sorted(
        (-((bad >= high).mean() + (good <= low).mean()), low / high, low, high) for low, high in pairwise(known)
    )
    low, high = float(best[2]), float(best[3])
    above, below = (int((bad >= high).sum()), len(bad)), (int((good <= low).sum()), len(good))
    return Threshold(math.sqrt(low * high), low, high, above, below) if best[0] < -1 else None
