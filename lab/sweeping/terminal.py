"""The live display of a sweep in a terminal: a bar for each fleet, and a sketch of loss against learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from lab.analysis.curves import FREE, name_arms, plain
from lab.core.printing import printable
from lab.records.plans import FleetProgress
from lab.records.status import clock
from lab.sweeping.planner import Point
from lab.sweeping.progress import summary
from lab.training.config import RunConfig
from lab.training.identity import columns
from lab.training.recorder import ranges

BLOCKS = "▁▂▃▄▅▆▇█"
LABEL, NUMBER = 16, 7  # characters; where there is no room for both, the sketch leaves out numbers
NARROWEST_BAR, WIDEST_BAR = 8, 24

Cell = tuple[str, float]  # a curve, by size and arm, and a learning rate


def cells(configs: Sequence[RunConfig]) -> list[Cell]:
    """The cell of each run in the sketch; arms are named as in the report."""
    rows = [columns(config) for config in configs]
    keys = sorted({key for row in rows for key in row if key not in FREE and not key.startswith("probes.")})
    curves = [{key: plain(row.get(key)) for key in keys} for row in rows]
    index_of = {tuple(curve.values()): index for index, curve in enumerate(curves)}
    shapes = [(config.model.width, config.model.depth) for config in configs]
    sizes = [12 * depth * width**2 + width for width, depth in shapes]
    arms = name_arms([curves[i] for i in index_of.values()], [sizes[i] for i in index_of.values()])
    arm_of = dict(zip(index_of, arms, strict=True))
    width_tells = len({width for width, _ in shapes}) == len(set(shapes))
    names = [f"width {width}" if width_tells else f"width {width} depth {depth}" for width, depth in shapes]
    return [
        (f"{name}  {arm_of[tuple(curve.values())].label}", config.optimizer.lr)
        for name, curve, config in zip(names, curves, configs, strict=True)
    ]


def sketch(losses: Mapping[Cell, Sequence[float]], width: int) -> Table:
    """Sketch losses in at most ``width`` characters: a block per learning rate, and a number if there is room.

    Numbers are means over seeds with finite loss. An x marks a cell where a seed diverged.
    """
    curves, rates = list(dict.fromkeys(curve for curve, _ in losses)), sorted({rate for _, rate in losses})
    means = {cell: fmean(finite) for cell, values in losses.items() if (finite := list(filter(math.isfinite, values)))}
    low = min(means.values(), default=0.0)
    high = min(max(means.values(), default=0.0), 2 * low)  # higher losses would flatten the rest
    is_roomy = LABEL + NUMBER * len(rates) <= width

    def entry(cell: Cell) -> str:
        values = losses.get(cell)
        if not values:
            return " " if values is None else "·"
        mark = "x"
        if all(map(math.isfinite, values)):
            mark = BLOCKS[round(min(1, (means[cell] - low) / (high - low)) * 7) if high > low else 0]
        return f"{mark}{means[cell]:.3g}" if is_roomy and cell in means else mark

    heads = [f"{rate:g}" for rate in rates]
    table = Table(Column("loss so far"), box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    for head in heads if is_roomy else [f"{heads[0]} to {heads[-1]}"]:
        table.add_column(Text(head, no_wrap=True), justify="right" if is_roomy else "left", no_wrap=True)
    for curve in curves:
        entries = [entry((curve, rate)) for rate in rates]
        row = [Text(mark, style="red" if mark.startswith("x") else "") for mark in entries]
        table.add_row(_label(curve), *(row if is_roomy else [Text.assemble(*row)]))
    return table


def _label(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


class Scene(NamedTuple):
    """The fixed part of the display: label and cells of each fleet, and losses of runs trained before."""

    fleets: Sequence[tuple[str, Sequence[Cell]]]
    earlier: Sequence[tuple[Cell, float]]

    def drawn(self, progress: Mapping[int, FleetProgress], done: float, elapsed: float, width: int) -> Group:
        """The display; ``done`` is a share of the work, ``elapsed`` in seconds."""
        head = Text(summary(progress, len(self.fleets), done, elapsed), no_wrap=True, overflow="crop")
        under_way = {index: _numbers(fleet) for index, fleet in sorted(progress.items()) if not fleet.verdict}
        room = width - max(map(len, under_way.values()), default=0) - 1
        longest = min(max(len(label) for label, _ in self.fleets), max(LABEL, room - NARROWEST_BAR - 1))
        shown: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
        if room - longest > NARROWEST_BAR:
            shown.append(BarColumn(min(WIDEST_BAR, room - longest - 1)))
        numbers = TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True))
        bars = Progress(*shown, numbers, auto_refresh=False)
        for index, text in under_way.items():
            label = _label(self.fleets[index][0])
            label.truncate(longest, overflow="ellipsis", pad=True)
            steps = progress[index].steps
            bars.add_task(label.plain, total=steps, completed=progress[index].step, numbers=text)
        return Group(head, bars.get_renderable(), "", sketch(self.losses(progress), width))

    def losses(self, progress: Mapping[int, FleetProgress]) -> dict[Cell, list[float]]:
        """The losses so far in each cell of the sketch."""
        losses: dict[Cell, list[float]] = {cell: [] for _, cells in self.fleets for cell in cells}
        for cell, known in self.earlier:
            losses.setdefault(cell, []).append(known)
        for index, fleet in progress.items():
            for cell, loss in zip(self.fleets[index][1], fleet.losses, strict=False):
                losses[cell] += [] if loss is None else [loss]
        return losses


def scene(fleets: Sequence[Sequence[Point]], earlier: Sequence[tuple[Point, float]]) -> Scene:
    """The scene of these fleets, and of runs trained earlier with their losses."""
    points = [*(point for fleet in fleets for point in fleet), *(point for point, _ in earlier)]
    cell_of = dict(zip((p.id for p in points), cells([p.config for p in points]), strict=True))
    labeled = []
    for fleet in fleets:
        seeds = ranges(point.config.seed for point in fleet)
        curves = list(dict.fromkeys(cell_of[point.id][0] for point in fleet))
        more = f" and {len(curves) - 1} more" if len(curves) > 1 else ""
        labeled.append((f"{curves[0]}{more}  seed {seeds}", [cell_of[point.id] for point in fleet]))
    return Scene(labeled, [(cell_of[point.id], loss) for point, loss in earlier])


def _numbers(fleet: FleetProgress) -> str:
    rate = f"{fleet.rate:.{fleet.rate < 10:d}f}/s" if fleet.rate else ""
    left = "" if fleet.left is None else f"{clock(fleet.left)} left"
    diverged = f"{fleet.diverged}/{len(fleet.losses)} diverged" if fleet.diverged else ""
    return "  ".join(filter(None, [f"step {fleet.step}/{fleet.steps}", rate, left, diverged]))


class Terminal:
    """A display at the bottom of a terminal, redrawn in place; printed lines scroll by above it."""

    def __init__(self, file: TextIO, scene: Scene) -> None:
        self.scene = scene
        self.console = Console(file=file, highlight=False, markup=False, emoji=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def say(self, text: str) -> None:
        """Print a line above the display."""
        self.console.print(printable(text), soft_wrap=True)

    def show(self, fleets: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Redraw the display."""
        self.live.start()
        self.live.update(self.scene.drawn(fleets, done, elapsed, self.console.width), refresh=True)

    def close(self) -> None:
        """Clear the display and show the cursor again."""
        self.live.stop()
