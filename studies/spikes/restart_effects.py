"""Effects of claims on restart schedules, and the restarts that a run has recorded."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.curves import setting_name
from lab.analysis.probe_values import recorded
from lab.core.spike_trigger import LEAST_RISE
from lab.records.store import ENTRIES, Records
from labwatch.events.detectors import detect
from labwatch.events.logs import logs_of
from studies.claims.effects import Effects, Qualified, exceeds, parts
from studies.claims.evidence import ArmTables
from studies.claims.quantities import held_out, loss_at_top
from studies.spikes.effects import HALF

RESTARTS, NONE, CHAIN = "restarts", "none", "optimizer.chain"
# Settings of the optimizer that are shown as multiples of those at the start; and names of settings for readers.
RELATIVE = ("lr", "weight_decay")
TIMES = "\N{MULTIPLICATION SIGN}"
SAME = "same links"
NAMES = {"lr": "LR", "weight_decay": "decay"}
FEW = 20  # measurements over which ``rise`` takes means


class RecordedRestart(NamedTuple):
    """One restart: the step before which it came, and its changes in words."""

    step: int
    changes: str


def restarts_of(card: Mapping[Hashable, Any]) -> list[RecordedRestart]:
    """The restarts in the restart log of a run, in the order of their steps."""
    entries = card.get(ENTRIES)
    if not isinstance(entries, str):
        return []
    return [_restart(entry, card) for entry in re.split(r"\+(?=\d+: )", entries)]


def _restart(entry: str, card: Mapping[Hashable, Any]) -> RecordedRestart:
    step, _, changes = entry.partition(": ")
    return RecordedRestart(int(step), ", ".join(_change(change, card) for change in changes.split()))


def _change(change: str, card: Mapping[Hashable, Any]) -> str:
    key, _, value = change.partition("=")
    if key == CHAIN:
        return _links(str(card.get(CHAIN, "")).split("+"), value.split(","))
    end = key.removeprefix("optimizer.")
    name = NAMES.get(end, setting_name(end, ()))
    first = card.get(key)
    return (
        f"{name} {TIMES}{float(f'{float(value) / float(first):.3g}'):g}"
        if end in RELATIVE and first
        else f"{name} {value}"
    )


def _links(first: Sequence[str], links: Sequence[str]) -> str:
    """The links that a chain adds to the first chain of the run, and those that it drops: ``sgd for adam``."""
    new, gone = [name for name in links if name not in first], [name for name in first if name not in links]
    words = [" and ".join(setting_name(name, ()) for name in names) for names in (new, gone)]
    return " for ".join(words) if all(words) else f"with {words[0]}" if new else f"without {words[1]}" if gone else SAME


LOSS = "train_loss"
# Shares of the run at which the restart logs ``quarter_lr`` and ``glm_130b`` restart it, the factor of the former, and
# the lowest learning rate of ``opt_175b`` over its first.
QUARTERED, QUARTER, HALVED, LOWEST = 0.4, 0.25, 0.53, 0.5


def spikes_after(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Number of loss spikes that begin after a share of the run; indexed by run id."""
    steps = records.runs.set_index("id")["steps"]
    counts = {
        log.name: sum(event.kind == "spike" and event.step >= part * steps[log.name] for event in detect(log))
        for log in logs_of(records)
    }
    return pd.Series(counts, dtype=float)


def rise(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Mean of the last 20 values up to a share of the run, minus the lowest mean of 20 consecutive ones; by run id."""
    values = recorded(records, probe, where).sort_values(["id", "step"], kind="stable")
    values = values[values["step"] < part * values["updates"]]
    return values.groupby("id")["value"].agg(_rise)


def _rise(values: pd.Series) -> float:
    means = values.rolling(FEW).mean()
    return float(means.iloc[-1] - means.min())


def late_excess(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Largest value after a share of the run minus the median after it; indexed by run id."""
    values = recorded(records, probe, where)
    late_values = values[values["step"] >= part * values["updates"]].groupby("id")["value"]
    return late_values.max() - late_values.median()


def _late_excess(arm: ArmTables, factor: float = 1.0) -> pd.Series:
    lr = arm.nearest(factor * arm.top)
    return arm.probe(lr, LOSS, "", late_excess, part=HALVED).iloc[:, -1]


def loss_and_spikes_after_quartered_rate(none: ArmTables, quarter: ArmTables) -> Effects:
    """Final loss without the restart minus that with it, at the highest learning rate; and 0.5 minus spikes after it.

    The control: without it, the training loss has risen by more than 0.1 nats when the restart comes.
    """
    lower = loss_at_top(none) - loss_at_top(quarter)
    calm = HALF - quarter.probe(quarter.top, LOSS, "", spikes_after, part=QUARTERED).iloc[:, -1]
    risen = none.probe(none.top, LOSS, "", rise, part=QUARTERED).iloc[:, -1]
    resolution = parts(lower=0 * lower, calm=HALF + 0 * calm)
    return Qualified(parts(lower=lower, calm=calm), resolution, control=exceeds(risen, LEAST_RISE))


def loss_of_series_beside_halved_rate(none: ArmTables, series: ArmTables) -> Effects:
    """0.1 nats plus the final loss at half the highest learning rate minus the loss of the series from the highest one.

    The control: without restarts the highest learning rate ends more than 0.1 nats above the series.
    """
    effect = LEAST_RISE + loss_at_top(none, LOWEST) - loss_at_top(series)
    return Qualified(effect, control=exceeds(loss_at_top(none) - loss_at_top(series), LEAST_RISE))


def late_excess_lowered_by_halved_rate(none: ArmTables, halved: ArmTables) -> Effects:
    """Largest training loss after the restart minus the median there; without the restart minus with it.

    Both are at the highest learning rate. The control: without the restart it is more than 0.1 nats above that at a
    quarter of the learning rate, where the noise of batches alone causes it.
    """
    noise = _late_excess(none, QUARTER)
    own = exceeds(_late_excess(none) - noise, LEAST_RISE)
    return Qualified(_late_excess(none) - _late_excess(halved), control=own)


# Shares of the run at which restart logs change it, and of the last measurement on the slice of the held-out text.
SWAP, END = 0.4, 0.99
LITTLE = 0.05  # share of a gain


def _gain(arm: ArmTables) -> pd.Series:
    """Fall of the held-out loss from the restart to the end, at the lowest learning rate, nats/token."""
    lr = min(arm.lrs)
    return held_out(arm, lr, SWAP) - held_out(arm, lr, END)


def share_of_progress_at_same_rate(adam: ArmTables, sgd: ArmTables, same: ArmTables) -> Effects:
    """Fall of the loss after the switch over its fall in the same steps without, at the lowest learning rate.

    In larger models the entries of the gradient are smaller, and so are the steps of SGD relative to Adam's. So the
    lowest rate of the sweep, a tenth of Adam's best, is nearest to large models.

    The control: for a restart that changes nothing the same share is above 5 %.
    """
    return Qualified(_gain(sgd) / _gain(adam), control=exceeds(_gain(same) / _gain(adam), LITTLE))


def share_of_progress_at_thousandfold_rate(adam: ArmTables, sgd: ArmTables, faster: ArmTables) -> Effects:
    """Fall of the loss with SGD at 1,000 times the lowest learning rate, over that with Adam at the lowest rate.

    The control: SGD at Adam's rate gains less than 5 % of it.
    """
    return Qualified(_gain(faster) / _gain(adam), control=exceeds(-_gain(sgd) / _gain(adam), -LITTLE))
