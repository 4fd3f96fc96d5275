"""Loss spikes of a run's own: where no bad data are planted, what moves before each, and at like steps without one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.analysis.events.costs import HELD_OUT, NONE
from lab.analysis.events.detectors import loss_spikes
from lab.analysis.probe_values import TRAIN
from lab.core.detectors import LEAST_RISE, NORMAL, Numbers
from lab.records.store import Records

# Before this step a model is still learning, and a spike is not counted.
START = 500
PER_STEPS = 10_000  # rates are in so many steps
# Steps before a spike in which a signal may cross, and before these the steps that say what is usual.
BEFORE, USUAL = 40, 100
# A signal crosses where its log lies so many deviations above the usual median.
CROSSING = 5.0
# A step without a spike is so far from any.
APART = 150
# The held-out loss is read up to so many steps after a spike begins.
HELD_AFTER = 5
GRADIENT, UPDATE, HUMPS = "grad_rms", "update_rms", "update_bimodality"
EMBEDDING, DEEP, KEYS = "embedding", "block0.mlp_up", "block0.attention.key"
SIGNALS = {
    "embedding_gradient": (GRADIENT, EMBEDDING),
    "embedding_update": (UPDATE, EMBEDDING),
    "attention_update": (UPDATE, KEYS),
    "mlp_gradient": (GRADIENT, DEEP),
    "head_gradient": (GRADIENT, "head"),
    "global_norm": ("grad_norm", ""),
    "attention_logits": ("attention_logit_max", "block0"),
}
# Of Adam's theory: the update is small where its RMS is below that of independent gradients, about 0.23 to 0.35; the
# embedding's gradient has vanished where it is below half of what it usually is beside that of a later layer, and
# returns where it grows tenfold; an update has two humps where its coefficient exceeds that of a uniform distribution.
SMALL, VANISHED, RETURNED, TWO_HUMPS = 0.35, 0.5, 10.0, 5 / 9
MEASURED_BY_STAGES = {(GRADIENT, EMBEDDING), (GRADIENT, DEEP), (UPDATE, EMBEDDING), (HUMPS, EMBEDDING)}
STAGES = ("small_updates", "vanished_gradient", "moments_follow", "gradient_returns", "two_humps")

Series = Mapping[tuple[str, str], Numbers]  # of one run, a value per step, by probe and place


class Spike(NamedTuple):
    """A spike of a run's own, or a step without one that it is compared with.

    Attributes:
        run: id of the run.
        step: at which it begins.
        end: the last step that belongs to it.
        size: largest training loss minus the usual one, nats/token.
        held_out: the largest rise of the held-out loss on fixed rows, up to 5 steps after it begins, nats/token.
        control: a step of the same run far from any spike, -1 if there is none.
    """

    run: str
    step: int
    end: int
    size: float
    held_out: float
    control: int


def measured(records: Records) -> dict[str, Series]:
    """The runs in which no bad data were planted and nothing answers a spike, measured at every step.

    Returns:
        By id, what the probes measured, by probe and place: a value per step ``[n]``, NaN where there is none.
    """
    runs = records.runs.reindex(columns=["id", "burst", "response", "ledger", "steps", "probes.every"])
    plain = (runs[["burst", "response"]].fillna(NONE) == NONE).all(axis=1) & (runs["probes.every"] == 1)
    chosen = runs[plain & (runs["steps"] > START + USUAL)]
    lengths = dict(zip(chosen["id"].astype(str), chosen["steps"].astype(int), strict=True))
    probes = {TRAIN, HELD_OUT, HUMPS, *(probe for probe, _ in SIGNALS.values())}
    metrics = records.metrics[records.metrics["id"].isin(list(lengths)) & records.metrics["probe"].isin(probes)]
    series: dict[str, dict[tuple[str, str], Numbers]] = {}
    for (run, probe, where), rows in metrics.groupby(["id", "probe", "where"], observed=True):
        value_n = np.full(lengths[str(run)], math.nan)
        inside = rows["step"].to_numpy(dtype=np.int64) < len(value_n)
        value_n[rows["step"].to_numpy(dtype=np.int64)[inside]] = rows["value"].to_numpy(dtype=float)[inside]
        series.setdefault(str(run), {})[str(probe), str(where)] = value_n
    return {run: each for run, each in series.items() if {(TRAIN, ""), (HELD_OUT, "")} <= set(each)}


def find_spikes(series: Mapping[str, Series]) -> list[Spike]:
    """The spikes of these runs from step 500 on that the held-out loss shows as well, in the order of their steps.

    A spike of the training loss whose held-out loss rises by less than 0.02 nats is one of its batch.
    """
    return [spike for run, each in series.items() for spike in _spikes(run, each) if spike.held_out > LEAST_RISE / 5]


def _spikes(run: str, series: Series) -> Iterator[Spike]:
    loss_n, held_n = series[TRAIN, ""], series[HELD_OUT, ""]
    spans = list(loss_spikes(loss_n))
    is_calm_n = np.ones(len(loss_n), dtype=bool)
    is_calm_n[: START + USUAL] = is_calm_n[-HELD_AFTER - 1 :] = False
    for span in spans:
        is_calm_n[max(0, span.first - APART) : span.last + APART] = False
    calm = np.flatnonzero(is_calm_n)
    for span in spans:
        if span.first < START:
            continue
        near = held_n[span.first : span.first + HELD_AFTER + 1]
        rise = float(np.nanmax(near) - np.nanmedian(held_n[max(0, span.first - USUAL) : span.first]))
        size = float(np.nanmax(loss_n[span.first : span.last + 1]) - span.usual)
        control = int(calm[np.abs(calm - span.first).argmin()]) if len(calm) else -1
        yield Spike(run, span.first, span.last, size, rise, control)


def lead(value_n: Numbers, step: int) -> float:
    """Steps before ``step`` at which a signal first crosses, within 40; NaN if it does not, or nothing was measured."""
    usual_n = value_n[max(0, step - BEFORE - USUAL) : step - BEFORE]
    before_n = value_n[max(0, step - BEFORE) : step]
    with np.errstate(divide="ignore", invalid="ignore"):
        usual_n, before_n = np.log(usual_n), np.log(before_n)
    usual_n = usual_n[np.isfinite(usual_n)]
    if len(usual_n) < USUAL // 2:
        return math.nan
    median = float(np.median(usual_n))
    deviation = NORMAL * float(np.median(np.abs(usual_n - median)))
    crossed = np.flatnonzero(before_n > median + CROSSING * deviation)
    return float(len(before_n) - crossed[0]) if len(crossed) else math.nan


def stages(series: Series, step: int, beta2: float) -> dict[str, bool]:
    """Which of the five stages of Adam's theory go before a step, each in its place (Molybog et al. 2023).

    ``small_updates``: the embedding's update is small and one-humped, 120 to 40 steps before.  ``vanished_gradient``:
    beside that of the first MLP layer its gradient is below half of what it usually is in the run, 40 to 10 steps
    before.  ``moments_follow``: its second moment has fallen from 100 to 10 steps before.  ``gradient_returns``: it
    grows tenfold over its median there, in the last 10 steps or at the step itself.  ``two_humps``: its update has two
    humps in these steps or the 5 after.
    """
    gradient_n, deep_n = (series[GRADIENT, place] for place in (EMBEDDING, DEEP))
    update_n, humps_n = (series[probe, EMBEDDING] for probe in (UPDATE, HUMPS))
    ratio_n = gradient_n / deep_n
    usual = _median(ratio_n, START, len(ratio_n))
    square_n = _average(gradient_n**2, beta2)
    silent = _median(gradient_n, step - BEFORE, step - 10)
    humps = humps_n[step - 10 : step + HELD_AFTER + 1]
    returned = gradient_n[step - 10 : step + 1]
    return {
        "small_updates": _median(update_n, step - 3 * BEFORE, step - BEFORE) < SMALL
        and _median(humps_n, step - 3 * BEFORE, step - BEFORE) < TWO_HUMPS,
        "vanished_gradient": _median(ratio_n, step - BEFORE, step - 10) < VANISHED * usual,
        "moments_follow": bool(square_n[step - 10] < square_n[step - USUAL]),
        "gradient_returns": bool((returned > RETURNED * silent).any()),
        "two_humps": bool((humps > TWO_HUMPS).any()),
    }


def _median(value_n: Numbers, first: int, stop: int) -> float:
    """The median of the finite values; NaN without one."""
    finite_n = value_n[max(0, first) : max(0, stop)]
    finite_n = finite_n[np.isfinite(finite_n)]
    return float(np.median(finite_n)) if len(finite_n) else math.nan


def _average(value_n: Numbers, beta: float) -> Numbers:
    """The exponential moving average of values, from the first finite one on."""
    averages: NDArray[np.float64] = pd.Series(value_n).ewm(alpha=1 - beta, adjust=False).mean().to_numpy()
    return averages


def spike_traits(records: Records) -> pd.DataFrame:
    """What the spikes of each run have in common, indexed by the run's id; none for runs that are not measured so.

    Returns:
        Columns ``rate``, spikes in 10,000 steps; ``spikes`` and ``controls``, their numbers; ``size``, the median rise
        of the training loss, and ``held_out``, of the held-out loss, nats/token, NaN without a spike.  Of each signal
        the spikes it warns of, and of each stage those it goes before, and under the same name with ``_control`` the
        controls; ``all_stages`` are those with all five.  Signals and stages that were not measured have none.
    """
    series = measured(records)
    beta2 = records.runs.set_index("id").reindex(columns=["optimizer.beta2"])["optimizer.beta2"].fillna(0.99)
    found: dict[str, list[Spike]] = {run: [] for run in series}
    for spike in find_spikes(series):
        found[spike.run].append(spike)
    staged = {run for run, each in series.items() if set(each) >= MEASURED_BY_STAGES}
    if staged:  # a run without a spike has none before which to look, and a pruned one no values for it
        staged |= {run for run, spikes in found.items() if not spikes}
    rows = {run: _traits(series[run], spikes, float(beta2[run]), run in staged) for run, spikes in found.items()}
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def _traits(series: Series, spikes: list[Spike], beta2: float, has_stages: bool) -> dict[str, Any]:
    steps = len(series[TRAIN, ""]) - START
    controls = [spike.control for spike in spikes if spike.control >= 0]
    traits: dict[str, Any] = {
        "rate": len(spikes) * PER_STEPS / steps,
        "spikes": len(spikes),
        "controls": len(controls),
        "size": float(np.median([spike.size for spike in spikes])) if spikes else math.nan,
        "held_out": float(np.median([spike.held_out for spike in spikes])) if spikes else math.nan,
    }
    for suffix, at in (("", [spike.step for spike in spikes]), ("_control", controls)):
        for name, key in SIGNALS.items():
            if key in series:
                traits[name + suffix] = sum(not math.isnan(lead(series[key], step)) for step in at)
        if has_stages:
            held = [stages(series, step, beta2) for step in at]
            for stage in STAGES:
                traits[stage + suffix] = sum(each[stage] for each in held)
            traits[f"all_stages{suffix}"] = sum(all(each.values()) for each in held)
    return traits
