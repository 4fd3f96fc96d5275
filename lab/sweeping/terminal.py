"""The live display of a sweep: progress of its fleets, and a sketch of loss against learning rate in text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TextIO

from lab.analysis.curves import FREE, name_arms, plain
from lab.core.printing import printable
from lab.records.status import clock
from lab.sweeping.planner import Point
from lab.sweeping.progress import FleetProgress, summary
from lab.training.config import RunConfig
from lab.training.identity import columns
from lab.training.recorder import ranges

BLOCKS = "▁▂▃▄▅▆▇█"
# Labels are cut down to this width to make room for numbers; if that is not enough, numbers are left out.
NARROW_LABEL = 16

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


def sketch(losses: Mapping[Cell, Sequence[float]], width: int) -> list[str]:
    """Draw losses in lines of at most ``width`` characters: a block per learning rate, and a number if there is room.

    Numbers are means over seeds with finite loss. An x marks a cell where a seed diverged.
    """
    curves, rates = list(dict.fromkeys(curve for curve, _ in losses)), sorted({rate for _, rate in losses})
    means = {cell: fmean(finite) for cell, values in losses.items() if (finite := list(filter(math.isfinite, values)))}
    low = min(means.values(), default=0.0)
    high = min(max(means.values(), default=0.0), 2 * low)  # higher losses would flatten the rest
    header = [_short(rate) for rate in rates]
    column = max(5, *map(len, header)) + 1
    longest = max(map(len, curves))
    roomy = min(longest, NARROW_LABEL) + column * len(rates) <= width
    head = "".join(f"{rate:>{column}}" for rate in header) if roomy else f" {header[0]}..{header[-1]}"
    label = max(1, min(longest, width - max(len(head), len(rates) + 1)))

    def mark(cell: Cell) -> str:
        values = losses.get(cell)
        if not values:
            return " " if values is None else "·"
        if not all(map(math.isfinite, values)):
            return "x"
        return BLOCKS[round(min(1, (means[cell] - low) / (high - low)) * 7) if high > low else 0]

    lines = [fit("loss so far", label) + head]
    for curve in curves:
        row = [(curve, rate) for rate in rates]
        numbered = [mark(cell) + (_number(means[cell]) if cell in means else "") for cell in row]
        text = "".join(f"{entry:>{column}}" for entry in numbered) if roomy else " " + "".join(map(mark, row))
        lines.append(fit(curve, label) + text)
    return [line[:width].rstrip() for line in lines]


def fit(text: str, width: int) -> str:
    """Pad or cut text to exactly ``width`` characters."""
    return f"{text:{width}}" if len(text) <= width else f"{text[: width - 1]}…"


def _short(rate: float) -> str:
    """``0.003 -> 3e-3``."""
    digits, power = f"{rate:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _number(loss: float) -> str:
    """A loss in at most four characters."""
    return f"{loss:.2f}"[:4].rstrip(".") if loss < 1000 else _short(float(f"{loss:.0e}"))


NARROWEST_BAR, WIDEST_BAR = 8, 24


class Scene(NamedTuple):
    """The fixed part of the display: label and cells of each fleet, and losses of runs trained before."""

    fleets: Sequence[tuple[str, Sequence[Cell]]]
    earlier: Sequence[tuple[Cell, float]]

    def lines(self, progress: Mapping[int, FleetProgress], done: float, elapsed: float, width: int) -> list[str]:
        """The display, in lines of at most ``width``; ``done`` is a share of the work, ``elapsed`` in seconds."""
        head = summary(progress, len(self.fleets), done, elapsed)
        lines = [head, *self.under_way(progress, width), "", *sketch(self.losses(progress), width)]
        return [line[:width].rstrip() for line in lines]

    def under_way(self, progress: Mapping[int, FleetProgress], width: int) -> list[str]:
        """A bar and numbers for each running fleet."""
        step = max((len(f"{fleet.steps}/{fleet.steps}") for fleet in progress.values()), default=4)
        head = f"{'step':>{step}}{'steps/s':>8}{'left':>8}{'diverged':>9}"
        longest = max(len(label) for label, _ in self.fleets)
        label = max(8, min(longest, width - len(head) - NARROWEST_BAR - 2))
        bar = max(0, min(WIDEST_BAR, width - len(head) - label - 2))
        return [f"{fit('under way', label)} {'':{bar}} {head}"] + [
            f"{fit(self.fleets[index][0], label)} {_bar(fleet, bar)} {_numbers(fleet, step)}"
            for index, fleet in sorted(progress.items())
            if not fleet.verdict
        ]

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


def _bar(fleet: FleetProgress, width: int) -> str:
    filled = round(width * fleet.step / fleet.steps)
    return "━" * filled + "╌" * (width - filled)


def _numbers(fleet: FleetProgress, width: int) -> str:
    left = "?" if fleet.left is None else clock(fleet.left)
    steps, runs = f"{fleet.step}/{fleet.steps}", len(fleet.losses)
    rate = f"{fleet.rate:.{fleet.rate < 10:d}f}" if fleet.rate else "?"
    diverged = f"{fleet.diverged}/{runs}" if fleet.diverged else ""
    return f"{steps:>{width}}{rate:>8}{left:>8}{diverged:>9}"


class Terminal:
    """A display at the bottom of a terminal, redrawn in place; printed lines scroll by above it."""

    def __init__(self, file: TextIO, scene: Scene) -> None:
        from rich.console import Console
        from rich.live import Live

        self.scene = scene
        self.console = Console(file=file, highlight=False, markup=False, emoji=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def say(self, text: str) -> None:
        """Print a line above the display."""
        self.console.print(printable(text), soft_wrap=True)

    def show(self, fleets: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Redraw the display."""
        from rich.text import Text

        lines = self.scene.lines(fleets, done, elapsed, self.console.width)
        text = Text(printable("\n".join(lines)), no_wrap=True)
        text.highlight_regex("━+", "cyan")
        text.highlight_regex(r"(?<= )x[\d.]*(?= |$)", "red")
        self.live.start()
        self.live.update(text, refresh=True)

    def close(self) -> None:
        """Clear the display and show the cursor again."""
        self.live.stop()
