"""Leave out of results folders the probe values that no claim and no figure reads: ``python results/prune.py DIR ...``.

A probe of every tensor has most of the values.  Read are those of the first MLP layer and of the key projection of
each block, the embedding's gradient, and in models without blocks the sizes of the last norm's gain and of the head;
``eps_ratio`` follows from ``grad_rms`` and the config.  Alarms are scored on the largest value of a step, so a folder
of labelled spikes keeps that as well.  Nobody reads entropies of attention or the size of output logits.  Of cosines
those of all weights are read, and where there are any, the updates of every tensor.  Of distances from the initial
values those of the embedding's tables are read.  Where runs spiked by themselves, tensors are read around these spikes
and around the like steps without one, and the gradients that say what is usual throughout.  Below the highest learning
rate, and where no tensor was measured, only the number of such spikes is read, for which losses are enough.  Where a
response answers spikes, events hold them, and where sources are ranked, gradient norms do: a figure reads one loss in
25 steps.  The page of a board of many arms has one figure, of final losses.  There only the training losses are read in
which the board counts spikes.
"""

import sys
from pathlib import Path

import pandas as pd

from lab.analysis.curves import points
from lab.analysis.events.costs import HELD_OUT, NONE
from lab.analysis.events.scores import score_runs
from lab.analysis.probe_values import DISTANCE, TRAIN
from lab.core import files
from lab.records import store
from lab.records.parts import written
from lab.report.build import MOST_ARMS
from lab.studies.leaderboard.curves import curves_of
from lab.studies.spikes import own_spikes
from lab.studies.spikes.figures import AROUND

OF_EVERY_TENSOR, READ = ["grad_rms", "update_rms", "param_rms", "eps_ratio"], (".mlp_up", ".attention.key")
UNREAD = ["attention_entropy", "output_logit_rms"]
COSINES, OF_UPDATES = ["update_descent_cosine", "grad_lag_cosine"], ["update_rms", "update_large"]

LEVEL = 19  # of zstd: an eighth smaller than by default, and ten times slower to write

# Steps around a spike of a run's own, or a like step without one, in which tensors are read.
OWN_BEFORE, OWN_AFTER = own_spikes.BEFORE + own_spikes.USUAL, AROUND
OWN = [own_spikes.HUMPS, own_spikes.GRADIENT, own_spikes.UPDATE]
USUAL = [(own_spikes.GRADIENT, own_spikes.EMBEDDING), (own_spikes.GRADIENT, own_spikes.DEEP)]
LOSSES, NOW_AND_THEN = [TRAIN, HELD_OUT], 25  # steps


def read_around_spikes(records: store.Records) -> tuple[pd.Series, pd.Series]:
    """Which values are of tensors in runs that are measured for spikes of their own, and which of these are read."""
    metrics, series = records.metrics, own_spikes.measured(records)
    of_tensors = metrics["id"].isin(list(series)) & metrics["probe"].isin(OWN)
    places = pd.MultiIndex.from_frame(metrics[["probe", "where"]].astype(str))
    signals = [*own_spikes.SIGNALS.values(), (own_spikes.HUMPS, own_spikes.EMBEDDING)]
    near = pd.Series(False, metrics.index)
    for spike in own_spikes.find_spikes(series):
        for step in (spike.step, spike.control):
            near |= (metrics["id"] == spike.run) & metrics["step"].between(step - OWN_BEFORE, step + OWN_AFTER)
    return of_tensors, places.isin(USUAL) | (near & places.isin(signals))


def unread_beside_counts(records: store.Records) -> pd.Series:
    """Which values nobody reads in runs measured at every step, of which claims read the number of spikes.

    Left out are all probes but losses, or losses but for one in 25 where events or gradient norms hold the spikes.
    """
    metrics, runs = records.metrics, records.runs
    is_high = runs["optimizer.lr"] == runs["optimizer.lr"].max()
    is_seen = bool(metrics["probe"].isin(OWN).any())
    alone = own_spikes.measured(records).keys() - (set(runs.loc[is_high, "id"]) if is_seen else set())
    answered = runs.reindex(columns=["id", "response", "probes.every"])
    answered = answered[(answered["response"].fillna(NONE) != NONE) & (answered["probes.every"] == 1)]
    is_rare = metrics["id"].isin(answered["id"]) | (
        metrics["probe"].eq(own_spikes.ROWS).any() & (metrics["probe"] == TRAIN)
    )
    is_rare &= metrics["step"] % NOW_AND_THEN != 0
    return is_rare | (metrics["id"].isin(list(alone)) & ~metrics["probe"].isin(LOSSES))


def prune(folder: Path) -> None:
    """Gather the runs of a folder, and write the newest part of its metrics without the values that nobody reads."""
    runs, *_ = store.gather(folder)
    part = written(folder)[-1]
    metrics = files.read_table(part.metrics)
    is_read = ~metrics["probe"].isin(OF_EVERY_TENSOR) | metrics["where"].str.endswith(READ)
    is_read |= (metrics["probe"] == "grad_rms") & (metrics["where"] == "embedding")
    if (runs["model.depth"] == 0).all():
        is_read |= (metrics["probe"] == "param_rms") & metrics["where"].isin(["final_norm", "head"])
    is_read &= ~metrics["probe"].isin([*UNREAD, "eps_ratio"])
    is_read &= (metrics["probe"] != DISTANCE) | metrics["where"].str.startswith("embedding")
    if metrics["probe"].isin(COSINES).any():
        is_read |= metrics["probe"].isin(OF_UPDATES)
        is_read &= ~metrics["probe"].isin(COSINES) | (metrics["where"] == "")
    records = store.Records(runs[runs["id"].isin(metrics["id"])], metrics)
    of_tensors, around = read_around_spikes(records)
    is_read = is_read.where(~of_tensors, around)
    if len(score_runs(records)) or of_tensors.any():
        ordered = metrics.sort_values("value", kind="stable", na_position="last")
        largest = ~ordered.duplicated(["id", "step", "probe"], keep="last").sort_index()
        is_read |= largest & (~of_tensors | (metrics["probe"] == own_spikes.UPDATE))
    is_read &= ~unread_beside_counts(records)
    if points(runs)["arm"].nunique() > MOST_ARMS:
        counted = [run for curve in curves_of(store.Records(runs, metrics), {}) for run in curve.spikes.runs]
        is_read = (metrics["probe"] == TRAIN) & metrics["id"].isin(counted)
    read = metrics[is_read]
    # neighbours that are alike compress better; names keep the order in which a run first recorded them
    order = read.assign(**{name: pd.factorize(read[name])[0] for name in ("probe", "where", "id")})
    order = order.sort_values(["probe", "where", "id", "step"], kind="stable").index
    store.write_metrics(part.metrics, read.loc[order].reset_index(drop=True), level=LEVEL)
    store.write_runs(part, files.read_table(part.runs))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        prune(Path(name))
