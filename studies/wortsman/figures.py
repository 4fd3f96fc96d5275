"""Figures of Wortsman et al. 2023: what grows with size, what epsilon does, and the drift of output logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from lab.analysis.curves import EPSILON, depths, epsilons
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.grouping import swept_setting
from lab.analysis.probe_values import late, near, places
from lab.analysis.rendering import layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import count
from lab.records.imported import size_name
from lab.records.store import Records

# There is one row of panels per arm; with more arms there is no figure, since it would fill the page.
MOST_ARM_ROWS = 4
EPSILON_SENTENCE = "The dashed line is Adam's epsilon: a gradient that falls to it moves the weights too little."
LOSS_ROUNDING = 1e-6  # nats/token, about the rounding error of a loss in fp32


@figure("gradient_with_size")
def gradient_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of the first MLP layer against size, {axis.name} and block.

    It is a root mean square over the layer's elements, a mean over the last tenth of the run, and a geometric mean over
    seeds. Against size and {axis.name}: the first block; against block: the largest model.
    """
    return _growth(records, runs, "grad_rms", ".mlp_up", "gradient RMS")


@figure("key_gradient_with_size")
def key_gradient_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of the key projection against size, {axis.name} and block.

    It is a root mean square over the projection's elements, a mean over the last tenth of the run, and a geometric mean
    over seeds. Against size and {axis.name}: the first block; against block: the largest model.
    """
    return _growth(records, runs, "grad_rms", ".attention.key", "gradient RMS")


@figure("block_output_with_size")
def block_output_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Output of a block against size, {axis.name} and block.

    It is a root mean square of the residual stream after the block, a mean over the last tenth of the run, and a
    geometric mean over seeds. Against size and {axis.name}: the first block; against block: the largest model.
    """
    return _growth(records, runs, "block_rms", "", "block output RMS")


