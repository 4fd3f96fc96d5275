"""Figures of final losses: against learning rate, size and a setting; the other figures are filed from here too."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from lab.analysis import drawing, figures_scaling, figures_settings, figures_steps, panels
from lab.analysis.arms import count
from lab.analysis.gallery import FIGURES, fate_keys, figure
from lab.analysis.ladder import ladder
from lab.analysis.sensitivity import by_curve, per_seed
from lab.store import Records

__all__ = ["FIGURES", "figures_scaling", "figures_settings", "figures_steps"]
# More arms than this along a setting are lines of one panel per size, no longer panels.
MOST_ARMS = 4


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
    found = ladder(records.runs, runs)
    climbs = found is not None and runs["arm"].nunique() > MOST_ARMS
    shown, title, line, spell = (
        (found.runs, found.key, "setting", "{:g}".format) if found and climbs else (runs, "parameters", "size", count)
    )
    faces = list(shown.groupby(["rest", "size"] if climbs else ["arm"], sort=False))
    columns = drawing.columns_for(len(faces))
    rows = -(-len(faces) // columns)
    lines = sum(1 + drawing.literal(arm, panels.KEY_LETTERS).count("\n") for arm in runs["arm"].unique())
    sheet = drawing.Sheet(columns, [(2.3, 0.85)] * rows + [(max(2.0, 0.17 * (lines + 3)), 0.5)], headroom=0.55)
    shades = drawing.shades(shown[line], drawing.SIZE_SHADES)
    first = None
    for place, (labels, some) in enumerate(faces):
        first_of_row = place % columns == 0
        axes = sheet.panel(place // columns, place % columns, sharey=first)
        first = first or axes
        for value, curve in some.groupby(line):
            panels.over(axes, curve, "lr", "capped", shades[value])
        panels.references(axes, runs)
        panels.title(axes, labels[0] if len(labels) == 1 else f"{labels[0]}, {count(labels[1])}")
        panels.lr_axis(axes, runs["lr"])
        if first_of_row:
            panels.loss_axis(axes, runs, runs["capped"], "final held-out loss\n(nats/token)")
        axes.tick_params(labelleft=first_of_row)
    keys = drawing.line_keys(shades, spell)
    sheet.keys((title, keys), ("", [*fate_keys(runs), *drawing.reference_keys(first)]))
    colours = {arm: shades[value] for arm, value in zip(shown["arm"], shown[line], strict=True)} if climbs else {}
    bottom = sheet.panel(rows, 0, columns)
    sheet.keys(("", panels.sensitivities(bottom, by_curve(per_seed(runs)), colours)), row=rows)
    return sheet.figure
