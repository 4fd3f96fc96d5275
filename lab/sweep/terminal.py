"""The live display of a sweep: progress of its fleets, and loss against learning rate as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TextIO

from lab.analysis.curves import FREE, name_arms, plain
from lab.sweep.planner import Point
from lab.sweep.progress import FleetProgress
from lab.training.config import RunConfig, columns

BLOCKS = "▁▂▃▄▅▆▇█"
# Whole labels give way to numbers down to this width; below it, numbers give way to labels.
NARROW_LABEL = 16

Cell = tuple[str, float]  # a curve, by size and arm, and a learning rate


def cells(configs: Sequence[RunConfig]) -> list[Cell]:
    """Where each run stands in the sketch; arms are called what the report will call them."""
    rows = [columns(config) for config in configs]
    keys = sorted({key for row in rows for key in row if key not in FREE and not key.startswith("probes.")})
    curves = [{key: plain(row.get(key)) for key in keys} for row in rows]
    distinct = {tuple(curve.values()): place for place, curve in enumerate(curves)}
    shapes = [(config.model.width, config.model.depth) for config in configs]
    sizes = [12 * depth * width**2 + width for width, depth in shapes]
    arms = name_arms([curves[place] for place in distinct.values()], [sizes[place] for place in distinct.values()])
    arm_of = dict(zip(distinct, arms, strict=True))
    told_by_width = len({width for width, _ in shapes}) == len(set(shapes))
    names = [f"width {width}" if told_by_width else f"width {width} depth {depth}" for width, depth in shapes]
    return [
        (f"{name}  {arm_of[tuple(curve.values())].label}", config.optimizer.lr)
        for name, curve, config in zip(names, curves, configs, strict=True)
    ]


def sketch(losses: Mapping[Cell, Sequence[float]], width: int) -> list[str]:
    """Lines of at most ``width`` characters: a block and a number per learning rate, blocks alone when it is narrow.

    Seeds are averaged, those that are finite; x marks a place where one diverged, and stands alone where all did.
    """
    curves, rates = list(dict.fromkeys(curve for curve, _ in losses)), sorted({rate for _, rate in losses})
    means = {place: fmean(finite) for place, said in losses.items() if (finite := list(filter(math.isfinite, said)))}
    low = min(means.values(), default=0.0)
    high = min(max(means.values(), default=0.0), 2 * low)  # what is worse still would flatten the rest
    header = [_short(rate) for rate in rates]
    cell = max(5, *map(len, header)) + 1
    longest = max(map(len, curves))
    roomy = min(longest, NARROW_LABEL) + cell * len(rates) <= width
    head = "".join(f"{rate:>{cell}}" for rate in header) if roomy else f" {header[0]}..{header[-1]}"
    label = max(1, min(longest, width - max(len(head), len(rates) + 1)))

    def mark(place: Cell) -> str:
        said = losses.get(place)
        if not said:
            return " " if said is None else "·"
        if not all(map(math.isfinite, said)):
            return "x"
        return BLOCKS[round(min(1, (means[place] - low) / (high - low)) * 7) if high > low else 0]

    lines = [fit("loss so far", label) + head]
    for curve in curves:
        row = [(curve, rate) for rate in rates]
        cells = [mark(place) + (_number(means[place]) if place in means else "") for place in row]
        text = "".join(f"{one:>{cell}}" for one in cells) if roomy else " " + "".join(map(mark, row))
        lines.append(fit(curve, label) + text)
    return [line[:width].rstrip() for line in lines]


def fit(text: str, width: int) -> str:
    """Exactly ``width`` characters."""
    return f"{text:{width}}" if len(text) <= width else f"{text[: width - 1]}…"


def _short(rate: float) -> str:
    """``0.003 -> 3e-3``."""
    digits, power = f"{rate:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _number(loss: float) -> str:
    """Four characters at most."""
    return f"{loss:.2f}"[:4].rstrip(".") if loss < 1000 else _short(float(f"{loss:.0e}"))


NARROWEST_BAR, WIDEST_BAR = 8, 24


class Scene(NamedTuple):
    """What stays while a sweep trains: each fleet's label and the places of its runs, losses of runs trained before."""

    fleets: Sequence[tuple[str, Sequence[Cell]]]
    known: Sequence[tuple[Cell, float]]

    def lines(self, standings: Mapping[int, FleetProgress], done: float, elapsed: float, width: int) -> list[str]:
        """The block, no line longer than ``width``; ``done`` is a share, ``elapsed`` in seconds."""
        ended = sum(bool(standing.verdict) for standing in standings.values())
        diverged = sum(standing.diverged for standing in standings.values())
        left = clock(elapsed / done * (1 - done)) if done > 0.01 else "?"
        time = f"{clock(elapsed)} elapsed, {left} left"
        whole = f"{done:4.0%}  {ended}/{len(self.fleets)} fleets  {diverged} diverged  {time}"
        lines = [whole, *self.under_way(standings, width), "", *sketch(self.losses(standings), width)]
        return [line[:width].rstrip() for line in lines]

    def under_way(self, standings: Mapping[int, FleetProgress], width: int) -> list[str]:
        """A bar and its numbers for each fleet that runs."""
        step = max((len(f"{standing.steps}/{standing.steps}") for standing in standings.values()), default=4)
        head = f"{'step':>{step}}{'steps/s':>8}{'left':>8}{'diverged':>9}"
        longest = max(len(label) for label, _ in self.fleets)
        label = max(8, min(longest, width - len(head) - NARROWEST_BAR - 2))
        bar = max(0, min(WIDEST_BAR, width - len(head) - label - 2))
        return [f"{fit('under way', label)} {'':{bar}} {head}"] + [
            f"{fit(self.fleets[index][0], label)} {_bar(standing, bar)} {_numbers(standing, step)}"
            for index, standing in sorted(standings.items())
            if not standing.verdict
        ]

    def losses(self, standings: Mapping[int, FleetProgress]) -> dict[Cell, list[float]]:
        """What is known of each place of the sketch."""
        found: dict[Cell, list[float]] = {place: [] for _, places in self.fleets for place in places}
        for place, loss in self.known:
            found.setdefault(place, []).append(loss)
        for index, standing in standings.items():
            for place, said in zip(self.fleets[index][1], standing.losses, strict=False):
                found[place] += [] if said is None else [said]
        return found


