"""The figures of `lab compare LOG LOG`: for each log its curves, its gap from the first, and the events."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lab.analysis.rendering import layout, marks, panels, scales, style
from lab.analysis.rendering.layout import Sheet
from labwatch.compare.two_logs import (
    Pair,
    SharedEvent,
    Siblings,
    event_sentence,
)
from labwatch.events.collapse import EARLY
from labwatch.events.detectors import Log
from labwatch.events.twins import Gap, compared_losses

MOST_POINTS = 400  # of a curve
MEANS = 60  # of the gap
HEIGHT, EVENT_HEIGHT = 10.0, 1.8  # of a panel, and of a row of events, in multiples of the size of text
SHOWN = 0.98  # the share of losses that the panel shows; those of the first steps would squeeze the rest
A, B, PAIRED, UNPAIRED = style.ARM_COLOURS[:4]
TOLERANCE, LEAVES = "alarm above this", "leaves the curve"
PARTING, INTERVAL, MARGIN = "other batches from here on", "95 % interval of the line", "equal within"


def _drawn(logs: Sequence[Log]) -> tuple[str, str]:
    """The column of two logs that is drawn, and its label: the reward where a loss tells little."""
    if not any(log.is_of_rewards for log in logs):
        return "loss", "loss, nats/token"
    return ("reward", "reward") if all("reward" in log.columns for log in logs) else ("loss", "loss")


@layout.styled
def pair_figure(pair: Pair, events: Sequence[SharedEvent], letters: dict[str, str]) -> Sheet:
    """Losses of two logs, the gap between them, and their events; of reinforcement learning the rewards."""
    logs, letter = (pair.first, pair.second), letters[pair.second.name]
    shown = {log.name: [shared for shared in events if shared.log.name == log.name] for log in logs}
    has_events = any(shown.values())
    column, label = _drawn(logs)
    sheet = Sheet(1, [HEIGHT, *[HEIGHT] * bool(pair.gaps), *[EVENT_HEIGHT * 2] * has_events])
    losses = sheet.panel(0, 0)
    for log, colour, width in zip(logs, (A, B), (2.4, 0.8), strict=True):  # so that both are seen where they coincide
        kept = np.unique(np.linspace(0, len(log.step_n) - 1, MOST_POINTS).round().astype(int))
        losses.plot(log.step_n[kept], log.columns[column][kept], color=colour, linewidth=width)
    known = np.concatenate([log.columns[column][np.isfinite(log.columns[column])] for log in logs])
    low, high = float(known.min()), float(np.quantile(known, SHOWN))
    losses.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    losses.set_ylabel(label)
    panels_drawn = [losses]
    if pair.gaps:
        gap = sheet.panel(1, 0, sharex=losses)
        gap.set_ylabel(f"gap {letter} - A,\nnats/token")
        _draw_gap(gap, pair)
        panels_drawn.append(gap)
    if has_events:
        rows = sheet.panel(len(panels_drawn), 0, sharex=losses)
        _draw_events(rows, [shown[log.name] for log in logs], ["A", letter], letters)
        panels_drawn.append(rows)
    if pair.sharing.until is not None and not pair.sharing.is_lasting:
        for axes in panels_drawn:
            panels.level(axes, pair.sharing.until, PARTING, style.DASHED, upright=True)
    for axes in panels_drawn[:-1]:
        axes.tick_params(labelbottom=False)
    scales.step_axis(panels_drawn[-1], int(max(log.step_n[-1] for log in logs)))
    keys = [Line2D([], [], color=colour, label=name) for name, colour in (("A", A), (letter, B))]
    gaps = [
        Line2D([], [], color=_colour(gap.is_paired), label="paired" if gap.is_paired else "unpaired")
        for gap in pair.gaps
    ]
    sheet.keys(("log", keys), ("gap", gaps))
    if pair.gaps:
        sheet.note("The gap is shown in means of neighbouring rows, with the line by which it is judged.")
        sheet.explain(INTERVAL, "The band is the 95 % interval of the least-squares line through the judged rows.")
        sheet.explain(MARGIN, "Dotted lines are the margin within which losses count as equal.")
    if has_events:
        sheet.note("Full triangles are events that none of the twins has; empty ones are shared, or have no twin.")
    return sheet


@layout.styled
def siblings_figure(compared: Siblings) -> Sheet:
    """Loss curves of a run and its siblings, moved and scaled onto one, and how far the run lies above that one.

    Each curve is a mean over pieces of the common steps, put on the mean of the siblings by a least-squares line, of
    the run through what it had logged before the alarm.
    """
    found = compared.found
    sheet = Sheet(1, [HEIGHT, HEIGHT])
    losses = sheet.panel(0, 0)
    excess = sheet.panel(1, 0, sharex=losses)
    mean_p = found.loss_lp[1:].mean(0)
    alarm = np.inf if found.step is None else found.step
    for row, loss_p in reversed([*enumerate(found.loss_lp)]):  # the run last, on top
        is_fitted_p = np.isfinite(loss_p) & ((found.piece_step_p < alarm) | (row > 0))
        is_fitted_p[:EARLY] = False
        slope, offset = np.polyfit(mean_p[is_fitted_p], loss_p[is_fitted_p], 1)
        collapsed_p = (loss_p - offset) / slope
        losses.plot(found.piece_step_p[EARLY:], collapsed_p[EARLY:], color=A if row else B, linewidth=1 if row else 2.4)
    losses.set_ylabel("loss on the siblings'\nscale, nats/token")
    losses.tick_params(labelbottom=False)
    excess.plot(found.step_n, found.excess_n, color=B, linewidth=2.4)
    excess.axhline(0, color=style.INK, linewidth=0.9, zorder=1)
    panels.level(excess, found.tolerance, TOLERANCE, (0, (1, 1.5)))
    excess.set_ylabel("excess,\nnats/token")
    if found.step is not None:
        for axes in (losses, excess):
            panels.level(axes, found.step, LEAVES, style.DASHED, upright=True)
    scales.step_axis(excess, int(found.piece_step_p[-1]))
    keys = [Line2D([], [], color=colour, label=name) for name, colour in (("the run", B), ("its siblings", A))]
    sheet.keys(("log", keys))
    sheet.explain(TOLERANCE, "The dotted line is the excess above which the run departs from its siblings.")
    return sheet


def _colour(is_paired: bool) -> str:
    return PAIRED if is_paired else UNPAIRED


def _draw_gap(axes: Axes, pair: Pair) -> None:
    """Means of the gap, and the line of each part with its interval."""
    step_n, a_n, b_n = compared_losses(pair.first, pair.second)
    heights = list[float]()
    for gap in pair.gaps:
        part = slice(pair.sharing.shared_rows) if gap.is_paired else slice(pair.sharing.shared_rows, None)
        edges = np.unique(np.linspace(0, len(step_n[part]), MEANS + 1).round().astype(int))
        steps, means = (np.add.reduceat(each[part], edges[:-1]) / np.diff(edges) for each in (step_n, b_n - a_n))
        axes.plot(steps, means, color=_colour(gap.is_paired), linewidth=1)
        heights += np.quantile(means[steps >= gap.first], [0.1, 0.9]).tolist()  # without spikes
        heights += _draw_line(axes, gap)
    margin = max((gap.margin for gap in pair.gaps), default=0.0)
    for at in (-margin, margin):
        panels.level(axes, at, MARGIN, (0, (1, 1.5)))
    axes.axhline(0, color=style.INK, linewidth=0.9, zorder=1)
    low, high = min([-1.2 * margin, *heights]), max([1.2 * margin, *heights])
    axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _draw_line(axes: Axes, gap: Gap) -> list[float]:
    """Draw the line of a gap with its interval; returns the heights of its ends."""
    if np.isnan(gap.error):
        return []
    place_n = np.linspace(-0.5, 0.5, 21)
    step_n = gap.first + (place_n + 0.5) * (gap.last - gap.first)
    line_n = gap.mean + place_n * gap.change
    half_n = np.hypot(gap.half_width(), place_n * gap.change_half_width())
    area = axes.fill_between(
        step_n, line_n - half_n, line_n + half_n, color=_colour(gap.is_paired), alpha=0.25, linewidth=0
    )
    marks.name(area, INTERVAL)
    axes.plot(step_n, line_n, color=_colour(gap.is_paired), linewidth=2)
    return [*(line_n - half_n).tolist(), *(line_n + half_n).tolist()]


def _draw_events(
    axes: Axes, shown: Sequence[Sequence[SharedEvent]], names: Sequence[str], letters: dict[str, str]
) -> None:
    """A row of triangles for each log."""
    for row, (events, colour) in enumerate(zip(shown, (A, B), strict=True)):
        for is_alone in (True, False):
            some = [each for each in events if (bool(each.not_in_twins) and not each.in_twins) is is_alone]
            if not some:
                continue
            steps, heights = [each.event.step for each in some], [row] * len(some)
            (line,) = axes.plot(
                steps, heights, "v", color=colour, markersize=7, fillstyle="full" if is_alone else "none"
            )
            panels.add_hover_texts(axes, line, [event_sentence(each, letters) for each in some])
    axes.set_yticks([0, 1], names)
    axes.set_ylim(1.6, -0.6)
    axes.set_ylabel("events")
