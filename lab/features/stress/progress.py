"""The progress of a crash test: the strips of the tests that have ended, in colour on a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from lab.analysis.stress.lines import STRIP, Line, strips, zone_at
from lab.core.printing import printable, say
from lab.records.plans import FleetProgress
from lab.records.status import clock
from lab.sweeping.progress import busy

# Seconds whose pace foretells the rest; the fewest of them, and the least share of a round, that tell a pace.
PACE_OF, FIRST_PACE, LEAST_DONE = 60.0, 5.0, 0.01
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
        self.round, self.rounds, self.later = 0, 0, 0.0
        self.seen = deque[tuple[float, float]]()  # seconds into a round, and the share of its work that was done
        self.lines: dict[str, Line] = {}
        self.started = time.monotonic()
        self.due = self.started + LINE_EVERY
        self.live = (
            Live(console=Console(stderr=True), transient=True, auto_refresh=False) if sys.stderr.isatty() else None
        )
        if self.live:
            self.live.start()

    def begin(self, rounds: int, later: float) -> None:
        """Begin a round of training.

        Args:
            rounds: how many more there will be, as far as is known.
            later: their work over that of this round.
        """
        self.round, self.later = self.round + 1, later
        self.rounds = self.round + rounds
        self.seen.clear()

    def left(self, done: float, elapsed: float) -> float | None:
        """Seconds left of all rounds at the pace of the last minute; None as long as too little is done."""
        self.seen.append((elapsed, done))
        while len(self.seen) > 2 and self.seen[1][0] <= elapsed - PACE_OF:
            self.seen.popleft()
        (since, before), whole = self.seen[0], 1 - done + self.later
        if elapsed - since < FIRST_PACE or done - before < LEAST_DONE:
            return None if done < LEAST_DONE else elapsed / done * whole
        return (elapsed - since) / (done - before) * whole

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
        left, now = self.left(done, elapsed), time.monotonic()
        number = f"round {self.round} of {self.rounds}" if self.rounds > 1 else ""
        time_left = "" if left is None else f"{clock(left)} left"
        parts = [self.stage, number, f"{clock(now - self.started)} elapsed", time_left, busy(fleets)]
        line = ", ".join(filter(None, parts))
        if self.live:
            head = Text(f"{done:4.0%} of it  {line}", no_wrap=True, overflow="crop")
            self.live.update(Group(*coloured(list(self.lines.values())), head), refresh=True)
        elif now >= self.due:
            self.due = now + LINE_EVERY
            say(f"lab: {self.recipe}: {line}", error=True)

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
