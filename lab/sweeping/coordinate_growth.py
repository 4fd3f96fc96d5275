"""Judge and draw coordinate checks: how the change at each hook point grows with the width or depth of the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lab.analysis.rendering import hover, layout, marks, panels, scales, style
from lab.analysis.rendering.layout import Sheet
from lab.analysis.statistics import Interval, student_t
from lab.analysis.text import number

# Half the smallest power of the width that a forgotten factor of the parametrization causes; see ``slopes``.
BOUND = 0.25
BOUND_NAME = f"slope {BOUND:g}"


def size_of(changes: pd.DataFrame) -> str:
    """The column of sizes that differ, ``width`` or ``depth``."""
    return "depth" if changes["depth"].nunique() > 1 else "width"


def slopes(changes: pd.DataFrame) -> pd.DataFrame:
    """Measure how fast every coordinate grows with width or depth, and judge whether that is too fast.

    A coordinate is the tensor at one hook point; its change is the RMS of its difference between initialization and
    the last update. Its slope, one per seed, is that of log change against log size by least squares. Under muP and
    at large width no change depends on the width: the slope is 0. A forgotten factor adds a power of the width. That of
    a learning rate adds 1, since updates of one sign add up over the fan-in. That of the standard deviation of the head
    adds 1/2, since its initial weights multiply a change aligned with them. In depth, branches without CompleteP's
    factor add up to a power of 1, since their changes are aligned (Dey et al. 2025, arXiv:2505.01618, table 1). The
    bound lies halfway between 0 and 1/2.

    A coordinate ``holds`` if the whole 95 % interval of its slope over seeds lies at or below the bound; a wide
    interval proves nothing, so it does not hold. A change of zero or NaN has no slope and does not hold. Coordinates
    that shrink hold: they slow large models down but do not destabilize them.

    Args:
        changes: columns ``width``, ``depth``, ``seed``, ``step`` (updates made), ``coordinate``, ``change``.

    Returns:
        Columns ``coordinate``, ``slope`` (an ``Interval``), ``holds``; in the order of ``changes``.
    """
    last, size = changes[changes["step"] == changes["step"].max()], size_of(changes)
    rows = []
    for coordinate, runs in last.groupby("coordinate", sort=False):
        of_seeds = [_slope(seed[size].to_numpy(), seed["change"].to_numpy()) for _, seed in runs.groupby("seed")]
        slope = student_t(of_seeds)
        rows.append({"coordinate": coordinate, "slope": slope, "holds": _holds(slope, len(of_seeds))})
    return pd.DataFrame(rows)


def _slope(size: np.ndarray, change: np.ndarray) -> float:
    if not (np.isfinite(change) & (change > 0)).all():
        return np.nan
    x = np.log(size) - np.log(size).mean()
    return float(x @ np.log(change) / (x @ x))


def _holds(slope: Interval, seeds: int) -> bool:
    return slope.n == seeds and slope.high <= BOUND


def means(changes: pd.DataFrame) -> pd.DataFrame:
    """Change after the last update as geometric mean over seeds: a row per coordinate, a column per size."""
    last = changes[changes["step"] == changes["step"].max()]
    with np.errstate(divide="ignore"):  # log 0 is -inf, and exp of that 0 again
        logs = last.assign(change=np.log(last["change"]))
    table: pd.DataFrame = logs.pivot_table("change", "coordinate", size_of(changes), "mean", dropna=False, sort=False)
    return table.map(np.exp).sort_index(axis="columns")


def lines(changes: pd.DataFrame) -> Iterator[str]:
    """Lines of a table for a terminal: change at every size, slope, and a verdict where the bound does not hold."""
    table, judged = means(changes), slopes(changes)
    longest = max(map(len, judged["coordinate"]))
    yield f"{'change of':{longest}}" + "".join(f"{size:>10}" for size in table) + f"  slope in {size_of(changes)}"
    for coordinate, slope, holds in judged.itertuples(index=False):
        values = "".join(f"{value:10.3g}" for value in table.loc[coordinate])
        yield f"{coordinate:{longest}}{values}  {slope.bare}{'' if holds else f'  {_fault(slope)}'}"


def _fault(slope: Interval) -> str:
    if not slope.n or np.isnan(slope.high):
        return "NO NUMBER"
    return "GROWS" if slope.low > BOUND else "MAY GROW"


@layout.styled
def figure(changes: pd.DataFrame) -> Sheet:
    """Change against width or depth.

    The change of a tensor at a hook point is the RMS of its difference between initialization and the last update, a
    geometric mean over seeds. A panel per kind of coordinate, a line per block.
    """
    table, size = means(changes), size_of(changes)
    sizes = np.unique(changes[size])
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in table.index))
    blocks = list(dict.fromkeys(name.rpartition(".")[0] for name in table.index if "." in name))
    shades = style.shades(range(len(blocks)), style.SIZE_SHADES)
    titles = [kind.replace("_", " ") for kind in kinds]
    sheet, facet_axes = layout.facets(titles, ["RMS change\nsince initialization"], 11.0)
    for kind, (axes,) in zip(kinds, facet_axes, strict=True):
        coordinates = table[[name.rpartition(".")[2] == kind for name in table.index]]
        for name in map(str, coordinates.index):
            block = name.rpartition(".")[0]
            _line(axes, changes, name, shades[blocks.index(block)] if block else style.INK)
        limit = (sizes / sizes[0]) ** BOUND * float(coordinates.iloc[:, 0].max())
        (line,) = axes.plot(sizes, limit, ":", color=style.INK, linewidth=1)
        marks.name(line, BOUND_NAME)
        scales.x_axis(axes, size, sizes, sizes, number)
    scales.probe_axis(sheet.figure.axes[0])
    sheet.keys(("", layout.line_keys(shades, lambda index: blocks[int(index)])))
    sheet.explain(BOUND_NAME, f"The dotted line is growth at the bound, the power {BOUND:g} of the {size}.")
    return sheet


def _line(axes: Axes, changes: pd.DataFrame, coordinate: str, colour: str) -> None:
    """Draw a coordinate, with the band of its seeds."""
    last = changes[(changes["step"] == changes["step"].max()) & (changes["coordinate"] == coordinate)]
    usable = last[np.isfinite(last["change"]) & (last["change"] > 0)]
    size = size_of(changes)
    by_size = {value: group["change"].to_numpy() for value, group in usable.groupby(size)}
    if not by_size:
        return
    quantity = hover.Quantity("RMS change since initialization", log=True)
    texts = [
        "\n".join([coordinate, f"{size} {value}", *quantity.lines(of_seeds), f"{len(of_seeds)} seeds"])
        for value, of_seeds in by_size.items()
    ]
    panels.mean_line(axes, list(by_size), list(by_size.values()), quantity, texts, color=colour)
