"""What became of arms in public runs of large models: how many of the single changes that were tried broke."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.core import shipped
from lab.studies.real_runs.curves import read_real_runs

FILE = Path(__file__).with_name("public_runs.yaml")


class Broken(NamedTuple):
    """How many public runs of a size broke: they end half a nat or more above the tuned base that they change."""

    size: str
    broken: int
    runs: int

    def __str__(self) -> str:
        return f"{self.broken} of {self.runs} at {self.size}"


@cache
def broken_public_runs() -> dict[str, list[Broken]]:
    """By arm the public runs that broke, for each size."""
    changes = read_real_runs().changes
    changes = changes[~changes["is_base"]]
    changes = changes.assign(is_higher=changes["ratio"] > 1, size=changes["size"].str.upper())
    found = {}
    for arm, about in shipped.load(FILE).items():
        mine = changes[(changes[list(about)] == list(about.values())).all(axis=1)]
        found[arm] = [
            Broken(str(size), int(breaks.sum()), len(breaks)) for size, breaks in mine.groupby("size")["breaks"]
        ]
    return found
