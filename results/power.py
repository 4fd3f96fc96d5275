"""Write which seeds would decide each open claim, and what they cost: ``python results/power.py``.

Into the header of its sweep and into the table of the README, by the spread of the committed seeds.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from lab.core import shipped
from lab.report.power import POWER, OpenClaim, open_claims
from lab.report.scoreboard import judge_all, read

RESULTS = Path(__file__).parent
MARKS = ("<!-- open claims -->", "<!-- end of open claims -->")
HEAD = f"# Open claims, at {POWER:.0%} power if means stay what they are (python results/power.py):"
INDENT = "#   - "


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
