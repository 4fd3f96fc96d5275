"""Draw inside one panel: lines over a column with bands and outcome marks, sensitivities, reference lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon

from lab.analysis.rendering import hover, layout, marks, scales, style
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.marks import OUTCOME_LOOK, OUTCOMES
from lab.analysis.rendering.style import DASHED, INK
from lab.analysis.statistics import FEWEST_SEEDS, Interval

REFERENCES = {"loss_at_init": (marks.AT_INIT, (0, (1, 1.5))), "loss_bigram": (marks.BIGRAM, (0, (5, 2)))}
FINAL_LOSS = Quantity("final held-out loss", "nats/token")
PART_LINES: dict[str, dict[str, Any]] = {"total": {}, "above": {"linestyle": DASHED, "markerfacecolor": "white"}}
ROW_LABEL = 14.0  # widest label of a row, in multiples of the size of text
PARTS = {"total": "sensitivity", "above": "its instability part"}


def title(axes: Axes, label: str, columns: int = 1) -> None:
    """Set a label as the title of a panel, wrapped to its width; over several panels that begin with this one."""
    width = columns * (scales.inches(axes) + layout.BETWEEN * style.em()) - layout.BETWEEN * style.em()
    axes.set_title(style.wrapped(label, width), loc="center" if columns == 1 else "left")


def over(axes: Axes, runs: pd.DataFrame, x: str, value: str, colour: str, quantity: Quantity) -> None:
    """Draw column ``value`` over column ``x``: a line at the mean over seeds, and their band.

    Marks show the worst outcome of the seeds; seeds without a finite value count there, but not in the mean.
    """
    xs, values, outcomes = (runs[column].to_numpy() for column in (x, value, "outcome"))
    finite = np.isfinite(values)
    ticks = np.unique(xs[finite])
    seeds = [values[finite & (xs == tick)] for tick in ticks]
    means = np.array([quantity.mean(at_tick) for at_tick in seeds])
    ends = [marks.band_ends(at_tick) for at_tick in seeds]
    band(axes, ticks, [low for low, _ in ends], [high for _, high in ends], colour, max(map(len, seeds), default=0))
    axes.plot(ticks, means, color=colour)
    worst = np.array([worst_outcome(outcomes[xs == tick]) for tick in ticks])
    others = [f"{x} {tick:g}" if x == "block" else "" for tick in ticks]
    told = hover.HoverText(runs)
    texts = np.array(
        [
            told.point(xs == tick, quantity, at_tick, *filter(None, [other]))
            for tick, at_tick, other in zip(ticks, seeds, others, strict=True)
        ]
    )
    for outcome in ("", *OUTCOMES):
        shown = worst == outcome
        if shown.any():
            _marks(axes, ticks[shown], means[shown], outcome, colour, texts[shown])


def _marks(axes: Axes, x: Any, y: Any, outcome: str, colour: str, texts: Iterable[str], **look: Any) -> None:
    """Draw the marks of an outcome, or of stable runs, with their texts."""
    usual = OUTCOME_LOOK if outcome else {"markersize": 3.5}
    (line,) = axes.plot(x, y, OUTCOMES.get(outcome, "o"), color=colour, **{**usual, **look})
    if outcome:
        marks.name(line, outcome)
    say(axes, line, texts)


def say(axes: Axes, line: Line2D, texts: Iterable[str]) -> None:
    """Give every mark of a line a text for the pointer."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, layout.Drawing)
    figure.points.append(hover.Points(line, list(texts)))


def band(axes: Axes, x: Any, low: Any, high: Any, colour: str, seeds: int) -> None:
    """Fill the area between the ends of the bands of so many seeds with a pale colour, unless they coincide."""
    x, low, high = (np.asarray(values, dtype=float) for values in (x, low, high))
    finite = np.isfinite(low) & np.isfinite(high)
    if (low < high).any():
        x, low, high = x[finite], low[finite], high[finite]
        corners = np.stack([np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])], axis=1)
        area = axes.add_artist(Polygon(corners, color=colour, alpha=0.2, linewidth=0))
        marks.name(area, marks.kind_of_band(seeds), seeds)
        axes.update_datalim(corners)


def worst_outcome(outcomes: Iterable[str]) -> str:
    """The worst outcome among seeds; empty where all are stable."""
    return max(outcomes, key=["", *OUTCOMES].index)


