"""Figures over the steps of training: losses, logits, norms and updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.analysis.curves import EPSILON
from lab.analysis.figures.registry import NothingToDrawError, figure, outcome_keys
from lab.analysis.grouping import swept_setting
from lab.analysis.probe_values import places
from lab.analysis.rendering import panels, scales, style
from lab.analysis.text import count
from lab.records.store import Records

FEWEST_STEPS, MOST_STEPS = 20, 150  # drawn per line
MOST_POINTS = 2600  # in all lines of a figure, so that pages load fast
MOST_STACKS = 8  # of panels, one per arm and size; beyond that only the largest size of each arm is shown
LOSS_ROUNDING = 1e-6  # nats/token, roughly to which a loss of 32 bits is known
ROW_HEIGHT, ROW_GAP, STACK_GAP, TITLE_GAP = 1.25, 0.1, 0.2, 0.85  # inches


class ProbeSeries(NamedTuple):
    """A probe as a row of panels.

    Attributes:
        probe: its name.
        where: where it listens; None takes the largest value over the whole model.
        label: its name for readers.
        scale: of its axis: ``log``, ``symlog``, ``linear`` or ``loss``.
    """

    probe: str
    where: str | None
    label: str
    scale: str = "log"


def over_steps(
    records: Records, runs: pd.DataFrame, rows: Sequence[ProbeSeries], line: str = "peak learning rate"
) -> Figure:
    """Draw probe values over steps: a stack of ``rows`` for each size and up to four arms, one line per ``lr``.

    A row that no run recorded is left out; ``line`` names what distinguishes the lines.

    Raises:
        NothingToDrawError: no run recorded the first row.
    """
    if runs.groupby(["arm", "size"]).ngroups > MOST_STACKS:
        runs = runs[runs["size"] == runs.groupby("arm")["size"].transform("max")]
    single_arm = runs["arm"].nunique() == 1
    if single_arm:  # show its sizes side by side, as if they were arms
        runs = runs.assign(arm=runs["size"].map(lambda size: f"{count(size)} parameters"), size=0)
    lines = {row: table for row in rows if len(table := _lines(records, runs, row, len(rows)))}
    if rows[0] not in lines:
        raise NothingToDrawError(f"nothing to draw: no run recorded {rows[0].probe}")
    shades = style.shades(runs["lr"], style.LR_SHADES)
    stacks = list(_stacks(runs))
    sheet = style.Sheet(style.columns_for(runs["arm"].nunique()), _heights(stacks, len(lines)), headroom=0.55)
    shared: dict[ProbeSeries, Axes] = {}
    for index, (arms, size) in enumerate(stacks):
        top = index * len(lines)
        if not single_arm:
            sheet.label_rows(top, top + len(lines) - 1, f"{count(size)} parameters")
        bottom = top + len(lines) - 1 if index + 1 == len(stacks) or stacks[index + 1][0] != arms else -1
        is_first = index == 0 or stacks[index - 1][0] != arms
        for sheet_row, (row, table) in enumerate(lines.items(), start=top):
            row_lines = table[(table["size"] == size) & table["arm"].isin(arms)]
            left = min(map(arms.index, row_lines["arm"]), default=0)
            for arm, panel_lines in row_lines.groupby("arm"):
                column = arms.index(str(arm))
                axes = sheet.panel(sheet_row, column, sharey=shared.get(row), sharex=sheet.first)
                shared.setdefault(row, axes)
                for lr, lr_line in panel_lines.groupby("lr"):
                    panels.over_steps(axes, lr_line, shades[lr])
                if row.scale == "loss":
                    panels.references(axes, runs)
                    scales.loss_axis(axes, runs, row_lines["mean"], row.label)
                axes.set_ylabel(row.label if column == left else "")
                axes.set_xlabel("step" if sheet_row == bottom else "")
                axes.tick_params(labelleft=column == left, labelbottom=sheet_row == bottom)
                if is_first and sheet_row == top:
                    panels.title(axes, str(arm))
    for row, axes in shared.items():
        if row.scale != "loss":
            scales.probe_axis(axes, row.scale)
        if row.probe == "grad_rms":
            _epsilons(axes, records, runs, shades if line == EPSILON else {})
    references = style.reference_keys(shared[rows[0]])
    sheet.keys((line, style.line_keys(shades, "{:g}".format)), ("", [*outcome_keys(runs), *references]))
    return sheet.figure


def _stacks(runs: pd.DataFrame) -> Iterator[tuple[list[str], int]]:
    """Groups of arms that stand side by side, with each of their sizes."""
    arms = list(dict.fromkeys(runs["arm"]))
    columns = style.columns_for(len(arms))
    for start in range(0, len(arms), columns):
        group = arms[start : start + columns]
        for size in sorted(runs.loc[runs["arm"].isin(group), "size"].unique()):
            yield group, int(size)


def _heights(stacks: Sequence[tuple[list[str], int]], rows: int) -> list[tuple[float, float]]:
    """Height of each row and the space below it, which is wide where titles of other arms follow."""
    gaps = [STACK_GAP if arms == next_arms else TITLE_GAP for (arms, _), (next_arms, _) in pairwise(stacks)]
    return [(ROW_HEIGHT, ROW_GAP if row + 1 < rows else gap) for gap in [*gaps, 0.5] for row in range(rows)]


def _lines(records: Records, runs: pd.DataFrame, row: ProbeSeries, rows: int) -> pd.DataFrame:
    """Columns ``arm``, ``size``, ``lr``, ``step``; ``mean``, ``min``, ``max`` over seeds; and the worst ``outcome``."""
    metrics = records.metrics[records.metrics["probe"] == row.probe]
    if row.where is not None:
        metrics = metrics[metrics["where"] == row.where]
    values = metrics.groupby(["id", "step"])["value"].max().reset_index().merge(runs, on="id")
    if row.scale == "loss":
        init = values["loss_at_init"]
        values["value"] = np.where(np.isfinite(values["value"]), np.fmin(values["value"], init), init)
    keys = ["arm", "size", "lr"]
    most = int(np.clip(MOST_POINTS // (rows * runs.groupby(keys).ngroups), FEWEST_STEPS, MOST_STEPS))
    thinned = [
        table[table["step"].isin(_evenly(table["step"], most))]
        for _, table in values.groupby(["arm", "size"], sort=False)
    ]
    kept = pd.concat([values.head(0), *thinned])
    kept["value"] = kept["value"].where(np.isfinite(kept["value"]) & ((kept["value"] > 0) | (row.scale != "log")))
    kept["mean"] = np.log(kept["value"]) if row.scale == "log" else kept["value"]
    by_step = kept.groupby([*keys, "step"], sort=False)
    lines = by_step.agg(mean=("mean", "mean"), min=("value", "min"), max=("value", "max"))
    lines["mean"] = np.exp(lines["mean"]) if row.scale == "log" else lines["mean"]
    # end a line where any seed ends, since the mean over the seeds that remain would jump
    lines = lines.where(by_step["value"].count() == by_step.size()).reset_index()
    return lines.merge(runs.groupby(keys)["outcome"].agg(panels.worst_outcome).reset_index(), on=keys)


def _evenly(steps: pd.Series, most: int) -> Any:
    """At most so many of the steps, evenly spaced from first to last."""
    recorded = np.unique(steps)
    return recorded[np.unique(np.linspace(0, len(recorded) - 1, min(len(recorded), most)).round().astype(int))]


def _epsilons(first: Axes, records: Records, runs: pd.DataFrame, shades: Mapping[float, str]) -> None:
    """Draw Adam's epsilons in all panels of a row, each in the colour of its line if ``shades`` has one."""
    for eps in records.runs.loc[records.runs["id"].isin(runs["id"]), EPSILON].unique():
        for axes in first.get_shared_y_axes().get_siblings(first):
            panels.epsilon(axes, eps, shades.get(eps, style.INK))


