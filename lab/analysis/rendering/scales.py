"""Set axes and their ticks for learning rates, losses, probe values, sizes and settings, mostly logarithmic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import AsinhLocator, FixedLocator, MaxNLocator, NullLocator

from lab.analysis.rendering import style
from lab.analysis.text import count, number

# Leading digits of ticks from sparse to dense; decades alone come before them.
DIGITS = ((1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
MOST_STEPS = 8
MARGIN = 0.07  # at both ends of an x axis, as a share of its range
FEW_LRS = 4


def x_axis(axes: Axes, name: str, ends: Iterable[float], ticks: Iterable[float], spell: Callable[[float], str]) -> None:
    """Set a logarithmic x axis that spans all ``ends``; numbers that would touch the previous one are left out."""
    spanned = list(ends)
    low, high = min(spanned), max(spanned)
    margin = max(high / low, 1.5) ** MARGIN
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    ticks = [tick for tick in sorted(set(ticks)) if low / margin <= tick <= high * margin]
    left, right = np.log(axes.get_xlim())
    places = (np.log(ticks) - left) / (right - left) * width(axes)
    labels = list(map(spell, ticks))
    size = style.page().size * style.SMALL
    axes.set_xticks(ticks, _apart(places, labels, [style.text_width(label, size) for label in labels]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(style.literal(name))


def lr_axis(axes: Axes, lrs: Iterable[float]) -> Any:
    """Set an x axis of ``style.axis`` with ticks at decades, or at each value if they are few; see ``setting_axis``."""
    grid = sorted(set(lrs))
    if not grid[0] or (len(grid) >= FEW_LRS and grid[-1] < 10 * grid[0]):  # such as warm-up steps, or beta2
        return setting_axis(axes, grid, style.axis().peak)
    x_axis(axes, style.axis().peak, grid, grid if len(grid) < FEW_LRS else decades(grid), number)
    return lambda lr: lr


def size_axis(axes: Axes, sizes: Iterable[float], name: str) -> None:
    """Set an x axis of this name with a tick at each of these parameter counts."""
    sizes = list(sizes)
    x_axis(axes, name, sizes, sizes, count)


def setting_axis(axes: Axes, values: Iterable[float], name: str) -> Any:
    """Set an x axis with a tick at each value of a setting.

    Returns:
        A function from values to their positions: zero is drawn at the left edge, other values as they are.
    """
    positive = sorted({value for value in values if value > 0})
    edge = positive[0] * (positive[0] / positive[-1]) ** 0.15
    ticks = [edge, *positive] if 0 in set(values) else positive
    x_axis(axes, name, ticks, ticks, lambda value: number(0 if value == edge else value))
    return lambda setting: np.where(np.asarray(setting) > 0, setting, edge)


def decades(values: Iterable[float]) -> list[float]:
    """Powers of ten within the range of these values."""
    logs = np.log10(list(values))
    low, high = logs.min(), logs.max()
    return [10.0**power for power in range(int(np.ceil(low - 0.01)), int(np.floor(high + 0.01)) + 1)]


def step_axis(axes: Axes, steps: int) -> None:
    """Set a linear x axis of steps from 0 to the last one."""
    axes.set_xlim(-0.03 * steps, 1.06 * steps)
    wide = style.text_width(str(steps), style.page().size * style.SMALL) + style.em()
    most = max(1, int(width(axes) / wide))
    scale = 10.0 ** int(np.floor(np.log10(max(steps, 1))))
    choices = (part * scale for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0))
    step = next((choice for choice in choices if steps / choice <= most), 10.0 * scale)
    axes.xaxis.set_major_locator(FixedLocator([step * n for n in range(int(1.05 * steps / step) + 1)]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("step")


def lr_ticks(axes: Axes, lrs: Iterable[float], shown: pd.Series) -> None:
    """Set a logarithmic y axis of learning rates with a tick at each ``lrs`` within a factor of four of those shown."""
    grid = [lr for lr in sorted(set(lrs)) if shown.min() / 4 < lr < shown.max() * 4]
    low, high = grid[0] / 1.3, grid[-1] * 1.3
    axes.set_ylim(low, high)  # first, since the logarithm of a single rate has no extent
    axes.set_yscale("log")
    places = np.log([lr / low for lr in grid]) / np.log(high / low) * _height(axes)
    axes.set_yticks(grid, _apart(places, list(map(number, grid)), [_line()] * len(grid)))
    axes.yaxis.set_minor_locator(NullLocator())


def loss_axis(axes: Axes, runs: pd.DataFrame, losses: pd.Series, bigram: bool = True) -> None:
    """Set a logarithmic y axis that spans ``losses`` and bigram losses, but not beyond the loss at initialization."""
    shown = [*losses, *(runs["loss_bigram"] if bigram else [])]
    low, high = float(np.nanmin(shown)), min(float(np.nanmax(shown)), float(runs["loss_at_init"].max()))
    axes.set_yscale("log")
    axes.set_ylim(low / 1.04, high * 1.06)
    y_ticks(axes)


def probe_axis(axes: Axes, scale: str = "log") -> None:
    """Set the y axis of probe values, also on all axes that share it: ``log``, ``linear`` or ``asinh``.

    A logarithmic axis spans at least a factor of four and a linear one includes zero, so that noise does not look like
    change.
    """
    axes.set_yscale(scale)
    low, high = axes.get_ylim()
    if scale == "log" and low <= 0:  # no value is positive, such as logits of queries that are zero
        axes.set_yscale("linear")
    elif scale == "linear":
        axes.set_ylim(bottom=min(0.0, low))
    elif scale == "asinh":
        _asinh_ticks(axes)
    else:
        margin = max(1.0, 2.0 / float(np.sqrt(high / low)))
        axes.set_ylim(low / margin, high * margin)
        y_ticks(axes)


def _asinh_ticks(axes: Axes) -> None:
    """Set ticks at zero and at decades of both signs, without those too near zero; or at equal steps below ten."""
    low, high = axes.get_ylim()
    least = 1.5 * _line() / _height(axes) * float(np.arcsinh(high) - np.arcsinh(low))
    decades = AsinhLocator(1.0, int(_height(axes) / (2 * _line()))).tick_values(low, high)
    apart = [float(tick) for tick in decades if tick == 0 or abs(np.arcsinh(tick)) >= least]
    ticks = apart if max(-low, high) >= 10 else MaxNLocator(4).tick_values(low, high)
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_locator(NullLocator())


def y_ticks(axes: Axes) -> None:
    """Set the ticks of a logarithmic y axis: about five, never so dense that their numbers touch."""
    axes.yaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_ylim(), _height(axes) / (1.5 * _line()))))
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.yaxis.set_minor_locator(NullLocator())


def log_ticks(low: float, high: float, most: float) -> list[float]:
    """Ticks inside ``[low, high]`` of a logarithmic axis with room for ``most`` evenly spaced ones.

    Candidates are decades, some digits in each decade, or numbers at equal steps. The sparsest with at least four ticks
    is chosen if it fits, else the one with most ticks that fits.
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    strides = [[10.0**power for power in powers if power % stride == 0] for stride in (8, 4, 3, 2, 1)]
    digits = [[digit * 10.0**power for power in powers for digit in choice] for choice in DIGITS]
    even = [MaxNLocator(steps).tick_values(low, high) for steps in range(2, MOST_STEPS)]
    least, chosen = np.log(high / low) / most, list[float]()
    for candidates in (*strides, *digits, *even):
        ticks = [float(f"{tick:.6g}") for tick in candidates if low <= tick <= high]
        apart = len(ticks) < 2 or float(np.diff(np.log(ticks)).min()) >= least
        if apart and len(ticks) > len(chosen):
            chosen = ticks
        if len(chosen) >= min(4, most):
            break
    return chosen