def scene(fleets: Sequence[Sequence[Point]], there: Sequence[tuple[Point, float]]) -> Scene:
    """The scene of these fleets, beside runs that are there already with their losses."""
    points = [*(point for fleet in fleets for point in fleet), *(point for point, _ in there)]
    place_of = dict(zip((p.id for p in points), cells([p.config for p in points]), strict=True))
    told = []
    for fleet in fleets:
        seeds = ",".join(map(str, sorted({point.config.seed for point in fleet})))
        curves = list(dict.fromkeys(place_of[point.id][0] for point in fleet))
        more = f" and {len(curves) - 1} more" if len(curves) > 1 else ""
        told.append((f"{curves[0]}{more}  seed {seeds}", [place_of[point.id] for point in fleet]))
    return Scene(told, [(place_of[point.id], loss) for point, loss in there])


def _bar(standing: FleetProgress, width: int) -> str:
    filled = round(width * standing.step / standing.steps)
    return "━" * filled + "╌" * (width - filled)


def _numbers(standing: FleetProgress, width: int) -> str:
    left = clock((standing.steps - standing.step) / standing.rate) if standing.rate else "?"
    steps, runs = f"{standing.step}/{standing.steps}", len(standing.losses)
    rate = f"{standing.rate:.{standing.rate < 10:d}f}" if standing.rate else "?"
    diverged = f"{standing.diverged}/{runs}" if standing.diverged else ""
    return f"{steps:>{width}}{rate:>8}{left:>8}{diverged:>9}"


def clock(seconds: float) -> str:
    """``75 -> 1:15``, ``3675 -> 1:01:15``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Terminal:
    """A block at the bottom of a terminal, drawn anew in place; what is said meanwhile scrolls by above it."""

    def __init__(self, file: TextIO, scene: Scene) -> None:
        from rich.console import Console
        from rich.live import Live

        self.scene = scene
        self.console = Console(file=file, highlight=False, markup=False, emoji=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def say(self, text: str) -> None:
        """A line above the block."""
        self.console.print(text, soft_wrap=True)

    def show(self, standings: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Draw the block anew."""
        from rich.text import Text

        text = Text("\n".join(self.scene.lines(standings, done, elapsed, self.console.width)), no_wrap=True)
        text.highlight_regex("━+", "cyan")
        text.highlight_regex(r"(?<= )x[\d.]*(?= |$)", "red")
        self.live.start()
        self.live.update(text, refresh=True)

    def close(self) -> None:
        """Clear the block and show the cursor again."""
        self.live.stop()