@figure("loss_over_steps")
def loss_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Training loss against step, one line per learning rate, with the largest attention logit below it.

    Lines are means over seeds (of logits geometric ones) at some of the recorded steps, bands reach from the lowest to
    the highest seed; darker is a lower learning rate. Good learning rates end lowest; unstable ones rise, or stay near
    the loss of the bigram model. A loss above that at initialization, or one that is no number, is drawn at
    initialization; a line of logits ends where some seed's is no number any more. A cross or triangle at a line's end
    says that some seed was unstable or diverged.
    """
    loss = ProbeSeries("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [loss, ProbeSeries("attention_logit_max", None, "max attention\nlogit")])


@figure("output_logits_over_steps")
def output_logits_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Output logits against step: their mean, and the mean square of the log of the softmax normalizer.

    One line per learning rate, a mean over seeds, the band from the lowest to the highest seed. Where the output logits
    drift away from zero, late in training, z-loss holds them. A cross or triangle at the end of a line says that some
    seed was unstable or diverged.
    """
    mean = ProbeSeries("output_logit_mean", "", "mean output logit", "symlog")
    return over_steps(records, runs, [mean, ProbeSeries("log_z_square", "", "mean of log² Z")])


@figure("output_logit_drift")
def output_logit_drift(records: Records, runs: pd.DataFrame) -> Figure:
    """How far output logits drift and what that costs, against step.

    From above: the mean square of the log of the softmax normalizer; the share of the head's norm in its common mode,
    which moves all logits alike and so changes no probability; and the training loss above the lowest of any run, drawn
    at 1e-6 where it is less, about the rounding of the loss. One line per learning rate, a mean over seeds (geometric
    but for the share), the band from the lowest to the highest seed. Drift without harm is a top row that differs
    between arms while the bottom row does not.
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
def updates_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient and update of the first MLP layer against step.

    Root mean squares over the layer's elements, geometric means over seeds, bands from the lowest to the highest seed,
    one line per learning rate. The update is Adam's, before learning rate and decay: near one, unless the gradient
    comes down to Adam's epsilon, the dashed line. A cross or triangle at the end of a line says that some seed was
    unstable or diverged.
    """
    gradient = ProbeSeries("grad_rms", "block0.mlp_up", "gradient RMS")
    return over_steps(records, runs, [gradient, ProbeSeries("update_rms", "block0.mlp_up", "update RMS")])


