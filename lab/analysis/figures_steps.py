"""Figures over the steps of a run: what probes heard, by arm and size, a line per learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.analysis import drawing, panels
from lab.analysis.arms import count
from lab.analysis.gallery import NothingToDrawError, fate_keys, figure
from lab.analysis.ladder import ladder
from lab.analysis.measured import places
from lab.store import Records

MOST_STEPS, MOST_POINTS, MOST_PANELS = 150, 3000, 8
EPSILON = "optimizer.eps"


class Heard(NamedTuple):
    """A probe as a row of panels: where it listens (None: its largest value over all places), its name for readers."""

    probe: str
    where: str | None
    label: str
    scale: str = "log"


@figure("loss_over_steps")
def loss_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Training loss against step, one line per learning rate, with the largest attention logit below it.

    Lines are means over seeds (of logits geometric ones) at some of the recorded steps, bands reach from the lowest to
    the highest seed; darker is a lower learning rate. Good learning rates end lowest; unstable ones rise, or stay near
    the loss of the bigram model. A loss above that at initialization, or one that is no number, is drawn at
    initialization; a logit line ends where the logit is no positive number. A cross or triangle at the end of a line
    says that some seed was unstable or diverged.
    """
    loss = Heard("train_loss", None, "training loss\n(nats/token)", "loss")
    return _over_steps(records, runs, [loss, Heard("attention_logit_max", None, "max attention\nlogit")])


@figure("output_logits_over_steps")
def output_logits_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Output logits against step: their mean, and the mean square of the log of the softmax normalizer.

    One line per learning rate, a mean over seeds, the band from the lowest to the highest seed. Where the output logits
    drift away from zero, late in training, z-loss holds them. A cross or triangle at the end of a line says that some
    seed was unstable or diverged.
    """
    mean = Heard("output_logit_mean", "", "mean output logit", "symlog")
    return _over_steps(records, runs, [mean, Heard("log_z_square", "", "mean of log² Z")])


@figure("updates_over_steps")
def updates_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient and update of the first MLP layer against step.

    Root mean squares over the layer's elements, geometric means over seeds, bands from the lowest to the highest seed,
    one line per learning rate. The update is Adam's, before learning rate and decay: near one, unless the gradient
    comes down to Adam's epsilon, the dashed line. A cross or triangle at the end of a line says that some seed was
    unstable or diverged.
    """
    gradient = Heard("grad_rms", "block0.mlp_up", "gradient RMS")
    return _over_steps(records, runs, [gradient, Heard("update_rms", "block0.mlp_up", "update RMS")])


@figure("queries_and_keys_over_steps")
def queries_and_keys_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Norms of queries and keys, and the cosine between them, against step, in the first block.

    Attention logits grow with the norms, with the cosine, or both: the panels tell which. Norms are geometric means
    over heads' vectors and seeds, the cosine the mean of its absolute value; bands reach from the lowest to the highest
    seed. A cross or triangle at the end of a line says that some seed was unstable or diverged.
    """
    norms = [Heard(f"{part}_norm", "block0", f"{part} norm") for part in ("query", "key")]
    return _over_steps(records, runs, [*norms, Heard("query_key_cosine", "block0", "|cosine|", "linear")])


@figure("updates_by_epsilon")
def updates_by_epsilon(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient and update of MLP layers against step, one line per Adam's epsilon, at the highest learning rates.

    Root mean squares over a layer's elements, in the first and the last block of the largest model; geometric means
    over seeds, bands from the lowest to the highest seed. Dashed lines are the epsilons: where a gradient comes down to
    its epsilon, the update, before learning rate and decay, shrinks. A cross or triangle at the end of a line says that
    some seed was unstable or diverged.
    """
    found = ladder(records.runs, runs)
    if found is None or found.key != EPSILON:
        raise NothingToDrawError(f"nothing to draw: fewer than three values of {EPSILON}, or other settings differ too")
    some = found.runs[found.runs["size"] == found.runs["size"].max()]
    some = some[some["lr"].isin(sorted(some["lr"].unique())[-drawing.MOST_COLUMNS :])]
    labels = some["lr"].map("LR {:g}".format)
    labels = labels if some["rest"].nunique() == 1 else some["rest"] + ", " + labels
    blocks = [place for place in places(records, "grad_rms") if place.endswith(".mlp_up")]
    ends = dict.fromkeys([blocks[0], blocks[-1]]) if blocks else {}
    names = {"grad_rms": "gradient RMS", "update_rms": "update RMS"}
    rows = [Heard(probe, end, f"{name}\n{end.partition('.')[0]}") for end in ends for probe, name in names.items()]
    return _over_steps(records, some.assign(arm=labels, lr=some["setting"]), rows, EPSILON)