@figure("attention_logit_with_size")
def attention_logit_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Largest attention logit early in training against size, {axis.name} and block.

    It is taken at the recorded step nearest to a tenth of the run, before runs become unstable; lines are geometric
    means over seeds. Against size and {axis.name}: the first block; against block: the largest model.
    """
    return _growth(records, runs, "attention_logit_max", "", "max attention\nlogit", partial(near, part=0.1))


def _growth(
    records: Records,
    runs: pd.DataFrame,
    probe: str,
    part: str,
    label: str,
    measure: Callable[[Records, str, str], pd.Series] = late,
) -> Sheet:
    """A row of three panels per arm that has more than one size: against size, learning rate and block.

    Args:
        probe: the name of the probe.
        part: the part of a block where it is measured; empty for the block itself.
        label: the name of the probe for readers.
        measure: reduces its records to one number per run.

    Raises:
        NothingToDrawError: no arm has more than one size, or more than four arms have.
    """
    depth = depths(records.runs)
    runs = runs.assign(
        depth=runs["id"].map(depth).fillna(0).astype(int), eps=epsilons(records.runs).loc[runs["id"]].to_numpy()
    )
    runs = runs.assign(value=runs["id"].map(measure(records, probe, f"block0{part}")), block=1)
    runs["value"] = runs["value"].where(np.isfinite(runs["value"]) & (runs["value"] > 0))
    runs = runs[runs.groupby(["arm", "size", "lr"])["value"].transform("count") > 0]
    arms = [(str(arm), group) for arm, group in runs.groupby("arm", sort=False) if group["size"].nunique() > 1]
    if not 0 < len(arms) <= MOST_ARM_ROWS:
        raise NothingToDrawError(f"nothing to draw: {len(arms)} arms of several sizes recorded {probe}")
    blocks = range(1, 1 + max(group.loc[group["size"] == group["size"].max(), "depth"].max() for _, group in arms))
    values_by_block = {block: measure(records, probe, f"block{block - 1}{part}") for block in blocks}
    lrs = style.shades(runs["lr"], style.LR_SHADES)
    sizes = style.shades(runs["size"], style.SIZE_SHADES)
    quantity = Quantity(label.replace("\n", " "), log=True)
    titles = [arm for arm, _ in arms for _ in range(3)]
    columns = 3 if layout.columns_for(3) == 3 else 1
    sheet, facet_axes = layout.facets(titles, [label], 11.0, columns)
    for index, (_, group) in enumerate(arms):
        largest = group[group["size"] == group["size"].max()]
        by_block = pd.concat(
            [largest.assign(block=block, value=largest["id"].map(values)) for block, values in values_by_block.items()]
        )
        by_block["value"] = by_block["value"].where(by_block["value"] > 0)
        (of_size,), (of_lr,), (of_block,) = facet_axes[3 * index : 3 * index + 3]
        views = [
            (of_size, "size", "lr", group, lrs),
            (of_lr, "lr", "size", group, sizes),
            (of_block, "block", "lr", by_block, lrs),
        ]
        for axes, x, line, table, shades in views:
            panels.lines(axes, table, line, shades, x, "value", quantity)
        scales.size_axis(of_size, group["size"], size_name(records))
        scales.lr_axis(of_lr, group["lr"])
        of_block.set_xticks(list(blocks))
        of_block.set_xlim(0.8, max(blocks) + 0.2)
        of_block.set_xlabel(f"block, at {count(largest['size'].iloc[0])}")
    scales.probe_axis(sheet.figure.axes[0])
    if probe == "grad_rms":
        for axes, (_, group) in zip(sheet.figure.axes, [arm for arm in arms for _ in range(3)], strict=True):
            panels.epsilon(axes, float(group["eps"].max()))
        scales.y_ticks(sheet.figure.axes[0])
    sheet.explain(marks.EPSILON, EPSILON_SENTENCE)
    sheet.keys((style.axis().peak, layout.line_keys(lrs)), ("parameters", layout.line_keys(sizes, count)))
    return sheet


@figure("output_logit_drift")
def output_logit_drift(records: Records, runs: pd.DataFrame) -> Sheet:
    """Drift of output logits and its cost, against step.

    The top row is the mean square of the log of the softmax normalizer. The middle row is the share of the head's norm
    in its common mode, which moves all logits alike and so changes no probability. The bottom row is the training loss
    above the lowest of any run; values below 1e-6, about the rounding error of the loss, are drawn at it. Lines are
    means over seeds (geometric except for the share), one per {axis.name}. If the top row differs between arms and
    the bottom row does not, the drift does no harm.
    """
    losses = records.metrics[records.metrics["probe"] == "train_loss"]
    if losses.empty or not (records.metrics["probe"] == "head_common_mode").any():
        raise NothingToDrawError("nothing to draw: no run recorded train_loss and head_common_mode")
    excess = (losses["value"] - losses["value"].min()).clip(lower=LOSS_ROUNDING)
    metrics = pd.concat([records.metrics, losses.assign(probe="excess_loss", value=excess)])
    rows = [
        ProbeSeries("log_z_square", "", "mean of log² Z"),
        ProbeSeries("head_common_mode", "head", "common mode,\nshare of head", "linear"),
        ProbeSeries("excess_loss", "", "loss above lowest\n(nats/token)"),
    ]
    return over_steps(records._replace(metrics=metrics), runs, rows)


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
    """Gradient and update of MLP layers against step, one line per Adam's epsilon, at the three highest {axis.values}.

    Lines are root mean squares over a layer's elements, in the first and the last block of the largest model, and
    geometric means over seeds. Updates are those before learning rate and decay. They shrink where the gradient falls
    to epsilon.
    """
    swept = swept_setting(records.runs, runs)
    if swept is None or swept.key != EPSILON:
        raise NothingToDrawError(f"nothing to draw: fewer than three values of {EPSILON}, or other settings differ too")
    largest = swept.runs[swept.runs["size"] == swept.runs["size"].max()]
    shown = largest[largest["lr"].isin(sorted(largest["lr"].unique())[-3:])]
    labels = shown["lr"].map((style.axis().short + " {:g}").format)
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
