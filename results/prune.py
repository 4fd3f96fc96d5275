"""Leave out of results folders the probe values that nobody reads: ``python results/prune.py DIR ...``.

What a claim, a figure, a table, a notebook or a command reads stays.  In every folder:

- Nobody reads entropies of attention, the size of output logits, or the octave of gains.  Only alarms read the norm of
  the gradient before clipping.
- Tensors are read in the first MLP layer of each block; gradients and weights in its key projection, too.  Norms of
  queries and keys are read in the first block, and shares, such as that of saturated entries, where they are largest.
- Of a probe that is reduced to one number per run, such as the RMS of a tensor, the first step and the last tenth of
  the run are read.  Only the gradient and the update of one tensor are drawn over all steps.
- Of what may run away, such as logits, the largest value of a run is read, and of Adam's epsilon the last ones.
- The noise scale is read of the whole gradient, so its sums over groups of weights take the place of these.

Some folders keep more:

- where alarms are scored, the largest value of each step that an alarm reads;
- where spikes are drawn layer by layer, every tensor around them;
- where updates are compared with the descent, those of every tensor, from the usual ones before the burst on;
- where runs differ in Adam's epsilon, the first MLP layer of every block at all steps;
- where the initial embedding is unusual, its gradient and the norm of all gradients at all steps;
- where small loss scales are compared, updates of the tensors that stand for the first block and for the end;
- in models without blocks, and where nothing decays, the sizes of the last norm's gain and of the head.

And some keep less.  Where runs spiked by themselves, tensors are read around these spikes and around the like steps
without one, and the gradients that say what is usual throughout.  Below the highest learning rate, and where no tensor
was measured, only the number of such spikes is read, for which losses are enough.  Where a response answers spikes,
events hold them, and where sources are ranked, gradient norms do: a figure reads one loss in 25 steps.  The page of a
board of many arms has one figure, of final losses.  There only the training losses are read in which the board counts
spikes.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from lab.analysis.curves import EPSILON, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.probe_values import TRAIN, updates
from lab.analysis.runaway import read_runaways
from lab.analysis.sensitivity import judge
from lab.core import files
from lab.records import store
from lab.records.parts import written
from lab.report.build import MOST_ARMS
from labwatch.events.scores import score_runs
from studies.architecture.figures import DISTANCE, POSITIONS, begins_unusually
from studies.batch_size.tuning import noise_sums
from studies.claims.costs import HELD_OUT, NONE, first_onsets
from studies.precision.effects import FIRST, LAST, has_loss_scales
from studies.spikes import own_spikes
from studies.spikes.figures import AFTER, AROUND, BEFORE, LARGE_SHARE, largest_spikes
from studies.spikes.planted import ALL_WEIGHTS, DESCENT, LAG

GRADIENT, UPDATE, WEIGHTS, CLIPPED = "grad_rms", "update_rms", "param_rms", "grad_norm_clipped"
NOISE = "noise_scale"
MLP, KEYS, DRAWN = ".mlp_up", ".attention.key", "block0.mlp_up"
UNREAD = ["attention_entropy", "output_logit_rms", "gain_octave"]
OF_ALARMS = ["grad_norm", "eps_ratio", UPDATE, "attention_logit_max", "update_curvature"]
AT_THE_ENDS = [GRADIENT, UPDATE, WEIGHTS, CLIPPED, "block_rms", "log_z"]
SHARES, CLAIMED = ["gradient_underflow", "saturation", "gain_code"], "block1.mlp_down.left"
# How the names end of the places where these probes are read.
PLACES: dict[str, tuple[str, ...]] = {
    **{GRADIENT: (MLP, KEYS), WEIGHTS: (MLP, KEYS), UPDATE: (MLP,), "zero_gradients": (FIRST,)},
    **dict.fromkeys(["query_norm", "key_norm", "query_key_cosine"], ("block0",)),
    **dict.fromkeys(["grad_norm", "eps_ratio", LARGE_SHARE], ()),
    DISTANCE: ("embedding", POSITIONS),
}

LEVEL = 19  # of zstd: an eighth smaller than by default, and ten times slower to write

# Steps around a spike of a run's own, or a like step without one, in which tensors are read.
OWN_BEFORE, OWN_AFTER = own_spikes.BEFORE + own_spikes.USUAL, AROUND
OWN = [own_spikes.HUMPS, GRADIENT, UPDATE]
USUAL = [(GRADIENT, own_spikes.EMBEDDING), (GRADIENT, own_spikes.DEEP)]
LOSSES, NOW_AND_THEN = [TRAIN, HELD_OUT], 25  # steps


def read_everywhere(records: store.Records) -> pd.Series:
    """Which values are read in any folder."""
    metrics = records.metrics
    probe, where = metrics["probe"], metrics["where"]
    is_read = ~probe.isin(UNREAD) & (~probe.isin([DESCENT, LAG]) | (where == ALL_WEIGHTS))
    for name, ends in PLACES.items():
        is_read &= (probe != name) | where.str.endswith(ends)
    is_drawn = probe.isin([GRADIENT, UPDATE]) & (where == DRAWN)
    is_read &= ~probe.isin(AT_THE_ENDS) | is_drawn | at_the_ends(records)
    is_read &= ~probe.isin(SHARES) | largest(metrics) | (where == CLAIMED)
    is_largest, last = largest(metrics.assign(step=0)), metrics.groupby(["id", "probe"], observed=True)["step"]
    for runaway in read_runaways().values():
        is_taken = is_largest if runaway.takes == "largest" else metrics["step"] == last.transform("max")
        is_read |= (probe == runaway.probe) & is_taken
    return is_read | ((probe == CLIPPED) & is_largest)


def at_the_ends(records: store.Records) -> pd.Series:
    """Which values are of the first step of a run, or of its last tenth."""
    metrics = records.metrics
    last = metrics["id"].map(updates(records.runs)).astype(int) - 1
    return (metrics["step"] >= 0.9 * last) | (metrics["step"] == metrics.groupby("id")["step"].transform("min"))


def largest(metrics: pd.DataFrame) -> pd.Series:
    """Which values are the largest of their run, step and probe; and one NaN, if there is any."""
    found = pd.Series(False, metrics.index)
    for position in ("first", "last"):
        ordered = metrics.sort_values("value", kind="stable", na_position=position)  # type: ignore[call-overload]
        found |= ~ordered.duplicated(["id", "step", "probe"], keep="last").sort_index()
    return found


def read_besides(records: store.Records) -> Iterator[pd.Series]:
    """Which values are read in this folder besides those that are read in any."""
    metrics, runs = records.metrics, records.runs
    probe, where, step = metrics["probe"], metrics["where"], metrics["step"]
    if len(score_runs(records)) or own_spikes.measured(records):
        yield probe.isin(OF_ALARMS) & largest(metrics)
    if (probe == own_spikes.ROWS).any():
        yield probe == own_spikes.GRADIENT_NORM
    with contextlib.suppress(NothingToDrawError):
        for spike in largest_spikes(records, judge(points(runs))).to_dict("records"):
            is_around = (metrics["id"] == spike["id"]) & step.between(spike["step"] - AROUND, spike["step"] + AROUND)
            yield is_around & probe.isin([GRADIENT, UPDATE])
    if probe.isin([DESCENT, LAG]).any():
        onset = metrics["id"].map(first_onsets(records))
        is_high = runs["optimizer.lr"] == runs["optimizer.lr"].max()
        is_shown = (step - onset).between(-BEFORE, AFTER) & metrics["id"].isin(runs.loc[is_high, "id"])
        yield ((probe == UPDATE) & (step >= onset / 2)) | ((probe == LARGE_SHARE) & is_shown)
    if EPSILON in runs and runs[EPSILON].nunique() > 2:
        yield probe.isin([GRADIENT, UPDATE]) & where.str.endswith(MLP)
    if begins_unusually(records):
        yield (probe == CLIPPED) | ((probe == GRADIENT) & (where == "embedding"))
    if has_loss_scales(runs):
        yield (probe == UPDATE) & where.isin([FIRST, LAST])
    if (runs["model.depth"] == 0).all() or (runs["optimizer.weight_decay"] == 0).all():
        yield (probe == WEIGHTS) & where.isin(["final_norm", "head"]) & at_the_ends(records)


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
    is_read = places.isin(USUAL) | (near & places.isin(signals)) | (largest(metrics) & (metrics["probe"] == UPDATE))
    return of_tensors, is_read


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


def pruned(records: store.Records) -> pd.DataFrame:
    """The values of metrics that are read, with the noise scale as sums over groups of weights."""
    metrics = records.metrics
    if points(records.runs)["arm"].nunique() > MOST_ARMS:
        return metrics  # of a board, which reads them all
    is_read = read_everywhere(records)
    for besides in read_besides(records):
        is_read |= besides
    of_tensors, around = read_around_spikes(records)
    is_read = is_read.where(~of_tensors, around) & ~unread_beside_counts(records)
    sums = noise_sums(records).rename_axis("where", axis=1).stack(future_stack=True).rename("value").reset_index()
    is_read &= metrics["probe"] != NOISE
    return pd.concat([metrics[is_read], sums.assign(probe=NOISE)], ignore_index=True).astype(store.METRIC_COLUMNS)


def prune(folder: Path) -> None:
    """Gather the runs of a folder, and write its metrics without the values that nobody reads."""
    records = store.gather(folder)
    read = pruned(records)
    # neighbours that are alike compress better; names keep the order in which a run first recorded them
    order = read.assign(**{name: pd.factorize(read[name])[0] for name in ("probe", "where", "id")})
    read = read.loc[order.sort_values(["probe", "where", "id", "step"], kind="stable").index]
    for part in written(folder):
        runs = files.read_table(part.runs)
        store.write_metrics(part.metrics, read[read["id"].isin(runs["id"])].reset_index(drop=True), level=LEVEL)
        store.write_runs(part, runs)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        prune(Path(name))
