"""Loss spikes that come by themselves in the runs of a board: at which learning rate they are counted, and how."""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd

from lab.analysis.events.scores import PER_STEPS
from lab.core.detectors import FEWEST, Numbers, loss_spikes


class Spikes(NamedTuple):
    """The learning rate at which the loss spikes of an arm are counted.

    Attributes:
        lr: the largest one of the grid that is at most half the arm's smallest unstable one; NaN if they are not
            counted.
        is_top: whether no learning rate is unstable, so that it is the highest of the grid instead.
        resolution: the rate of one spike in a run, per ``PER_STEPS`` steps.
        runs: the ids of the runs in which they are counted.
    """

    lr: float
    is_top: bool
    resolution: float
    runs: tuple[str, ...] = ()


NOT_COUNTED = Spikes(math.nan, False, 0.0)


def counted_at(lrs: tuple[float, ...], seeds: pd.DataFrame, steps: int) -> Spikes:
    """At which learning rate spikes are counted, from the unstable ones of all seeds of an arm.

    Args:
        lrs: the grid, in rising order.
        seeds: a row per seed with ``eta_div``, log10 of the smallest unstable learning rate, and ``censored``.
        steps: of a run.
    """
    unstable = seeds.loc[~seeds["censored"].astype(bool), "eta_div"]
    resolution = PER_STEPS / max(steps - FEWEST, 1)
    if unstable.empty:
        return Spikes(lrs[-1], True, resolution) if len(seeds) else NOT_COUNTED
    below = [lr for lr in lrs if lr <= 10 ** unstable.min() / 2]
    return Spikes(below[-1], False, resolution) if below else NOT_COUNTED


def spike_rate(loss_n: Numbers) -> float:
    """Loss spikes per ``PER_STEPS`` steps of a run, by the detector to which responses in training react.

    The detector compares a loss with the 100 before it, and needs ``FEWEST`` of them, 20. So a spike can be seen from
    step 20 on, counted from 0, and these steps alone are the exposure: 380 of the 400 of a run of the board.
    """
    return len(list(loss_spikes(loss_n))) * PER_STEPS / (len(loss_n) - FEWEST) if len(loss_n) > FEWEST else math.nan
