"""Measures of low precision and effects of claims on it: how often the loss spikes, how much the first block moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from lab.analysis.probe_values import late, peak
from lab.records.store import Records
from studies.claims.costs import spike_costs
from studies.claims.effects import Effects, mean
from studies.claims.evidence import ArmTables, ComparisonGroup, Config
from studies.claims.quantities import log10
from studies.claims.verdicts import Presumption

ON, GAINS, ATTENTION, SCALE, EPS = "on", "norm_gains", "attention_precision", "loss_scale.init", "optimizer.eps"
INTERVENTIONS = ("swiglu", "qk_layernorm")
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


def in_formats(group: ComparisonGroup, *names: str) -> list[ArmTables]:
    """Arms by name: a precision, then ``gains`` or ``attention`` where these are rounded as well, and interventions."""
    return group.arms(*map(_chooser, names))


def _chooser(name: str) -> Callable[[Config], bool]:
    precision, *words = name.split()
    wanted = {f"intervention.{name}": ON if name in words else None for name in INTERVENTIONS}
    gains = "rounded" if "gains" in words else "fp32"
    attention = "same" if "attention" in words or precision == "fp32" else "bf16"

    def is_it(curve: Config) -> bool:
        matches = all(curve.get(key) == value for key, value in wanted.items())
        rounds_alike = curve.get(GAINS, "fp32") == gains and curve.get(ATTENTION, "same") == attention
        return matches and curve.get("precision") == precision and rounds_alike

    return is_it


# Delayed scales differ from current ones by what they let saturate, here of what the last layer of an MLP takes at the
# highest learning rate.
SATURATED = Presumption(
    lambda delayed, *_: delayed.probe(delayed.lrs[-1], "saturation", LAST_MLP, peak).iloc[:, -1] - 0.01,
    "hardly an entry saturates: the largest share of them in delayed scales, minus a hundredth, is {}",
)


def at_scales(group: ComparisonGroup, eps: float, *ends: str) -> list[ArmTables]:
    """Arms with the ``lowest`` or ``highest`` loss scale, and with an epsilon."""
    scales = group.values(SCALE)
    chosen = {"lowest": scales[0], "highest": scales[-1]} if len(scales) > 1 else {}
    return group.arms(*({EPS: eps, SCALE: chosen.get(end)} for end in ends))


def spikes_in_1000(arm: ArmTables, lr: float) -> pd.Series:
    """Loss spikes in 1000 updates of the largest model, in a run without bad data."""
    counted, steps = (arm.column(lr, spike_costs, name).iloc[:, -1] for name in ("false_alarms", "clean_steps"))
    return PER_UPDATES * counted / steps


def difference_in_spikes(first: ArmTables, second: ArmTables, *, rates: int) -> Effects:
    """Loss spikes in 1000 updates of the first arm minus those of the second, mean of the highest learning rates."""
    return mean([spikes_in_1000(first, lr) - spikes_in_1000(second, lr) for lr in first.lrs[-rates:]])


def log_update_ratio_of_small_minus_large(small: ArmTables, large: ArmTables) -> Effects:
    """Log10 of the update of the first block over that of the head, smallest loss scale minus largest."""

    def ratio(arm: ArmTables) -> pd.Series:
        first, last = (
            log10(arm.probe(arm.lrs[-1], "update_rms", where, late, part=LATE_PART)).iloc[:, -1]
            for where in (FIRST, LAST)
        )
        return first - last

    return ratio(small) - ratio(large)
