"""The card of a recipe as a figure."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from lab.analysis.rendering import layout, panels, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.stress.battery import FAILS, PASSES, WEAK
from lab.analysis.stress.lines import BETWEEN, Line, along

COLOURS = {PASSES: "#009E73", WEAK: "#E69F00", FAILS: "#D55E00"}
ENDS = {PASSES: (0.0, BETWEEN[0]), WEAK: BETWEEN, FAILS: (BETWEEN[1], 1.0)}
HEIGHT = 0.56  # of a strip, of its row


@layout.styled
def card_figure(lines: Sequence[Line], names: Sequence[str] = ()) -> Sheet:
    """A strip per test: where recipes pass, where they are weak and where they fail, with a dot for each seed.

    Each strip has a scale of its own. Seeds beyond its ends lie at the ends. Bars are 95 % intervals of the mean. A
    test that is not judged shows neither.
    """
    names = names or [f"{line.test.title}: {line.verdict}" for line in lines]
    sheet, [[axes]] = layout.facets([""], [""], panels.rows_height(names), 1, room=panels.rows_room(names))
    axes.grid(visible=False)
    for row, line in enumerate(lines):
        for zone, (left, right) in ENDS.items():
            place = ((left, row - HEIGHT / 2), right - left, HEIGHT)
            axes.add_patch(Rectangle(*place, facecolor=COLOURS[zone], alpha=0.25, linewidth=0))
        test, interval = line.test, line.interval
        if line.shown_values and interval.low <= interval.high:
            ends = [along(test, interval.low), along(test, interval.high)]
            axes.plot(ends, [row, row], color=style.INK, linewidth=1.2)
        seeds = [along(test, value) for value in line.shown_values]
        (dots,) = axes.plot(seeds, [row] * len(seeds), "o", color=style.INK, markersize=5, alpha=0.8)
        zones = "passes {}, fails {}".format(*line.edges)
        texts = [
            f"{test.title}\nseed {seed + 1} of {interval.n}\n{value:.3g} {test.unit}\n{zones}"
            for seed, value in enumerate(line.shown_values)
        ]
        panels.add_hover_texts(axes, dots, texts)
    axes.set_yticks(range(len(names)), list(map(panels.row_name, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([sum(ends) / 2 for ends in ENDS.values()], list(ENDS))
    return sheet