def arm_look(position: int) -> dict[str, Any]:
    """Colour and mark of the arm at this position; the first 49 arms all look different."""
    colours = len(style.ARM_COLOURS)
    mark = style.ARM_MARKS[(position + position // colours) % colours]
    return {"color": style.ARM_COLOURS[position % colours], "marker": mark}


def arm_key(arm: str, look: Mapping[str, Any]) -> Line2D:
    """Key entry of an arm."""
    return Line2D([], [], markersize=5, label=arm, **look)


def epsilon(axes: Axes, eps: float, colour: str = INK) -> None:
    """Draw a dashed line at Adam's epsilon and widen the view for it, unless it lies far outside."""
    low, high = axes.get_ylim()
    if low / 30 < eps < high * 30:
        line = axes.axhline(eps, color=colour, linewidth=0.9, linestyle=DASHED, zorder=1, label=marks.EPSILON)
        marks.name(line, marks.EPSILON)
        axes.set_ylim(min(low, eps / 1.5), max(high, eps * 1.5))


def diagonal(axes: Axes, values: pd.Series, label: str) -> None:
    """Draw a dotted line at y = x over the range of ``values``, if it is in view, and keep the view."""
    view, ends = axes.get_ylim(), [values.min(), values.max()]
    if view[0] < ends[1] and ends[0] < view[1]:
        (line,) = axes.plot(ends, ends, color=INK, linewidth=0.9, linestyle=(0, (1, 1)), zorder=1, label=label)
        marks.name(line, label)
        axes.set_ylim(view)


def references(axes: Axes, runs: pd.DataFrame) -> None:
    """Draw thin lines at the loss at initialization and at the bigram model's, both means over ``runs``."""
    for column, (name, dashes) in REFERENCES.items():
        line = axes.axhline(runs[column].mean(), color=INK, linewidth=0.8, linestyle=dashes, zorder=1, label=name)
        marks.name(line, name)


def over_steps(axes: Axes, lines: pd.DataFrame, colour: str, seeds: int, text_at: Callable[[int], str]) -> None:
    """Draw a line over column ``step``: ``mean``, a band from ``low`` to ``high``, the ``outcome`` marked at its end.

    Args:
        axes: the panel.
        lines: a row per step.
        colour: of the line.
        seeds: how many it is a mean of.
        text_at: what the mark says if the line ends at this step.
    """
    band(axes, lines["step"], lines["low"], lines["high"], colour, seeds)
    axes.plot(lines["step"], lines["mean"], color=colour, linewidth=1)
    end, outcome = lines[np.isfinite(lines["mean"])].tail(1), worst_outcome(lines["outcome"])
    if outcome and len(end):
        texts = [text_at(int(end["step"].iloc[0]))]
        _marks(axes, end["step"], end["mean"], outcome, colour, texts, markersize=5, clip_on=False)


def sensitivities(
    axes: Axes, curves: pd.DataFrame, runs: pd.DataFrame, colours: Mapping[Any, str], name: str
) -> list[Line2D]:
    """Draw the sensitivity of every arm and its instability part: against size, or of one size a row per arm.

    Args:
        axes: the panel.
        curves: as made by ``by_curve``.
        runs: the runs of all curves.
        colours: by arm, for those that have a colour in other panels.
        name: of the sensitivity, for its axis.

    Returns:
        Entries of its key.
    """
    arms = list(curves["arm"].unique())
    looks = {
        arm: arm_look(position) | ({"color": colours[arm]} if arm in colours else {})
        for position, arm in enumerate(arms)
    }
    one_size = curves["size"].nunique() == 1
    if one_size:
        _rows(axes, curves, runs, looks)
        axes.set_xlabel(f"{name} (nats/token)")
    else:
        _against_size(axes, curves, runs, looks)
        axes.set_ylabel(f"{name}\n(nats/token)")
    seeds = sorted({interval.n for interval in curves["total"]})
    numbers = f"n = {' to '.join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))}"
    keys = [] if one_size else [arm_key(arm, look) for arm, look in looks.items()]
    lines: dict[str, Any] = {"linestyle": "", "marker": "o"} if one_size else {}
    whole = Line2D([], [], color=INK, label=PARTS["total"], **lines)
    part = Line2D([], [], color=INK, label=PARTS["above"], **{**PART_LINES["above"], **lines})
    return [*keys, whole, part, Line2D([], [], linestyle="", label=numbers)]


def _against_size(axes: Axes, curves: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Any]) -> None:
    sizes = sorted(curves["size"].unique())
    log_range = float(np.log(sizes[-1] / sizes[0]))
    for position, (arm, look) in enumerate(looks.items()):
        of_arm = curves[curves["arm"] == arm]
        # shift arms sideways, so that their bars do not hide one another
        x = of_arm["size"].to_numpy() * np.exp(log_range * 0.012 * (position - (len(looks) - 1) / 2))
        for part, dashes in PART_LINES.items():
            draw_intervals(axes, x, list(of_arm[part]), _texts(of_arm, part, runs), **look, **dashes)
    scales.size_axis(axes, sizes)
    axes.set_ylim(bottom=0)


def height_of_sensitivities(curves: pd.DataFrame) -> tuple[float, float]:
    """Height of the panel of ``sensitivities`` and the room its labels take at the left, in multiples of text size."""
    if curves["size"].nunique() > 1:
        return 13.0, 0.0
    labels = _row_labels(curves["arm"].unique())
    small = style.page().size * style.SMALL
    widest = max(style.text_width(line, small) for label in labels for line in label.split("\n")) / style.em()
    return sum(1.3 * (label.count("\n") + 1) + 0.5 for label in labels) + 0.8, max(0.0, widest + 1.8 - layout.LEFT)


def _row_labels(arms: Iterable[str]) -> list[str]:
    return [style.wrapped(arm, ROW_LABEL * style.em()) for arm in arms]


def _rows(axes: Axes, curves: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Any]) -> None:
    """A row per arm, the first at the top: a dot with its interval, and a hollow one for the instability part."""
    labels = _row_labels(looks)
    heights = np.array([1.3 * (label.count("\n") + 1) + 0.5 for label in labels])
    rows = np.cumsum(heights) - heights / 2
    for row, (arm, look) in zip(rows, looks.items(), strict=True):
        of_arm = curves[curves["arm"] == arm]
        for part, lines in PART_LINES.items():
            dots = {**lines, "color": look["color"], "marker": "o", "linestyle": ""}
            draw_intervals(axes, [row], list(of_arm[part]), _texts(of_arm, part, runs), sideways=True, **dots)
    axes.set_ylim(heights.sum() + 0.4, -0.4)
    axes.set_yticks(list(rows), labels)
    axes.set_xlim(left=0)


