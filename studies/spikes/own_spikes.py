"""Measures of spikes that nobody plants: where they are, their alarms, branches, remedies and sources."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.probe_values import TRAIN
from lab.analysis.spikes.trend import PER_STEPS, loss_spikes
from lab.core.spike_trigger import LEAST_RISE, triggered
from lab.core.windows import MERGE, NORMAL, Numbers
from lab.records.store import Records
from labwatch.events.detectors import KINDS, Log, detect, gradient_spikes
from labwatch.events.logs import logs_of
from labwatch.events.scores import COLUMNS
from studies.claims.costs import HELD_OUT, NONE
from studies.spikes.effects import is_met_by

# Before this step a model is still learning, and a spike is not counted.
START = 500
RATE_STEPS = 10_000  # rates are in so many steps
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
# Of Adam's theory: the update is small where its RMS is below independent gradients' RMS, about 0.23 to 0.35; the
# embedding's gradient has vanished where it is below half of what it usually is beside that of a later layer, and
# returns where it grows tenfold; an update has two humps where its coefficient exceeds a uniform distribution's.
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
    runs = records.runs.reindex(columns=["id", "bad_batches", "response", "restarts", "steps", "probes.every"])
    plain = (runs[["bad_batches", "response"]].fillna(NONE) == NONE).all(axis=1) & (runs["probes.every"] == 1)
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
    return {run: places for run, places in series.items() if {(TRAIN, ""), (HELD_OUT, "")} <= set(places)}


def find_spikes(series: Mapping[str, Series]) -> list[Spike]:
    """The spikes of these runs from step 500 on that the held-out loss shows as well, in the order of their steps.

    A spike of the training loss whose held-out loss rises by less than 0.02 nats is one of its batch.
    """
    return [spike for run in series for spike in _spikes(run, series[run]) if spike.held_out > LEAST_RISE / 5]


def _spikes(run: str, series: Series) -> Iterator[Spike]:
    loss_n, held_n = series[TRAIN, ""], series[HELD_OUT, ""]
    spans = loss_spikes(np.arange(len(loss_n)), loss_n)
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
    square_n = pd.Series(gradient_n**2).ewm(alpha=1 - beta2, adjust=False).mean().to_numpy()
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
    found = {run: find_spikes({run: places}) for run, places in series.items()}
    staged = {run for run, places in series.items() if set(places) >= MEASURED_BY_STAGES}
    if staged:  # a run without a spike has none before which to look, and a pruned one no values for it
        staged |= {run for run, spikes in found.items() if not spikes}
    rows = {run: _spike_traits(series[run], spikes, float(beta2[run]), run in staged) for run, spikes in found.items()}
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def _spike_traits(series: Series, spikes: list[Spike], beta2: float, has_stages: bool) -> dict[str, Any]:
    steps = len(series[TRAIN, ""]) - START
    controls = [spike.control for spike in spikes if spike.control >= 0]
    traits: dict[str, Any] = {
        "rate": len(spikes) * RATE_STEPS / steps,
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
                traits[stage + suffix] = sum(at_step[stage] for at_step in held)
            traits[f"all_stages{suffix}"] = sum(all(at_step.values()) for at_step in held)
    return traits


BRANCH, CHANGE, SAME = "branch", "response.change", "same"
# What a change is called.
CHANGE_NAMES = {
    "same": "nothing",
    "batches": "other batches",
    "first_moment": "fresh first moment",
    "second_moment": "fresh second moment",
    "moments": "fresh moments",
    "lr": "lower learning rate",
    "eps": "larger epsilon",
}
# A spike that begins within so many updates of the branch was made by the change.
AT_ONCE = 5


def branch_outcomes(records: Records) -> pd.DataFrame:
    """What became of the spike from before which each run branched, indexed by the run's id; none without a spike.

    A spike is removed if none begins from the branch up to 20 updates after the step at which it began.

    Returns:
        Columns ``step``, at which the spike began; ``back``, updates from the branch to there; ``removed`` and
        ``at_once``, 1 or 0, the latter for a spike within 5 updates of the branch, which the change made; and ``wait``,
        updates from the branch to the next spike, infinite without one.
    """
    cards = records.runs.reindex(columns=["id", "response"])
    branched = set(cards.loc[cards["response"] == BRANCH, "id"])
    events = records.events[records.events["id"].isin(branched)]
    events = events.assign(order=np.arange(len(events)))  # in which they happened
    rewind = events[events["kind"] == "rewind"].drop_duplicates("id").set_index("id")
    back = rewind["value"] - 1  # the run had made the update of the step at which the spike began
    is_later = events["order"] > events["id"].map(rewind["order"]).astype(float)
    spikes = events[(events["kind"] == "spike") & is_later].drop_duplicates("id").set_index("id")["step"]
    wait = (spikes - rewind["step"]).reindex(rewind.index).fillna(math.inf)
    outcomes = {"step": rewind["step"] + back, "back": back, "removed": wait > back + MERGE}
    return pd.DataFrame(outcomes | {"at_once": wait <= AT_ONCE, "wait": wait}).astype(float).rename_axis(None)


def branch_counts(records: Records) -> pd.DataFrame:
    """Of each run that would branch, indexed by its id: ``spikes``, 1 or 0 without one, and ``removed``, 1 or 0."""
    cards = records.runs.reindex(columns=["id", "response"])
    branching = cards.loc[cards["response"] == BRANCH, "id"].astype(str)
    removed = branch_outcomes(records)["removed"].reindex(branching)
    return pd.DataFrame({"spikes": removed.notna().astype(float), "removed": removed.fillna(0.0)})


def removable(records: Records, updates: int = MERGE) -> float:
    """Share of windows that hold no spike by chance, as long as those from the branch to so many updates after a spike.

    From the spikes of twins later on: the largest share that a change can remove which makes spikes no rarer.
    """
    table = changes(records)
    twins = table[table["change"] == SAME]
    spikes = records.events[(records.events["kind"] == "spike") & records.events["id"].isin(twins.index)]
    after = spikes["step"] > spikes["id"].map(twins["step"]) + MERGE
    steps = records.runs.set_index("id")["steps"].reindex(twins.index) - twins["step"] - MERGE
    if not steps.sum() > 0:
        return math.nan
    return math.exp(-float(after.sum()) / float(steps.sum()) * float(twins["back"].mean() + updates))


def changes(records: Records) -> pd.DataFrame:
    """``branch_outcomes`` with the columns ``id`` and ``change`` of each run."""
    outcomes = branch_outcomes(records)
    change = records.runs.set_index("id").reindex(columns=[CHANGE])[CHANGE].reindex(outcomes.index)
    return outcomes.assign(id=outcomes.index, change=change.astype(str))


OWN = "own"  # in the place of a burst's name
SPIKE = "spike"


def score_own(records: Records) -> pd.DataFrame:
    """Score each alarm on spikes of the runs' own at the highest learning rate, as ``score_runs`` does on bursts.

    The label is the spike itself: one that the loss on fixed held-out rows shows as well. An alarm is a hit if it
    begins from 40 steps before the spike to 20 after, and false from step 500 on if it begins at no such step, and at
    none that belongs to another spike of the training loss.

    Returns:
        The columns of ``score_runs``: a row per spike and kind of alarm, and for each run and kind a row of burst
        ``none`` with its false alarms. The loss itself is no alarm here.
    """
    lr = records.runs.get("optimizer.lr", pd.Series(0.0, records.runs.index))
    series = measured(records._replace(runs=records.runs[lr == lr.max()]))
    spikes = {run: find_spikes({run: places}) for run, places in series.items()}
    logs = logs_of(records._replace(metrics=records.metrics[records.metrics["id"].isin(list(series))]))
    rows = [row for log in logs for row in _score(log, spikes[log.name], series[log.name][TRAIN, ""])]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _score(log: Log, spikes: list[Spike], loss_n: Any) -> Iterator[tuple[Any, ...]]:
    is_clean_n = np.arange(len(loss_n)) >= START
    for span in loss_spikes(np.arange(len(loss_n)), loss_n):
        is_clean_n[max(0, span.first - BEFORE) : span.last + MERGE] = False
    events = detect(log, spikes=())  # those of the loss are the labels
    for kind in (kind for kind, (column, _) in KINDS.items() if column in log.columns and kind != SPIKE):
        begins = [event.step for event in events if event.kind == kind]
        for spike in spikes:
            near = [step for step in begins if spike.step - BEFORE <= step < spike.step + MERGE]
            lead = spike.step - near[0] if near else math.nan
            yield log.name, kind, OWN, bool(near), -lead, lead, 0, 0
        false_alarms = sum(bool(is_clean_n[step]) for step in begins if step < len(is_clean_n))
        yield log.name, kind, NONE, False, math.nan, math.nan, false_alarms, int(is_clean_n.sum())


def alarm_traits(records: Records) -> pd.DataFrame:
    """``score_own`` as one row for each run, indexed by the run's id.

    Returns:
        Column ``spikes``, their number. Of each kind of alarm ``KIND.hits``, the spikes that it found; ``KIND.lead``,
        the sum of its leads, steps, in which a spike that was not found counts as 0; ``KIND.false``, its false alarms,
        and ``KIND.clean``, steps in which they could occur; and ``curvature.first``, the spikes in which the alarm of
        the curvature is no later than the alarm of the updates.
    """
    rows = {str(run): _alarm_traits(of_run) for run, of_run in score_own(records).groupby("id")}
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def _alarm_traits(scores: pd.DataFrame) -> Mapping[str, float]:
    traits: dict[str, float] = {}
    for kind, rows in scores.groupby("kind"):
        spikes, clean = rows[rows["bad_batches"] == OWN], rows[rows["bad_batches"] == NONE].iloc[0]
        traits["spikes"] = len(spikes)
        traits[f"{kind}.hits"] = float(spikes["hit"].sum())
        traits[f"{kind}.lead"] = float(spikes["lead"].astype(float).fillna(0.0).sum())
        traits[f"{kind}.false"] = float(clean["false_alarms"])
        traits[f"{kind}.clean"] = float(clean["clean_steps"])
    delays = {str(kind): rows.loc[rows["bad_batches"] == OWN, "delay"] for kind, rows in scores.groupby("kind")}
    if {"curvature", "update_rms"} <= set(delays):
        curvature, updates = (delays[kind].astype(float).to_numpy() for kind in ("curvature", "update_rms"))
        first = curvature <= np.where(np.isnan(updates), math.inf, updates)
        traits["curvature.first"] = float(first.sum())
    return traits


SHRINK = "intervention.embedding_gradient_shrink"
# What a remedy is called, by its name among ``RESPONSES``.
REMEDY_NAMES = {
    "none": "no remedy",
    "same_batches": "go back only",
    "skip": "go back and skip",
    "skip_and_lower": "go back, skip, lower LR",
    "lower": "lower LR",
    "restart": "go back, lower LR",
    "restart_newest": "newest state, lower LR",
}
NO_REMEDY, SHRUNK_NAME = REMEDY_NAMES["none"], "shrunk embedding gradient"
NUMBERS = ("steps", "spikes", "rewound_steps", "final_val_loss")
REMEDY_COLUMNS = ("more", "rate", "overall", "answered", "returned", "lost", "final")


def training_losses(records: Records) -> dict[str, Numbers]:
    """Training losses ``[n]`` in the order of steps, by run id, of the runs that recorded them at every step."""
    runs = records.runs.reindex(columns=["id", "probes.every", "steps"])
    lengths = runs[runs["probes.every"] == 1].set_index("id")["steps"]
    metrics = records.metrics[(records.metrics["probe"] == TRAIN) & records.metrics["id"].isin(lengths.index)]
    ordered = metrics.sort_values("step", kind="stable")
    values = {str(run): rows.to_numpy(dtype=float) for run, rows in ordered.groupby("id", observed=True)["value"]}
    return {run: loss_n for run, loss_n in values.items() if len(loss_n) == lengths[run]}


def remedy_traits(records: Records) -> pd.DataFrame:
    """The loss spikes of each run without planted bad data, indexed by its id.

    Spikes are those that training met: one that comes back after a run went back counts again, and so do the updates
    that were trained again.  Runs that answer none have no events, so theirs are where the
    same trigger would have fired, in the training loss if it was measured at every step. (Losses that a run went back
    over are in no record, so ``loss_spikes`` could not count them.)

    Returns:
        Columns ``more``, spikes after the first, and ``rate``, these in 1,000 of the updates trained after it, both 0
        without a spike; ``overall``, spikes in 1,000 updates trained; ``answered``, how often it went back, and
        ``returned``, after how many of these a spike began up to 20 updates after the step from which it went back;
        ``lost``, updates gone back, and batches that the run which was kept passed over; ``final``, the final held-out
        loss, nats/token.
    """
    cards = records.runs.reindex(columns=["id", "bad_batches", "restarts", "status", *NUMBERS])
    cards = cards.astype(dict.fromkeys(NUMBERS, float))
    own = cards[(cards[["bad_batches", "restarts"]].fillna(NONE) == NONE).all(axis=1) & (cards["status"] != "failed")]
    events, losses = dict(iter(records.events.groupby("id"))), training_losses(records)
    rows: dict[str, tuple[float, ...]] = {}
    for card in own.to_dict("records"):
        run = str(card["id"])
        if not math.isnan(card["spikes"]):
            rows[run] = _remedy_traits(card, events.get(run, records.events.head(0)))
        elif run in losses:
            spikes = list(triggered(losses[run]))
            rows[run] = _remedy_traits(
                card, pd.DataFrame({"step": spikes, "batch": spikes, "kind": "spike", "value": 0.0})
            )
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(REMEDY_COLUMNS), dtype=float)


def remedy_names(cards: Iterable[Mapping[Hashable, Any]]) -> dict[str, str]:
    """The remedy of each of these runs by its id; none for other responses."""
    return {str(card["id"]): name for card in cards if (name := _name(card))}


def _name(card: Mapping[Hashable, Any]) -> str:
    settings = {str(key): value for key, value in card.items()}
    if SHRINK.partition(".")[2] in str(settings["intervention"]).split("+"):
        return SHRUNK_NAME if settings.get("response") == NONE else ""
    burst = settings.get("bad_batches")
    return next((name for key, name in REMEDY_NAMES.items() if is_met_by(settings, burst, key)), "")


def _remedy_traits(card: Mapping[Hashable, Any], events: pd.DataFrame) -> tuple[float, ...]:
    """The traits of a run from its card and its events, in the order in which they happened."""
    trained = float(np.nansum([card["steps"], card["rewound_steps"]]))
    step_n, is_spike_n = events["step"].to_numpy(dtype=float), (events["kind"] == "spike").to_numpy()
    spike_steps = step_n[is_spike_n]
    more = max(0, len(spike_steps) - 1)
    rate = PER_STEPS * more / (trained - spike_steps[0]) if len(spike_steps) else 0.0
    next_spike_n = pd.Series(np.where(is_spike_n, step_n, math.nan)).bfill().to_numpy()
    comes_back_n = next_spike_n - step_n <= events["value"].to_numpy(dtype=float) - 1 + MERGE
    returned_n = comes_back_n[(events["kind"] == "rewind").to_numpy()]
    passed_over = float(events["batch"].iloc[-1] - events["step"].iloc[-1]) if len(events) else 0.0
    lost = float(np.nansum([card["rewound_steps"], passed_over]))
    overall = PER_STEPS * len(spike_steps) / trained
    return more, rate, overall, len(returned_n), int(returned_n.sum()), lost, float(card["final_val_loss"])


WITHOUT, ALL = "data.without", "none"
WHOLE = "whole mixture"  # what runs are called from which nothing was left out
GRADIENT_NORM, ROWS = "grad_norm", "source_rows"
COUNTS = ("spikes", "batches", "norm")  # columns of each source


def source_traits(records: Records) -> pd.DataFrame:
    """Spikes of the gradient norm of each run that recorded the sources of its batches, indexed by the run's id.

    A spike is what raises the alarm: a norm above five times the running mean; those within 20 steps are one. All
    counts are from step 500 on.

    Returns:
        Columns ``rate``, spikes in 1000 steps, and for each source ``NAME.spikes``, those that begin in a batch with a
        row of it, ``NAME.batches``, the batches with one, and ``NAME.norm``, the sum over these of the log of the norm.
    """
    rows = {}
    of_mixtures = records.metrics.loc[records.metrics["probe"] == ROWS, "id"].unique()
    metrics = records.metrics[records.metrics["id"].isin(of_mixtures)]
    metrics = metrics[metrics["probe"].isin([GRADIENT_NORM, ROWS])]
    for run, of_run in metrics.groupby("id", observed=True):
        is_norm = of_run["probe"] == GRADIENT_NORM
        norms = of_run[is_norm].set_index("step")["value"].sort_index()
        held = of_run[~is_norm].pivot(index="step", columns="where", values="value").reindex(norms.index) > 0
        if len(held.columns) and len(norms):
            rows[str(run)] = _source_traits(norms, held)
    return pd.DataFrame.from_dict(rows, orient="index", dtype=float)


def _source_traits(norms: pd.Series, held: pd.DataFrame) -> dict[str, float]:
    norm_n: Numbers = norms.to_numpy(dtype=float)
    step_n = norms.index.to_numpy()
    begins_n = np.array([span.first for span in gradient_spikes(norm_n)], dtype=int)
    begins_n = begins_n[step_n[begins_n] >= START]
    counted_n = (step_n >= START) & np.isfinite(norm_n) & (norm_n > 0)
    traits = {"rate": PER_STEPS * len(begins_n) / max(1, int((step_n >= START).sum()))}
    for name in held:
        is_held_n = held[name].to_numpy()
        traits[f"{name}.spikes"] = float(is_held_n[begins_n].sum())
        traits[f"{name}.batches"] = float((is_held_n & (step_n >= START)).sum())
        traits[f"{name}.norm"] = float(np.log(norm_n[is_held_n & counted_n]).sum())
    return traits


def ranked(counts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names of sources, the one that causes most spikes first: by spikes per batch that holds the source.

    Of sources with equally many, the one whose batches have the larger gradient norm comes first, in the mean of its
    log.

    Args:
        counts: of each source ``spikes``, ``batches`` and ``norm``, sums over runs of the counts in ``source_traits``.
    """

    def score(name: str) -> tuple[float, float]:
        of_source = counts[name]
        batches = max(1.0, of_source["batches"])
        return of_source["spikes"] / batches, of_source["norm"] / batches

    return sorted(counts, key=score, reverse=True)
