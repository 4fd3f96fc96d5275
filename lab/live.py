"""What a terminal shows while a sweep trains: the whole, each fleet under way, loss against learning rate so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TextIO

from lab.progress import Standing
from lab.sketch import Place, fit, places, sketch
from lab.sweep import Point

NARROWEST_BAR, WIDEST_BAR = 8, 24


class Scene(NamedTuple):
    """What stays while a sweep trains: each fleet's label and the places of its runs, losses of runs trained before."""

    fleets: Sequence[tuple[str, Sequence[Place]]]
    known: Sequence[tuple[Place, float]]

    def lines(self, standings: Mapping[int, Standing], done: float, elapsed: float, width: int) -> list[str]:
        """The block, no line longer than ``width``; ``done`` is a share, ``elapsed`` in seconds."""
        ended = sum(bool(standing.verdict) for standing in standings.values())
        diverged = sum(standing.diverged for standing in standings.values())
        left = clock(elapsed / done * (1 - done)) if done > 0.01 else "?"
        time = f"{clock(elapsed)} elapsed, {left} left"
        whole = f"{done:4.0%}  {ended}/{len(self.fleets)} fleets  {diverged} diverged  {time}"
        lines = [whole, *self.under_way(standings, width), "", *sketch(self.losses(standings), width)]
        return [line[:width].rstrip() for line in lines]

    def under_way(self, standings: Mapping[int, Standing], width: int) -> list[str]:
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

    def losses(self, standings: Mapping[int, Standing]) -> dict[Place, list[float]]:
        """What is known of each place of the sketch."""
        found: dict[Place, list[float]] = {place: [] for _, places in self.fleets for place in places}
        for place, loss in self.known:
            found.setdefault(place, []).append(loss)
        for index, standing in standings.items():
            for place, said in zip(self.fleets[index][1], standing.losses, strict=False):
                found[place] += [] if said is None else [said]
        return found


def scene(fleets: Sequence[Sequence[Point]], there: Sequence[tuple[Point, float]]) -> Scene:
    """The scene of these fleets, beside runs that are there already with their losses."""
    points = [*(point for fleet in fleets for point in fleet), *(point for point, _ in there)]
    place_of = dict(zip((p.id for p in points), places([p.config for p in points]), strict=True))
    told = []
    for fleet in fleets:
        seeds = ",".join(map(str, sorted({point.config.seed for point in fleet})))
        curves = list(dict.fromkeys(place_of[point.id][0] for point in fleet))
        more = f" and {len(curves) - 1} more" if len(curves) > 1 else ""
        told.append((f"{curves[0]}{more}  seed {seeds}", [place_of[point.id] for point in fleet]))
    return Scene(told, [(place_of[point.id], loss) for point, loss in there])


def _bar(standing: Standing, width: int) -> str:
    filled = round(width * standing.step / standing.steps)
    return "━" * filled + "╌" * (width - filled)


def _numbers(standing: Standing, width: int) -> str:
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

    def show(self, standings: Mapping[int, Standing], done: float, elapsed: float) -> None:
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
