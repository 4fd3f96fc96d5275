"""Figures of losses: against learning rate, against another setting, and against model size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lab.analysis.curves import EPSILON
from lab.analysis.figures.registry import NothingToDrawError, band_key, figure, outcome_keys
from lab.analysis.grouping import facets, swept_setting
from lab.analysis.probe_values import late
from lab.analysis.rendering import panels, scales, style
from lab.analysis.sensitivity import by_curve, per_seed
from lab.analysis.text import count
from lab.records.store import Records

GRADIENT_EQUALS_EPSILON = "gradient = epsilon"
NO_BLOCKS: dict[str, Any] = {
    "color": style.INK,
    "linewidth": 0.9,
    "linestyle": (0, (3, 1.5, 1, 1.5)),
    "label": "model of no blocks",
}


@figure("loss_against_setting")
def loss_against_setting(records: Records, runs: pd.DataFrame) -> Figure:
    """Final loss against a setting of the recipe, one line per learning rate.

    Lines are means over seeds, bands reach from the lowest to the highest seed, crosses and triangles are as in the
    first figure. A value of zero stands at the left edge, joined to nothing, since the axis is logarithmic. Where the
    setting is Adam's epsilon, the gradient of the first MLP layer stands below (root mean square, mean over the last
    tenth of the run, geometric mean over seeds); the dotted line is where it equals epsilon.
    """
    swept = swept_setting(records.runs, runs)
    if swept is None:
        raise NothingToDrawError("nothing to draw: no numeric setting, or more than one, has three values or more")
    depth = swept.runs["id"].map(records.runs.set_index("id")["model.depth"])
    shown, without_blocks = swept.runs[depth > 0], swept.runs[depth == 0]
    line = "lr" if shown["lr"].nunique() > 1 else "size"
    shades = style.shades(shown[line], style.LR_SHADES if line == "lr" else style.SIZE_SHADES)
    gradients = late(records, "grad_rms", "block0.mlp_up") if swept.key == EPSILON else pd.Series(dtype=float)
    shown = shown.assign(gradient=shown["id"].map(gradients).astype(float))
    values = ["capped", "gradient"] if shown["gradient"].notna().any() else ["capped"]
    shown["title"] = shown["rest"] + (", " + shown["size"].map(count) if line == "lr" else "")
    facet_runs = list(shown.groupby("title", sort=False))
    columns = style.columns_for(len(facet_runs))
    rows = -(-len(facet_runs) // columns) * len(values)
    sheet = style.Sheet(columns, [(2.0, 0.85)] * rows, headroom=0.5)
    name = " with ".join([swept.key, *swept.others])
    first: dict[str, Axes] = {}
    for index, (title, facet) in enumerate(facet_runs):
        for below, value in enumerate(values):
            axes = sheet.panel(index // columns * len(values) + below, index % columns, sharey=first.get(value))
            first.setdefault(value, axes)
            position = scales.setting_axis(axes, shown["setting"], name)
            mean = panels.geometric if value == "gradient" else np.mean
            for key, curve in facet.assign(position=position(facet["setting"])).groupby(line):
                for part in (curve[curve["setting"] == 0], curve[curve["setting"] > 0]):
                    panels.over(axes, part, "position", value, shades[key], mean)
            axes.tick_params(labelleft=index % columns == 0)
        panels.title(sheet.figure.axes[-len(values)], str(title))
    for axes in sheet.figure.axes[:: len(values)]:
        panels.references(axes, runs)
        if len(without_blocks):
            axes.axhline(without_blocks["capped"].mean(), **NO_BLOCKS)
        scales.loss_axis(axes, runs, runs["capped"], "")
    first["capped"].set_ylabel("final held-out loss\n(nats/token)")
    if "gradient" in first:
        first["gradient"].set_ylabel("gradient RMS")
        scales.probe_axis(first["gradient"])
        for axes in sheet.figure.axes[1::2]:
            panels.diagonal(axes, shown.loc[shown["setting"] > 0, "setting"], GRADIENT_EQUALS_EPSILON)
    keys = style.line_keys(shades, "{:g}".format if line == "lr" else count)
    lines = {line.get_label(): line for axes in first.values() for line in axes.lines}
    others = [*outcome_keys(shown), *style.reference_keys(first["capped"])]
    others += [lines[label] for label in (NO_BLOCKS["label"], GRADIENT_EQUALS_EPSILON) if label in lines]
    sheet.keys(("peak learning rate" if line == "lr" else "parameters", keys), ("", others))
    return sheet.figure


@figure("best_loss_with_size")
def best_loss_with_size(records: Records, runs: pd.DataFrame) -> Figure:
    """Best loss over the learning rates, and the learning rate it takes, against size.

    Each seed has a best of its own; lines are means over seeds (of learning rates geometric ones), bands reach from the
    lowest to the highest seed. Left: the dashed line is a power law fitted to all sizes of an arm but the largest, and
    drawn on to it; the hollow mark at its end is what it foretells. Right: the flatter a line, the better a learning
    rate found on a small model serves a large one. All axes are logarithmic.
    """
    blocks = runs["id"].map(records.runs.set_index("id")["model.depth"])
    best = runs[(blocks > 0) & (runs["lr"] == runs["best_lr"])]
    arms = [(str(arm), group) for arm, group in best.groupby("arm", sort=False) if group["size"].nunique() > 1]
    if not arms or runs["lr"].nunique() == 1:
        raise NothingToDrawError("nothing to draw: no arm has several sizes and learning rates")
    sheet = style.Sheet(2, [(2.6, 0.5)], headroom=0.35)
    left, right = sheet.panel(0, 0), sheet.panel(0, 1, gap=0.75)
    for position, (_, best_of_arm) in enumerate(arms):
        look = panels.arm_look(position)
        for axes, value, mean in ((left, "capped", np.mean), (right, "lr", panels.geometric)):
            by_size = best_of_arm.groupby("size")[value]
            line = by_size.agg(["min", "max"]).assign(mean=by_size.agg(mean))
            panels.band(axes, line.index, line["min"], line["max"], look["color"])
            axes.plot(line.index, line["mean"], markersize=5, **look)
        _extrapolate(left, best_of_arm, look)
    for axes in (left, right):
        scales.size_axis(axes, best["size"])
    scales.loss_axis(left, runs, best["capped"], "best held-out loss (nats/token)", bigram=False)
    scales.lr_ticks(right, runs["lr"], best["lr"])
    right.set_ylabel("best peak learning rate")
    keys = [panels.arm_key(arm, panels.arm_look(position)) for position, (arm, _) in enumerate(arms)]
    fit = Line2D([], [], color=style.INK, linestyle=panels.DASHED, label="power law of the\nsmaller sizes")
    fits = [fit] if any(best_of_arm["size"].nunique() > 2 for _, best_of_arm in arms) else []
    sheet.keys(("", [*keys, *fits, *band_key(runs)]))
    return sheet.figure


def _extrapolate(axes: Axes, best: pd.DataFrame, look: dict[str, Any]) -> None:
    """Fit a power law to all sizes but the largest and draw it up to that one; needs three sizes."""
    losses = best.groupby("size")["capped"].mean()
    if len(losses) < 3:
        return
    slope, intercept = np.polyfit(np.log(losses.index[:-1]), np.log(losses.iloc[:-1]), 1)
    fitted = np.exp(intercept + slope * np.log(losses.index.to_numpy(dtype=float)))
    axes.plot(losses.index, fitted, color=look["color"], linestyle=panels.DASHED, linewidth=1)
    axes.plot(
        losses.index[-1:], fitted[-1:], color=look["color"], marker=look["marker"], fillstyle="none", markersize=7
    )


@figure("learning_rate_sensitivity")
def learning_rate_sensitivity(records: Records, runs: pd.DataFrame) -> Figure:
    """Final loss against learning rate, and sensitivity against size.

    Top: the flatter a line, the less the choice of learning rate matters. Lines are means over seeds, bands reach from
    the lowest to the highest seed, and a loss above that at initialization is drawn there. A cross marks learning rates
    above the best one at which some seed ended worse than a bigram model of the text (unstable), a triangle those at
    which some seed's loss was no number any more or ended no lower than it began (diverged). The loss axis is
    logarithmic.

    Bottom: mean regret over the learning rates, so lower is less sensitive. The dashed line is the part that comes from
    learning rates above the best one, instability; the distance between the two lines is under-training. Bars are 95 %
    Student-t intervals over the n seeds; below three seeds each seed is a dash.
    """
    shown = facets(records.runs, runs)
    shades = style.shades(shown.values, style.SIZE_SHADES)
    columns = style.columns_for(len(shown.panels))
    rows = -(-len(shown.panels) // columns)
    lines = sum(1 + style.literal(arm, panels.KEY_LETTERS).count("\n") for arm in runs["arm"].unique())
    sheet = style.Sheet(columns, [(2.3, 0.85)] * rows + [(max(2.0, 0.17 * (lines + 3)), 0.5)], headroom=0.55)
    for index, (label, panel_runs) in enumerate(shown.panels):
        axes = sheet.panel(index // columns, index % columns, sharey=sheet.first)
        for value, curve in panel_runs.groupby(shown.line):
            panels.over(axes, curve, "lr", "capped", shades[value])
        panels.references(axes, runs)
        panels.title(axes, label)
        scales.lr_axis(axes, runs["lr"])
        scales.loss_axis(axes, runs, runs["capped"], "" if index % columns else "final held-out loss\n(nats/token)")
        axes.tick_params(labelleft=index % columns == 0)
    references = style.reference_keys(sheet.figure.axes[0])
    sheet.keys((shown.name, style.line_keys(shades, shown.spell)), ("", [*outcome_keys(runs), *references]))
    curves = by_curve(per_seed(runs))
    settings = pd.concat([panel_runs for _, panel_runs in shown.panels]).groupby("arm")[shown.line].first()
    colours = {} if shown.line == "size" else settings.map(shades).to_dict()
    sheet.keys(("", panels.sensitivities(sheet.panel(rows, 0, columns), curves, colours)), row=rows)
    return sheet.figure
