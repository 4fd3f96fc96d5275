"""Claims on restarts by hand: what lower learning rates save, and what new data take."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pandas as pd

from lab.analysis.events.costs import spike_costs
from lab.analysis.events.detectors import detect
from lab.analysis.events.logs import logs_of
from lab.analysis.judging.effects import Effects, Qualified, exceeds, parts
from lab.analysis.judging.evidence import ArmTables
from lab.analysis.judging.verdicts import TO_SPARE, claim
from lab.analysis.probe_values import late_excess, rise
from lab.core.detectors import LEAST_RISE
from lab.records.store import Records
from lab.studies.spikes.claims import BURST, GLM, HALF, OPT, PEAK_STEP

LEDGER, NONE, LOSS = "ledger", "none", "train_loss"
# Shares of the run at which the ledgers ``quarter_lr`` and ``glm_130b`` restart it, and their factors; the lowest rate
# of ``opt_175b`` is half of its first.
QUARTERED, QUARTER, HALVED, LOWEST = 0.4, 0.25, 0.53, 0.5

restarted: Callable[..., Callable[..., object]] = partial(
    claim, frees=(LEDGER,), cause=[LEDGER], sweep="ledgers", shown_in="ledger"
)


def spikes_after(records: Records, probe: str, where: str, part: float) -> pd.Series:
    """Loss spikes that begin after a part of the run; indexed by run id."""
    steps = records.runs.set_index("id")["steps"]
    counts = {
        log.name: sum(event.kind == "spike" and event.step >= part * steps[log.name] for event in detect(log))
        for log in logs_of(records)
    }
    return pd.Series(counts, dtype=float)


def _final(arm: ArmTables, factor: float = 1.0) -> pd.Series:
    """Final loss of the largest model, at the highest learning rate times a factor."""
    return arm.loss(arm.nearest(factor * arm.top)).iloc[:, -1]


def _late_excess(arm: ArmTables, factor: float = 1.0) -> pd.Series:
    lr = arm.nearest(factor * arm.top)
    return arm.probe(lr, LOSS, "", late_excess, part=HALVED).iloc[:, -1]


@restarted(
    "run 11.1",
    "a quarter of the learning rate saves a run that has exploded: its loss ends lower, and spikes no more",
    arms=({LEDGER: NONE}, {LEDGER: "quarter_lr"}),
    unit="nats/token, or spikes",
    source=OPT,
)
def a_quarter_of_the_rate_saves_an_exploded_run(none: ArmTables, quarter: ArmTables) -> Effects:
    """Final loss without the restart minus that with it, at the highest learning rate; and 0.5 minus spikes after it.

    The control: without it, the training loss has risen by more than 0.1 nats when the restart comes.
    """
    lower = _final(none) - _final(quarter)
    calm = HALF - quarter.probe(quarter.top, LOSS, "", spikes_after, part=QUARTERED).iloc[:, -1]
    risen = none.probe(none.top, LOSS, "", rise, part=QUARTERED).iloc[:, -1]
    grain = parts(lower=0 * lower, calm=HALF + 0 * calm)
    return Qualified(parts(lower=lower, calm=calm), grain, control=exceeds(risen, LEAST_RISE))


@restarted(
    "runs 11.1 to 12.53",
    "the series of restarts ends no higher, to 0.1 nats, than the lowest of its learning rates held throughout",
    arms=({LEDGER: NONE}, {LEDGER: "opt_175b"}),
    source=OPT,
    unit=TO_SPARE,
)
def the_series_of_restarts_ends_as_low_as_its_lowest_rate(none: ArmTables, series: ArmTables) -> Effects:
    """0.1 nats plus the final loss at half the highest learning rate minus that of the series from the highest one.

    The control: without restarts the highest learning rate ends more than 0.1 nats above the series.
    """
    effect = LEAST_RISE + _final(none, LOWEST) - _final(series)
    return Qualified(effect, control=exceeds(_final(none) - _final(series), LEAST_RISE))


@restarted(
    "training log",
    "half the learning rate late in training lowers late spikes: the loss rises less above its median from there on",
    arms=({LEDGER: NONE}, {LEDGER: "glm_130b"}),
    source=GLM,
)
def half_the_rate_lowers_late_spikes(none: ArmTables, halved: ArmTables) -> Effects:
    """Largest training loss minus the median after the restart, without it minus with it, at the highest learning rate.

    The control: without it, this is more than 0.1 nats above that of a quarter of the learning rate, which is the noise
    of batches.
    """
    noise = _late_excess(none, QUARTER)
    own = exceeds(_late_excess(none) - noise, LEAST_RISE)
    return Qualified(_late_excess(none) - _late_excess(halved), control=own)


def _peak(arm: ArmTables) -> pd.Series:
    return arm.column(arm.top, spike_costs, "peak").iloc[:, -1]


@claim(
    "training log",
    "new data take a ramp of their share and a new warm-up together: with either alone the held-out loss peaks higher",
    arms=[{BURST: burst, LEDGER: ledger} for burst in ("shift", "ramped_shift") for ledger in (NONE, "new_warm_up")],
    frees=(BURST, LEDGER),
    cause=[BURST, LEDGER],
    sweep="new_data",
    shown_in="ledger",
    side=(0.0, math.inf),
    source=GLM,
)
def new_data_take_a_ramp_and_a_warm_up(
    abrupt: ArmTables, warm_up: ArmTables, ramp: ArmTables, both: ArmTables
) -> Effects:
    """Peak of the held-out loss above the usual with the ramp alone, and with the warm-up alone, minus that with both.

    The control: with neither, the peak is above 0.1 nats.
    """
    higher = parts(ramp=_peak(ramp) - _peak(both), warm_up=_peak(warm_up) - _peak(both))
    return Qualified(higher, PEAK_STEP, control=exceeds(_peak(abrupt), LEAST_RISE))
