"""The progress of a crash test: the strips of the tests that have ended, in colour on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lab.core.printing import printable, say
from lab.features.stress.lines import STRIP, Line, strips, zone_at
from lab.records.plans import FleetProgress
from lab.records.status import clock
from lab.sweeping.progress import seconds_left, summary

LINE_EVERY = 60.0  # seconds between two lines of progress where there is no terminal


COLOURS = {"passes": "green", "weak": "yellow", "fails": "red"}


class Progress:
    """Shows the strips of the tests that have ended: on a terminal above a line of progress, elsewhere as they end.

    Elsewhere it also prints a line of progress about once a minute.

    Args:
        recipe: its name for readers.
    """

    def __init__(self, recipe: str) -> None:
        self.recipe, self.stage = recipe, "tests"
        self.lines: dict[str, Line] = {}
        self.started = time.monotonic()
        self.due = self.started + LINE_EVERY
        self.live = (
            Live(console=Console(stderr=True), transient=True, auto_refresh=False) if sys.stderr.isatty() else None
        )
        if self.live:
            self.live.start()

    def add(self, lines: Sequence[Line]) -> None:
        """Show the tests that have ended since."""
        new = [line for line in lines if line.test.name not in self.lines]
        self.lines |= {line.test.name: line for line in new}
        if not self.live:
            for text in strips(new):
                say(text, error=True)

    def show(self, fleets: Mapping[int, FleetProgress], done: float, elapsed: float) -> None:
        """Redraw: progress of each fleet that has started, the share of work done, and the seconds elapsed.

        The last two are those of a round of training, of which a card has several.
        """
        if self.live:
            head = Text(summary(fleets, len(fleets), done, elapsed), no_wrap=True, overflow="crop")
            self.live.update(Group(*coloured(list(self.lines.values())), head), refresh=True)
        elif (now := time.monotonic()) >= self.due:
            self.due = now + LINE_EVERY
            left = seconds_left(done, elapsed)
            more = "" if left is None else f", {clock(left)} left of this round"
            say(f"lab: {self.recipe}: {self.stage}, {clock(now - self.started)} elapsed{more}", error=True)

    def close(self) -> None:
        """Leave the strips on the screen until the next round."""

    def end(self) -> None:
        """Clear the screen for the card."""
        if self.live:
            self.live.stop()


def coloured(lines: Sequence[Line], names: Sequence[str] = ()) -> list[Text]:
    """The strips of a card with zones in colour."""
    texts = []
    for plain in strips(lines, names):
        text = Text(printable(plain), no_wrap=True, overflow="crop")
        start = plain.rindex("[") + 1  # a name may have brackets, too
        for place in range(STRIP):
            text.stylize(COLOURS[zone_at((place + 0.5) / STRIP)], start + place, start + place + 1)
        texts.append(text)
    return texts
