"""Claims on training in fp16: sums of gradients over workers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lab.analysis.judging.effects import Effects, Qualified, exceeds
from lab.analysis.judging.evidence import ArmTables
from lab.analysis.judging.verdicts import claim
from lab.analysis.probe_values import near
from lab.studies.spikes.claims import OPT

GRADIENT_SUM = "gradient_sum"
END, HALVING = 1.0, 1.0  # part of the run; the loss scale changes by factors of two


def _doublings(arm: ArmTables) -> pd.DataFrame:
    """Log2 of the loss scale at the end."""
    return pd.DataFrame(np.log2(arm.probe(min(arm.lrs), "loss_scale", "", near, part=END)))


@claim(
    "sec. 2.2",
    "gradients divided before and after they are summed in fp16 take a larger loss scale than those divided after it",
    arms=({GRADIENT_SUM: "fp16_divided"}, {GRADIENT_SUM: "fp16"}, {GRADIENT_SUM: "fp32"}),
    frees=(GRADIENT_SUM,),
    cause=[GRADIENT_SUM],
    sweep="fp16_sums",
    shown_in="loss_scale_over_steps",
    source=OPT,
    side=(0.0, math.inf),
    unit="doublings",
)
def a_divided_sum_takes_a_larger_loss_scale(divided: ArmTables, undivided: ArmTables, exact: ArmTables) -> Effects:
    """Doublings of the loss scale at the end with division on both sides of the sum minus those with division after it.

    The control: it is the sum that overflows, so one in fp32 takes a larger scale than the undivided one.
    """
    gain = _doublings(divided) - _doublings(undivided)
    return Qualified(gain, HALVING, control=exceeds(_doublings(exact) - _doublings(undivided), 0.0))
