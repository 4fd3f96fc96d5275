"""The figure of sources of a mixture: the gradient-norm spikes of batches that hold each, and those without it."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.events.scores import PER_STEPS
from lab.analysis.rendering import layout, panels, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.statistics import student_t
from lab.records.store import Records
from lab.studies.spikes.own_spikes import START
from lab.studies.spikes.sources import ALL, COUNTS, WHOLE, WITHOUT, ranked, source_traits


@figure("sources")
def sources(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient-norm spikes of batches that hold each source of a mixture of texts, and of runs without the source.

    A spike is a gradient norm above five times its running mean. On the left are runs of the whole mixture: a source
    that causes spikes has many in the batches that hold it. On the right that source is left out. Sources are in the
    order of the left panel; marks are means over seeds with their 95 % intervals.
    """
    traits = source_traits(records)
    traits = traits[traits.index.isin(runs["id"])]
    cards = records.runs.set_index("id").reindex(index=traits.index, columns=[WITHOUT])
    without = cards[WITHOUT]
    whole = traits[without == ALL]
    left_out = sorted(set(cards[WITHOUT].dropna()) - {ALL})
    if not left_out or whole.empty:
        raise NothingToDrawError("nothing to draw: no source of a mixture was left out of a run")
    sums = whole.sum()
    order = ranked({name: {key: float(sums[f"{name}.{key}"]) for key in COUNTS} for name in left_out})
    held = {0: _dot(whole["rate"], "all batches")} | {
        row: _dot(PER_STEPS * whole[f"{name}.spikes"] / whole[f"{name}.batches"].clip(lower=1), f"batches with {name}")
        for row, name in enumerate(order, 1)
    }
    rates = {0: _dot(whole["rate"], WHOLE)} | {
        row: _dot(traits.loc[without == name, "rate"], f"without {name}") for row, name in enumerate(order, 1)
    }
    names = [WHOLE, *order]
    columns = layout.columns_for(2, panels.NARROWEST_ROWS)
    sheet, ((batches,), (steps,)) = layout.facets(["", ""], [""], panels.rows_height(names), columns)
    panels.rows(batches, names, [(panels.arm_look(0), held)])
    panels.rows(steps, names, [(panels.arm_look(0), rates)])
    batches.set_xlabel(f"spikes in {PER_STEPS} batches\nthat hold the source")
    steps.set_xlabel(f"spikes in {PER_STEPS} steps\nwithout the source")
    panels.level(steps, float(whole["rate"].mean()), WHOLE, style.DASHED, upright=True)
    for axes in (batches, steps):
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    sheet.note(f"Spikes from step {START} on, in {len(whole)} runs of the whole mixture.")
    return sheet


def _dot(values: pd.Series, name: str) -> Dot:
    interval = student_t(values)
    return Dot(interval, f"{name}\n{interval} spikes")
