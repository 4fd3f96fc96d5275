"""The figure of what rounded output logits cost, beside the law that foretells it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import student_t
from lab.analysis.text import number
from lab.records.store import Records
from labwatch.events.logit_rounding import MANTISSA_BITS
from studies.wortsman.rounding import mean_rounding_cost, published, rounded_runs

HARM = Quantity("loss that rounding costs", "nats/token")
LAW, FACTOR, PUBLISHED = "the law", "a factor of three", "published run"
SMALLEST = 3e-3  # nats/token, below which seeds differ by more than rounding costs
BITS_SHADES = "viridis"


@figure("logit_rounding")
def logit_rounding(records: Records, runs: pd.DataFrame) -> Sheet:
    """Loss that rounding of output logits costs, against the prediction of a law.

    A dot is a learning rate and a number of mantissa bits. Its height is the final held-out loss above that of the same
    run in fp32, a mean over seeds; its place on the axis is the mean of the law. With s the distance between
    neighbouring numbers at the output logits, the law is log(sinh(s/2) / (s/2)), averaged over the tokens' log Z.
    Nothing is fitted.
    """
    table = rounded_runs(records)
    if table.empty:
        raise NothingToDrawError("nothing to draw: no rounded run has a twin in fp32 and recorded log_z_std")
    drawn = runs.merge(table, left_on="id", right_index=True)
    sheet, [[axes]] = layout.facets([""], ["loss that rounding costs\n(nats/token)"], 22.0)
    axes.set_yscale("log")
    shades = style.shades(drawn["mantissa_bits"], BITS_SHADES)
    left_out = 0
    for (_, _, bits), cell in drawn.groupby(["arm", "lr", "mantissa_bits"]):
        expected, harm = float(cell["law"].mean()), student_t(cell["harm"])
        if min(expected, harm.mean) < SMALLEST:
            left_out += 1
            continue
        of_law = f"the law {expected:.3g} nats/token"
        text = hover.text(cell, HARM, cell["harm"].to_numpy(), of_law)
        panels.draw_dots(axes, [expected], [Dot(harm, text)], marker="o", linestyle="", color=shades[bits])
    shown = _published(axes)
    _lines(axes)
    if left_out:
        dots = f"{left_out} dot{'s' * (left_out > 1)} at which rounding costs"
        sheet.note(f"Left out: {dots} less than {SMALLEST:g} nats.")
    sheet.explain(
        PUBLISHED,
        f"A cross is a published run (arXiv 2601.02031): {shown} of {len(published())} runs of 16 to 221 million "
        "parameters in bf16 lose enough to be drawn. Their cost is the loss above that of the run with a centred head, "
        "since none of them has a twin in fp32; each has one seed and 1e5 steps. Gains of norms stay at one in the "
        "small models, but not in the published ones.",
    )
    sheet.explain(FACTOR, "Dotted lines are three times the law, and a third of it.")
    sheet.explain(LAW, "The line is the law itself.")
    sheet.keys(("mantissa bits", layout.line_keys(shades)))
    return sheet


def _published(axes: Axes) -> int:
    """Draw the published runs that lose enough; returns how many."""
    table = published().rename(columns={"loss_minus_mu_centering": "harm"})
    law = mean_rounding_cost(table["mean_logit"], table["mean_logit_std_over_tokens"], MANTISSA_BITS["bf16"])
    table = table.assign(law=law)[(law >= SMALLEST / 3) & (table["harm"] >= SMALLEST)]
    (line,) = axes.plot(table["law"], table["harm"], "x", color=style.INK, markersize=6)
    marks.name(line, PUBLISHED)
    texts = [
        f"published, {row.size} parameters, bf16\nlearning rate {row.lr:g}\nloss above a centred head "
        f"{row.harm:g} nats/token\nthe law {row.law:.3g} nats/token"
        for row in table.itertuples()
    ]
    panels.add_hover_texts(axes, line, texts)
    return len(table)


def _lines(axes: Axes) -> None:
    """Draw the law, three times the law and a third of it, and set the axes."""
    values = np.concatenate([np.asarray(line.get_xydata(), dtype=float) for line in axes.get_lines()])
    values = values[np.isfinite(values).all(1) & (values > 0).all(1)]
    low, high = float(values.min()) / 1.5, float(values.max()) * 1.5
    for factor, name in ((1.0, LAW), (3.0, FACTOR), (1 / 3, FACTOR)):
        dashes = "-" if factor == 1 else (0, (1, 2))
        (line,) = axes.plot(
            [low, high], [factor * low, factor * high], color=style.INK, linewidth=0.9, linestyle=dashes
        )
        line.set_zorder(1)
        marks.name(line, name)
    scales.x_axis(axes, "loss by the law (nats/token)", [low, high], scales.log_ticks(low, high, 8), number)
    axes.set_ylim(axes.get_xlim())
    scales.y_ticks(axes)
