"""Figures of probes: what runs away as the learning rate rises, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.crossings import rate_text
from lab.analysis.curves import depths, epsilons
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import facets
from lab.analysis.probe_values import late, near
from lab.analysis.rendering import layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.style import DASHED
from lab.analysis.runaway import Rate, rates, read_runaways
from lab.analysis.text import count, listed
from lab.records.imported import size_name
from lab.records.store import Records

# There is one row of panels per arm; with more arms there is no figure, since it would fill the page.
MOST_ARM_ROWS = 4
FEWEST_BLOCKS, USUAL_LR = 4, 1e-2
TENSORS = {"mlp_up": "first layer of the MLP", "attention.key": "key projection"}
GRADIENT = Quantity("gradient RMS", log=True)
OTHERS = ("output_logits", "residual_stream", "router_logits", "gradients")  # that run away, besides attention logits
LEVEL, CROSSING = "level", "crossing"
EPSILON_SENTENCE = "The dashed line is Adam's epsilon: a gradient that falls to it moves the weights too little."


@figure("max_attention_logit")
def max_attention_logit(records: Records, runs: pd.DataFrame) -> Sheet:
    """Largest attention logit against {axis.name}.

    The logit is the score before softmax: its peak over the run and over the recorded blocks, a geometric mean over
    seeds. Where the logit diverges, training is unstable.
    """
    return _runaways(records, runs, ["attention_logits"])


@figure("runaway_rates")
def runaway_rates(records: Records, runs: pd.DataFrame) -> Sheet:
    """Quantities that run away against {axis.name}.

    Output logits are the root of the mean square of log Z. Of them, as of the residual stream and of router logits, the
    largest value of the run counts; of epsilon over gradients the last value, a geometric mean over tensors. Lines are
    geometric means over seeds. A quantity is drawn if it passes its level somewhere.
    """
    found = rates(records, runs, OTHERS)
    passed = {rate.quantity for rate in found if any(each.times for each in rate.seeds)}
    return _runaways(records, runs, [name for name in OTHERS if name in passed])


def _runaways(records: Records, runs: pd.DataFrame, names: Sequence[str]) -> Sheet:
    """Quantities against learning rate, a line for each size or arm, and where it passes the level of the quantity."""
    shown_by_name = {name: read_runaways()[name] for name in names}
    peaks = runs.assign(**{name: runs["id"].map(runaway.of_runs(records)) for name, runaway in shown_by_name.items()})
    peaks[names] = peaks[names].where(np.isfinite(peaks[names]))
    if not names or peaks[names].isna().all(axis=None) or runs["lr"].nunique() == 1:
        raise NothingToDrawError("nothing to draw: no run recorded what runs away, or all have one learning rate")
    drawn = peaks[names].notna().any(axis=1).groupby(peaks["curve"]).transform("any")
    shown, found = facets(records.runs, peaks[drawn]), rates(records, runs, names)
    labels = [f"{each.takes}\n{each.title}" for each in shown_by_name.values()]
    sheet, facet_axes = layout.facets([title for title, _ in shown.panels], labels, 13.0)
    for of_facet, (_, panel_runs) in zip(facet_axes, shown.panels, strict=True):
        looks = {curve: shown.looks[keys.iloc[0]] for curve, keys in panel_runs.groupby("curve")[shown.line]}
        for axes, (name, runaway) in zip(of_facet, shown_by_name.items(), strict=True):
            quantity = Quantity(f"{runaway.takes} {runaway.title}", log=True)
            panels.lines(axes, panel_runs, shown.line, shown.looks, "lr", name, quantity)
            panels.level(axes, runaway.level, LEVEL, DASHED, style.INK)
            for rate in found:
                if rate.quantity == name and rate.curve in looks:
                    _mark_crossing(axes, rate, runaway.level, looks[rate.curve])
            scales.lr_axis(axes, runs["lr"])
    for axes in facet_axes[0]:
        scales.probe_axis(axes)
    means = "; ".join(f"{each.title} {each.level:g} ({each.means})" for each in shown_by_name.values())
    sheet.explain(LEVEL, f"The dashed line is the level above which a quantity has run away: {means}.")
    sheet.explain(CROSSING, "A diamond marks the learning rate at which it passes, with its interval over seeds.")
    sheet.keys((shown.name, shown.keys))
    return sheet


def _mark_crossing(axes: Axes, rate: Rate, level: float, look: Any) -> None:
    if math.isnan(rate.rate.mean):
        return
    colour = look if isinstance(look, str) else look["color"]
    axes.plot(rate.rate[1:3], [level, level], color=colour, linewidth=1.2)
    (mark,) = axes.plot([rate.rate.mean], [level], "D", color=colour, markersize=6, fillstyle="none")
    marks.name(mark, CROSSING)
    slope = f"{rate.slope:.2g} decades per decade of learning rate"
    text = f"{rate.arm}, {count(rate.size)} parameters\n{rate.level} at {rate_text(rate.rate)}\n{slope}"
    panels.add_hover_texts(axes, mark, [text])


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


@figure("gradient_with_depth")
def gradient_with_depth(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient of two tensors of each block against depth, at the learning rate nearest to 0.01.

    It is a root mean square over the elements after clipping, a mean over the last tenth of the run, and a geometric
    mean over seeds. The flatter a line, the more equal are the gradients of the blocks.
    """
    deep = _deep(records, runs)
    looks = panels.arm_looks(deep["arm"].unique())
    idle = [arm for arm in runs["arm"].unique() if arm not in looks]
    sheet, facet_axes = layout.facets(list(TENSORS.values()), ["gradient RMS"], 14.5)
    for (axes,), tensor in zip(facet_axes, TENSORS, strict=True):
        by_block = [
            deep.assign(block=block + 1, value=deep["id"].map(late(records, "grad_rms", f"block{block}.{tensor}")))
            for block in range(int(deep["depth"].iloc[0]))
        ]
        table = pd.concat(by_block).dropna(subset=["value"])
        if table.empty:
            raise NothingToDrawError("nothing to draw: no gradients of blocks are on record")
        for arm, look in looks.items():
            panels.over(axes, table[table["arm"] == arm], "block", "value", GRADIENT, **look)
        axes.set_xticks(range(1, 1 + len(by_block)))
        axes.set_xlabel("block")
    scales.probe_axis(facet_axes[0][0])
    sheet.keys(("", panels.arm_keys(looks)))
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
