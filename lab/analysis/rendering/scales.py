"""Set axes and their ticks for learning rates, losses, probe values, sizes and settings, mostly logarithmic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from lab.analysis.text import count

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def lr_axis(axes: Axes, lrs: Iterable[float]) -> None:
    """Set a logarithmic x axis of learning rates with ticks at decades, or at each one when they are few."""
    grid = sorted(set(lrs))
    axes.set_xscale("log")
    axes.set_xlim(grid[0] / 1.4, grid[-1] * 1.4)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_power)
    if len(grid) < 4:
        axes.set_xticks(grid, [f"{lr:g}" for lr in grid])
    axes.set_xlabel("peak learning rate")


def _power(value: float, _: float) -> str:
    """Write a decade as a power of ten in plain text, which draws much faster than mathematics."""
    return "10" + f"{np.log10(value):.0f}".translate(SUPERSCRIPTS)


def lr_ticks(axes: Axes, lrs: Iterable[float], shown: pd.Series) -> None:
    """Set a logarithmic y axis of learning rates with a tick at each ``lrs`` within a factor of four of those shown."""
    grid = [lr for lr in sorted(set(lrs)) if shown.min() / 4 < lr < shown.max() * 4]
    axes.set_yscale("log")
    axes.set_ylim(grid[0] / 1.3, grid[-1] * 1.3)
    axes.set_yticks(grid, [f"{lr:g}" for lr in grid])
    axes.yaxis.set_minor_locator(NullLocator())


def loss_axis(axes: Axes, runs: pd.DataFrame, losses: pd.Series, label: str, bigram: bool = True) -> None:
    """Set a logarithmic y axis that spans ``losses`` and bigram losses, but not beyond the loss at initialization."""
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
    axes.set_ylabel(label)


def probe_axis(axes: Axes, scale: str = "log") -> None:
    """Set the y axis of probe values, also on all axes that share it.

    A logarithmic axis spans at least a factor of four and a linear one includes zero, so that noise does not look like
    change.
    """
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if scale != "log":
        return
    low, high = axes.get_ylim()
    margin = max(1.0, 2.0 / float(np.sqrt(high / low)))
    low, high = low / margin, high * margin
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(_power)
    if high < 50 * low:
        ticks = [digit * 10.0**power for power in range(-20, 20) for digit in (1, 2, 5)]
        axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def size_axis(axes: Axes, sizes: Iterable[float]) -> None:
    """Set a logarithmic x axis of parameter counts; where labels would overlap some ticks have none."""
    ticks = sorted(set(sizes))
    log_range = float(np.log(ticks[-1] / ticks[0])) or 1.0
    axes.set_xscale("log")
    axes.set_xlim(ticks[0] / np.exp(0.15 * log_range), ticks[-1] * np.exp(0.15 * log_range))
    gap = 0.65 * log_range / inches(axes)
    axes.set_xticks(ticks, _thinned([float(np.log(size)) for size in ticks], [count(size) for size in ticks], gap))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("parameters without embeddings")


def setting_axis(axes: Axes, values: Iterable[float], name: str) -> Any:
    """Set a logarithmic x axis with a tick at each value of a setting.

    Returns:
        A function from values to where they are drawn: zero at the left edge, others as they are.
    """
    positive = sorted(value for value in set(values) if value > 0)
    log_range = float(np.log(positive[-1] / positive[0]))
    edge = positive[0] / np.exp(0.15 * log_range)
    ticks = [edge, *positive] if 0 in set(values) else positive
    axes.set_xscale("log")
    axes.set_xlim(ticks[0] / np.exp(0.06 * log_range), ticks[-1] * np.exp(0.06 * log_range))
    labels = [f"{0 if value == edge else value:g}" for value in ticks]
    gap = 0.45 * 1.2 * log_range / inches(axes)
    axes.set_xticks(ticks, _thinned([float(np.log(value)) for value in ticks], labels, gap))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(name)
    return lambda setting: np.where(np.asarray(setting) > 0, setting, edge)


def _thinned(ticks: Sequence[float], labels: Sequence[str], gap: float) -> list[str]:
    """Labels with those emptied that are nearer than ``gap`` to the last one shown; the first is always shown."""
    thinned, last = [], -np.inf
    for tick, label in zip(ticks, labels, strict=True):
        near = tick - last < gap
        thinned.append("" if near else label)
        last = last if near else tick
    return thinned


def inches(axes: Axes) -> float:
    """Width of a panel in inches."""
    figure = axes.get_figure(root=True)
    return float(axes.get_position().width * figure.get_figwidth()) if figure else 0.0
