"""Write which seeds would decide each open claim, and what they cost: ``python results/power.py``.

Into the header of its sweep and into the table of the README, by the spread of the committed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from lab.analysis.contrasts import MOST_SEEDS, POWER, seeds_for
from lab.analysis.statistics import FEWEST_SEEDS
from lab.core import shipped
from studies.claims.decision import ABOVE_ZERO, ALPHA, INCONCLUSIVE, alpha_of, next_reading
from studies.claims.effects import Qualified
from studies.claims.evidence import Evidence
from studies.claims.scoreboard import ScoreboardRow, judge_all, read
from studies.claims.verdicts import CONTROLLED, MARGINS, UNDERTRAINED, effects_of

RESULTS = Path(__file__).parent
MARKS = ("<!-- open claims -->", "<!-- end of open claims -->")
HEAD = f"# Open claims, at {POWER:.0%} power if means stay what they are (python results/power.py):"
INDENT = "#   - "


class OpenClaim(NamedTuple):
    """An inconclusive claim, and the seeds that would decide it with probability ``POWER`` if its means do not change.

    Attributes:
        seeds: number of fresh seeds so far; on fresh seeds the rule of the claim was not made.
        more: number of seeds needed besides; infinite if ``MOST_SEEDS`` are too few, NaN if seeds cannot decide it.
        hours: core-hours of these seeds for the whole sweep.
        longer: the number of steps for which these seeds must be trained, if today's runs are too short; else 0.
    """

    row: ScoreboardRow
    seeds: int
    more: float
    hours: float
    longer: int

    def __str__(self) -> str:
        if math.isnan(self.more):
            return f"seeds do not decide: {self.obstacle}"
        if math.isinf(self.more):
            return f"more than {MOST_SEEDS:,} seeds"
        seeds = f"{self.more:.0f} {'more' if self.seeds else 'fresh'} seed{'s' * (self.more > 1)}"
        steps = f" of {self.longer:,} steps" if self.longer else ""
        return f"{seeds}{steps}, {self.hours_spelled} core-hours"

    @property
    def obstacle(self) -> str:
        """The reason why no number of seeds decides it."""
        if self.row.verdict.reason.startswith(UNDERTRAINED):
            return "S and its instability part disagree, which takes longer runs"
        return "the control lies on the other side of zero"

    @property
    def hours_spelled(self) -> str:
        """Core-hours to two digits."""
        return f"{self.hours:.0f}" if self.hours >= 10 else f"{self.hours:.2g}"


# Sweeps whose runs are too short, with the factor by which they should be longer, and the number of steps.
LONGER = {"mup": (20, 4000), "learning_rate_and_batch": (20, 4000)}


def open_claims(rows: Iterable[ScoreboardRow], folders: Sequence[Evidence]) -> Iterator[OpenClaim]:
    """Yield each inconclusive claim of these rows of the scoreboard, with the seeds that would decide it."""
    for row in rows:
        if row.verdict.verdict == INCONCLUSIVE and row.verdict.seeds >= FEWEST_SEEDS:
            arms, effects = effects_of(row.claim, folders)
            evidence, more = arms[0].evidence, math.nan
            fresh = row.verdict.seeds if row.claim.name in evidence.readings else 0
            if not row.verdict.reason.startswith(UNDERTRAINED):
                alpha = alpha_of(next_reading(evidence.readings.get(row.claim.name, ())))
                more = seeds_to_decide(row, effects, alpha) - fresh
            runs, (factor, steps) = evidence.records.runs, LONGER.get(row.claim.sweep, (1, 0))
            hours = factor * float(runs["wall_seconds"].sum()) / runs["seed"].nunique() / 3600
            yield OpenClaim(row, fresh, more, more * hours, steps)


def seeds_to_decide(row: ScoreboardRow, effects: Qualified, alpha: float) -> float:
    """The fewest seeds by which ``decide`` reaches a verdict: reproduced, no effect, or contradicted by one part.

    If the control is too weak, the seeds that would show it; NaN if its mean lies below zero.
    """
    claim = row.claim
    if row.verdict.reason.startswith(CONTROLLED):
        return max(
            seeds_for(interval.mean, interval.sd, ALPHA) if interval.mean > 0 else math.nan
            for interval in effects.weak_controls()
        )
    (low, high), intervals = claim.side, effects.intervals()
    margin = MARGINS.get(claim.unit, 0.0) if claim.side == ABOVE_ZERO else 0.0
    inside = [seeds_for(min(interval.mean - low, high - interval.mean), interval.sd, alpha) for interval in intervals]
    none = [seeds_for(margin - abs(interval.mean), interval.sd, alpha) for interval in intervals]
    against = [
        seeds_for(
            max(low - interval.mean, interval.mean - high, margin - abs(interval.mean)),
            interval.sd,
            alpha / len(intervals),
        )
        for interval in intervals
    ]
    return min(max(inside), max(none), min(against))


def in_header(text: str, claims: Iterable[OpenClaim]) -> str:
    """The text of a sweep whose header ends with a line for each of its open claims, and with no other such lines."""
    lines = [line for line in text.splitlines() if line != HEAD and not line.startswith(INDENT)]
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    shown = [f"{INDENT}{claim.row.claim.name}: {claim}" for claim in claims]
    return "\n".join([*lines[:end], *[HEAD] * bool(shown), *shown, *lines[end:]]) + "\n"


def table(claims: Iterable[OpenClaim]) -> Iterator[str]:
    """The lines of the table of the README."""
    yield from ("| claim | sweep | seeds | what would decide it |", "|---|---|---:|---|")
    for claim in claims:
        stated = claim.row.claim
        sentence = f"{stated.sentence} ({stated.source}, {claim.row.figure})"
        yield f"| {sentence} | {stated.sweep} | {claim.seeds} | {claim} |"


def written(claims: list[OpenClaim]) -> Iterator[tuple[Path, str]]:
    """Each file that names open claims, and the text that it should have."""
    by_sweep = {
        name: list(each)
        for name, each in groupby(sorted(claims, key=lambda one: one.row.claim.sweep), lambda one: one.row.claim.sweep)
    }
    for name, path in shipped.sweeps().items():
        yield path, in_header(path.read_text(), by_sweep.get(name, []))
    page = RESULTS / "README.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    yield page, "\n".join([before + MARKS[0], *table(claims), MARKS[1]]) + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    folders = read([RESULTS])
    rows = judge_all(folders)
    for path, text in written(list(open_claims(rows, folders))):
        if path.read_text() != text:
            path.write_text(text)
