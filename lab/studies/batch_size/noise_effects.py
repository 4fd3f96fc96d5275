"""Effects of claims on the gradient noise scale: its change with loss, size and learning rate."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds, slope
from lab.analysis.judging.evidence import ArmTables, MissingRunsError
from lab.studies.batch_size.growth import first_loss, last_loss, noise_at, noise_growth, noise_late, noise_rank

# Points in the range of losses that all sizes pass through, at which their noise scales are compared.
PARTS_OF_THE_RANGE = (0.25, 0.5, 0.75)


def _best(arm: ArmTables) -> float:
    """The learning rate with the lowest final loss, mean over seeds and sizes."""
    return min(arm.lrs, key=lambda lr: float(pd.Series(arm.loss(lr).to_numpy().ravel()).mean()))


def noise_scale_grows_as_the_loss_falls(arm: ArmTables) -> Effects:
    """Two parts at each size, which lie above zero if the noise scale grows at least threefold as the loss falls.

    The first is -0.8 minus the rank correlation of loss and noise scale over tenths of training. The second is log10 of
    a third of the noise scale in the last tenth over that in the first.
    """
    rank = arm.probe(_best(arm), "noise_scale", "", noise_rank)
    growth = arm.probe(_best(arm), "noise_scale", "", noise_growth)
    return pd.concat([-0.8 - rank, growth - math.log10(3)], axis=1, keys=["rank", "growth"])


def noise_scale_depends_on_the_loss_not_the_size(arm: ArmTables) -> Effects:
    """Largest over smallest noise scale of the sizes, at three losses that all pass through, at the best learning rate.

    The control: the final losses of the smallest and the largest size differ by more than 0.05.
    """
    if len(arm.sizes) < 2:
        raise MissingRunsError("models of one size only")
    best = _best(arm)
    first, last = (arm.probe(best, "noise_scale", "", loss).to_numpy() for loss in (first_loss, last_loss))
    losses = arm.loss(best)
    low, high = float(np.fmax.reduce(last, axis=None)), float(np.fmin.reduce(first, axis=None))
    ratios = {}
    for part in PARTS_OF_THE_RANGE:
        at_loss = arm.probe(best, "noise_scale", "", noise_at, loss=high + part * (low - high))
        ratios[part] = at_loss.max(axis=1, skipna=False) / at_loss.min(axis=1, skipna=False)
    return Qualified(pd.DataFrame(ratios), control=exceeds((losses.iloc[:, 0] - losses.iloc[:, -1]).abs(), 0.05))


def fall_of_noise_scale_with_rate(arm: ArmTables) -> Effects:
    """Minus the slope over log learning rate of the log noise scale in the second half of training, at each size."""
    late = {lr: arm.probe(lr, "noise_scale", "", noise_late) for lr in arm.lrs}
    sizes = {size: pd.DataFrame({lr: table[size] for lr, table in late.items()}) for size in arm.sizes}
    return pd.DataFrame({size: -slope(table) for size, table in sizes.items()})


def larger_models_end_at_a_larger_noise_scale(arm: ArmTables) -> Effects:
    """Slope over log10 size of log10 of the noise scale in the second half of training, at the best learning rate."""
    return slope(arm.probe(_best(arm), "noise_scale", "", noise_late))
