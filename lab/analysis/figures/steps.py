"""Figures over the steps of training: losses, logits, norms and updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.curves import EPSILON, epsilons
from lab.analysis.figures.registry import NothingToDrawError, figure
from lab.analysis.grouping import swept_setting
from lab.analysis.probe_values import DISTANCE, POSITIONS, embedding_share, places
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import count
from lab.records.store import Records

FEWEST_STEPS, MOST_STEPS = 20, 150  # drawn per line
MOST_POINTS = 2600  # in all lines of a figure, so that pages load fast
MOST_STACKS = 8  # of panels, one per arm and size; beyond that only the largest size of each arm is shown
EMBEDDINGS = ("embedding_scale", "embedding_init")  # interventions that change how large the embedding begins
LOSS_ROUNDING = 1e-6  # nats/token, roughly to which a loss of 32 bits is known
ROW_HEIGHT = 8.5  # in multiples of the size of text


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

    @property
    def quantity(self) -> Quantity:
        """What a mark at the end of a line tells."""
        unit = "nats/token" if self.scale == "loss" else ""
        return Quantity(self.label.partition("\n(")[0].replace("\n", " "), unit, self.scale == "log")


def over_steps(
    records: Records, runs: pd.DataFrame, rows: Sequence[ProbeSeries], line_name: str = "peak learning rate"
) -> Sheet:
    """Draw probe values over steps: a stack of ``rows`` for each size and up to four arms, one line per ``lr``.

    A row that no run recorded is left out.

    Args:
        records: run cards and probe records.
        runs: may have the columns ``panel`` and ``line``, by which panels and lines are told apart instead.
        rows: of panels.
        line_name: what distinguishes the lines.

    Raises:
        NothingToDrawError: no run recorded the first row.
    """
    runs = _arranged(runs)
    values = {row: table for row in rows if len(table := _values(records, runs, row))}
    if rows[0] not in values:
        raise NothingToDrawError(f"nothing to draw: no run recorded {rows[0].probe}")
    lines = {row: _lines(table, runs, row, len(rows)) for row, table in values.items()}
    shades = style.shades(runs["line"], style.LR_SHADES)
    stacks = list(_stacks(runs))
    sheet = Sheet(layout.columns_for(runs["panel"].nunique()), [ROW_HEIGHT] * len(stacks) * len(lines))
    shared: dict[ProbeSeries, Axes] = {}
    for index, (names, size) in enumerate(stacks):
        top = index * len(lines)
        if runs["stack"].nunique() > 1:
            sheet.label_rows(top, top + len(lines) - 1, f"{count(size)} parameters")
        bottom = top + len(lines) - 1 if index + 1 == len(stacks) or stacks[index + 1][0] != names else -1
        is_first = index == 0 or stacks[index - 1][0] != names
        for sheet_row, (row, table) in enumerate(lines.items(), start=top):
            row_lines = table[(table["stack"] == size) & table["panel"].isin(names)]
            left = min(map(names.index, row_lines["panel"]), default=0)
            for name, panel_lines in row_lines.groupby("panel"):
                column = names.index(str(name))
                axes = sheet.panel(sheet_row, column, sharey=shared.get(row), sharex=sheet.first)
                shared.setdefault(row, axes)
                panel_runs = runs[(runs["panel"] == name) & (runs["stack"] == size)]
                _draw_lines(axes, panel_lines, panel_runs, shades, row, values[row])
                if row.scale == "loss":
                    panels.references(axes, runs)
                    scales.loss_axis(axes, runs, table["mean"], row.label)
                axes.set_ylabel(row.label if column == left else "")
                axes.set_xlabel("step" if sheet_row == bottom else "")
                axes.tick_params(labelleft=column == left, labelbottom=sheet_row == bottom)
                if is_first and sheet_row == top:
                    panels.title(axes, str(name))
    scales.step_axis(sheet.figure.axes[0], max(int(table["step"].max()) for table in lines.values()))
    for row, axes in shared.items():
        if row.scale != "loss":
            scales.probe_axis(axes, row.scale)
        if row.probe == "grad_rms":
            _epsilons(axes, records, runs, shades if line_name == marks.EPSILON else {})
            scales.y_ticks(axes)
    sheet.keys((line_name, layout.line_keys(shades, "{:g}".format)))
    return sheet


def _arranged(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the columns ``panel``, ``stack`` (a size, or 0 where sizes are told by panels) and ``line``."""
    if runs.groupby(["arm", "size"]).ngroups > MOST_STACKS:
        runs = runs[runs["size"] == runs.groupby("arm")["size"].transform("max")]
    runs = pd.DataFrame({"panel": runs["arm"], "stack": runs["size"], "line": runs["lr"]} | dict(runs))
    sizes = runs["size"].map(lambda size: f"{count(size)} parameters")
    if runs["panel"].nunique() == 1:
        return runs.assign(panel=sizes, stack=0)
    if runs["size"].nunique() > 1 and (runs.groupby("panel")["size"].nunique() == 1).all():
        return runs.assign(panel=runs["panel"] + ", " + sizes, stack=0)
    return runs


