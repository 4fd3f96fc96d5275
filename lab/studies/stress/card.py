"""The card of a recipe: what the crash test says of it, as text, as a page and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.analysis.rendering import html
from lab.analysis.rendering.layout import Drawing
from lab.analysis.text import count, finite, format_value, listed
from lab.studies.stress.battery import Battery, StressTest
from lab.studies.stress.lines import FAILS, NOT_JUDGED, OPEN, PASSES, VERDICTS, WEAK, Line, line_of, strips
from lab.studies.stress.measures import Outcomes, beats_bigram, best_lr, curve
from lab.studies.stress.page import card_body, card_figure

LIMITS = (
    "A card names mechanisms that a recipe cannot stand, and its headroom, in a model of {parameters} parameters. It "
    "does not say that a large run will spike, or when: published recipes of one architecture were stable at one size "
    "and spiked at another."
)


@dataclass(frozen=True)
class Card:
    """The card of a recipe; in a notebook it displays itself.

    Attributes:
        recipe: its name for readers.
        command: the command line that makes it.
        folder: of its records.
        lines: what it says of each test, in their order.
        losses: of the recipe itself, a row per learning rate and a column per seed; empty where no test uses them.
        bigram: loss of a bigram model of the text, nats per token; NaN without losses.
        trains: whether the recipe ends below it at any learning rate.
        parameters: of the model.
    """

    recipe: str
    command: str
    folder: Path
    lines: Sequence[Line]
    losses: pd.DataFrame
    bigram: float
    trains: bool
    parameters: int

    @property
    def table(self) -> pd.DataFrame:
        """A row per test."""
        rows = [
            {
                "test": line.test.title,
                "verdict": line.verdict,
                "value": line.number,
                "passes": line.zones[0],
                "fails": line.zones[1],
                "seeds": line.interval.n,
            }
            for line in self.lines
        ]
        return pd.DataFrame(rows)

    @property
    def best_loss(self) -> float:
        """Lowest loss over learning rates of the mean over seeds, nats per token; NaN without losses."""
        return float(self.losses.mean(axis=1).min()) if len(self.losses) else math.nan

    def figure(self) -> Drawing:
        """The strips of all tests."""
        return card_figure(self.lines)

    def _repr_html_(self) -> str:
        """What notebooks display."""
        return "\n".join(card_body(self.headline(), self.lines, self.table, self.notes()))

    def page(self) -> str:
        """A page of HTML."""
        made = [html.block(self.command), html.paragraph(f"Records: {self.folder}.")]
        body = card_body(self.headline(), self.lines, self.table, self.notes())
        return html.document(f"Crash test of {self.recipe}", [*body, html.section("How this was made", *made)])

    def headline(self) -> str:
        """Which tests it fails, in which it is weak or open, and which it passes."""
        if not self.trains:
            best = best_lr(self.losses)
            ends = f"{format_value(self.losses.index[0])} to {format_value(self.losses.index[-1])}"
            return (
                f"Not judged: at no learning rate from {ends} does it end below a bigram model, whose loss is "
                f"{self.bigram:.3f}; at {format_value(best)} it ends at {self.best_loss:.3f}. Give it more steps "
                "(steps=400), a longer warm-up (schedule.warmup=0.25) or another optimizer."
            )
        titles = {word: [line.test.title for line in self.lines if line.verdict == word] for word in VERDICTS}
        heads = {FAILS: "Fails", WEAK: "Weak", OPEN: "Open", PASSES: "Passes"}
        return " ".join(f"{heads[word]}: {listed(titles[word]) if titles[word] else 'none'}." for word in VERDICTS)

    def notes(self) -> list[str]:
        """What the numbers mean, and what they do not; a sentence each."""
        explained = [f"{line.test.title[0].upper()}{line.test.title[1:]}: {line.test.means}." for line in self.lines]
        best = f"The best learning rate is {format_value(best_lr(self.losses))}." if len(self.losses) else ""
        intervals = (
            "Intervals are 95 % over seeds; where one is wider than the gap between the zones, the test is open."
        )
        bound = any(line.is_bound for line in self.lines)
        at_least = "At least: the loss has not risen at the last learning rate tried." if bound else ""
        limits = LIMITS.format(parameters=count(self.parameters))
        return [sentence for sentence in (*explained, best, intervals, at_least, limits) if sentence]

    def text(self) -> Iterator[str]:
        """Yield its lines for a terminal."""
        yield f"Crash test of {self.recipe}"
        yield self.headline()
        yield ""
        yield from strips(self.lines)
        yield ""
        yield from self.notes()

    def as_json(self) -> str:
        """The card as a JSON object; null where a number is unknown."""
        best = best_lr(self.losses) if len(self.losses) else None
        content = {
            "recipe": self.recipe,
            "command": self.command,
            "folder": str(self.folder),
            "headline": self.headline(),
            "is_judged": self.trains,
            "best_lr": best,
            "best_loss": finite(self.best_loss),
            "loss_bigram": finite(self.bigram),
            "parameters": self.parameters,
            "tests": [_plain(line) for line in self.lines],
        }
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)


def _plain(line: Line) -> dict[str, Any]:
    test, interval = line.test, line.interval
    return {
        "name": test.name,
        "title": test.title,
        "verdict": line.verdict,
        "value": finite(interval.mean),
        "low": finite(interval.low),
        "high": finite(interval.high),
        "unit": test.unit,
        "is_lower_bound": line.is_bound,
        "seeds": list(interval.values),
        "stuck_seeds": line.stuck,
        "passes": test.passes,
        "fails": test.fails,
        "failure": test.failure,
        "source": test.source,
        "means": test.means,
    }


def card_of(
    recipe: str, command: str, folder: Path, tests: Sequence[StressTest], done: Outcomes, battery: Battery
) -> Card:
    """The card that these runs make; tests some of whose runs are missing are left out."""
    losses = curve(done)
    lines = [line for test in tests if (line := line_of(test, done, battery))]
    trains = not len(losses) or beats_bigram(done)
    if not trains:
        lines = [line._replace(verdict=NOT_JUDGED) for line in lines]
    tables = list(done.values())
    bigram = float(tables[0]["loss_bigram"].mean()) if len(losses) else math.nan
    parameters = int(tables[0]["parameters"].iloc[0]) if tables else 0
    return Card(recipe, command, folder, lines, losses, bigram, trains, parameters)
