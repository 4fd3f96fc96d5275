"""Set axes and their ticks for learning rates, losses, probe values, sizes and settings, mostly logarithmic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from lab.analysis.rendering import style
from lab.analysis.text import count

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Leading digits of ticks from sparse to dense; decades alone come before them.
DIGITS = ((1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6), (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
STEPS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)


def lr_axis(axes: Axes, lrs: Iterable[float]) -> None:
    """Set a logarithmic x axis of learning rates with ticks at decades, or at each one when they are few."""
    grid = sorted(set(lrs))
    axes.set_xscale("log")
    axes.set_xlim(grid[0] / 1.4, grid[-1] * 1.4)
    ticks = (
        grid
        if len(grid) < 4
        else [10.0**power for power in range(-12, 6) if grid[0] <= 10.0**power * 1.01 <= grid[-1] * 1.03]
    )
    x_ticks(axes, ticks, [f"{lr:g}" for lr in ticks] if len(grid) < 4 else list(map(_power, ticks)))
    x_label(axes, "peak learning rate")


def _power(value: float, _: Any = None) -> str:
    """Write a decade as a power of ten in plain text, which draws much faster than mathematics."""
    return "10" + f"{np.log10(value):.0f}".translate(SUPERSCRIPTS)


def lr_ticks(axes: Axes, lrs: Iterable[float], shown: pd.Series) -> None:
    """Set a logarithmic y axis of learning rates with a tick at each ``lrs`` within a factor of four of those shown."""
    grid = [lr for lr in sorted(set(lrs)) if shown.min() / 4 < lr < shown.max() * 4]
    low, high = grid[0] / 1.3, grid[-1] * 1.3
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    places = np.log([lr / low for lr in grid]) / np.log(high / low) * _height(axes)
    axes.set_yticks(grid, _apart(places, [f"{lr:g}" for lr in grid], [_line()] * len(grid)))
    axes.yaxis.set_minor_locator(NullLocator())


def loss_axis(axes: Axes, runs: pd.DataFrame, losses: pd.Series, label: str, bigram: bool = True) -> None:
    """Set a logarithmic y axis that spans ``losses`` and bigram losses, but not beyond the loss at initialization."""
    shown = [*losses, *(runs["loss_bigram"] if bigram else [])]
    low, high = float(np.nanmin(shown)), min(float(np.nanmax(shown)), float(runs["loss_at_init"].max()))
    axes.set_yscale("log")
    axes.set_ylim(low / 1.04, high * 1.06)
    y_ticks(axes)
    axes.set_ylabel(label)


def probe_axis(axes: Axes, scale: str = "log") -> None:
    """Set the y axis of probe values, also on all axes that share it.

    A logarithmic axis spans at least a factor of four and a linear one includes zero, so that noise does not look like
    change.
    """
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if scale == "symlog":
        _symlog_ticks(axes)
    if scale != "log":
        return
    low, high = axes.get_ylim()
    margin = max(1.0, 2.0 / float(np.sqrt(high / low)))
    axes.set_ylim(low / margin, high * margin)
    y_ticks(axes)


def y_ticks(axes: Axes) -> None:
    """Set the ticks of a logarithmic y axis: about five, never so dense that their numbers touch."""
    low, high = axes.get_ylim()
    ticks = log_ticks(low, high, _height(axes) / (1.5 * _line()))
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    powers = all(_is_decade(tick) for tick in ticks) and bool(low < 1e-3 or high > 1e3)
    axes.yaxis.set_major_formatter(_power if powers else _number)
    axes.yaxis.set_minor_locator(NullLocator())


def log_ticks(low: float, high: float, most: float) -> list[float]:
    """Ticks inside ``[low, high]`` of a logarithmic axis.

    Args:
        low: lower end, above zero.
        high: upper end.
        most: how many numbers fit one above the other.

    Returns:
        At least two where a step of a thousandth of the values reaches; the sparsest ticks that number four, if they
        fit, else those that fit.
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    strides = [[10.0**power for power in powers if power % stride == 0] for stride in (8, 4, 3, 2, 1)]
    digits = [[digit * 10.0**power for power in powers for digit in choice] for choice in DIGITS]
    even = [
        [step * scale * n for n in range(int(low / step / scale), int(high / step / scale) + 2)]
        for scale, step in _even_steps(low, high)
    ]
    least, chosen = np.log(high / low) / most, list[float]()
    for candidates in (*strides, *digits, *even):
        ticks = [float(f"{tick:.6g}") for tick in candidates if low <= tick <= high]
        apart = len(ticks) < 2 or float(np.diff(np.log(ticks)).min()) >= least
        if apart and len(ticks) > len(chosen):
            chosen = ticks
        if len(chosen) >= min(4, most):
            break
    return chosen


def _even_steps(low: float, high: float) -> list[tuple[float, float]]:
    """Scales and steps of evenly spaced ticks, from wide to narrow, that give no more than a dozen."""
    scale = 10.0 ** int(np.floor(np.log10(low)))
    return [(scale, step) for step in STEPS if (high - low) / scale / step <= 12]