def _texts(curves: pd.DataFrame, part: str, runs: pd.DataFrame) -> list[str]:
    told = hover.HoverText(runs)
    quantity = Quantity(f"LR {PARTS[part].replace('its ', 'sensitivity, ')}", "nats/token")
    return [
        told.point(((runs["arm"] == arm) & (runs["size"] == size)).to_numpy(), quantity, np.array(interval.values))
        for arm, size, interval in zip(curves["arm"], curves["size"], curves[part], strict=True)
    ]


def draw_intervals(
    axes: Axes, x: Any, values: list[Interval], texts: list[str], sideways: bool = False, **look: Any
) -> None:
    """Draw means joined by a line, each with its interval; below three seeds draw a dash per seed."""
    means = [interval.mean for interval in values]
    half = [interval.high - interval.mean for interval in values]
    xy = (means, x) if sideways else (x, means)
    bars: dict[str, Any] = {"fmt": "none", "xerr" if sideways else "yerr": half}
    drawn = axes.errorbar(*xy, **bars, ecolor=look["color"], elinewidth=1, capsize=2.5)
    if np.isfinite(half).any():
        marks.name(drawn.lines[2][0], marks.INTERVAL, max(interval.n for interval in values))
    (line,) = axes.plot(*xy, markersize=5, **look)
    say(axes, line, texts)
    for x_of_interval, interval in zip(x, values, strict=True):
        if 0 < interval.n < FEWEST_SEEDS:
            seeds = ([x_of_interval] * interval.n, interval.values)
            mark = "|" if sideways else "_"
            (dashes,) = axes.plot(*(seeds[::-1] if sideways else seeds), mark, color=look["color"], markersize=8)
            marks.name(dashes, marks.SEED, interval.n)
