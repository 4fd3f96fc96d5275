"""Coordinate checks judged and drawn: how the change of each hook point's tensor follows the width of the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from lab.analysis.rendering import style
from lab.analysis.statistics import Interval, student_t

# Half of the smallest power of the width by which a forgotten factor shows: see ``slopes``.
BOUND = 0.25


def slopes(changes: pd.DataFrame) -> pd.DataFrame:
    """How fast every coordinate grows with width, and whether that is too fast.

    A coordinate is the tensor at one hook point; its change is the root mean square of what the last update left
    minus what it was at initialization.  Its slope is that of log change against log width, by least squares, one per
    seed.  Under muP no change depends on the width, once that is large: slope 0.  A factor that is forgotten shows as
    a power of the width: 1 for a learning rate (updates of one sign add up over the fan-in), 1/2 for the standard
    deviation of the head (its starting weights meet a change that is aligned with them).  So the bound lies halfway
    between 0 and 1/2, and a coordinate ``holds`` where the whole 95 % interval of its slope over seeds lies at or below
    it: that nobody saw it grow is not enough.  A change that is nought or no number has no slope, and does not hold.
    Falling coordinates hold: whoever goes wider loses speed by them, but not stability.

    Args:
        changes: columns ``width``, ``seed``, ``step`` (updates made), ``coordinate``, ``change``.

    Returns:
        Columns ``coordinate``, ``slope`` (an ``Interval``), ``holds``; in the order of ``changes``.
    """
    last = changes[changes["step"] == changes["step"].max()]
    rows = []
    for coordinate, some in last.groupby("coordinate", sort=False):
        found = [_slope(run["width"].to_numpy(), run["change"].to_numpy()) for _, run in some.groupby("seed")]
        slope = student_t(found)
        rows.append({"coordinate": coordinate, "slope": slope, "holds": _holds(slope, len(found))})
    return pd.DataFrame(rows)


def _slope(width: np.ndarray, change: np.ndarray) -> float:
    if not (np.isfinite(change) & (change > 0)).all():
        return np.nan
    x = np.log(width) - np.log(width).mean()
    return float(x @ np.log(change) / (x @ x))


def _holds(slope: Interval, seeds: int) -> bool:
    return slope.n == seeds and slope.high <= BOUND


def means(changes: pd.DataFrame) -> pd.DataFrame:
    """Change after the last update, geometric mean over seeds: a row per coordinate, a column per width."""
    last = changes[changes["step"] == changes["step"].max()]
    with np.errstate(divide="ignore"):  # a change of nought has logarithm -inf, and mean nought
        logs = last.assign(change=np.log(last["change"]))
    table: pd.DataFrame = logs.pivot_table("change", "coordinate", "width", "mean", dropna=False, sort=False)
    return table.map(np.exp).sort_index(axis="columns")


def lines(changes: pd.DataFrame) -> Iterator[str]:
    """The table, line by line: change at every width, slope, verdict."""
    table, judged = means(changes), slopes(changes)
    wide = max(map(len, judged["coordinate"]))
    yield f"{'change of':{wide}}" + "".join(f"{width:>10}" for width in table) + "  slope in width"
    for coordinate, slope, holds in judged.itertuples(index=False):
        values = "".join(f"{value:10.3g}" for value in table.loc[coordinate])
        yield f"{coordinate:{wide}}{values}  {slope.bare}{'' if holds else f'  {_fault(slope)}'}"


def _fault(slope: Interval) -> str:
    if not slope.n or np.isnan(slope.high):
        return "NO NUMBER"
    return "GROWS" if slope.low > BOUND else "MAY GROW"


@style.styled
def figure(changes: pd.DataFrame) -> Figure:
    """Change against width, a panel per kind of coordinate, a line per block; dotted is growth at the bound."""
    table, widths = means(changes), np.unique(changes["width"])
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in table.index))
    places = list(dict.fromkeys(name.rpartition(".")[0] for name in table.index if "." in name))
    shades = style.shades(range(len(places)), style.SIZE_SHADES)
    columns = style.columns_for(len(kinds))
    sheet = style.Sheet(columns, [(1.6, 0.85)] * -(-len(kinds) // columns))
    for spot, kind in enumerate(kinds):
        axes = sheet.panel(spot // columns, spot % columns)
        mine = table[[name.rpartition(".")[2] == kind for name in table.index]]
        for name, values in mine.iterrows():
            place = str(name).rpartition(".")[0]
            colour = shades[places.index(place)] if place else style.INK
            axes.plot(widths, values, "o-", markersize=3.5, color=colour)
        limit = (widths / widths[0]) ** BOUND * float(mine.iloc[:, 0].max())
        axes.plot(widths, limit, ":", color=style.INK, linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(list(widths), [str(width) for width in widths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("width")
        axes.set_title(kind)
        axes.set_ylabel("" if spot % columns else "RMS change\nsince initialization")
    keys = style.line_keys(shades, lambda place: places[int(place)])
    bound = Line2D([], [], linestyle=":", color=style.INK, label=f"slope {BOUND:g}")
    sheet.keys(("", [*keys, bound]))
    return sheet.figure
