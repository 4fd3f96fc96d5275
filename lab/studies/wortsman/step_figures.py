"""Figures over steps: losses, logits, norms and updates."""

from __future__ import annotations

import pandas as pd

from lab.analysis.curves import EPSILON
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.grouping import swept_setting
from lab.analysis.probe_values import places
from lab.analysis.rendering import marks
from lab.analysis.rendering.layout import Sheet
from lab.records.store import Records

LOSS_ROUNDING = 1e-6  # nats/token, about the rounding error of a loss in fp32


@figure("loss_over_steps")
def loss_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Training loss against step, one line per learning rate, with the largest attention logit below it.

    Lines are means over seeds (geometric for logits) at some of the recorded steps. Good learning rates end lowest;
    unstable ones rise, or stay near the loss of the bigram model. A loss that is non-finite, or above that at
    initialization, is drawn at the latter. A line of logits ends where some seed's is non-finite.
    """
    loss = ProbeSeries("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [loss, ProbeSeries("attention_logit_max", None, "max attention\nlogit")])


@figure("output_logits_over_steps")
def output_logits_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Output logits against step: their mean, and the mean square of the log of the softmax normalizer.

    Lines are means over seeds (geometric for squares), one per learning rate. Late in training the output logits can
    drift away from zero; z-loss prevents that.
    """
    mean = ProbeSeries("output_logit_mean", "", "mean output logit", "asinh")
    return over_steps(records, runs, [mean, ProbeSeries("log_z_square", "", "mean of log² Z")])


@figure("output_logit_drift")
def output_logit_drift(records: Records, runs: pd.DataFrame) -> Sheet:
    """Drift of output logits and its cost, against step.

    The top row is the mean square of the log of the softmax normalizer. The middle row is the share of the head's norm
    in its common mode, which moves all logits alike and so changes no probability. The bottom row is the training loss
    above the lowest of any run; values below 1e-6, about the rounding error of the loss, are drawn at it. Lines are
    means over seeds (geometric except for the share), one per learning rate. If the top row differs between arms and
    the bottom row does not, the drift does no harm.
    """
    losses = records.metrics[records.metrics["probe"] == "train_loss"]
    if losses.empty or "head_common_mode" not in set(records.metrics["probe"]):
        raise NothingToDrawError("nothing to draw: no run recorded train_loss and head_common_mode")
    excess = (losses["value"] - losses["value"].min()).clip(lower=LOSS_ROUNDING)
    metrics = pd.concat([records.metrics, losses.assign(probe="excess_loss", value=excess)])
    rows = [
        ProbeSeries("log_z_square", "", "mean of log² Z"),
        ProbeSeries("head_common_mode", "head", "common mode,\nshare of head", "linear"),
        ProbeSeries("excess_loss", "", "loss above lowest\n(nats/token)"),
    ]
    return over_steps(records._replace(metrics=metrics), runs, rows)


@figure("updates_over_steps")
def updates_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient and update of the first MLP layer against step.

    Lines are root mean squares over the layer's elements and geometric means over seeds, one per learning rate. The
    update is Adam's, before learning rate and decay. It is near one, unless the gradient falls to Adam's epsilon.
    """
    gradient = ProbeSeries("grad_rms", "block0.mlp_up", "gradient RMS")
    sheet = over_steps(records, runs, [gradient, ProbeSeries("update_rms", "block0.mlp_up", "update RMS")])
    sheet.explain(marks.EPSILON, "The dashed line is Adam's epsilon.")
    return sheet


@figure("queries_and_keys_over_steps")
def queries_and_keys_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Norms of queries and keys, and the cosine between them, against step, in the first block.

    Attention logits grow with the norms, with the cosine, or both: the panels show with which. Norms are geometric
    means over heads' vectors and seeds; the cosine is the mean of its absolute value.
    """
    norms = [ProbeSeries(f"{part}_norm", "block0", f"{part} norm") for part in ("query", "key")]
    return over_steps(records, runs, [*norms, ProbeSeries("query_key_cosine", "block0", "|cosine|", "linear")])


@figure("updates_by_epsilon")
def updates_by_epsilon(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient and update of MLP layers against step, one line per Adam's epsilon, at the three highest learning rates.

    Lines are root mean squares over a layer's elements, in the first and the last block of the largest model, and
    geometric means over seeds. Updates are those before learning rate and decay. They shrink where the gradient falls
    to epsilon.
    """
    swept = swept_setting(records.runs, runs)
    if swept is None or swept.key != EPSILON:
        raise NothingToDrawError(f"nothing to draw: fewer than three values of {EPSILON}, or other settings differ too")
    largest = swept.runs[swept.runs["size"] == swept.runs["size"].max()]
    shown = largest[largest["lr"].isin(sorted(largest["lr"].unique())[-3:])]
    labels = shown["lr"].map("LR {:g}".format)
    labels = labels if shown["rest"].nunique() == 1 else shown["rest"] + ", " + labels
    blocks = [where for where in places(records, "grad_rms") if where.endswith(".mlp_up")]
    if not blocks:
        raise NothingToDrawError("nothing to draw: no run recorded grad_rms of an MLP layer")
    ends = dict.fromkeys([blocks[0], blocks[-1]])
    names = {"grad_rms": "gradient RMS", "update_rms": "update RMS"}
    rows = [
        ProbeSeries(probe, end, f"{name}\n{end.partition('.')[0]}") for end in ends for probe, name in names.items()
    ]
    sheet = over_steps(records, shown.assign(panel=labels, line=shown["setting"]), rows, marks.EPSILON)
    sheet.explain(marks.EPSILON, "Dashed lines are the epsilons.")
    return sheet
