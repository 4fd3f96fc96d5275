"""Claims on learned positions: how far the table moves from its beginning."""

from __future__ import annotations

import math

import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, by_rate, exceeds, log10
from lab.analysis.judging.evidence import ArmTables
from lab.analysis.judging.verdicts import LOG10, claim
from lab.analysis.probe_values import DISTANCE, POSITIONS, near
from lab.studies.spikes.claims import OPT

INIT = "intervention.learned_positions.init"
# By this factor the distances differ where a table does not train.
LEAST_RATIO = 20


@claim(
    "run 11.0",
    "learned positions that begin as sines do not train: they move less than a twentieth as far as small random ones, "
    "relative to their beginning",
    arms=({INIT: "gaussian"}, {INIT: "sinusoidal"}),
    frees=("intervention.learned_positions",),
    cause=[INIT],
    side=(math.log10(LEAST_RATIO), math.inf),
    unit=f"{LOG10}ratio",
    sweep="learned_positions",
    shown_in="distance_from_init",
    source=OPT,
)
def sinusoidal_positions_do_not_train(gaussian: ArmTables, sinusoidal: ArmTables) -> Effects:
    """Log10 of the final distance from the initial values over their norm, Gaussian minus sinusoidal, at each rate.

    The control: the Gaussian table ends further from its beginning than its own norm.
    """
    return Qualified(_distance(gaussian) - _distance(sinusoidal), control=exceeds(_distance(gaussian), 0.0))


def _distance(arm: ArmTables) -> pd.DataFrame:
    """Log10 of the last distance of the table, per seed (row) and learning rate (column)."""
    return log10(by_rate(arm.lrs, lambda lr: arm.probe(lr, DISTANCE, POSITIONS, near, part=1.0).iloc[:, -1]))
