"""Figures of probe values against model size, learning rate and block."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.curves import depths, epsilons
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import facets
from lab.analysis.probe_values import late, near
from lab.analysis.rendering import layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import count, listed
from lab.records.run_table import size_name
from lab.records.store import Records

# There is one row of panels per arm; with more arms there is no figure, since it would fill the page.
MOST_ARM_ROWS = 4
NARROWEST_VIEW = 13.0  # in multiples of the size of text; makes the three panels of an arm one row or one column
FEWEST_BLOCKS, USUAL_LR = 4, 1e-2
TENSORS = {"mlp_up": "first layer of the MLP", "attention.key": "key projection"}
GRADIENT = Quantity("gradient RMS", log=True)
EPSILON_SENTENCE = "The dashed line is Adam's epsilon: a gradient that falls to it moves the weights too little."


class SizeSeries(NamedTuple):
    """A probe as one number per run.

    Attributes:
        probe: the name of the probe.
        where: the part of block 0 where it is measured.
        label: the name of the probe for readers.
        measure: reduces its records to one number per run.
    """

    probe: str
    where: str
    label: str
    measure: Callable[[Records, str, str], pd.Series] = late

    def where_in(self, block: int) -> str:
        """The same part of another block."""
        return self.where.replace("block0", f"block{block}", 1)


@figure("max_attention_logit")
def max_attention_logit(records: Records, runs: pd.DataFrame) -> Sheet:
    """Largest attention logit against learning rate.

    The logit is the score before softmax: its peak over the run and over the recorded blocks, a geometric mean over
    seeds. Where the logit diverges, training is unstable.
    """
    logits = records.metrics[records.metrics["probe"] == "attention_logit_max"]
    logits = logits[np.isfinite(logits["value"]) & (logits["value"] > 0)]
    if logits.empty or runs["lr"].nunique() == 1:
        raise NothingToDrawError("nothing to draw: no run recorded attention_logit_max, or all have one learning rate")
    peaks = runs.assign(peak=runs["id"].map(logits.groupby("id")["value"].max()))
    shown = facets(records.runs, peaks[peaks.groupby("curve")["peak"].transform("count") > 0])
    shades = style.shades(shown.values, style.SIZE_SHADES)
    quantity = Quantity("peak of max attention logit", log=True)
    titles = [label for label, _ in shown.panels]
    sheet, facet_axes = layout.facets(titles, ["peak of max\nattention logit"], 13.0)
    for (axes,), (_, panel_runs) in zip(facet_axes, shown.panels, strict=True):
        panels.lines(axes, panel_runs, shown.line, shades, "lr", "peak", quantity)
        scales.lr_axis(axes, runs["lr"])
    scales.probe_axis(facet_axes[0][0])
    sheet.keys((shown.name, layout.line_keys(shades, shown.spell)))
    return sheet


@figure("gradient_with_size")
def gradient_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of the first MLP layer against size, learning rate and block.

    It is a root mean square over the layer's elements, a mean over the last tenth of the run, and a geometric mean over
    seeds. Against size and learning rate: the first block; against block: the largest model.
    """
    return _growth(records, runs, SizeSeries("grad_rms", "block0.mlp_up", "gradient RMS"))


@figure("key_gradient_with_size")
def key_gradient_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of the key projection against size, learning rate and block.

    It is a root mean square over the projection's elements, a mean over the last tenth of the run, and a geometric mean
    over seeds. Against size and learning rate: the first block; against block: the largest model.
    """
    return _growth(records, runs, SizeSeries("grad_rms", "block0.attention.key", "gradient RMS"))


@figure("block_output_with_size")
def block_output_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Output of a block against size, learning rate and block.

    It is a root mean square of the residual stream after the block, a mean over the last tenth of the run, and a
    geometric mean over seeds. Against size and learning rate: the first block; against block: the largest model.
    """
    return _growth(records, runs, SizeSeries("block_rms", "block0", "block output RMS"))


