"""Figures of losses: against learning rate, against another setting, and against model size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.curves import EPSILON, depths
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.grouping import SweptSetting, facets, swept_setting
from lab.analysis.probe_values import late
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import FINAL_LOSS
from lab.analysis.sensitivity import WINDOW, Window, by_curve, has_sensitivity, per_seed
from lab.analysis.text import count
from lab.records.store import Records

GRADIENT = Quantity("gradient RMS", log=True)
GRADIENT_EQUALS_EPSILON, NO_BLOCKS, POWER_LAW = (
    "gradient = epsilon",
    "model of no blocks",
    "power law of the smaller sizes",
)
BEST_LOSS, BEST_LR = Quantity("best held-out loss", "nats/token"), Quantity("best peak learning rate", log=True)
LABELS_OF_LRS = 5.5  # room for them, in multiples of the size of text
BLOCKLESS_DASHES = (0, (3, 1.5, 1, 1.5))


@figure("loss_against_setting")
def loss_against_setting(records: Records, runs: pd.DataFrame) -> Sheet:
    """Final loss against a setting of the recipe, one line per learning rate.

    Lines are means over seeds. The flatter and the closer together they are, the less the setting and the learning rate
    matter.
    """
    swept = swept_setting(records.runs, runs)
    if swept is None:
        raise NothingToDrawError("nothing to draw: no numeric setting, or more than one, has three values or more")
    depth = swept.runs["id"].map(depths(records.runs))
    blockless = (depth == 0) & bool((depth > 0).any())  # where no run has a block these are the curves themselves
    shown, without_blocks = swept.runs[~blockless], swept.runs[blockless]
    line = "lr" if shown["lr"].nunique() > 1 else "size"
    shades = style.shades(shown[line], style.LR_SHADES if line == "lr" else style.SIZE_SHADES)
    gradients = late(records, "grad_rms", "block0.mlp_up") if swept.key == EPSILON else pd.Series(dtype=float)
    shown = shown.assign(gradient=shown["id"].map(gradients).astype(float))
    values = {"capped": FINAL_LOSS} | ({"gradient": GRADIENT} if shown["gradient"].notna().any() else {})
    shown["title"] = shown["rest"] + (", " + shown["size"].map(count) if line == "lr" else "")
    facet_runs = list(shown.groupby("title", sort=False))
    columns = layout.columns_for(len(facet_runs))
    sheet = Sheet(columns, [13.0] * -(-len(facet_runs) // columns) * len(values))
    first: dict[str, Axes] = {}
    for index, (title, facet) in enumerate(facet_runs):
        for below, (value, quantity) in enumerate(values.items()):
            axes = sheet.panel(index // columns * len(values) + below, index % columns, sharey=first.get(value))
            first.setdefault(value, axes)
            _setting_panel(axes, facet, shown, swept, line, shades, value, quantity)
            axes.tick_params(labelleft=index % columns == 0)
            if index % columns == 0:
                axes.set_ylabel("final held-out loss\n(nats/token)" if value == "capped" else "gradient RMS")
        panels.title(sheet.figure.axes[-len(values)], str(title))
    for axes in sheet.figure.axes[:: len(values)]:
        panels.references(axes, runs)
        if len(without_blocks):
            level = axes.axhline(
                without_blocks["capped"].mean(), color=style.INK, linewidth=0.9, linestyle=BLOCKLESS_DASHES
            )
            level.set_label(NO_BLOCKS)
            marks.name(level, NO_BLOCKS)
        scales.loss_axis(axes, runs, runs["capped"], axes.get_ylabel())
    if "gradient" in first:
        _gradients(sheet, first["gradient"], shown)
    if (shown["setting"] == 0).any():
        sheet.note("A value of zero stands at the left edge, joined to nothing, since the axis is logarithmic.")
    keys = layout.line_keys(shades, "{:g}".format if line == "lr" else count)
    sheet.keys(("peak learning rate" if line == "lr" else "parameters", keys))
    return sheet


def _setting_panel(
    axes: Axes,
    facet: pd.DataFrame,
    shown: pd.DataFrame,
    swept: SweptSetting,
    line: str,
    shades: Mapping[Any, str],
    value: str,
    quantity: Quantity,
) -> None:
    """Draw a value against the setting; zero is joined to nothing."""
    position = scales.setting_axis(axes, shown["setting"], swept.name)
    for key, curve in facet.assign(position=position(facet["setting"])).groupby(line):
        for part in (curve[curve["setting"] == 0], curve[curve["setting"] > 0]):
            panels.over(axes, part, "position", value, shades[key], quantity)


def _gradients(sheet: Sheet, first: Axes, shown: pd.DataFrame) -> None:
    """Finish the panels of gradients, every second one."""
    scales.probe_axis(first)
    for axes in sheet.figure.axes[1::2]:
        panels.diagonal(axes, shown.loc[shown["setting"] > 0, "setting"], GRADIENT_EQUALS_EPSILON)
    sheet.note(
        "Below: the gradient of the first MLP layer, the root mean square over its elements, the mean over the last "
        "tenth of the run and the geometric mean over seeds."
    )
    sheet.explain(GRADIENT_EQUALS_EPSILON, "The dotted line is where the gradient equals epsilon.")


@figure("best_loss_with_size")
def best_loss_with_size(records: Records, runs: pd.DataFrame) -> Sheet:
    """Best loss over the learning rates, and the learning rate it takes, against size.

    Each seed has a best of its own; lines are means over seeds (of learning rates geometric ones). The flatter a line
    of learning rates, the better a learning rate found on a small model serves a large one. All axes are logarithmic.
    """
    blocks = runs["id"].map(depths(records.runs))
    best = runs[(blocks > 0) & (runs["lr"] == runs["best_lr"])]
    arms = [(str(arm), group) for arm, group in best.groupby("arm", sort=False) if group["size"].nunique() > 1]
    if not arms or runs["lr"].nunique() == 1:
        raise NothingToDrawError("nothing to draw: no arm has several sizes and learning rates")
    columns = layout.columns_for(2, gap=LABELS_OF_LRS)
    sheet = Sheet(columns, [17.0] * (2 // columns))
    left = sheet.panel(0, 0)
    right = sheet.panel(2 // columns - 1, columns - 1, gap=LABELS_OF_LRS * (columns - 1))
    for position, (_, best_of_arm) in enumerate(arms):
        look = panels.arm_look(position)
        for axes, value, quantity in ((left, "capped", BEST_LOSS), (right, "lr", BEST_LR)):
            _with_size(axes, best_of_arm, value, quantity, look)
        _extrapolate(left, best_of_arm, look)
    for axes in (left, right):
        scales.size_axis(axes, best["size"])
    scales.loss_axis(left, runs, best["capped"], "best held-out loss\n(nats/token)", bigram=False)
    scales.lr_ticks(right, runs["lr"], best["lr"])
    right.set_ylabel("best peak learning rate")
    sheet.keys(("", [panels.arm_key(arm, panels.arm_look(position)) for position, (arm, _) in enumerate(arms)]))
    sheet.explain(
        POWER_LAW,
        "A dashed line is a power law fitted to the losses of all sizes of an arm but the largest, and drawn on to it. "
        "The hollow mark at its end is the loss that it foretells.",
    )
    return sheet


def _with_size(axes: Axes, best: pd.DataFrame, value: str, quantity: Quantity, look: Mapping[str, Any]) -> None:
    """Draw a value of the best runs against size, with the band of the seeds."""
    groups: dict[Any, pd.DataFrame] = dict(list(best.groupby("size")))
    seeds = [group[value].to_numpy(dtype=float) for group in groups.values()]
    ends = [marks.band_ends(at_size) for at_size in seeds]
    band = [low for low, _ in ends], [high for _, high in ends]
    panels.band(axes, list(groups), *band, str(look["color"]), max(map(len, seeds)))
    (line,) = axes.plot(list(groups), [quantity.mean(at_size) for at_size in seeds], markersize=5, **look)
    texts = [
        hover.HoverText(best).point((best["size"] == size).to_numpy(), quantity, seeds_of_size)
        for size, seeds_of_size in zip(groups, seeds, strict=True)
    ]
    panels.say(axes, line, texts)


def _extrapolate(axes: Axes, best: pd.DataFrame, look: dict[str, Any]) -> None:
    """Fit a power law to all sizes but the largest and draw it up to that one; needs three sizes."""
    losses = best.groupby("size")["capped"].mean()
    if len(losses) < 3:
        return
    slope, intercept = np.polyfit(np.log(losses.index[:-1]), np.log(losses.iloc[:-1]), 1)
    fitted = np.exp(intercept + slope * np.log(losses.index.to_numpy(dtype=float)))
    (line,) = axes.plot(losses.index, fitted, color=look["color"], linestyle=style.DASHED, linewidth=1)
    marks.name(line, POWER_LAW)
    (end,) = axes.plot(losses.index[-1:], fitted[-1:], **look, linestyle="", fillstyle="none", markersize=7)
    text = f"{best['arm'].iloc[0]}\n{count(losses.index[-1])} parameters\nloss foretold {fitted[-1]:.4g} nats/token"
    panels.say(axes, end, [text])


@figure("learning_rate_sensitivity", over_window=True)
def learning_rate_sensitivity(records: Records, runs: pd.DataFrame, window: Window) -> Sheet:
    """Final loss against learning rate, and sensitivity.

    Top: the flatter a line, the less the choice of learning rate matters. Lines are means over seeds, and a loss above
    that at initialization is drawn there. The loss axis is logarithmic.

    Bottom: mean regret over the learning rates, so lower is less sensitive. The hollow marks are the part that comes
    from learning rates above the best one, instability; the distance between the two is under-training.
    """
    shown = facets(records.runs, runs)
    shades = style.shades(shown.values, style.SIZE_SHADES)
    columns = layout.columns_for(len(shown.panels))
    rows = -(-len(shown.panels) // columns)
    curves = by_curve(per_seed(runs, *window))
    if not has_sensitivity(curves):
        raise NothingToDrawError("nothing to draw: no curve has two learning rates")
    height, gap = panels.height_of_sensitivities(curves)
    sheet = Sheet(columns, [*[15.0] * rows, height])
    for index, (label, panel_runs) in enumerate(shown.panels):
        axes = sheet.panel(index // columns, index % columns, sharey=sheet.first)
        for value, curve in panel_runs.groupby(shown.line):
            panels.over(axes, curve, "lr", "capped", shades[value], FINAL_LOSS)
        panels.references(axes, runs)
        panels.title(axes, label)
        scales.lr_axis(axes, runs["lr"])
        scales.loss_axis(axes, runs, runs["capped"], "" if index % columns else "final held-out loss\n(nats/token)")
        axes.tick_params(labelleft=index % columns == 0)
    sheet.keys((shown.name, layout.line_keys(shades, shown.spell)))
    settings = pd.concat([panel_runs for _, panel_runs in shown.panels]).groupby("arm")[shown.line].first()
    colours = {} if shown.line == "size" else settings.map(shades).to_dict()
    bottom = sheet.panel(rows, 0, columns, gap)
    name = "LR sensitivity" if window == WINDOW else f"LR sensitivity, {window}"
    sheet.keys(("", panels.sensitivities(bottom, curves, runs, colours, name)), row=rows)
    return sheet
