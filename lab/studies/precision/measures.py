"""What this study computes from records: spikes in so many updates, and where it reads the first and the last layer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lab.analysis.events.costs import spike_costs
from lab.records.store import Records

PER_UPDATES = 1000
FIRST, LAST = "block0.attention.query", "head"  # tensors that stand for the first block and for the end
LAST_MLP = "block1.mlp_down.left"  # what the last layer of the last MLP takes
LATE_PART = 0.8  # of a run, up to its end, over which updates and gradients are averaged


def spike_rate(records: Records) -> pd.Series:
    """Loss spikes in 1000 updates of each run without bad data that was read after each update, by its id."""
    costs = spike_costs(records)
    return pd.Series(PER_UPDATES * costs["false_alarms"] / costs["clean_steps"])


def has_loss_scales(runs: pd.DataFrame) -> bool:
    """Whether runs differ in a constant loss scale."""
    return "loss_scale.init" in runs and runs["loss_scale.init"].nunique() > 1


def scale_exponent(runs: pd.DataFrame) -> pd.Series:
    """Log2 of the loss scale of each run, by its id."""
    return pd.Series(np.log2(runs.set_index("id")["loss_scale.init"].astype(float)))