@figure("attention_logit_with_size")
def attention_logit_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Largest attention logit early in training against size, learning rate and block.

    It is taken at the recorded step nearest to a tenth of the run, before runs become unstable; lines are geometric
    means over seeds. Against size and learning rate: the first block; against block: the largest model.
    """
    return _growth(records, runs, SizeSeries("attention_logit_max", "block0", "max attention\nlogit", _at_a_tenth))


def _at_a_tenth(records: Records, probe: str, where: str) -> pd.Series:
    return near(records, probe, where, 0.1)


def _growth(records: Records, runs: pd.DataFrame, series: SizeSeries) -> Sheet:
    """A row of three panels per arm that has more than one size: against size, learning rate and block.

    Raises:
        NothingToDrawError: no arm has more than one size, or more than four arms have.
    """
    depth = depths(records.runs)
    runs = runs.assign(
        depth=runs["id"].map(depth).fillna(0).astype(int), eps=epsilons(records.runs).loc[runs["id"]].to_numpy()
    )
    runs = runs.assign(value=runs["id"].map(series.measure(records, series.probe, series.where)), block=1)
    runs["value"] = runs["value"].where(np.isfinite(runs["value"]) & (runs["value"] > 0))
    runs = runs[runs.groupby(["arm", "size", "lr"])["value"].transform("count") > 0]
    arms = [(str(arm), group) for arm, group in runs.groupby("arm", sort=False) if group["size"].nunique() > 1]
    if not 0 < len(arms) <= MOST_ARM_ROWS:
        raise NothingToDrawError(f"nothing to draw: {len(arms)} arms of several sizes recorded {series.probe}")
    blocks = range(1, 1 + max(group.loc[group["size"] == group["size"].max(), "depth"].max() for _, group in arms))
    values_by_block = {block: series.measure(records, series.probe, series.where_in(block - 1)) for block in blocks}
    lrs = style.shades(runs["lr"], style.LR_SHADES)
    sizes = style.shades(runs["size"], style.SIZE_SHADES)
    quantity = Quantity(series.label.replace("\n", " "), log=True)
    titles = [arm for arm, _ in arms for _ in range(3)]
    sheet, facet_axes = layout.facets(titles, [series.label], 11.0, layout.columns_for(3, NARROWEST_VIEW))
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
    if series.probe == "grad_rms":
        for axes, (_, group) in zip(sheet.figure.axes, [arm for arm in arms for _ in range(3)], strict=True):
            panels.epsilon(axes, float(group["eps"].max()))
        scales.y_ticks(sheet.figure.axes[0])
    sheet.explain(marks.EPSILON, EPSILON_SENTENCE)
    sheet.keys(("peak learning rate", layout.line_keys(lrs)), ("parameters", layout.line_keys(sizes, count)))
    return sheet


@figure("gradient_with_depth")
def gradient_with_depth(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of two tensors of each block against depth, at the learning rate nearest to 0.01.

    It is a root mean square over the elements after clipping, a mean over the last tenth of the run, and a geometric
    mean over seeds. The flatter a line, the more equal are the gradients of the blocks.
    """
    deep = _deep(records, runs)
    arms = list(dict.fromkeys(deep["arm"]))
    idle = [arm for arm in dict.fromkeys(runs["arm"]) if arm not in arms]
    sheet, facet_axes = layout.facets(list(TENSORS.values()), ["gradient RMS"], 14.5)
    for (axes,), tensor in zip(facet_axes, TENSORS, strict=True):
        by_block = [
            deep.assign(block=block + 1, value=deep["id"].map(late(records, "grad_rms", f"block{block}.{tensor}")))
            for block in range(int(deep["depth"].iloc[0]))
        ]
        table = pd.concat(by_block).dropna(subset=["value"])
        if table.empty:
            raise NothingToDrawError("nothing to draw: no gradients of blocks are on record")
        for position, arm in enumerate(arms):
            of_arm = table[table["arm"] == arm]
            panels.over(axes, of_arm, "block", "value", GRADIENT, **panels.arm_look(position))
        axes.set_xticks(range(1, 1 + len(by_block)))
        axes.set_xlabel("block")
    scales.probe_axis(facet_axes[0][0])
    sheet.keys(("", [panels.arm_key(arm, panels.arm_look(n)) for n, arm in enumerate(arms)]))
    if idle:
        sheet.note(f"Left out, since they never beat a bigram model: {listed(idle)}.")
    return sheet


def _deep(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """The runs at the learning rate nearest to 0.01 of arms that beat a bigram model, with their ``depth``.

    Raises:
        NothingToDrawError: there are fewer than two such arms, or their models are shallow or differ in depth.
    """
    runs = runs[(runs["capped"] < runs["loss_bigram"]).groupby(runs["arm"]).transform("any")]
    deep = runs.assign(depth=runs["id"].map(depths(records.runs)).fillna(0).astype(int))
    if deep["arm"].nunique() < 2 or deep["depth"].nunique() > 1 or deep["depth"].min() < FEWEST_BLOCKS:
        raise NothingToDrawError(f"nothing to draw: no two arms of one depth, {FEWEST_BLOCKS} blocks or more")
    distances = np.abs(np.log(deep["lr"] / USUAL_LR))
    nearest: pd.DataFrame = deep[distances == distances.min()]
    return nearest
