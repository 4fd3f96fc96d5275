"""Figures of spikes that nobody plants: stages, alarms, branches, remedies, sources, held-out losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.probe_values import TRAIN
from lab.analysis.rendering import layout, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.rendering.panels import Dot
from lab.analysis.spikes.trend import PER_STEPS
from lab.analysis.statistics import Interval, student_t
from lab.core.windows import MERGE, Numbers
from lab.records.store import Records
from labwatch.events.detectors import LABELS
from labwatch.events.score_panels import alarm_dots
from labwatch.events.scores import share_interval, summarize
from studies.claims import row_panels
from studies.claims.costs import HELD_OUT, NONE, spike_costs
from studies.claims.row_panels import RowPanel
from studies.spikes.figures import AROUND, PANEL_HEIGHT, final_change
from studies.spikes.figures import SPIKE as BEGINS
from studies.spikes.own_effects import CLEAN_LOSS, OWN_LOSS
from studies.spikes.own_spikes import (
    ALL,
    AT_ONCE,
    CHANGE_NAMES,
    COUNTS,
    DEEP,
    EMBEDDING,
    GRADIENT,
    KEYS,
    NO_REMEDY,
    SAME,
    START,
    UPDATE,
    WHOLE,
    WITHOUT,
    changes,
    find_spikes,
    measured,
    ranked,
    remedy_names,
    remedy_traits,
    removable,
    score_own,
    source_traits,
)
from studies.spikes.planted import change

# By the label of its axis, the lines of each panel: their names, and the probes and places that they show.
PANELS = {
    "loss\n(nats/token)": {"training": (TRAIN, ""), "held-out": (HELD_OUT, "")},
    "gradient RMS": {
        "embedding": (GRADIENT, EMBEDDING),
        "first MLP layer": (GRADIENT, DEEP),
        "head": (GRADIENT, "head"),
    },
    "update RMS": {"embedding": (UPDATE, EMBEDDING), "keys of block 0": (UPDATE, KEYS)},
}
LINES = list(dict.fromkeys(name for lines in PANELS.values() for name in lines))


@figure("own_spikes")
def typical_spikes(records: Records, runs: pd.DataFrame) -> Sheet:
    """Typical loss spikes that no bad data bring: of each arm the one of median size at its highest learning rate.

    From above: training loss and the loss on fixed held-out rows, then the root mean square of gradients and of Adam's
    updates, before the learning rate, of some tensors. A spike of a batch alone would leave the held-out loss as it is.
    """
    series = measured(records)
    shown = set(runs["id"])
    spikes = find_spikes({run: run_series for run, run_series in series.items() if run in shown})
    if not spikes:
        raise NothingToDrawError("nothing to draw: no run without bad data had a spike and was measured at every step")
    chosen = _typical(pd.DataFrame(spikes), runs).head(layout.columns_for(len(spikes)))
    sheet, facet_axes = layout.facets(chosen["title"].tolist(), list(PANELS), PANEL_HEIGHT, len(chosen), share_y=False)
    looks = {name: {"color": look["color"], "linewidth": 1} for name, look in panels.arm_looks(LINES).items()}
    for row, of_spike in zip(chosen.to_dict("records"), facet_axes, strict=True):
        step = int(row["step"])
        for axes, lines in zip(of_spike, PANELS.values(), strict=True):
            for name, place in lines.items():
                _draw(axes, series[str(row["run"])].get(place, np.empty(0)), step, looks[name])
            if axes is not of_spike[0]:
                scales.probe_axis(axes)
            panels.level(axes, float(step), BEGINS, (0, (1, 1)), upright=True)
            axes.set_xlim(step - AROUND, step + AROUND)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        of_spike[-1].set_xlabel("step")
    sheet.keys(("line", [Line2D([], [], label=name, **look) for name, look in looks.items()]))
    sheet.explain(BEGINS, "A dotted line is where the detector reports the spike.")
    sheet.note(f"{len(spikes)} spikes in all, in {len(series)} runs.")
    return sheet


def _typical(spikes: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Of each arm, at the highest learning rate at which it spikes, the spike of median size, with a ``title``."""
    table = spikes.merge(runs[["id", "arm", "lr", "seed"]], left_on="run", right_on="id")
    table = table[table["lr"] == table.groupby("arm")["lr"].transform("max")].sort_values("size", kind="stable")
    chosen = pd.DataFrame([of_arm.iloc[len(of_arm) // 2] for _, of_arm in table.groupby("arm", sort=False)])
    chosen = chosen.sort_values("size", ascending=False, kind="stable")
    return chosen.assign(title=chosen["arm"].astype(str))


def _draw(axes: Axes, value_n: Numbers, step: int, look: dict[str, Any]) -> None:
    first = max(0, step - AROUND)
    value_n = value_n[first : step + AROUND + 1]
    shown_n = np.isfinite(value_n) & (value_n > 0)
    axes.plot(first + np.flatnonzero(shown_n), value_n[shown_n], **look)


@figure("alarms_on_own_spikes")
def alarms_on_own_spikes(records: Records, runs: pd.DataFrame) -> Sheet:
    """How well each alarm finds loss spikes that no bad data bring: its hits, its lead, its false alarms.

    Runs are those at the highest learning rate. An alarm finds a spike if it begins from 40 steps before it to 20
    after. It is false if it begins far from any.
    """
    scores = score_own(records)
    scores = scores[scores["id"].isin(runs["id"])]
    summary = [score for score in summarize(scores) if score.found.n]
    if not summary:
        raise NothingToDrawError("nothing to draw: no run without bad data had a spike and was measured at every step")
    names = [LABELS[score.kind]["name"] for score in summary]
    sheet, (shares, leads, rates) = panels.row_panels(names, 3)
    for axes, (label, dots) in zip((shares, leads, rates), alarm_dots(summary, "spikes").items(), strict=True):
        shown = {row: dot for row, dot in dots.items() if dot.interval.n or axes is not leads}
        panels.rows(axes, names, [(panels.arm_look(0), shown)])
        axes.set_xlabel(label)
    row_panels.share_axis(shares, "share of spikes\nfound")
    panels.level(leads, 0.0, "as early as the loss", upright=True)
    rates.set_xlim(left=0)
    sheet.note(f"{summary[0].found.n} spikes; {summary[0].clean_steps:,} steps are far from any.")
    sheet.note("Bars of shares and rates are exact 95 % intervals, as if spikes and alarms were independent.")
    sheet.note("The mark of a lead is the median of the spikes found, and its bar joins the quartiles.")
    return sheet


REMOVED, AT_ONCE_NAME = "removed", "another at once"
CHANCE = "no spike by chance"


@figure("spike_causes")
def spike_causes(records: Records, runs: pd.DataFrame) -> Sheet:
    """How many loss spikes each change removes, made once, some updates before the spike began.

    Each run trains until its first spike, goes back to before it, makes one change, and goes on. Runs of a seed are one
    run up to there, so all changes are of the same spikes; without a change the spike comes again, bit for bit. Bars
    are exact 95 % intervals.
    """
    outcomes = changes(records)
    outcomes = outcomes[outcomes["id"].isin(runs["id"])]
    if outcomes.empty or SAME not in set(outcomes["change"]):
        raise NothingToDrawError("nothing to draw: no run branched from before a loss spike")
    of_change = {name: outcomes[outcomes["change"] == change] for change, name in CHANGE_NAMES.items()}
    of_change = {name: rows for name, rows in of_change.items() if len(rows)}
    names = sorted(of_change, key=lambda name: (name != CHANGE_NAMES[SAME], -of_change[name]["removed"].mean()))
    sheet, (shares, waits) = panels.row_panels(names, 2)
    looks = panels.arm_looks((REMOVED, AT_ONCE_NAME))
    columns_of = {REMOVED: "removed", AT_ONCE_NAME: "at_once"}
    groups = [
        (look, {row: _share(name, of_change[name][columns_of[kind]], kind) for row, name in enumerate(names)})
        for kind, look in looks.items()
    ]
    panels.rows(shares, names, groups)
    if (most := removable(records)) < 1:
        panels.level(shares, most, CHANCE, style.DASHED, upright=True)
        sheet.explain(CHANCE, "A dashed line is the share of equally long stretches without a spike, later in the run.")
    row_panels.share_axis(shares, "share of spikes")
    waited = {row: of_change[name]["wait"] for row, name in enumerate(names)}
    rows = {row: _wait(names[row], wait) for row, wait in waited.items() if np.isfinite(wait).any()}
    panels.rows(waits, names, [(looks[REMOVED], rows)])
    waits.set_xlabel("updates from the change\nto the next spike")
    waits.set_xlim(left=0)
    sheet.keys(("share", panels.arm_keys(looks, linestyle="")))
    spikes, back = len(of_change[CHANGE_NAMES[SAME]]), of_change[CHANGE_NAMES[SAME]]["back"]
    sheet.note(
        f"{spikes} spikes; changes were made {back.min():.0f} to {back.max():.0f} updates before. A spike is removed "
        f"if none begins up to {MERGE} updates after its step. One within {AT_ONCE} updates was made by the change."
    )
    sheet.note("Marks on the right are medians of the runs that spiked again, and their bars join the quartiles.")
    return sheet


def _share(name: str, hits: pd.Series, kind: str) -> Dot:
    share = share_interval(int(hits.sum()), len(hits))
    return Dot(share, f"{name}\n{kind}: {int(hits.sum())} of {len(hits)}\nshare {share:.2f}")


def _wait(name: str, wait: pd.Series) -> Dot:
    """Median and quartiles of the waits that ended."""
    ended = wait[np.isfinite(wait)]
    low, middle, high = (float(ended.quantile(share)) for share in (0.25, 0.5, 0.75))
    quartiles = f"median {middle:.0f} updates\nquartiles {low:.0f} to {high:.0f}"
    return Dot(
        Interval(middle, low, high, len(ended)), f"{name}\n{quartiles}\n{len(ended)} of {len(wait)} spiked again"
    )


OWN_SPIKES = "the model's own"
REMEDY_COSTS = (
    RowPanel("more", "spikes of a run\nafter the first", Quantity("spikes after the first")),
    RowPanel("lost", "updates gone back and\nbatches left out", Quantity("updates and batches lost")),
    final_change("change", "without a remedy"),
)


@figure("own_spike_remedies")
def own_spike_remedies(records: Records, runs: pd.DataFrame) -> Sheet:
    """Remedies for loss spikes that no bad data bring: the spikes that still follow the first, and what each costs.

    Runs of a seed are one run up to its first spike, save those with a shrunk embedding gradient. A spike that comes
    back after a run went back counts again. The change of the final loss is relative to the same seed without a remedy.
    """
    costs = _costs(records).merge(runs, on="id")
    own = costs[costs["spikes"] == OWN_SPIKES]
    if own["name"].nunique() < 2 or NO_REMEDY not in set(own["name"]):
        raise NothingToDrawError("nothing to draw: no remedy for a spike of a run's own is beside a run without one")
    costs = costs.assign(bad_batches=costs["spikes"])
    costs["change"] = change(costs, "final", NO_REMEDY).where(costs["name"] != NO_REMEDY)
    means = costs[costs["spikes"] == OWN_SPIKES].groupby("name")["more"].mean()
    names = sorted(means.index, key=lambda name: (name != NO_REMEDY, means[name]))
    kinds = sorted(costs["spikes"].unique(), key=lambda kind: (kind != OWN_SPIKES, kind))
    looks = panels.arm_looks(kinds)
    sheet = row_panels.grouped_rows(costs[costs["name"].isin(names)], REMEDY_COSTS, names, "spikes", looks)
    if len(kinds) > 1:
        sheet.keys(("spikes", panels.arm_keys(looks)))
        sheet.note("Runs with planted bad data have these once, and are of another length.")
    return sheet


def _costs(records: Records) -> pd.DataFrame:
    """``REMEDY_COSTS`` of runs with a remedy or without one: ``spikes`` is what these are of, ``name`` the remedy."""
    burst = records.runs.set_index("id").reindex(columns=["bad_batches"])["bad_batches"].fillna(NONE).astype(str)
    planted = spike_costs(records)
    planted = planted[burst.reindex(planted.index) != NONE]
    planted = planted.assign(more=(planted["spikes"] - 1).clip(lower=0), lost=planted["rewound"] + planted["skipped"])
    both = pd.concat([remedy_traits(records), planted])[["more", "lost", "final"]]
    names = pd.Series(remedy_names(records.runs.to_dict("records")), both.index, dtype=object)
    kinds = burst.reindex(both.index).str.replace("_", " ").replace(NONE, OWN_SPIKES)
    return both.assign(id=both.index, spikes=kinds, name=names).dropna(subset=["name"])


@figure("sources")
def sources(records: Records, runs: pd.DataFrame) -> Sheet:
    """Gradient-norm spikes of batches that hold each source of a mixture of texts, and of runs without the source.

    A spike is a gradient norm above five times its running mean. On the left are runs of the whole mixture: a source
    that causes spikes has many in the batches that hold it. On the right that source is left out. Sources are in the
    order of the left panel; marks are means over seeds with their 95 % intervals.
    """
    traits = source_traits(records)
    traits = traits[traits.index.isin(runs["id"])]
    without = records.runs.set_index("id").reindex(index=traits.index, columns=[WITHOUT])[WITHOUT]
    mixture = traits[without == ALL]
    left_out = sorted(set(without.dropna()) - {ALL})
    if not left_out or mixture.empty:
        raise NothingToDrawError("nothing to draw: no source of a mixture was left out of a run")
    sums = mixture.sum()
    order = ranked({name: {key: float(sums[f"{name}.{key}"]) for key in COUNTS} for name in left_out})
    held, rates = {0: _dot(mixture["rate"], "all batches")}, {0: _dot(mixture["rate"], WHOLE)}
    for row, name in enumerate(order, 1):
        of_batches = PER_STEPS * mixture[f"{name}.spikes"] / mixture[f"{name}.batches"].clip(lower=1)
        held[row] = _dot(of_batches, f"batches with {name}")
        rates[row] = _dot(traits.loc[without == name, "rate"], f"without {name}")
    names = [WHOLE, *order]
    sheet, (batches, steps) = panels.row_panels(names, 2)
    panels.rows(batches, names, [(panels.arm_look(0), held)])
    panels.rows(steps, names, [(panels.arm_look(0), rates)])
    batches.set_xlabel(f"spikes in {PER_STEPS} batches\nthat hold the source")
    steps.set_xlabel(f"spikes in {PER_STEPS} steps\nwithout the source")
    panels.level(steps, float(mixture["rate"].mean()), WHOLE, style.DASHED, upright=True)
    for axes in (batches, steps):
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    sheet.note(f"Spikes from step {START} on, in {len(mixture)} runs of the whole mixture.")
    return sheet


def _dot(values: pd.Series, name: str) -> Dot:
    interval = student_t(values)
    return Dot(interval, f"{name}\n{interval} spikes")


@figure("two_held_out_losses")
def two_held_out_losses(records: Records, runs: pd.DataFrame) -> Sheet:
    """Loss on clean held-out text against step, with the loss on held-out text of the corpus as it is below it.

    Where the second falls and the first does not, the model learns an artefact of the corpus. Lines are means over
    seeds, one per learning rate.
    """
    clean = ProbeSeries(CLEAN_LOSS, "", "clean text\n(nats/token)")
    return over_steps(records, runs, [clean, ProbeSeries(OWN_LOSS, "", "own text\n(nats/token)", "loss")])
