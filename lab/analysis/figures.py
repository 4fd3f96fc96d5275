"""Figures of final losses: against learning rate, size and a setting; the other figures are filed from here too."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from lab.analysis import figures_scaling, figures_settings, figures_steps
from lab.analysis.gallery import FIGURES, fate_keys, figure
from lab.analysis.grouping import facets
from lab.analysis.rendering import panels, scales, style
from lab.analysis.sensitivity import by_curve, per_seed
from lab.records.store import Records

__all__ = ["FIGURES", "figures_scaling", "figures_settings", "figures_steps"]


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
    for place, (label, some) in enumerate(shown.panels):
        axes = sheet.panel(place // columns, place % columns, sharey=sheet.first)
        for value, curve in some.groupby(shown.line):
            panels.over(axes, curve, "lr", "capped", shades[value])
        panels.references(axes, runs)
        panels.title(axes, label)
        scales.lr_axis(axes, runs["lr"])
        scales.loss_axis(axes, runs, runs["capped"], "" if place % columns else "final held-out loss\n(nats/token)")
        axes.tick_params(labelleft=place % columns == 0)
    references = style.reference_keys(sheet.figure.axes[0])
    sheet.keys((shown.name, style.line_keys(shades, shown.spell)), ("", [*fate_keys(runs), *references]))
    curves = by_curve(per_seed(runs))
    settings = pd.concat([some for _, some in shown.panels]).groupby("arm")[shown.line].first()
    colours = {} if shown.line == "size" else settings.map(shades).to_dict()
    sheet.keys(("", panels.sensitivities(sheet.panel(rows, 0, columns), curves, colours)), row=rows)
    return sheet.figure