def _draw_lines(
    axes: Axes,
    lines: pd.DataFrame,
    runs: pd.DataFrame,
    shades: Mapping[Any, str],
    row: ProbeSeries,
    values: pd.DataFrame,
) -> None:
    """Draw the lines of a panel."""
    for key, line in lines.groupby("line"):
        of_line = (runs["line"] == key).to_numpy()

        def text_at(step: int, of_line: Any = of_line) -> str:
            at_end = values.loc[(values["step"] == step) & values["id"].isin(runs["id"][of_line]), "value"]
            return hover.Told(runs).point(of_line, row.quantity, at_end.to_numpy(), f"step {step}")

        panels.over_steps(axes, line, shades[key], int(of_line.sum()), text_at)


def _stacks(runs: pd.DataFrame) -> Iterator[tuple[list[str], int]]:
    """Groups of panels that stand side by side, with each of their sizes."""
    names = list(dict.fromkeys(runs["panel"]))
    columns = layout.columns_for(len(names))
    for start in range(0, len(names), columns):
        group = names[start : start + columns]
        for size in sorted(runs.loc[runs["panel"].isin(group), "stack"].unique()):
            yield group, int(size)


def _values(records: Records, runs: pd.DataFrame, row: ProbeSeries) -> pd.DataFrame:
    """The values of a row that can be drawn, with their runs; others are NaN, but losses at initialization."""
    metrics = records.metrics[records.metrics["probe"] == row.probe]
    if row.where is not None:
        metrics = metrics[metrics["where"] == row.where]
    values = metrics.groupby(["id", "step"])["value"].max().reset_index().merge(runs, on="id")
    if row.scale == "loss":
        init = values["loss_at_init"]
        values["value"] = np.where(np.isfinite(values["value"]), np.fmin(values["value"], init), init)
    values["value"] = values["value"].where(
        np.isfinite(values["value"]) & ((values["value"] > 0) | (row.scale != "log"))
    )
    return values


