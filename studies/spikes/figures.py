"""Figures of planted bursts: responses, arms of the optimizer, repeated bursts, updates, loss scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

from lab.analysis.curves import EPSILON
from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.probe_values import places
from lab.analysis.rendering import layout, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.statistics import student_t
from lab.analysis.text import format_value
from lab.records.store import Records
from studies.claims import row_panels
from studies.claims.costs import HELD_OUT, NONE, first_onsets, named_costs, spike_costs
from studies.claims.row_panels import RowPanel
from studies.spikes.planted import (
    ALL_WEIGHTS,
    CLEAN,
    DESCENT,
    EARLIER,
    LAG,
    RECIPE,
    RMS,
    arm_costs,
    cells,
    change,
    factors_by_seed,
    repeated_costs,
)

PANEL_HEIGHT = 8.5  # in multiples of the size of text
AROUND = 60  # steps shown before and after a spike
BURST, SPIKE = "burst begins", "spike begins"


PEAK = RowPanel("peak", "peak above the usual\nheld-out loss (nats/token)", Quantity("peak excess loss", "nats/token"))
RECOVERY = RowPanel("recovery", "updates until it is back", Quantity("recovery", "updates"))


def final_change(column: str, reference: str) -> RowPanel:
    """A panel of final losses minus that of, or without, something."""
    quantity = Quantity(f"final loss minus that {reference}", "nats/token")
    return RowPanel(column, "change of the final\nloss (nats/token)", quantity, is_difference=True)


COSTS = (
    PEAK,
    RECOVERY,
    final_change("final", "without a response"),
    RowPanel("lost", "updates gone back and\nbatches left out", Quantity("updates and batches lost")),
)


@figure("responses")
def responses(records: Records, runs: pd.DataFrame) -> Sheet:
    """Costs of each response to a planted loss spike; the one with the lowest peak of the held-out loss is at the top.

    A burst is a stretch of bad batches injected into the data. Held-out losses are those of updates that were kept: a
    spike from which a run went back shows in the panel of lost updates and batches instead. The usual loss is that
    before the burst; a run is back when its loss is within 0.1 nats of it. The change of the final loss is relative to
    the same seed without a response.
    """
    costs = _costs(records, runs)
    sheet = leaderboard(costs, COSTS, NONE)
    spikes = spike_costs(records)
    alarms, steps = int(spikes["false_alarms"].sum()), int(spikes["clean_steps"].sum())
    sheet.note(f"Before bursts, and in runs without one, there were {alarms} false alarms in {steps:,} updates.")
    if early := sorted(costs.attrs["ended_early"]):
        sheet.note(f"All runs ended before their burst: {'; '.join(early)}.")
    note_of_lost(sheet, costs)
    return sheet


def leaderboard(costs: pd.DataFrame, panels_of: Sequence[RowPanel], reference: str) -> Sheet:
    """A panel for each cost, with a row for each ``name``, in rising order of the mean peak, and a mark per burst.

    The row of the reference is empty in panels of differences from it.
    """
    ranks = costs["name"].map(costs["peak"].replace(np.inf, np.nan).groupby(costs["name"]).mean()).fillna(np.inf)
    names = list(dict.fromkeys(costs["name"].loc[ranks.sort_values(kind="stable").index]))
    differences = [cost.column for cost in panels_of if cost.is_difference]
    costs = costs.assign(**{column: costs[column].where(costs["name"] != reference) for column in differences})
    looks = panels.arm_looks(sorted(costs["bad_batches"].unique()))
    sheet = row_panels.grouped_rows(costs, panels_of, names, "bad_batches", looks)
    sheet.keys(("burst", panels.arm_keys({burst.replace("_", " "): look for burst, look in looks.items()})))
    return sheet


def note_of_lost(sheet: Sheet, costs: pd.DataFrame) -> None:
    """Note in the caption how many runs have a non-finite peak."""
    if lost := int(np.isinf(costs["peak"]).sum()):
        sheet.note(f"{lost} of {len(costs)} runs had a non-finite held-out loss, and are left out of the peaks.")


def _costs(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """``spike_costs`` of runs with a burst, with ``name`` of the response, ``bad_batches`` and the paired difference.

    Its attribute ``ended_early`` holds the responses all of whose runs ended before the burst.

    Raises:
        NothingToDrawError: there are not two responses to a burst.
    """
    table = named_costs(records)
    responses = records.runs.set_index("id").reindex(columns=["response"])["response"]
    table = table[table["id"].map(responses) != EARLIER].merge(runs, on="id")
    planted = table[table["bad_batches"] != NONE]
    table = planted.dropna(subset=["peak"])
    if table["name"].nunique() < 2:
        raise NothingToDrawError("nothing to draw: no burst is in runs with two responses")
    table["final"] = change(table, "final", NONE)
    table["lost"] = table["rewound"] + table["skipped"]
    table.attrs["ended_early"] = set(planted["name"]) - set(table["name"])
    return table


# Rows of the anatomy: the label of each probe; those of ``BY_LAYER`` have a line for each layer.
SERIES = {
    "train_loss": "training loss\n(nats/token)",
    "val_loss": "held-out loss\n(nats/token)",
    "grad_rms": "gradient RMS",
    "update_rms": "update RMS",
}
BY_LAYER = ("grad_rms", "update_rms")


@figure("anatomy_of_a_spike")
def anatomy_of_a_spike(records: Records, runs: pd.DataFrame) -> Sheet:
    """The largest loss spike of each burst in runs without a response, on one axis of steps.

    From above: losses, then gradients and updates by layer. The latter are root mean squares over the elements of a
    tensor, and geometric means over the tensors of a layer. The update is Adam's, before learning rate and decay. The
    panels show which layers move before the loss does.
    """
    chosen = largest_spikes(records, runs)
    probes = [probe for probe in SERIES if (records.metrics["probe"] == probe).any()]
    if not set(probes) & set(BY_LAYER):
        raise NothingToDrawError("nothing to draw: no gradients or updates of layers are on record")
    chosen = chosen.head(layout.columns_for(len(chosen)))  # the largest spikes that fit on the page
    tensors = [where for probe in probes if probe in BY_LAYER for where in places(records, probe)]
    layers = list(dict.fromkeys(where.split(".")[0] for where in tensors))
    layers.sort(key=lambda layer: (layer != "embedding", not layer.startswith("block")))  # as in the forward pass
    shades = dict(zip(layers, style.shades(range(len(layers)), style.SIZE_SHADES).values(), strict=True))
    spikes = chosen.to_dict("records")
    titles = [f"{spike['bad_batches']}, seed {spike['seed']}".replace("_", " ") for spike in spikes]
    sheet, facet_axes = layout.facets(titles, [SERIES[probe] for probe in probes], PANEL_HEIGHT, share_y=False)
    for spike, of_spike in zip(spikes, facet_axes, strict=True):
        run, shown = str(spike["id"]), (float(spike["step"] - AROUND), float(spike["step"] + AROUND))
        for axes, probe in zip(of_spike, probes, strict=True):
            _anatomy(axes, records, run, probe, shown, shades)
            _events(axes, records, run, shown)
        of_spike[-1].set_xlim(*shown)
        of_spike[-1].xaxis.set_major_locator(MaxNLocator(3, integer=True))
        of_spike[-1].set_xlabel("step")
    sheet.keys(("layer", [Line2D([], [], color=shades[layer], label=layer) for layer in layers]))
    sheet.explain(BURST, "The dashed line marks the beginning of the burst, a stretch of injected bad batches.")
    sheet.explain(SPIKE, "A dotted line marks the beginning of a spike by the detector.")
    return sheet


def largest_spikes(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """The spike of largest loss of each burst in runs without a response: ``id``, ``step``, ``bad_batches``, ``seed``.

    Raises:
        NothingToDrawError: no run without a response spiked.
    """
    spikes = records.events[records.events["kind"] == "spike"].merge(runs, on="id")
    cards = records.runs.reindex(columns=["id", "bad_batches", "response"]).fillna(NONE)
    spikes = spikes.merge(cards, on="id")
    spikes = spikes[spikes["response"] == NONE].sort_values("value", ascending=False, kind="stable")
    if spikes.empty:
        raise NothingToDrawError("nothing to draw: no run without a response spiked")
    return spikes.drop_duplicates("bad_batches")


def _anatomy(
    axes: Axes, records: Records, run: str, probe: str, shown: tuple[float, float], shades: dict[str, str]
) -> None:
    metrics = records.metrics[(records.metrics["id"] == run) & (records.metrics["probe"] == probe)]
    metrics = metrics[metrics["step"].between(*shown) & np.isfinite(metrics["value"]) & (metrics["value"] > 0)]
    layers = metrics["where"].str.split(".").str[0] if probe in BY_LAYER else pd.Series("", metrics.index)
    for layer, lines in metrics.groupby(layers):
        logs = np.log(lines["value"]).groupby(lines["step"]).mean()
        axes.plot(logs.index, np.exp(logs), color=shades.get(str(layer), style.INK), linewidth=1)
    if len(metrics):
        scales.probe_axis(axes)


def _events(axes: Axes, records: Records, run: str, shown: tuple[float, float]) -> None:
    events = records.events[(records.events["id"] == run) & records.events["step"].between(*shown)]
    looks: dict[str, tuple[str, Any]] = {"burst": (BURST, style.DASHED), "spike": (SPIKE, (0, (1, 1)))}
    for kind, (name, dashes) in looks.items():
        for step in events.loc[events["kind"] == kind, "step"]:
            panels.level(axes, step, name, dashes, upright=True)


STATES = {
    (True, True): "weights and moments of the spike",
    (False, True): "earlier weights",
    (True, False): "earlier moments",
    (False, False): "earlier weights and moments",
}
BATCHES = {True: "those of the burst", False: "ordinary ones"}
FINAL = RowPanel("final", "final held-out loss\n(nats/token)", panels.FINAL_LOSS, begins_at_zero=False)
STATE_COSTS = (PEAK, FINAL)


@figure("state_and_data")
def state_and_data(records: Records, runs: pd.DataFrame) -> Sheet:
    """The cause of a loss spike: the batches, the weights, the optimizer's moments, or their combination.

    A run is trained in the usual way until a burst of bad batches begins. Then its weights, its optimizer's moments
    (running means of gradients and of their squares), or both are replaced by those of some updates earlier. It goes on
    with the batches of the burst or with ordinary ones. Each row is a state of the run; the distance between its two
    marks is the rise that the burst causes in it. If the rise is the same in every row, the data alone cause the spike.
    If it is smaller in a row, the state that this row replaced is part of the cause.
    """
    table = cells(records)
    table = table.assign(id=table.index).merge(runs, on="id")
    bursts = sorted(table["bad_batches"].unique())
    if not bursts:
        raise NothingToDrawError("nothing to draw: no run went back to an earlier state at a burst")
    states = [STATES[kept] for kept in zip(table["weights"], table["moments"], strict=True)]
    table = table.assign(name=states, batches=table["data"].map(BATCHES))
    looks = panels.arm_looks(BATCHES.values())
    names = list(STATES.values())
    shown = [(burst, cost) for burst in bursts for cost in STATE_COSTS]
    titles = [f"burst of {burst}".replace("_", " ") for burst, _ in shown]
    columns = layout.columns_for(len(STATE_COSTS), panels.NARROWEST_ROWS)
    sheet, facet_axes = layout.facets(titles, [""], panels.rows_height(names), columns)
    for (burst, cost), (axes,) in zip(shown, facet_axes, strict=True):
        row_panels.row_panel(axes, table[table["bad_batches"] == burst], cost, names, "batches", looks)
    sheet.keys(("batches", panels.arm_keys(looks)))
    for sentence in _factors(records):
        sheet.note(sentence)
    note_of_lost(sheet, table)
    return sheet


def _factors(records: Records) -> Iterator[str]:
    """Yield a sentence for each burst: its rise of the peak, and how much larger this is than in the other states."""
    by_seed = factors_by_seed(records, "peak")
    for burst, seeds in by_seed.groupby(level=0):
        own, *others = (student_t(seeds[name]) for name in ("data", "weights", "moments", "state"))
        yield (
            f"{str(burst).replace('_', ' ').capitalize()} add {own:±} nats/token to the peak in the state of the "
            f"spike. That is more than with earlier weights by {others[0]:±}, than with earlier moments by "
            f"{others[1]:±}, and than with both by {others[2]:±}; a negative number means less."
        )


ARM_COSTS = (
    PEAK,
    RowPanel(
        "peak_change",
        "change of that peak\n(nats/token)",
        Quantity("peak excess loss minus that of the recipe", "nats/token"),
        is_difference=True,
    ),
    RECOVERY,
    final_change("final_change", "of the recipe"),
)


@figure("spike_arms")
def spike_arms(records: Records, runs: pd.DataFrame) -> Sheet:
    """Costs of a planted loss spike for each arm; the arm with the lowest peak of the held-out loss is at the top.

    A burst is a stretch of bad batches injected into the data. An arm is named by the settings in which it differs from
    the default recipe. The usual loss is that before the burst; a run is back when its loss is within 0.1 nats of it.
    Changes are relative to the recipe with the same burst and seed: left of the line the arm does better.
    """
    costs = arm_costs(records).merge(runs, on="id").dropna(subset=["peak"])
    if costs["name"].nunique() < 2 or RECIPE not in set(costs["name"]):
        raise NothingToDrawError("nothing to draw: no burst is in runs of the recipe and of another arm")
    changes = {f"{column}_change": change(costs, column, RECIPE) for column in ("peak", "final")}
    costs = costs.assign(**changes)
    sheet = leaderboard(costs, ARM_COSTS, RECIPE)
    note_of_lost(sheet, costs)
    return sheet


BURST_COLUMNS = (
    RowPanel(
        "change",
        "final loss above\nthat without a burst\n(nats/token)",
        Quantity("final loss minus that without a burst", "nats/token"),
        is_difference=True,
    ),
    PEAK._replace(label="largest peak above\nthe usual held-out\nloss (nats/token)"),
)


@figure("repeated_bursts")
def repeated_bursts(records: Records, runs: pd.DataFrame) -> Sheet:
    """Final loss and largest peak by the number of bursts, a mark per learning rate.

    A burst is a stretch of bad batches injected into the data. The final loss is relative to the longest run of the
    same learning rate and seed without a burst. Lasting damage is the excess of many bursts over both the last of them
    alone and a run that is shorter by as many batches.
    """
    costs = repeated_costs(records).merge(runs, on="id")
    costs = costs.assign(change=change(costs, "final", CLEAN, ("size", "lr", "seed")))
    costs = costs.sort_values(["number", "name"], kind="stable")
    if costs["change"].isna().all():
        raise NothingToDrawError("nothing to draw: no burst comes several times beside runs without one")
    names = [name for name in dict.fromkeys(costs["name"]) if name != CLEAN]
    shades = style.shades(costs["lr"], style.LR_SHADES)
    looks = {lr: {"color": shade, "marker": "o"} for lr, shade in shades.items()}
    sheet = row_panels.grouped_rows(costs, BURST_COLUMNS, names, "lr", looks)
    sheet.keys(("peak learning rate", layout.line_keys(shades)))
    return sheet


# Steps shown before the burst begins, and after it.
BEFORE, AFTER = 30, 60
LARGE_SHARE, MEAN = "update_large", "mean over tensors"
BATCH = "batch_size"
UNCORRELATED = "uncorrelated"
ROWS = (
    ProbeSeries(HELD_OUT, "", "held-out loss\n(nats/token)"),
    ProbeSeries(RMS, MEAN, "update RMS"),
    ProbeSeries(LARGE_SHARE, MEAN, "share of entries\nabove 0.8", "linear"),
    ProbeSeries(DESCENT, ALL_WEIGHTS, "cosine with\nthe descent", "linear"),
    ProbeSeries(LAG, ALL_WEIGHTS, "cosine with the\nlast gradient", "linear"),
)


@figure("updates_and_descent")
def updates_and_descent(records: Records, runs: pd.DataFrame) -> Sheet:
    """Updates around a planted loss spike, on one axis of steps, one line per batch size.

    The first panel is the held-out loss before each update. Then come the root mean square of the update and the share
    of its entries above 0.8, both means over tensors. Below is the cosine of the update with the steepest descent of
    the held-out loss, which is positive for an update that lowers this loss. The last panel is the cosine of the
    gradient with that of the step before. The update is Adam's, before learning rate and decay. Lines are means over
    seeds.
    """
    onsets = first_onsets(records)
    around = _around(records, onsets)
    cards = records.runs.set_index("id").reindex(columns=["bad_batches", "response", BATCH, EPSILON])
    met = runs[runs["id"].isin(onsets.index) & runs["id"].map(cards["response"]).fillna(NONE).eq(NONE)]
    met = met[met["lr"] == met["lr"].max()]
    met = met.join(cards[["bad_batches", BATCH, EPSILON]], on="id").sort_values(["bad_batches", EPSILON, BATCH])
    bursts = met["bad_batches"].astype(str).str.replace("_", " ")
    titles = bursts + ", epsilon " + met[EPSILON].map(format_value) if met[EPSILON].nunique() > 1 else bursts
    met = met.assign(panel=titles, line=met[BATCH])
    sheet = over_steps(around, met, ROWS, "sequences of a batch")
    onset = float(onsets[met["id"]].median())
    for axes in sheet.figure.axes:
        axes.set_xlim(onset - BEFORE, onset + AFTER)
        axes.xaxis.set_major_locator(FixedLocator([onset, onset + AFTER / 2, onset + AFTER]))
        panels.level(axes, onset, BURST, style.DASHED, upright=True)
        if any((np.asarray(line.get_ydata()) < 0).any() for line in axes.lines[:-1]):
            panels.level(axes, 0.0, UNCORRELATED)
    sheet.explain(BURST, "The dashed line marks the beginning of the burst, a stretch of injected bad batches.")
    return sheet


def _around(records: Records, onsets: pd.Series) -> Records:
    """The records near the onsets, with means over tensors.

    Raises:
        NothingToDrawError: no run with a burst recorded the cosines.
    """
    metrics = records.metrics[records.metrics["id"].isin(onsets.index)]
    if not {DESCENT, LAG} <= set(metrics["probe"]):
        raise NothingToDrawError(f"nothing to draw: no run has a burst and recorded {DESCENT} and {LAG}")
    metrics = metrics[(metrics["step"] - metrics["id"].map(onsets)).between(-BEFORE, AFTER)]
    of_tensors = metrics[metrics["probe"].isin([RMS, LARGE_SHARE])]
    means = of_tensors.groupby(["id", "step", "probe"], observed=True)["value"].mean().reset_index()
    return records._replace(metrics=pd.concat([metrics, means.assign(where=MEAN)]))


@figure("loss_scale_over_steps")
def loss_scale_over_steps(records: Records, runs: pd.DataFrame) -> Sheet:
    """Loss scale against step, with the training loss below it.

    The scale falls at each gradient that overflows, whose update is left out, and rises after many that do not. Lines
    are means over seeds (geometric for scales), one per learning rate.
    """
    loss = ProbeSeries("train_loss", None, "training loss\n(nats/token)", "loss")
    return over_steps(records, runs, [ProbeSeries("loss_scale", "", "loss scale"), loss])