def evenly(count: int, most: int) -> np.ndarray:
    """At most so many of the indices below ``count``, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def spread(places: Sequence[float], least: float) -> list[float]:
    """The places nearest to these, in least squares, that keep their order and lie at least ``least`` apart."""
    pools = list[list[float]]()
    for index, place in enumerate(places):
        pools.append([place - index * least])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    return [place + index * least for index, place in enumerate(level)]


def _apart(places: Iterable[float], labels: Sequence[str], lengths: Sequence[float]) -> list[str]:
    """Labels, of which those that would touch the last one shown are emptied; the first is always shown.

    Args:
        places: middle of each label along the axis, in inches.
        labels: all labels.
        lengths: length of each label along the axis, in inches.
    """
    shown, end = [], -np.inf
    for place, label, length in zip(places, labels, lengths, strict=True):
        fits = place - length / 2 >= end + 0.35 * style.em()
        shown.append(label if fits else "")
        end = place + length / 2 if fits else end
    return shown


def _line() -> float:
    """Height of a line of small text in inches."""
    return style.SMALL * style.em()


def width(axes: Axes) -> float:
    """Width of a panel in inches."""
    figure = axes.get_figure(root=True)
    return float(axes.get_position().width * figure.get_figwidth()) if figure else 0.0


def _height(axes: Axes) -> float:
    """Height of a panel in inches."""
    figure = axes.get_figure(root=True)
    return float(axes.get_position().height * figure.get_figheight()) if figure else 0.0
