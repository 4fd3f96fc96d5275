"""Figures over the steps of a run: what probes heard, by arm and size, a line per learning rate."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from lab.analysis.gallery import NothingToDrawError, figure
from lab.analysis.grouping import ladder
from lab.analysis.probe_values import places
from lab.analysis.timelines import EPSILON, Heard, over_steps
from lab.records.store import Records


@figure("loss_over_steps")
def loss_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Training loss against step, one line per learning rate, with the largest attention logit below it.

    Lines are means over seeds (of logits geometric ones) at some of the recorded steps, bands reach from the lowest to
    the highest seed; darker is a lower learning rate. Good learning rates end lowest; unstable ones rise, or stay near
    the loss of the bigram model. A loss above that at initialization, or one that is no number, is drawn at
    initialization; a line of logits ends where some seed's is no number any more. A cross or triangle at a line's end
    says that some seed was unstable or diverged.
    """
    loss = Heard("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [loss, Heard("attention_logit_max", None, "max attention\nlogit")])


@figure("output_logits_over_steps")
def output_logits_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Output logits against step: their mean, and the mean square of the log of the softmax normalizer.

    One line per learning rate, a mean over seeds, the band from the lowest to the highest seed. Where the output logits
    drift away from zero, late in training, z-loss holds them. A cross or triangle at the end of a line says that some
    seed was unstable or diverged.
    """
    mean = Heard("output_logit_mean", "", "mean output logit", "symlog")
    return over_steps(records, runs, [mean, Heard("log_z_square", "", "mean of log² Z")])


@figure("updates_over_steps")
def updates_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient and update of the first MLP layer against step.

    Root mean squares over the layer's elements, geometric means over seeds, bands from the lowest to the highest seed,
    one line per learning rate. The update is Adam's, before learning rate and decay: near one, unless the gradient
    comes down to Adam's epsilon, the dashed line. A cross or triangle at the end of a line says that some seed was
    unstable or diverged.
    """
    gradient = Heard("grad_rms", "block0.mlp_up", "gradient RMS")
    return over_steps(records, runs, [gradient, Heard("update_rms", "block0.mlp_up", "update RMS")])


@figure("queries_and_keys_over_steps")
def queries_and_keys_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Norms of queries and keys, and the cosine between them, against step, in the first block.

    Attention logits grow with the norms, with the cosine, or both: the panels tell which. Norms are geometric means
    over heads' vectors and seeds, the cosine the mean of its absolute value; bands reach from the lowest to the highest
    seed. A cross or triangle at the end of a line says that some seed was unstable or diverged.
    """
    norms = [Heard(f"{part}_norm", "block0", f"{part} norm") for part in ("query", "key")]
    return over_steps(records, runs, [*norms, Heard("query_key_cosine", "block0", "|cosine|", "linear")])


@figure("updates_by_epsilon")
def updates_by_epsilon(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient and update of MLP layers against step, one line per Adam's epsilon, at the three highest learning rates.

    Root mean squares over a layer's elements, in the first and the last block of the largest model; geometric means
    over seeds, bands from the lowest to the highest seed. Dashed lines are the epsilons: where a gradient comes down to
    its epsilon, the update, before learning rate and decay, shrinks. A cross or triangle at the end of a line says that
    some seed was unstable or diverged.
    """
    found = ladder(records.runs, runs)
    if found is None or found.key != EPSILON:
        raise NothingToDrawError(f"nothing to draw: fewer than three values of {EPSILON}, or other settings differ too")
    some = found.runs[found.runs["size"] == found.runs["size"].max()]
    some = some[some["lr"].isin(sorted(some["lr"].unique())[-3:])]
    labels = some["lr"].map("LR {:g}".format)
    labels = labels if some["rest"].nunique() == 1 else some["rest"] + ", " + labels
    blocks = [place for place in places(records, "grad_rms") if place.endswith(".mlp_up")]
    ends = dict.fromkeys([blocks[0], blocks[-1]]) if blocks else {}
    names = {"grad_rms": "gradient RMS", "update_rms": "update RMS"}
    rows = [Heard(probe, end, f"{name}\n{end.partition('.')[0]}") for end in ends for probe, name in names.items()]
    return over_steps(records, some.assign(arm=labels, lr=some["setting"]), rows, EPSILON)