@figure("queries_and_keys_over_steps")
def queries_and_keys_over_steps(records: Records, runs: pd.DataFrame) -> Figure:
    """Norms of queries and keys, and the cosine between them, against step, in the first block.

    Attention logits grow with the norms, with the cosine, or both: the panels tell which. Norms are geometric means
    over heads' vectors and seeds, the cosine the mean of its absolute value; bands reach from the lowest to the highest
    seed. A cross or triangle at the end of a line says that some seed was unstable or diverged.
    """
    norms = [ProbeSeries(f"{part}_norm", "block0", f"{part} norm") for part in ("query", "key")]
    return over_steps(records, runs, [*norms, ProbeSeries("query_key_cosine", "block0", "|cosine|", "linear")])


@figure("updates_by_epsilon")
def updates_by_epsilon(records: Records, runs: pd.DataFrame) -> Figure:
    """Gradient and update of MLP layers against step, one line per Adam's epsilon, at the three highest learning rates.

    Root mean squares over a layer's elements, in the first and the last block of the largest model; geometric means
    over seeds, bands from the lowest to the highest seed. Dashed lines are the epsilons: where a gradient comes down to
    its epsilon, the update, before learning rate and decay, shrinks. A cross or triangle at the end of a line says that
    some seed was unstable or diverged.
    """
    swept = swept_setting(records.runs, runs)
    if swept is None or swept.key != EPSILON:
        raise NothingToDrawError(f"nothing to draw: fewer than three values of {EPSILON}, or other settings differ too")
    largest = swept.runs[swept.runs["size"] == swept.runs["size"].max()]
    shown = largest[largest["lr"].isin(sorted(largest["lr"].unique())[-3:])]
    labels = shown["lr"].map("LR {:g}".format)
    labels = labels if shown["rest"].nunique() == 1 else shown["rest"] + ", " + labels
    blocks = [where for where in places(records, "grad_rms") if where.endswith(".mlp_up")]
    ends = dict.fromkeys([blocks[0], blocks[-1]]) if blocks else {}
    names = {"grad_rms": "gradient RMS", "update_rms": "update RMS"}
    rows = [
        ProbeSeries(probe, end, f"{name}\n{end.partition('.')[0]}") for end in ends for probe, name in names.items()
    ]
    return over_steps(records, shown.assign(arm=labels, lr=shown["setting"]), rows, EPSILON)