def _over_steps(
    records: Records, runs: pd.DataFrame, rows: Sequence[Heard], line: str = "peak learning rate"
) -> Figure:
    """A block of rows per size and up to four arms; rows of which nothing was heard are left out."""
    if runs.groupby(["arm", "size"]).ngroups > MOST_PANELS:
        runs = runs[runs["size"] == runs.groupby("arm")["size"].transform("max")]
    alone = runs["arm"].nunique() == 1
    if alone:  # its sizes stand side by side
        runs = runs.assign(arm=runs["size"].map(lambda size: f"{count(size)} parameters"), size=0)
    lines = {row: some for row in rows if len(some := _lines(records, runs, row))}
    if not lines or rows[0] not in lines:
        raise NothingToDrawError("nothing to draw: no run recorded what this figure shows")
    shades = drawing.shades(runs["lr"], drawing.LR_SHADES)
    arms = list(dict.fromkeys(runs["arm"]))
    columns = drawing.columns_for(len(arms))
    blocks = [arms[at : at + columns] for at in range(0, len(arms), columns)]
    tall = [(block, size) for block in blocks for size in sorted(runs.loc[runs["arm"].isin(block), "size"].unique())]
    gaps = [
        0.85 if tall[at + 1 : at + 2] and tall[at + 1][0] is not block else 0.2 for at, (block, _) in enumerate(tall)
    ]
    heights = [(1.25, gap if row == len(lines) - 1 else 0.1) for gap in gaps for row in range(len(lines))]
    heights[-1] = (1.25, 0.5)
    sheet = drawing.Sheet(columns, heights, headroom=0.55)
    shared: dict[Heard, Axes] = {}
    for at, (block, size) in enumerate(tall):
        titled, last = at == 0 or tall[at - 1][0] is not block, at == len(tall) - 1 or tall[at + 1][0] is not block
        sheet.beside(at * len(lines), (at + 1) * len(lines) - 1, "" if alone else f"{count(size)} parameters")
        for place, (row, table) in enumerate(lines.items()):
            known = table[(table["size"] == size) & table["arm"].isin(block)]
            left = next((arm for arm in block if arm in set(known["arm"])), None)
            for column, arm in enumerate(block):
                some = known[known["arm"] == arm]
                if some.empty:
                    continue
                axes = sheet.panel(
                    at * len(lines) + place, column, sharey=shared.get(row), sharex=next(iter(shared.values()), None)
                )
                shared.setdefault(row, axes)
                for lr, one in some.groupby("lr"):
                    panels.over_steps(axes, one, shades[lr])
                _dress(axes, row, runs, known)
                if titled and place == 0:
                    panels.title(axes, arm)
                axes.tick_params(labelleft=arm == left, labelbottom=last and place == len(lines) - 1)
                axes.set_ylabel(row.label if arm == left else "")
                axes.set_xlabel("step" if last and place == len(lines) - 1 else "")
    references = drawing.reference_keys(shared[rows[0]])
    sheet.keys((line, drawing.line_keys(shades, "{:g}".format)), ("", [*fate_keys(runs), *references]))
    return sheet.figure


def _lines(records: Records, runs: pd.DataFrame, row: Heard) -> pd.DataFrame:
    """Columns ``arm``, ``size``, ``lr``, ``step``, ``mean``, ``min``, ``max`` over seeds, and the worst ``fate``."""
    metrics = records.metrics[records.metrics["probe"] == row.probe]
    if row.where is not None:
        metrics = metrics[metrics["where"] == row.where]
    heard = metrics.groupby(["id", "step"])["value"].max().reset_index().merge(runs, on="id")
    if row.scale == "loss":
        init = heard["loss_at_init"]
        heard["value"] = np.where(np.isfinite(heard["value"]), np.fmin(heard["value"], init), init)
    keys = ["arm", "size", "lr"]
    most = int(np.clip(MOST_POINTS // max(runs.groupby(keys).ngroups, 1), 25, MOST_STEPS))
    some = [
        table[table["step"].isin(_spread(table["step"], most))]
        for _, table in heard.groupby(["arm", "size"], sort=False)
    ]
    kept = pd.concat([heard.head(0), *some])
    kept["value"] = kept["value"].where(np.isfinite(kept["value"]) & ((kept["value"] > 0) | (row.scale != "log")))
    kept["mean"] = np.log(kept["value"]) if row.scale == "log" else kept["value"]
    by = kept.groupby([*keys, "step"], sort=False)
    lines = by.agg(mean=("mean", "mean"), min=("value", "min"), max=("value", "max")).reset_index()
    lines["mean"] = np.exp(lines["mean"]) if row.scale == "log" else lines["mean"]
    return lines.merge(runs.groupby(keys)["fate"].agg(panels.worst).reset_index(), on=keys)


def _spread(steps: pd.Series, most: int) -> Any:
    known = np.unique(steps)
    return known[np.unique(np.linspace(0, len(known) - 1, min(len(known), most)).round().astype(int))]


def _dress(axes: Axes, row: Heard, runs: pd.DataFrame, known: pd.DataFrame) -> None:
    """The scale of a row, and what its lines are to be compared with."""
    if row.scale == "loss":
        panels.references(axes, runs)
        panels.loss_axis(axes, runs, known["mean"], row.label)
    else:
        axes.set_yscale(row.scale)
