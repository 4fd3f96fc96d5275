"""Axes of figures: learning rates, losses, sizes and settings, all logarithmic, with ticks a reader can use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from lab.analysis.text import count

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def lr_axis(axes: Axes, lrs: Iterable[float]) -> None:
    """Logarithmic learning rates, ticks at decades, or at the learning rates themselves when they are few."""
    grid = sorted(set(lrs))
    axes.set_xscale("log")
    axes.set_xlim(grid[0] / 1.4, grid[-1] * 1.4)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_power)
    if len(grid) < 4:
        axes.set_xticks(grid, [f"{lr:g}" for lr in grid])
    axes.set_xlabel("peak learning rate")


def _power(value: float, _: float) -> str:
    """A decade as a power of ten, in letters: set as mathematics it would take much longer."""
    return "10" + f"{np.log10(value):.0f}".translate(RAISED)


def lr_ticks(axes: Axes, lrs: Iterable[float], shown: pd.Series) -> None:
    """Logarithmic learning rates upwards, a tick at each of the grid as far as some are shown."""
    grid = [lr for lr in sorted(set(lrs)) if shown.min() / 4 < lr < shown.max() * 4]
    axes.set_yscale("log")
    axes.set_ylim(grid[0] / 1.3, grid[-1] * 1.3)
    axes.set_yticks(grid, [f"{lr:g}" for lr in grid])
    axes.yaxis.set_minor_locator(NullLocator())


def loss_axis(axes: Axes, runs: pd.DataFrame, losses: pd.Series, what: str, bigram: bool = True) -> None:
    """Logarithmic loss, from the lowest to the highest of ``losses`` and bigram losses; never beyond initialization."""
    shown = [*losses, *(runs["loss_bigram"] if bigram else [])]
    low, high = float(np.nanmin(shown)), min(float(np.nanmax(shown)), float(runs["loss_at_init"].max()))
    axes.set_yscale("log")
    axes.set_ylim(low / 1.04, high * 1.06)
    digits = (
        (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high > 1.5 * low else np.arange(1, 10, 0.1 if high > 1.1 * low else 0.02)
    )
    ticks = [digit * 10.0**power for power in range(-3, 4) for digit in digits]
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low / 1.04 <= tick <= high * 1.06]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(what)


def probe_axis(axes: Axes, scale: str = "log") -> None:
    """Whatever a probe heard, on all axes that share this one.

    A logarithmic axis spans a factor of four or more, a linear one begins at zero: else noise would look like change.
    """
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if scale != "log":
        return
    low, high = axes.get_ylim()
    wider = max(1.0, 2.0 / float(np.sqrt(high / low)))
    low, high = low / wider, high * wider
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(_power)
    if high < 50 * low:
        ticks = [digit * 10.0**power for power in range(-20, 20) for digit in (1, 2, 5)]
        axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def size_axis(axes: Axes, sizes: Iterable[float]) -> None:
    """Logarithmic parameter counts; of sizes closer together than their labels some stay bare."""
    known = sorted(set(sizes))
    reach = float(np.log(known[-1] / known[0])) or 1.0
    axes.set_xscale("log")
    axes.set_xlim(known[0] / np.exp(0.15 * reach), known[-1] * np.exp(0.15 * reach))
    least = 0.65 * reach / inches(axes)
    axes.set_xticks(known, _apart([float(np.log(size)) for size in known], [count(size) for size in known], least))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("parameters without embeddings")


def setting_axis(axes: Axes, values: Iterable[float], name: str) -> Any:
    """Logarithmic values of a setting, each a tick; returns where a value stands: zero at the left edge."""
    known = sorted(value for value in set(values) if value > 0)
    reach = float(np.log(known[-1] / known[0]))
    edge = known[0] / np.exp(0.15 * reach)
    shown = [edge, *known] if 0 in set(values) else known
    axes.set_xscale("log")
    axes.set_xlim(shown[0] / np.exp(0.06 * reach), shown[-1] * np.exp(0.06 * reach))
    labels = [f"{0 if value == edge else value:g}" for value in shown]
    axes.set_xticks(shown, _apart([float(np.log(value)) for value in shown], labels, 0.45 * 1.2 * reach / inches(axes)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(name)
    return lambda setting: np.where(np.asarray(setting) > 0, setting, edge)


def _apart(at: Sequence[float], labels: Sequence[str], least: float) -> list[str]:
    """Labels, empty where the last one shown is nearer than ``least``; the first is always shown."""
    shown, last = [], -np.inf
    for place, label in zip(at, labels, strict=True):
        near = place - last < least
        shown.append("" if near else label)
        last = last if near else place
    return shown


def inches(axes: Axes) -> float:
    """How wide a panel is."""
    figure = axes.get_figure(root=True)
    return float(axes.get_position().width * figure.get_figwidth()) if figure else 0.0
