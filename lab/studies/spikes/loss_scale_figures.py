"""The figure of the loss scale of fp16."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records


@figure("loss_scale_over_steps")
def loss_scale_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Loss scale against step, with the training loss below it.

    The scale falls at each gradient that overflows, whose update is left out, and rises after many that do not. Lines
    are means over seeds (geometric for scales), one per learning rate.
    """
    loss = ProbeSeries("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [ProbeSeries("loss_scale", "", "loss scale"), loss])
