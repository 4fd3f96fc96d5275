"""Two cards side by side: on which tests two recipes differ, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.crossings import rate_text
from lab.analysis.rendering.layout import Drawing
from lab.analysis.runaway import HALF
from lab.analysis.statistics import CHANGE_LEVEL, Interval, holm, student_t
from lab.analysis.stress.card_json import of_interval
from lab.analysis.stress.lines import Line, strips
from lab.analysis.stress.measures import FAILS_ABOVE, of_difference, pooled_difference, pooled_interval
from lab.analysis.text import format_p, listed
from lab.features.stress.card import SENTENCES, Card, card_figure
from lab.report.answer import Answer, Figure, InText, OnPage, Part, Section


class Pair(NamedTuple):
    """What two cards say of a test.

    Attributes:
        first: the line of the first card.
        second: the line of the second card.
        difference: the first measure minus the second over their common seeds, with its 95 % interval.
        p: of no difference, adjusted for all tests; NaN where they cannot be compared or nothing tells the spread.
    """

    first: Line
    second: Line
    difference: Interval
    p: float

    @property
    def tolerates_more(self) -> int:
        """0 if the first recipe certainly tolerates more, 1 if the second does, -1 if neither.

        A tolerance that is a lower bound shows that a recipe tolerates more, and never that it tolerates less.
        """
        if not self.p < CHANGE_LEVEL:
            return -1
        test = self.first.test
        better = 0 if (self.difference.mean < 0) == (test.passes < test.fails) else 1
        worse = (self.second, self.first)[better]
        return -1 if worse.is_bound else better

    @property
    def caveats(self) -> tuple[str, str]:
        """Why a small number of each recipe says nothing; where there is any, the two cannot be compared."""
        return self.first.caveat, self.second.caveat

    @property
    def number(self) -> str:
        """The difference with its interval and its unit; empty where the two cannot be compared."""
        if any(self.caveats):
            return ""
        if math.isnan(self.difference.mean):
            return "no value"
        return f"{self.difference:±+.2f} {self.first.test.unit}"


def pairs_of(first: Card, second: Card) -> list[Pair]:
    """What two cards say of each test that both have."""
    others = {line.test.name: line for line in second.lines}
    both = [(line, others[line.test.name]) for line in first.lines if line.test.name in others]
    found = []
    for line, other in both:
        spread, seeds = line.test.spread, [seed for seed in line.seeds if seed in other.seeds]
        old, new = other.by_seed.loc[seeds], line.by_seed.loc[seeds]
        change = pooled_difference(old, new, spread)
        is_comparable = not (line.caveat or other.caveat)
        p = change.p() if is_comparable and math.isfinite(change.error) else math.nan
        found.append((pooled_interval(list(new - old), of_difference(spread)), p))
    ps = holm([p for _, p in found])
    return [Pair(*lines, interval, p) for lines, (interval, _), p in zip(both, found, ps, strict=True)]


@dataclass(frozen=True)
class CardPair:
    """The cards of two recipes side by side; in a notebook it displays itself.

    Attributes:
        cards: of the two recipes.
        command: the command line that makes them.
        pairs: what they say of each test that both have.
    """

    cards: tuple[Card, Card]
    command: str
    pairs: Sequence[Pair]

    @property
    def names(self) -> tuple[str, str]:
        """The names of the recipes for readers, without changes that both have."""
        names = []
        for card in self.cards:
            recipe, _, changes = card.recipe.partition(" with ")
            names.append(_with(recipe, [word for word in changes.split() if word not in self.shared]))
        return names[0], names[1]

    @property
    def shared(self) -> list[str]:
        """The changes that both recipes have, such as ``steps=400``."""
        first, second = (card.recipe.partition(" with ")[2].split() for card in self.cards)
        return [word for word in first if word in second]

    @property
    def lines(self) -> list[Line]:
        """The lines of both cards, test by test."""
        return [line for pair in self.pairs for line in pair[:2]]

    @property
    def title(self) -> str:
        """``Crash test of olmo2 and llama with steps=400``."""
        return _with(f"Crash test of {' and '.join(self.names)}", self.shared)

    @property
    def table(self) -> pd.DataFrame:
        """A row per test: both numbers, the first minus the second, and which recipe tolerates more."""
        first, second = self.names
        rows = [
            {
                "test": pair.first.test.title,
                first: pair.first.outcome,
                second: pair.second.outcome,
                "difference": pair.number,
                "p (Holm)": format_p(pair.p),
                "tolerates more": self.names[pair.tolerates_more] if pair.tolerates_more >= 0 else "",
            }
            for pair in self.pairs
        ]
        return pd.DataFrame(rows)

    def headline(self) -> str:
        """On which tests they differ, and which recipe tolerates more."""
        if unjudged := [name for name, card in zip(self.names, self.cards, strict=True) if not card.is_judged]:
            verb = "is" if len(unjudged) == 1 else "are"
            return f"Not judged: {listed(unjudged)} {verb} no better than a bigram model at any learning rate."
        compared = [pair for pair in self.pairs if not any(pair.caveats)]
        titles = {
            who: [f"{pair.first.test.title} ({pair.number})" for pair in compared if pair.tolerates_more == who]
            for who in (0, 1, -1)
        }
        sentences = [
            f"{name} tolerates more: {listed(titles[who])}." for who, name in enumerate(self.names) if titles[who]
        ]
        if titles[-1]:
            sentences.append(f"No difference found: {listed(titles[-1])}.")
        if others := [pair.first.test.title for pair in self.pairs if any(pair.caveats)]:
            sentences.append(f"Not compared: {listed(others)}.")
        return " ".join(sentences) or "They have no test in common."

    def failing_line(self) -> str:
        """From which learning rates the two fail, and by how many decades these differ; empty if one is not judged."""
        if not all(card.is_judged and len(card.losses) for card in self.cards):
            return ""
        failing = [pd.Series(card.failing_lrs, dtype=float).map(math.log10) for card in self.cards]
        sentence = SENTENCES.fails_from(
            names=self.names,
            from_which=[card.fails_from for card in self.cards],
            fails_above=FAILS_ABOVE,
            **_difference(*failing),
        )
        halves = [card.passings[HALF] for card in self.cards if HALF in card.passings]
        if len(halves) < len(self.cards):
            return str(sentence)
        logs = [pd.Series({seed: found.log_at for seed, found in half.seeds.items()}) for half in halves]
        rates = [rate_text(half.rate) for half in halves]
        return f"{SENTENCES.fails_by_half(names=self.names, rates=rates, **_difference(*logs))} {sentence}"

    def figure(self) -> Drawing:
        """The strips of all tests, those of the two recipes one below the other."""
        recipes = self.names * len(self.pairs)
        names = [f"{line.test.title}, {name}: {line.verdict}" for line, name in zip(self.lines, recipes, strict=True)]
        return card_figure(self.lines, names)

    def notes(self) -> list[str]:
        """What the numbers mean, and what they do not; a sentence each."""
        notes = SENTENCES.notes_of_pair(
            is_bound=any(line.is_bound for line in self.lines),
            is_capped=any(line.capped and line.shown_values for line in self.lines),
            caveats=[
                (name, pair.first.test.title, caveat)
                for pair in self.pairs
                for name, caveat in zip(self.names, pair.caveats, strict=True)
                if caveat and all(card.is_judged for card in self.cards)  # else the headline says it
            ],
            left_out=[(card.recipe, *reason) for card in self.cards for reason in card.left_out.items()],
            parameters=" and ".join(dict.fromkeys(card.size for card in self.cards)),
        )
        return [*(pair.first.test.explained for pair in self.pairs), *notes.splitlines()]

    @property
    def answer(self) -> Answer:
        """Its text, its page and its JSON."""
        figure, short = Figure("cards", self.figure, list(strips(*self.strips()))), ["test", "difference", "p (Holm)"]
        parts: list[Part] = [
            self.failing_line(),
            *[figure, OnPage([self.table]), InText([self.table.filter([*short, "tolerates more"])])] * bool(self.pairs),
            Section("What the numbers mean, and what they do not", [self.notes()]),
        ]
        data = {
            "recipes": self.names,
            "command": self.command,
            "headline": self.headline(),
            "tests": [self._plain(pair) for pair in self.pairs],
            "cards": [card.answer.data for card in self.cards],
        }
        made = [f"Records of {card.recipe}: {card.folder}." for card in self.cards]
        return Answer(self.headline(), parts, title=self.title, command=self.command, data=data, made=made)

    def _repr_html_(self) -> str:
        """What notebooks display."""
        return self.answer._repr_html_()

    def strips(self) -> tuple[list[Line], list[str]]:
        """The lines of both cards, test by test, and the name of each."""
        width = max((len(pair.first.test.title) for pair in self.pairs), default=0)
        return self.lines, [f"{pair.first.test.title:{width}}  {name}" for pair in self.pairs for name in self.names]

    def _plain(self, pair: Pair) -> dict[str, Any]:
        test = pair.first.test
        return {
            "name": test.name,
            "title": test.title,
            "unit": test.unit,
            **of_interval(pair.difference, "difference", "low", "high"),
            "p": pair.p,
            "reasons": [f"{name}: {caveat}" for name, caveat in zip(self.names, pair.caveats, strict=True) if caveat],
            "tolerates_more": self.names[pair.tolerates_more] if pair.tolerates_more >= 0 else None,
        }


def _difference(first: pd.Series[float], second: pd.Series[float]) -> dict[str, Any]:
    """What a sentence says of the difference of two logarithms, paired by seed; without words where none is known."""
    difference = student_t((first - second).dropna())
    return {
        "decades": f"{difference:±+.2f}" if difference.n else "",
        "may_be_none": not difference.low * difference.high > 0,
    }


def _with(name: str, changes: Sequence[str]) -> str:
    return f"{name} with {' '.join(changes)}" if changes else name


def card_pair(first: Card, second: Card, command: str) -> CardPair:
    """Two cards side by side."""
    return CardPair((first, second), command, pairs_of(first, second))