def _is_decade(value: float) -> bool:
    return bool(abs(np.log10(value) - round(np.log10(value))) < 1e-6)


def _number(value: float, _: Any = None) -> str:
    """A number in few letters: ``0``, ``0.03``, ``3e-4``, ``2000``, ``2e5``."""
    if value == 0 or 1e-2 <= value < 1e5:
        return f"{value:.6g}"
    digits, _, power = f"{value:e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _symlog_ticks(axes: Axes) -> None:
    """Ticks at zero and at decades of both signs, and at three times these, as many as fit."""
    low, high = axes.get_ylim()
    transform, most = axes.yaxis.get_transform(), _height(axes) / (1.5 * _line())
    bottom, top = transform.transform(np.array([low, high]))
    chosen = [0.0] if low <= 0 <= high else []
    for digits, first, stride in product([(1, 3), (1,)], range(4), (1, 2, 3, 4, 6, 8)):
        decades = [digit * 10.0**power for power in range(first, 40, stride) for digit in digits]
        ticks = [tick for tick in (*(-decade for decade in decades[::-1]), 0.0, *decades) if low <= tick <= high]
        gaps = np.diff(transform.transform(np.array(ticks))) / (top - bottom) * most
        if len(ticks) > len(chosen) and (gaps >= 1).all():
            chosen = ticks
    axes.yaxis.set_major_locator(FixedLocator(chosen))
    axes.yaxis.set_major_formatter(lambda value, _: ("-" if value < 0 else "") + _number(abs(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def step_axis(axes: Axes, steps: int) -> None:
    """Set an x axis of steps from 0 to the last one."""
    axes.set_xlim(-0.03 * steps, 1.06 * steps)
    wide = style.text_width(str(steps), style.page().size * style.SMALL) + style.em()
    most = max(1, int(inches(axes) / wide))
    scale = 10.0 ** int(np.floor(np.log10(max(steps, 1))))
    step = next(
        (width * scale for width in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if steps / (width * scale) <= most),
        10.0 * scale,
    )
    axes.xaxis.set_major_locator(FixedLocator([step * n for n in range(int(1.05 * steps / step) + 1)]))
    axes.xaxis.set_major_formatter("{x:g}")


def size_axis(axes: Axes, sizes: Iterable[float]) -> None:
    """Set a logarithmic x axis of parameter counts; where labels would overlap some ticks have none."""
    ticks = sorted(set(sizes))
    log_range = float(np.log(ticks[-1] / ticks[0])) or 1.0
    axes.set_xscale("log")
    axes.set_xlim(ticks[0] / np.exp(0.15 * log_range), ticks[-1] * np.exp(0.15 * log_range))
    x_ticks(axes, ticks, [count(size) for size in ticks])
    x_label(axes, "parameters without embeddings")


def width_axis(axes: Axes, widths: Iterable[float]) -> None:
    """Set a logarithmic x axis with a tick at each width of a model."""
    ticks = sorted(set(widths))
    axes.set_xscale("log")
    axes.set_xlim(ticks[0] / 1.15, ticks[-1] * 1.15)
    x_ticks(axes, ticks, [f"{width:g}" for width in ticks])
    axes.set_xlabel("width")


def decades_axis(axes: Axes, low: float, high: float) -> None:
    """Set a logarithmic x axis of parameter counts from ``low`` to ``high``, with ticks at decades."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = [10.0**power for power in range(0, 16) if low <= 10.0**power <= high]
    x_ticks(axes, decades, list(map(count, decades)))
    x_label(axes, "parameters without embeddings")


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
    x_ticks(axes, ticks, [_number(0 if value == edge else value) for value in ticks])
    x_label(axes, name)
    return lambda setting: np.where(np.asarray(setting) > 0, setting, edge)


def x_label(axes: Axes, name: str) -> None:
    """Name an x axis, in lines no wider than the panel."""
    axes.set_xlabel(style.wrapped(name, inches(axes) + style.em(), style.page().size))


def x_ticks(axes: Axes, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """Set the ticks of a logarithmic x axis; labels that would touch the one before are left empty."""
    low, high = np.log(axes.get_xlim())
    places = (np.log(ticks) - low) / (high - low) * inches(axes)
    widths = [style.text_width(label, style.page().size * style.SMALL) for label in labels]
    axes.set_xticks(list(ticks), _apart(places, labels, widths))
    axes.xaxis.set_minor_locator(NullLocator())


def _apart(places: Iterable[float], labels: Sequence[str], lengths: Sequence[float]) -> list[str]:
    """Labels with those emptied that would touch the last one shown; the first is always shown.

    Args:
        places: middle of each label along the axis, in inches.
        labels: as they would be.
        lengths: of each label along the axis, in inches.
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


def inches(axes: Axes) -> float:
    """Width of a panel in inches."""
    figure = axes.get_figure(root=True)
    return float(axes.get_position().width * figure.get_figwidth()) if figure else 0.0


def _height(axes: Axes) -> float:
    """Height of a panel in inches."""
    figure = axes.get_figure(root=True)
    return float(axes.get_position().height * figure.get_figheight()) if figure else 0.0