def _lines(values: pd.DataFrame, runs: pd.DataFrame, row: ProbeSeries, rows: int) -> pd.DataFrame:
    """Columns ``panel``, ``stack``, ``line``, ``step``; ``mean`` and band over seeds; and the worst ``outcome``."""
    keys = ["panel", "stack", "line"]
    most = int(np.clip(MOST_POINTS // (rows * runs.groupby(keys).ngroups), FEWEST_STEPS, MOST_STEPS))
    thinned = [
        table[table["step"].isin(_evenly(table["step"], most))]
        for _, table in values.groupby(["panel", "stack"], sort=False)
    ]
    kept = pd.concat([values.head(0), *thinned])
    kept["mean"] = np.log(kept["value"]) if row.scale == "log" else kept["value"]
    by_step = kept.groupby([*keys, "step"], sort=False)
    lines = by_step.agg(mean=("mean", "mean"), low=("value", "min"), high=("value", "max"))
    if marks.kind_of_band(runs.groupby(keys).size().max()) == marks.MIDDLE:
        lines["low"] = by_step["value"].quantile(marks.MIDDLE_PART[0])
        lines["high"] = by_step["value"].quantile(marks.MIDDLE_PART[1])
    lines["mean"] = np.exp(lines["mean"]) if row.scale == "log" else lines["mean"]
    # end a line where any seed ends, since the mean over the seeds that remain would jump
    seeds = by_step.size()
    lines = lines.where(by_step["value"].count() == seeds.groupby(keys).transform("max")).reset_index()
    return lines.merge(runs.groupby(keys)["outcome"].agg(panels.worst_outcome).reset_index(), on=keys)


def _evenly(steps: pd.Series, most: int) -> Any:
    """At most so many of the steps, evenly spaced from first to last."""
    recorded = np.unique(steps)
    return recorded[np.unique(np.linspace(0, len(recorded) - 1, min(len(recorded), most)).round().astype(int))]


def _epsilons(first: Axes, records: Records, runs: pd.DataFrame, shades: Mapping[float, str]) -> None:
    """Draw Adam's epsilons in all panels of a row, each in the colour of its line if ``shades`` has one."""
    for eps in epsilons(records.runs).reindex(runs["id"]).unique():
        for axes in first.get_shared_y_axes().get_siblings(first):
            panels.epsilon(axes, eps, shades.get(eps, style.INK))


@figure("loss_over_steps")
def loss_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Training loss against step, one line per learning rate, with the largest attention logit below it.

    Lines are means over seeds (of logits geometric ones) at some of the recorded steps; darker is a lower learning
    rate. Good learning rates end lowest; unstable ones rise, or stay near the loss of the bigram model. A loss above
    that at initialization, or one that is no number, is drawn at initialization; a line of logits ends where some
    seed's is no number any more.
    """
    loss = ProbeSeries("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [loss, ProbeSeries("attention_logit_max", None, "max attention\nlogit")])


@figure("output_logits_over_steps")
def output_logits_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Output logits against step: their mean, and the mean square of the log of the softmax normalizer.

    One line per learning rate, a mean over seeds (of squares a geometric one). Where the output logits drift away from
    zero, late in training, z-loss holds them.
    """
    mean = ProbeSeries("output_logit_mean", "", "mean output logit", "symlog")
    return over_steps(records, runs, [mean, ProbeSeries("log_z_square", "", "mean of log² Z")])


@figure("output_logit_drift")
def output_logit_drift(records: Records, runs: pd.DataFrame) -> Sheet:
    """How far output logits drift and what that costs, against step.

    From above: the mean square of the log of the softmax normalizer; the share of the head's norm in its common mode,
    which moves all logits alike and so changes no probability; and the training loss above the lowest of any run, drawn
    at 1e-6 where it is less, about the rounding of the loss. One line per learning rate, a mean over seeds (geometric
    but for the share). Drift without harm is a top row that differs between arms while the bottom row does not.
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

    Root mean squares over the layer's elements, geometric means over seeds, one line per learning rate. The update is
    Adam's, before learning rate and decay: near one, unless the gradient comes down to Adam's epsilon.
    """
    gradient = ProbeSeries("grad_rms", "block0.mlp_up", "gradient RMS")
    sheet = over_steps(records, runs, [gradient, ProbeSeries("update_rms", "block0.mlp_up", "update RMS")])
    sheet.explain(marks.EPSILON, "The dashed line is Adam's epsilon.")
    return sheet


@figure("embedding_gradient")
def embedding_gradient(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of the embedding against step: its norm over that of all other weights together.

    A geometric mean over seeds, after clipping, which changes both alike. Of a tied embedding the gradient is that of
    both its uses.
    """
    if not begins_unusually(records):
        raise NothingToDrawError(f"nothing to draw: no run has {' or '.join(EMBEDDINGS)}")
    shares = embedding_share(records).assign(probe="embedding_share", where="")
    row = ProbeSeries("embedding_share", "", "embedding's gradient\nover that of the rest")
    return over_steps(records._replace(metrics=shares), runs, [row])


def begins_unusually(records: Records) -> bool:
    """Whether some run's embedding begins larger or smaller than usual."""
    return bool(records.runs["intervention"].str.split("+").explode().isin(EMBEDDINGS).any())


@figure("queries_and_keys_over_steps")
def queries_and_keys_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Norms of queries and keys, and the cosine between them, against step, in the first block.

    Attention logits grow with the norms, with the cosine, or both: the panels tell which. Norms are geometric means
    over heads' vectors and seeds, the cosine the mean of its absolute value.
    """
    norms = [ProbeSeries(f"{part}_norm", "block0", f"{part} norm") for part in ("query", "key")]
    return over_steps(records, runs, [*norms, ProbeSeries("query_key_cosine", "block0", "|cosine|", "linear")])


@figure("loss_scale_over_steps")
def loss_scale_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Loss scale against step, with the training loss below it.

    The scale falls at each gradient that overflows, whose update is left out, and rises after many that do not. One
    line per learning rate, a mean over seeds (of scales a geometric one).
    """
    loss = ProbeSeries("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [ProbeSeries("loss_scale", "", "loss scale"), loss])


@figure("updates_by_epsilon")
def updates_by_epsilon(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient and update of MLP layers against step, one line per Adam's epsilon, at the three highest learning rates.

    Root mean squares over a layer's elements, in the first and the last block of the largest model; geometric means
    over seeds. Where a gradient comes down to its epsilon, the update, before learning rate and decay, shrinks.
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


@figure("distance_from_init")
def distance_from_init(records: Records, runs: pd.DataFrame) -> Sheet:
    """How far tables of the embedding move from their initial values, against step.

    A distance is the norm of the change over the norm of the initial values, a geometric mean over seeds, one line per
    learning rate. A table far below 1 is still much as it began.
    """
    named = {POSITIONS: "positions", "embedding": "tokens"}
    return over_steps(
        records, runs, [ProbeSeries(DISTANCE, where, f"distance of\n{table}") for where, table in named.items()]
    )
