"""Figures of loss spikes: what each response to them cost, and the anatomy of single ones."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.events.costs import NONE, named_costs, spike_costs
from lab.analysis.probe_values import places
from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.statistics import Interval, student_t
from lab.records.store import Records
from lab.studies.spikes.state_and_data import EARLIER, MEASURES, cells, factors_by_seed

ROW_LABELS, ROW_HEIGHT = 10.0, 2.2  # room for names of responses, and height of a row, in multiples of the size of text
PANEL_HEIGHT = 8.5
AROUND = 60  # steps shown before and after a spike
BURST, SPIKE = "burst begins", "spike begins"


class Cost(NamedTuple):
    """A panel of the leaderboard; ``is_difference`` shows the value minus that of the same seed without a response."""

    column: str
    label: str
    quantity: Quantity
    is_difference: bool = False


PEAK = Cost("peak", "peak above the usual\nheld-out loss (nats/token)", Quantity("peak excess loss", "nats/token"))
RECOVERY = Cost("recovery", "updates until it is back", Quantity("recovery", "updates"))
COSTS = (
    PEAK,
    RECOVERY,
    Cost(
        "final",
        "change of the final\nloss (nats/token)",
        Quantity("final loss minus that without a response", "nats/token"),
        is_difference=True,
    ),
    Cost("lost", "updates gone back and\nbatches left out", Quantity("updates and batches lost")),
)


@figure("responses")
def responses(records: Records, runs: pd.DataFrame) -> Sheet:
    """What each response to a planted loss spike costs, the lowest peak of the held-out loss at the top.

    Held-out losses are those of the updates that count: a spike that a run went back from is not in them, but in the
    panel of updates and batches lost. The usual loss is that before the burst, and a run is back when it is within 0.1
    nats of it. The change of the final loss is from that of the same seed without a response.
    """
    costs = _costs(records, runs)
    sheet = leaderboard(costs, COSTS, NONE)
    sheet.note(_alarms(spike_costs(records)))
    if early := sorted(costs.attrs["ended_early"]):
        sheet.note(f"All runs ended before their burst: {'; '.join(early)}.")
    note_of_lost(sheet, costs)
    return sheet


def leaderboard(costs: pd.DataFrame, panels_of: Sequence[Cost], reference: str) -> Sheet:
    """A panel for each cost: a row for each ``name``, the lowest mean peak over bursts at the top, a mark per burst.

    The row of the reference is empty in panels of differences from it.
    """
    ranks = costs["name"].map(costs["peak"].replace(np.inf, np.nan).groupby(costs["name"]).mean()).fillna(np.inf)
    names = list(dict.fromkeys(costs["name"].loc[ranks.sort_values(kind="stable").index]))
    bursts = sorted(costs["burst"].unique())
    columns = layout.columns_for(2, gap=ROW_LABELS)
    sheet = Sheet(columns, [ROW_HEIGHT * (len(names) + 0.5)] * (len(panels_of) // columns))
    for index, cost in enumerate(panels_of):
        column = index % columns
        axes = sheet.panel(index // columns, column, gap=ROW_LABELS if column == 0 else 0.0)
        for position, burst in enumerate(bursts):
            offset = 0.3 * (position - (len(bursts) - 1) / 2)
            shown = costs[(costs["burst"] == burst) & ~(cost.is_difference & (costs["name"] == reference))]
            _leaderboard(axes, shown, names, cost, position, offset)
        axes.set_yticks(range(len(names)), [textwrap.fill(name, 24) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(labelleft=column == 0)
        axes.set_xlabel(cost.label)
        axes.locator_params(axis="x", nbins=3 if cost.is_difference else 4)
        if cost.is_difference:
            marks.name(axes.axvline(0.0, color=style.INK, linewidth=0.9, zorder=1), "no difference")
        else:
            axes.set_xlim(left=0)
    sheet.keys(
        ("burst", [panels.arm_key(burst.replace("_", " "), panels.arm_look(n)) for n, burst in enumerate(bursts)])
    )
    return sheet


def note_of_lost(sheet: Sheet, costs: pd.DataFrame) -> None:
    """Say how many runs have a non-finite peak."""
    if lost := int(np.isinf(costs["peak"]).sum()):
        sheet.note(f"{lost} of {len(costs)} runs had a non-finite held-out loss, and are left out of the peaks.")


def _costs(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """``spike_costs`` of the runs that met a burst, with ``name`` of the response, ``burst`` and the paired difference.

    Its attribute ``ended_early`` holds the responses of which no run met one.

    Raises:
        NothingToDrawError: there are not two responses to a burst.
    """
    table = named_costs(records)
    responses = records.runs.set_index("id").reindex(columns=["response"])["response"]
    table = table[table["id"].map(responses) != EARLIER].merge(runs, on="id")
    planted = table[table["burst"] != NONE]
    table = planted.dropna(subset=["peak"])
    if table["name"].nunique() < 2:
        raise NothingToDrawError("nothing to draw: no burst was met by two responses")
    table["final"] = change(table, "final", NONE)
    table["lost"] = table["rewound"] + table["skipped"]
    table.attrs["ended_early"] = set(planted["name"]) - set(table["name"])
    return table


def change(costs: pd.DataFrame, column: str, reference: str) -> pd.Series:
    """A cost minus that of the same burst, size, learning rate and seed in the runs of this name."""
    pair = ["burst", "size", "lr", "seed"]
    usual = costs[costs["name"] == reference].drop_duplicates(pair).set_index(pair)[column]
    return costs[column] - pd.Series([usual.get(tuple(key), np.nan) for key in costs[pair].to_numpy()], costs.index)


def _leaderboard(
    axes: Axes, costs: pd.DataFrame, names: Sequence[str], cost: Cost, position: int, offset: float
) -> None:
    """A dot and an interval for each response to one burst."""
    values, rows, texts = list[Interval](), list[float](), list[str]()
    for row, name in enumerate(names):
        of_name = costs[costs["name"] == name]
        numbers = of_name[cost.column].replace([np.inf, -np.inf], np.nan).dropna().to_numpy(dtype=float)
        if len(numbers):
            values.append(student_t(numbers))
            rows.append(row + offset)
            texts.append(hover.HoverText(of_name).point(np.ones(len(of_name), dtype=bool), cost.quantity, numbers))
    if values:
        panels.draw_intervals(axes, rows, values, texts, sideways=True, linestyle="", **panels.arm_look(position))


def _alarms(costs: pd.DataFrame) -> str:
    """A sentence on the spikes that began where no burst was."""
    alarms, steps = int(costs["false_alarms"].sum()), int(costs["clean_steps"].sum())
    return f"Before bursts, and in runs without one, there were {alarms} false alarms in {steps:,} updates."


class Series(NamedTuple):
    """A row of the anatomy: a probe, its label, and whether it has a line for each layer."""

    probe: str
    label: str
    by_layer: bool = True


SERIES = (
    Series("train_loss", "training loss\n(nats/token)", by_layer=False),
    Series("val_loss", "held-out loss\n(nats/token)", by_layer=False),
    Series("grad_rms", "gradient RMS"),
    Series("update_rms", "update RMS"),
)


@figure("anatomy_of_a_spike")
def anatomy_of_a_spike(records: Records, runs: pd.DataFrame) -> Sheet:
    """The largest loss spike of each burst in a run that went on, on one axis of steps.

    From above: losses, then gradients and updates by layer, each a root mean square over the elements of a tensor and a
    geometric mean over the tensors of the layer. The update is Adam's, before learning rate and decay. The panels show
    which layers move before the loss does.
    """
    chosen = _largest_spikes(records, runs)
    series = [row for row in SERIES if (records.metrics["probe"] == row.probe).any()]
    if not any(row.by_layer for row in series):
        raise NothingToDrawError("nothing to draw: no gradients or updates of layers are on record")
    columns = layout.columns_for(len(chosen))
    chosen = chosen.head(columns)  # on a narrow page the largest
    sheet = Sheet(columns, [PANEL_HEIGHT] * len(series))
    tensors = [where for row in series if row.by_layer for where in places(records, row.probe)]
    layers = list(dict.fromkeys(where.split(".")[0] for where in tensors))
    layers.sort(key=lambda layer: (layer != "embedding", not layer.startswith("block")))  # as in the forward pass
    shades = dict(zip(layers, style.shades(pd.Series(range(len(layers))), style.SIZE_SHADES).values(), strict=True))
    for column, spike in enumerate(chosen.to_dict("records")):
        run, shown = str(spike["id"]), (float(spike["step"] - AROUND), float(spike["step"] + AROUND))
        for row, one in enumerate(series):
            axes = sheet.panel(row, column, sharex=sheet.figure.axes[-row] if row else None)
            _anatomy(axes, records, run, one, shown, shades)
            _events(axes, records, run, shown)
            axes.set_xlim(*shown)
            axes.xaxis.set_major_locator(MaxNLocator(4, prune="both"))  # the next panel begins where this one ends
            axes.set_ylabel(one.label if column == 0 else "")
            axes.tick_params(labelbottom=row == len(series) - 1)
            axes.set_xlabel("step" if row == len(series) - 1 else "")
        panels.title(sheet.figure.axes[-len(series)], f"{spike['burst']}, seed {spike['seed']}".replace("_", " "))
    sheet.keys(("layer", [Line2D([], [], color=shades[layer], label=layer) for layer in layers]))
    sheet.explain(BURST, "A dashed line is where the burst begins.")
    sheet.explain(SPIKE, "A dotted line is where the detector reports a spike.")
    return sheet


def _largest_spikes(records: Records, runs: pd.DataFrame) -> pd.DataFrame:
    """Of each burst the spike with the largest loss in runs without a response: ``id``, ``step``, ``burst``, ``seed``.

    Raises:
        NothingToDrawError: no run without a response spiked.
    """
    spikes = records.events[records.events["kind"] == "spike"].merge(runs, on="id")
    cards = records.runs.reindex(columns=["id", "burst", "response"]).fillna(NONE)
    spikes = spikes.merge(cards, on="id")
    spikes = spikes[spikes["response"] == NONE].sort_values("value", ascending=False, kind="stable")
    if spikes.empty:
        raise NothingToDrawError("nothing to draw: no run without a response spiked")
    return spikes.drop_duplicates("burst")


def _anatomy(
    axes: Axes, records: Records, run: str, series: Series, shown: tuple[float, float], shades: dict[str, str]
) -> None:
    metrics = records.metrics[(records.metrics["id"] == run) & (records.metrics["probe"] == series.probe)]
    metrics = metrics[metrics["step"].between(*shown) & np.isfinite(metrics["value"]) & (metrics["value"] > 0)]
    layers = metrics["where"].str.split(".").str[0] if series.by_layer else pd.Series("", metrics.index)
    for layer, lines in metrics.groupby(layers):
        logs = np.log(lines["value"]).groupby(lines["step"]).mean()
        axes.plot(logs.index, np.exp(logs), color=shades.get(str(layer), style.INK), linewidth=1)
    if len(metrics):
        scales.probe_axis(axes)


def _events(axes: Axes, records: Records, run: str, shown: tuple[float, float]) -> None:
    events = records.events[(records.events["id"] == run) & records.events["step"].between(*shown)]
    looks: dict[str, tuple[str, Any]] = {"burst": (BURST, style.DASHED), "spike": (SPIKE, (0, (1, 1)))}
    view = axes.get_ylim()
    for kind, (name, dashes) in looks.items():
        for step in events.loc[events["kind"] == kind, "step"]:
            (line,) = axes.plot([step, step], view, color=style.INK, linewidth=1.2, linestyle=dashes, zorder=1)
            marks.name(line, name)
    axes.set_ylim(view)


STATES = {
    (True, True): "weights and moments\nof the spike",
    (False, True): "earlier weights",
    (True, False): "earlier moments",
    (False, False): "earlier weights\nand moments",
}
BATCHES = {True: "those of the burst", False: "ordinary ones"}
STATE_LABELS, STATE_HEIGHT = 8.5, 3.2  # room for names of states, and height of a row, in multiples of the size of text
MEASURE_LABELS = {
    "peak": ("peak above the usual\nheld-out loss (nats/token)", Quantity("peak excess loss", "nats/token")),
    "final": ("final held-out loss\n(nats/token)", Quantity("final held-out loss", "nats/token")),
}


@figure("state_and_data")
def state_and_data(records: Records, runs: pd.DataFrame) -> Sheet:
    """What a loss spike belongs to: the batches, the weights, the optimizer's moments, or their combination.

    A run is trained in the usual way until a burst of bad batches begins. There its weights, its optimizer's moments
    (running means of gradients and of their squares), or both are replaced by those that it had some updates earlier,
    and it goes on with the batches of the burst or with ordinary ones. Each row is a state in which the batches are
    met. What the burst adds there is the distance between its two marks. If the burst adds as much in every row, the
    spike belongs to the data alone; if it adds less in a row, the spike belongs also to what that row replaced.
    """
    table = cells(records)
    table = table.assign(id=table.index).merge(runs, on="id")
    bursts = sorted(table["burst"].unique())
    if not bursts:
        raise NothingToDrawError("nothing to draw: no run went back to an earlier state at a burst")
    columns = layout.columns_for(len(bursts), gap=STATE_LABELS)
    bands = -(-len(bursts) // columns)
    sheet = Sheet(columns, [STATE_HEIGHT * len(STATES)] * (len(MEASURES) * bands))
    for number, burst in enumerate(bursts):
        band, column = divmod(number, columns)
        for index, measure in enumerate(MEASURES):
            axes = sheet.panel(band * len(MEASURES) + index, column, gap=0.0 if column else STATE_LABELS)
            _states(axes, table[table["burst"] == burst], measure)
            axes.tick_params(labelleft=column == 0)
            if index == 0:
                panels.title(axes, f"burst of {burst}".replace("_", " "))
    looks = [panels.arm_key(label, panels.arm_look(n)) for n, label in enumerate(BATCHES.values())]
    sheet.keys(("batches", looks))
    for sentence in _factors(records):
        sheet.note(sentence)
    note_of_lost(sheet, table)
    return sheet


def _states(axes: Axes, table: pd.DataFrame, measure: str) -> None:
    """A row for each state, with a mark and an interval for each kind of batches."""
    label, quantity = MEASURE_LABELS[measure]
    for position, (data, batches) in enumerate(BATCHES.items()):
        values, rows, texts = list[Interval](), list[float](), list[str]()
        for row, (weights, moments) in enumerate(STATES):
            is_cell = (table["weights"] == weights) & (table["moments"] == moments) & (table["data"] == data)
            of_cell = table[is_cell]
            numbers = of_cell[measure].replace([np.inf, -np.inf], np.nan).dropna().to_numpy(dtype=float)
            if len(numbers):
                state = STATES[weights, moments].replace("\n", " ")
                values.append(student_t(numbers))
                rows.append(row + 0.3 * (position - 0.5))
                everywhere = np.ones(len(of_cell), dtype=bool)
                texts.append(
                    hover.HoverText(of_cell).point(everywhere, quantity, numbers, state, f"batches: {batches}")
                )
        if values:
            panels.draw_intervals(axes, rows, values, texts, sideways=True, linestyle="", **panels.arm_look(position))
    axes.set_yticks(range(len(STATES)), list(STATES.values()))
    axes.set_ylim(len(STATES) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.locator_params(axis="x", nbins=4)


def _factors(records: Records) -> Iterator[str]:
    """Sentences for each burst: what it adds to the peak, and how much more that is than in the other states."""
    by_seed = factors_by_seed(records, "peak")
    for burst, seeds in by_seed.groupby(level=0):
        own, *others = (student_t(seeds[name]) for name in ("data", "weights", "moments", "state"))
        yield (
            f"{str(burst).replace('_', ' ').capitalize()} add {own.bare} nats/token to the peak in the state of the "
            f"spike. That is more than with earlier weights by {others[0].bare}, than with earlier moments by "
            f"{others[1].bare}, and than with both by {others[2].bare}; a negative number means less."
        )
